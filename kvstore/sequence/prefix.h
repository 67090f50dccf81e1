// Prefixes: finds the stored tokens that the prompt of a new sequence can share.
//
// Tokens are addressed by content, in steps of kPrefixStepTokens. The key of a step is the SHA-256
// of the previous step's key and of the names of its tokens: their ids, or one content key. The
// root of the chain covers everything that changes K and V of the same names: another tenant,
// model, layout or extra key starts another chain. Equal keys therefore mean equal rows (unless
// SHA-256 collides, or an engine gives one content key to different tokens). A step is listed while
// a live sequence holds all its tokens, complete over all stored layers, under these names.
#ifndef PQCACHED_KVSTORE_SEQUENCE_PREFIX_H_
#define PQCACHED_KVSTORE_SEQUENCE_PREFIX_H_

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/cache_events.h"
#include "kvstore/model.h"
#include "kvstore/mutex.h"
#include "kvstore/records/names_record.h"
#include "kvstore/sequence/prefix_events.h"
#include "kvstore/sequence/sequence.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

inline constexpr uint32_t kPrefixStepTokens = kBlockTokens;
inline constexpr size_t kMaxExtraKeyBytes = 256;
inline constexpr size_t kContentKeyWords = std::tuple_size_v<ContentKey>;
// Number of tokens that may be named before they are stored. Names are kept in memory; for stored
// tokens their number is bounded by the memory of the rows, so names ahead of them need a limit of
// their own.
inline constexpr uint32_t kMaxNamedAhead = uint32_t{1} << 22;

// Returns the number of words that name one step.
constexpr size_t StepWords(NameKind kind) {
  return kind == NameKind::kTokenIds ? kPrefixStepTokens : kContentKeyWords;
}
// Returns the number of words that name `tokens` tokens; for content keys, those of whole steps.
constexpr size_t WordsOf(NameKind kind, size_t tokens) {
  return kind == NameKind::kTokenIds ? tokens : tokens / kPrefixStepTokens * kContentKeyWords;
}

// Names as words: one per token id, or those of the content keys.
struct NameView {
  NameKind kind = NameKind::kTokenIds;
  std::span<const uint32_t> words = {};

  NameView() = default;
  NameView(const NameWords& names)  // NOLINT: a view of the same names
      : kind(names.kind), words(names.words) {}
  NameView(NameKind of_kind, std::span<const uint32_t> of_words) : kind(of_kind), words(of_words) {}
  // REQUIRES: only one kind of names is given.
  explicit NameView(const TokenNames& names);
  // The names of a prompt. REQUIRES: CheckPrefix.
  explicit NameView(const SequenceSpec& spec) : NameView(spec.names()) {}

  // Returns the number of tokens that are named.
  size_t token_count() const {
    return kind == NameKind::kTokenIds ? words.size()
                                       : words.size() / kContentKeyWords * kPrefixStepTokens;
  }
};

// Returns the root key of a cache's chains.
PrefixKey PrefixRoot(std::string_view tenant, const CacheSpec& spec, std::string_view extra_key);
// Returns a key of a tenant's name, which does not show it.
PrefixKey TenantKey(std::string_view tenant);
// Returns the key of the step that follows `before`. REQUIRES: `step` has the words of one step.
PrefixKey NextPrefixKey(const PrefixKey& before, std::span<const uint32_t> step);
// Returns the root, and then the key of each whole step of the names.
std::vector<PrefixKey> ChainOf(const PrefixKey& root, const NameView& names);
// Returns the key of the last step of a chain that ends at `position` or before it, or its root.
PrefixKey StepKeyAt(std::span<const PrefixKey> chain, uint32_t position);
// Returns a digest that identifies a whole prompt.
PrefixKey PromptDigest(const NameView& names, std::string_view extra_key);

// Checks that only one kind of names is given. Errors: kInvalidArgument naming content_keys.
absl::Status CheckOneKind(const TokenNames& names);
// Checks the lengths, and that only one kind of names is given. Errors: kInvalidArgument naming
// token_ids, content_keys or extra_key.
absl::Status CheckPrefix(const TokenNames& names, std::string_view extra_key);

class NamedTokens;

// Maps step keys to the sequences of one cache that hold these steps. A step is listed while it has
// a holder; readers follow the changes by events. Thread-safe.
class PrefixIndex {
 public:
  void Add(const PrefixStep& step, const std::shared_ptr<NamedTokens>& holder);
  void Remove(const PrefixKey& key, const NamedTokens* holder);

