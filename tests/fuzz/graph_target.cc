// Fuzz target: index data of graphs with any contents (kvstore/read/indexes/graph.h): a search ends,
// stays inside the memory, and returns candidates.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kvstore/read/indexes/graph.h"
#include "kvstore/read/indexes/index_types.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/index_memory.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using kvstore::CodebookHeader;
using kvstore::IndexDataHeader;

constexpr uint32_t kSlots = 640, kGroup = 2, kKeyDim = 32, kSamples = 32;

kvstore::LayerShape Shape() {
  return {.dtype = kernels::DType::kF32,
          .key_dim = kKeyDim,
          .value_dim = 0,
          .kv_heads = 1,
          .query_heads = kGroup,
          .row_bytes = kKeyDim * sizeof(float)};
}

// One closed segment with its graphs.
class World {
 public:
  World() {
    const bool made =
        kvstore::MakeIndex("graph",
                           {{{.name = "degree", .value_name = {}, .number = 6},
                             {.name = "list_size", .value_name = {}, .number = 16},
                             {.name = "samples", .value_name = {}, .number = kSamples}}},
                           "index", &index_)
            .ok();
    if (!made) Found("no index");
    const kvstore::LayerShape shape = Shape();
    const kvstore::BuiltIndexType& type = kvstore::BuiltTypeOf(index_);
    codebook_ = std::make_unique<Memory>(type.CodebookBytes(index_, shape));
    auto* const codebook = new (codebook_->bytes().data()) CodebookHeader;
    codebook->index = index_;
    codebook->kv_head_count = 1;
    codebook->key_dim = kKeyDim;
    type.FormatCodebook(shape, codebook);
    type.PrepareTraining({.shape = shape,
                          .rows = {},
                          .samples = {.rows = reinterpret_cast<const std::byte*>(samples_.data()),
                                      .row_stride = kGroup * kKeyDim * sizeof(float),
                                      .position_count = kSamples,
                                      .queries_per_position = kGroup},
                          .keep_going = {},
                          .codebook = codebook},
                         {});
    data_ = std::make_unique<Memory>(type.DataBytes(index_, shape, kSlots));
    auto* const data = new (data_->bytes().data()) IndexDataHeader;
    data->index = index_;
    data->kv_head_count = 1;
    data->slot_capacity = kSlots;
    type.FormatData(shape, data);
    const kvstore::CloseArgs close{
        .shape = shape, .codebook = codebook, .rows = rows(), .slot_end = kSlots, .data = data};
    const Memory scratch(type.CloseScratchBytes(close));
    type.CloseHead(exec_, close, scratch.bytes());
    data->counted_end = kSlots;
    good_.assign(data_->bytes().begin(), data_->bytes().end());
  }

  // Makes the graphs as they were built.
  void Restore() { std::memcpy(data_->bytes().data(), good_.data(), good_.size()); }
  IndexDataHeader& data() { return *reinterpret_cast<IndexDataHeader*>(data_->bytes().data()); }
  std::span<std::byte> graphs() { return data_->bytes().subspan(data().plane_offset_bytes); }

  // Selects among the slots of two pieces.
  void Select(uint32_t begin, uint32_t end, uint32_t sharing_heads, uint32_t count) {
    kvstore::LayerShape shape = Shape();
    if (sharing_heads > 1) shape.kv_heads = shape.query_heads;
    const std::byte* const rows_of_head = rows();
    const kvstore::SegmentView segment{
        .first_position = 1000,
        .token_count = kSlots,
        .rows = {&rows_of_head, 1},
        .index_data = &data(),
        .codebook = reinterpret_cast<const CodebookHeader*>(codebook_->bytes().data())};
    const kvstore::SearchPiece pieces[] = {
        {.segment = &segment, .slot_begin = 0, .slot_end = begin},
        {.segment = &segment, .slot_begin = begin, .slot_end = end}};
    const CodebookHeader* const codebooks[] = {segment.codebook};
    const kvstore::SearchPlan plan{.pieces = pieces, .codebooks = codebooks, .token_count = end};
    const kvstore::IndexType& type = kvstore::TypeOf(index_);
    const size_t bytes =
        type.SelectScratch(exec_, shape, index_,
                           {.piece_count = 2, .codebook_count = 1, .token_count = end})
            .work_bytes;
    if (work_ == nullptr || work_->bytes().size() < bytes) work_ = std::make_unique<Memory>(bytes);
    std::vector<uint32_t> positions(std::min(count, end));
    for (uint32_t share = 0; share < sharing_heads; ++share) {
      type.Select({.exec = exec_,
                   .shape = shape,
                   .index = index_,
                   .plan = plan,
                   .kv_head = 0,
                   .sharing_heads = sharing_heads,
                   .sharing_head = share,
                   .queries = std::span(queries_).first(shape.group_size() * kKeyDim),
                   .prepared = {},
                   .work = work_->bytes()},
                  kernels::GroupRule::kSumSoftmax, positions);
      for (size_t i = 0; i < positions.size(); ++i) {
        if (positions[i] < 1000 || positions[i] >= 1000 + end) Found("no candidate was selected");
        if (i > 0 && positions[i] <= positions[i - 1]) Found("positions do not ascend");
      }
    }
  }

 private:
  const std::byte* rows() const { return reinterpret_cast<const std::byte*>(keys_.data()); }

  const kernels::Exec exec_{};
  const std::vector<float> keys_ = Numbers(size_t{kSlots} * kKeyDim, 1);
  const std::vector<float> samples_ = Numbers(size_t{kSamples} * kGroup * kKeyDim, 2);
  const std::vector<float> queries_ = Numbers(size_t{kGroup} * kKeyDim, 3);
  kvstore::IndexDescriptor index_;
  std::unique_ptr<Memory> codebook_, data_, work_;
  std::vector<std::byte> good_;
};

}  // namespace

// Entries and degrees of the first nodes that are large, neighbours that lead in circles, and slots
// that are not there.
std::vector<std::string> Seeds() {
  std::vector<std::string> seeds = {std::string(), std::string("\0\0\2", 3)};
  AddChanges(std::string("\0\0\1", 3), &seeds);
  return seeds;
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pqcached::fuzz;  // NOLINT: a target's one function
  static World world;
  world.Restore();
  Bytes bytes(data, size);
  const uint32_t begin = bytes.Byte() * 2u, spare = bytes.Byte() % 128u, count = bytes.Byte() % 16u;
  ChangeIndexData(bytes, world.data(), world.graphs());
  world.Select(begin, kSlots - spare, 1, count);
  world.Select(begin, kSlots - spare, kGroup, count);
  return 0;
}
