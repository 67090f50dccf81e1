// Arena cuts one piece of memory into arrays. The same code runs twice over an Arena: once without
// a base, to compute the size, and once with a base, to set the pointers.
//
// A value; thread-compatible.
#ifndef PQCACHED_GPU_ARENA_H_
#define PQCACHED_GPU_ARENA_H_

#include <cstddef>

namespace pqcached::gpu {

class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<std::byte*>(base)) {}

  // Appends an array of `count` elements of T, aligned to 256 bytes, and points `pointer` at it.
  // Leaves `pointer` unchanged when the arena has no base.
  template <typename T>
  void Place(T*& pointer, size_t count) {
    if (base_ != nullptr) pointer = reinterpret_cast<T*>(base_ + size_bytes_);
    size_bytes_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }
  size_t size_bytes() const { return size_bytes_; }

 private:
  static constexpr size_t kAlignment = 256;

  std::byte* base_;
  size_t size_bytes_ = 0;
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_ARENA_H_
