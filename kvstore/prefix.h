// Prefixes: which stored tokens the prompt of a new sequence may share.
//
// Tokens are addressed by content, in steps of kPrefixStepTokens: the key of a step is SHA-256 over
// the key of the step before it and the ids of its tokens, and the chain begins with all that makes
// K and V of the same ids differ. So equal keys mean equal rows, for as long as nobody finds two
// inputs of SHA-256 with one output; another tenant, model, layout or extra key begins another
// chain. A step is listed while a sequence that lives holds all its tokens, complete over all stored
// layers, under these ids.
#ifndef PQCACHED_KVSTORE_PREFIX_H_
#define PQCACHED_KVSTORE_PREFIX_H_

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/model.h"
#include "kvstore/mutex.h"
#include "kvstore/names_record.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

inline constexpr uint32_t kPrefixStepTokens = kBlockTokens;
inline constexpr size_t kMaxExtraKeyBytes = 256;
// Tokens that may be named before they are stored: named ids are kept in memory, which stored tokens
// bound by their rows.
inline constexpr uint32_t kMaxNamedAhead = uint32_t{1} << 22;

using PrefixKey = std::array<uint8_t, 32>;

// The key that the chains of a cache begin with.
PrefixKey PrefixRoot(std::string_view tenant, const CacheSpec& spec, std::string_view extra_key);
// REQUIRES: token_ids.size() == kPrefixStepTokens.
PrefixKey NextPrefixKey(const PrefixKey& before, std::span<const uint32_t> token_ids);
// Of a whole prompt, to tell it from others.
PrefixKey PromptDigest(std::span<const uint32_t> token_ids, std::string_view extra_key);

// Errors: kInvalidArgument naming token_ids or extra_key.
absl::Status CheckPrefix(std::span<const uint32_t> token_ids, std::string_view extra_key);

class NamedTokens;

// The steps that the sequences of one cache hold. Thread-safe.
class PrefixIndex {
 public:
  void Add(const PrefixKey& key, const std::shared_ptr<NamedTokens>& holder);
  void Remove(const PrefixKey& key, const NamedTokens* holder);

  // Keys of the longest listed prefix, step by step.
  std::vector<PrefixKey> Match(const PrefixKey& root, std::span<const uint32_t> token_ids) const;
  std::vector<std::shared_ptr<NamedTokens>> Holders(const PrefixKey& key) const;

 private:
  struct KeyHash {
    size_t operator()(const PrefixKey& key) const;
  };
  using Holder = std::pair<const NamedTokens*, std::weak_ptr<NamedTokens>>;

  mutable Mutex mutex_;
  std::unordered_map<PrefixKey, std::vector<Holder>, KeyHash> steps_ ABSL_GUARDED_BY(mutex_);
};

// The ids of one sequence's tokens; lists its steps while they are stored. Thread-safe; its lock is
// taken before those of the index and of the sequence's newest snapshot.
class NamedTokens final : public SequenceWatcher, public std::enable_shared_from_this<NamedTokens> {
 public:
  // `stored_tokens`: that the sequence begins with. `record`: where ids are written down; null: nowhere.
  NamedTokens(std::shared_ptr<PrefixIndex> index, const PrefixKey& root,
              std::weak_ptr<Sequence> sequence, uint32_t stored_tokens,
              std::unique_ptr<NamesRecord> record = nullptr);

  // The names that the record holds; once, before Name.
  void Restore(std::vector<uint32_t> token_ids);

  // Names tokens [first_position, + ids). Errors: as Store::NameTokens.
  absl::Status Name(uint64_t first_position, std::span<const uint32_t> token_ids);

  // What Name would say.
  absl::Status Check(uint64_t first_position, std::span<const uint32_t> token_ids) const;

  struct Shared {
    std::shared_ptr<const Snapshot> snapshot;
    std::vector<uint32_t> token_ids;  // of its first tokens, as far as they are named
  };
  // The first `token_count` tokens, with their names. Errors: as Sequence::Share.
  absl::StatusOr<Shared> Share(uint32_t token_count, bool partial_indexes);
  // The tokens up to the end of step `step`; null when they are no longer stored under this key.
  std::shared_ptr<const Snapshot> ShareStep(size_t step, const PrefixKey& key);

  const PrefixKey& root() const { return root_; }
  // Keys of the steps that are stored under their names.
  std::vector<PrefixKey> ListedKeys() const;
  // Of the tokens of those steps.
  std::vector<uint32_t> ListedIds() const;
  // Whether its first tokens are stored under these ids.
  bool BeginsWith(std::span<const uint32_t> token_ids) const;

  void OnPublish(const Snapshot& next) override;
  bool OnTruncate(uint32_t token_count, uint64_t own_lease) override;
  void OnSuspend(bool) override {}
  void OnDrop() override;

 private:
  // How many of the ids are named already.
  absl::StatusOr<size_t> Known(uint64_t first_position, std::span<const uint32_t> token_ids) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes the keys of steps that are named, and lists what is stored of them.
  void List() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(uint32_t token_count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<PrefixIndex> index_;
  const PrefixKey root_;
  const std::weak_ptr<Sequence> sequence_;

  mutable Mutex mutex_;
  const std::unique_ptr<NamesRecord> record_ ABSL_PT_GUARDED_BY(mutex_);
  std::vector<uint32_t> token_ids_ ABSL_GUARDED_BY(mutex_);
  std::vector<PrefixKey> keys_ ABSL_GUARDED_BY(mutex_);  // of the whole steps of token_ids_
  size_t listed_ ABSL_GUARDED_BY(mutex_) = 0;            // of keys_
  uint32_t stored_ ABSL_GUARDED_BY(mutex_);              // what no roll back has begun to forget
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_PREFIX_H_
