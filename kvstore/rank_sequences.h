// RankSequences: which sequences of the ranks of a group are one sequence of that group.
//
// Ranks that give the same *group key* make *members* of one sequence, one in each rank's cache. What prefix
// all of them begin with is settled once, by the first rank that comes, and held for each rank until it has
// come, so that nothing that becomes of other sequences changes it. When no member lives any more, all
// that is known and held under the key goes, and the key may be used again.
//
// A *seat* is taken by a rank while its member is being made: until it is left, no member is evicted.
//
// Thread-safe. One lock, held for a look at the members; no other is taken inside but those of the memory
// that comes free.
#ifndef PQCACHED_KVSTORE_RANK_SEQUENCES_H_
#define PQCACHED_KVSTORE_RANK_SEQUENCES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/cache.h"
#include "kvstore/mutex.h"
#include "kvstore/prefix.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

// What each rank shares of one prompt, the same number of tokens; by rank. None: nothing is shared.
using RankPrefixes = std::map<uint32_t, std::shared_ptr<const Snapshot>>;

// Errors: kInvalidArgument naming group_key.
absl::Status CheckGroupKey(const Cache& cache, std::string_view group_key);

class RankSequences {
 public:
  class Seat;

  // Takes the seat of the cache's rank under the key, for a prompt that begins with what `settle` says; it
  // is asked, without a lock, when the key is not in use.
  //
  // Errors: kAlreadyExists       the rank has, or had, a member, and not all have ended
  //         kFailedPrecondition  another prompt than the first rank's; or the members were recovered, and
  //                              nothing is held
  // REQUIRES: CheckGroupKey.
  absl::StatusOr<Seat> Take(const Cache& cache, const std::string& group_key,
                            const PrefixKey& prompt, const std::function<RankPrefixes()>& settle);
  // A member that an earlier process made.
  void Restore(const Cache& cache, const std::shared_ptr<Sequence>& sequence);
  // Looks whether another member lives, after this one was dropped. Any sequence may come.
  void Ended(const Cache& cache, const Sequence& sequence);

  struct Members {
    std::vector<std::shared_ptr<Sequence>> alive;
    bool joining = false;  // whether a seat is taken
  };
  // Those that are one with the sequence, itself too, first; of one that is not tied, itself.
  Members MembersOf(const Cache& cache, const std::shared_ptr<Sequence>& sequence) const;

  // Claims all members (Holds), or none; the key may then be used again. Errors: kFailedPrecondition
  // naming the member that is held.
  absl::StatusOr<std::vector<std::shared_ptr<Sequence>>> Claim(
      const Cache& cache, const std::shared_ptr<Sequence>& sequence);

 private:
  struct Name {
    std::string tenant, cache, group, key;
    friend bool operator<(const Name& a, const Name& b) {
      return std::tie(a.tenant, a.cache, a.group, a.key) <
             std::tie(b.tenant, b.cache, b.group, b.key);
    }
  };
  struct Member {
    uint32_t rank = 0;
    uint64_t sequence_id = 0;
    std::weak_ptr<Sequence> sequence;
  };
  struct Entry {
    bool recovered = false;       // then prompt and held are not known
    PrefixKey prompt = {};        // of the first rank
    RankPrefixes held;            // of ranks that have no member yet
    std::vector<Member> members;  // also those that have ended
    std::set<uint32_t> seated;

    bool Lives() const;
  };
  using Entries = std::map<Name, Entry>;

  static Name NameOf(const Cache& cache, const std::string& group_key);
  static absl::Status CheckFree(const Entry& entry, uint32_t rank, const PrefixKey& prompt);
  // `settled`: what a key that is not in use begins with; null: then kNotFound. Errors: as Take.
  absl::StatusOr<Seat> Sit(const Name& name, uint32_t rank, const PrefixKey& prompt,
                           RankPrefixes* settled);
  void Leave(const Name& name, uint32_t rank, const std::shared_ptr<Sequence>& member);
  // Takes the entry out when it is no longer in use: it dies behind the lock.
  Entry TakeUnused(Entries::iterator entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Members MembersUnder(const Name& name, const std::shared_ptr<Sequence>& sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  Entries entries_ ABSL_GUARDED_BY(mutex_);
};

// Left at its end: for the member that was made, or for another try. Single-thread.
class RankSequences::Seat {
 public:
  Seat(Seat&& other) noexcept
      : owner_(std::exchange(other.owner_, nullptr)),
        name_(std::move(other.name_)),
        rank_(other.rank_),
        first_(std::move(other.first_)),
        member_(std::move(other.member_)) {}
  Seat& operator=(Seat&&) = delete;
  ~Seat() {
    if (owner_ != nullptr) owner_->Leave(name_, rank_, member_);
  }

  // What the member begins with; null: with nothing.
  const std::shared_ptr<const Snapshot>& first() const { return first_; }
  // This is the member.
  void Join(std::shared_ptr<Sequence> sequence) { member_ = std::move(sequence); }

 private:
  friend class RankSequences;
  Seat(RankSequences* owner, Name name, uint32_t rank, std::shared_ptr<const Snapshot> first)
      : owner_(owner), name_(std::move(name)), rank_(rank), first_(std::move(first)) {}

  RankSequences* owner_;  // null when moved from
  Name name_;
  uint32_t rank_;
  std::shared_ptr<const Snapshot> first_;
  std::shared_ptr<Sequence> member_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_RANK_SEQUENCES_H_
