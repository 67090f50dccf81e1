#ifndef PQCACHED_TESTS_SERVICE_HANDLERS_SHARED_MAPPING_H_
#define PQCACHED_TESTS_SERVICE_HANDLERS_SHARED_MAPPING_H_

#include <sys/mman.h>

#include <cstddef>
#include <utility>

#include "kvstore/local_session.h"

namespace pqcached::service {

// Memory behind a descriptor that the sidecar has handed out.
class SharedMapping {
 public:
  SharedMapping() = default;
  SharedMapping(kvstore::FileDescriptor descriptor, size_t size_bytes, int protection)
      : descriptor_(std::move(descriptor)), size_bytes_(size_bytes) {
    void* data = mmap(nullptr, size_bytes, protection, MAP_SHARED, descriptor_.get(), 0);
    if (data != MAP_FAILED) data_ = static_cast<std::byte*>(data);
  }
  SharedMapping(SharedMapping&& other) noexcept { *this = std::move(other); }
  SharedMapping& operator=(SharedMapping&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  ~SharedMapping() {
    if (data_ != nullptr) munmap(data_, size_bytes_);
  }
  std::byte* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }
  int descriptor() const { return descriptor_.get(); }

 private:
  kvstore::FileDescriptor descriptor_;
  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_HANDLERS_SHARED_MAPPING_H_
