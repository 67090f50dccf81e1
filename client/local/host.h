// LocalHost is the interface through which the local path reaches the sidecar. The client
// implements it by the broker and the RPCs; tests implement it with their own memory.
//
// A host belongs to one worker of the sidecar (LocalLink).
//
// Thread-safe. Every call ends within the client's timeout and stores the reason of a failure as
// the thread's last error.
#ifndef PQCACHED_CLIENT_LOCAL_HOST_H_
#define PQCACHED_CLIENT_LOCAL_HOST_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "client/base/remote.h"
#include "client/local/mapping.h"
#include "pqcached/client.h"

namespace pqcached::client {

// An encoded attachment (kvstore/read/attachment.h); version 0 = none received.
struct ImageBytes {
  uint64_t version = 0;
  std::vector<std::byte> image;

  // Returns a sink that fills *this.
  ImageSink sink() {
    return {this, [](void* context, uint64_t number, const std::byte* data, size_t size) {
              auto* bytes = static_cast<ImageBytes*>(context);
              bytes->version = number;
              bytes->image.assign(data, data + size);
            }};
  }
};

struct AttachAnswer {
  uint64_t lease_id = 0;
  uint32_t word_index = 0;
  ImageBytes image;
};

class LocalHost {
 public:
  virtual ~LocalHost() = default;

  virtual pqc_status OpenPool(uint64_t cache_id, std::shared_ptr<Mapping>* pool) = 0;
  // Makes the sidecar keep the pages of the pool in place until the session ends.
  // Errors: PQC_UNIMPLEMENTED  an older sidecar
  virtual pqc_status HoldPool(uint64_t cache_id) = 0;
  // REQUIRES: called at most once.
  virtual pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                                 std::shared_ptr<Mapping>* ring) = 0;
  // Acquires a lease, or refreshes the given one.
  virtual pqc_status Attach(uint64_t sequence_id, const LeaseView& lease, AttachAnswer* answer) = 0;
  virtual pqc_status Detach(const LeaseView& lease) = 0;
  // Ends the session, even if its memory is still mapped. No call follows.
  virtual void End() = 0;
  // Waits until the connection ends or the time is over; returns true if it has ended.
  virtual bool WaitEnded(uint32_t wait_ms) = 0;
  // Returns whether a process of the sidecar still holds the connection: memory that was received
  // over it is not reused for as long, also after the worker's end.
  virtual bool HoldsConnection() = 0;
  // Notes that the worker has ended: pending calls soon fail with PQC_UNAVAILABLE. The connection
  // stays open.
  virtual void Abandon() = 0;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_HOST_H_
