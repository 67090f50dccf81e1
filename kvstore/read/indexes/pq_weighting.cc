// PqIndex: the maps of query-weighted codebooks.
#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/train/key_map.h"
#include "kvstore/read/indexes/pq.h"

namespace pqcached::kvstore {
namespace {

// More rows change the variances by little, and the maps take time to compute from each.
constexpr uint32_t kMomentRows = 4096;

std::span<float> Writable(std::span<const float> floats) {
  return {const_cast<float*>(floats.data()), floats.size()};
}

// Sums over vectors of one kv head.
class Moments {
 public:
  Moments(uint32_t dim, kernels::DType dtype, std::span<double> products, std::span<double> sums,
          std::span<float> row)
      : dim_(dim), dtype_(dtype), products_(products), sums_(sums), row_(row) {
    std::fill(products_.begin(), products_.end(), 0.0);
    std::fill(sums_.begin(), sums_.end(), 0.0);
  }

  void Add(const std::byte* vector) {
    kernels::ConvertElements(dtype_, vector, kernels::DType::kF32,
                             reinterpret_cast<std::byte*>(row_.data()), dim_);
    kernels::AddMoments(row_, products_, sums_);
    ++count_;
  }

  std::span<const double> products() const { return products_; }
  std::span<const double> sums() const { return sums_; }
  uint64_t count() const { return count_; }

 private:
  const uint32_t dim_;
  const kernels::DType dtype_;
  const std::span<double> products_, sums_;
  const std::span<float> row_;
  uint64_t count_ = 0;
};

void AddKeys(const TrainingArgs& args, Moments& moments) {
  uint64_t rows = 0;
  for (const kernels::RowSpan& span : args.rows) rows += span.token_count;
  const uint64_t step = std::max<uint64_t>(1, (rows + kMomentRows - 1) / kMomentRows);
  uint64_t skip = 0;
  for (const kernels::RowSpan& span : args.rows) {
    uint64_t row = skip;
    for (; row < span.token_count; row += step) moments.Add(span.rows + row * args.shape.row_bytes);
    skip = row - span.token_count;
  }
}

void AddQueries(const TrainingArgs& args, Moments& moments) {
  const SampledQueries& samples = args.samples;
  const size_t query_bytes = args.shape.key_dim * kernels::DTypeBytes(args.shape.dtype);
  const uint64_t step = SampleGap(samples, kMomentRows);
  for (uint64_t i = 0; i < samples.count(); i += step) moments.Add(samples.query(i, query_bytes));
}

}  // namespace

size_t PqIndex::PrepareScratchBytes(const TrainingArgs& args) const {
  if (!IsWeighted(args.codebook->index)) return 0;
  const size_t dim = args.shape.key_dim;
  return kernels::KeyMapScratchBytes(args.shape.key_dim) +
         2 * kernels::ScratchAligned(dim * dim * sizeof(double)) +
         kernels::ScratchAligned(dim * sizeof(double)) +
         kernels::ScratchAligned(dim * sizeof(float));
}

void PqIndex::PrepareTraining(const TrainingArgs& args, std::span<std::byte> scratch) const {
  if (!IsWeighted(args.codebook->index)) return;
  const KeyMaps maps = KeyMapsOf(*args.codebook, args.kv_head);
  if (args.first != nullptr) {  // centroids of other maps would be no start
    const KeyMaps first = KeyMapsOf(*args.first, args.kv_head);
    std::copy(first.keys.begin(), first.keys.end(), Writable(maps.keys).begin());
    std::copy(first.queries.begin(), first.queries.end(), Writable(maps.queries).begin());
    return;
  }
  PQC_CHECK(args.samples.position_count > 0);
  const uint32_t dim = args.shape.key_dim;
  const size_t square = size_t{dim} * dim;
  kernels::ScratchCutter cutter(scratch);
  const auto map_scratch = cutter.Take<std::byte>(kernels::KeyMapScratchBytes(dim));
  const auto query_products = cutter.Take<double>(square);
  const auto key_products = cutter.Take<double>(square);
  const auto key_sums = cutter.Take<double>(dim);
  const auto row = cutter.Take<float>(dim);
  Moments queries(dim, args.shape.dtype, query_products, {}, row);
  Moments keys(dim, args.shape.dtype, key_products, key_sums, row);
  AddQueries(args, queries);
  AddKeys(args, keys);
  kernels::MakeKeyMaps({.dim = dim,
                        .subspace_count = args.codebook->index.subspace_count,
                        .query_moments = queries.products(),
                        .key_moments = keys.products(),
                        .key_sums = keys.sums(),
                        .key_count = keys.count(),
                        .key_map = Writable(maps.keys),
                        .query_map = Writable(maps.queries),
                        .scratch = map_scratch});
}

}  // namespace pqcached::kvstore
