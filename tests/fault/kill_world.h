// KillWorld: random work on a store by a process that may be killed at any instant, and the plain model
// that says what the next process must find.
//
// The model stands in memory that is shared with the parent. Before each call it says what is about to
// happen (`pending`), afterwards that it has; so the next process knows what was acknowledged, and what may
// have happened or not. Sequences that have ended are retained until they give way to others: what is found
// of them must be theirs.
#ifndef PQCACHED_TESTS_FAULT_KILL_WORLD_H_
#define PQCACHED_TESTS_FAULT_KILL_WORLD_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "tests/fault/shared_keeper.h"
#include "tests/kvstore/content.h"

namespace pqcached::kvstore::testing {

inline constexpr uint32_t kWorldTokens = 1500;  // of a sequence, at most
inline constexpr uint32_t kWorldSequences = 12;

// What a sequence is known to hold. Everything but content behind `count` was acknowledged.
struct SequenceModel {
  std::atomic<uint64_t> id = 0;  // 0: none
  std::atomic<uint32_t> count = 0;
  std::atomic<uint32_t> index_count = 0;  // that BuildIndex has acknowledged
  std::atomic<uint32_t> named = 0;        // token ids
  std::atomic<bool> is_live = false;
  std::atomic<bool> suspended = false;
  std::array<uint64_t, kWorldTokens> content = {};
  std::array<uint32_t, kWorldTokens> token_ids = {};
};

// The name of a sequence that has ended; what is retained of it is found by it again.
struct Ghost {
  std::atomic<uint32_t> named = 0;  // 0: none
  std::array<uint64_t, kWorldTokens> content = {};
  std::array<uint32_t, kWorldTokens> token_ids = {};
};

enum class Operation : uint32_t {
  kNone,
  kCreate,
  kFork,
  kDrop,
  kAppend,
  kClose,     // an append that closes a tail
  kIngest,    // rows on their way, not to be seen yet
  kMakeRoom,  // as kIngest, for which retained sequences have to give way
  kCommit,
  kTruncate,
  kBuild,
  kMerge,  // while the store codes closed tails and merges them
  kName,
  kSuspend,
  kEvict,
  kRecover,  // of a store that begins
  kCount,
};
inline constexpr auto kOperations = static_cast<size_t>(Operation::kCount);
const char* NameOf(Operation operation);

// What a process does.
enum class Phase : uint32_t { kRecovering, kChecking, kWorking };

// A kill that the process brings upon itself: a timer is set when it begins the operation.
struct Target {
  std::atomic<Operation> operation = Operation::kNone;  // kNone: none, the parent kills
  std::atomic<uint32_t> countdown = 0;                  // which one of its kind
  std::atomic<uint32_t> after_permille = 0;             // of the time that the last one took
};

// Of all processes, by the one that lives.
struct WorldState {
  std::array<SequenceModel, kWorldSequences> sequences;
  std::array<Ghost, 4> ghosts;
  std::atomic<Operation> pending = Operation::kNone;
  std::atomic<uint32_t> pending_sequence = 0;
  std::atomic<uint32_t> pending_count = 0;  // of tokens (or names), when it succeeds
  std::atomic<uint64_t> seed = 0;
  // Counted over all processes.
  std::atomic<uint64_t> recoveries = 0, operations = 0, checked_rows = 0;
  std::atomic<uint64_t> lost_bytes = 0, wrong_rows = 0, leaked_extents = 0, other_faults = 0;
  std::atomic<uint64_t> merges = 0, evictions = 0, found_again = 0;
  std::atomic<Phase> phase = Phase::kRecovering;
  Target target;
  std::array<std::atomic<int64_t>, kOperations> nanoseconds = {};  // of the last one of each kind
  std::atomic<double> recovery_seconds = 0, recovered_bytes = 0;
};

// In a child: recovers, checks, and works until it is killed.
class KillWorld {
 public:
  KillWorld(WorldState& state, SharedKeeper& keeper);

  // Recovers the store and compares all of it with the model.
  void Begin();
  void Step();
  // Drops everything; what the pool then still holds has leaked.
  void DropAll();

 private:
  SequenceModel& PickAny() { return state_.sequences[Random(kWorldSequences)]; }
  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(random_() % below); }
  void Fault(const char* what, const absl::Status& status = absl::OkStatus());
  void Announce(Operation operation, const SequenceModel& sequence, uint32_t count);
  void Done();
  // `operation` begins: sets the timer when it is the one to be hit.
  void Arm(Operation operation);

  void Settle(const std::vector<SequenceInfo>& found);
  void SettleOne(SequenceModel& sequence, const SequenceInfo* info);
  void Check(SequenceModel& sequence, const SequenceInfo* info);
  void CheckRows(SequenceModel& sequence);
  void CheckIndexes(SequenceModel& sequence);
  void CheckNames(SequenceModel& sequence);

  void Create(SequenceModel& sequence);
  // Of the names of a sequence that has ended; returns how many of them.
  uint32_t TakeNames(SequenceModel& sequence);
  void Remember(const SequenceModel& sequence);
  void Fork(SequenceModel& sequence);
  void Drop(SequenceModel& sequence);
  void Grow(SequenceModel& sequence);
  void Append(SequenceModel& sequence, uint32_t end);
  void Ingest(SequenceModel& sequence, uint32_t end, bool commits);
  void Grown(SequenceModel& sequence, uint32_t end, const absl::StatusOr<uint64_t>& count);
  void Truncate(SequenceModel& sequence);
  void Build(SequenceModel& sequence);
  absl::Status Build(const SequenceModel& sequence, uint32_t ordinal);
  void Merge(SequenceModel& sequence);
  void Name(SequenceModel& sequence);
  void Suspend(SequenceModel& sequence);
  void Evict(SequenceModel& sequence);
  void EvictRetained();

  WorldState& state_;
  SharedKeeper& keeper_;
  std::mt19937_64 random_;
  CacheSpec spec_;
  std::unique_ptr<Store> store_;
  uint64_t cache_id_ = 0;
  int64_t began_ = 0;  // nanoseconds
  uint64_t evictions_ = 0;
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_FAULT_KILL_WORLD_H_
