// The store loses nothing, whichever store into memory that outlives the process is its last.
//
// Short histories are killed at every crash point in turn, long ones of several engines at random points. Each kill is
// followed by a process that recovers, is mostly killed while it does, and by one that recovers and compares everything
// with a plain model: bytes, token counts, names, pins, indexes against brute force, what clients map, and the memory
// in use.
//
// PROGRAM [--json FILE] [--only HISTORY]: writes the rows of area `recovery` that it counts. PQCACHED_FULL_TESTS: ten
// times as many random kills.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvstore/memory/file_keeper.h"
#include "tests/fault/crash/crash_points.h"
#include "tests/fault/crash/histories.h"
#include "tests/fault/crash/kept_memory.h"

namespace pqcached::kvstore::testing {
namespace {

// With a sanitizer, which makes each process many times slower, only some crash points are tried.
#if defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kStride = 16;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr uint32_t kStride = 16;
#else
constexpr uint32_t kStride = 1;
#endif
#else
constexpr uint32_t kStride = 1;
#endif
constexpr uint32_t kLanes = 2;                    // processes that work at the same time
constexpr uint32_t kKillsPerRound = 20;           // of random histories; then everything is dropped
constexpr uint32_t kRandomKills = 240 / kStride;  // of each lane
constexpr uint64_t kMostRandomStores = 4000;

// Counted over all lanes, in shared memory.
struct Totals {
  std::atomic<uint64_t> kills = 0, kills_while_recovering = 0, random_kills = 0;
  std::atomic<uint64_t> faults = 0, lost_bytes = 0, wrong_rows = 0, leaked_extents = 0;
  std::atomic<uint64_t> checked_rows = 0, checked_codes = 0, checked_views = 0, operations = 0;
  std::array<std::atomic<uint64_t>, static_cast<size_t>(Operation::kCount)> hits = {};
};

// Memory that outlives the processes of one history.
class Keepers {
 public:
  Keepers() : directory_("/dev/shm/pqcached-crash-" + std::to_string(getpid())) {}
  ~Keepers() {
    std::filesystem::remove_all(directory_);
    std::filesystem::remove_all(machine());
  }

  void Begin(Keeping keeping) {
    keeping_ = keeping;
    shared_.Clear();
    strict_.Clear();
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directory(directory_);
  }
  // Directory of a CrashWorld.
  std::string machine() const { return directory_ + "-machine"; }
  // Called by a child, and used until it ends.
  DescriptorKeeper& Open() {
    if (keeping_ == Keeping::kDescriptors) {
      shared_.Begin();
      return shared_;
    }
    if (keeping_ == Keeping::kStrict) {
      strict_.Begin();
      return strict_;
    }
    auto opened = FileKeeper::Open(directory_);
    if (!opened.ok()) std::abort();
    files_ = *std::move(opened);
    return *files_;
  }
  // Called by the parent: waits for the child, and serves it meanwhile.
  int Await(pid_t child) {
    int status = 0;
    while (waitpid(child, &status, keeping_ == Keeping::kStrict ? WNOHANG : 0) == 0)
      strict_.Serve();
    if (keeping_ == Keeping::kStrict) strict_.Drain();
    return status;
  }

 private:
  const std::string directory_;
  Keeping keeping_ = Keeping::kDescriptors;
  SharedKeeper shared_;
  StrictKeeper strict_;
  std::unique_ptr<FileKeeper> files_;
};

// One process that forks the processes of its histories.
class Lane {
 public:
  Lane(uint32_t number, Totals& totals)
      : number_(number),
        totals_(totals),
        model_(*MakeShared<WorldModel>()),
        random_(2026 + number) {}

  // Kills the history at the crash points number + 1, number + 1 + kLanes * kStride, and so on, until it ends.
  void RunExhaustively(const History& history) {
    for (uint64_t point = number_ + 1; Good(); point += kLanes * kStride) {
      Begin(history, point);
      const bool killed = KillSteps(history, point);
      totals_.kills += killed ? 1 : 0;
      Survive(/*goes_on=*/history.fills, /*ends=*/point / (kLanes * kStride) % 4 == 0 || !killed);
      if (!killed) return;
    }
  }

  // Kills engines that work at random, at random points, one process after the other.
  void RunAtRandom(const History& history, uint32_t kills) {
    for (uint32_t i = 0; i < kills && Good(); ++i) {
      if (i % kKillsPerRound == 0) Begin(history, random_());
      model_.stores = 0;
      const CrashPlan plan{.point = 1 + random_() % kMostRandomStores,
                           .stores_of_others = history.spec.engines > 1 ? random_() % 40 : 0};
      const bool killed = Kill(plan, [&](CrashWorld& world) { WorkAtRandom(world, 400); });
      totals_.kills += killed ? 1 : 0;
      totals_.random_kills += killed ? 1 : 0;
      Survive(/*goes_on=*/false, i % kKillsPerRound == kKillsPerRound - 1);
    }
  }

  bool Good() const { return totals_.faults == 0; }

