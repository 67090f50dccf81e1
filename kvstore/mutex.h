// Mutex, MutexLock and CondVar are those of kernels/base/mutex.h, with waits until a SteadyTime.
//
// absl's are not used: their timed waits end at a wall-clock time, which can jump (clock.h), and
// distributions ship absl without instrumentation, so that ThreadSanitizer does not see the order
// that its locks establish.
#ifndef PQCACHED_KVSTORE_MUTEX_H_
#define PQCACHED_KVSTORE_MUTEX_H_

#include "absl/base/thread_annotations.h"
#include "kernels/base/mutex.h"
#include "kvstore/clock.h"

namespace pqcached::kvstore {

using base::Mutex;
using base::MutexLock;

class CondVar : public base::CondVar {
 public:
  // Waits for a signal, or until `deadline`; may wake up spuriously.
  void WaitUntil(Mutex* mutex, SteadyTime deadline) PQCACHED_REQUIRES(mutex) {
    if (deadline == SteadyTime::InfiniteFuture()) return Wait(mutex);
    base::CondVar::WaitUntil(mutex, deadline.ToChrono());
  }
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MUTEX_H_
