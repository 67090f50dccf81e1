// Rough scores: the instruction-set functions of SelectByRoughScores. One pass over the codes lists
// the tokens whose rough score is large enough; later, only tokens near the threshold are scored
// exactly.
//
// There are two variants. *Bytes* (one head): entries become bytes of *loss*, the distance from the
// largest entry of the sub-space, and a token's loss is the sum of its entries' losses. *Lanes* (a
// group): the entries of all heads for one code are adjacent, so that one load reads them all and
// codes are read once for the group.
//
// Included by pq_rough_select.cc, the instruction-set files and the test of this file only.
#ifndef PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_H_
#define PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

// A run of slots of one span.
struct RoughSlots {
  uint32_t subspace_count;
  uint32_t bits;
  bool nibble_planes;
  const uint8_t* planes;  // planes at the first slot
  size_t plane_stride;
  uint32_t slot_count;
  uint32_t first_position;
};

// List of tokens. Entries from `count` on may be overwritten, up to 64 of them beyond the tokens
// that are appended. The lanes variant writes scores, the bytes variant writes losses.
struct RoughList {
  uint32_t* positions;
  float* scores;
  uint8_t* losses;
  uint32_t count;
};

inline constexpr uint32_t kMaxLoss = 254;  // largest loss of listed tokens; sums saturate at 255

struct BandCount {
  uint32_t above;  // tokens that are certainly above the band: larger scores, smaller losses
  uint32_t band;
};

// The bytes variant.
struct LossOps {
  // Lists the tokens whose total loss is at most kMaxLoss. losses: [subspace_count, 2^bits].
  //
  // REQUIRES: subspace_count is 2, 4, 8 or 16; losses are readable 64 bytes from every sub-space
  // on.
  void (*list)(const RoughSlots& slots, const uint8_t* losses, RoughList& list);
  // Returns the k-th smallest of count >= k >= 1 losses.
  uint8_t (*find)(const uint8_t* losses, uint32_t count, uint32_t k);
  // Writes the indices with low <= losses[i] <= high, ascending; up to 64 more entries may be
  // overwritten.
  BandCount (*list_band)(const uint8_t* losses, uint32_t count, uint8_t low, uint8_t high,
                         uint32_t* indices);
  // Writes the positions of listed tokens whose losses are below the bound; `capacity` is their
  // number.
  void (*take_below)(const RoughList& list, uint8_t bound, uint32_t* positions, uint32_t capacity);
};

enum class LaneRule : uint8_t { kSumOfProducts, kMaxOfProducts, kMaxOfSums };

struct LaneTables {
  uint32_t lanes;        // 4, 8 or 16; lanes without a head are neutral
  LaneRule rule;         // applied over the sub-spaces, then over the lanes
  const float* entries;  // [subspace_count, 2^bits, lanes], 64-byte aligned
};

// The lanes variant, in AVX2 on x86 and NEON on arm64; AVX-512 would not make it faster.
//
// Sets to[c * lanes + i] to rows[i * row_stride + c], or to 0 in lanes without a head, for `count`
// codes, a multiple of four.
void InterleaveLanes(const float* rows, size_t row_stride, uint32_t head_count, uint32_t count,
                     uint32_t lanes, float* to);
// Lists the tokens whose score is `least` or more. Adds the products of every token to lane_sums
// [lanes] (not under kMaxOfSums).
void ListLanes(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
               RoughList& list);
// Writes the indices with low <= scores[i] <= high, ascending; up to 64 more entries may be
// overwritten.
BandCount ListLaneBand(const float* scores, uint32_t count, float low, float high,
                       uint32_t* indices);
// Writes the positions of listed tokens whose scores are above the bound; `capacity` is their
// number.
void TakeLanesAbove(const RoughList& list, float bound, uint32_t* positions, uint32_t capacity);

extern const LossOps kLossOpsAvx2;
extern const LossOps kLossOpsAvx512Vbmi;
extern const LossOps kLossOpsNeon;

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_H_
