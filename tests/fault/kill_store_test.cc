// SIGKILL at random instants of a process that works on a store; recovery itself is such work, too. What
// was acknowledged must be there afterwards, byte by byte, and nothing else. Every kind of operation is hit.
//
// PROGRAM [--json FILE]: writes the rows of area `recovery` that it counts. PQCACHED_FULL_TESTS: 2,000
// kills instead of 100.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

#include "tests/fault/kill_world.h"

namespace pqcached::kvstore::testing {
namespace {

constexpr uint32_t kKillsPerRound = 25;  // then everything is dropped
constexpr uint32_t kMaxWorkMicroseconds = 200'000;
constexpr uint32_t kPatienceMicroseconds = 2'000'000;  // with a process that is to end by itself
// When a kind of operation was not hit: so many times as many kills at most.
constexpr uint32_t kMostTries = 5;

constexpr uint32_t kLargeSequences = 16;
constexpr uint32_t kLargeTokens = 65'536;

CacheSpec LargeSpec() {
  CacheSpec spec = SmallSpec("large");
  spec.capacity_bytes = size_t{1280} << 20;
  spec.groups[0] = {.kind = LayerKind::kSelected,
                    .layers = {0, 1},
                    .kv_heads = 1,
                    .query_heads = 1,
                    .key_dim = 128,
                    .value_dim = 128,
                    .dtype = kernels::DType::kF16};
  return spec;
}

StoreOptions LargeOptions(DescriptorKeeper& keeper) {
  StoreOptions options;
  options.keeper = &keeper;
  return options;
}

void FillLargeStore(DescriptorKeeper& keeper) {
  const auto store = Store::Create(LargeOptions(keeper));
  const auto cache = store.ok() ? (*store)->OpenCache(kTenant, LargeSpec()) : store.status();
  if (!cache.ok()) return;
  const Content content(4096, 7);
  const ContentRows rows(content, LargeSpec().groups[0]);
  for (uint32_t i = 0; i < kLargeSequences; ++i) {
    const auto made = (*store)->CreateSequence(kTenant, cache->cache_id, {.session = "session"});
    if (!made.ok()) return;
    for (uint32_t begin = 0; begin < kLargeTokens; begin += 4096) {
      auto ingest = (*store)->BeginIngest(kTenant, made->sequence_id);
      if (!ingest.ok()) return;
      for (const LayerRows& layer : rows.layers) (*ingest)->Write(begin, layer).IgnoreError();
      (*ingest)->Commit().IgnoreError();
    }
  }
}

double RecoverLargeStore(DescriptorKeeper& keeper) {
  const auto store = Store::Create(LargeOptions(keeper));
  if (!store.ok()) return -1;
  for (const CacheInfo& cache : (*store)->ListCaches(kTenant)) {
    if (cache.spec.name != LargeSpec().name) continue;
    uint64_t tokens = 0;
    const auto sequences = (*store)->ListSequences(kTenant, cache.cache_id);
    if (!sequences.ok()) return -1;
    for (const SequenceInfo& info : *sequences) {
      tokens += info.token_count;
    }
    if (tokens != uint64_t{kLargeSequences} * kLargeTokens) return -1;
    const RecoveryReport report = (*store)->Recovery();
    return 1e3 * report.seconds / (static_cast<double>(report.bytes) / (1u << 30));
  }
  return -1;
}

class Killer {
 public:
  Killer() : state_(*MakeShared<WorldState>()) {}

  // Returns whether all went well.
  bool Run(uint32_t kills) {
    for (uint32_t i = 1; i <= kills || (!AllHit() && i <= kMostTries * kills); ++i) {
      KillOne();
      if (i % kKillsPerRound == 0) DropAll();
      if (state_.other_faults > 0) break;
    }
    DropAll();
    return AllHit() && state_.other_faults == 0 && state_.lost_bytes == 0 &&
           state_.wrong_rows == 0 && state_.leaked_extents == 0;
  }

  // Of a store with much in it, after a kill. Returns ms per GiB in use; negative when it failed.
  double MeasureRecovery() {
    auto& measured = *MakeShared<std::atomic<double>>();
    measured = -1;
    const auto run = [&](const auto& work) {
      const pid_t child = fork();
      if (child == 0) {
        keeper_.Begin();
        work();
        kill(getpid(), SIGKILL);
      }
      int status = 0;
      waitpid(child, &status, 0);
    };
    run([this] { FillLargeStore(keeper_); });
    run([&] { measured = RecoverLargeStore(keeper_); });
    return measured;
  }

  void Print() const {
    std::printf("kills %u:", kills_);
    for (size_t i = 0; i < kOperations; ++i) {
      std::printf(" %s %u,", NameOf(static_cast<Operation>(i)), hits_[i]);
    }
    std::printf(" check %u\n", hits_in_check_);
    std::printf(
        "operations %lu, merges %lu, evicted %lu, found again by name %lu, rows compared %lu\n",
        Count(state_.operations), Count(state_.merges), Count(state_.evictions),
        Count(state_.found_again), Count(state_.checked_rows));
    std::printf(
        "bytes lost %lu, wrong rows %lu, extents leaked %lu, other faults %lu; recovery %.3f ms on "
        "average\n",
        Count(state_.lost_bytes), Count(state_.wrong_rows), Count(state_.leaked_extents),
        Count(state_.other_faults),
        1e3 * state_.recovery_seconds /
            std::max<double>(1, static_cast<double>(state_.recoveries)));
  }

