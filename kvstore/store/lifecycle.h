// Lifecycle: creates, forks and ends the sequences of a store.
//
// A sequence begins with the longest stored prefix of its prompt. When it ends, its named tokens
// may remain as a cached prefix (StoreOptions::retain).
//
// Thread-safe. One lock, which serializes the retention of tokens; all other locks may be acquired
// inside it.
#ifndef PQCACHED_KVSTORE_STORE_LIFECYCLE_H_
#define PQCACHED_KVSTORE_STORE_LIFECYCLE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvstore/checksum/checksums.h"
#include "kvstore/evict/evictor.h"
#include "kvstore/index/live_index.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/stored_sequences.h"
#include "kvstore/share/rank_sequences.h"
#include "kvstore/store/cache_memory.h"
#include "kvstore/store/caches.h"
#include "kvstore/store/prefix_sharing.h"

namespace pqcached::kvstore {

class Lifecycle {
 public:
  // The arguments outlive this object.
  struct Parts {
    const StoreOptions& options;
    CacheMemory& memory;  // for new ids
    StoredSequences& sequences;
    RankSequences& ranks;
    PrefixSharing& prefixes;
    const Caches& caches;
    Evictor& evictor;
    IncrementalIndexer& live;
    Checksums* checksums;  // null without a keeper
  };
  explicit Lifecycle(const Parts& parts) : parts_(parts) {}

  // Implements Store::CreateSequence, with its errors.
  absl::StatusOr<CreatedSequence> Create(const std::shared_ptr<const Cache>& cache,
                                         const SequenceSpec& spec);
  // Implements Store::ForkSequence, with its errors.
  absl::StatusOr<CreatedSequence> Fork(const StoredSequence& parent, uint64_t token_count,
                                       std::string_view session);
  // Adds a cached prefix: a sequence without a session. Errors: those of Create.
  absl::StatusOr<CreatedSequence> AddPrefix(const std::shared_ptr<const Cache>& cache,
                                            std::shared_ptr<const Snapshot> snapshot,
                                            const PrefixKey& root, const NameView& names);
  // Drops a sequence and retains the prefix that other sequences may share.
  void End(const StoredSequence& stored);
  // Drops a sequence and retains nothing.
  void Drop(const StoredSequence& stored);

 private:
  struct NewSequence {
    std::string session;
    std::shared_ptr<const Snapshot> first;  // null: it starts empty
    PrefixKey root;
    NameView names = {};
    std::optional<LiveIndex> live_index = {};
    std::string group_key = {};
    Retention retention = Retention::kByOption;
  };

  // Creates a sequence with a group_key.
  absl::StatusOr<CreatedSequence> CreateGroupMember(const std::shared_ptr<const Cache>& cache,
                                                    const SequenceSpec& spec);
  // Adds a new sequence. Errors: kResourceExhausted (max_sequences), and those of
  // NamedTokens::Name.
  absl::StatusOr<CreatedSequence> Add(std::shared_ptr<const Cache> cache, NewSequence made);
  // Makes the objects of a new sequence, and its records if there is a keeper.
  absl::StatusOr<StoredSequence> Make(std::shared_ptr<const Cache> cache, uint64_t sequence_id,
                                      NewSequence made);
  // Starts the incremental index of a new sequence; drops the sequence if that fails.
  absl::StatusOr<CreatedSequence> StartLiveIndex(absl::StatusOr<CreatedSequence> created,
                                                 const std::optional<LiveIndex>& live_index);
  void Retain(const StoredSequence& stored);
  // Shares the tokens of the sequence that can be retained, those of the steps with these keys. A
  // last segment that was open and is at most three quarters full is replaced by a copy without the
  // unused slots, if there is memory for it. Errors: kNotFound  there are none.
  static absl::StatusOr<NamedTokens::Shared> ShareRetainable(const StoredSequence& stored,
                                                             std::span<const PrefixKey> keys);
  // Returns whether another sequence holds the steps with these keys, which `kept` shares, with all
  // the indexes of `kept`.
  static bool IsHeldElsewhere(const StoredSequence& stored, std::span<const PrefixKey> keys,
                              const Snapshot& kept);
  // Drops retained sequences whose tokens are a beginning of those of `retained`, but for those of
  // the same tokens with another index.
  void DropRedundant(const StoredSequence& retained, std::span<const PrefixKey> keys);

  const Parts parts_;
  Mutex retain_mutex_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_LIFECYCLE_H_
