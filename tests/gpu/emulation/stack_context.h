// StackContext: where a fiber stopped, and the switch to another.
//
// On x86-64 a few instructions, because tests switch tens of millions of times and swapcontext makes
// a system call each time; swapcontext elsewhere. Tells ASan which stack is in use.
#ifndef PQCACHED_TESTS_GPU_EMULATION_STACK_CONTEXT_H_
#define PQCACHED_TESTS_GPU_EMULATION_STACK_CONTEXT_H_

#include <ucontext.h>

#include <cstddef>
#include <cstdint>

#include "tests/sanitizers.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves the registers that a function must keep, stores the stack pointer in *from and goes on at
// the one of `to`.
extern "C" void PqcachedSwitchStack(void** from, void* to);
#endif

namespace pqcached::emulation {

class StackContext {
 public:
  // Makes the next switch to it call `entry`, which never returns, on the given stack.
  void Start(std::byte* stack, size_t bytes, void (*entry)()) {
    stack_ = stack;
    stack_bytes_ = bytes;
    fake_stack_ = nullptr;
#if defined(__x86_64__)
    auto** top = reinterpret_cast<void**>(stack + bytes) - 1;  // as after a call: 8 modulo 16
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  // Stops here and goes on at `to`; returns when something switches back.
  void SwitchTo(StackContext& to, [[maybe_unused]] bool for_ever = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &fake_stack_, to.stack_, to.stack_bytes_);
#endif
#if defined(__x86_64__)
    PqcachedSwitchStack(&stack_pointer_, to.stack_pointer_);
#else
    swapcontext(&context_, &to.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  // The first thing on a new stack; `from` learns where its own is.
  void Arrived([[maybe_unused]] StackContext& from) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &from.stack_, &from.stack_bytes_);
#endif
  }

 private:
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace pqcached::emulation

#endif  // PQCACHED_TESTS_GPU_EMULATION_STACK_CONTEXT_H_
