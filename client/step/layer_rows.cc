#include "client/step/layer_rows.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <span>

#include "client/base/error.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {
constexpr uint32_t kMaxLayers = 1024;
constexpr uint32_t kMaxSamples = 1024;       // of one call, as many as layers
constexpr uint32_t kSamplesVersion = 19;     // the first kRemoteVersion whose library adds them
constexpr uint64_t kMaxPositions = 1 << 16;  // of one layer in one call

using LongLong = unsigned long long;

// Returns the index of the first layer that occurs twice, or the count. REQUIRES: all layers are
// stored ones.
uint32_t FindDuplicate(const std::vector<RowBlock>& blocks) {
  const auto count = static_cast<uint32_t>(blocks.size());
  for (uint32_t i = 1; i < count; ++i) {
    if (blocks[i].layer > blocks[i - 1].layer) continue;  // the order in which engines pass them
    for (uint32_t j = 0; j < count; ++j) {
      for (uint32_t k = 0; k < j; ++k) {
        if (blocks[j].layer == blocks[k].layer) return j;
      }
    }
    return count;
  }
  return count;
}

// Checks a tensor to which the rows of `token_count` tokens are written. `field`: "layers[2].keys".
pqc_status CheckLoadTarget(const TensorView& tensor, uint64_t token_count, const char* field) {
  if (tensor.shape[0] != token_count) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape[0]", field),
                "%llu tokens, must be those of `tokens`, %llu",
                static_cast<unsigned long long>(tensor.shape[0]),
                static_cast<unsigned long long>(token_count));
  }
  for (uint32_t dim = 0; dim < tensor.ndim; ++dim) {
    if (tensor.strides[dim] != 0 || tensor.shape[dim] == 1) continue;
    return Fail(PQC_INVALID_ARGUMENT,
                FieldPath::Of("%s.strides[%u]", field, dim + (tensor.blocks ? 1 : 0)),
                "0, but each element needs a place of its own");
  }
  if (tensor.blocks && tensor.block_stride == 0 &&
      tensor.first_token + token_count > tensor.block_tokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.strides[0]", field),
                "0, but each block needs a place of its own");
  }
  return PQC_OK;
}

// The blocks or slots of a tensor to which rows are written.
struct LoadPlaces {
  const uint32_t* blocks = nullptr;
  uint64_t first_block = 0;
  uint64_t block_count = 0;
  const int64_t* slots = nullptr;

  explicit LoadPlaces(const TensorView& tensor) : slots(tensor.slots) {
    if (!tensor.blocks) return;
    blocks = tensor.blocks;
    first_block = tensor.first_token / tensor.block_tokens;
    const uint64_t end = tensor.first_token + tensor.shape[0];
    block_count = (end + tensor.block_tokens - 1) / tensor.block_tokens - first_block;
  }

  friend bool operator==(const LoadPlaces&, const LoadPlaces&) = default;
};

// Returns the index of the second one of two equal numbers other than 0, or the count.
template <class Number>
size_t FindRepetition(std::span<const Number> numbers) {
  std::vector<Number> sorted;
  std::ranges::copy_if(numbers, std::back_inserter(sorted), [](Number n) { return n != 0; });
  std::ranges::sort(sorted);
  const auto repeated = std::ranges::adjacent_find(sorted);
  if (repeated == sorted.end()) return numbers.size();
  const auto first = std::ranges::find(numbers, *repeated);
  return static_cast<size_t>(std::find(first + 1, numbers.end(), *repeated) - numbers.begin());
}

// Checks that no block or slot of a load occurs twice, except number 0: engines put there what they
// do not keep, such as the tokens before a window. `field`: "layers[2].keys".
pqc_status CheckDistinct(const LoadPlaces& places, uint64_t token_count, const char* field) {
  if (places.slots) {
    const std::span slots(places.slots, token_count);
    const size_t twice = FindRepetition(slots);
    if (twice == slots.size()) return PQC_OK;
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.block_table.slots[%zu]", field, twice),
                "%lld is listed twice", static_cast<long long>(slots[twice]));
  }
  const std::span blocks(places.blocks + places.first_block, places.block_count);
  const size_t twice = FindRepetition(blocks);
  if (twice == blocks.size()) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT,
              FieldPath::Of("%s.block_table.blocks[%zu]", field,
                            static_cast<size_t>(places.first_block) + twice),
              "%u is listed twice", blocks[twice]);
}

