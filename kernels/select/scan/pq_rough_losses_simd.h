// Rough scores of one head by byte look-ups, written once for AVX2 and NEON; a loss is added with
// one saturating addition.
//
// Include only in instruction-set files, behind byte_table_*.h and compress_*.h of one instruction
// set; the anonymous namespace keeps every copy local to its file.
#ifndef PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LOSSES_SIMD_H_
#define PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LOSSES_SIMD_H_

#include "kernels/select/scan/pq_rough.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kBlockSlots = 2048;
constexpr uint32_t kGroup = 32;  // tokens of one mask
constexpr uint32_t kStep = 64;   // codes that are looked up together

// Adds the losses of one plane (with nibbles: of its two sub-spaces) to those of a block.
template <uint32_t kBits, bool kNibbles, bool kFirst>
void AddPlane(const uint8_t* plane, const uint8_t* losses, uint32_t slot_count, uint8_t* block) {
  const auto add = [&](const uint8_t* from, uint8_t* to) {
    const Bytes64 bytes = LoadBytes64(from);
    Bytes64 found;
    if constexpr (kNibbles) {
      Bytes64 low;
      Bytes64 high;
      for (uint32_t i = 0; i < kByteParts; ++i) {
        low.part[i] = AndBytes(bytes.part[i], SetBytes(15));
        high.part[i] = HighBits<4>(bytes.part[i]);
      }
      found = FindBytes<4>(losses, low);
      const Bytes64 other = FindBytes<4>(losses + 16, high);
      for (uint32_t i = 0; i < kByteParts; ++i) {
        found.part[i] = AddSaturating(found.part[i], other.part[i]);
      }
    } else {
      found = FindBytes<kBits>(losses, bytes);
    }
    for (uint32_t i = 0; i < kByteParts; ++i) {
      uint8_t* const at = to + i * kByteLanes;
      StoreBytes(at, kFirst ? found.part[i] : AddSaturating(found.part[i], LoadBytes(at)));
    }
  };
  const uint32_t whole = slot_count / kStep * kStep;
  for (uint32_t slot = 0; slot < whole; slot += kStep) add(plane + slot, block + slot);
  if (whole == slot_count) return;
  uint8_t rest[kStep] = {};
  __builtin_memcpy(rest, plane + whole, slot_count - whole);
  add(rest, block + whole);
}

// Appends tokens by their losses. The number of listed tokens among 32 is unpredictable, so the
// first few, or all, are written without branches that depend on it.
struct Lister {
  uint32_t* positions;
  uint8_t* losses;
  uint32_t written;

  // For few bits: writes kUsual tokens one by one, valid or not, and then those that are left.
  // Reads one byte of losses beyond the 32 tokens.
  template <uint32_t kUsual>
  [[gnu::always_inline]] void AddFew(const uint8_t* from, uint32_t mask, uint32_t first_position) {
    uint32_t out = written;
    written += BitCount(mask);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kUsual; ++i, mask &= mask - 1) {
      AddOne(from, LowestBit(mask), first_position, out++);
    }
    for (; mask != 0; mask &= mask - 1) AddOne(from, LowestBit(mask), first_position, out++);
  }

  // For many bits: positions and losses of eight tokens are compressed alike.
  [[gnu::always_inline]] void AddMany(const uint8_t* from, uint32_t mask, uint32_t first_position) {
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kGroup; i += 8) {
      const uint32_t byte = mask >> i & 255u;
      StoreWords(positions + written, AddWords(SetWords(first_position + i), BitIndexes(byte)));
      CompressBytes(from + i, byte, losses + written);
      written += BitCount(byte);
    }
  }

 private:
  [[gnu::always_inline]] void AddOne(const uint8_t* from, uint32_t index, uint32_t first_position,
                                     uint32_t out) const {
    positions[out] = first_position + index;
    losses[out] = from[index];
  }
};

inline uint32_t ValidBits(uint32_t rest) { return rest >= kGroup ? ~0u : (1u << rest) - 1u; }

// Calls add(losses, listed bits, position of the first token) for every 32 tokens of a block.
template <typename Add>
[[gnu::always_inline]] inline void ForEachListed(const uint8_t* block, uint32_t count,
                                                 uint32_t first_position, Add add) {
  const Bytes bound = SetBytes(kMaxLoss);
  for (uint32_t slot = 0; slot < count; slot += kGroup) {
    const uint32_t mask = AtMostBits(block + slot, bound) & ValidBits(count - slot);
    add(block + slot, mask, first_position + slot);
  }
}

// `usual`: tokens that were listed of the last whole block.
void ListBlock(const uint8_t* block, uint32_t count, uint32_t first_position, uint32_t usual,
               Lister& output) {
  Lister lister = output;
  if (usual < kBlockSlots / kGroup) {
    ForEachListed(block, count, first_position,
                  [&](const uint8_t* from, uint32_t mask, uint32_t first) {
                    lister.AddFew<2>(from, mask, first);
                  });
  } else if (usual < 2 * kBlockSlots / kGroup) {
    ForEachListed(block, count, first_position,
                  [&](const uint8_t* from, uint32_t mask, uint32_t first) {
                    lister.AddFew<4>(from, mask, first);
                  });
  } else {
    ForEachListed(block, count, first_position,
                  [&](const uint8_t* from, uint32_t mask, uint32_t first) {
                    lister.AddMany(from, mask, first);
                  });
  }
  output = lister;
}

