// Exact logits by byte permutes (VBMI): the four bytes of the entries form four tables of bytes.
//
// For 64 codes and 256 entries, the four byte tables take 8 two-register permutes and 4 blends, and
// 8 unpacks combine the bytes; permutes of floats would take 32 permutes and 28 blends. Below 7
// bits the permutes of floats are faster.
#include <immintrin.h>

#include "kernels/base/group_rule.h"
#include "kernels/select/pq_score.h"

namespace pqcached::kernels {
namespace {

// Slots per block, so that logits and codes stay in the L1 cache across the sub-spaces.
constexpr uint32_t kBlockSlots = 2048;
constexpr uint32_t kGroup = 64;  // codes per register
constexpr uint32_t kLanes = 16;

struct Logits64 {
  __m512 parts[4];  // 16 slots each, in order
};

// A table of 2^kBits floats as four tables of bytes.
template <uint32_t kBits>
class ByteTables {
 public:
  explicit ByteTables(const float* entries) {
    alignas(64) uint8_t bytes[4][kSize];
    for (uint32_t i = 0; i < (1u << kBits); i += kLanes) {
      // The order of the operands makes NaN become -kEntryLimit.
      const __m512 low = _mm512_max_ps(_mm512_loadu_ps(entries + i), _mm512_set1_ps(-kEntryLimit));
      const __m512i bits = _mm512_castps_si512(_mm512_min_ps(low, _mm512_set1_ps(kEntryLimit)));
      for (uint32_t byte = 0; byte < 4; ++byte) {
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes[byte] + i),
                        _mm512_cvtepi32_epi8(
                            _mm512_srl_epi32(bits, _mm_cvtsi32_si128(static_cast<int>(8 * byte)))));
      }
    }
    for (uint32_t byte = 0; byte < 4; ++byte) {
      for (uint32_t i = 0; i < kRegisters; ++i) {
        registers_[byte][i] = _mm512_load_si512(bytes[byte] + i * kGroup);
      }
    }
  }

  Logits64 Find(__m512i codes) const {
    // The unpacks below work within 128 bits; this order of codes makes their results appear in
    // slot order.
    const __m512i order =
        _mm512_set_epi8(63, 62, 61, 60, 47, 46, 45, 44, 31, 30, 29, 28, 15, 14, 13, 12,  //
                        59, 58, 57, 56, 43, 42, 41, 40, 27, 26, 25, 24, 11, 10, 9, 8,    //
                        55, 54, 53, 52, 39, 38, 37, 36, 23, 22, 21, 20, 7, 6, 5, 4,      //
                        51, 50, 49, 48, 35, 34, 33, 32, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i ordered = _mm512_permutexvar_epi8(order, codes);
    const __m512i byte_0 = FindByte(0, ordered);
    const __m512i byte_1 = FindByte(1, ordered);
    const __m512i byte_2 = FindByte(2, ordered);
    const __m512i byte_3 = FindByte(3, ordered);
    const __m512i low_01 = _mm512_unpacklo_epi8(byte_0, byte_1);
    const __m512i high_01 = _mm512_unpackhi_epi8(byte_0, byte_1);
    const __m512i low_23 = _mm512_unpacklo_epi8(byte_2, byte_3);
    const __m512i high_23 = _mm512_unpackhi_epi8(byte_2, byte_3);
    return {{_mm512_castsi512_ps(_mm512_unpacklo_epi16(low_01, low_23)),
             _mm512_castsi512_ps(_mm512_unpackhi_epi16(low_01, low_23)),
             _mm512_castsi512_ps(_mm512_unpacklo_epi16(high_01, high_23)),
             _mm512_castsi512_ps(_mm512_unpackhi_epi16(high_01, high_23))}};
  }

 private:
  static constexpr uint32_t kRegisters = (1u << kBits) / kGroup;
  static constexpr uint32_t kSize = kRegisters * kGroup;

  __m512i FindByte(uint32_t byte, __m512i codes) const {
    const __m512i* table = registers_[byte];
    if constexpr (kRegisters == 2) {
      return _mm512_permutex2var_epi8(table[0], codes, table[1]);
    } else {
      return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes),
                                    _mm512_permutex2var_epi8(table[0], codes, table[1]),
                                    _mm512_permutex2var_epi8(table[2], codes, table[3]));
    }
  }

  __m512i registers_[4][kRegisters];
};

template <uint32_t kBits, bool kFirst>
void AddSubspace(const float* entries, const uint8_t* plane, uint32_t slot_count, float* logits) {
  const ByteTables<kBits> tables(entries);
  uint32_t slot = 0;
  for (; slot + kGroup <= slot_count; slot += kGroup) {
    const Logits64 found = tables.Find(_mm512_loadu_si512(plane + slot));
    for (uint32_t part = 0; part < 4; ++part) {
      float* out = logits + slot + part * kLanes;
      const __m512 sum =
          kFirst ? found.parts[part] : _mm512_add_ps(_mm512_loadu_ps(out), found.parts[part]);
      _mm512_storeu_ps(out, sum);
    }
  }
  if (slot == slot_count) return;
  const __mmask64 valid = (1ull << (slot_count - slot)) - 1;
  const Logits64 found = tables.Find(_mm512_maskz_loadu_epi8(valid, plane + slot));
  for (uint32_t part = 0; part < 4; ++part) {
    const auto lanes = static_cast<__mmask16>(valid >> (part * kLanes));
    float* out = logits + slot + part * kLanes;
    const __m512 sum = kFirst ? found.parts[part]
                              : _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out), found.parts[part]);
    _mm512_mask_storeu_ps(out, lanes, sum);
  }
}

template <uint32_t kBits>
void Score(const PqScoreTask& task) {
  for (uint32_t begin = 0; begin < task.slot_count; begin += kBlockSlots) {
    const uint32_t rest = task.slot_count - begin;
    const uint32_t slot_count = rest < kBlockSlots ? rest : kBlockSlots;
    for (uint32_t head = 0; head < task.group_size; ++head) {
      float* logits = task.logits + size_t{head} * task.slot_count + begin;
      const float* entries = task.tables + (size_t{head} * task.subspace_count << kBits);
      AddSubspace<kBits, true>(entries, task.planes + begin, slot_count, logits);
      for (uint32_t subspace = 1; subspace < task.subspace_count; ++subspace) {
        AddSubspace<kBits, false>(entries + (size_t{subspace} << kBits),
                                  task.planes + subspace * task.plane_stride + begin, slot_count,
                                  logits);
      }
    }
  }
}

}  // namespace

void PqScoreAvx512Vbmi(const PqScoreTask& task) {
  if (task.bits == 7) return Score<7>(task);
  Score<8>(task);
}

}  // namespace pqcached::kernels
