// Lists of tokens by their scores, eight tokens at a time, written once for AVX2 and NEON.
//
// Include only in instruction-set files, behind compress_*.h and simd_*.h of one instruction set;
// the anonymous namespace keeps every copy local to its file.
#ifndef PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LISTS_SIMD_H_
#define PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LISTS_SIMD_H_

#include "kernels/select/scan/pq_rough.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kLanes = 8;

// Appends the tokens whose score is `least` or more; scores are readable up to a multiple of eight.
inline void AppendScores(const float* scores, uint32_t count, uint32_t first_position, float least,
                         RoughList& list) {
  const Floats bound = Vec::Set(least);
  // Local copies: the compiler must assume that a store could change the originals.
  uint32_t* const positions = list.positions;
  float* const listed = list.scores;
  uint32_t written = list.count;
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Floats x = Vec::Load(scores + i);
    const uint32_t mask = MaskBits(AtLeast(x, bound)) & FirstBits(count - i);
    StoreWords(positions + written, AddWords(SetWords(first_position + i), BitIndexes(mask)));
    Vec::Store(listed + written, CompressFloats(x, mask));
    written += BitCount(mask);
  }
  list.count = written;
}

// Implements ListLaneBand.
inline BandCount ListBand(const float* scores, uint32_t count, float low, float high,
                          uint32_t* indices) {
  const Floats low_bound = Vec::Set(low);
  const Floats high_bound = Vec::Set(high);
  BandCount result = {0, 0};
  for (uint32_t i = 0; i < count; i += kLanes) {
    const uint32_t lanes = FirstBits(count - i);
    const Floats x = LoadFirst(scores + i, count - i);
    const uint32_t above = MaskBits(Above(x, high_bound)) & lanes;
    const uint32_t not_low = MaskBits(AtLeast(x, low_bound)) & lanes;
    const uint32_t band = not_low & ~above;
    StoreWords(indices + result.band, AddWords(SetWords(i), BitIndexes(band)));
    result.above += BitCount(above);
    result.band += BitCount(band);
  }
  return result;
}

// Implements TakeLanesAbove.
inline void TakeAbove(const RoughList& list, float bound, uint32_t* positions, uint32_t capacity) {
  const Floats least = Vec::Set(bound);
  uint32_t written = 0;
  for (uint32_t i = 0; i < list.count; i += kLanes) {
    const uint32_t rest = list.count - i;
    const Floats x = LoadFirst(list.scores + i, rest);
    const uint32_t mask = MaskBits(Above(x, least)) & FirstBits(rest);
    // Positions may be read, as they may be written, beyond the list's end.
    const Words position = LoadWords(list.positions + i);
    StoreWords(positions + written, capacity - written, CompressWords(position, mask));
    written += BitCount(mask);
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LISTS_SIMD_H_
