// CRC32C by carry-less multiplication. Four independent 128-bit accumulators are moved 512 bits
// ahead per step and absorb the data, whereas a chain of crc32 instructions waits three cycles for
// each 8 bytes. The remaining bytes are processed with crc32.
#include <immintrin.h>

#include "kernels/base/crc32c_internal.h"

namespace pqcached::kernels {
namespace {

[[gnu::always_inline]] inline uint64_t Load64(const std::byte* from) {
  uint64_t value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

[[gnu::always_inline]] inline __m128i Load(const std::byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// Moves `value` ahead by the distance that `powers` was computed for.
[[gnu::always_inline]] inline __m128i Fold(__m128i value, __m128i powers) {
  return _mm_xor_si128(_mm_clmulepi64_si128(value, powers, 0x00),
                       _mm_clmulepi64_si128(value, powers, 0x11));
}

template <uint32_t kBits>
[[gnu::always_inline]] inline __m128i Powers() {
  constexpr uint64_t kLow = internal::Crc32cPower(kBits + 32);
  constexpr uint64_t kHigh = internal::Crc32cPower(kBits - 32);
  return _mm_set_epi64x(static_cast<long long>(kHigh), static_cast<long long>(kLow));
}

uint32_t Finish(uint32_t state, const std::byte* data, size_t bytes) {
  uint64_t wide = state;
  for (; bytes >= 8; data += 8, bytes -= 8) wide = _mm_crc32_u64(wide, Load64(data));
  state = static_cast<uint32_t>(wide);
  for (; bytes > 0; ++data, --bytes) state = _mm_crc32_u8(state, static_cast<uint8_t>(*data));
  return state;
}

}  // namespace

uint32_t internal::Crc32cPclmul(uint32_t state, const std::byte* data, size_t bytes) {
  if (bytes >= 128) {
    __m128i a0 = _mm_xor_si128(Load(data), _mm_cvtsi32_si128(static_cast<int>(state)));
    __m128i a1 = Load(data + 16);
    __m128i a2 = Load(data + 32);
    __m128i a3 = Load(data + 48);
    const __m128i ahead = Powers<512>();
    data += 64;
    bytes -= 64;
    for (; bytes >= 64; data += 64, bytes -= 64) {
      a0 = _mm_xor_si128(Fold(a0, ahead), Load(data));
      a1 = _mm_xor_si128(Fold(a1, ahead), Load(data + 16));
      a2 = _mm_xor_si128(Fold(a2, ahead), Load(data + 32));
      a3 = _mm_xor_si128(Fold(a3, ahead), Load(data + 48));
    }
    const __m128i next = Powers<128>();
    a1 = _mm_xor_si128(a1, Fold(a0, next));
    a2 = _mm_xor_si128(a2, Fold(a1, next));
    a3 = _mm_xor_si128(a3, Fold(a2, next));
    const uint64_t low = static_cast<uint64_t>(_mm_extract_epi64(a3, 0));
    const uint64_t high = static_cast<uint64_t>(_mm_extract_epi64(a3, 1));
    state = static_cast<uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, low), high));
  }
  return Finish(state, data, bytes);
}

}  // namespace pqcached::kernels