  // Adds what the model has counted since Begin to the totals.
  void Add() {
    totals_.lost_bytes += model_.lost_bytes;
    totals_.wrong_rows += model_.wrong_rows;
    totals_.leaked_extents += model_.leaked_extents;
    totals_.checked_rows += model_.checked_rows;
    totals_.checked_codes += model_.checked_codes;
    totals_.checked_views += model_.checked_views;
    totals_.operations += model_.operations;
    for (size_t i = 0; i < totals_.hits.size(); ++i) totals_.hits[i] += model_.hits[i];
  }

 private:
  void Begin(const History& history, uint64_t seed) {
    Add();
    new (&model_) WorldModel{};
    model_.seed = seed;
    history_ = &history;
    keepers_.Begin(history.keeping);
  }

  void WorkAtRandom(CrashWorld& world, uint32_t steps) {
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < world.spec().engines; ++i) {
      threads.emplace_back([&world, i, steps] {
        CrashEngine engine(world, i);
        for (uint32_t step = 0; step < steps && world.model().faults == 0; ++step)
          engine.Do(engine.RandomStep());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Runs the steps of a history until the crash point; after each take-over in another process. Returns false when they
  // ended before.
  bool KillSteps(const History& history, uint64_t point) {
    auto step = history.steps.begin();
    while (step != history.steps.end()) {
      const auto end = std::find_if(step, history.steps.end(), [](const Step& each) {
        return each.operation == Operation::kTakeOver;
      });
      const bool killed = Kill({.point = point}, [&](CrashWorld& world) {
        CrashEngine engine(world, 0);
        for (auto each = step; each != history.steps.end() && each <= end; ++each) engine.Do(*each);
      });
      if (killed) return true;
      step = end == history.steps.end() ? end : end + 1;
    }
    return false;
  }

  // Runs a child that recovers and works until it is killed. Returns false when it ended before.
  template <typename Work>
  bool Kill(const CrashPlan& plan, const Work& work) {
    bool& finished = *finished_;
    finished = false;
    Fork([&](CrashWorld& world) {
      ArmCrashPoints(plan, model_.stores);
      world.Recover(/*may_be_short=*/true);
      if (model_.faults == 0) work(world);
      DisarmCrashPoints();
      if (model_.faults == 0) world.GoIdle();
      finished = true;
    });
    return !finished;
  }

  // Recovers after a kill and compares. Mostly another kill comes first, while a process recovers. `goes_on`: fills the
  // active segments, and compares again. `ends`: drops everything afterwards.
  void Survive(bool goes_on, bool ends) {
    model_.stores = 0;
    if (recovery_stores_ > 0 &&
        Kill({.point = 1 + random_() % recovery_stores_}, [](CrashWorld&) {})) {
      ++totals_.kills;
      ++totals_.kills_while_recovering;
    }
    model_.stores = 0;
    Fork([&](CrashWorld& world) {
      ArmCrashPoints({}, model_.stores);
      world.Recover(/*may_be_short=*/false);
      DisarmCrashPoints();
      if (model_.faults == 0) world.Check();
      if (goes_on && model_.faults == 0) FillSegments(world);
      if (ends && model_.faults == 0) WorkAtRandom(world, 12);
      if (ends && model_.faults == 0) world.DropAll();
      if (model_.faults == 0) world.GoIdle();
    });
    recovery_stores_ = model_.stores;
    if (ends && model_.faults == 0) CheckNothingLeft();
    if (model_.faults == 0) return;
    std::fprintf(stderr, "history %s, lane %u\n", history_->name, number_);
    totals_.faults += model_.faults;
  }

  // Appends as many tokens as a segment holds to each sequence: what was prepared for the active segments before the
  // kill is used, and they are closed.
  static void FillSegments(CrashWorld& world) {
    CrashEngine engine(world, 0);
    for (uint32_t i = 0; i < kEngineSequences; ++i) {
      engine.Do({.operation = Operation::kAppend, .sequence = i, .amount = 130});
    }
    world.CheckSequences();
  }

  // When all clients of earlier processes have ended, the memory of what was dropped is free.
  void CheckNothingLeft() {
    Fork([](CrashWorld& world) {
      world.Recover(/*may_be_short=*/false);
      world.Check();
      CrashEngine(world, 0).Do({.operation = Operation::kEndQuarantine});
      world.GoIdle();
    });
    model_.leaked_extents = model_.idle_used_bytes / kMinExtentBytes;
    if (model_.leaked_extents > 0 && model_.faults++ == 0)
      std::fprintf(stderr, "FAULT: extents have leaked\n");
  }

  template <typename Work>
  void Fork(const Work& work) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      CrashWorld world(model_, keepers_.Open(), keepers_.machine(), history_->spec);
      work(world);
      kill(getpid(), SIGKILL);
      for (;;) pause();
    }
    const int status = keepers_.Await(child);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return;
    std::fprintf(stderr, "FAULT: a process ended by itself, with status %x\n",
                 static_cast<unsigned>(status));
    ++model_.faults;
  }

  const uint32_t number_;
  Totals& totals_;
  WorldModel& model_;
  bool* const finished_ = MakeShared<bool>();
  Keepers keepers_;
  const History* history_ = nullptr;
  std::mt19937_64 random_;
  uint64_t recovery_stores_ = 0;
};

std::vector<History> RandomHistories() {
  return {{.name = "random", .spec = {}, .steps = {}},
          {.name = "random engines", .spec = {.engines = 3}, .steps = {}},
          {.name = "random ranks", .spec = {.engines = 3, .ranks = true}, .steps = {}},
          {.name = "random directory",
           .spec = {.engines = 2},
           .keeping = Keeping::kDirectory,
           .steps = {}},
          {.name = "random strict",
           .spec = {.engines = 2, .strict = true},
           .keeping = Keeping::kStrict,
           .steps = {}}};
}

// One lane begins with the short histories, the other with the random ones: faults are then found soon.
void RunLane(uint32_t number, Totals& totals, const std::string& only) {
  Lane lane(number, totals);
  const auto wanted = [&](const History& history) { return only.empty() || only == history.name; };
  const auto run_short = [&] {
    for (const History& history : Histories()) {
      if (wanted(history)) lane.RunExhaustively(history);
    }
  };
  if (number == 0) run_short();
  const uint32_t kills = (std::getenv("PQCACHED_FULL_TESTS") != nullptr ? 10 : 1) * kRandomKills;
  const std::vector<History> random = RandomHistories();
  for (const History& history : random) {
    if (wanted(history)) lane.RunAtRandom(history, kills / static_cast<uint32_t>(random.size()));
  }
  if (number != 0) run_short();
  lane.Add();
}

void Print(const Totals& totals) {
  const auto count = [](const std::atomic<uint64_t>& value) {
    return static_cast<unsigned long>(value.load());
  };
  std::printf(
      "%lu kills, %lu of them at random, %lu while recovering; by operation:", count(totals.kills),
      count(totals.random_kills), count(totals.kills_while_recovering));
  for (size_t i = 0; i < totals.hits.size(); ++i) {
    std::printf(" %s %lu,", NameOf(static_cast<Operation>(i)), count(totals.hits[i]));
  }
  std::printf("\n%lu operations; compared %lu rows, %lu codes, %lu views\n",
              count(totals.operations), count(totals.checked_rows), count(totals.checked_codes),
              count(totals.checked_views));
  std::printf("faults %lu: bytes lost %lu, wrong rows %lu, extents leaked %lu\n",
              count(totals.faults), count(totals.lost_bytes), count(totals.wrong_rows),
              count(totals.leaked_extents));
}

// Every operation that stores anything must have been hit, and every comparison have compared.
bool Complete(const Totals& totals) {
  constexpr auto kLast =
      static_cast<size_t>(Operation::kEvictRetained);  // those after it store little
  const bool hit = std::all_of(totals.hits.begin() + 1, totals.hits.begin() + kLast + 1,
                               [](const auto& hits) { return hits > 0; });
  return (hit || kStride > 1) && totals.checked_rows > 0 && totals.checked_codes > 0 &&
         totals.checked_views > 0;
}

void WriteRows(const char* path, const Totals& totals) {
  std::ofstream file(path);
  const char* separator = "[";
  const auto row = [&](const char* name, uint64_t value, const char* better, uint64_t goal) {
    file << separator << "{\"area\": \"recovery\", \"name\": \"" << name
         << "\", \"value\": " << value << ", \"unit\": \"count\", \"better\": \"" << better
         << "\", \"goal\": " << goal
         << ", \"against\": \"a plain model of the store\", \"samples\": " << totals.kills
         << ", \"spread\": null}";
    separator = ",\n ";
  };
  row("crash_points_survived", totals.faults == 0 ? totals.kills.load() : 0, "higher", 5000);
  row("acknowledged_bytes_lost", totals.lost_bytes, "lower", 0);
  row("wrong_rows_seen", totals.wrong_rows, "lower", 0);
  row("extents_leaked", totals.leaked_extents, "lower", 0);
  file << "]\n";
}

}  // namespace
}  // namespace pqcached::kvstore::testing

int main(int argc, char** argv) {
  using namespace pqcached::kvstore::testing;
  std::string only;
  const char* json = nullptr;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--only") == 0) only = argv[i + 1];
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
  }
  Totals& totals = *MakeShared<Totals>();
  std::vector<pid_t> lanes;
  for (uint32_t number = 0; number < kLanes; ++number) {
    lanes.push_back(fork());
    if (lanes.back() != 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    RunLane(number, totals, only);
    return 0;
  }
  bool good = true;
  for (const pid_t lane : lanes) {
    int status = 0;
    good = waitpid(lane, &status, 0) == lane && status == 0 && good;
  }
  Print(totals);
  if (json != nullptr) WriteRows(json, totals);
  good = good && totals.faults == 0 && totals.kills > 0 && (!only.empty() || Complete(totals));
  return good ? 0 : 1;
}
