// The variants of PqScore, on raw pointers so that the instruction-set files need no standard
// headers.
//
// Included by pq_select.cc and the instruction-set files only.
#ifndef PQCACHED_KERNELS_SELECT_PQ_SCORE_H_
#define PQCACHED_KERNELS_SELECT_PQ_SCORE_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

struct PqScoreTask {
  uint32_t subspace_count;
  uint32_t bits;
  bool nibble_planes;
  uint32_t group_size;
  const uint8_t* planes;  // planes at the first slot to score
  size_t plane_stride;
  uint32_t slot_count;
  const float* tables;  // [G, subspace_count, 2^bits], not clamped
  float* logits;        // [G, slot_count]
};

void PqScorePortable(const PqScoreTask& task);
void PqScoreAvx512(const PqScoreTask& task);
// REQUIRES: bits >= 7.
void PqScoreAvx512Vbmi(const PqScoreTask& task);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_PQ_SCORE_H_
