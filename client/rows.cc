// Rows in, and the index over them.
#include <cstdio>
#include <vector>

#include "client/arguments.h"
#include "client/error.h"
#include "client/handles.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kMaxLayers = 1024;

pqc_status CheckPositions(uint64_t first_position, uint64_t token_count) {
  if (first_position <= kMaxSequenceTokens && token_count <= kMaxSequenceTokens - first_position) {
    return PQC_OK;
  }
  return Fail(PQC_INVALID_ARGUMENT,
              "first_position: %llu and %llu tokens, but a sequence has at most 2^30",
              static_cast<unsigned long long>(first_position),
              static_cast<unsigned long long>(token_count));
}

pqc_status Ingest(pqc_sequence* sequence, uint32_t layer, uint64_t first_position,
                  const pqc_tensor* keys, const pqc_tensor* values) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence: must not be NULL");
  if (!keys) return Fail(PQC_INVALID_ARGUMENT, "keys: must not be NULL");
  if (!values) return Fail(PQC_INVALID_ARGUMENT, "values: must not be NULL");
  LayerShape shape;
  RowBlock rows{.layer = layer, .keys = {}, .values = {}};
  if (const pqc_status status = FindLayer(*sequence, layer, "layer", &shape); status != PQC_OK) {
    return status;
  }
  if (const pqc_status status = ReadRows(*keys, *values, shape, "", &rows); status != PQC_OK) {
    return status;
  }
  if (const pqc_status status = CheckPositions(first_position, rows.keys.shape[0]);
      status != PQC_OK) {
    return status;
  }
  const ChangeLock lock(*sequence);
  if (lock.status() != PQC_OK) return PQC_ABORTED;
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  return Report(remote->Ingest(sequence->sequence_id, first_position, rows, &error), error);
}

// The callers' structs may be larger than ours: the first one tells their distance.
pqc_status ReadLayers(const pqc_sequence& sequence, const pqc_layer_rows* layers,
                      uint32_t layer_count, std::vector<RowBlock>* blocks) {
  if (!layers) return Fail(PQC_INVALID_ARGUMENT, "layers: must not be NULL");
  if (layer_count < 1 || layer_count > kMaxLayers) {
    return Fail(PQC_INVALID_ARGUMENT, "layer_count: %u, must be 1 to %u", layer_count, kMaxLayers);
  }
  blocks->resize(layer_count);
  const auto* bytes = reinterpret_cast<const std::byte*>(layers);
  for (uint32_t i = 0; i < layer_count; ++i) {
    char name[32];
    std::snprintf(name, sizeof(name), "layers[%u]", i);
    pqc_layer_rows rows;
    if (const pqc_status status =
            ReadStruct(bytes + size_t{i} * layers->struct_size, sizeof(rows), name, &rows);
        status != PQC_OK) {
      return status;
    }
    std::snprintf(name, sizeof(name), "layers[%u].layer", i);
    LayerShape shape;
    if (const pqc_status status = FindLayer(sequence, rows.layer, name, &shape); status != PQC_OK) {
      return status;
    }
    std::snprintf(name, sizeof(name), "layers[%u].", i);
    RowBlock& block = (*blocks)[i];
    block.layer = rows.layer;
    if (const pqc_status status = ReadRows(rows.keys, rows.values, shape, name, &block);
        status != PQC_OK) {
      return status;
    }
  }
  return PQC_OK;
}

pqc_status Append(pqc_sequence* sequence, uint64_t first_position, const pqc_layer_rows* layers,
                  uint32_t layer_count, uint64_t* token_count) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence: must not be NULL");
  std::vector<RowBlock> blocks;
  if (const pqc_status status = ReadLayers(*sequence, layers, layer_count, &blocks);
      status != PQC_OK) {
    return status;
  }
  if (const pqc_status status = CheckPositions(first_position, blocks[0].keys.shape[0]);
      status != PQC_OK) {
    return status;
  }
  const ChangeLock lock(*sequence);
  if (lock.status() != PQC_OK) return PQC_ABORTED;
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  uint64_t tokens = 0;
  ErrorText error;
  const pqc_status status = remote->Append(sequence->sequence_id, first_position, blocks.data(),
                                           layer_count, &tokens, &error);
  if (status == PQC_OK && token_count) *token_count = tokens;
  return Report(status, error);
}

pqc_status Build(pqc_sequence* sequence, const pqc_build_options* caller_options) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence: must not be NULL");
  pqc_build_options options;
  if (const pqc_status status = ReadStruct(caller_options, "options", &options); status != PQC_OK) {
    return status;
  }
  if (const pqc_status status = CheckIndex(options.index, "options.index"); status != PQC_OK) {
    return status;
  }
  const ChangeLock lock(*sequence);
  if (lock.status() != PQC_OK) return PQC_ABORTED;
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*sequence->cache->client, &remote); status != PQC_OK) {
    return status;
  }
  ErrorText error;
  return Report(remote->BuildIndex(sequence->sequence_id, options, &error), error);
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_ingest(pqc_sequence* sequence, uint32_t layer, uint64_t first_position,
                      const pqc_tensor* keys, const pqc_tensor* values) {
  return pqcached::client::Call(
      [&] { return pqcached::client::Ingest(sequence, layer, first_position, keys, values); });
}

pqc_status pqc_append(pqc_sequence* sequence, uint64_t first_position, const pqc_layer_rows* layers,
                      uint32_t layer_count, uint64_t* token_count) {
  return pqcached::client::Call([&] {
    return pqcached::client::Append(sequence, first_position, layers, layer_count, token_count);
  });
}

pqc_status pqc_build_index(pqc_sequence* sequence, const pqc_build_options* options) {
  return pqcached::client::Call([&] { return pqcached::client::Build(sequence, options); });
}

}  // extern "C"
