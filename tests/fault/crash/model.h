// The plain model of what the next process must find. It lies in memory that all processes of a test share, and is
// written before a call (`pending`) and after it, so that the next process can distinguish what was acknowledged from
// what may have happened.
#ifndef PQCACHED_TESTS_FAULT_CRASH_MODEL_H_
#define PQCACHED_TESTS_FAULT_CRASH_MODEL_H_

#include <array>
#include <atomic>
#include <cstdint>

#include "kvstore/read/layout.h"

namespace pqcached::kvstore::testing {

inline constexpr uint32_t kMaxEngines = 3;
inline constexpr uint32_t kEngineSequences = 4;
inline constexpr uint32_t kEngineViews = 2;
inline constexpr uint32_t kMaxTokens = 1100;  // of a sequence

enum class Operation : uint32_t {
  kNone,
  kCreate,
  kCreateRanks,  // the sequences of two ranks under one key
  kFork,
  kDrop,
  kAppend,
  kIngest,  // rows that are not visible yet
  kCommit,  // of an ingest
  kTruncate,
  kBuild,
  kIdle,  // until the store has merged and coded what was closed
  kName,
  kSuspend,
  kResume,
  kPin,
  kEvict,
  kEvictRetained,
  kAttach,  // a client maps a sequence
  kDetach,
  kEndQuarantine,
  kPlanMove,  // the next process moves the pools to new memory
  kTakeOver,  // the process leaves everything to the next one
  kCount,
};
const char* NameOf(Operation operation);

// A sequence that the engine has, with everything that was acknowledged of it.
struct SequenceModel {
  std::atomic<uint64_t> id = 0;  // 0: none
  std::atomic<uint32_t> count = 0;
  std::atomic<uint32_t> index_count = 0;  // indexes that BuildIndex has acknowledged
  std::atomic<uint32_t> named = 0;        // token ids
  std::atomic<uint32_t> rank = 0;         // the cache: 0, or 1 of the second rank
  std::atomic<uint32_t> group = 0;        // number of the group key; 0: none
  std::atomic<bool> is_live = false;
  std::atomic<bool> suspended = false;
  std::atomic<bool> pinned = false;
  std::array<uint64_t, kMaxTokens> content = {};
  std::array<uint32_t, kMaxTokens> token_ids = {};
};

// Names of a sequence that has ended. The store may have retained its tokens, which are found by these names.
struct Ghost {
  std::atomic<uint32_t> named = 0;  // 0: none
  std::array<uint64_t, kMaxTokens> content = {};
  std::array<uint32_t, kMaxTokens> token_ids = {};
};

// What a client has mapped. The bytes stay as they are until the client detaches, or the store ends the quarantine. Only
// the rows of an active segment, which a forked sequence may share, may be written again once the worker has died: the
// client then refuses its results by the boot word.
struct ViewModel {
  static constexpr size_t kMaxPieces = 160;
  struct Piece {
    uint64_t offset_bytes = 0;
    uint64_t size_bytes = 0;
    uint32_t crc = 0;
    bool is_active = false;  // rows of a segment that is an active one, or may be
  };
  std::atomic<uint32_t> process = 0;  // number of the process that served it; 0: no view
  uint64_t lease_id = 0;
  uint32_t rank = 0;
  uint32_t piece_count = 0;
  std::array<Piece, kMaxPieces> pieces = {};

  // No effect when the view has kMaxPieces.
  void Add(const Piece& piece) {
    if (piece_count < kMaxPieces) pieces[piece_count++] = piece;
  }
};

// One engine: a thread with sequences of its own.
struct EngineModel {
  std::array<SequenceModel, kEngineSequences> sequences;
  std::array<Ghost, 2> ghosts;
  std::array<ViewModel, kEngineViews> views;
  std::atomic<Operation> pending = Operation::kNone;
  std::atomic<uint32_t> pending_sequence = 0;
  std::atomic<uint32_t> pending_count = 0;     // of tokens, or names, once it has happened
  std::atomic<uint32_t> may_have_created = 0;  // sequences whose creation was not acknowledged
  std::atomic<bool> creates_live = false;      // they have an incremental index
};

struct WorldModel {
  std::array<EngineModel, kMaxEngines> engines;
  std::atomic<uint64_t> seed = 0;
  std::atomic<uint32_t> process = 0;     // number of the process that lives
  std::atomic<uint64_t> highest_id = 0;  // of all sequences that were created
  std::atomic<uint32_t> group_keys = 0;  // that were used
  std::atomic<uint64_t> stores = 0;      // crash points that the process has reached
  // Bytes in use when the process had nothing left to do; ~0: it still had.
  std::atomic<uint64_t> idle_used_bytes = ~uint64_t{0};
  // Counted over all processes.
  std::atomic<uint64_t> recoveries = 0, operations = 0, checked_rows = 0, checked_codes = 0,
                        checked_views = 0;
  std::atomic<uint64_t> lost_bytes = 0, wrong_rows = 0, leaked_extents = 0, faults = 0;
  std::array<std::atomic<uint64_t>, static_cast<size_t>(Operation::kCount)> hits =
      {};  // kills during each

  EngineModel& engine(uint32_t i) { return engines[i]; }
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_FAULT_CRASH_MODEL_H_
