// PrefixSharing: finds the longest stored prefix of a prompt, and shares it. Ranks of a group share
// as many tokens as all of them hold.
//
// Thread-safe, without locks of its own.
#ifndef PQCACHED_KVSTORE_STORE_PREFIX_SHARING_H_
#define PQCACHED_KVSTORE_STORE_PREFIX_SHARING_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/prefix.h"
#include "kvstore/sequence/sequence.h"
#include "kvstore/share/rank_sequences.h"
#include "kvstore/store/caches.h"

namespace pqcached::kvstore {

class PrefixSharing {
 public:
  // `caches` outlives this object.
  explicit PrefixSharing(const Caches& caches) : caches_(caches) {}

  struct Prefix {
    PrefixKey root;
    std::shared_ptr<const Snapshot> snapshot;  // null: nothing is shared
  };
  // Shares the longest stored prefix of a prompt.
  Prefix Share(const std::shared_ptr<const Cache>& cache, const NameView& names,
               std::string_view extra_key) const;
  // Returns, for each rank, a share of the longest prefix of the prompt that all ranks hold; the
  // number of tokens is the same in all of them.
  RankPrefixes ShareInAllRanks(const std::shared_ptr<const Cache>& cache, const NameView& names,
                               std::string_view extra_key) const;
  // Returns the number of the prompt's tokens that every rank of the cache's group holds.
  uint32_t Match(const std::shared_ptr<const Cache>& cache, const NameView& names,
                 std::string_view extra_key) const;

  // Updates the statistics of prompt and matched tokens for a new sequence.
  void Count(const Cache& cache, const SequenceSpec& spec, const Snapshot* found);
  uint64_t prompt_tokens() const { return prompt_tokens_.load(); }
  uint64_t matched_tokens() const { return matched_tokens_.load(); }

 private:
  const Caches& caches_;
  std::atomic<uint64_t> prompt_tokens_ = 0;
  std::atomic<uint64_t> matched_tokens_ = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_PREFIX_SHARING_H_
