// Repeater calls a function at a fixed interval, on its own thread, until it is destroyed.
#ifndef PQCACHED_KVSTORE_LIMITS_REPEATER_H_
#define PQCACHED_KVSTORE_LIMITS_REPEATER_H_

#include <functional>

#include "absl/time/time.h"
#include "kernels/base/worker.h"

namespace pqcached::kvstore {

class Repeater {
 public:
  // `name`: of the thread, at most 15 bytes.
  Repeater(const char* name, absl::Duration interval, std::function<void()> call);
  // Waits for a call in progress.
  ~Repeater() { worker_.Stop(); }
  Repeater(const Repeater&) = delete;
  Repeater& operator=(const Repeater&) = delete;

 private:
  void ScheduleNext();

  const absl::Duration interval_;
  const std::function<void()> call_;
  base::Worker worker_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LIMITS_REPEATER_H_
