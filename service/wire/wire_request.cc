#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "proto/codec/index.h"
#include "proto/codec/selection.h"
#include "service/session/text.h"
#include "service/wire/staging_claims.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

constexpr int kMaxTensorDimensions = 4;
constexpr uint32_t kMaxIterations = 1000;

// Returns a number of tokens or a position as uint32_t. Errors: codec::DecodeTokens.
absl::StatusOr<uint32_t> TokensOf(uint64_t tokens, const std::string& field) {
  uint32_t decoded = 0;
  RETURN_IF_ERROR(ToStatus(codec::DecodeTokens(tokens, field, &decoded)));
  return decoded;
}

absl::StatusOr<kernels::DType> DTypeOf(v1::DType dtype, const std::string& field) {
  switch (dtype) {
    case v1::DTYPE_FLOAT16:
      return kernels::DType::kF16;
    case v1::DTYPE_BFLOAT16:
      return kernels::DType::kBf16;
    case v1::DTYPE_FLOAT32:
      return kernels::DType::kF32;
    default:
      return InvalidArgument(field, absl::StrCat(static_cast<int>(dtype), ", must be a DType"));
  }
}

// Limits the bytes that the shape spans: with strides of 0, a few bytes could claim any number of
// elements.
absl::Status CheckShapeBytes(const v1::Tensor& tensor, uint64_t element_bytes,
                             const std::string& field, uint64_t max_bytes) {
  uint64_t elements = 1;
  for (const uint64_t extent : tensor.shape()) {
    if (extent == 0) return absl::OkStatus();
  }
  for (const uint64_t extent : tensor.shape()) {
    if (extent > max_bytes / element_bytes / elements) {
      return InvalidArgument(field + ".shape",
                             absl::StrCat("spans more than max_message_bytes = ", max_bytes));
    }
    elements *= extent;
  }
  return absl::OkStatus();
}

absl::Status CheckGroupExtras(const v1::LayerGroup& group, const std::string& field) {
  if (group.values_alias_keys()) return UnimplementedField(field + ".values_alias_keys");
  if (group.scale_shape_size() > 0) return UnimplementedField(field + ".scale_shape");
  const v1::RopeDescription& rope = group.rope();
  if (!v1::RopeDescription::Layout_IsValid(rope.layout())) {
    return InvalidArgument(field + ".rope.layout",
                           absl::StrCat(static_cast<int>(rope.layout()), ", must be a Layout"));
  }
  if (!std::isfinite(rope.theta()) || rope.theta() < 0) {
    return InvalidArgument(field + ".rope.theta", "must be finite and not negative");
  }
  if (rope.rotary_dim() > group.key_dim()) {
    return InvalidArgument(
        field + ".rope.rotary_dim",
        absl::StrCat(rope.rotary_dim(), ", must be at most key_dim = ", group.key_dim()));
  }
  return absl::OkStatus();
}

absl::StatusOr<kvstore::LayerGroup> LayerGroupOf(const v1::LayerGroup& group,
                                                 const std::string& field) {
  kvstore::LayerGroup result;
  switch (group.kind()) {
    case v1::LAYER_KIND_SELECTED:
      result.kind = kvstore::LayerKind::kSelected;
      break;
    case v1::LAYER_KIND_NONE:
      result.kind = kvstore::LayerKind::kNone;
      break;
    case v1::LAYER_KIND_FULL:
      result.kind = kvstore::LayerKind::kFull;
      break;
    case v1::LAYER_KIND_WINDOW:
      result.kind = kvstore::LayerKind::kWindow;
      break;
    case v1::LAYER_KIND_VALUES:
      result.kind = kvstore::LayerKind::kValues;
      break;
    default:
      return InvalidArgument(field + ".kind",
                             absl::StrCat(static_cast<int>(group.kind()), ", must be a LayerKind"));
  }
  result.layers.assign(group.layers().begin(), group.layers().end());
  RETURN_IF_ERROR(CheckGroupExtras(group, field));
  result.window_tokens = group.window_tokens();
  if (result.kind == kvstore::LayerKind::kNone) return result;
  ASSIGN_OR_RETURN(const kernels::DType dtype, DTypeOf(group.dtype(), field + ".dtype"));
  result.dtype = dtype;
  result.kv_heads = group.kv_heads();
  result.query_heads = group.query_heads();
  result.key_dim = group.key_dim();
  result.value_dim = group.value_dim();
  result.softmax_scale = group.softmax_scale();
  result.softcap = group.softcap();
  result.rope = {static_cast<uint8_t>(group.rope().layout()), group.rope().theta(),
                 group.rope().rotary_dim()};
  return result;
}

