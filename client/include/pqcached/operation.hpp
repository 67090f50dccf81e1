// pqcached client: C++20 over operation.h. Operation is a long call that goes on while the engine
// does other work; a coroutine waits for it with co_await. Events is the dispatcher for the loop of
// the engine, which watches its descriptor.
//
// Each function calls the function of operation.h that its comment names, where its errors and
// thread-safety are written. All operations of a client with an Events are begun by this class.
//
// Example, a coroutine of the engine, and the loop that resumes it:
//
//     Task Prefill(pqcached::Sequence& sequence, std::span<const pqcached::LayerRows> rows) {
//       auto ingest = pqcached::Operation::Ingest(sequence, 0, rows);
//       if (!ingest.ok()) co_return ingest.status();
//       const pqcached::Status stored = co_await *ingest;
//       if (!stored.ok()) co_return stored;
//       auto build = pqcached::Operation::BuildIndex(sequence, {.sink_tokens = 16});
//       if (!build.ok()) co_return build.status();
//       co_return co_await *build;
//     }
//
//     pqcached::Status Serve(Loop& loop, pqcached::Events& events) {
//       while (loop.WaitReadable(events.Fd())) {
//         const pqcached::Status status = events.Dispatch(
//             [&](const pqc_event& event) { loop.Handle(event); });
//         if (!status.ok()) return status;
//       }
//       return {};
//     }
#ifndef PQCACHED_OPERATION_HPP_
#define PQCACHED_OPERATION_HPP_

#include <atomic>
#include <coroutine>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pqcached/client.hpp"
#include "pqcached/load.h"
#include "pqcached/operation.h"

namespace pqcached {

// A long call that has begun (pqc_operation). Moves. The destructor cancels the operation and waits
// until it has ended. `context` of the functions that begin one is the engine's, and part of the
// operation's event.
class Operation {
 public:
  // Begins Sequence::Flush (pqc_sequence_flush_begin).
  static Result<Operation> Flush(Sequence& sequence, void* context = nullptr) {
    auto waiter = std::make_unique<Waiter>(context);
    pqc_operation* operation = nullptr;
    const pqc_status status = pqc_sequence_flush_begin(sequence.get(), waiter.get(), &operation);
    return Made(status, operation, std::move(waiter));
  }

  // Begins Sequence::BuildIndex. options.progress is called on a thread of the client
  // (pqc_build_index_begin).
  static Result<Operation> BuildIndex(Sequence& sequence, const BuildOptions& options = {},
                                      void* context = nullptr) {
    auto waiter = std::make_unique<Waiter>(context);
    waiter->build = options;
    const pqc_build_options c = BuildOptionsToC(waiter->build);
    pqc_operation* operation = nullptr;
    const pqc_status status = pqc_build_index_begin(sequence.get(), &c, waiter.get(), &operation);
    return Made(status, operation, std::move(waiter));
  }

  // Begins to store rows of several layers from `first_position` on. The Tensors and names may end
  // at once, but the memory of the rows, blocks and slots is read until the operation has ended
  // (pqc_ingest_begin).
  static Result<Operation> Ingest(Sequence& sequence, uint64_t first_position,
                                  std::span<const LayerRows> layers, const TokenNames& names = {},
                                  void* context = nullptr) {
    auto waiter = std::make_unique<Waiter>(context);
    const std::vector<pqc_layer_rows> rows = LayerRowsToC(layers);
    const pqc_row_options options = names.c();
    pqc_operation* operation = nullptr;
    const pqc_status status =
        pqc_ingest_begin(sequence.get(), first_position, rows.data(),
                         static_cast<uint32_t>(rows.size()), &options, waiter.get(), &operation);
    return Made(status, operation, std::move(waiter));
  }

  // Begins Sequence::Load: copies the rows of a range of tokens to the engine's memory, layer by
  // layer. The Tensors may end at once, but their memory, blocks and slots are used until the
  // operation has ended (pqc_load_begin).
  static Result<Operation> Load(Sequence& sequence, pqc_token_range tokens,
                                std::span<const LayerRows> layers, void* context = nullptr) {
    auto waiter = std::make_unique<Waiter>(context);
    const std::vector<pqc_layer_rows> rows = LayerRowsToC(layers);
    pqc_operation* operation = nullptr;
    const pqc_status status =
        pqc_load_begin(sequence.get(), tokens, rows.data(), static_cast<uint32_t>(rows.size()),
                       waiter.get(), &operation);
    return Made(status, operation, std::move(waiter));
  }

  Operation(Operation&&) = default;
  Operation& operator=(Operation&& other) noexcept {
    handle_ = std::move(other.handle_);  // first, because the old one's end uses its waiter
    waiter_ = std::move(other.waiter_);
    return *this;
  }

  // Returns the handle, which the operation's event names; this object still owns it.
  pqc_operation* get() const { return handle_.get(); }

