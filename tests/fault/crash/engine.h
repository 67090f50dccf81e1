// CrashEngine: an engine that performs steps on its own sequences of a CrashWorld, and keeps the model of them.
//
// Each engine is used by one thread. Engines of one world may work at the same time.
#ifndef PQCACHED_TESTS_FAULT_CRASH_ENGINE_H_
#define PQCACHED_TESTS_FAULT_CRASH_ENGINE_H_

#include <cstdint>
#include <random>
#include <string>

#include "tests/fault/crash/world.h"

namespace pqcached::kvstore::testing {

// A call. A step that does not suit the present state does nothing.
struct Step {
  Operation operation = Operation::kNone;
  uint32_t sequence = 0;
  // kAppend, kIngest: number of new tokens. kTruncate, kFork: number of tokens that remain. kBuild: ordinal of the
  // index. kCreate: 1 = with the names of a sequence that has ended.
  uint32_t amount = 0;
  // kCreate: 1 = with an incremental index. kFork: the parent. kIngest: 1 = not committed. kAttach, kDetach: the view.
  uint32_t other = 0;
};

class CrashEngine {
 public:
  CrashEngine(CrashWorld& world, uint32_t number);

  void Do(const Step& step);
  Step RandomStep();

 private:
  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(random_() % below); }
  void Announce(Operation operation, uint32_t count);
  void Done();
  // Ends the announced call; a full pool is no fault. Returns whether the call succeeded.
  bool Finish(const char* what, const absl::Status& status);

  void Create(SequenceModel& sequence, const Step& step);
  void CreateRanks(SequenceModel& first, SequenceModel& second);
  void Fork(SequenceModel& sequence, const Step& step);
  void Drop(SequenceModel& sequence);
  void Append(SequenceModel& sequence, const Step& step);
  void Ingest(SequenceModel& sequence, const Step& step);
  void Truncate(SequenceModel& sequence, uint32_t count);
  void Build(SequenceModel& sequence, uint32_t ordinal);
  void Idle();
  void Name(SequenceModel& sequence);
  void Suspend(SequenceModel& sequence, bool suspended);
  void Pin(SequenceModel& sequence);
  void Evict(SequenceModel& sequence);
  void EvictRetained();
  void Attach(const SequenceModel& sequence, ViewModel& view);
  void Detach(ViewModel& view);
  void EndQuarantine();
  void PlanMove();
  uint32_t NewEnd(SequenceModel& sequence, uint32_t wanted);
  void Begin(SequenceModel& sequence, uint64_t id, uint32_t count, uint32_t named);
  void Remember(const SequenceModel& sequence);

  CrashWorld& world_;
  EngineModel& mine_;
  const std::string session_;
  std::mt19937_64 random_;
  uint32_t current_ = 0;  // sequence of the step
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_FAULT_CRASH_ENGINE_H_
