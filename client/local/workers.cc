#include "client/local/workers.h"

#include <algorithm>

namespace pqcached::client {
namespace {

constexpr uint32_t kMaxThreads = 256;
// A thread polls this often for work, or for the end, before it sleeps: between the layers of a
// step, new work arrives within microseconds.
constexpr int kSpins = 2000;
constexpr uint32_t kOpen = 1u << 31;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits while *word equals `old`.
void WaitWhile(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (word.load(std::memory_order_acquire) != old) return;
    Pause();
  }
  word.wait(old, std::memory_order_acquire);
}

uint32_t ThreadCount(uint32_t wanted) {
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  return std::min(wanted == 0 ? cores : wanted, kMaxThreads);
}

}  // namespace

Workers::Workers(const Options& options) : options_(options) {
  parallel_for_.worker_count = ThreadCount(options.thread_count);
  if (options.hook) {
    parallel_for_.run = [this](uint32_t count, const Body& body) { RunByHook(count, body); };
  } else {
    parallel_for_.run = [this](uint32_t count, const Body& body) { Run(count, body); };
  }
}

Workers::~Workers() {
  stop_.store(true);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// Starts the threads at the first use, because many clients never run a kernel.
void Workers::StartThreads() {
  if (!threads_.empty()) return;
  for (uint32_t worker = 1; worker < parallel_for_.worker_count; ++worker) {
    threads_.emplace_back([this, worker] { Serve(worker); });
  }
}

void Workers::Run(uint32_t task_count, const Body& body) {
  if (task_count <= 1 || parallel_for_.worker_count == 1 || !run_mutex_.TryLock()) {
    for (uint32_t task = 0; task < task_count; ++task) body(task, 0);
    return;
  }
  const base::HeldLock lock(&run_mutex_);
  StartThreads();
  body_ = &body;
  task_count_ = task_count;
  next_task_.store(0, std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  TakeTasks(0);
  // Threads that have not entered by now find the gate closed, so a run never waits for a sleeping
  // thread.
  uint32_t inside = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  while (inside != 0) {
    WaitWhile(gate_, inside);
    inside = gate_.load(std::memory_order_acquire);
  }
}

bool Workers::Enter() {
  uint32_t gate = gate_.load(std::memory_order_acquire);
  while (gate & kOpen) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void Workers::Leave() {
  if (gate_.fetch_sub(1, std::memory_order_acq_rel) == 1) gate_.notify_all();
}

void Workers::TakeTasks(uint32_t worker) {
  for (;;) {
    const uint32_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= task_count_) return;
    (*body_)(task, worker);
  }
}

void Workers::Serve(uint32_t worker) {
  for (uint32_t seen = 0;;) {
    WaitWhile(round_, seen);
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (round == seen) continue;
    if (stop_.load()) return;
    seen = round;
    if (!Enter()) continue;
    TakeTasks(worker);
    Leave();
  }
}

// The hook's tasks are workers, so that two tasks never use the same scratch at once.
void Workers::RunByHook(uint32_t task_count, const Body& body) {
  struct Shared {
    const Body& body;
    uint32_t task_count;
    std::atomic<uint32_t> next{0};
  } shared{.body = body, .task_count = task_count};
  options_.hook(
      options_.hook_context, std::min(task_count, parallel_for_.worker_count),
      [](void* context, uint32_t worker) {
        auto* work = static_cast<Shared*>(context);
        for (;;) {
          const uint32_t task = work->next.fetch_add(1, std::memory_order_relaxed);
          if (task >= work->task_count) return;
          work->body(task, worker);
        }
      },
      &shared);
}

}  // namespace pqcached::client
