#include "client/base/arguments.h"

#include <algorithm>
#include <cstdio>

#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kMaxLayerGroups = 16;
constexpr uint64_t kMaxExtraKeyBytes = 256;
constexpr uint64_t kMaxGroupKeyBytes = 64;
using kvstore::kMaxExcludedRanges;
using kvstore::kMaxGroupSize;
using kvstore::kMaxLayers;
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

pqc_status Unimplemented(const char* name, const char* field) {
  return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.%s", name, field),
              "not supported in this version; must be zero");
}

pqc_status CheckPlace(const pqc_tensor& tensor, const char* name, const TensorPlace& place) {
  const uint32_t device = RawEnum(tensor.device);
  if (device != PQC_CPU && device != PQC_CUDA) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.device", name), "%u is unknown", device);
  }
  if (device == PQC_CUDA && place.device == PQC_CPU) {
    return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.device", name),
                "PQC_CUDA is for steps of pqc_gpu_step_begin");
  }
  if (device == PQC_CPU && place.device == PQC_CUDA) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.device", name),
                "must be PQC_CUDA in a step on a GPU");
  }
  if (!tensor.stream || tensor.stream == place.stream) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.stream", name), "must be %s",
              device == PQC_CPU ? "NULL on PQC_CPU" : "NULL or the step's");
}

pqc_status CheckTensorFields(const pqc_tensor& tensor, const char* name, const TensorPlace& place) {
  RETURN_IF_ERROR(CheckMemberSize(tensor, name));
  RETURN_IF_ERROR(CheckPlace(tensor, name, place));
  const uint32_t dtype = RawEnum(tensor.dtype);
  if (dtype < PQC_F16 || dtype > PQC_F32) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.dtype", name),
                "%u, must be PQC_F16, PQC_BF16 or PQC_F32", dtype);
  }
  if (tensor.reserved[0] || tensor.reserved[1]) return Unimplemented(name, "reserved");
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

pqc_status CheckGroup(const pqc_layer_group& group, const char* name) {
  const uint32_t kind = RawEnum(group.kind);
  if (kind == PQC_LAYERS_FULL || kind == PQC_LAYERS_WINDOW) {
    return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.kind", name),
                "%s is not supported in this version",
                kind == PQC_LAYERS_FULL ? "PQC_LAYERS_FULL" : "PQC_LAYERS_WINDOW");
  }
  if (kind != PQC_LAYERS_SELECTED && kind != PQC_LAYERS_NONE) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.kind", name),
                "%u, must be PQC_LAYERS_SELECTED or PQC_LAYERS_NONE", kind);
  }
  if (group.values_alias_keys) return Unimplemented(name, "values_alias_keys");
  if (group.window_tokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.window_tokens", name),
                "only for PQC_LAYERS_WINDOW");
  }
  if (const uint32_t layout = RawEnum(group.rope_layout); layout > PQC_ROPE_INTERLEAVED) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.rope_layout", name), "%u is unknown",
                layout);
  }
  if (group.layer_count < 1 || group.layer_count > kMaxLayers) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.layer_count", name), "%u, must be 1 to %u",
                group.layer_count, kMaxLayers);
  }
  if (!group.layers)
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.layers", name), "must not be NULL");
  if (kind == PQC_LAYERS_NONE) return PQC_OK;
  const uint32_t dtype = RawEnum(group.dtype);
  if (dtype < PQC_F16 || dtype > PQC_F32) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.dtype", name),
                "%u, must be PQC_F16, PQC_BF16 or PQC_F32", dtype);
  }
  return PQC_OK;
}

pqc_status CheckRank(const pqc_cache_spec& spec) {
  if (spec.rank_group) return PQC_OK;
  const char* field = spec.rank            ? "rank"
                      : spec.rank_count    ? "rank_count"
                      : spec.kv_head_begin ? "kv_head_begin"
                      : spec.layer_begin   ? "layer_begin"
                                           : nullptr;
  if (!field) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("spec.%s", field),
              "must be 0 without spec.rank_group");
}

// Reads a number of tokens or a position.
pqc_status ReadTokens(uint64_t tokens, const FieldPath& field, uint32_t* to) {
  *to = static_cast<uint32_t>(tokens);
  if (tokens <= kMaxSequenceTokens) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, field, "%llu, must be at most %llu",
              static_cast<unsigned long long>(tokens),
              static_cast<unsigned long long>(kMaxSequenceTokens));
}

pqc_status ReadBudget(const pqc_selection& selection, kvstore::Selection* to) {
  const uint32_t budget = RawEnum(selection.budget);
  if (budget == PQC_BUDGET_MASS) {
    return Fail(PQC_UNIMPLEMENTED, "selection.budget",
                "PQC_BUDGET_MASS is not supported in this version");
  }
  if (budget > PQC_BUDGET_RETRIEVED) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.budget", "%u is unknown", budget);
  }
  to->budget_kind = budget == PQC_BUDGET_COUNT       ? kvstore::BudgetKind::kCount
                    : budget == PQC_BUDGET_RETRIEVED ? kvstore::BudgetKind::kRetrieved
                                                     : kvstore::BudgetKind::kRatio;
  to->budget_count = selection.token_count;
  to->budget_ratio = selection.ratio;
  return PQC_OK;
}

