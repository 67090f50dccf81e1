#include "tests/fault/crash/crash_points.h"

#include <signal.h>
#include <unistd.h>

#include <functional>
#include <vector>

#include "kvstore/memory/durable_store.h"

namespace pqcached::kvstore {
namespace testing {
namespace {

constexpr int kMostWaits = 60;  // of 50 microseconds

CrashPlan plan;                                         // written before counting starts
std::atomic<std::atomic<uint64_t>*> counter = nullptr;  // null: not counting
thread_local std::vector<std::function<void()>>
    held_back;  // stores without order, since the last fence

[[noreturn]] void Die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

}  // namespace

void ArmCrashPoints(const CrashPlan& wanted, std::atomic<uint64_t>& reached) {
  plan = wanted;
  counter.store(&reached);
}

void DisarmCrashPoints() { counter.store(nullptr); }

}  // namespace testing

void ReachCrashPoint() {
  std::atomic<uint64_t>* const counted = testing::counter.load();
  if (counted == nullptr || counted->fetch_add(1) + 1 != testing::plan.point) return;
  const uint64_t wanted = testing::plan.point + testing::plan.stores_of_others;
  for (int i = 0; counted->load() < wanted && i < testing::kMostWaits; ++i) usleep(50);
  testing::Die();
}

void HoldBack(std::function<void()> store) {
  if (testing::counter.load() == nullptr) return store();
  testing::held_back.push_back(std::move(store));
}

void RunHeldBack() {
  for (const auto& store : testing::held_back) store();
  testing::held_back.clear();
}

}  // namespace pqcached::kvstore