template <uint32_t kBits, bool kNibbles>
void List(const RoughSlots& slots, const uint8_t* losses, RoughList& list) {
  alignas(64) uint8_t block[kBlockSlots + kGroup];
  const uint32_t plane_count = kNibbles ? slots.subspace_count / 2 : slots.subspace_count;
  const size_t plane_losses = kNibbles ? 32 : size_t{1} << kBits;
  Lister lister = {list.positions, list.losses, list.count};
  uint32_t usual = kBlockSlots;
  for (uint32_t begin = 0; begin < slots.slot_count; begin += kBlockSlots) {
    const uint32_t rest = slots.slot_count - begin;
    const uint32_t count = rest < kBlockSlots ? rest : kBlockSlots;
    AddPlane<kBits, kNibbles, true>(slots.planes + begin, losses, count, block);
    for (uint32_t plane = 1; plane < plane_count; ++plane) {
      AddPlane<kBits, kNibbles, false>(slots.planes + plane * slots.plane_stride + begin,
                                       losses + plane * plane_losses, count, block);
    }
    const uint32_t before = lister.written;
    ListBlock(block, count, slots.first_position + begin, usual, lister);
    usual = lister.written - before;
  }
  list.count = lister.written;
}

void ListByLoss(const RoughSlots& slots, const uint8_t* losses, RoughList& list) {
  if (slots.nibble_planes) return List<4, true>(slots, losses, list);
  switch (slots.bits) {
    case 4:
      return List<4, false>(slots, losses, list);
    case 5:
      return List<5, false>(slots, losses, list);
    case 6:
      return List<6, false>(slots, losses, list);
    case 7:
      return List<7, false>(slots, losses, list);
    default:
      return List<8, false>(slots, losses, list);
  }
}

// Calls visit(losses, valid bits, index) for every 32 of `count` losses, without reads beyond them.
template <typename Visit>
inline void ForEachGroup(const uint8_t* losses, uint32_t count, Visit visit) {
  uint32_t i = 0;
  for (; i + kGroup <= count; i += kGroup) visit(losses + i, ~0u, i);
  if (i == count) return;
  uint8_t rest[kGroup] = {};
  __builtin_memcpy(rest, losses + i, count - i);
  visit(rest, ValidBits(count - i), i);
}

uint8_t FindLoss(const uint8_t* losses, uint32_t count, uint32_t k) {
  uint32_t low = 0;  // invariant: fewer than k losses are below it
  for (uint32_t step = 128; step > 0; step /= 2) {
    const Bytes bound = SetBytes(low + step - 1);
    uint32_t below = 0;
    ForEachGroup(losses, count, [&](const uint8_t* x, uint32_t valid, uint32_t) {
      below += BitCount(AtMostBits(x, bound) & valid);
    });
    if (below < k) low += step;
  }
  return static_cast<uint8_t>(low);
}

BandCount ListLossBand(const uint8_t* losses, uint32_t count, uint8_t low, uint8_t high,
                       uint32_t* indices) {
  const Bytes below_low = SetBytes(low - 1u);
  const Bytes high_bound = SetBytes(high);
  BandCount result = {0, 0};
  ForEachGroup(losses, count, [&](const uint8_t* x, uint32_t valid, uint32_t first) {
    const uint32_t below = low == 0 ? 0u : AtMostBits(x, below_low) & valid;
    uint32_t band = AtMostBits(x, high_bound) & valid & ~below;
    result.above += BitCount(below);
    for (; band != 0; band &= band - 1) {
      indices[result.band++] = first + static_cast<uint32_t>(__builtin_ctz(band));
    }
  });
  return result;
}

void TakeBelow(const RoughList& list, uint8_t bound, uint32_t* positions, uint32_t capacity) {
  const Bytes most = SetBytes(bound - 1u);  // bound >= 1
  uint32_t written = 0;
  ForEachGroup(list.losses, list.count, [&](const uint8_t* x, uint32_t valid, uint32_t first) {
    const uint32_t below = AtMostBits(x, most) & valid;
    for (uint32_t part = 0; part < 4; ++part) {
      const uint32_t mask = below >> (8 * part) & 255u;
      // Positions may be read, as they may be written, beyond the list's end.
      const Words position = LoadWords(list.positions + first + 8 * part);
      StoreWords(positions + written, capacity - written, CompressWords(position, mask));
      written += BitCount(mask);
    }
  });
}

constexpr LossOps kLossOps = {
    .list = ListByLoss, .find = FindLoss, .list_band = ListLossBand, .take_below = TakeBelow};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LOSSES_SIMD_H_
