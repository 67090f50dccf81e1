// Image is a segment map: one version of the places of a sequence's bytes in the pool, parsed and
// ready to be read.
//
// Thread-safe. A holder of an image may read the memory to which it refers: the client's lease
// keeps that memory until LocalSequence::lease no longer lists the image's version as in use.
#ifndef PQCACHED_CLIENT_LOCAL_IMAGE_H_
#define PQCACHED_CLIENT_LOCAL_IMAGE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client/local/mapping.h"
#include "kernels/base/mutex.h"
#include "kvstore/read/attachment.h"
#include "pqcached/client.h"

namespace pqcached::client {

// The number of leading tokens that an image is known to place where the sidecar's newest image
// places them, or placed them when it was still this one. Without locks: each value carries the
// number of limits before it, so a value that was loaded before a limit raises nothing after it.
class KnownTokens {
 public:
  struct alignas(8) Value {  // aligned, so that it is one atomic word
    uint32_t tokens = 0;
    uint32_t limits = 0;
  };

  explicit KnownTokens(uint32_t tokens) : value_({.tokens = tokens}) {}
  Value Load() const { return value_.load(std::memory_order_acquire); }
  // Raises the number to `tokens`, unless the number was limited since `loaded`.
  void Raise(Value loaded, uint32_t tokens) {
    while (loaded.tokens < tokens) {
      Value present = loaded;
      if (value_.compare_exchange_weak(present, {tokens, loaded.limits})) return;
      if (present.limits != loaded.limits) return;
      loaded = present;
    }
  }
  // Lowers the number to `tokens`.
  void Limit(uint32_t tokens) {
    Value present = Load();
    while (!value_.compare_exchange_weak(present,
                                         {std::min(present.tokens, tokens), present.limits + 1})) {
    }
  }

 private:
  std::atomic<Value> value_;
  static_assert(std::atomic<Value>::is_always_lock_free);
};

class Image {
 public:
  // Errors: PQC_INTERNAL  the image does not fit the sequence or the pool
  static pqc_status Parse(std::span<const std::byte> bytes, uint64_t sequence_id,
                          std::shared_ptr<Mapping> pool, std::shared_ptr<Image>* image);

  uint64_t version() const { return attachment_.header.version; }
  // Returns the number of tokens that were complete over all layers when the image was made.
  uint32_t token_count() const { return attachment_.header.token_count; }
  // Returns the row count of one layer when the image was made; 0 for a layer that is not stored.
  uint32_t LayerTokens(uint32_t layer) const;
  // Returns the number of tokens for which this image has slots. Slots beyond known_tokens() hold
  // tokens only while no newer image places these elsewhere.
  uint32_t capacity_tokens() const { return capacity_tokens_; }

  KnownTokens& known_tokens() { return known_tokens_; }

  // Notes that the worker that made the image has ended: known_tokens() does not rise any more.
  void SetFormer() { is_former_.store(true, std::memory_order_release); }
  bool is_former() const { return is_former_.load(std::memory_order_acquire); }

  // Returns the pool, for readers that use it after the image's end.
  std::shared_ptr<Mapping> shared_pool() const { return pool_; }

  // Finds the slot of an index, kMaxIndexes for flat; PQC_FAILED_PRECONDITION when the sequence has
  // no such index.
  pqc_status FindIndex(const kvstore::IndexDescriptor& index, uint32_t* index_slot) const;
  // Returns the first index of a kind, if there is one.
  std::optional<kvstore::IndexDescriptor> FindIndexOf(kvstore::IndexKind kind) const;

  // Returns the number of tokens that an index of a layer covers without gap; capacity_tokens()
  // when every segment is READY. Used by waiters.
  uint32_t CodedTokens(uint32_t layer, uint32_t index_slot) const;

  // A layer, borrowed by one reader at a time. Returned on destruction; must not outlive the image.
  class Loan {
   public:
    Loan() = default;
    Loan(Loan&& other) noexcept { *this = std::move(other); }
    Loan& operator=(Loan&& other) noexcept;
    ~Loan();
    kvstore::MappedLayer& layer() { return *layer_; }

   private:
    friend class Image;
    Image* image_ = nullptr;
    uint64_t key_ = 0;
    std::unique_ptr<kvstore::MappedLayer> layer_;
  };
  // Errors: PQC_INTERNAL  the pool's contents do not match the descriptors
  pqc_status Borrow(uint32_t layer, const kvstore::LayerShape& shape, uint32_t index_slot,
                    Loan* loan);

 private:
  Image(kvstore::Attachment attachment, std::shared_ptr<Mapping> pool);

  const kvstore::Attachment attachment_;
  const std::shared_ptr<Mapping> pool_;  // shared, as all mappings are
  uint32_t capacity_tokens_ = 0;
  KnownTokens known_tokens_;
  std::atomic<bool> is_former_ = false;
  base::Mutex mutex_;
  // By layer, index.
  std::map<uint64_t, std::vector<std::unique_ptr<kvstore::MappedLayer>>> idle_
      PQCACHED_GUARDED_BY(mutex_);
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_IMAGE_H_
