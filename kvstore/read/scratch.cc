#include "kvstore/read/scratch.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace pqcached::kvstore {
namespace {

constexpr size_t kAlignment = 64;

}  // namespace

void ReadScratch::Free::operator()(std::byte* bytes) const { std::free(bytes); }

std::span<std::byte> ReadScratch::Bytes(size_t bytes) {
  if (bytes > byte_count_) {
    // Grows by half, so that a growing sequence does not reallocate at each step.
    const size_t grown = (bytes + bytes / 2 + kAlignment) / kAlignment * kAlignment;
    bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, grown)));
    byte_count_ = bytes_ ? grown : 0;
    if (!bytes_) throw std::bad_alloc();
  }
  return {bytes_.get(), bytes};
}

ReadScratchPool::Loan::Loan(ReadScratchPool& pool) : pool_(&pool) {
  {
    const base::MutexLock lock(&pool_->mutex_);
    if (!pool_->idle_.empty()) {
      scratch_ = std::move(pool_->idle_.back());
      pool_->idle_.pop_back();
    }
  }
  if (!scratch_) scratch_ = std::make_unique<ReadScratch>();
}

ReadScratchPool::Loan& ReadScratchPool::Loan::operator=(Loan&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(scratch_, other.scratch_);
  return *this;
}

ReadScratchPool::Loan::~Loan() {
  if (!scratch_ || scratch_->byte_count() > kMaxIdleBytes) return;
  const base::MutexLock lock(&pool_->mutex_);
  pool_->idle_.push_back(std::move(scratch_));
}

}  // namespace pqcached::kvstore
