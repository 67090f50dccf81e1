#include "client/base/operations.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "client/base/error.h"

namespace pqcached::client {
namespace {

constexpr size_t kThreads = 4;
// Builds take long, and leave threads for other operations.
constexpr ptrdiff_t kMostBuilds = 2;
constexpr size_t kMostWaiting = 1024;

}  // namespace

Operation::Operation(Options options, Body body)
    : options_(std::move(options)), body_(std::move(body)) {}

Operation::~Operation() { RemoveEvent(); }

void Operation::Run() {
  {
    const base::MutexLock lock(&mutex_);
    if (phase_ != Phase::kWaiting) return;
    phase_ = Phase::kRunning;
  }
  pqc_status status = body_(*this);
  // The client's end looks like that of the session to the calls of the body.
  if (client_closed_ && (status == PQC_UNAVAILABLE || status == PQC_FAILED_PRECONDITION)) {
    status = Fail(PQC_CANCELLED, "client", "it was closed during the operation");
  }
  End(status, LastRefusal());
}

void Operation::CancelByClose() {
  client_closed_ = true;
  Cancel();
}

void Operation::Cancel() {
  cancelled_.store(true, std::memory_order_release);
  {
    const base::MutexLock lock(&mutex_);
    if (phase_ != Phase::kWaiting) return;
    phase_ = Phase::kRunning;  // no other thread ends it now
  }
  RefusalBuffer refusal;
  SetRefusal(&refusal, "operation", "it was cancelled before it began");
  End(PQC_CANCELLED, refusal);
}

void Operation::End(pqc_status status, const RefusalBuffer& refusal) {
  body_ = nullptr;
  const base::MutexLock lock(&mutex_);
  phase_ = Phase::kDone;
  status_ = status;
  if (status != PQC_OK) refusal_ = refusal;
  // Under the lock, so that a handle that is closed after the end leaves no event.
  if (options_.events) options_.events->Add(event_);
  done_.SignalAll();
}

pqc_status Operation::ReportLocked() const {
  return status_ == PQC_OK ? PQC_OK : Fail(status_, refusal_);
}

pqc_status Operation::Poll(bool* done) {
  const base::MutexLock lock(&mutex_);
  *done = phase_ == Phase::kDone;
  return *done ? ReportLocked() : PQC_OK;
}

std::chrono::milliseconds Operation::WaitOf(uint32_t timeout_ms) const {
  return std::chrono::milliseconds(timeout_ms == 0                  ? options_.timeout_ms
                                   : timeout_ms == PQC_TIMEOUT_POLL ? 0
                                                                    : timeout_ms);
}

pqc_status Operation::Wait(uint32_t timeout_ms) {
  const base::MutexLock lock(&mutex_);
  const bool done = done_.WaitFor(&mutex_, WaitOf(timeout_ms), [this]() PQCACHED_REQUIRES(mutex_) {
    return phase_ == Phase::kDone;
  });
  if (done) return ReportLocked();
  return SetRetry(kRetryConflict,
                  Fail(PQC_DEADLINE_EXCEEDED, "timeout_ms", "the operation is still in progress"));
}

void Operation::AddLayer() {
  const base::MutexLock lock(&mutex_);
  ++layers_done_;
  done_.SignalAll();
}

pqc_status Operation::WaitLayers(uint32_t count, uint32_t timeout_ms) {
  if (options_.layer_count == 0) {
    return Fail(PQC_INVALID_ARGUMENT, "operation", "must be a load");
  }
  if (count > options_.layer_count) {
    return Fail(PQC_INVALID_ARGUMENT, "layer_count", "%u, but the load has %u layers", count,
                options_.layer_count);
  }
  const base::MutexLock lock(&mutex_);
  done_.WaitFor(&mutex_, WaitOf(timeout_ms), [&]() PQCACHED_REQUIRES(mutex_) {
    return phase_ == Phase::kDone || layers_done_ >= count;
  });
  if (layers_done_ >= count) return PQC_OK;
  if (phase_ == Phase::kDone) return ReportLocked();
  return SetRetry(kRetryConflict, Fail(PQC_DEADLINE_EXCEEDED, "timeout_ms",
                                       "%u of %u layers are loaded", layers_done_, count));
}

pqc_status Operations::Start(const std::shared_ptr<Operation>& operation) {
  const base::MutexLock lock(&mutex_);
  if (stop_) return Fail(PQC_FAILED_PRECONDITION, "client", "it is closed");
  if (waiting_.size() >= kMostWaiting) {
    return SetRetry(kRetryQueue, Fail(PQC_RESOURCE_EXHAUSTED, "operation",
                                      "%zu operations wait to begin", waiting_.size()));
  }
  if (idle_count_ <= waiting_.size() && threads_.size() < kThreads) {
    try {
      threads_.reserve(kThreads);
      threads_.emplace_back([this] { Serve(); });
      pthread_setname_np(threads_.back().native_handle(), "pqc-operation");
    } catch (const std::system_error& error) {
      if (threads_.empty()) return Fail(PQC_RESOURCE_EXHAUSTED, "operation", "%s", error.what());
    }
  }
  waiting_.push_back(operation);
  changed_.SignalAll();
  return PQC_OK;
}

std::shared_ptr<Operation> Operations::TakeLocked() {
  const auto is_build = [](const std::shared_ptr<Operation>& operation) {
    return operation->kind() == Operation::Kind::kBuild;
  };
  const bool takes_builds = std::ranges::count_if(running_, is_build) < kMostBuilds;
  const auto found = std::ranges::find_if(
      waiting_, [&](const auto& operation) { return takes_builds || !is_build(operation); });
  if (found == waiting_.end()) return nullptr;
  std::shared_ptr<Operation> taken = *found;
  running_.push_back(taken);
  waiting_.erase(found);
  return taken;
}

void Operations::Serve() {
  MarkOwnThread();
  std::shared_ptr<Operation> operation;
  for (;;) {
    {
      const base::MutexLock lock(&mutex_);
      std::erase(running_, operation);
      if (operation && operation->kind() == Operation::Kind::kBuild) changed_.SignalAll();
      operation = nullptr;
      ++idle_count_;
      changed_.Wait(&mutex_, [&]() PQCACHED_REQUIRES(mutex_) {
        if (!stop_) operation = TakeLocked();
        return stop_ || operation;
      });
      --idle_count_;
      if (!operation) return;
    }
    operation->Run();
  }
}

Operations::List Operations::AllLocked() const {
  List all = running_;
  all.insert(all.end(), waiting_.begin(), waiting_.end());
  return all;
}

void Operations::CancelOf(const void* sequence) {
  List all;
  {
    const base::MutexLock lock(&mutex_);
    all = AllLocked();
  }
  for (const std::shared_ptr<Operation>& operation : all) {
    if (operation->sequence() == sequence) operation->Cancel();
  }
}

void Operations::Stop(const std::function<void()>& end_waits) {
  List all;
  std::vector<std::thread> threads;
  {
    const base::MutexLock lock(&mutex_);
    stop_ = true;
    all = AllLocked();
    waiting_.clear();
    threads.swap(threads_);
  }
  changed_.SignalAll();
  for (const std::shared_ptr<Operation>& operation : all) operation->CancelByClose();
  if (!all.empty() && end_waits) end_waits();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace pqcached::client
