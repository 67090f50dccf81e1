// Loads of rows to device memory: what a client keeps for them, and the sink that writes there.
#ifndef PQCACHED_CLIENT_GPU_LOAD_H_
#define PQCACHED_CLIENT_GPU_LOAD_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/base/load.h"
#include "client/local/mapping.h"
#include "client/step/handles.h"
#include "gpu/load/row_loader.h"
#include "gpu/steps.h"
#include "kernels/base/mutex.h"

namespace pqcached::client {

struct LoaderCloser {
  void operator()(gpu::RowLoader* loader) const { loader->Close(); }
};

// A loader of one load, and the memory that it reads in place: a pool whose pages the sidecar keeps
// where they are.
struct HeldLoader {
  std::shared_ptr<Mapping> pool;                         // shared, as all mappings are
  std::unique_ptr<gpu::RowLoader, LoaderCloser> loader;  // destroyed first
};

// The loaders of a client that no load uses, with their pools, and the library that makes them.
// Thread-safe.
class DeviceLoads {
 public:
  // Sets the library, unless there is one.
  void SetEntry(const gpu::GpuEntry& entry);
  // Takes or opens a loader for the device that has `target`. `name`: of the pointer, in errors.
  pqc_status Take(const void* target, const char* name, HeldLoader* loader);
  // Keeps a loader whose copies have ended for a later load.
  void Return(HeldLoader loader);
  // Closes the loaders that have memory of a worker that has ended.
  void CloseEnded();

 private:
  pqc_status FindEntry(const gpu::GpuEntry** entry);

  base::Mutex mutex_;
  const gpu::GpuEntry* entry_ PQCACHED_GUARDED_BY(mutex_) = nullptr;  // null: not loaded yet
  std::vector<HeldLoader> idle_ PQCACHED_GUARDED_BY(mutex_);
};

std::shared_ptr<DeviceLoads> DeviceLoadsOf(ClientState& client);

// Makes the sink of a load to tensors on a device, after the work that `stream` has received.
// Checks all pointers and the stream; the fields are those of pqc_load.
pqc_status OpenDeviceSink(ClientState& client, std::span<const LoadLayer> layers, void* stream,
                          std::shared_ptr<LoadSink>* sink);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_GPU_LOAD_H_
