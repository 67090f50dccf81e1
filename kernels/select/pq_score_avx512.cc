// Logits by two-register permutes: a table of 256 floats is 16 registers, and 8 permutes with 7
// blends look up 16 codes. A gather of 16 floats costs about twice as much on Zen 4.
#include <immintrin.h>

#include "kernels/base/group_rule.h"
#include "kernels/select/pq_score.h"

namespace pqcached::kernels {
namespace {

// Slots per block, so that logits and codes stay in the L1 cache across the sub-spaces.
constexpr uint32_t kBlockSlots = 2048;
constexpr uint32_t kLanes = 16;

// A table of 2^kBits floats in registers.
template <uint32_t kBits>
class Table {
 public:
  explicit Table(const float* entries) {
    const __m512 limit = _mm512_set1_ps(kEntryLimit);
    const __m512 negative_limit = _mm512_set1_ps(-kEntryLimit);
    for (uint32_t i = 0; i < kRegisters; ++i) {
      // The order of the operands makes NaN become -kEntryLimit.
      const __m512 low = _mm512_max_ps(_mm512_loadu_ps(entries + i * kLanes), negative_limit);
      registers_[i] = _mm512_min_ps(low, limit);
    }
  }

  __m512 Find(__m512i code) const {
    if constexpr (kBits == 4) {
      return _mm512_permutexvar_ps(code, registers_[0]);
    } else {
      return FindIn<0, kRegisters>(code);
    }
  }

 private:
  static constexpr uint32_t kRegisters = (1u << kBits) / kLanes;

  // Looks codes up in kCount registers from kFirst on; the lower bits of a code select within a
  // register.
  template <uint32_t kFirst, uint32_t kCount>
  __m512 FindIn(__m512i code) const {
    if constexpr (kCount == 2) {
      return _mm512_permutex2var_ps(registers_[kFirst], code, registers_[kFirst + 1]);
    } else {
      const __m512 low = FindIn<kFirst, kCount / 2>(code);
      const __m512 high = FindIn<kFirst + kCount / 2, kCount / 2>(code);
      const __mmask16 upper =
          _mm512_test_epi32_mask(code, _mm512_set1_epi32(static_cast<int>(kCount * kLanes / 2)));
      return _mm512_mask_blend_ps(upper, low, high);
    }
  }

  __m512 registers_[kRegisters];
};

enum class Nibble { kNone, kLow, kHigh };

template <Nibble kNibble>
__m512i CodesOf(__m128i bytes) {
  const __m512i code = _mm512_cvtepu8_epi32(bytes);
  if constexpr (kNibble == Nibble::kLow) return _mm512_and_si512(code, _mm512_set1_epi32(15));
  if constexpr (kNibble == Nibble::kHigh) return _mm512_srli_epi32(code, 4);
  return code;
}

template <uint32_t kBits, Nibble kNibble, bool kFirst>
void AddSubspace(const float* entries, const uint8_t* plane, uint32_t slot_count, float* logits) {
  const Table<kBits> table(entries);
  for (uint32_t slot = 0; slot < slot_count; slot += kLanes) {
    const uint32_t rest = slot_count - slot;
    const auto lanes = static_cast<__mmask16>(rest >= kLanes ? 0xFFFFu : (1u << rest) - 1u);
    __m512 sum = table.Find(CodesOf<kNibble>(_mm_maskz_loadu_epi8(lanes, plane + slot)));
    if (!kFirst) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, logits + slot), sum);
    _mm512_mask_storeu_ps(logits + slot, lanes, sum);
  }
}

template <uint32_t kBits, bool kFirst>
void AddPlane(const PqScoreTask& task, uint32_t subspace, uint32_t begin, const float* entries,
              uint32_t slot_count, float* logits) {
  if constexpr (kBits == 4) {
    if (task.nibble_planes) {
      const uint8_t* plane = task.planes + subspace / 2 * task.plane_stride + begin;
      if (subspace % 2 == 0) {
        AddSubspace<4, Nibble::kLow, kFirst>(entries, plane, slot_count, logits);
      } else {
        AddSubspace<4, Nibble::kHigh, kFirst>(entries, plane, slot_count, logits);
      }
      return;
    }
  }
  const uint8_t* plane = task.planes + subspace * task.plane_stride + begin;
  AddSubspace<kBits, Nibble::kNone, kFirst>(entries, plane, slot_count, logits);
}

template <uint32_t kBits>
void Score(const PqScoreTask& task) {
  for (uint32_t begin = 0; begin < task.slot_count; begin += kBlockSlots) {
    const uint32_t rest = task.slot_count - begin;
    const uint32_t slot_count = rest < kBlockSlots ? rest : kBlockSlots;
    for (uint32_t head = 0; head < task.group_size; ++head) {
      float* logits = task.logits + size_t{head} * task.slot_count + begin;
      const float* entries = task.tables + (size_t{head} * task.subspace_count << kBits);
      AddPlane<kBits, true>(task, 0, begin, entries, slot_count, logits);
      for (uint32_t subspace = 1; subspace < task.subspace_count; ++subspace) {
        AddPlane<kBits, false>(task, subspace, begin, entries + (size_t{subspace} << kBits),
                               slot_count, logits);
      }
    }
  }
}

}  // namespace

void PqScoreAvx512(const PqScoreTask& task) {
  switch (task.bits) {
    case 4:
      return Score<4>(task);
    case 5:
      return Score<5>(task);
    case 6:
      return Score<6>(task);
    case 7:
      return Score<7>(task);
    default:
      return Score<8>(task);
  }
}

}  // namespace pqcached::kernels
