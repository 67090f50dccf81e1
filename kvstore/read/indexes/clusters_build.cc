#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/base/dtype.h"
#include "kernels/train/kmeans.h"
#include "kernels/train/pq_encode.h"
#include "kvstore/read/indexes/clusters.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kClusterIterations = 8;
constexpr uint64_t kClusterSeed = 4321;

// Rows of one part of a kv head's segment.
struct PartRows {
  const std::byte* rows = nullptr;
  uint32_t count = 0;
  uint32_t clusters = 0;
};

kernels::PqGeometry GeometryOfPart(const LayerShape& shape, uint32_t clusters) {
  return {.key_dim = shape.key_dim,
          .subspace_count = 1,
          .bits = static_cast<uint32_t>(std::countr_zero(clusters))};
}

// Work area of the largest part.
struct PartScratch {
  // Cuts the areas from `base`; null only counts the bytes.
  PartScratch(const LayerShape& shape, const ClusterSizes& sizes, uint32_t slots, std::byte* base) {
    const auto take = [this, base](size_t bytes) {
      std::byte* const area = base == nullptr ? nullptr : base + total_bytes;
      total_bytes += PaddedBytes(bytes);
      return area;
    };
    const uint32_t count = std::min(slots, sizes.part_slots());
    const uint32_t clusters = std::max(2u, sizes.PartClusters(count));
    const size_t row_floats = shape.key_dim + shape.value_dim;
    samples = take(size_t{count} * shape.key_dim * sizeof(float));
    const auto floats = [&take](size_t number) {
      return std::span<float>(reinterpret_cast<float*>(take(number * sizeof(float))), number);
    };
    centroids = floats(size_t{clusters} * shape.key_dim);
    sums = floats(clusters * row_floats);
    row = floats(row_floats);
    const size_t kernel_bytes =
        std::max(kernels::KMeansStepScratchBytes(shape.key_dim, clusters),
                 kernels::PqEncodeScratchBytes(GeometryOfPart(shape, clusters)));
    kernel = {take(kernel_bytes), kernel_bytes};
  }

  std::byte* samples = nullptr;
  std::span<float> centroids;  // [clusters, key_dim]
  std::span<float> sums;       // [clusters, key_dim + value_dim]
  std::span<float> row;        // [key_dim + value_dim]
  std::span<std::byte> kernel;
  size_t total_bytes = 0;
};

// Writes the cluster of each row. Returns false after `keep_going` has.
bool FindClusters(const kernels::Exec& exec, const CloseArgs& args, const PartRows& part,
                  const PartScratch& scratch, uint8_t* codes) {
  if (part.clusters == 1) {
    std::memset(codes, 0, part.count);
    return true;
  }
  const LayerShape& shape = args.shape;
  const kernels::DType type = kernels::KMeansSampleType(exec);
  kernels::KMeansLoad(exec, {.source_type = shape.dtype,
                             .rows = part.rows,
                             .row_stride = shape.row_bytes,
                             .row_count = part.count,
                             .dim = shape.key_dim,
                             .sample_type = type,
                             .samples = scratch.samples});
  const std::span<float> centroids = scratch.centroids.first(size_t{part.clusters} * shape.key_dim);
  const kernels::KMeansProblem problem{.sample_type = type,
                                       .samples = scratch.samples,
                                       .sample_count = part.count,
                                       .dim = shape.key_dim,
                                       .centroid_count = part.clusters,
                                       .centroids = centroids};
  kernels::KMeansInit(problem, kClusterSeed);
  for (uint32_t i = 0; i < kClusterIterations; ++i) {
    if (args.keep_going && !args.keep_going()) return false;
    kernels::KMeansStep(exec, problem, scratch.kernel);
  }
  kernels::PqEncode(exec, {.geometry = GeometryOfPart(shape, part.clusters),
                           .dtype = shape.dtype,
                           .rows = part.rows,
                           .row_stride = shape.row_bytes,
                           .row_count = part.count,
                           .centroids = centroids,
                           .planes = codes,
                           .scratch = scratch.kernel});
  return true;
}

