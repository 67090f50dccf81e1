// Unpack, written once for every Vec.
//
// The order of tokens and heads is that of the target's memory, so that its lines are completed one
// after the other. Rows of several heads are then read in turns; each head's rows are contiguous,
// and prefetched.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_ROWS_UNPACK_SIMD_H_
#define PQCACHED_KERNELS_ROWS_UNPACK_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/simd/copy_simd.h"
#include "kernels/rows/unpack_internal.h"

namespace pqcached::kernels {
namespace {

using internal::UnpackCall;
using internal::UnpackPart;

constexpr uint32_t kAheadBytes = 2048;  // of one head's rows

template <DType kFrom, DType kTo>
PQC_INLINE void ConvertPart(std::byte* to, const std::byte* from, uint32_t dim, bool stream) {
  if (stream && dim % 32 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    for (uint32_t i = 0; i < dim; i += Vec::kLanes) {
      Vec::StreamRow<kTo>(to, i, Vec::LoadRow<kFrom>(from, i));
    }
    return;
  }
  uint32_t i = 0;
  for (; i + Vec::kLanes <= dim; i += Vec::kLanes) {
    Vec::StoreRow<kTo>(to, i, Vec::LoadRow<kFrom>(from, i));
  }
  if (i < dim) Vec::StoreRowHalf<kTo>(to, i, Vec::LoadRowHalf<kFrom>(from, i));
}

// Copies the part of one token and head.
template <DType kFrom, DType kTo>
PQC_INLINE void UnpackOne(const UnpackCall& call, const UnpackPart& part, uint32_t token,
                          uint32_t head) {
  const std::byte* from = call.rows[head] + token * call.row_stride_bytes + part.begin_bytes;
  std::byte* to = part.target + ptrdiff_t{token} * part.token_stride_bytes +
                  ptrdiff_t{head} * part.head_stride_bytes;
  constexpr uint32_t kFromBytes = kFrom == DType::kF32 ? 4 : 2;
  const uint32_t bytes = part.dim * kFromBytes;
  for (uint32_t i = 0; i < bytes; i += 64) Vec::Prefetch(from + kAheadBytes + i);
  if constexpr (kFrom != kTo) {
    ConvertPart<kFrom, kTo>(to, from, part.dim, call.stream);
  } else if (call.stream) {
    StreamBytes(to, from, bytes);
  } else {
    CopyBytes(to, from, bytes);
  }
}

// Copies the parts of one token for all heads, or those of one head for all tokens.
template <DType kFrom, DType kTo>
void UnpackToken(const UnpackCall& call, const UnpackPart& part, uint32_t token) {
  for (uint32_t head = 0; head < call.head_count; ++head) {
    UnpackOne<kFrom, kTo>(call, part, token, head);
  }
}
template <DType kFrom, DType kTo>
void UnpackHead(const UnpackCall& call, const UnpackPart& part, uint32_t head) {
  for (uint32_t token = 0; token < call.token_count; ++token) {
    UnpackOne<kFrom, kTo>(call, part, token, head);
  }
}

struct UnpackKernels {
  void (*token)(const UnpackCall&, const UnpackPart&, uint32_t);
  void (*head)(const UnpackCall&, const UnpackPart&, uint32_t);
};

template <DType kFrom, DType kTo>
constexpr UnpackKernels kUnpack = {&UnpackToken<kFrom, kTo>, &UnpackHead<kFrom, kTo>};

template <DType kFrom>
UnpackKernels UnpackKernelsTo(DType to) {
  switch (to) {
    case DType::kF16:
      return kUnpack<kFrom, DType::kF16>;
    case DType::kBf16:
      return kUnpack<kFrom, DType::kBf16>;
    case DType::kF32:
      break;
  }
  return kUnpack<kFrom, DType::kF32>;
}

inline UnpackKernels UnpackKernelsOf(DType from, DType to) {
  switch (from) {
    case DType::kF16:
      return UnpackKernelsTo<DType::kF16>(to);
    case DType::kBf16:
      return UnpackKernelsTo<DType::kBf16>(to);
    case DType::kF32:
      break;
  }
  return UnpackKernelsTo<DType::kF32>(to);
}

inline ptrdiff_t Magnitude(ptrdiff_t stride) { return stride < 0 ? -stride : stride; }

inline bool IsHeadMajor(const UnpackPart& part) {
  return part.dim > 0 && Magnitude(part.head_stride_bytes) >= Magnitude(part.token_stride_bytes);
}

inline void UnpackInOrder(const UnpackCall& call) {
  const UnpackKernels key = UnpackKernelsOf(call.from, call.key.to);
  const UnpackKernels value = UnpackKernelsOf(call.from, call.value.to);
  const bool by_head = IsHeadMajor(call.key) || IsHeadMajor(call.value);
  const uint32_t count = by_head ? call.head_count : call.token_count;
  for (uint32_t i = 0; i < count; ++i) {
    if (call.key.dim > 0) (by_head ? key.head : key.token)(call, call.key, i);
    if (call.value.dim > 0) (by_head ? value.head : value.token)(call, call.value, i);
  }
  if (call.stream) Vec::Fence();
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ROWS_UNPACK_SIMD_H_
