#include "kvstore/limits/repeater.h"

#include <utility>

#include "kvstore/clock.h"

namespace pqcached::kvstore {

Repeater::Repeater(const char* name, absl::Duration interval, std::function<void()> call)
    : interval_(interval), call_(std::move(call)), worker_(name) {
  ScheduleNext();
}

void Repeater::ScheduleNext() {
  worker_.RunAt((SteadyTime::Now() + interval_).ToChrono(), [this] {
    call_();
    ScheduleNext();
  });
}

}  // namespace pqcached::kvstore