  // Returns the operation's status, or nothing while it is in progress (pqc_operation_poll).
  std::optional<Status> Poll() {
    uint32_t done = 0;
    const pqc_status status = pqc_operation_poll(handle_.get(), &done);
    if (!done) return std::nullopt;
    return Status(status);
  }
  // Waits at most timeout_ms (0 = the client's) and returns the operation's status;
  // PQC_DEADLINE_EXCEEDED about "timeout_ms" while it is in progress (pqc_operation_wait).
  Status Wait(uint32_t timeout_ms = 0) {
    return Status(pqc_operation_wait(handle_.get(), timeout_ms));
  }
  // Waits at most timeout_ms until the first `layer_count` layers of a Load are in the engine's
  // memory (pqc_load_wait).
  Status WaitLayers(uint32_t layer_count, uint32_t timeout_ms = 0) {
    return Status(pqc_load_wait(handle_.get(), layer_count, timeout_ms));
  }
  // Asks the operation to end early (pqc_operation_cancel).
  void Cancel() { pqc_operation_cancel(handle_.get()); }
  // Cancels the operation and waits until it has ended, at most timeout_ms. The object is empty
  // afterwards, unless the time has run out (pqc_operation_close).
  Status Close(uint32_t timeout_ms = 0) {
    const pqc_status status = pqc_operation_close(handle_.get(), timeout_ms);
    if (status != PQC_OK) return Status(status);
    static_cast<void>(handle_.release());
    waiter_.reset();
    return {};
  }

  // Suspends the coroutine until the operation has ended, and gives its status. Events::Dispatch
  // resumes the coroutine, on its own thread. The operation is awaited by one coroutine at a time,
  // and outlives the wait.
  auto operator co_await() {
    struct Awaiter {
      Operation& operation;
      bool await_ready() { return operation.Poll().has_value(); }
      // Returns false when the event has been dispatched already.
      bool await_suspend(std::coroutine_handle<> coroutine) {
        void* none = nullptr;
        return operation.waiter_->coroutine.compare_exchange_strong(none, coroutine.address());
      }
      Status await_resume() { return operation.Poll().value_or(Status()); }
    };
    return Awaiter{*this};
  }

 private:
  friend class Events;
  // The context of the operation's event. Its address stays when the Operation moves.
  struct Waiter {
    explicit Waiter(void* engine_context) : context(engine_context) {}
    // Notes that the event is taken; returns the coroutine that waits, or null.
    std::coroutine_handle<> Take() {
      void* waits = coroutine.exchange(this);
      return waits ? std::coroutine_handle<>::from_address(waits) : nullptr;
    }
    void* const context;
    std::atomic<void*> coroutine = nullptr;  // `this` = the event is taken
    BuildOptions build = {};
  };
  struct Closer {
    void operator()(pqc_operation* operation) const {
      // Ends with the operation, which has a deadline.
      while (pqc_operation_close(operation, 0) == PQC_DEADLINE_EXCEEDED) {
      }
    }
  };

  Operation(pqc_operation* operation, std::unique_ptr<Waiter> waiter)
      : waiter_(std::move(waiter)), handle_(operation) {}
  static Result<Operation> Made(pqc_status status, pqc_operation* operation,
                                std::unique_ptr<Waiter> waiter) {
    if (status != PQC_OK) return Status(status);
    return Operation(operation, std::move(waiter));
  }

  std::unique_ptr<Waiter> waiter_;  // outlives the handle
  std::unique_ptr<pqc_operation, Closer> handle_;
};

// The events of one client, for one thread of the engine. Ends before its client.
class Events {
 public:
  // Opens the client's event descriptor (pqc_client_event_fd).
  static Result<Events> Open(Client& client) {
    int fd = -1;
    const pqc_status status = pqc_client_event_fd(client.get(), &fd);
    if (status != PQC_OK) return Status(status);
    return Events(client.get(), fd);
  }

  // Returns the descriptor, which is readable while events are pending.
  int Fd() const { return fd_; }

  // Takes all pending events and never waits: resumes the coroutines whose operations have ended,
  // and calls handler(const pqc_event&) for each event that no coroutine awaits
  // (pqc_client_next_event).
  template <class Handler>
  Status Dispatch(const Handler& handler) {
    for (;;) {
      pqc_event event = PQC_INIT(pqc_event);
      if (const pqc_status status = pqc_client_next_event(client_, &event); status != PQC_OK) {
        return Status(status);
      }
      if (event.kind == PQC_EVENT_NONE) return {};
      if (event.kind == PQC_EVENT_OPERATION) {
        auto* const waiter = static_cast<Operation::Waiter*>(event.context);
        event.context = waiter->context;
        if (const std::coroutine_handle<> coroutine = waiter->Take()) {
          coroutine.resume();
          continue;
        }
      }
      handler(event);
    }
  }
  // Like above, and drops the other events.
  Status Dispatch() {
    return Dispatch([](const pqc_event&) {});
  }

 private:
  Events(pqc_client* client, int fd) : client_(client), fd_(fd) {}

  pqc_client* client_;
  int fd_;
};

}  // namespace pqcached

#endif  // PQCACHED_OPERATION_HPP_
