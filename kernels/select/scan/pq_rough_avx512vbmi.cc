// Rough scores of one head by byte permutes: 64 codes take one to four operations per sub-space,
// and a loss is added with one saturating addition. This is a quarter of the work of 32-bit
// entries.
#include <immintrin.h>

#include "kernels/base/simd/emit_avx512vbmi.h"
#include "kernels/select/scan/pq_rough.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kBlockSlots = 2048;

// A table of bytes in kRegisters registers.
template <uint32_t kRegisters>
struct ByteTable {
  __m512i registers[kRegisters];

  explicit ByteTable(const uint8_t* bytes) {
    for (uint32_t i = 0; i < kRegisters; ++i) registers[i] = _mm512_loadu_si512(bytes + i * 64);
  }

  __m512i Find(__m512i codes) const {
    if constexpr (kRegisters == 1) {
      return _mm512_permutexvar_epi8(codes, registers[0]);
    } else if constexpr (kRegisters == 2) {
      return _mm512_permutex2var_epi8(registers[0], codes, registers[1]);
    } else {
      return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes),
                                    _mm512_permutex2var_epi8(registers[0], codes, registers[1]),
                                    _mm512_permutex2var_epi8(registers[2], codes, registers[3]));
    }
  }
};

// Codes of 64 slots in two sub-spaces, from two planes or from one plane of nibbles.
template <bool kNibbles>
struct CodePair {
  const uint8_t* plane_0;
  const uint8_t* plane_1;

  inline void Load(uint32_t slot, __mmask64 lanes, __m512i& codes_0, __m512i& codes_1) const {
    const __m512i bytes = _mm512_maskz_loadu_epi8(lanes, plane_0 + slot);
    if constexpr (kNibbles) {
      codes_0 = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
      codes_1 = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15));
    } else {
      codes_0 = bytes;
      codes_1 = _mm512_maskz_loadu_epi8(lanes, plane_1 + slot);
    }
  }
};

// Appends tokens by their losses.
struct Lister {
  PositionWriter writer;
  uint8_t* losses;

  inline void Add(__m512i loss, __mmask64 lanes, uint32_t first_position) {
    const __mmask64 listed =
        _mm512_mask_cmple_epu8_mask(lanes, loss, _mm512_set1_epi8(static_cast<char>(kMaxLoss)));
    _mm512_storeu_si512(losses + writer.written, _mm512_maskz_compress_epi8(listed, loss));
    writer.Write(listed, first_position);
  }
};

// One pass over a block: kPairs pairs of consecutive sub-spaces.
struct Pass {
  const uint8_t* losses;  // losses of the first sub-space
  size_t table_bytes;
  uint32_t slot_count;
  bool first;  // starts the losses of the block
  bool last;   // completes them and lists the tokens
  uint32_t first_position;
};

template <uint32_t kRegisters, bool kNibbles, uint32_t kPairs>
void AddPairs(const Pass& pass, const CodePair<kNibbles>* code_pairs, uint8_t* block,
              Lister& output) {
  const size_t bytes = pass.table_bytes;
  const ByteTable<kRegisters> table_0(pass.losses);
  const ByteTable<kRegisters> table_1(pass.losses + bytes);
  const ByteTable<kRegisters> table_2(pass.losses + (kPairs > 1 ? 2 * bytes : 0));
  const ByteTable<kRegisters> table_3(pass.losses + (kPairs > 1 ? 3 * bytes : 0));
  const CodePair<kNibbles> pair_0 = code_pairs[0];
  const CodePair<kNibbles> pair_1 = code_pairs[1];
  Lister lister = output;
  const auto add = [&](uint32_t slot, __mmask64 lanes) {
    __m512i codes_0;
    __m512i codes_1;
    pair_0.Load(slot, lanes, codes_0, codes_1);
    __m512i loss = _mm512_adds_epu8(table_0.Find(codes_0), table_1.Find(codes_1));
    if constexpr (kPairs > 1) {
      pair_1.Load(slot, lanes, codes_0, codes_1);
      loss = _mm512_adds_epu8(loss, _mm512_adds_epu8(table_2.Find(codes_0), table_3.Find(codes_1)));
    }
    if (!pass.first) loss = _mm512_adds_epu8(loss, _mm512_load_si512(block + slot));
    if (pass.last) {
      lister.Add(loss, lanes, pass.first_position + slot);
    } else {
      _mm512_store_si512(block + slot, loss);
    }
  };
  const uint32_t whole = pass.slot_count / 64 * 64;
  for (uint32_t slot = 0; slot < whole; slot += 64) add(slot, ~0ull);
  if (whole < pass.slot_count) add(whole, ValidLanes(whole, pass.slot_count));
  output = lister;
}

