// The example of operation.hpp, compiled. It is not run, because it needs a sidecar.
#include "pqcached/operation.hpp"

#include <span>
#include <utility>

namespace {

// A coroutine type and a loop as engines have them.
struct Task {
  struct promise_type {
    pqcached::Status status;
    Task get_return_object() { return {}; }
    std::suspend_never initial_suspend() { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_value(pqcached::Status value) { status = std::move(value); }
    void unhandled_exception() {}
  };
};

struct Loop {
  bool WaitReadable(int fd) { return fd < 0; }
  void Handle(const pqc_event& event) { last = event.kind; }
  pqc_event_kind last = PQC_EVENT_NONE;
};

// clang-format off
// [example]
Task Prefill(pqcached::Sequence& sequence, std::span<const pqcached::LayerRows> rows) {
  auto ingest = pqcached::Operation::Ingest(sequence, 0, rows);
  if (!ingest.ok()) co_return ingest.status();
  const pqcached::Status stored = co_await *ingest;
  if (!stored.ok()) co_return stored;
  auto build = pqcached::Operation::BuildIndex(sequence, {.sink_tokens = 16});
  if (!build.ok()) co_return build.status();
  co_return co_await *build;
}

pqcached::Status Serve(Loop& loop, pqcached::Events& events) {
  while (loop.WaitReadable(events.Fd())) {
    const pqcached::Status status = events.Dispatch(
        [&](const pqc_event& event) { loop.Handle(event); });
    if (!status.ok()) return status;
  }
  return {};
}
// [/example]
// clang-format on

}  // namespace

pqcached::Status OperationHppExample(pqcached::Client& client, pqcached::Sequence& sequence,
                                     std::span<const pqcached::LayerRows> rows);
pqcached::Status OperationHppExample(pqcached::Client& client, pqcached::Sequence& sequence,
                                     std::span<const pqcached::LayerRows> rows) {
  auto events = pqcached::Events::Open(client);
  if (!events.ok()) return events.status();
  Loop loop;
  Prefill(sequence, rows);
  return Serve(loop, *events);
}
