// CRC32C by 512-bit carry-less multiplication, like crc32c_pclmul.cc but with four accumulators of
// 64 bytes.
#include <immintrin.h>

#include "kernels/base/crc32c_internal.h"

namespace pqcached::kernels {
namespace {

[[gnu::always_inline]] inline __m512i Load(const std::byte* from) {
  return _mm512_loadu_si512(from);
}

// Returns fold(value) ^ data.
[[gnu::always_inline]] inline __m512i FoldInto(__m512i value, __m512i powers, __m512i data) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, powers, 0x00),
                                   _mm512_clmulepi64_epi128(value, powers, 0x11), data, 0x96);
}

template <uint32_t kBits>
[[gnu::always_inline]] inline __m128i Powers() {
  constexpr uint64_t kLow = internal::Crc32cPower(kBits + 32);
  constexpr uint64_t kHigh = internal::Crc32cPower(kBits - 32);
  return _mm_set_epi64x(static_cast<long long>(kHigh), static_cast<long long>(kLow));
}

template <uint32_t kBits>
[[gnu::always_inline]] inline __m512i WidePowers() {
  return _mm512_broadcast_i32x4(Powers<kBits>());
}

[[gnu::always_inline]] inline __m128i Fold(__m128i value, __m128i powers) {
  return _mm_xor_si128(_mm_clmulepi64_si128(value, powers, 0x00),
                       _mm_clmulepi64_si128(value, powers, 0x11));
}

// Reduces the accumulated 64 bytes to the CRC register after them.
[[gnu::always_inline]] inline uint32_t Reduce(__m512i value) {
  const __m128i last =
      _mm_xor_si128(_mm_xor_si128(Fold(_mm512_castsi512_si128(value), Powers<384>()),
                                  Fold(_mm512_extracti32x4_epi32(value, 1), Powers<256>())),
                    _mm_xor_si128(Fold(_mm512_extracti32x4_epi32(value, 2), Powers<128>()),
                                  _mm512_extracti32x4_epi32(value, 3)));
  const uint64_t low = static_cast<uint64_t>(_mm_extract_epi64(last, 0));
  const uint64_t high = static_cast<uint64_t>(_mm_extract_epi64(last, 1));
  return static_cast<uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, low), high));
}

}  // namespace

uint32_t internal::Crc32cVpclmul(uint32_t state, const std::byte* data, size_t bytes) {
  if (bytes < 512) return Crc32cPclmul(state, data, bytes);
  const __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state)));
  __m512i a0 = _mm512_xor_si512(Load(data), start);
  __m512i a1 = Load(data + 64);
  __m512i a2 = Load(data + 128);
  __m512i a3 = Load(data + 192);
  const __m512i ahead = WidePowers<2048>();
  data += 256;
  bytes -= 256;
  for (; bytes >= 256; data += 256, bytes -= 256) {
    a0 = FoldInto(a0, ahead, Load(data));
    a1 = FoldInto(a1, ahead, Load(data + 64));
    a2 = FoldInto(a2, ahead, Load(data + 128));
    a3 = FoldInto(a3, ahead, Load(data + 192));
  }
  a3 = FoldInto(a0, WidePowers<1536>(), a3);
  a3 = FoldInto(a1, WidePowers<1024>(), a3);
  a3 = FoldInto(a2, WidePowers<512>(), a3);
  return Crc32cPclmul(Reduce(a3), data, bytes);
}

}  // namespace pqcached::kernels
