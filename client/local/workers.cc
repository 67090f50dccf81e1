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
  SetThreadCount(options.thread_count);
}

Workers::~Workers() {
  const base::MutexLock lock(&run_mutex_);
  StopThreads();
}

void Workers::SetThreadCount(uint32_t thread_count) {
  const base::MutexLock lock(&run_mutex_);
  const uint32_t worker_count = ThreadCount(thread_count);
  if (threads_.size() >= worker_count) StopThreads();  // the next run starts those that it needs
  SelectLocked(worker_count);
}

void Workers::SelectLocked(uint32_t worker_count) {
  const auto [found, is_new] = interfaces_.try_emplace(worker_count);
  kvstore::ParallelFor& made = found->second;
  if (is_new) {
    made.worker_count = worker_count;
    if (options_.hook) {
      made.run = [this, worker_count](uint32_t count, const Body& body) {
        RunByHook(worker_count, count, body);
      };
    } else {
      made.run = [this, worker_count](uint32_t count, const Body& body) {
        Run(worker_count, count, body);
      };
    }
  }
  parallel_for_.store(&made, std::memory_order_release);
}

void Workers::StopThreads() {
  stop_.store(true);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  stop_.store(false);
}

// Starts the threads at the first use, because many clients never run a kernel.
void Workers::StartThreads(uint32_t worker_count) {
  while (threads_.size() + 1 < worker_count) {
    const auto worker = static_cast<uint32_t>(threads_.size()) + 1;
    const uint32_t seen = round_.load(std::memory_order_relaxed);
    threads_.emplace_back([this, worker, seen] { Serve(worker, seen); });
  }
}

void Workers::Run(uint32_t worker_count, uint32_t task_count, const Body& body) {
  if (task_count <= 1 || worker_count == 1 || !run_mutex_.TryLock()) {
    for (uint32_t task = 0; task < task_count; ++task) body(task, 0);
    return;
  }
  const base::HeldLock lock(&run_mutex_);
  StartThreads(worker_count);
  worker_limit_ = worker_count;
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

void Workers::Serve(uint32_t worker, uint32_t seen) {
  for (;;) {
    WaitWhile(round_, seen);
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (round == seen) continue;
    if (stop_.load()) return;
    seen = round;
    if (!Enter()) continue;
    if (worker < worker_limit_) TakeTasks(worker);
    Leave();
  }
}

// The hook's tasks are workers, so that two tasks never use the same scratch at once.
void Workers::RunByHook(uint32_t worker_count, uint32_t task_count, const Body& body) {
  if (worker_count == 1) {
    for (uint32_t task = 0; task < task_count; ++task) body(task, 0);
    return;
  }
  struct Shared {
    const Body& body;
    uint32_t task_count;
    std::atomic<uint32_t> next{0};
  } shared{.body = body, .task_count = task_count};
  options_.hook(
      options_.hook_context, std::min(task_count, worker_count),
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
