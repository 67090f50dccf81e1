// Reads the tensors of callers: rows, paged or not, queries, and places of results.
#include <algorithm>
#include <cstdio>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using kvstore::kMaxGroupSize;
// Limit of a tensor's elements and of its strides' reach: offsets in bytes stay far below 63 bits.
constexpr uint64_t kMaxElements = uint64_t{1} << 40;

// Name of a nested field. Fixed size, because steps build names for each layer and must not
// allocate.
template <size_t kSize>
struct FieldName {
  FieldName(const char* name, const char* field) {
    std::snprintf(text, sizeof(text), "%s%s", name, field);
  }
  char text[kSize];
};

pqc_status CheckPlace(const pqc_tensor& tensor, const char* name, const TensorPlace& place) {
  const uint32_t device = RawEnum(tensor.device);
  if (device != PQC_CPU && device != PQC_CUDA) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.device", name), "%u is unknown", device);
  }
  if (device == PQC_CUDA && place.device == PQC_CPU) {
    return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.device", name),
                "PQC_CUDA is for loads, prefill, steps and merges on a GPU");
  }
  if (device == PQC_CPU && place.device == PQC_CUDA) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.device", name),
                "must be PQC_CUDA in a call on a GPU");
  }
  if (!tensor.stream || tensor.stream == place.stream) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.stream", name), "must be %s",
              device == PQC_CPU ? "NULL on PQC_CPU" : "NULL or the stream of the call or its step");
}

pqc_status CheckTensorFields(const pqc_tensor& tensor, const char* name, const TensorPlace& place) {
  RETURN_IF_ERROR(CheckMemberSize(tensor, name));
  RETURN_IF_ERROR(CheckPlace(tensor, name, place));
  const uint32_t dtype = RawEnum(tensor.dtype);
  if (dtype < PQC_F16 || dtype > PQC_F32) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.dtype", name),
                "%u, must be PQC_F16, PQC_BF16 or PQC_F32", dtype);
  }
  if (tensor.reserved[0] || tensor.reserved[1]) {
    return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.reserved", name),
                "not supported in this version; must be zero");
  }
  if (tensor.ndim < 1 || tensor.ndim > 4) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.ndim", name), "%u, must be 1 to 4",
                tensor.ndim);
  }
  if (!tensor.shape)
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape", name), "must not be NULL");
  return PQC_OK;
}

pqc_status CheckDim(const TensorView& view, uint32_t dim, uint64_t size, const char* name,
                    const char* meaning) {
  if (view.shape[dim] == size) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape[%u]", name, dim),
              "%llu, must be the cache's %s %llu", static_cast<unsigned long long>(view.shape[dim]),
              meaning, static_cast<unsigned long long>(size));
}

// Reads the table of the blocks that tokens first_token to first_token + token_count are in.
pqc_status ReadBlocks(const pqc_block_table& blocks, const char* table, const char* name,
                      TensorView* view) {
  if (blocks.first_token > kMaxSequenceTokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.first_token", table),
                "%llu, must be at most 2^30", static_cast<unsigned long long>(blocks.first_token));
  }
  const uint64_t end = blocks.first_token + blocks.token_count;
  const uint64_t used = (end + blocks.block_tokens - 1) / blocks.block_tokens;
  if (blocks.block_count < used) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.block_count", table),
                "%llu, but %llu are needed for tokens up to %llu",
                static_cast<unsigned long long>(blocks.block_count),
                static_cast<unsigned long long>(used), static_cast<unsigned long long>(end));
  }
  if (used > 0 && !blocks.blocks) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.blocks", table), "must not be NULL");
  }
  for (uint64_t i = blocks.first_token / blocks.block_tokens; i < used; ++i) {
    if (blocks.blocks[i] >= view->shape[0]) {
      return Fail(PQC_INVALID_ARGUMENT,
                  FieldPath::Of("%s.blocks[%llu]", table, static_cast<unsigned long long>(i)),
                  "%u, must be below %s.shape[0], %llu", blocks.blocks[i], name,
                  static_cast<unsigned long long>(view->shape[0]));
    }
  }
  view->blocks = blocks.blocks;
  view->first_token = blocks.first_token;
  return PQC_OK;
}

