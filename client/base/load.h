// Rows that are copied from storage to the engine's memory: the counterpart of pack.h.
#ifndef PQCACHED_CLIENT_BASE_LOAD_H_
#define PQCACHED_CLIENT_BASE_LOAD_H_

#include <cstdint>
#include <functional>
#include <span>

#include "client/base/remote.h"
#include "kvstore/read/reader.h"
#include "kvstore/read/selection.h"
#include "pqcached/client.h"

namespace pqcached::client {

// A layer, and the tensors to which its rows are written.
struct LoadLayer {
  LayerShape shape;
  RowBlock to;
};

// A load of the same tokens of several layers, in order.
struct LoadItem {
  kvstore::TokenRange tokens;
  std::span<const LoadLayer> layers;
  // Called after each layer; another status than PQC_OK ends the load with it.
  std::function<pqc_status()> layer_done;
};

// Writes rows to the tensors of a layer: those of `run.first_position` have index
// run.first_position - first_position. Thread-safe for different rows.
void UnpackRun(const LoadLayer& layer, uint64_t first_position, const kvstore::RowRun& run);

// Loads by RPCs. Checks that all rows are stored before it writes.
pqc_status LoadByRpc(Remote& remote, uint64_t sequence_id, const LoadItem& item);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_LOAD_H_