pqc_status ReadExcluded(const pqc_selection& selection, kvstore::Selection* to) {
  if (selection.excluded_count > kMaxExcludedRanges) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.excluded_count", "%u, must be at most %u",
                selection.excluded_count, kMaxExcludedRanges);
  }
  if (selection.excluded_count && !selection.excluded) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.excluded", "must not be NULL");
  }
  for (uint32_t i = 0; i < selection.excluded_count; ++i) {
    kvstore::PositionRange range;
    RETURN_IF_ERROR(ReadTokens(selection.excluded[i].begin,
                               FieldPath::Of("selection.excluded[%u].begin", i), &range.begin));
    RETURN_IF_ERROR(ReadTokens(selection.excluded[i].end,
                               FieldPath::Of("selection.excluded[%u].end", i), &range.end));
    to->excluded.push_back(range);
  }
  return PQC_OK;
}

}  // namespace

pqc_status ReportFit(StructFit fit, size_t size, size_t minimum_size, size_t known_size,
                     const char* name) {
  switch (fit) {
    case StructFit::kKnown:
      return PQC_OK;
    case StructFit::kWrongSize:
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.struct_size", name),
                  "%zu, must be %zu to %zu: set it with PQC_INIT", size, minimum_size,
                  kMaxStructBytes);
    case StructFit::kUnknownField:
      break;
  }
  return Fail(PQC_UNIMPLEMENTED, name,
              "bytes %zu to %zu belong to a field that this version does not know; must be zero",
              known_size, size);
}

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

pqc_status ReadLogBase(const pqc_log_base& from, const char* name, kvstore::LogBase* to) {
  const uint32_t base = RawEnum(from);
  if (base > PQC_LOG_BASE2) {
    return Fail(PQC_INVALID_ARGUMENT, name, "%u, must be PQC_LOG_NATURAL or PQC_LOG_BASE2", base);
  }
  *to = base == PQC_LOG_BASE2 ? kvstore::LogBase::kTwo : kvstore::LogBase::kNatural;
  return PQC_OK;
}

pqc_status ReadTarget(const pqc_tensor& tensor, const char* name,
                      std::initializer_list<uint64_t> shape, TensorView* view) {
  RETURN_IF_ERROR(ReadTensor(tensor, name, view));
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

pqc_status CheckCapacity(const char* name, uint64_t capacity, uint64_t needed) {
  if (capacity >= needed) return PQC_OK;
  return Fail(PQC_OUT_OF_RANGE, name, "%llu, but %llu are needed",
              static_cast<unsigned long long>(capacity), static_cast<unsigned long long>(needed));
}

pqc_status CheckIndex(const pqc_index& index, const char* name) {
  RETURN_IF_ERROR(CheckMemberSize(index, name));
  const uint32_t kind = RawEnum(index.kind);
  if (kind > PQC_INDEX_FLAT) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.kind", name),
                "%u, must be PQC_INDEX_DEFAULT, PQC_INDEX_PQ or PQC_INDEX_FLAT", kind);
  }
  for (const uint32_t word : index.reserved) {
    if (word) return Unimplemented(name, "reserved");
  }
  if (kind != PQC_INDEX_PQ && (index.subspaces || index.bits)) {
    return Fail(PQC_INVALID_ARGUMENT,
                FieldPath::Of("%s.%s", name, index.subspaces ? "subspaces" : "bits"),
                "only for PQC_INDEX_PQ");
  }
  return PQC_OK;
}

pqc_status ReadIndex(const pqc_index& index, const char* name,
                     const kvstore::IndexDescriptor& default_index, kvstore::IndexDescriptor* to) {
  RETURN_IF_ERROR(CheckIndex(index, name));
  switch (index.kind) {
    case PQC_INDEX_DEFAULT:
      *to = default_index;
      break;
    case PQC_INDEX_PQ:
      *to = {kvstore::IndexKind::kPq, index.subspaces, index.bits};
      break;
    case PQC_INDEX_FLAT:
      *to = {};
      break;
  }
  return PQC_OK;
}

pqc_status ReadSelection(const pqc_selection* from, const kvstore::IndexDescriptor& default_index,
                         kvstore::Selection* to) {
  pqc_selection read;
  RETURN_IF_ERROR(ReadStruct(from, "selection", &read));
  *to = {};
  RETURN_IF_ERROR(ReadIndex(read.index, "selection.index", default_index, &to->index));
  static_assert(static_cast<int>(kvstore::GroupRule::kSumSoftmax) == PQC_SUM_SOFTMAX + 1 &&
                static_cast<int>(kvstore::GroupRule::kMaxLogit) == PQC_MAX_LOGIT + 1);
  const uint32_t rule = RawEnum(read.group_rule);
  if (rule > PQC_MAX_LOGIT) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.group_rule", "%u is unknown", rule);
  }
  to->group_rule = static_cast<kvstore::GroupRule>(rule + 1);
  RETURN_IF_ERROR(ReadTokens(read.sink_tokens, "selection.sink_tokens", &to->sink_tokens));
  RETURN_IF_ERROR(ReadTokens(read.window_tokens, "selection.window_tokens", &to->window_tokens));
  RETURN_IF_ERROR(ReadBudget(read, to));
  return ReadExcluded(read, to);
}

