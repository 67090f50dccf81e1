// Rows that are copied from storage to the engine's memory: the counterpart of pack.h.
#ifndef PQCACHED_CLIENT_BASE_LOAD_H_
#define PQCACHED_CLIENT_BASE_LOAD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "client/base/remote.h"
#include "kvstore/read/reader.h"
#include "kvstore/read/selection.h"
#include "pqcached/client.h"

namespace pqcached::client {

class Mapping;

// A layer, and the tensors to which its rows are written.
struct LoadLayer {
  LayerShape shape;
  RowBlock to;
};

// Writes the rows of a load to memory of the engine, layer by layer. Destruction waits for writes
// that are in progress.
class LoadSink {
 public:
  virtual ~LoadSink() = default;

  // Begins a layer, whose tensors begin with the row of `first_position`. Keeps `layer`, which must
  // stay until the next Begin.
  virtual pqc_status Begin(const LoadLayer& layer, uint64_t first_position) = 0;
  // Gives the mapping that has the rows of the next calls of Write; they stay until Finish.
  virtual pqc_status SetPool(const std::shared_ptr<Mapping>& pool) = 0;
  // Whether each Write costs so much that it should have as many rows as possible.
  virtual bool needs_long_runs() const { return false; }
  // Writes rows of the layer, or begins to. A failure is returned by Finish. Thread-safe for
  // different rows.
  virtual void Write(const kvstore::RowRun& run) = 0;
  // Waits until all rows that were passed are in the tensors.
  virtual pqc_status Finish() = 0;
};

// Writes to memory of the host.
class HostSink final : public LoadSink {
 public:
  pqc_status Begin(const LoadLayer& layer, uint64_t first_position) override;
  pqc_status SetPool(const std::shared_ptr<Mapping>&) override { return PQC_OK; }
  void Write(const kvstore::RowRun& run) override;
  pqc_status Finish() override { return PQC_OK; }

 private:
  const LoadLayer* layer_ = nullptr;
  uint64_t first_position_ = 0;
};

// A load of the same tokens of several layers, in order.
struct LoadItem {
  kvstore::TokenRange tokens;
  std::span<const LoadLayer> layers;
  LoadSink& sink;
  // Called after each layer; another status than PQC_OK ends the load with it.
  std::function<pqc_status()> layer_done;
};

// Loads by RPCs. Checks that all rows are stored before it writes. PQC_ABORTED after it has written
// if rows were removed; a sidecar or a library (`remote_version`) that is older than this check may
// give rows of before and after that.
pqc_status LoadByRpc(Remote& remote, uint32_t remote_version, uint64_t sequence_id,
                     const LoadItem& item);

// Returns the status of a load that has written rows already: rows that are not there any more were
// removed during the call (PQC_ABORTED in place of PQC_OUT_OF_RANGE).
pqc_status FailBegunLoad(pqc_status status);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_LOAD_H_
