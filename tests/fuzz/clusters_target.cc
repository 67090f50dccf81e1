// Fuzz target: index data of clusters with any contents (kvstore/read/indexes/clusters.h): a tail
// estimate ends and stays inside the memory.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kvstore/read/indexes/clusters.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/tail.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/index_memory.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using kvstore::CodebookHeader;
using kvstore::IndexDataHeader;

constexpr uint32_t kSlots = 640, kGroup = 2, kDim = 32;

kvstore::LayerShape ClusterShape() {
  return {.dtype = kernels::DType::kF32,
          .key_dim = kDim,
          .value_dim = kDim,
          .kv_heads = 1,
          .query_heads = kGroup,
          .row_bytes = 2 * kDim * sizeof(float)};
}

// One closed segment with its clusters.
class ClusterWorld {
 public:
  ClusterWorld() {
    const bool made =
        kvstore::MakeIndex("clusters", {{{.name = "tokens", .value_name = {}, .number = 16}}},
                           "index", &index_)
            .ok();
    if (!made) Found("no index");
    const kvstore::LayerShape shape = ClusterShape();
    const kvstore::BuiltIndexType& type = kvstore::BuiltTypeOf(index_);
    data_ = std::make_unique<Memory>(type.DataBytes(index_, shape, kSlots));
    auto* const data = new (data_->bytes().data()) IndexDataHeader;
    data->index = index_;
    data->kv_head_count = 1;
    data->slot_capacity = kSlots;
    type.FormatData(shape, data);
    const kvstore::CloseArgs close{
        .shape = shape, .rows = rows(), .slot_end = kSlots, .data = data};
    const Memory scratch(type.CloseScratchBytes(close));
    type.CloseHead(exec_, close, scratch.bytes());
    data->counted_end = kSlots;
    good_.assign(data_->bytes().begin(), data_->bytes().end());
  }

  // Makes the clusters as they were built.
  void Restore() { std::memcpy(data_->bytes().data(), good_.data(), good_.size()); }
  IndexDataHeader& data() { return *reinterpret_cast<IndexDataHeader*>(data_->bytes().data()); }
  std::span<std::byte> clusters() { return data_->bytes().subspan(data().plane_offset_bytes); }

  // Estimates the tokens behind `begin` that are not selected.
  void Estimate(uint32_t begin, const std::vector<uint32_t>& positions) {
    const std::byte* const rows_of_head = rows();
    const kvstore::SegmentView segments[] = {{.first_position = 0,
                                              .token_count = kSlots,
                                              .rows = {&rows_of_head, 1},
                                              .index_data = &data()}};
    const kvstore::LayerView view{.shape = ClusterShape(), .segments = segments};
    const kvstore::PositionRange candidates[] = {{begin, kSlots}};
    const size_t most_clusters = kvstore::MostClusters(view, index_);
    const size_t bytes = kvstore::TailScratchBytes(view, most_clusters);
    if (work_ == nullptr || work_->bytes().size() < bytes) work_ = std::make_unique<Memory>(bytes);
    std::vector<float> output(kGroup * kDim, 1.0f), lse(kGroup, 1.0f);
    kvstore::AddTail(exec_, view,
                     {.index = index_,
                      .most_clusters = most_clusters,
                      .candidates = candidates,
                      .positions = positions,
                      .queries = queries_,
                      .output = output,
                      .lse = lse},
                     kvstore::SerialFor(), work_->bytes().first(bytes));
  }

 private:
  const std::byte* rows() const { return reinterpret_cast<const std::byte*>(rows_.data()); }

  const kernels::Exec exec_{};
  const std::vector<float> rows_ = Numbers(size_t{kSlots} * 2 * kDim, 1);
  const std::vector<float> queries_ = Numbers(size_t{kGroup} * kDim, 3);
  kvstore::IndexDescriptor index_;
  std::unique_ptr<Memory> data_, work_;
  std::vector<std::byte> good_;
};

}  // namespace

// Codes of clusters that are not there, numbers of tokens that are too small or large, and slots
// that are not there.
std::vector<std::string> Seeds() {
  std::vector<std::string> seeds = {std::string(), std::string("\0\2", 2)};
  AddChanges(std::string("\0\1", 2), &seeds);
  return seeds;
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pqcached::fuzz;  // NOLINT: a target's one function
  static ClusterWorld world;
  world.Restore();
  Bytes bytes(data, size);
  const uint32_t begin = bytes.Byte() * 2u;
  std::vector<uint32_t> positions;
  for (uint32_t i = bytes.Byte() % 16u; i > 0; --i) positions.push_back(kSlots - 8 * i);
  ChangeIndexData(bytes, world.data(), world.clusters());
  world.Estimate(begin, positions);
  return 0;
}
