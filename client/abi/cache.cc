// Opens and closes caches.
#include <cmath>
#include <memory>
#include <string>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/step/handles.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// The sidecar's default for a cache that names no index.
constexpr kvstore::IndexDescriptor kDefaultIndex = {kvstore::IndexKind::kPq, 4, 8};
// The first kRemoteVersion whose library sends the kinds full and window, and the kind values.
constexpr uint32_t kLayerKindsVersion = 11;
constexpr uint32_t kValuesVersion = 18;

static_assert(static_cast<int>(kvstore::LayerKind::kSelected) == PQC_LAYERS_SELECTED &&
              static_cast<int>(kvstore::LayerKind::kFull) == PQC_LAYERS_FULL &&
              static_cast<int>(kvstore::LayerKind::kWindow) == PQC_LAYERS_WINDOW &&
              static_cast<int>(kvstore::LayerKind::kValues) == PQC_LAYERS_VALUES);

float ScaleOf(const pqc_layer_group& group) {
  if (group.softmax_scale > 0) return group.softmax_scale;
  return group.key_dim == 0 ? 1.0f : 1.0f / std::sqrt(static_cast<float>(group.key_dim));
}

LayerShape ShapeOf(const pqc_layer_group& group) {
  const auto dtype = static_cast<DType>(group.dtype);
  return {.dtype = dtype,
          .kind = static_cast<kvstore::LayerKind>(group.kind),
          .key_dim = group.key_dim,
          .value_dim = group.value_dim,
          .kv_heads = group.kv_heads,
          .query_heads = group.query_heads,
          .row_bytes =
              (group.key_dim + group.value_dim) * static_cast<uint32_t>(kernels::DTypeBytes(dtype)),
          .scale = ScaleOf(group),
          .softcap = group.softcap};
}

// Adds the layers of a group that are stored.
pqc_status AddLayers(const pqc_layer_group& group, size_t number, CacheState* state) {
  if (group.kind == PQC_LAYERS_NONE) return PQC_OK;
  const bool has_index = group.kind == PQC_LAYERS_SELECTED;
  // An older library would send them as layers of kind selected.
  const uint32_t version = group.kind == PQC_LAYERS_VALUES ? kValuesVersion : kLayerKindsVersion;
  if (!has_index && state->client->remote_version < version) {
    return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("spec.groups[%zu].kind", number),
                "the loaded libpqcached_rpc is too old for layers of this kind");
  }
  state->has_indexed_layers = state->has_indexed_layers || has_index;
  for (uint32_t i = 0; i < group.layer_count; ++i) {
    state->stored_layers[group.layers[i]] = ShapeOf(group);
    if (group.kind == PQC_LAYERS_WINDOW) state->windows[group.layers[i]] = group.window_tokens;
  }
  return PQC_OK;
}

pqc_status OpenCache(pqc_client* client, const pqc_cache_spec* caller_spec, pqc_cache** cache) {
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  *cache = nullptr;
  CacheArguments arguments;
  RETURN_IF_ERROR(ReadCacheSpec(caller_spec, &arguments));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*client->state, &remote));

  auto state = std::make_shared<CacheState>();
  state->client = client->state;
  state->model_fingerprint = arguments.spec.model_fingerprint;
  RETURN_IF_ERROR(ReadIndex(arguments.spec.default_index, "spec.default_index", kDefaultIndex,
                            &state->default_index));
  RETURN_IF_ERROR(
      CheckSendable(state->default_index, "spec.default_index", client->state->remote_version));
  for (size_t i = 0; i < arguments.groups.size(); ++i) {
    RETURN_IF_ERROR(AddLayers(arguments.groups[i], i, state.get()));
  }
  auto opened = std::make_unique<pqc_cache>();
  RefusalBuffer error;
  const pqc_status status = remote->OpenCache(arguments.spec, &state->cache_id, &error);
  if (status != PQC_OK) {
    return Report(status, error,
                  {{"layer_groups", "spec.groups"},
                   {"rank.group", "spec.rank_group"},
                   {"rank", "spec"},
                   {"name", "spec.name"},
                   {"model_fingerprint", "spec.model_fingerprint"},
                   {"capacity_bytes", "spec.capacity_bytes"},
                   {"prefill_cost.seconds_per_token_squared", "spec.prefill_seconds[0]"},
                   {"prefill_cost.seconds_per_token", "spec.prefill_seconds[1]"},
                   {"prefill_cost.seconds", "spec.prefill_seconds[2]"},
                   {"default_index", "spec.default_index"}});
  }
  opened->state = std::move(state);
  *cache = opened.release();
  return PQC_OK;
}

pqc_status DropCache(pqc_cache* cache) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*cache->state->client, &remote));
  const std::string request = "{\"cache_id\": \"" + std::to_string(cache->state->cache_id) + "\"}";
  RefusalBuffer error;
  const TextSink ignored{nullptr, [](void*, const char*, size_t) {}};
  return Report(remote->AdminJson("DropCache", request.c_str(), ignored, &error), error,
                {{"cache_id", "cache"}});
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_cache_open(pqc_client* client, const pqc_cache_spec* spec, pqc_cache** cache) {
  return pqcached::client::RecordedCall(
      "pqc_cache_open",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("client", client).Opens("cache", cache);
      },
      [&] { return pqcached::client::OpenCache(client, spec, cache); });
}

void pqc_cache_close(pqc_cache* cache) {
  pqcached::client::RecordedClose("pqc_cache_close", "cache", cache, [&] { delete cache; });
}

pqc_status pqc_cache_drop(pqc_cache* cache) {
  return pqcached::client::RecordedCall(
      "pqc_cache_drop", [&](pqcached::client::CallRecord& call) { call.Handle("cache", cache); },
      [&] { return pqcached::client::DropCache(cache); });
}

}  // extern "C"
