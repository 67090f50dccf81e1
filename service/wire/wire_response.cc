#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/codec/index.h"
#include "service/base/refusal.h"
#include "service/session/sessions.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

v1::DType ToWire(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kF16:
      return v1::DTYPE_FLOAT16;
    case kernels::DType::kBf16:
      return v1::DTYPE_BFLOAT16;
    case kernels::DType::kF32:
      return v1::DTYPE_FLOAT32;
  }
  return v1::DTYPE_UNSPECIFIED;
}

void ToWire(std::span<const float> values, std::initializer_list<uint64_t> shape,
            v1::Tensor* tensor) {
  tensor->set_dtype(v1::DTYPE_FLOAT32);
  tensor->mutable_shape()->Add(shape.begin(), shape.end());
  tensor->set_inline_data(values.data(), values.size_bytes());
}

void ToWire(const kvstore::LayerGroup& group, v1::LayerGroup* message) {
  message->mutable_layers()->Add(group.layers.begin(), group.layers.end());
  message->set_kind(static_cast<v1::LayerKind>(group.kind));
  if (group.kind == kvstore::LayerKind::kNone) return;
  message->set_kv_heads(group.kv_heads);
  message->set_query_heads(group.query_heads);
  message->set_key_dim(group.key_dim);
  message->set_value_dim(group.value_dim);
  message->set_dtype(ToWire(group.dtype));
  message->set_softmax_scale(group.softmax_scale);
  message->set_softcap(group.softcap);
  message->set_window_tokens(group.window_tokens);
  if (group.rope == kvstore::Rope{}) return;
  v1::RopeDescription* rope = message->mutable_rope();
  rope->set_layout(static_cast<v1::RopeDescription::Layout>(group.rope.layout));
  rope->set_theta(group.rope.theta);
  rope->set_rotary_dim(group.rope.rotary_dim);
}

static_assert(static_cast<int>(kvstore::LayerKind::kSelected) == v1::LAYER_KIND_SELECTED);
static_assert(static_cast<int>(kvstore::LayerKind::kFull) == v1::LAYER_KIND_FULL);
static_assert(static_cast<int>(kvstore::LayerKind::kWindow) == v1::LAYER_KIND_WINDOW);
static_assert(static_cast<int>(kvstore::LayerKind::kNone) == v1::LAYER_KIND_NONE);
static_assert(static_cast<int>(kvstore::LayerKind::kValues) == v1::LAYER_KIND_VALUES);
static_assert(static_cast<int>(kvstore::Verdict::kFitsNow) == v1::VERDICT_FITS_NOW);
static_assert(static_cast<int>(kvstore::Verdict::kFitsAfterEviction) == v1::VERDICT_AFTER_EVICTION);
static_assert(static_cast<int>(kvstore::Verdict::kRetryable) == v1::VERDICT_LATER);
static_assert(static_cast<int>(kvstore::Verdict::kExceedsCapacity) == v1::VERDICT_NEVER);
static_assert(static_cast<int>(kvstore::LayerState::kReady) == v1::LAYER_STATE_READY);
static_assert(static_cast<int>(kvstore::LayerState::kFilled) == v1::LAYER_STATE_FILLED);
static_assert(static_cast<int>(kvstore::SegmentState::kClosed) == v1::SEGMENT_STATE_CLOSED);
static_assert(static_cast<int>(kvstore::SegmentState::kSealed) == v1::SEGMENT_STATE_SEALED);
static_assert(static_cast<int>(kvstore::SubspaceLayout::kPairs) == v1::PqIndex::LAYOUT_PAIRS);
static_assert(static_cast<int>(kvstore::SubspaceLayout::kContiguous) ==
              v1::PqIndex::LAYOUT_CONTIGUOUS);
static_assert(static_cast<int>(kvstore::SubspaceLayout::kWeighted) == v1::PqIndex::LAYOUT_WEIGHTED);
static_assert(kvstore::Rope::kHalf == v1::RopeDescription::LAYOUT_HALF);

}  // namespace

absl::Status CheckResponseBytes(uint64_t bytes, uint64_t max_message_bytes) {
  if (bytes <= max_message_bytes) return absl::OkStatus();
  return ResourceExhausted("response",
                           absl::StrCat(bytes, " bytes, above max_message_bytes = ",
                                        max_message_bytes, "; request less per call"),
                           kNoRetry);
}

