// Reads the rows of several layers that callers pass.
#ifndef PQCACHED_CLIENT_STEP_LAYER_ROWS_H_
#define PQCACHED_CLIENT_STEP_LAYER_ROWS_H_

#include <cstdint>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/load.h"
#include "client/base/remote.h"
#include "client/step/handles.h"
#include "pqcached/client.h"

namespace pqcached::client {

// Checks and describes the rows. The callers' structs may be larger than this version's:
// struct_size of the first one is the stride of the array.
pqc_status ReadLayers(const CacheState& cache, const pqc_layer_rows* layers, uint32_t layer_count,
                      const TensorPlace& place, std::vector<RowBlock>* blocks);

// The same; no layer may occur twice.
pqc_status ReadDistinctLayers(const CacheState& cache, const pqc_layer_rows* layers,
                              uint32_t layer_count, const TensorPlace& place,
                              std::vector<RowBlock>* blocks);

// The same for a call that needs the rows of all stored layers: each of them occurs once.
pqc_status ReadAllLayers(const CacheState& cache, const pqc_layer_rows* layers,
                         uint32_t layer_count, const TensorPlace& place,
                         std::vector<RowBlock>* blocks);

// Reads the layers of a load of these tokens, and the tensors to which their rows are written.
pqc_status ReadLoadLayers(const CacheState& cache, const pqc_layer_rows* layers,
                          uint32_t layer_count, kvstore::TokenRange tokens,
                          const TensorPlace& place, std::vector<LoadLayer>* loads);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_LAYER_ROWS_H_
