// Runs the blocks of one launch: threads as fibers, barriers, warp collectives.
#include "tests/gpu/emulation/fibers.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "tests/gpu/emulation/stack_context.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl PqcachedSwitchStack
.hidden PqcachedSwitchStack
.type PqcachedSwitchStack, @function
PqcachedSwitchStack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size PqcachedSwitchStack, .-PqcachedSwitchStack
)");
#endif

thread_local uint3 threadIdx;
thread_local uint3 blockIdx;
thread_local dim3 blockDim;
thread_local dim3 gridDim;

namespace pqcached::emulation {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr unsigned kWarpThreads = 32;

enum class State : uint8_t { kReady, kAtBarrier, kInCollective, kDone };

struct Fiber {
  std::byte* stack = nullptr;
  StackContext context;
  State state = State::kDone;
  uint3 thread;
  const char* waits_for = "";
  unsigned line = 0;
};

struct Warp {
  uint64_t values[2][kWarpThreads];
  unsigned generation = 0;
  unsigned arrived = 0;
  const char* what = nullptr;
  unsigned line = 0;
};

// One block at a time; fibers keep their stacks from launch to launch.
class BlockRunner {
 public:
  ~BlockRunner() {
    for (const Fiber& fiber : fibers_) munmap(fiber.stack, kStackBytes);
  }

  void Run(const std::function<void()>& kernel, bool backwards) {
    kernel_ = &kernel;
    thread_count_ = blockDim.x * blockDim.y * blockDim.z;
    while (fibers_.size() < thread_count_) AddFiber();
    warps_.assign(thread_count_ / kWarpThreads, Warp{});
    barrier_arrived_ = 0;
    done_count_ = 0;
    for (unsigned i = 0; i < thread_count_; ++i) Prepare(i);
    while (done_count_ < thread_count_) {
      bool ran = false;
      for (unsigned i = 0; i < thread_count_; ++i) {
        const unsigned index = backwards ? thread_count_ - 1 - i : i;
        if (fibers_[index].state != State::kReady) continue;
        Resume(index);
        ran = true;
      }
      if (!ran) FailStuck();
    }
  }

  void Barrier(unsigned line) {
    Fiber& fiber = fibers_[current_];
    if (done_count_ > 0) Fail("a barrier after threads of the block have returned", line);
    if (barrier_arrived_ > 0 && line != barrier_line_) {
      Fail("a barrier while other threads wait at the one of another line", line);
    }
    barrier_line_ = line;
    if (++barrier_arrived_ < thread_count_) {
      Wait(fiber, State::kAtBarrier, "__syncthreads", line);
      return;
    }
    barrier_arrived_ = 0;
    for (unsigned i = 0; i < thread_count_; ++i) {
      if (fibers_[i].state == State::kAtBarrier) fibers_[i].state = State::kReady;
    }
  }

  const uint64_t* Collect(unsigned mask, const char* what, uint64_t value, unsigned line) {
    if (mask != 0xFFFFFFFFu) Fail("a collective of a part of a warp is not emulated", line);
    Warp& warp = warps_[current_ / kWarpThreads];
    if (warp.arrived > 0 && (warp.what != what || warp.line != line)) {
      Fail("a collective while other lanes are in the one of another line", line);
    }
    warp.what = what;
    warp.line = line;
    const unsigned buffer = warp.generation % 2;
    warp.values[buffer][current_ % kWarpThreads] = value;
    if (++warp.arrived < kWarpThreads) {
      Wait(fibers_[current_], State::kInCollective, what, line);
      return warp.values[buffer];
    }
    warp.arrived = 0;
    ++warp.generation;
    const unsigned first = current_ / kWarpThreads * kWarpThreads;
    for (unsigned i = first; i < first + kWarpThreads; ++i) {
      if (fibers_[i].state == State::kInCollective) fibers_[i].state = State::kReady;
    }
    return warp.values[buffer];
  }

