#include "client/step/layer_rows.h"

#include <cstdio>

#include "client/base/error.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {
constexpr uint32_t kMaxLayers = 1024;
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

}  // namespace pqcached::client
