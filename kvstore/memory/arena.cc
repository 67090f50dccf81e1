#include "kvstore/memory/arena.h"

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>
#include <utility>

namespace pqcached::kvstore {
namespace {

constexpr std::align_val_t kScratchAlignment{64};

// Runs body(worker) for every worker < worker_count, concurrently.
#if defined(__SANITIZE_THREAD__)
// Distributions ship oneTBB without instrumentation, so ThreadSanitizer reports races in the
// scheduler itself. Under that sanitizer plain threads replace the scheduler; the bodies are
// checked as usual.
template <class Body>
void RunWorkers(oneapi::tbb::task_arena&, uint32_t worker_count, const Body& body) {
  std::vector<std::thread> threads;
  for (uint32_t worker = 1; worker < worker_count; ++worker) threads.emplace_back(body, worker);
  body(0);
  for (std::thread& thread : threads) thread.join();
}
#else
template <class Body>
void RunWorkers(oneapi::tbb::task_arena& arena, uint32_t worker_count, const Body& body) {
  arena.execute([&] {
    oneapi::tbb::parallel_for(uint32_t{0}, worker_count, body, oneapi::tbb::simple_partitioner());
  });
}
#endif

}  // namespace

Arena::Arena(uint32_t thread_count, Priority priority)
    : worker_count_(thread_count),
      arena_(static_cast<int>(thread_count), /*reserved_for_masters=*/1,
             priority == Priority::kServing ? oneapi::tbb::task_arena::priority::normal
                                            : oneapi::tbb::task_arena::priority::low) {}

ParallelFor Arena::parallel_for() {
  return {
      .worker_count = worker_count_,
      .run = [this](uint32_t task_count, const ParallelFor::Body& body) { Run(task_count, body); }};
}

void Arena::Run(uint32_t task_count, const ParallelFor::Body& body) {
  const uint32_t workers = std::min(worker_count_, task_count);
  if (workers <= 1) {
    for (uint32_t task = 0; task < task_count; ++task) body(task, 0);
    return;
  }
  // Workers take tasks from a counter: tasks begin in order, and a slow task delays no other.
  std::atomic<uint32_t> next_task = 0;
  RunWorkers(arena_, workers, [&](uint32_t worker) {
    for (uint32_t task = next_task++; task < task_count; task = next_task++) body(task, worker);
  });
}

void ScratchPool::Buffer::AlignedDelete::operator()(std::byte* memory) const {
  ::operator delete(memory, kScratchAlignment);
}

ScratchPool::Buffer::~Buffer() {
  if (block_.memory != nullptr) pool_->ReturnBlock(std::move(block_));
}

ScratchPool::Buffer ScratchPool::Take(size_t size_bytes) {
  {
    const MutexLock lock(&mutex_);
    for (auto it = blocks_.rbegin(); it != blocks_.rend(); ++it) {
      if (it->size_bytes < size_bytes) continue;
      Buffer::Block block = std::move(*it);
      blocks_.erase(std::next(it).base());
      return Buffer(this, std::move(block), size_bytes);
    }
  }
  const size_t block_bytes = std::max<size_t>(size_bytes, 1);
  Buffer::Block block;
  block.memory.reset(static_cast<std::byte*>(::operator new(block_bytes, kScratchAlignment)));
  block.size_bytes = block_bytes;
  return Buffer(this, std::move(block), size_bytes);
}

void ScratchPool::ReturnBlock(Buffer::Block block) {
  if (block.size_bytes > kMaxFreeBlockBytes) return;
  Buffer::Block smallest;  // freed after the lock is released
  const MutexLock lock(&mutex_);
  blocks_.push_back(std::move(block));
  if (blocks_.size() <= kMaxFreeBlocks) return;
  const auto it =
      std::min_element(blocks_.begin(), blocks_.end(),
                       [](const auto& a, const auto& b) { return a.size_bytes < b.size_bytes; });
  smallest = std::move(*it);
  blocks_.erase(it);
}

}  // namespace pqcached::kvstore
