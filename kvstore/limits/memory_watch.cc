#include "kvstore/limits/memory_watch.h"

#include <utility>

#include "kvstore/clock.h"

namespace pqcached::kvstore {

MemoryWatch::MemoryWatch(absl::Duration interval, std::function<void()> check)
    : interval_(interval), check_(std::move(check)) {
  ScheduleNext();
}

void MemoryWatch::ScheduleNext() {
  worker_.RunAt((SteadyTime::Now() + interval_).ToChrono(), [this] {
    check_();
    ScheduleNext();
  });
}

}  // namespace pqcached::kvstore