// Reads a slot mapping.
pqc_status ReadSlots(const pqc_block_table& blocks, const char* table, const char* name,
                     TensorView* view) {
  const char* other = blocks.blocks        ? "blocks"
                      : blocks.block_count ? "block_count"
                      : blocks.first_token ? "first_token"
                                           : nullptr;
  if (other) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.%s", table, other),
                "must be zero with slots");
  }
  // ReadTensor has limited the product.
  const uint64_t slot_count = view->shape[0] * blocks.block_tokens;
  for (uint64_t i = 0; i < blocks.token_count; ++i) {
    if (blocks.slots[i] >= 0 && static_cast<uint64_t>(blocks.slots[i]) < slot_count) continue;
    return Fail(PQC_INVALID_ARGUMENT,
                FieldPath::Of("%s.slots[%llu]", table, static_cast<unsigned long long>(i)),
                "%lld, must lie in [0, %llu), the slots of %s",
                static_cast<long long>(blocks.slots[i]),
                static_cast<unsigned long long>(slot_count), name);
  }
  view->slots = blocks.slots;
  return PQC_OK;
}

// Views [blocks, block_tokens, heads, dim] as [tokens, heads, dim] through the block table.
pqc_status ReadBlockTable(const pqc_block_table* from, const char* name, TensorView* view) {
  const FieldName<96> table_name(name, ".block_table");
  const char* table = table_name.text;
  pqc_block_table blocks{};
  RETURN_IF_ERROR(ReadStruct(from, table, &blocks));
  if (view->ndim != 4) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.ndim", name),
                "%u, must be 4 with a block table: [blocks, block_tokens, kv_heads, dim]",
                view->ndim);
  }
  if (blocks.block_tokens == 0 || blocks.block_tokens != view->shape[1]) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.block_tokens", table),
                "%u, must be %s.shape[1], %llu, and not 0", blocks.block_tokens, name,
                static_cast<unsigned long long>(view->shape[1]));
  }
  if (blocks.token_count > kMaxSequenceTokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.token_count", table),
                "%llu, must be at most 2^30", static_cast<unsigned long long>(blocks.token_count));
  }
  RETURN_IF_ERROR(blocks.slots ? ReadSlots(blocks, table, name, view)
                               : ReadBlocks(blocks, table, name, view));
  view->block_tokens = blocks.block_tokens;
  view->block_stride = view->strides[0];
  view->ndim = 3;
  view->shape[0] = blocks.token_count;
  for (uint32_t dim = 0; dim < 3; ++dim) view->strides[dim] = view->strides[dim + 1];
  for (uint32_t dim = 1; dim < 3; ++dim) view->shape[dim] = view->shape[dim + 1];
  return PQC_OK;
}

pqc_status ReadRowTensor(const pqc_tensor& tensor, const LayerShape& shape, uint32_t dim,
                         const char* dim_meaning, const char* name, TensorView* view,
                         const TensorPlace& place) {
  pqc_tensor plain = tensor;
  plain.block_table = nullptr;
  RETURN_IF_ERROR(ReadTensor(plain, name, view, place));
  if (tensor.block_table) {
    RETURN_IF_ERROR(ReadBlockTable(tensor.block_table, name, view));
  }
  if (view->ndim != 3) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.ndim", name),
                "%u, must be 3: [tokens, kv_heads, %s]", view->ndim, dim_meaning);
  }
  if (view->shape[0] < 1 || view->shape[0] > kMaxSequenceTokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape[0]", name),
                "%llu tokens, must be 1 to 2^30", static_cast<unsigned long long>(view->shape[0]));
  }
  RETURN_IF_ERROR(CheckDim(*view, 1, shape.kv_heads, name, "kv_heads"));
  return CheckDim(*view, 2, dim, name, dim_meaning);
}

pqc_status CheckRangeQueryLength(uint64_t length, const char* name) {
  if (length >= 1 && length <= kvstore::kMaxRangeQueryLength) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape[0]", name),
              "%llu query tokens, must be 1 to %u", static_cast<unsigned long long>(length),
              kvstore::kMaxRangeQueryLength);
}

}  // namespace