  // Returns the keys of the longest listed prefix, one per step.
  std::vector<PrefixKey> Match(const PrefixKey& root, const NameView& names) const;
  std::vector<std::shared_ptr<NamedTokens>> Holders(const PrefixKey& key) const;

  // Returns whether there are events after `position`.
  bool HasEvents(const EventPosition& position) const;
  // Returns at most `most` events after `position`, and moves it behind them. The first call makes
  // the log, of `log_events` events. REQUIRES: both are at least 1.
  std::vector<CacheEvent> ReadEvents(EventPosition& position, size_t most, size_t log_events);

 private:
  struct KeyHash {
    size_t operator()(const PrefixKey& key) const;
  };
  using Holder = std::pair<const NamedTokens*, std::weak_ptr<NamedTokens>>;
  struct Step {
    uint64_t stored_number = 0;  // of its kStored event; 0: not recorded yet
    std::vector<Holder> holders;
  };

  mutable Mutex mutex_;
  std::unordered_map<PrefixKey, Step, KeyHash> steps_ ABSL_GUARDED_BY(mutex_);
  PrefixEvents events_ ABSL_GUARDED_BY(mutex_);
};

// End of a prompt whose tokens have names: between `least` and `most`, because content keys name
// whole steps and the last tokens of the prompt may have none. 0: without names.
struct AnnouncedEnd {
  uint32_t least = 0;
  uint32_t most = 0;
};

// Names of the tokens of one sequence. Lists its steps in the index while they are stored.
// Thread-safe. Its
// lock is acquired before those of the index and of the sequence's newest snapshot.
class NamedTokens final : public SequenceWatcher, public std::enable_shared_from_this<NamedTokens> {
 public:
  // `stored_tokens`: tokens that the sequence starts with. `record`: where names are recorded;
  // null: they are not recorded.
  NamedTokens(std::shared_ptr<PrefixIndex> index, const PrefixKey& root,
              std::weak_ptr<Sequence> sequence, uint32_t stored_tokens,
              std::unique_ptr<NamesRecord> record = nullptr);

  // Sets the names that the record holds; called at most once, before Name.
  void Restore(NameWords names);

  // Names tokens from first_position on. Errors: as Store::NameTokens.
  absl::Status Name(uint64_t first_position, const NameView& names);

  // Returns the status that Name would return, without naming tokens.
  absl::Status Check(uint64_t first_position, const NameView& names) const;

  struct Shared {
    std::shared_ptr<const Snapshot> snapshot;
    NameWords names;  // of the first tokens, as far as they are named
  };
  // Shares the first `token_count` tokens, with their names. Errors: as Sequence::Share.
  absl::StatusOr<Shared> Share(uint32_t token_count, bool partial_indexes);
  // Shares the tokens up to the end of step `step`; returns null if they are no longer stored under
  // this key.
  std::shared_ptr<const Snapshot> ShareStep(size_t step, const PrefixKey& key);

  const PrefixKey& root() const { return root_; }
  // Returns where the tokens that are named, stored or not, end.
  AnnouncedEnd named_end() const;
  // Returns the keys of the listed steps.
  std::vector<PrefixKey> ListedKeys() const;
  // Returns the names of the listed steps.
  NameWords ListedNames() const;
  // Returns whether the sequence's first tokens are stored under these names.
  bool BeginsWith(const NameView& names) const;

  void OnPublish(const Snapshot& next) override;
  bool OnTruncate(uint32_t token_count, uint64_t own_lease) override;
  void OnSuspend(bool) override {}
  void OnDrop() override;

 private:
  // Returns how many of the words the sequence has already.
  absl::StatusOr<size_t> Known(uint64_t first_position, const NameView& names) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  NameWords FirstNames(size_t word_count) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Computes the keys of completely named steps, and lists the steps that are stored.
  void ListStoredSteps() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TruncateTo(uint32_t token_count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<PrefixIndex> index_;
  const PrefixKey root_;
  const std::weak_ptr<Sequence> sequence_;

  mutable Mutex mutex_;
  const std::unique_ptr<NamesRecord> record_ ABSL_PT_GUARDED_BY(mutex_);
  NameWords names_ ABSL_GUARDED_BY(mutex_);
  std::vector<PrefixKey> keys_ ABSL_GUARDED_BY(mutex_);  // one per complete step of names_
  size_t listed_steps_ ABSL_GUARDED_BY(mutex_) =
      0;                                     // the first listed_steps_ of keys_ are in the index
  uint32_t stored_ ABSL_GUARDED_BY(mutex_);  // tokens that are stored and not being truncated
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_PREFIX_H_
