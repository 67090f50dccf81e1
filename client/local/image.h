// Image: one version of where the bytes of a sequence lie, ready to be read.
//
// Thread-safe. Whoever holds it may read what it names, for as long as the sidecar is not told that
// it has been let go (LocalSequence::lease).
#ifndef PQCACHED_CLIENT_LOCAL_IMAGE_H_
#define PQCACHED_CLIENT_LOCAL_IMAGE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/local/mapping.h"
#include "kvstore/read/attachment.h"
#include "pqcached/client.h"

namespace pqcached::client {

class Image {
 public:
  // Errors: PQC_INTERNAL  the image does not fit the sequence or the pool
  static pqc_status Parse(std::span<const std::byte> bytes, uint64_t sequence_id,
                          std::shared_ptr<Mapping> pool, std::shared_ptr<Image>* image);

  uint64_t version() const { return attachment_.header.version; }
  // Complete over all layers, when it was made.
  uint32_t token_count() const { return attachment_.header.token_count; }
  // Rows of one layer, when it was made; 0 for a layer that is not stored.
  uint32_t LayerTokens(uint32_t layer) const;
  // How far rows can come without a newer image.
  uint32_t capacity_tokens() const { return capacity_tokens_; }

  // Of whoever reads the pool beyond the image's life.
  std::shared_ptr<Mapping> shared_pool() const { return pool_; }

  // Slot of an index, kMaxIndexes for flat; PQC_FAILED_PRECONDITION when the sequence has none such.
  pqc_status FindIndex(const kvstore::IndexDescriptor& index, uint32_t* index_slot) const;

  // How far the codes of an index reach without gap in a layer, for whoever waits: all there will be
  // when every segment is READY.
  uint32_t CodedTokens(uint32_t layer, uint32_t index_slot) const;

  // A layer for one reader at a time. Goes back when destroyed; must not outlive the image.
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
  // Errors: PQC_INTERNAL  what lies in the pool does not fit the descriptors
  pqc_status Borrow(uint32_t layer, const kvstore::LayerShape& shape, uint32_t index_slot,
                    Loan* loan);

 private:
  Image(kvstore::Attachment attachment, std::shared_ptr<Mapping> pool);

  const kvstore::Attachment attachment_;
  const std::shared_ptr<Mapping> pool_;  // shared as mappings are
  uint32_t capacity_tokens_ = 0;
  std::mutex mutex_;
  std::map<uint64_t, std::vector<std::unique_ptr<kvstore::MappedLayer>>> idle_;  // by layer, index
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_IMAGE_H_
