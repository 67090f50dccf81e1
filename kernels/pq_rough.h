// Rough scores: what SelectByRoughScores asks of a level. One pass over the codes lists the tokens
// whose rough score is large enough; only those near the threshold are scored exactly later.
//
// Two forms. *Bytes* (one head): entries become bytes of *loss*, distance from the largest entry of
// the sub-space, and a token's loss is their sum. *Lanes* (a group): the entries of all heads for
// one code lie side by side, so that one load finds them all; codes are read once for the group.
//
// Shared by pq_rough_select.cc and the instruction-set files; nobody else includes it.
#ifndef PQCACHED_KERNELS_PQ_ROUGH_H_
#define PQCACHED_KERNELS_PQ_ROUGH_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

// Slots of one span.
struct RoughSlots {
  uint32_t subspace_count;
  uint32_t bits;
  bool nibble_planes;
  const uint8_t* planes;  // of the first slot
  size_t plane_stride;
  uint32_t slot_count;
  uint32_t first_position;
};

// Entries from count on may be overwritten, up to 64 of them beyond the tokens to come. Lanes give
// scores, bytes give losses.
struct RoughList {
  uint32_t* positions;
  float* scores;
  uint8_t* losses;
  uint32_t count;
};

inline constexpr uint32_t kMaxLoss = 254;  // of listed tokens; a sum of bytes stays at 255

// Lists the tokens whose losses add up to kMaxLoss at most. losses: [subspace_count, 2^bits].
//
// REQUIRES: subspace_count is 2, 4, 8 or 16; losses are readable 64 bytes from every sub-space on.
void ListByLossAvx512Vbmi(const RoughSlots& slots, const uint8_t* losses, RoughList& list);

// The k-th smallest of count >= k >= 1 losses.
uint8_t FindLossAvx512Vbmi(const uint8_t* losses, uint32_t count, uint32_t k);

enum class LaneRule : uint8_t { kSumOfProducts, kMaxOfProducts, kMaxOfSums };

struct LaneTables {
  uint32_t lanes;        // 4, 8 or 16, the rest of the heads neutral
  LaneRule rule;         // over the sub-spaces, then over the lanes
  const float* entries;  // [subspace_count, 2^bits, lanes], 64-byte aligned
};

// Lists the tokens whose score is `least` or more. lane_sums [lanes] (not under kMaxOfSums): the
// products of every token are added.
void ListByLanesAvx512(const RoughSlots& slots, const LaneTables& tables, float least,
                       double* lane_sums, RoughList& list);

struct BandCount {
  uint32_t above;  // scores above high
  uint32_t band;
};

// Writes the indices of low <= scores[i] <= high, ascending; up to 64 more may be overwritten.
BandCount ListBandAvx512(const float* scores, uint32_t count, float low, float high,
                         uint32_t* indices);
// The same of losses, where those below low are `above`.
BandCount ListLossBandAvx512Vbmi(const uint8_t* losses, uint32_t count, uint8_t low, uint8_t high,
                                 uint32_t* indices);

// Writes the positions of the list whose scores lie above the bound (losses: below); capacity: how
// many there are.
void TakeAboveAvx512(const RoughList& list, float bound, uint32_t* positions, uint32_t capacity);
void TakeBelowAvx512Vbmi(const RoughList& list, uint8_t bound, uint32_t* positions,
                         uint32_t capacity);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_PQ_ROUGH_H_
