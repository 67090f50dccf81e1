// LocalHost: what the local path asks for from outside. The broker and the RPCs stand behind it; tests
// put memory of their own there.
//
// One worker of the sidecar stands behind it (LocalLink).
//
// Thread-safe. Every call ends within the client's timeout and leaves its reason as the thread's last
// error.
#ifndef PQCACHED_CLIENT_LOCAL_HOST_H_
#define PQCACHED_CLIENT_LOCAL_HOST_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "client/local/mapping.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

// An encoded attachment (kvstore/read/attachment.h); version 0 = none came.
struct ImageBytes {
  uint64_t version = 0;
  std::vector<std::byte> image;

  // Fills *this.
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
  // Once.
  virtual pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                                 std::shared_ptr<Mapping>* ring) = 0;
  // Takes a lease, or refreshes the one given.
  virtual pqc_status Attach(uint64_t sequence_id, const LeaseView& lease, AttachAnswer* answer) = 0;
  virtual pqc_status Detach(const LeaseView& lease) = 0;
  // Ends the session, whoever still maps its memory. No call follows.
  virtual void End() = 0;
  // Waits until the connection has ended or the time is over; says whether it has.
  virtual bool Ended(uint32_t wait_ms) = 0;
  // The worker has ended: calls under way fail soon with PQC_UNAVAILABLE. The connection stays open.
  virtual void Abandon() = 0;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_HOST_H_
