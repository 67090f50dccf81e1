#include "client/local/view.h"

#include <algorithm>
#include <cstring>

#include "client/base/error.h"
#include "client/base/pack.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using kvstore::IndexDescriptor;
using kvstore::IndexKind;

kernels::DType ToKernel(pqc_dtype dtype) { return static_cast<kernels::DType>(dtype); }
static_assert(static_cast<int>(kernels::DType::kF16) == PQC_F16 &&
              static_cast<int>(kernels::DType::kBf16) == PQC_BF16 &&
              static_cast<int>(kernels::DType::kF32) == PQC_F32);

// Uses the sidecar's error texts.
pqc_status CheckIndexTerms(const WantedIndex& wanted, uint32_t key_dim) {
  const IndexDescriptor& index = wanted.index;
  if (index.kind == IndexKind::kFlat) return PQC_OK;
  const uint32_t m = index.subspace_count;
  if (m == 0 || m > 16 || (m & (m - 1)) != 0) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.subspaces", wanted.field),
                "%u, must be 1, 2, 4, 8 or 16", m);
  }
  if (index.bits < 4 || index.bits > 8) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.bits", wanted.field),
                "%u, must lie in [4, 8]", index.bits);
  }
  if (key_dim % m != 0) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.subspaces", wanted.field),
                "%u, must divide key_dim, %u", m, key_dim);
  }
  return PQC_OK;
}

}  // namespace

kvstore::LayerShape ShapeOf(const LayerShape& shape) {
  return {.dtype = ToKernel(shape.dtype),
          .key_dim = shape.key_dim,
          .value_dim = shape.value_dim,
          .kv_heads = shape.kv_heads,
          .query_heads = shape.query_heads,
          .row_bytes =
              (shape.key_dim + shape.value_dim) * static_cast<uint32_t>(ElementBytes(shape.dtype)),
          .scale = shape.scale,
          .softcap = shape.softcap};
}

pqc_status OpenLayer(const Pinned& pinned, uint32_t layer, const LayerShape& shape,
                     const WantedIndex& wanted, OpenedLayer* opened) {
  RETURN_IF_ERROR(CheckIndexTerms(wanted, shape.key_dim));
  uint32_t index_slot = 0;
  if (const pqc_status status = pinned.image->FindIndex(wanted.index, &index_slot);
      status != PQC_OK) {
    return PrefixField(wanted.field, status);
  }
  RETURN_IF_ERROR(pinned.image->Borrow(layer, ShapeOf(shape), index_slot, &opened->loan));
  opened->view = opened->loan.layer().View(pinned.sequence->VisibleTokens(*pinned.image, layer));
  return PQC_OK;
}

pqc_status CheckCoded(const kvstore::LayerView& view, const WantedIndex& wanted,
                      std::span<const kvstore::PositionRange> candidates) {
  const IndexDescriptor& index = wanted.index;
  if (index.kind == IndexKind::kFlat || candidates.empty()) return PQC_OK;
  const uint32_t begin = candidates.front().begin, end = candidates.back().end;
  for (const kvstore::SegmentView& segment : view.segments) {
    const uint32_t segment_end = segment.first_position + segment.token_count;
    if (segment.index_data || segment_end <= begin || segment.first_position >= end) continue;
    return SetRetry(kRetryConflict,
                    Fail(PQC_ABORTED, wanted.field,
                         "the index pq m=%u b=%u does not cover positions [%u, %u) yet",
                         index.subspace_count, index.bits, segment.first_position, segment_end));
  }
  return PQC_OK;
}

void WidenGroup(kvstore::LayerView* view, uint64_t query_length) {
  view->shape.query_heads *= static_cast<uint32_t>(query_length);
}

void GatherQueries(const QueryView& query, std::vector<float>* queries) {
  const LayerShape& shape = query.shape;
  const TensorView& tensor = query.queries;
  const uint64_t length = tensor.shape[0];
  const uint32_t group = shape.query_heads / shape.kv_heads;
  const auto bytes = static_cast<int64_t>(ElementBytes(tensor.dtype));
  queries->resize(length * shape.query_heads * shape.key_dim);
  float* to = queries->data();
  for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    for (uint64_t token = 0; token < length; ++token) {
      for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const std::byte* from = tensor.data + (static_cast<int64_t>(token) * tensor.strides[0] +
                                               static_cast<int64_t>(head) * tensor.strides[1]) *
                                                  bytes;
        if (tensor.strides[2] == 1) {
          kernels::ConvertElements(ToKernel(tensor.dtype), from, kernels::DType::kF32,
                                   reinterpret_cast<std::byte*>(to), shape.key_dim);
        } else {
          for (uint32_t d = 0; d < shape.key_dim; ++d) {
            to[d] = kernels::LoadElement(ToKernel(tensor.dtype),
                                         from + d * tensor.strides[2] * bytes, 0);
          }
        }
        to += shape.key_dim;
      }
    }
  }
}

void ScatterRows(const LayerShape& shape, uint64_t query_length, uint32_t dim, const float* from,
                 float* to) {
  const uint32_t group = shape.query_heads / shape.kv_heads;
  const size_t block = size_t{group} * dim;
  for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    for (uint64_t token = 0; token < query_length; ++token) {
      std::memcpy(to + (token * shape.kv_heads + kv_head) * block, from, block * sizeof(float));
      from += block;
    }
  }
}

}  // namespace pqcached::client
