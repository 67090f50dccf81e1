// Staging of rows for the ingest copy, written once for every Vec.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_ROWS_INGEST_SIMD_H_
#define PQCACHED_KERNELS_ROWS_INGEST_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/rows/ingest_internal.h"

namespace pqcached::kernels {
namespace {

using internal::StageCall;

// Smallest magnitude (as the bits of a float) that is infinite in kType after rounding.
template <DType kType>
constexpr uint32_t kFirstInfinite = kType == DType::kF16    ? 0x477ff000u  // 65520
                                    : kType == DType::kBf16 ? 0x7f7f8000u
                                                            : 0x7f800000u;

template <DType kFrom, DType kTo>
PQC_INLINE Vec::Bits ConvertRow(std::byte* to, const std::byte* from, uint32_t dim,
                                Vec::Bits most) {
  uint32_t i = 0;
  for (; i + Vec::kLanes <= dim; i += Vec::kLanes) {
    const Vec::F value = Vec::LoadedOnce(Vec::LoadRow<kFrom>(from, i));
    most = Vec::MaxMagnitude(most, value);
    Vec::StoreRow<kTo>(to, i, value);
  }
  if (i < dim) {
    const Vec::F value = Vec::LoadedOnce(Vec::LoadRowHalf<kFrom>(from, i));
    most = Vec::MaxMagnitude(most, value);
    Vec::StoreRowHalf<kTo>(to, i, value);
  }
  return most;
}

// Stages elements [begin, begin + count) of all tokens and prefetches the same elements of later
// tokens.
template <DType kFrom, DType kTo>
PQC_INLINE Vec::Bits StageColumn(const StageCall& call, uint32_t begin, uint32_t count,
                                 Vec::Bits most) {
  constexpr uint32_t kFromBytes = kFrom == DType::kF32 ? 4 : 2;
  constexpr uint32_t kToBytes = kTo == DType::kF32 ? 4 : 2;
  const uint32_t tokens_in_reach = call.token_count + call.tokens_after;
  for (uint32_t t = 0; t < call.token_count; ++t) {
    const std::byte* from =
        call.source + ptrdiff_t{t} * call.token_stride_bytes + begin * kFromBytes;
    std::byte* to = call.staging + t * call.staging_stride_bytes + begin * kToBytes;
    if (t + call.prefetch_tokens < tokens_in_reach) {
      const std::byte* ahead = from + ptrdiff_t{call.prefetch_tokens} * call.token_stride_bytes;
      for (uint32_t i = 0; i < count * kFromBytes; i += 64) Vec::Prefetch(ahead + i);
    }
    if constexpr (kFrom == kTo && kFrom != DType::kF32) {
      most = Vec::CopyHalves(to, from, count, most);
    } else {
      most = ConvertRow<kFrom, kTo>(to, from, count, most);
    }
  }
  return most;
}

template <DType kFrom, DType kTo>
bool Stage(const StageCall& call) {
  Vec::Bits most = Vec::ZeroBits();
  for (uint32_t i = 0; i < call.dim; i += call.column_elements) {
    const uint32_t left = call.dim - i;
    most = StageColumn<kFrom, kTo>(call, i,
                                   left < call.column_elements ? left : call.column_elements, most);
  }
  if constexpr (kFrom == kTo && kFrom != DType::kF32) {
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

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ROWS_INGEST_SIMD_H_
