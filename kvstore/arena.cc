#include "kvstore/arena.h"

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <utility>

namespace pqcached::kvstore {
namespace {

constexpr std::align_val_t kScratchAlignment{64};

// ThreadSanitizer does not see the order that the scheduler makes, because its library is not
// instrumented: what happens before a fork is told to every worker, and what workers did to whoever
// joins them.
#if defined(__SANITIZE_THREAD__)
void Publish(void* point) { __tsan_release(point); }
void Observe(void* point) { __tsan_acquire(point); }
#else
void Publish(void*) {}
void Observe(void*) {}
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
  // Workers draw tasks from a counter: tasks begin in order, and one slow task delays no other.
  std::atomic<uint32_t> next_task = 0;
  int fork = 0;
  int join = 0;
  Publish(&fork);
  arena_.execute([&] {
    oneapi::tbb::parallel_for(
        uint32_t{0}, workers,
        [&](uint32_t worker) {
          Observe(&fork);
          for (uint32_t task = next_task++; task < task_count; task = next_task++) {
            body(task, worker);
          }
          Publish(&join);
        },
        oneapi::tbb::simple_partitioner());
  });
  Observe(&join);
}

void ScratchPool::Buffer::AlignedDelete::operator()(std::byte* memory) const {
  ::operator delete(memory, kScratchAlignment);
}

ScratchPool::Buffer::~Buffer() {
  if (block_.memory != nullptr) pool_->GiveBack(std::move(block_));
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

void ScratchPool::GiveBack(Buffer::Block block) {
  if (block.size_bytes > kMaxKeptBlockBytes) return;
  Buffer::Block smallest;  // dies behind the lock
  const MutexLock lock(&mutex_);
  blocks_.push_back(std::move(block));
  if (blocks_.size() <= kMaxKeptBlocks) return;
  const auto it =
      std::min_element(blocks_.begin(), blocks_.end(),
                       [](const auto& a, const auto& b) { return a.size_bytes < b.size_bytes; });
  smallest = std::move(*it);
  blocks_.erase(it);
}

}  // namespace pqcached::kvstore
