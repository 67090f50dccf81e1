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

}  // namespace pqcached::client
