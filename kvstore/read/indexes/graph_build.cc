#include <algorithm>
#include <cstring>

#include "kernels/base/dtype.h"
#include "kvstore/read/indexes/graph.h"

namespace pqcached::kvstore {
namespace {

kernels::GraphBuildSize SizeOf(const CloseArgs& args) {
  const GraphParameters parameters = GraphParametersOf(args.data->index);
  return {.key_count = args.slot_end - args.data->counted_begin,
          .sample_count = GraphSamplesOf(*args.codebook, args.kv_head).count,
          .key_dim = args.shape.key_dim,
          .options = {.list_size = parameters.list_size,
                      .degree = parameters.degree,
                      .entry_count = kernels::kMaxGraphEntries}};
}

// Returns the samples of a kv head of a codebook that is written.
std::byte* WritableHead(CodebookHeader& codebook, uint32_t kv_head) {
  return reinterpret_cast<std::byte*>(&codebook) + codebook.centroid_offset_bytes +
         kv_head * codebook.head_stride_bytes;
}

// Copies the newest sample and, of the others, as many as there is room for, evenly.
uint32_t CopySamples(const TrainingArgs& args, const GraphSamples& room) {
  const SampledQueries& from = args.samples;
  const uint32_t count = std::min(from.position_count, room.capacity);
  const size_t query_bytes = args.shape.key_dim * kernels::DTypeBytes(args.shape.dtype);
  auto* const floats = const_cast<float*>(room.floats);
  for (uint32_t i = 0; i < count; ++i) {
    const auto position =
        static_cast<uint32_t>(uint64_t{from.position_count} * (i + 1) / count - 1);
    for (uint32_t head = 0; head < from.queries_per_position; ++head) {
      kernels::ConvertElements(
          args.shape.dtype, from.rows + position * from.row_stride + head * query_bytes,
          kernels::DType::kF32,
          reinterpret_cast<std::byte*>(floats +
                                       (size_t{head} * room.capacity + i) * args.shape.key_dim),
          args.shape.key_dim);
    }
  }
  return count;
}

}  // namespace

void GraphIndex::PrepareTraining(const TrainingArgs& args, std::span<std::byte>) const {
  CodebookHeader& codebook = *args.codebook;
  std::byte* const begin = WritableHead(codebook, args.kv_head);
  auto* const count = reinterpret_cast<uint32_t*>(begin);
  *count = 0;
  if (args.samples.position_count > 0) {
    *count = CopySamples(args, GraphSamplesOf(codebook, args.kv_head));
  } else if (args.first != nullptr && args.first->index == codebook.index &&
             args.first->head_stride_bytes == codebook.head_stride_bytes) {
    std::memcpy(begin, WritableHead(const_cast<CodebookHeader&>(*args.first), args.kv_head),
                codebook.head_stride_bytes);
  }
}

size_t GraphIndex::CloseScratchBytes(const CloseArgs& args) const {
  const kernels::GraphBuildSize size = SizeOf(args);
  return kernels::GraphBuildSharedBytes(size) + kernels::GraphBuildThreadBytes(size);
}

bool GraphIndex::CloseHead(const kernels::Exec& exec, const CloseArgs& args,
                           std::span<std::byte> scratch) const {
  const kernels::GraphBuildSize size = SizeOf(args);
  const GraphSamples samples = GraphSamplesOf(*args.codebook, args.kv_head);
  for (uint32_t head = 0; head < args.shape.group_size(); ++head) {
    const bool built = kernels::BuildGraph(
        exec,
        {.size = size,
         .dtype = args.shape.dtype,
         .row_stride_bytes = args.shape.row_bytes,
         .rows = args.rows + size_t{args.data->counted_begin} * args.shape.row_bytes,
         .samples = samples.OfHead(head),
         .graph = {GraphBegin(*args.data, args.kv_head, head),
                   kernels::GraphBytes(kernels::GraphShapeOf(size))}},
        scratch, args.keep_going);
    if (!built) return false;
  }
  return true;
}

bool GraphIndex::CopyCodes(const IndexDataHeader& from, uint32_t kv_head, uint32_t slot_count,
                           uint32_t first_slot, IndexDataHeader* to) const {
  const bool same = first_slot == 0 && from.counted_begin == to->counted_begin &&
                    from.counted_end.load(std::memory_order_acquire) == slot_count &&
                    slot_count > from.counted_begin;
  if (!same) return false;
  const size_t bytes =
      kernels::GraphBytes({.node_count = slot_count - from.counted_begin,
                           .max_degree = 2 * GraphParametersOf(from.index).degree});
  const uint64_t graphs = from.head_stride_bytes / from.plane_stride_bytes;
  for (uint32_t head = 0; head < graphs; ++head) {
    std::memcpy(GraphBegin(*to, kv_head, head), GraphBegin(from, kv_head, head), bytes);
  }
  return true;
}

}  // namespace pqcached::kvstore
