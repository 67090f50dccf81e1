// CrashWorld: the store of one process of a crash test. It recovers the store, and compares all of it with the model:
// token counts, bytes, indexes, names, what clients map, and the memory in use.
//
// Single-thread; the store serves engines (engine.h) on other threads.
#ifndef PQCACHED_TESTS_FAULT_CRASH_WORLD_H_
#define PQCACHED_TESTS_FAULT_CRASH_WORLD_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "kvstore/memory/memfd.h"
#include "kvstore/read/attachment.h"
#include "tests/fault/crash/model.h"
#include "tests/kvstore/content.h"

namespace pqcached::kvstore {
class DescriptorKeeper;
}

namespace pqcached::kvstore::testing {

struct WorldSpec {
  uint32_t engines = 1;
  bool ranks = false;  // a second cache, of a second rank
  bool strict = false;
  size_t capacity_bytes = size_t{3} << 20;
  uint32_t tail_tokens = 128;
};

inline constexpr IndexDescriptor kWorldIndexes[] = {
    {.kind = IndexKind::kPq, .subspace_count = 2, .bits = 4},
    {.kind = IndexKind::kPq, .subspace_count = 1, .bits = 6}};

class CrashWorld {
 public:
  // `machine`: a directory for the file from which the store reads how much memory the machine has left.
  CrashWorld(WorldModel& model, DescriptorKeeper& keeper, std::string machine,
             const WorldSpec& spec);

  // Recovers the store that earlier processes left, and opens the caches. `may_be_short`: at random, the machine has no
  // memory left while the store recovers.
  void Recover(bool may_be_short);
  // Compares everything with the model.
  void Check();
  // Compares only the sequences.
  void CheckSequences();
  // Ends the store, and leaves everything to the next process.
  void Leave();
  // Waits until the store has no work left, and records the bytes in use for the next process.
  void GoIdle();
  // Drops everything; memory that is then in use and not in quarantine has leaked.
  void DropAll();

  Store& store() { return *store_; }
  WorldModel& model() { return model_; }
  const WorldSpec& spec() const { return spec_; }
  uint64_t cache_id(uint32_t rank) const { return cache_ids_[rank]; }
  const LayerGroup& group(uint32_t rank) const { return groups_[rank]; }
  std::span<const std::byte> pool(uint32_t rank) const {
    return {pools_[rank].data(), pools_[rank].size_bytes()};
  }
  static std::string SessionOf(uint32_t engine) { return "engine-" + std::to_string(engine); }
  // Counts a fault, and prints it.
  void Fault(const std::string& what, const absl::Status& status = absl::OkStatus());
  // Notes the id of a sequence that was created, which no earlier process may have used.
  void NoteId(uint64_t sequence_id);
  // Leases the sequence, and fills `view` with the bytes that its attachment names.
  absl::Status TakeView(const SequenceModel& sequence, const std::string& session, ViewModel& view);
  // Builds an index; one that exists is as good.
  absl::Status Build(const SequenceModel& sequence, uint32_t ordinal, bool rebuild = false);

 private:
  using Found = std::map<uint64_t, SequenceInfo>;

  StoreOptions Options() const;
  // Sets what the machine has left.
  void SetAvailable(size_t bytes);
  CacheSpec SpecOf(uint32_t rank) const;
  void OpenCaches();
  Found AllSequences();
  absl::StatusOr<Attachment> Attach(uint64_t sequence_id, uint32_t rank, const std::string& session,
                                    uint64_t& lease_id);
  // Returns the first unit of the rows of each layer of the session's active segments; nothing when a sequence is
  // suspended, whose segments are not known.
  std::optional<std::set<uint32_t>> ActiveUnits(uint32_t rank, const std::string& session);
  void CheckMemory(const Found& found);
  void Settle(EngineModel& engine, const Found& found);
  void SettleOne(Operation pending, uint32_t count, SequenceModel& sequence,
                 const SequenceInfo* info);
  void DropUnknown(const Found& found);
  void CheckSequence(SequenceModel& sequence, const SequenceInfo* info);
  void CheckRows(const SequenceModel& sequence);
  void CheckIndexes(const SequenceModel& sequence);
  void CheckNames(const SequenceModel& sequence);
  void CheckViews();
  bool any_live() const;
  size_t UsedBytes();

  WorldModel& model_;
  DescriptorKeeper& keeper_;
  const std::string machine_;
  const WorldSpec spec_;
  std::mt19937_64 random_;
  uint64_t ids_of_earlier_processes_ = 0;  // the highest
  std::unique_ptr<Store> store_;
  std::vector<uint64_t> cache_ids_;  // by rank
  std::vector<LayerGroup> groups_;   // by rank
  std::vector<Mapping> pools_;       // by rank, read-only
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_FAULT_CRASH_WORLD_H_
