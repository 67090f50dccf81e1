#include "kernels/nearest.h"

#include "kernels/check.h"

namespace pqcached::kernels {
namespace {

constexpr size_t Aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The specification.
void FindNearestReference(const NearestCentroids& centroids, const float* samples,
                          uint32_t sample_count, uint8_t* codes, float* scores) {
  const uint32_t dim = centroids.dim;
  for (uint32_t s = 0; s < sample_count; ++s) {
    const float* sample = samples + size_t{s} * dim;
    double least = 0.0;
    double norm = 0.0;
    for (uint32_t i = 0; i < dim; ++i) norm += double{sample[i]} * sample[i];
    codes[s] = 0;
    for (uint32_t c = 0; c < centroids.count; ++c) {
      const float* centroid = centroids.rows + size_t{c} * dim;
      double distance = 0.0;
      for (uint32_t i = 0; i < dim; ++i) {
        const double difference = double{sample[i]} - centroid[i];
        distance += difference * difference;
      }
      if (c == 0 || distance < least) {
        least = distance;
        codes[s] = static_cast<uint8_t>(c);
      }
    }
    scores[s] = static_cast<float>((norm - least) / 2);
  }
}

}  // namespace

size_t NearestScratchBytes(uint32_t dim, uint32_t count) {
  const size_t floats = size_t{dim} * count;
  const size_t pairs = (size_t{dim} + 1) / 2 * count;
  return Aligned(floats * sizeof(float)) + Aligned(count * sizeof(float)) +
         Aligned(pairs * sizeof(uint32_t));
}

NearestCentroids PrepareNearest(const Exec& exec, std::span<const float> centroids, uint32_t dim,
                                std::span<std::byte> scratch) {
  NearestCentroids prepared;
  prepared.dim = dim;
  prepared.count = static_cast<uint32_t>(centroids.size() / dim);
  prepared.rows = centroids.data();
  PQC_CHECK(prepared.count % 16 == 0 && prepared.count <= 256);
  PQC_CHECK(scratch.size() >= NearestScratchBytes(dim, prepared.count));
  (void)exec;
  return prepared;
}

bool HasBf16Nearest(const Exec& exec) {
  (void)exec;
  return false;
}

void FindNearest(const Exec& exec, const NearestCentroids& centroids, const float* samples,
                 uint32_t sample_count, uint8_t* codes, float* scores) {
  PQC_CHECK(sample_count <= kNearestBlock);
  (void)exec;
  FindNearestReference(centroids, samples, sample_count, codes, scores);
}

void FindNearestBf16(const Exec& exec, const NearestCentroids& centroids, const uint16_t* samples,
                     uint32_t sample_count, uint8_t* codes, float* scores) {
  PQC_CHECK(HasBf16Nearest(exec));
  (void)centroids, (void)samples, (void)sample_count, (void)codes, (void)scores;
}

}  // namespace pqcached::kernels
