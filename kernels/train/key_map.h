// MakeKeyMaps: the maps of query-weighted product quantization, which code keys so that scores, not
// keys, have small errors.
//
// With S the mean of q q^T over sampled queries, a key k and its coded form k' give scores whose
// squared difference is (k - k')^T S (k - k') on average. S = L L^T, so this is the squared
// distance of L^T k and L^T k'. A rotation P of L^T k then gives each sub-space the same share of
// the logarithm of the variance (Ge et al., Optimized Product Quantization, CVPR 2013, section
// 3.2.2).
//
// Keys are coded as y = P L^T k; the query of y is P L^-1 q, because q . k = (P L^-1 q) . y.
//
// Pure function; thread-safe.
#ifndef PQCACHED_KERNELS_TRAIN_KEY_MAP_H_
#define PQCACHED_KERNELS_TRAIN_KEY_MAP_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace pqcached::kernels {

struct KeyMapArgs {
  uint32_t dim = 0;
  uint32_t subspace_count = 0;  // divides dim
  // Sums over samples: of q q^T, and of k k^T, both [dim, dim]; of k, [dim]. Only the lower
  // triangles are read. Finite.
  std::span<const double> query_moments;
  std::span<const double> key_moments;
  std::span<const double> key_sums;
  uint64_t key_count = 0;  // 0: keys are taken to have the same variance in all directions
  // [dim, dim]: input, output, as RotateRows reads them.
  std::span<float> key_map;
  std::span<float> query_map;
  std::span<std::byte> scratch;  // KeyMapScratchBytes, 64-byte aligned
};

size_t KeyMapScratchBytes(uint32_t dim);

// Adds x x^T of one vector to the lower triangle of `moments`, and, unless they are empty, x to
// `sums`.
void AddMoments(std::span<const float> x, std::span<double> moments, std::span<double> sums);

// Computes the maps. A tenth of the queries' mean square is added to each direction, so that few
// samples do not make directions free that other queries use.
void MakeKeyMaps(const KeyMapArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_TRAIN_KEY_MAP_H_