pqc_status ReadTensor(const pqc_tensor& tensor, const char* name, TensorView* view,
                      const TensorPlace& place) {
  RETURN_IF_ERROR(CheckTensorFields(tensor, name, place));
  if (tensor.block_table) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.block_table", name),
                "only for keys and values of rows");
  }
  view->data = static_cast<const std::byte*>(tensor.ptr);
  view->dtype = static_cast<DType>(tensor.dtype);
  view->ndim = tensor.ndim;
  uint64_t elements = 1;
  for (uint32_t dim = tensor.ndim; dim-- > 0;) {
    const uint64_t size = tensor.shape[dim];
    if (size > kMaxElements || (size > 0 && elements > kMaxElements / size)) {
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape", name), "more than 2^40 elements");
    }
    const int64_t stride = tensor.strides ? tensor.strides[dim] : static_cast<int64_t>(elements);
    const auto reach = static_cast<int64_t>(kMaxElements / (size > 1 ? size - 1 : 1));
    if (stride > reach || stride < -reach) {
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.strides[%u]", name, dim),
                  "beyond 2^40 elements");
    }
    view->shape[dim] = size;
    view->strides[dim] = stride;
    elements *= size;
  }
  if (!view->data && elements > 0) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.ptr", name), "must not be NULL");
  }
  return PQC_OK;
}

ptrdiff_t StrideBytes(const TensorView& view, uint32_t dim) {
  return view.strides[dim] * static_cast<ptrdiff_t>(kernels::DTypeBytes(view.dtype));
}

pqc_status ReadLogBase(uint32_t from, const char* name, kvstore::LogBase* to) {
  if (from > PQC_LOG_BASE2) {
    return Fail(PQC_INVALID_ARGUMENT, name, "%u, must be PQC_LOG_NATURAL or PQC_LOG_BASE2", from);
  }
  *to = from == PQC_LOG_BASE2 ? kvstore::LogBase::kTwo : kvstore::LogBase::kNatural;
  return PQC_OK;
}

pqc_status ReadTarget(const pqc_tensor& tensor, const char* name,
                      std::initializer_list<uint64_t> shape, TensorView* view,
                      const TensorPlace& place) {
  RETURN_IF_ERROR(ReadTensor(tensor, name, view, place));
  const auto rank = static_cast<uint32_t>(shape.size());
  if (view->ndim + 1 == rank && *shape.begin() == 1) {  // one token, whose dimension is left out
    for (uint32_t dim = view->ndim; dim > 0; --dim) {
      view->shape[dim] = view->shape[dim - 1];
      view->strides[dim] = view->strides[dim - 1];
    }
    view->shape[0] = 1;
    view->strides[0] = 0;
    view->ndim = rank;
  }
  if (view->ndim != rank) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.ndim", name), "%u, must be %u", view->ndim,
                rank);
  }
  for (uint32_t dim = 0; dim < rank; ++dim) {
    const uint64_t size = shape.begin()[dim];
    if (view->shape[dim] != size) {
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape[%u]", name, dim),
                  "%llu, must be %llu", static_cast<unsigned long long>(view->shape[dim]),
                  static_cast<unsigned long long>(size));
    }
    if (size > 1 && view->strides[dim] == 0) {
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.strides[%u]", name, dim),
                  "0, but each result needs a place of its own");
    }
  }
  return PQC_OK;
}

pqc_status ReadRows(const pqc_tensor& keys, const pqc_tensor& values, const LayerShape& shape,
                    const char* name, RowBlock* rows, const TensorPlace& place) {
  const FieldName<64> keys_name(name, "keys");
  const FieldName<64> values_name(name, "values");
  if (!shape.has_keys()) {
    if (keys.ptr || keys.ndim) {
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s", keys_name.text),
                  "must be empty: the layer is of kind PQC_LAYERS_VALUES");
    }
    if (place.device != PQC_CPU) {
      return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.device", values_name.text),
                  "must be PQC_CPU for layers of kind PQC_LAYERS_VALUES");
    }
    RETURN_IF_ERROR(ReadRowTensor(values, shape, shape.value_dim, "value_dim", values_name.text,
                                  &rows->values, place));
    // The keys are as many, and have no numbers.
    rows->keys = {.data = rows->values.data,
                  .dtype = shape.dtype,
                  .ndim = 3,
                  .shape = {rows->values.shape[0], shape.kv_heads, 0}};
    return PQC_OK;
  }
  RETURN_IF_ERROR(
      ReadRowTensor(keys, shape, shape.key_dim, "key_dim", keys_name.text, &rows->keys, place));
  RETURN_IF_ERROR(ReadRowTensor(values, shape, shape.value_dim, "value_dim", values_name.text,
                                &rows->values, place));
  if (rows->values.shape[0] != rows->keys.shape[0]) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape[0]", values_name.text),
                "%llu tokens, but %llu in the keys",
                static_cast<unsigned long long>(rows->values.shape[0]),
                static_cast<unsigned long long>(rows->keys.shape[0]));
  }
  return PQC_OK;
}