pqc_status CheckPositions(uint64_t first_position, uint64_t token_count) {
  if (first_position <= kMaxSequenceTokens && token_count <= kMaxSequenceTokens - first_position) {
    return PQC_OK;
  }
  return Fail(PQC_INVALID_ARGUMENT, "first_position",
              "%llu and %llu tokens, but a sequence has at most 2^30",
              static_cast<unsigned long long>(first_position),
              static_cast<unsigned long long>(token_count));
}

pqc_status ReadRows(const pqc_tensor& keys, const pqc_tensor& values, const LayerShape& shape,
                    const char* name, RowBlock* rows, const TensorPlace& place) {
  const FieldName<64> keys_name(name, "keys");
  const FieldName<64> values_name(name, "values");
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

pqc_status CheckPrompt(const pqc_sequence_options& prompt, const char* prefix) {
  if (prompt.token_id_count > kMaxSequenceTokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%stoken_id_count", prefix),
                "%llu, must be at most 2^30",
                static_cast<unsigned long long>(prompt.token_id_count));
  }
  if (prompt.token_id_count && !prompt.token_ids) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%stoken_ids", prefix), "must not be NULL");
  }
  if (prompt.extra_key_bytes > kMaxExtraKeyBytes) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%sextra_key_bytes", prefix),
                "%llu, must be at most %llu",
                static_cast<unsigned long long>(prompt.extra_key_bytes),
                static_cast<unsigned long long>(kMaxExtraKeyBytes));
  }
  if (prompt.extra_key_bytes && !prompt.extra_key) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%sextra_key", prefix), "must not be NULL");
  }
  return PQC_OK;
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

pqc_status ReadSequenceOptions(const pqc_sequence_options* from, pqc_sequence_options* to) {
  RETURN_IF_ERROR(ReadStruct(from, "options", to));
  RETURN_IF_ERROR(CheckPrompt(*to, "options."));
  if (to->group_key_bytes > kMaxGroupKeyBytes) {
    return Fail(PQC_INVALID_ARGUMENT, "options.group_key_bytes", "%llu, must be at most %llu",
                static_cast<unsigned long long>(to->group_key_bytes),
                static_cast<unsigned long long>(kMaxGroupKeyBytes));
  }
  if (to->group_key_bytes && !to->group_key) {
    return Fail(PQC_INVALID_ARGUMENT, "options.group_key", "must not be NULL");
  }
  if (to->has_live_index > 1) {
    return Fail(PQC_INVALID_ARGUMENT, "options.has_live_index", "%u, must be 0 or 1",
                to->has_live_index);
  }
  RETURN_IF_ERROR(CheckIndex(to->index, "options.index"));
  if (!to->has_live_index && (to->iterations || to->seed || to->train_tokens || to->sink_tokens ||
                              to->index.kind != PQC_INDEX_DEFAULT)) {
    return Fail(PQC_INVALID_ARGUMENT, "options.has_live_index",
                "0, but options of an incremental index are set");
  }
  return PQC_OK;
}

pqc_status ReadCacheSpec(const pqc_cache_spec* from, CacheArguments* to) {
  pqc_cache_spec& spec = to->spec;
  RETURN_IF_ERROR(ReadStruct(from, "spec", &spec));
  if (!spec.name) return Fail(PQC_INVALID_ARGUMENT, "spec.name", "must not be NULL");
  if (!spec.model_fingerprint) {
    return Fail(PQC_INVALID_ARGUMENT, "spec.model_fingerprint", "must not be NULL");
  }
  RETURN_IF_ERROR(CheckIndex(spec.default_index, "spec.default_index"));
  RETURN_IF_ERROR(CheckRank(spec));
  if (spec.group_count < 1 || spec.group_count > kMaxLayerGroups) {
    return Fail(PQC_INVALID_ARGUMENT, "spec.group_count", "%u, must be 1 to %u", spec.group_count,
                kMaxLayerGroups);
  }
  if (!spec.groups) return Fail(PQC_INVALID_ARGUMENT, "spec.groups", "must not be NULL");
  to->groups.resize(spec.group_count);
  for (uint32_t i = 0; i < spec.group_count; ++i) {
    char name[32];
    std::snprintf(name, sizeof(name), "spec.groups[%u]", i);
    RETURN_IF_ERROR(ReadElement(spec.groups, i, name, &to->groups[i]));
    RETURN_IF_ERROR(CheckGroup(to->groups[i], name));
  }
  spec.groups = to->groups.data();
  return PQC_OK;
}

}  // namespace pqcached::client
