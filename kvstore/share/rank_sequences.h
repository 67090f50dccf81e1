// RankSequences: tracks which sequences of a group's ranks form one sequence of the group.
//
// Sequences that ranks create under the same *group key* are *members* of one sequence, one in each
// rank's cache. The prefix that all of them start with is settled once, by the first rank that
// calls. It is held for each rank until that rank's member exists, so that later changes to other
// sequences do not affect it. When no member is alive any more, the entry of the key and all that
// it holds are freed, and the key can be used again.
//
// A rank takes a *seat* while its member is being created; no member is evicted while a seat is
// taken.
//
// Thread-safe. One lock, held while members are looked up; inside it, only the locks that freeing
// memory needs are acquired.
#ifndef PQCACHED_KVSTORE_SHARE_RANK_SEQUENCES_H_
#define PQCACHED_KVSTORE_SHARE_RANK_SEQUENCES_H_

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
#include "kvstore/mutex.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/prefix.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// Shared prefix of one prompt by rank, with the same number of tokens in each. Empty: nothing is
// shared.
using RankPrefixes = std::map<uint32_t, std::shared_ptr<const Snapshot>>;

// Checks the length, and that the cache belongs to a group. Errors: kInvalidArgument naming
// group_key.
absl::Status CheckGroupKey(const Cache& cache, std::string_view group_key);

class RankSequences {
 public:
  class Seat;

  // Takes the seat of the cache's rank under the key. If the key is not in use, calls `settle`,
  // without holding a lock, for the prefixes that the members start with.
  //
  // Errors: kAlreadyExists       the rank has, or had, a member, and not all members have ended
  //         kFailedPrecondition  the prompt is not the first rank's; or the members were recovered,
  //                              and their prefixes are no longer held
  // REQUIRES: CheckGroupKey.
  absl::StatusOr<Seat> AcquireSeat(const Cache& cache, const std::string& group_key,
                                   const PrefixKey& prompt,
                                   const std::function<RankPrefixes()>& settle);
  // Adds a member that an earlier process created.
  void Restore(const Cache& cache, const std::shared_ptr<Sequence>& sequence);
  // Removes the key's entry if no member is alive any more; called after `sequence` was dropped.
  // Accepts sequences without a group key, too.
  void Ended(const Cache& cache, const Sequence& sequence);

  struct Members {
    std::vector<std::shared_ptr<Sequence>> alive;
    bool joining = false;  // a seat is taken
  };
  // Returns the live members of the sequence's group, the sequence itself first; for a sequence
  // without a group key, only the sequence itself.
  Members MembersOf(const Cache& cache, const std::shared_ptr<Sequence>& sequence) const;

  // Claims all members for eviction (Holds), or none; the key can then be used again. Errors:
  // kFailedPrecondition naming the member that is in use.
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
    bool recovered = false;       // prompt and held are unknown
    PrefixKey prompt = {};        // the first rank's
    RankPrefixes held;            // for ranks without a member yet
    std::vector<Member> members;  // includes members that have ended
    std::set<uint32_t> ranks_joining;

    bool HasLiveMember() const;
  };
  using Entries = std::map<Name, Entry>;

  static Name NameOf(const Cache& cache, const std::string& group_key);
  static absl::Status CheckFree(const Entry& entry, uint32_t rank, const PrefixKey& prompt);
  // Takes the seat. `settled`: the prefixes for a key that is not in use; null: kNotFound in that
  // case. Other errors: as AcquireSeat.
  absl::StatusOr<Seat> TakeSeat(const Name& name, uint32_t rank, const PrefixKey& prompt,
                                RankPrefixes* settled);
  void LeaveSeat(const Name& name, uint32_t rank, const std::shared_ptr<Sequence>& member);
  // Removes and returns the entry if it is no longer in use, so that the caller destroys it after
  // releasing the lock.
  Entry ExtractIfUnused(Entries::iterator entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Members FindMembers(const Name& name, const std::shared_ptr<Sequence>& sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  Entries entries_ ABSL_GUARDED_BY(mutex_);
};

// Seat of one rank; its destructor leaves the seat and registers the member, if there is one.
// Single-thread.
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
    if (owner_ != nullptr) owner_->LeaveSeat(name_, rank_, member_);
  }

  // Returns the prefix that the member starts with; null: none.
  const std::shared_ptr<const Snapshot>& first() const { return first_; }
  // Sets the member to register.
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

#endif  // PQCACHED_KVSTORE_SHARE_RANK_SEQUENCES_H_