// Writes the numbers of tokens and the mean rows of the clusters of a part.
void WriteMeans(const CloseArgs& args, const PartRows& part, const uint8_t* codes,
                const PartScratch& scratch, uint32_t* tokens, std::byte* rows) {
  const LayerShape& shape = args.shape;
  const size_t row_floats = scratch.row.size();
  std::fill_n(tokens, part.clusters, 0u);
  std::fill_n(scratch.sums.begin(), part.clusters * row_floats, 0.0f);
  const auto convert = [row_floats](kernels::DType from_type, const void* from,
                                    kernels::DType to_type, void* to) {
    kernels::ConvertElements(from_type, static_cast<const std::byte*>(from), to_type,
                             static_cast<std::byte*>(to), row_floats);
  };
  for (uint32_t i = 0; i < part.count; ++i) {
    convert(shape.dtype, part.rows + size_t{i} * shape.row_bytes, kernels::DType::kF32,
            scratch.row.data());
    ++tokens[codes[i]];
    float* const sum = &scratch.sums[codes[i] * row_floats];
    for (size_t j = 0; j < row_floats; ++j) sum[j] += scratch.row[j];
  }
  for (uint32_t cluster = 0; cluster < part.clusters; ++cluster) {
    float* const mean = &scratch.sums[cluster * row_floats];
    const float share = 1.0f / static_cast<float>(std::max(1u, tokens[cluster]));
    for (size_t j = 0; j < row_floats; ++j) mean[j] *= share;
    convert(kernels::DType::kF32, mean, shape.dtype, rows + size_t{cluster} * shape.row_bytes);
  }
}

uint32_t* WritableTokens(const ClusterView& view) { return const_cast<uint32_t*>(view.tokens); }
std::byte* WritableRows(const ClusterView& view) { return const_cast<std::byte*>(view.rows); }
uint8_t* WritableCodes(const ClusterView& view) { return const_cast<uint8_t*>(view.codes); }

}  // namespace

size_t ClustersIndex::CloseScratchBytes(const CloseArgs& args) const {
  return PartScratch(args.shape, ClusterSizesOf(args.data->index),
                     args.slot_end - args.data->counted_begin, nullptr)
      .total_bytes;
}

bool ClustersIndex::CloseHead(const kernels::Exec& exec, const CloseArgs& args,
                              std::span<std::byte> scratch) const {
  const ClusterView view(*args.data, args.data->index, args.shape.row_bytes, args.kv_head);
  const ClusterSizes sizes = view.sizes;
  const uint32_t begin = args.data->counted_begin;
  const PartScratch area(args.shape, sizes, args.slot_end - begin, scratch.data());
  for (uint32_t first = begin, clusters = 0; first < args.slot_end; first += sizes.part_slots()) {
    const uint32_t count = std::min(sizes.part_slots(), args.slot_end - first);
    const PartRows part{.rows = args.rows + size_t{first} * args.shape.row_bytes,
                        .count = count,
                        .clusters = sizes.PartClusters(count)};
    uint8_t* const codes = WritableCodes(view) + (first - begin);
    if (!FindClusters(exec, args, part, area, codes)) return false;
    WriteMeans(args, part, codes, area, WritableTokens(view) + clusters,
               WritableRows(view) + size_t{clusters} * args.shape.row_bytes);
    clusters += part.clusters;
  }
  return true;
}

bool ClustersIndex::CopyCodes(const IndexDataHeader& from, uint32_t kv_head, uint32_t slot_count,
                              uint32_t first_slot, IndexDataHeader* to) const {
  const bool same = first_slot == 0 && from.counted_begin == to->counted_begin &&
                    from.counted_end.load(std::memory_order_acquire) == slot_count &&
                    slot_count > from.counted_begin;
  if (!same) return false;
  const size_t row_bytes = from.plane_stride_bytes;
  const ClusterView source(from, from.index, row_bytes, kv_head);
  const ClusterView target(*to, from.index, row_bytes, kv_head);
  std::copy_n(source.tokens, source.count, WritableTokens(target));
  std::copy_n(source.rows, source.count * row_bytes, WritableRows(target));
  std::copy_n(source.codes, slot_count - from.counted_begin, WritableCodes(target));
  return true;
}

}  // namespace pqcached::kvstore