void ToWire(const kvstore::Selected& selected, v1::Selected* message) {
  message->set_kv_heads(selected.kv_heads);
  message->set_count(selected.count);
  message->mutable_positions()->Add(selected.positions.begin(), selected.positions.end());
  message->set_sink_tokens(selected.sink_tokens);
  message->set_window_tokens(selected.window_tokens);
}

void ToWire(const kvstore::SelectedPages& selected, v1::Selected* message) {
  message->set_kv_heads(selected.kv_heads);
  v1::PageLists* lists = message->mutable_pages();
  lists->set_list_count(selected.list_count);
  lists->set_length(selected.length);
  lists->mutable_pages()->Add(selected.pages.begin(), selected.pages.end());
}

void ToWire(const kvstore::Scores& scores, v1::Scores* message) {
  const size_t heads = scores.max.size();
  const size_t tokens = heads == 0 ? 0 : scores.logits.size() / heads;
  ToWire(std::span<const float>(scores.logits), {heads, tokens}, message->mutable_logits());
  message->mutable_max()->Add(scores.max.begin(), scores.max.end());
  message->mutable_sum_exp()->Add(scores.sum_exp.begin(), scores.sum_exp.end());
}

void ToWire(const kvstore::Attention& attention, const std::vector<uint64_t>& query_shape,
            bool want_positions, v1::Attention* message) {
  const uint64_t heads = attention.lse.size();  // over all query tokens
  const uint64_t length = query_shape.empty() || query_shape[0] == 0 ? 1 : query_shape[0];
  ToWire(std::span<const float>(attention.output),
         {length, heads / length, heads == 0 ? 0 : attention.output.size() / heads},
         message->mutable_output());
  message->mutable_lse()->Add(attention.lse.begin(), attention.lse.end());
  v1::Selected* selected = message->mutable_selected();
  ToWire(attention.selected, selected);
  if (!want_positions) selected->clear_positions();
}

void ToWire(kvstore::VersionedImage image, v1::Attachment* message) {
  message->set_version(image.version);
  message->set_image(image.image.data(), image.image.size());
}

void ToWire(const kvstore::LeaseInfo& info, uint32_t peer_pid, v1::LeaseDescription* message) {
  message->set_lease_id(info.lease_id);
  message->set_sequence_id(info.sequence_id);
  message->set_client_name(std::string(ClientNameOf(info.session)));
  message->set_age_seconds(info.age_seconds);
  message->set_bytes(info.bytes);
  message->set_version_count(info.version_count);
  message->set_revoked(info.revoked);
  message->set_peer_pid(peer_pid);
}

void ToWireWithoutData(const kvstore::Rows& rows, v1::Tensor* tensor) {
  tensor->set_dtype(ToWire(rows.dtype));
  for (const uint32_t extent : {rows.kv_heads, rows.tokens, rows.dim}) tensor->add_shape(extent);
}

void ToWire(const kvstore::Rows& rows, v1::Tensor* tensor) {
  ToWireWithoutData(rows, tensor);
  tensor->set_inline_data(rows.data.data(), rows.data.size());
}

void ToWire(const kvstore::BuildProgress& progress, v1::BuildProgress* message) {
  message->set_layer(progress.layer);
  message->set_layers_done(progress.layers_done);
  message->set_layer_count(progress.layer_count);
  message->set_codebook_generation(progress.codebook_generation);
  message->set_codebook_generation_count(progress.codebook_generation_count);
  message->set_iterations(progress.iterations);
  message->set_inertia(progress.inertia);
  message->set_seconds(progress.seconds);
  message->set_index_bytes(progress.index_bytes);
  message->set_codebook_bytes(progress.codebook_bytes);
}

static void ToWire(const kvstore::PrefillReport& report, v1::PrefillCost* message) {
  message->set_measured(report.measured);
  message->set_seconds_per_token_squared(report.cost.seconds_per_token_squared);
  message->set_seconds_per_token(report.cost.seconds_per_token);
  message->set_seconds(report.cost.seconds);
}