pqc_status CheckHasKeys(const LayerShape& shape, const char* field) {
  if (shape.has_keys()) return PQC_OK;
  return Fail(PQC_FAILED_PRECONDITION, field,
              "is of kind PQC_LAYERS_VALUES: attend to positions with logits");
}

pqc_status CheckQueryLength(uint64_t length, const LayerShape& shape, const char* name) {
  if (length < 1 || length > kMaxQueryLength) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape[0]", name),
                "query_length %llu, must be 1 to %u", static_cast<unsigned long long>(length),
                kMaxQueryLength);
  }
  const uint64_t group = shape.query_heads / shape.kv_heads;
  if (group * length <= kMaxGroupSize) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape[0]", name),
              "query_length %llu; group size %llu x query_length must be at most %u",
              static_cast<unsigned long long>(length), static_cast<unsigned long long>(group),
              kMaxGroupSize);
}

pqc_status ReadAttentionOut(const AttentionOutFields& fields, const LayerShape& shape,
                            uint64_t tokens, kvstore::AttentionOut* to) {
  *to =
      kvstore::AttentionOut::Packed(fields.output, fields.lse, shape.query_heads, shape.value_dim);
  RETURN_IF_ERROR(ReadLogBase(fields.lse_base, "out.lse_base", &to->lse_base));
  const uint64_t rows = tokens * shape.query_heads;
  if (fields.output_tensor) {
    if (fields.output) {
      return Fail(PQC_INVALID_ARGUMENT, "out.output", "must be NULL with out.output_tensor");
    }
    TensorView view;
    RETURN_IF_ERROR(ReadTarget(*fields.output_tensor, "out.output_tensor",
                               {tokens, shape.query_heads, shape.value_dim}, &view));
    to->output = const_cast<std::byte*>(view.data);
    to->output_dtype = view.dtype;
    for (uint32_t dim = 0; dim < 3; ++dim) to->output_strides_bytes[dim] = StrideBytes(view, dim);
  } else {
    if (!fields.output) return Fail(PQC_INVALID_ARGUMENT, "out.output", "must not be NULL");
    RETURN_IF_ERROR(
        CheckCapacity("out.output_capacity", fields.output_capacity, rows * shape.value_dim));
  }
  if (!fields.lse_tensor) {
    if (!fields.lse) return Fail(PQC_INVALID_ARGUMENT, "out.lse", "must not be NULL");
    return CheckCapacity("out.lse_capacity", fields.lse_capacity, rows);
  }
  if (fields.lse) {
    return Fail(PQC_INVALID_ARGUMENT, "out.lse", "must be NULL with out.lse_tensor");
  }
  TensorView view;
  RETURN_IF_ERROR(
      ReadTarget(*fields.lse_tensor, "out.lse_tensor", {tokens, shape.query_heads}, &view));
  to->lse = const_cast<std::byte*>(view.data);
  to->lse_dtype = view.dtype;
  for (uint32_t dim = 0; dim < 2; ++dim) to->lse_strides_bytes[dim] = StrideBytes(view, dim);
  return PQC_OK;
}

pqc_status ReadQueries(const pqc_tensor& queries, const LayerShape& shape, TensorView* view,
                       bool of_range) {
  constexpr char kName[] = "query.queries";
  RETURN_IF_ERROR(CheckHasKeys(shape, "query.layer"));
  RETURN_IF_ERROR(ReadTensor(queries, kName, view));
  if (view->ndim != 2 && view->ndim != 3) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.ndim", kName),
                "%u, must be 3: [query_length, query_heads, key_dim], or 2: [query_heads, key_dim]",
                view->ndim);
  }
  const uint32_t heads = view->ndim - 2;  // dimension of the heads
  const uint64_t length = heads == 1 ? view->shape[0] : 1;
  if (of_range) {
    RETURN_IF_ERROR(CheckRangeQueryLength(length, kName));
  } else {
    RETURN_IF_ERROR(CheckQueryLength(length, shape, kName));
  }
  RETURN_IF_ERROR(CheckDim(*view, heads, shape.query_heads, kName, "query_heads"));
  RETURN_IF_ERROR(CheckDim(*view, heads + 1, shape.key_dim, kName, "key_dim"));
  const int64_t length_stride = heads == 1 ? view->strides[0] : 0;
  *view = {.data = view->data,
           .dtype = view->dtype,
           .ndim = 3,
           .shape = {length, shape.query_heads, shape.key_dim},
           .strides = {length_stride, view->strides[heads], view->strides[heads + 1]}};
  return PQC_OK;
}

}  // namespace pqcached::client
