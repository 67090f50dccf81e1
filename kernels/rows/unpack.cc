#include "kernels/rows/unpack.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/rows/unpack_internal.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kMaxPartDim = 256;

// Keys or values in rows.
struct PartOfRow {
  uint32_t dim = 0;
  size_t begin_bytes = 0;
};

std::byte* PlaceOf(const UnpackTarget& target, uint32_t token, uint32_t head, uint32_t index) {
  return target.data + ptrdiff_t{token} * target.token_stride_bytes +
         ptrdiff_t{head} * target.head_stride_bytes +
         ptrdiff_t{index} * target.element_stride_bytes;
}

// The specification of one part.
void UnpackReference(const UnpackArgs& args, const PartOfRow& part, const UnpackTarget& target) {
  for (uint32_t head = 0; head < args.rows.size(); ++head) {
    for (uint32_t token = 0; token < args.token_count; ++token) {
      const std::byte* row = args.rows[head] + token * args.row_stride_bytes + part.begin_bytes;
      for (uint32_t i = 0; i < part.dim; ++i) {
        StoreElement(target.dtype, PlaceOf(target, token, head, i), 0,
                     LoadElement(args.row_dtype, row, i));
      }
    }
  }
}

#ifdef PQCACHED_X86
// Copies elements of kBytes to a target with any element stride. Works in tiles of tokens, so that
// the lines of rows that are read, and those of a transposed target that are written, stay in the
// cache for a tile.
template <size_t kBytes>
void CopyElements(const UnpackArgs& args, const PartOfRow& part, const UnpackTarget& target) {
  constexpr uint32_t kTileTokens = 32;
  for (uint32_t head = 0; head < args.rows.size(); ++head) {
    for (uint32_t begin = 0; begin < args.token_count; begin += kTileTokens) {
      const uint32_t count = std::min(kTileTokens, args.token_count - begin);
      const std::byte* row = args.rows[head] + begin * args.row_stride_bytes + part.begin_bytes;
      for (uint32_t i = 0; i < part.dim; ++i) {
        const std::byte* from = row + i * kBytes;
        std::byte* to = PlaceOf(target, begin, head, i);
        for (uint32_t token = 0; token < count; ++token) {
          std::memcpy(to, from, kBytes);
          to += target.token_stride_bytes;
          from += args.row_stride_bytes;
        }
      }
    }
  }
}

void UnpackScattered(const UnpackArgs& args, const PartOfRow& part, const UnpackTarget& target) {
  if (target.dtype != args.row_dtype) return UnpackReference(args, part, target);
  if (DTypeBytes(target.dtype) == 2) return CopyElements<2>(args, part, target);
  CopyElements<4>(args, part, target);
}

bool HasContiguousElements(const UnpackTarget& target) {
  return target.element_stride_bytes == static_cast<ptrdiff_t>(DTypeBytes(target.dtype));
}

internal::UnpackPart UnpackPartOf(const PartOfRow& part, const UnpackTarget& target) {
  return {.dim = part.dim,
          .to = target.dtype,
          .begin_bytes = part.begin_bytes,
          .target = target.data,
          .token_stride_bytes = target.token_stride_bytes,
          .head_stride_bytes = target.head_stride_bytes};
}
#endif

}  // namespace

void UnpackHeads(const Exec& exec, const UnpackArgs& args) {
  if (args.token_count == 0 || args.rows.empty()) return;
  PQC_CHECK(args.key_dim % 8 == 0 && args.key_dim <= kMaxPartDim);
  PQC_CHECK(args.value_dim % 8 == 0 && args.value_dim > 0 && args.value_dim <= kMaxPartDim);
  const size_t element_bytes = DTypeBytes(args.row_dtype);
  PQC_CHECK(args.row_stride_bytes >= (args.key_dim + args.value_dim) * element_bytes);
  const PartOfRow key{args.key_dim, 0};
  const PartOfRow value{args.value_dim, args.key_dim * element_bytes};
#ifdef PQCACHED_X86
  if (exec.level >= Level::kAvx2) {
    internal::UnpackCall call{.key = UnpackPartOf(key, args.key),
                              .value = UnpackPartOf(value, args.value),
                              .from = args.row_dtype,
                              .token_count = args.token_count,
                              .rows = args.rows.data(),
                              .head_count = static_cast<uint32_t>(args.rows.size()),
                              .row_stride_bytes = args.row_stride_bytes,
                              .stream = args.stream};
    if (!HasContiguousElements(args.key)) {
      UnpackScattered(args, key, args.key);
      call.key.dim = 0;
    }
    if (!HasContiguousElements(args.value)) {
      UnpackScattered(args, value, args.value);
      call.value.dim = 0;
    }
    return exec.level >= Level::kAvx512 ? internal::UnpackAvx512(call) : internal::UnpackAvx2(call);
  }
#else
  static_cast<void>(exec);
#endif
  UnpackReference(args, key, args.key);
  UnpackReference(args, value, args.value);
}

}  // namespace pqcached::kernels
