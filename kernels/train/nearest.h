// Nearest centroids of a block of samples in one sub-space: the inner part of k-means and of
// encoding.
//
// Included by kmeans.cc, pq_encode.cc and the instruction-set files only. Distances are squared and
// Euclidean. The nearest centroid is the one with the largest *score*, sample . c - |c|^2 / 2 =
// (|sample|^2 - distance) / 2.
#ifndef PQCACHED_KERNELS_TRAIN_NEAREST_H_
#define PQCACHED_KERNELS_TRAIN_NEAREST_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

// Largest number of samples per call, so that the caller's buffers stay in the L1 cache.
inline constexpr uint32_t kNearestBlock = 128;

// Centroids in the layouts that the variants read. All parts except `rows` are in the caller's
// scratch.
struct NearestCentroids {
  uint32_t dim;
  // Padded to a multiple of 16, at most 256, by centroids that are never the nearest.
  uint32_t count;
  uint32_t row_count;    // centroids without the padding
  const float* rows;     // [row_count, dim]
  const float* columns;  // [dim, count]
  const float* bias;     // [count]: -|c|^2 / 2; of the padding -infinity
  // [dim / 2, count]: dims 2i (low half) and 2i + 1 in the form of the pairs; null: kNone.
  const uint32_t* pairs;
  const float* pair_bias;   // [count]: bias of the rounded centroids
  const float* pair_scale;  // [count]: kInt16: entry / integer; of the padding 0
  uint32_t int16_limit;     // kInt16: largest magnitude; `dim` products of two add up to < 2^31
};

// Form of the centroids that find_bf16 reads.
enum class PairForm : uint8_t {
  kNone,
  kBf16,   // entries rounded to bf16
  kInt16,  // multiples of a scale per centroid, up to int16_limit
};

struct NearestOps {
  // Sets codes[s] to the nearest centroid of samples[s] (ties: lowest index) and scores[s] to its
  // score. REQUIRES: sample_count <= kNearestBlock; samples [sample_count, dim].
  void (*find)(const NearestCentroids& centroids, const float* samples, uint32_t sample_count,
               uint8_t* codes, float* scores);
  // The same for bf16 samples and rounded centroids; null where it would not be faster.
  // REQUIRES: dim is a multiple of bf16_dims; pairs are of pair_form; block [kNearestBlock, dim] is
  // 4-byte aligned scratch.
  void (*find_bf16)(const NearestCentroids& centroids, const uint16_t* samples,
                    uint32_t sample_count, int16_t* block, uint8_t* codes, float* scores);
  // Returns the nearest centroid of one sample, from rows alone: preparing the other layouts costs
  // more than one sample.
  uint32_t (*find_one)(const float* rows, uint32_t count, uint32_t dim, const float* sample);
  // Sets sums[codes[s], :] += samples[s, :] and norms[s] = |samples[s]|^2.
  void (*add)(uint32_t dim, const float* samples, uint32_t sample_count, const uint8_t* codes,
              float* sums, float* norms);
  void (*add_bf16)(uint32_t dim, const uint16_t* samples, uint32_t sample_count,
                   const uint8_t* codes, float* sums, float* norms);  // null when find_bf16 is
  PairForm pair_form;
  uint32_t bf16_dims;
};

extern const NearestOps kNearestReference;
extern const NearestOps kNearestPortable;
extern const NearestOps kNearestAvx2;
extern const NearestOps kNearestAvx512;
extern const NearestOps kNearestAvx512Bf16;  // contains the bf16 functions only

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_TRAIN_NEAREST_H_
