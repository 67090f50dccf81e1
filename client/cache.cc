// Caches, and the life of sequences.
#include <cstring>
#include <memory>

#include "client/arguments.h"
#include "client/error.h"
#include "client/handles.h"

namespace pqcached::client {
namespace {

pqc_status OpenCache(pqc_client* client, const pqc_cache_spec* caller_spec, pqc_cache** cache) {
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client: must not be NULL");
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache: must not be NULL");
  *cache = nullptr;
  CacheArguments arguments;
  if (const pqc_status status = ReadCacheSpec(caller_spec, &arguments); status != PQC_OK) {
    return status;
  }
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*client->state, &remote); status != PQC_OK) return status;

  auto state = std::make_shared<CacheState>();
  state->client = client->state;
  state->model_fingerprint = arguments.spec.model_fingerprint;
  for (const pqc_layer_group& group : arguments.groups) {
    if (group.kind != PQC_LAYERS_SELECTED) continue;
    for (uint32_t i = 0; i < group.layer_count; ++i) {
      state->stored_layers[group.layers[i]] = {.kv_heads = group.kv_heads,
                                               .query_heads = group.query_heads,
                                               .key_dim = group.key_dim,
                                               .value_dim = group.value_dim,
                                               .dtype = group.dtype};
    }
  }
  auto opened = std::make_unique<pqc_cache>();
  ErrorText error;
  const pqc_status status = remote->OpenCache(arguments.spec, &state->cache_id, &error);
  if (status != PQC_OK) return Report(status, error);
  opened->state = std::move(state);
  *cache = opened.release();
  return PQC_OK;
}

pqc_status Create(pqc_cache* cache, pqc_sequence** sequence) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache: must not be NULL");
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence: must not be NULL");
  *sequence = nullptr;
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*cache->state->client, &remote); status != PQC_OK) {
    return status;
  }
  auto created = std::make_unique<pqc_sequence>();
  created->cache = cache->state;
  ErrorText error;
  const pqc_status status =
      remote->CreateSequence(cache->state->cache_id, cache->state->model_fingerprint.c_str(),
                             &created->sequence_id, &error);
  if (status != PQC_OK) return Report(status, error);
  *sequence = created.release();
  return PQC_OK;
}

pqc_status Drop(pqc_sequence* sequence) {
  if (!sequence) return PQC_OK;
  const std::unique_ptr<pqc_sequence> owned(sequence);
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*owned->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  return Report(remote->DropSequence(owned->sequence_id, &error), error);
}

pqc_status Truncate(pqc_sequence* sequence, uint64_t token_count) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence: must not be NULL");
  if (token_count > kMaxSequenceTokens) {
    return Fail(PQC_INVALID_ARGUMENT, "token_count: %llu, must be at most 2^30",
                static_cast<unsigned long long>(token_count));
  }
  const ChangeLock lock(*sequence);
  if (lock.status() != PQC_OK) return PQC_ABORTED;
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  return Report(remote->TruncateSequence(sequence->sequence_id, token_count, &error), error);
}

pqc_status Describe(pqc_sequence* sequence, pqc_sequence_info* info) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence: must not be NULL");
  pqc_sequence_info described;
  if (const pqc_status status = ReadStruct(info, "info", &described); status != PQC_OK) {
    return status;
  }
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  const pqc_status status = remote->DescribeSequence(sequence->sequence_id, &described, &error);
  if (status != PQC_OK) return Report(status, error);
  *info = described;
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_cache_open(pqc_client* client, const pqc_cache_spec* spec, pqc_cache** cache) {
  return pqcached::client::Call([&] { return pqcached::client::OpenCache(client, spec, cache); });
}

void pqc_cache_close(pqc_cache* cache) { delete cache; }

pqc_status pqc_sequence_create(pqc_cache* cache, pqc_sequence** sequence) {
  return pqcached::client::Call([&] { return pqcached::client::Create(cache, sequence); });
}

pqc_status pqc_sequence_drop(pqc_sequence* sequence) {
  return pqcached::client::Call([&] { return pqcached::client::Drop(sequence); });
}

uint64_t pqc_sequence_id(const pqc_sequence* sequence) {
  return sequence ? sequence->sequence_id : 0;
}

pqc_status pqc_sequence_truncate(pqc_sequence* sequence, uint64_t token_count) {
  return pqcached::client::Call([&] { return pqcached::client::Truncate(sequence, token_count); });
}

pqc_status pqc_sequence_describe(pqc_sequence* sequence, pqc_sequence_info* info) {
  return pqcached::client::Call([&] { return pqcached::client::Describe(sequence, info); });
}

}  // extern "C"
