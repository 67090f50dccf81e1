// Reads the rows and the query samples of several layers that callers pass.
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

// Checks and describes query samples, whose structs may be larger too.
pqc_status ReadSamples(const CacheState& cache, const pqc_query_samples* samples,
                       uint32_t sample_count, const TensorPlace& place,
                       std::vector<SampleBlock>* blocks);

// Adds samples of host memory to the sequence that `changing` holds.
pqc_status SendSamples(const ChangeScope& changing, uint64_t sequence_id,
                       const std::vector<SampleBlock>& blocks);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_LAYER_ROWS_H_