// Checks the targets of a load, layer by layer.
class LoadTargets {
 public:
  explicit LoadTargets(uint64_t token_count) : token_count_(token_count) {}

  pqc_status Check(const TensorView& tensor, const char* field) {
    RETURN_IF_ERROR(CheckLoadTarget(tensor, token_count_, field));
    if (!tensor.paged()) return PQC_OK;
    const LoadPlaces places(tensor);
    if (places == checked_) return PQC_OK;
    RETURN_IF_ERROR(CheckDistinct(places, token_count_, field));
    checked_ = places;
    return PQC_OK;
  }

 private:
  const uint64_t token_count_;
  LoadPlaces checked_{TensorView{}};  // the last ones: engines pass one table for all layers
};

pqc_status CheckSamplePositions(const pqc_query_samples& samples, const FieldPath& name) {
  const uint64_t count = samples.position_count;
  if (count == 0 || count > kMaxPositions) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.position_count", name.c_str()),
                "%llu, must lie in [1, %llu]", LongLong{count}, LongLong{kMaxPositions});
  }
  if (!samples.positions) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.positions", name.c_str()),
                "must not be NULL");
  }
  for (uint64_t i = 1; i < count; ++i) {
    if (samples.positions[i] > samples.positions[i - 1]) continue;
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.positions", name.c_str()),
                "[%llu] is %llu, must be above the one before, %llu", LongLong{i},
                LongLong{samples.positions[i]}, LongLong{samples.positions[i - 1]});
  }
  return PQC_OK;
}

pqc_status ReadBlock(const CacheState& cache, const pqc_query_samples& samples,
                     const FieldPath& name, const TensorPlace& place, SampleBlock* block) {
  LayerShape shape;
  const FieldPath layer = FieldPath::Of("%s.layer", name.c_str());
  RETURN_IF_ERROR(FindLayer(cache, samples.layer, layer.c_str(), &shape));
  if (!shape.has_index()) {
    return Fail(PQC_INVALID_ARGUMENT, layer, "%u, must be a layer that indexes have",
                samples.layer);
  }
  RETURN_IF_ERROR(CheckSamplePositions(samples, name));
  *block = {.layer = samples.layer, .positions = samples.positions, .queries = {}};
  const FieldPath queries = FieldPath::Of("%s.queries", name.c_str());
  RETURN_IF_ERROR(ReadTensor(samples.queries, queries.c_str(), &block->queries, place));
  const TensorView& view = block->queries;
  if (view.ndim == 3 && view.shape[0] == samples.position_count &&
      view.shape[1] == shape.query_heads && view.shape[2] == shape.key_dim) {
    return PQC_OK;
  }
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape", queries.c_str()),
              "must be [%llu, %u, %u]: positions, query heads, key_dim",
              LongLong{samples.position_count}, shape.query_heads, shape.key_dim);
}

}  // namespace

pqc_status ReadLayers(const CacheState& cache, const pqc_layer_rows* layers, uint32_t layer_count,
                      const TensorPlace& place, std::vector<RowBlock>* blocks) {
  if (!layers) return Fail(PQC_INVALID_ARGUMENT, "layers", "must not be NULL");
  if (layer_count < 1 || layer_count > kMaxLayers) {
    return Fail(PQC_INVALID_ARGUMENT, "layer_count", "%u, must be 1 to %u", layer_count,
                kMaxLayers);
  }
  blocks->resize(layer_count);
  for (uint32_t i = 0; i < layer_count; ++i) {
    char name[32];
    std::snprintf(name, sizeof(name), "layers[%u]", i);
    pqc_layer_rows rows;
    RETURN_IF_ERROR(ReadElement(layers, i, name, &rows));
    std::snprintf(name, sizeof(name), "layers[%u].layer", i);
    LayerShape shape;
    RETURN_IF_ERROR(FindLayer(cache, rows.layer, name, &shape));
    std::snprintf(name, sizeof(name), "layers[%u].", i);
    RowBlock& block = (*blocks)[i];
    block.layer = rows.layer;
    RETURN_IF_ERROR(ReadRows(rows.keys, rows.values, shape, name, &block, place));
  }
  return PQC_OK;
}

