// ReadScratch: the memory that a read works in. After it has grown to the needed size, no read
// allocates. ReadScratchPool lends them.
#ifndef PQCACHED_KVSTORE_READ_SCRATCH_H_
#define PQCACHED_KVSTORE_READ_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/select/mass_count.h"
#include "kvstore/read/resolve.h"
#include "kvstore/read/select/token_pages.h"

namespace pqcached::kvstore {

// Thread-compatible.
class ReadScratch {
 public:
  // Returns at least `bytes`, 64-byte aligned; earlier contents are lost.
  std::span<std::byte> Bytes(size_t bytes);
  // Returns the bytes that it holds, without the small vectors.
  size_t byte_count() const { return byte_count_ + pages.logits.capacity() * sizeof(float); }

  std::vector<float> queries;           // [kv_heads, query_length, group_size, key_dim]
  std::vector<float> output;            // [kv_heads, query_length, group_size, value_dim]
  std::vector<float> lse;               // [kv_heads, query_length, group_size]
  std::vector<uint32_t> positions;      // [sets, count]: what TopK or Attend has selected
  std::vector<float> logits;            // of the positions, where a re-ranking has computed them
  std::vector<kernels::OwnWeight> own;  // [kv_heads, query_length, group_size]
  ResolvedSelection resolved;
  PageScratch pages;

 private:
  struct Free {
    void operator()(std::byte* bytes) const;
  };
  std::unique_ptr<std::byte, Free> bytes_;
  size_t byte_count_ = 0;
};

// Thread-safe.
class ReadScratchPool {
 public:
  // A scratch, until the destruction. REQUIRES: the pool outlives it.
  class Loan {
   public:
    explicit Loan(ReadScratchPool& pool);
    Loan(Loan&& other) noexcept = default;
    Loan& operator=(Loan&& other) noexcept;
    ~Loan();
    ReadScratch& operator*() { return *scratch_; }
    ReadScratch* operator->() { return scratch_.get(); }

   private:
    ReadScratchPool* pool_;
    std::unique_ptr<ReadScratch> scratch_;  // null after a move
  };

 private:
  // A scratch that has grown beyond this is freed when it is returned.
  static constexpr size_t kMaxIdleBytes = size_t{64} << 20;

  base::Mutex mutex_;
  std::vector<std::unique_ptr<ReadScratch>> idle_ PQCACHED_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_SCRATCH_H_