void ToWire(const kvstore::CacheInfo& info, v1::CacheDescription* message) {
  message->set_cache_id(info.cache_id);
  message->set_tenant(info.tenant);
  message->set_name(info.spec.name);
  message->set_model_fingerprint(info.spec.model_fingerprint);
  for (const kvstore::LayerGroup& group : info.spec.groups)
    ToWire(group, message->add_layer_groups());
  if (info.spec.kind == kvstore::CacheKind::kRows) {
    codec::Encode(info.spec.default_index, message->mutable_default_index());
    ToWire(info.prefill, message->mutable_prefill_cost());
  }
  message->set_capacity_bytes(info.capacity_bytes);
  message->set_used_bytes(info.used_bytes);
  message->set_quarantined_bytes(info.quarantined_bytes);
  message->set_free_bytes(info.free_bytes);
  message->set_largest_free_bytes(info.largest_free_bytes);
  message->set_page_bytes(info.page_bytes);
  message->set_sequence_count(info.sequence_count);
  message->set_cached_prefix_count(info.cached_prefix_count);
  message->set_limit_bytes(info.limit_bytes);
  message->set_grows(info.spec.grows);
  if (info.spec.kind == kvstore::CacheKind::kPages) ToWire(info.pages, message->mutable_pages());
}

void ToWire(const kvstore::PageCounts& counts, v1::PageStats* message) {
  message->set_page_count(counts.page_count);
  message->set_bytes(counts.bytes);
  message->set_hits(counts.hits);
  message->set_misses(counts.misses);
  message->set_evicted_pages(counts.evicted_pages);
  message->set_evicted_bytes(counts.evicted_bytes);
}

void ToWire(const kvstore::Admission& admission, v1::AdmitResponse* message) {
  message->set_fits_now(admission.verdict == kvstore::Verdict::kFitsNow);
  message->set_verdict(static_cast<v1::Verdict>(admission.verdict));
  message->set_needed_bytes(admission.needed_bytes);
  message->set_bytes_to_evict(admission.bytes_to_evict);
  message->set_shortfall_bytes(admission.shortfall_bytes);
  message->set_limit_bytes(admission.limit_bytes);
  if (admission.verdict == kvstore::Verdict::kRetryable) {
    message->set_retry_after_ms(kRetryMemory);
  }
}

void ToWire(const kvstore::SequenceInfo& info, bool brief, v1::SequenceDescription* message) {
  message->set_sequence_id(info.sequence_id);
  message->set_cache_id(info.cache_id);
  message->set_client_name(std::string(ClientNameOf(info.session)));
  message->set_token_count(info.token_count);
  for (const kvstore::IndexDescriptor& index : info.indexes)
    codec::Encode(index, message->add_indexes());
  message->set_row_bytes(info.row_bytes);
  message->set_index_bytes(info.index_bytes);
  message->set_codebook_bytes(info.codebook_bytes);
  message->set_used_bytes(info.used_bytes);
  message->set_is_cached_prefix(info.is_cached_prefix);
  message->set_pin_left_seconds(absl::ToDoubleSeconds(info.pin_left));
  message->set_idle_seconds(absl::ToDoubleSeconds(info.idle));
  message->set_group_key(absl::CEscape(info.group_key));
  if (brief) return;
  v1::LiveIndexDescription* live_index = message->mutable_live_index();
  if (info.live_index_descriptor)
    codec::Encode(*info.live_index_descriptor, live_index->mutable_index());
  for (const kvstore::LayerInfo& layer : info.layers) {
    v1::LayerDescription* description = message->add_layers();
    description->set_layer(layer.layer);
    description->set_row_count(layer.row_count);
    description->set_query_sample_count(layer.query_sample_count);
    for (const kvstore::LayerState state : layer.index_states) {
      description->add_index_states(static_cast<v1::LayerState>(state));
    }
  }
  for (const kvstore::SegmentInfo& segment : info.segments) {
    v1::SegmentDescription* description = message->add_segments();
    description->set_segment_id(segment.segment_id);
    description->mutable_tokens()->set_begin(segment.tokens.begin);
    description->mutable_tokens()->set_end(segment.tokens.end);
    description->set_state(static_cast<v1::SegmentState>(segment.state));
    description->set_slot_capacity(segment.slot_capacity);
    description->mutable_codebook_generations()->Add(segment.codebook_generations.begin(),
                                                     segment.codebook_generations.end());
  }
}

}  // namespace pqcached::service