pqc_status ReadAllLayers(const CacheState& cache, const pqc_layer_rows* layers,
                         uint32_t layer_count, const TensorPlace& place,
                         std::vector<RowBlock>* blocks) {
  if (!layers) return Fail(PQC_INVALID_ARGUMENT, "layers", "must not be NULL");
  const size_t stored = cache.stored_layers.size();
  if (layer_count != stored) {
    return Fail(PQC_INVALID_ARGUMENT, "layer_count", "%u, but the cache stores %zu layers",
                layer_count, stored);
  }
  return ReadDistinctLayers(cache, layers, layer_count, place, blocks);
}

pqc_status ReadDistinctLayers(const CacheState& cache, const pqc_layer_rows* layers,
                              uint32_t layer_count, const TensorPlace& place,
                              std::vector<RowBlock>* blocks) {
  RETURN_IF_ERROR(ReadLayers(cache, layers, layer_count, place, blocks));
  if (const uint32_t twice = FindDuplicate(*blocks); twice < layer_count) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("layers[%u].layer", twice),
                "%u is listed twice", (*blocks)[twice].layer);
  }
  return PQC_OK;
}

pqc_status ReadLoadLayers(const CacheState& cache, const pqc_layer_rows* layers,
                          uint32_t layer_count, kvstore::TokenRange tokens,
                          const TensorPlace& place, std::vector<LoadLayer>* loads) {
  std::vector<RowBlock> blocks;
  RETURN_IF_ERROR(ReadDistinctLayers(cache, layers, layer_count, place, &blocks));
  LoadTargets targets(tokens.end - tokens.begin);
  loads->resize(layer_count);
  for (uint32_t i = 0; i < layer_count; ++i) {
    char name[32];
    std::snprintf(name, sizeof(name), "layers[%u].keys", i);
    LayerShape& shape = (*loads)[i].shape;
    shape = cache.stored_layers.at(blocks[i].layer);
    if (shape.has_keys()) RETURN_IF_ERROR(targets.Check(blocks[i].keys, name));
    std::snprintf(name, sizeof(name), "layers[%u].values", i);
    RETURN_IF_ERROR(targets.Check(blocks[i].values, name));
    (*loads)[i].to = blocks[i];
  }
  return PQC_OK;
}

pqc_status ReadSamples(const CacheState& cache, const pqc_query_samples* samples,
                       uint32_t sample_count, const TensorPlace& place,
                       std::vector<SampleBlock>* blocks) {
  if (!samples) return Fail(PQC_INVALID_ARGUMENT, "samples", "must not be NULL");
  if (sample_count == 0 || sample_count > kMaxSamples) {
    return Fail(PQC_INVALID_ARGUMENT, "sample_count", "%u, must lie in [1, %u]", sample_count,
                kMaxSamples);
  }
  if (cache.client->remote_version < kSamplesVersion) {
    return Fail(PQC_UNIMPLEMENTED, "samples",
                "libpqcached_rpc is older than query samples; install the library of the client's "
                "release");
  }
  blocks->resize(sample_count);
  for (uint32_t i = 0; i < sample_count; ++i) {
    const FieldPath name = FieldPath::Of("samples[%u]", i);
    pqc_query_samples read;
    RETURN_IF_ERROR(ReadElement(samples, i, name.c_str(), &read));
    RETURN_IF_ERROR(ReadBlock(cache, read, name, place, &(*blocks)[i]));
  }
  return PQC_OK;
}

pqc_status SendSamples(const ChangeScope& changing, uint64_t sequence_id,
                       const std::vector<SampleBlock>& blocks) {
  RefusalBuffer error;
  const pqc_status status = changing.remote().AddSamples(
      sequence_id, blocks.data(), static_cast<uint32_t>(blocks.size()), &error);
  return Report(status, error,
                {{"chunk.query_samples[0]", "samples"},
                 {"chunk.query_samples", "samples"},
                 {"query_samples", "samples"},
                 {"header", ""}});
}

}  // namespace pqcached::client