template <uint32_t kRegisters, bool kNibbles>
void List(const RoughSlots& slots, const uint8_t* losses, Lister& lister) {
  alignas(64) uint8_t block[kBlockSlots];
  const size_t table_bytes = size_t{1} << slots.bits;
  for (uint32_t begin = 0; begin < slots.slot_count; begin += kBlockSlots) {
    const uint32_t rest = slots.slot_count - begin;
    for (uint32_t subspace = 0; subspace < slots.subspace_count; subspace += 4) {
      CodePair<kNibbles> pairs[2];
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t plane = kNibbles ? subspace / 2 + i : subspace + 2 * i;
        pairs[i].plane_0 = slots.planes + plane * slots.plane_stride + begin;
        pairs[i].plane_1 = pairs[i].plane_0 + slots.plane_stride;
      }
      const Pass pass = {.losses = losses + subspace * table_bytes,
                         .table_bytes = table_bytes,
                         .slot_count = rest < kBlockSlots ? rest : kBlockSlots,
                         .first = subspace == 0,
                         .last = subspace + 4 >= slots.subspace_count,
                         .first_position = slots.first_position + begin};
      if (slots.subspace_count > 2) {
        AddPairs<kRegisters, kNibbles, 2>(pass, pairs, block, lister);
      } else {
        AddPairs<kRegisters, kNibbles, 1>(pass, pairs, block, lister);
      }
    }
  }
}

void ListByLoss(const RoughSlots& slots, const uint8_t* losses, RoughList& list) {
  Lister lister = {{list.positions, ~0u, list.count}, list.losses};
  if (slots.nibble_planes) {
    List<1, true>(slots, losses, lister);
  } else if (slots.bits <= 6) {
    List<1, false>(slots, losses, lister);
  } else if (slots.bits == 7) {
    List<2, false>(slots, losses, lister);
  } else {
    List<4, false>(slots, losses, lister);
  }
  list.count = lister.writer.written;
}

uint8_t FindLoss(const uint8_t* losses, uint32_t count, uint32_t k) {
  uint32_t low = 0;  // invariant: fewer than k losses are below it
  for (uint32_t step = 128; step > 0; step /= 2) {
    const __m512i bound = _mm512_set1_epi8(static_cast<char>(low + step));
    uint32_t below = 0;
    for (uint32_t i = 0; i < count; i += 64) {
      const __mmask64 lanes = ValidLanes(i, count);
      const __m512i x = _mm512_maskz_loadu_epi8(lanes, losses + i);
      below +=
          static_cast<uint32_t>(__builtin_popcountll(_mm512_mask_cmplt_epu8_mask(lanes, x, bound)));
    }
    if (below < k) low += step;
  }
  return static_cast<uint8_t>(low);
}

BandCount ListLossBand(const uint8_t* losses, uint32_t count, uint8_t low, uint8_t high,
                       uint32_t* indices) {
  const __m512i low_bound = _mm512_set1_epi8(static_cast<char>(low));
  const __m512i high_bound = _mm512_set1_epi8(static_cast<char>(high));
  PositionWriter writer = {indices, ~0u, 0};
  uint32_t below = 0;
  for (uint32_t i = 0; i < count; i += 64) {
    const __mmask64 lanes = ValidLanes(i, count);
    const __m512i x = _mm512_maskz_loadu_epi8(lanes, losses + i);
    const __mmask64 is_below = _mm512_mask_cmplt_epu8_mask(lanes, x, low_bound);
    const __mmask64 not_high = _mm512_mask_cmple_epu8_mask(lanes, x, high_bound);
    below += static_cast<uint32_t>(__builtin_popcountll(is_below));
    writer.Write(not_high & ~is_below, i);
  }
  return {.above = below, .band = writer.written};
}

void TakeBelow(const RoughList& list, uint8_t bound, uint32_t* positions, uint32_t capacity) {
  uint32_t written = 0;
  for (uint32_t i = 0; i < list.count; i += 64) {
    const __mmask64 valid = ValidLanes(i, list.count);
    const __mmask64 below =
        _mm512_mask_cmplt_epu8_mask(valid, _mm512_maskz_loadu_epi8(valid, list.losses + i),
                                    _mm512_set1_epi8(static_cast<char>(bound)));
    for (uint32_t part = 0; part < 4; ++part) {
      const auto mask = static_cast<__mmask16>(below >> (16 * part));
      const auto lanes = static_cast<__mmask16>(valid >> (16 * part));
      const __m512i packed = _mm512_maskz_compress_epi32(
          mask, _mm512_maskz_loadu_epi32(lanes, list.positions + i + 16 * part));
      const uint32_t left = capacity - written;
      const auto room = static_cast<__mmask16>(left >= 16 ? 0xFFFFu : (1u << left) - 1u);
      _mm512_mask_storeu_epi32(positions + written, room, packed);
      written += static_cast<uint32_t>(__builtin_popcount(mask));
    }
  }
}

}  // namespace

const LossOps kLossOpsAvx512Vbmi = {
    .list = ListByLoss, .find = FindLoss, .list_band = ListLossBand, .take_below = TakeBelow};

}  // namespace pqcached::kernels
