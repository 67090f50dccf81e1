// Staging of rows for the ingest copy, written once for every Vec.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_INGEST_SIMD_H_
#define PQCACHED_KERNELS_INGEST_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/copy_simd.h"
#include "kernels/ingest_internal.h"

namespace pqcached::kernels {
namespace {

using internal::StageCall;
using internal::StreamCall;

constexpr uint32_t kSourcePrefetchTokens = 24;

// Smallest magnitude (as the bits of a float) that is not finite in kType, after rounding.
template <DType kType>
constexpr uint32_t kFirstInfinite = kType == DType::kF16    ? 0x477ff000u  // 65520
                                    : kType == DType::kBf16 ? 0x7f7f8000u
                                                            : 0x7f800000u;

template <DType kFrom, DType kTo>
PQC_INLINE Vec::Bits ConvertRow(std::byte* to, const std::byte* from, uint32_t dim,
                                Vec::Bits most) {
  uint32_t i = 0;
  for (; i + Vec::kLanes <= dim; i += Vec::kLanes) {
    const Vec::F value = Vec::LoadRow<kFrom>(from, i);
    most = Vec::MaxMagnitude(most, value);
    Vec::StoreRow<kTo>(to, i, value);
  }
  if (i < dim) {
    const Vec::F value = Vec::LoadRowHalf<kFrom>(from, i);
    most = Vec::MaxMagnitude(most, value);
    Vec::StoreRowHalf<kTo>(to, i, value);
  }
  return most;
}

template <DType kFrom, DType kTo>
bool Stage(const StageCall& call) {
  constexpr bool kCopiesHalves = kFrom == kTo && kFrom != DType::kF32;
  const uint32_t source_bytes = call.dim * (kFrom == DType::kF32 ? 4 : 2);
  Vec::Bits most = Vec::ZeroBits();
  for (uint32_t t = 0; t < call.token_count; ++t) {
    const std::byte* from = call.source + ptrdiff_t{t} * call.token_stride_bytes;
    std::byte* to = call.staging + t * call.staging_stride_bytes;
    if (t + kSourcePrefetchTokens < call.token_count + call.tokens_behind) {
      const std::byte* ahead = from + ptrdiff_t{kSourcePrefetchTokens} * call.token_stride_bytes;
      for (uint32_t i = 0; i < source_bytes; i += 64) Vec::Prefetch(ahead + i);
    }
    if constexpr (kCopiesHalves) {
      most = Vec::CopyHalves(to, from, call.dim, most);
    } else {
      most = ConvertRow<kFrom, kTo>(to, from, call.dim, most);
    }
  }
  if constexpr (kCopiesHalves) {
    return !Vec::AnyHalfAtLeast(most, kFrom == DType::kF16 ? 0x7c00 : 0x7f80);
  } else {
    return !Vec::AnyAtLeast(most, kFirstInfinite<kTo>);
  }
}

template <DType kFrom>
bool StageFrom(const StageCall& call) {
  switch (call.to) {
    case DType::kF16:
      return Stage<kFrom, DType::kF16>(call);
    case DType::kBf16:
      return Stage<kFrom, DType::kBf16>(call);
    case DType::kF32:
      return Stage<kFrom, DType::kF32>(call);
  }
  return false;
}

inline bool StageByTypes(const StageCall& call) {
  switch (call.from) {
    case DType::kF16:
      return StageFrom<DType::kF16>(call);
    case DType::kBf16:
      return StageFrom<DType::kBf16>(call);
    case DType::kF32:
      return StageFrom<DType::kF32>(call);
  }
  return false;
}

inline void StreamStagedRows(const StreamCall& call) {
  if (call.row_bytes == call.target_stride_bytes) {
    StreamBytes(call.target, call.staging, call.row_bytes * call.row_count);
    return;
  }
  for (uint32_t i = 0; i < call.row_count; ++i) {
    StreamBytes(call.target + i * call.target_stride_bytes, call.staging + i * call.row_bytes,
                call.row_bytes);
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_INGEST_SIMD_H_
