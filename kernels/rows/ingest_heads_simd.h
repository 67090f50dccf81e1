// The ingest copy of all heads, token by token, written once for every Vec.
//
// Include after ingest_simd.h; everything is local to the including file. Reads and writes must
// alternate at a distance shorter than the processor's look-ahead (a part of a row). When some KiB
// are read and then some KiB written, the two do not overlap, and the copy takes twice as long.
#ifndef PQCACHED_KERNELS_ROWS_INGEST_HEADS_SIMD_H_
#define PQCACHED_KERNELS_ROWS_INGEST_HEADS_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/rows/ingest_internal.h"
#include "kernels/rows/ingest_simd.h"

namespace pqcached::kernels {
namespace {

using internal::HeadsCall;
using internal::HeadsPart;

// Converts like ConvertRow into whole lines of the target, with non-temporal stores.
template <DType kFrom, DType kTo>
PQC_INLINE Vec::Bits StreamConverted(std::byte* to, const std::byte* from, uint32_t dim,
                                     Vec::Bits most) {
  for (uint32_t i = 0; i < dim; i += Vec::kLanes) {
    const Vec::F value = Vec::LoadedOnce(Vec::LoadRow<kFrom>(from, i));
    most = Vec::MaxMagnitude(most, value);
    Vec::StreamRow<kTo>(to, i, value);
  }
  return most;
}

// Copies one head's part of one token. Parts that are not whole lines are stored with plain stores:
// streaming partial lines costs more than bypassing the caches saves (42 MiB of fp16 to bf16, 80
// dims, EPYC Zen 4, 2026-11-22: 12.9 ms streamed, 6.7 ms with plain stores).
template <DType kFrom, DType kTo>
PQC_INLINE Vec::Bits CopyPart(std::byte* to, const std::byte* from, uint32_t dim, Vec::Bits most) {
  constexpr bool kSame = kFrom == kTo && kFrom != DType::kF32;
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0 && dim % 32 == 0) {
    if constexpr (kSame) {
      for (uint32_t i = 0; i < dim; i += 32) {
        most = Vec::StreamHalves(to + i * 2, from + i * 2, most);
      }
      return most;
    } else {
      return StreamConverted<kFrom, kTo>(to, from, dim, most);
    }
  }
  if constexpr (kSame) {
    return Vec::CopyHalves(to, from, dim, most);
  } else {
    return ConvertRow<kFrom, kTo>(to, from, dim, most);
  }
}

// Copies keys or values of one token. Returns false when an element is not finite.
template <DType kFrom, DType kTo>
bool CopyTokenPart(const HeadsCall& call, const HeadsPart& part, uint32_t token) {
  const std::byte* from = part.source + ptrdiff_t{token} * part.token_stride_bytes;
  const size_t at = token * call.row_stride_bytes + part.begin_bytes;
  Vec::Bits most = Vec::ZeroBits();
  for (uint32_t head = 0; head < call.head_count; ++head) {
    most = CopyPart<kFrom, kTo>(call.rows[head] + at, from, part.dim, most);
    from += part.head_stride_bytes;
  }
  if constexpr (kFrom == kTo && kFrom != DType::kF32) {
    return !Vec::AnyHalfAtLeast(most, kFrom == DType::kF16 ? 0x7c00 : 0x7f80);
  } else {
    return !Vec::AnyAtLeast(most, kFirstInfinite<kTo>);
  }
}

using TokenPartCopy = bool (*)(const HeadsCall&, const HeadsPart&, uint32_t);

template <DType kFrom>
TokenPartCopy TokenPartCopyTo(DType to) {
  switch (to) {
    case DType::kF16:
      return CopyTokenPart<kFrom, DType::kF16>;
    case DType::kBf16:
      return CopyTokenPart<kFrom, DType::kBf16>;
    case DType::kF32:
      break;
  }
  return CopyTokenPart<kFrom, DType::kF32>;
}

inline TokenPartCopy TokenPartCopyOf(DType from, DType to) {
  switch (from) {
    case DType::kF16:
      return TokenPartCopyTo<DType::kF16>(to);
    case DType::kBf16:
      return TokenPartCopyTo<DType::kBf16>(to);
    case DType::kF32:
      break;
  }
  return TokenPartCopyTo<DType::kF32>(to);
}

inline uint32_t CopyHeads(const HeadsCall& call) {
  const TokenPartCopy copy_key = TokenPartCopyOf(call.key.from, call.to);
  const TokenPartCopy copy_value = TokenPartCopyOf(call.value.from, call.to);
  for (uint32_t token = call.token_begin; token < call.token_end; ++token) {
    if (!copy_key(call, call.key, token)) return token;
    if (call.value.dim > 0 && !copy_value(call, call.value, token)) return token;
  }
  return call.token_end;
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ROWS_INGEST_HEADS_SIMD_H_
