// Engines that are killed at any moment leave nothing behind, and those beside them notice nothing.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "faults.h"

namespace pqcached::testing {
namespace {

class ClientKillTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  Daemon daemon_{{"--max-pool-bytes", "1gib"}};
  Client admin_ = daemon_.OpenClient("default", PQC_PATH_ONLY_REMOTE);
};

TEST_P(ClientKillTest, LeavesNothing) {
  constexpr int kAtOnce = 5;
  const int kills = FaultCount(25, 250);
  std::minstd_rand random(static_cast<uint32_t>(GetParam()) + 1);
  Engine witness({.endpoint = daemon_.endpoint(), .path = GetParam(), .cache_name = "witness"});
  int killed = 0;
  while (killed < kills) {
    std::vector<std::unique_ptr<Process>> engines;
    for (int i = 0; i < kAtOnce; ++i) {
      engines.push_back(std::make_unique<Process>(
          std::vector<std::string>{PQCACHED_ENGINE_PROCESS, daemon_.endpoint(),
                                   std::to_string(GetParam()), std::to_string(i + 1)}));
    }
    for (const auto& engine : engines) ASSERT_EQ(engine->ReadLine(), "working");
    for (const auto& engine : engines) {
      witness.Act();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
      engine->Kill();
      ++killed;
    }
  }
  witness.Verify();
  const Engine::Counts counts = witness.counts();
  EXPECT_TRUE(counts.clean()) << counts.ToString();
  { const Engine gone = std::move(witness); }
  const Left left = AwaitNothingLeft(admin_, 1);
  EXPECT_TRUE(left.nothing_but(1)) << left.ToString();
  Record("client_kills_survived", static_cast<uint64_t>(killed), counts, left);
}

INSTANTIATE_TEST_SUITE_P(Paths, ClientKillTest,
                         ::testing::Values(PQC_PATH_ONLY_LOCAL, PQC_PATH_ONLY_REMOTE),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached::testing