  unsigned current() const { return current_; }

 private:
  void AddFiber() {
    void* stack =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) std::abort();
    fibers_.emplace_back().stack = static_cast<std::byte*>(stack);
  }

  void Prepare(unsigned index);

  void Resume(unsigned index) {
    current_ = index;
    Fiber& fiber = fibers_[index];
    threadIdx = fiber.thread;
    scheduler_.SwitchTo(fiber.context);
  }

  void Wait(Fiber& fiber, State state, const char* what, unsigned line) {
    fiber.state = state;
    fiber.waits_for = what;
    fiber.line = line;
    fiber.context.SwitchTo(scheduler_);
  }

  static void Entry();

  void RunFiber() {
    Fiber& fiber = fibers_[current_];
    fiber.context.Arrived(scheduler_);
    (*kernel_)();
    fiber.state = State::kDone;
    ++done_count_;
    fiber.context.SwitchTo(scheduler_, true);
  }

  [[noreturn]] void Fail(const char* what, unsigned line) const {
    std::fprintf(stderr, "emulated kernel: %s (line %u, thread %u of block %u,%u,%u)\n", what, line,
                 current_, blockIdx.x, blockIdx.y, blockIdx.z);
    std::abort();
  }

  [[noreturn]] void FailStuck() const {
    for (unsigned i = 0; i < thread_count_; ++i) {
      const Fiber& fiber = fibers_[i];
      if (fiber.state == State::kDone) continue;
      std::fprintf(stderr, "emulated kernel: thread %u waits in %s of line %u for the others\n", i,
                   fiber.waits_for, fiber.line);
      break;
    }
    std::abort();
  }

  const std::function<void()>* kernel_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  unsigned thread_count_ = 0;
  unsigned done_count_ = 0;
  unsigned current_ = 0;
  unsigned barrier_arrived_ = 0;
  unsigned barrier_line_ = 0;
  StackContext scheduler_;
};

thread_local BlockRunner runner;
thread_local std::byte* shared_memory = nullptr;

void BlockRunner::Entry() { runner.RunFiber(); }

void BlockRunner::Prepare(unsigned index) {
  Fiber& fiber = fibers_[index];
  fiber.context.Start(fiber.stack, kStackBytes, &Entry);
  fiber.state = State::kReady;
  fiber.thread = {index % blockDim.x, index / blockDim.x % blockDim.y,
                  index / blockDim.x / blockDim.y};
}

}  // namespace

void RunGrid(const Grid& grid, const std::function<void()>& kernel, uint64_t order) {
  gridDim = grid.blocks;
  blockDim = grid.threads;
  const uint64_t block_count = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
  for (uint64_t i = 0; i < block_count; ++i) {
    const uint64_t block = order % 2 == 0 ? i : block_count - 1 - i;
    blockIdx = {static_cast<unsigned>(block % gridDim.x),
                static_cast<unsigned>(block / gridDim.x % gridDim.y),
                static_cast<unsigned>(block / gridDim.x / gridDim.y)};
    // Its own allocation, so that ASan sees what lies outside.
    const std::unique_ptr<std::byte, void (*)(void*)> shared(
        static_cast<std::byte*>(std::aligned_alloc(16, (grid.shared_bytes + 15) / 16 * 16)),
        &std::free);
    if (grid.shared_bytes > 0) std::memset(shared.get(), 0xFF, grid.shared_bytes);
    shared_memory = shared.get();
    runner.Run(kernel, order / 2 % 2 == 1);
    shared_memory = nullptr;
  }
}

void* SharedMemory() { return shared_memory; }

unsigned Lane() { return runner.current() % kWarpThreads; }

const uint64_t* Collect(unsigned mask, const char* what, uint64_t value, unsigned where) {
  return runner.Collect(mask, what, value, where);
}

}  // namespace pqcached::emulation

void __syncthreads(unsigned where) { pqcached::emulation::runner.Barrier(where); }
