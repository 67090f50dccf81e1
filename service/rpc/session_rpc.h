// SessionStreams holds the open session streams, so that a shutdown can end them.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_RPC_SESSION_RPC_H_
#define PQCACHED_SERVICE_RPC_SESSION_RPC_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace pqcached::service {

class SessionStream;

class SessionStreams {
 public:
  // Adds a stream and returns the number of open streams. Streams are shared, because the stream
  // itself, timers and a shutdown hold them, and each may be the last owner.
  size_t Add(std::shared_ptr<SessionStream> stream);
  void Remove(const std::shared_ptr<SessionStream>& stream);
  std::vector<std::shared_ptr<SessionStream>> All() const;
  // Returns the number of streams of a connection that have no session.
  size_t UnopenedOf(const std::string& connection) const;

 private:
  mutable absl::Mutex mutex_;
  absl::flat_hash_set<std::shared_ptr<SessionStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_SESSION_RPC_H_