  void WriteRows(const char* path, bool good) {
    std::ofstream file(path);
    const char* separator = "[";
    const auto row = [&](const char* name, const std::string& value, const char* unit,
                         const char* better, const char* goal, const char* against) {
      file << separator << "{\"area\": \"recovery\", \"name\": \"" << name
           << "\", \"value\": " << value << ", \"unit\": \"" << unit << "\", \"better\": \""
           << better << "\", \"goal\": " << goal << ", \"against\": \"" << against
           << "\", \"samples\": " << kills_ << ", \"spread\": null}";
      separator = ",\n ";
    };
    const auto count = [&](const char* name, uint64_t value, const char* better, const char* goal) {
      row(name, std::to_string(value), "", better, goal, "a plain model of the store");
    };
    count("kills_survived", good ? kills_ : 0, "higher", "100");
    count("acknowledged_bytes_lost", state_.lost_bytes, "lower", "0");
    count("wrong_rows_seen", state_.wrong_rows, "lower", "0");
    count("extents_leaked", state_.leaked_extents, "lower", "0");
    const double ms_per_gib = MeasureRecovery();
    row("recovery_ms_per_gib", ms_per_gib < 0 ? "null" : std::to_string(ms_per_gib), "ms/GiB",
        "lower", "null", "Store::Create after a kill, 1 GiB of rows in use");
    file << "]\n";
  }

 private:
  static unsigned long Count(const std::atomic<uint64_t>& count) { return count.load(); }

  template <typename Work>
  pid_t Fork(const Work& work) {
    state_.phase = Phase::kRecovering;
    const pid_t child = fork();
    if (child != 0) return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    KillWorld world(state_, keeper_);
    world.Begin();
    if (state_.other_faults == 0) work(world);
    _exit(state_.other_faults == 0 ? 0 : 3);
  }

  // Every second kill hits an operation of the kind that was hit least; the others come at any moment.
  void KillOne() {
    Target& target = state_.target;
    target.operation = Operation::kNone;
    if (random_() % 2 == 0) {
      target.countdown = static_cast<uint32_t>(1 + random_() % 3);
      target.after_permille = static_cast<uint32_t>(random_() % 1000);
      target.operation = LeastHit();
    }
    if (target.operation == Operation::kRecover) target.countdown = 1;
    const pid_t child = Fork([this](KillWorld& world) {
      while (state_.other_faults == 0) world.Step();
    });
    const int status = target.operation == Operation::kNone
                           ? KillAfter(child, random_() % kMaxWorkMicroseconds)
                           : KillAfter(child, kPatienceMicroseconds);
    ++kills_;
    switch (state_.phase.load()) {
      case Phase::kRecovering:
        ++hits_[static_cast<size_t>(Operation::kRecover)];
        break;
      case Phase::kChecking:
        ++hits_in_check_;
        break;
      case Phase::kWorking:
        ++hits_[static_cast<size_t>(state_.pending.load())];
        break;
    }
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return;
    std::fprintf(stderr, "the child ended by itself: status %x\n", static_cast<unsigned>(status));
    ++state_.other_faults;
  }

  // Unless it ends before. Returns as waitpid does.
  static int KillAfter(pid_t child, uint64_t microseconds) {
    constexpr uint64_t kPollMicroseconds = 100;
    int status = 0;
    for (uint64_t waited = 0; waited < microseconds; waited += kPollMicroseconds) {
      if (waitpid(child, &status, WNOHANG) == child) return status;
      usleep(kPollMicroseconds);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return status;
  }

  Operation LeastHit() const {
    return static_cast<Operation>(std::min_element(hits_.begin() + 1, hits_.end()) - hits_.begin());
  }
  bool AllHit() const { return hits_[static_cast<size_t>(LeastHit())] > 0; }

  void DropAll() {
    const pid_t child = Fork([](KillWorld& world) { world.DropAll(); });
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    std::fprintf(stderr, "the last child failed: status %x\n", static_cast<unsigned>(status));
    ++state_.other_faults;
  }

  WorldState& state_;
  SharedKeeper keeper_;
  std::mt19937_64 random_{2026};
  uint32_t kills_ = 0;
  std::array<uint32_t, kOperations> hits_ = {};  // kills, by what they hit; 0: between operations
  uint32_t hits_in_check_ = 0;
};

}  // namespace
}  // namespace pqcached::kvstore::testing

int main(int argc, char** argv) {
  const bool full = std::getenv("PQCACHED_FULL_TESTS") != nullptr;
  pqcached::kvstore::testing::Killer killer;
  const bool good = killer.Run(full ? 2000 : 100);
  killer.Print();
  if (argc == 3 && std::strcmp(argv[1], "--json") == 0) killer.WriteRows(argv[2], good);
  return good ? 0 : 1;
}