absl::Status CheckRank(const v1::Rank& rank) {
  if (rank.numa_node() < -1) {
    return InvalidArgument("rank.numa_node",
                           absl::StrCat(rank.numa_node(), ", must be at least -1"));
  }
  if (rank.numa_node() > 0) return UnimplementedField("rank.numa_node");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<kvstore::TensorView> TensorOf(const v1::Tensor& tensor, const std::string& field,
                                             uint64_t max_bytes, StagingClaims* staging) {
  const bool staged = tensor.data_case() == v1::Tensor::kStaging;
  if (staged && staging == nullptr) {
    return InvalidArgument(field + ".staging",
                           "only allowed for rows of Ingest, Commit and Append");
  }
  if (!staged && tensor.data_case() != v1::Tensor::kInlineData)
    return InvalidArgument(field + ".inline_data", "missing");
  if (tensor.shape_size() > kMaxTensorDimensions) {
    return InvalidArgument(
        field + ".shape",
        absl::StrCat(tensor.shape_size(), " dimensions, must be at most ", kMaxTensorDimensions));
  }
  ASSIGN_OR_RETURN(const kernels::DType dtype, DTypeOf(tensor.dtype(), field + ".dtype"));
  const uint64_t element_bytes = kernels::DTypeBytes(dtype);
  if (staged) max_bytes = std::max(max_bytes, tensor.staging().size_bytes());
  RETURN_IF_ERROR(CheckShapeBytes(tensor, element_bytes, field, max_bytes));
  kvstore::TensorView view;
  if (staged) {
    if (tensor.staging().offset_bytes() % element_bytes != 0) {
      return InvalidArgument(
          field + ".staging.offset_bytes",
          absl::StrCat(tensor.staging().offset_bytes(), ", must be a multiple of ", element_bytes));
    }
    ASSIGN_OR_RETURN(const auto bytes, staging->Resolve(tensor.staging(), field + ".staging"));
    view.data = bytes.data();
    view.data_bytes = bytes.size();
  } else {
    view.data = reinterpret_cast<const std::byte*>(tensor.inline_data().data());
    view.data_bytes = tensor.inline_data().size();
  }
  view.dtype = dtype;
  view.shape.assign(tensor.shape().begin(), tensor.shape().end());
  view.strides.assign(tensor.strides().begin(), tensor.strides().end());
  return view;
}

absl::StatusOr<kvstore::LayerRows> LayerRowsOf(const v1::LayerRows& rows, const std::string& field,
                                               uint64_t max_bytes, StagingClaims* staging) {
  kvstore::TensorView keys;
  const v1::Tensor& sent = rows.keys();
  if (sent.shape_size() == 3 && sent.shape(2) == 0) {  // of a layer of values
    keys.shape.assign(sent.shape().begin(), sent.shape().end());
    keys.data = reinterpret_cast<const std::byte*>(sent.inline_data().data());
    keys.data_bytes = sent.inline_data().size();
  } else if (rows.has_keys()) {
    ASSIGN_OR_RETURN(keys, TensorOf(sent, field + ".keys", max_bytes, staging));
  }
  ASSIGN_OR_RETURN(kvstore::TensorView values,
                   TensorOf(rows.values(), field + ".values", max_bytes, staging));
  return kvstore::LayerRows{rows.layer(), std::move(keys), std::move(values)};
}

absl::StatusOr<kvstore::LayerSamples> LayerSamplesOf(const v1::QuerySamples& samples,
                                                     const std::string& field, uint64_t max_bytes) {
  ASSIGN_OR_RETURN(const auto queries, TensorOf(samples.queries(), field + ".queries", max_bytes));
  return kvstore::LayerSamples{
      .layer = samples.layer(),
      .positions = {samples.positions().begin(), samples.positions().end()},
      .queries = queries};
}

kvstore::LeaseState LeaseStateOf(const v1::LeaseState& lease) {
  return {.lease_id = lease.lease_id(), .known_version = lease.known_version()};
}

absl::StatusOr<kvstore::LiveIndex> LiveIndexOf(const v1::LiveIndex& live,
                                               const std::string& field) {
  ASSIGN_OR_RETURN(const auto index, IndexOf(true, live.index(), field + ".index"));
  if (!kvstore::IsBuilt(*index)) {
    const kvstore::IndexTypeInfo& info = kvstore::TypeOf(*index).info();
    if (!info.switched_off.empty()) {
      return FailedPrecondition(field + ".index", absl::StrCat(std::string(info.name), " ",
                                                               std::string(info.switched_off)));
    }
    return InvalidArgument(
        field + ".index",
        absl::StrCat(std::string(info.name), " needs no build, so it has no incremental form"));
  }
  if (live.iterations() > kMaxIterations) {
    return InvalidArgument(field + ".iterations",
                           absl::StrCat(live.iterations(), ", must be at most ", kMaxIterations));
  }
  ASSIGN_OR_RETURN(const uint32_t train, TokensOf(live.train_tokens(), field + ".train_tokens"));
  ASSIGN_OR_RETURN(const uint32_t sink, TokensOf(live.sink_tokens(), field + ".sink_tokens"));
  return kvstore::LiveIndex{.index = *index,
                            .iterations = live.iterations(),
                            .seed = live.seed(),
                            .train_tokens = train,
                            .sink_tokens = sink};
}

namespace {

absl::StatusOr<kvstore::PrefillReport> PrefillReportOf(const v1::PrefillCost& message) {
  const std::pair<const char*, double> numbers[] = {
      {"prefill_cost.seconds_per_token_squared", message.seconds_per_token_squared()},
      {"prefill_cost.seconds_per_token", message.seconds_per_token()},
      {"prefill_cost.seconds", message.seconds()}};
  for (const auto& [field, number] : numbers) {
    if (!(number >= 0 && number <= 1)) {
      return InvalidArgument(field, absl::StrCat(number, ", must lie in [0, 1]"));
    }
    if (message.measured() && number != 0) return InvalidArgument(field, "must be 0 with measured");
  }
  return kvstore::PrefillReport{
      message.measured(),
      {message.seconds_per_token_squared(), message.seconds_per_token(), message.seconds()}};
}

}  // namespace

absl::StatusOr<kvstore::CacheSpec> CacheSpecOf(const v1::OpenCacheRequest& request) {
  kvstore::CacheSpec spec;
  RETURN_IF_ERROR(CheckText("name", request.name(), kvstore::kMaxNameBytes));
  RETURN_IF_ERROR(
      CheckText("model_fingerprint", request.model_fingerprint(), kvstore::kMaxFingerprintBytes));
  RETURN_IF_ERROR(CheckText("rank.group", request.rank().group(), kvstore::kMaxNameBytes));
  spec.name = request.name();
  spec.model_fingerprint = request.model_fingerprint();
  spec.capacity_bytes = request.capacity_bytes();
  spec.quota_bytes = request.quota_bytes();
  RETURN_IF_ERROR(CheckRank(request.rank()));
  spec.rank = {.group = request.rank().group(),
               .rank = request.rank().rank(),
               .rank_count = request.rank().rank_count(),
               .kv_head_begin = request.rank().kv_head_begin(),
               .layer_begin = request.rank().layer_begin()};
  for (int i = 0; i < request.layer_groups_size(); ++i) {
    ASSIGN_OR_RETURN(kvstore::LayerGroup group,
                     LayerGroupOf(request.layer_groups(i), absl::StrCat("layer_groups[", i, "]")));
    spec.groups.push_back(std::move(group));
  }
  ASSIGN_OR_RETURN(const auto index,
                   IndexOf(request.has_default_index(), request.default_index(), "default_index"));
  spec.default_index = index.value_or(kvstore::IndexDescriptor{kvstore::IndexKind::kPq, 4, 8});
  if (request.has_prefill_cost()) {
    ASSIGN_OR_RETURN(spec.prefill, PrefillReportOf(request.prefill_cost()));
  }
  return spec;
}

absl::StatusOr<kvstore::AdmitSpec> AdmitSpecOf(const v1::AdmitRequest& request) {
  ASSIGN_OR_RETURN(auto index, IndexOf(request.has_index(), request.index(), "index"));
  return kvstore::AdmitSpec{.prefill_tokens = request.token_count(),
                            .output_tokens = request.output_token_count(),
                            .index = index};
}

absl::StatusOr<std::optional<kvstore::IndexDescriptor>> IndexOf(bool present,
                                                                const v1::IndexSpec& spec,
                                                                const std::string& field) {
  if (!present) return std::nullopt;
  kvstore::IndexDescriptor index;
  RETURN_IF_ERROR(kvstore::ToStatus(codec::Decode(spec, field, &index)));
  return index;
}

namespace {

absl::Status CheckQueryPosition(const v1::Query& query, const std::string& field) {
  if (query.query_position() < kvstore::kMaxSequenceTokens) return absl::OkStatus();
  return InvalidArgument(
      field + ".query_position",
      absl::StrCat(query.query_position(), ", must be below ", kvstore::kMaxSequenceTokens));
}

}  // namespace

absl::StatusOr<kvstore::Query> QueryOf(const v1::Query& query, const std::string& field,
                                       uint64_t max_bytes) {
  ASSIGN_OR_RETURN(kvstore::TensorView queries,
                   TensorOf(query.queries(), field + ".queries", max_bytes));
  RETURN_IF_ERROR(CheckQueryPosition(query, field));
  return kvstore::Query{query.layer(), query.query_position(), std::move(queries)};
}

absl::StatusOr<kvstore::Query> QueryOverPositions(const v1::AttendItem& item,
                                                  const std::string& field, uint64_t max_bytes) {
  const v1::Query& query = item.query();
  if (!item.positions().has_logits()) return QueryOf(query, field + ".query", max_bytes);
  if (query.has_queries()) {
    return InvalidArgument(field + ".query.queries", "must be absent with positions.logits");
  }
  ASSIGN_OR_RETURN(kvstore::TensorView logits,
                   TensorOf(item.positions().logits(), field + ".positions.logits", max_bytes));
  RETURN_IF_ERROR(CheckQueryPosition(query, field + ".query"));
  return kvstore::Query{query.layer(), query.query_position(), std::move(logits),
                        /*has_logits=*/true};
}

absl::StatusOr<kvstore::BuildSpec> BuildSpecOf(const v1::BuildIndexRequest& request) {
  kvstore::BuildSpec spec;
  if (request.layers_size() > 0) return UnimplementedField("layers");
  spec.iterations = request.iterations();
  spec.seed = request.seed();
  ASSIGN_OR_RETURN(const uint32_t train, TokensOf(request.train_tokens(), "train_tokens"));
  spec.train_tokens = train;
  ASSIGN_OR_RETURN(const uint32_t sink, TokensOf(request.sink_tokens(), "sink_tokens"));
  spec.sink_tokens = sink;
  spec.rebuild = request.has_rebuild();
  spec.rebuild_drift = request.rebuild().drift_ratio();
  spec.rebuild_tokens = request.rebuild().new_tokens();
  return spec;
}

absl::StatusOr<kvstore::TokenRange> TokenRangeOf(bool present, const v1::TokenRange& range,
                                                 const std::string& field) {
  if (!present) return InvalidArgument(field, "missing");
  if (range.end() > kvstore::kMaxSequenceTokens) {
    return InvalidArgument(field + ".end", absl::StrCat(range.end(), ", must be at most ",
                                                        kvstore::kMaxSequenceTokens));
  }
  if (range.begin() >= range.end()) {
    return InvalidArgument(field,
                           absl::StrCat("[", range.begin(), ", ", range.end(), ") is empty"));
  }
  return kvstore::TokenRange{range.begin(), range.end()};
}

absl::StatusOr<kvstore::RowPart> RowPartOf(v1::RowPart part, const std::string& field) {
  switch (part) {
    case v1::ROW_PART_UNSPECIFIED:
    case v1::ROW_PART_ROW:
      return kvstore::RowPart::kRow;
    case v1::ROW_PART_KEY:
      return kvstore::RowPart::kKey;
    case v1::ROW_PART_VALUE:
      return kvstore::RowPart::kValue;
    default:
      return InvalidArgument(field, absl::StrCat(static_cast<int>(part), ", must be a RowPart"));
  }
}

absl::StatusOr<std::vector<uint32_t>> PositionsOf(
    uint32_t count, const google::protobuf::RepeatedField<uint32_t>& positions,
    const std::string& field) {
  if (count == 0) return InvalidArgument(field + ".count", "0, must be at least 1");
  if (positions.empty() || static_cast<uint32_t>(positions.size()) % count != 0) {
    return InvalidArgument(
        field + ".positions",
        absl::StrCat(positions.size(),
                     " of them, must be kv_heads or query_heads x count, of count ", count));
  }
  return std::vector<uint32_t>(positions.begin(), positions.end());
}

}  // namespace pqcached::service
