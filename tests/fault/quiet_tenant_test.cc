// A tenant beside a hostile one is served: all its calls succeed in time. With PQCACHED_QUIET_ROUNDS
// (6 for a figure, half a minute per test) it also measures by how much the hostile tenant delays
// them: each round has a window beside the hostile tenant and one beside a program that occupies as
// many cores and never calls the sidecar, and the ratio is that of the 99th percentiles over all
// windows of a kind. On the local path, TopK runs in the tenant's own process and calls no sidecar;
// its ratio is a figure of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "faults.h"
#include "tenants/hostile.h"
#include "tenants/neighbour.h"
#include "tenants/quiet_tenant.h"

namespace pqcached::testing {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kBriefWindow(300), kWindow(2500), kWarmUp(250);

int RoundsFromEnvironment() {
  const char* rounds = std::getenv("PQCACHED_QUIET_ROUNDS");
  return rounds != nullptr ? std::atoi(rounds) : 0;
}

// As many cores as the hostile tenant's threads can occupy.
uint32_t CoresOf(const HostilityRow& hostility) {
  return std::min(hostility.threads, std::max(1u, std::thread::hardware_concurrency()));
}

// Ratios of the 99th percentiles beside the hostile tenant to those beside the burner.
struct Ratios {
  double append = 0, top_k = 0;
};

class QuietTenantTest : public ::testing::TestWithParam<std::tuple<HostilityRow, pqc_path_choice>> {
 protected:
  const HostilityRow& hostility() const { return std::get<0>(GetParam()); }
  bool is_local() const { return std::get<1>(GetParam()) == PQC_PATH_ONLY_LOCAL; }

  // Adds the latencies of the quiet tenant's calls beside the hostile tenant.
  void DecodeBesideHostile(milliseconds warm_up, milliseconds window, Latencies& latencies) {
    DecodeBeside(Neighbour(hostility(), daemon_.endpoint()), warm_up, window, latencies);
  }

  // The same beside a program that occupies the same cores.
  void DecodeBesideBurner(milliseconds warm_up, milliseconds window, Latencies& latencies) {
    DecodeBeside(Neighbour(CoresOf(hostility())), warm_up, window, latencies);
  }

  Ratios Measure(int rounds) {
    Latencies hostile, burner;
    for (int round = 0; round < rounds; ++round) {
      // Which one comes first changes, so that a drift of the machine favours neither.
      if (round % 2 == 0) DecodeBesideBurner(kWarmUp, kWindow, burner);
      DecodeBesideHostile(kWarmUp, kWindow, hostile);
      if (round % 2 == 1) DecodeBesideBurner(kWarmUp, kWindow, burner);
    }
    const auto ratio_of = [&](const char* call, std::vector<double> Latencies::*of) {
      const double beside_hostile = P99(hostile.*of), beside_burner = P99(burner.*of);
      std::printf("%s: p99 %.3f ms of %zu beside %s, %.3f ms of %zu beside the burner\n", call,
                  beside_hostile, (hostile.*of).size(), hostility().name, beside_burner,
                  (burner.*of).size());
      return beside_hostile / beside_burner;
    };
    return {.append = ratio_of("Append", &Latencies::append),
            .top_k = ratio_of("TopK", &Latencies::top_k)};
  }

  Daemon daemon_{{"--max-pool-bytes", "1gib", "--max-sessions", "64", "--segment-tokens", "8192",
                  "--tail-tokens", "1024", "--codebook-tokens", "32768"}};
  Client operator_ = daemon_.OpenClient("", PQC_PATH_ADMIN);
  std::unique_ptr<QuietTenant> quiet_ =
      std::make_unique<QuietTenant>(daemon_.endpoint(), std::get<1>(GetParam()));
  Neighbour::Calls hostile_calls_;

 private:
  void DecodeBeside(Neighbour neighbour, milliseconds warm_up, milliseconds window,
                    Latencies& latencies) {
    Latencies ignored;
    quiet_->Decode(warm_up, ignored);
    quiet_->Decode(window, latencies);
    hostile_calls_ += neighbour.End();
    // The sidecar removes what the neighbour has left now, and not in the next window.
    AwaitSessions(1);
  }

  void AwaitSessions(uint64_t count) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (LeftIn(operator_).sessions != count && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
};

TEST_P(QuietTenantTest, IsServedBesideAHostileTenant) {
  const int rounds = RoundsFromEnvironment();
  if (rounds == 0) {
    Latencies ignored;
    DecodeBesideHostile(milliseconds(0), kBriefWindow, ignored);
  } else {
    const Ratios ratios = Measure(rounds);
    const auto record = [](const char* property, double ratio) {
      RecordProperty(property, std::to_string(ratio));
    };
    record("quiet_tenant_p99_ratio_max",
           is_local() ? ratios.append : std::max(ratios.append, ratios.top_k));
    if (is_local()) record("quiet_tenant_local_top_k_p99_ratio_max", ratios.top_k);
    std::printf("ratios: Append %.2f, TopK %.2f\n", ratios.append, ratios.top_k);
  }
  const std::vector<std::string>& failures = quiet_->failures();
  EXPECT_TRUE(failures.empty()) << failures.size() << " of " << quiet_->calls()
                                << " calls failed, the first: " << failures.front();
  EXPECT_EQ(quiet_->calls_past_deadline(), 0u);
  EXPECT_EQ(hostile_calls_.taken > 0, hostility().is_taken) << hostile_calls_.ToString();
  EXPECT_EQ(hostile_calls_.refused > 0, hostility().is_refused) << hostile_calls_.ToString();
  EXPECT_EQ(hostile_calls_.failed, 0u) << "the reason is in the output";
  std::printf("%llu calls beside %s, whose calls: %s\n",
              static_cast<unsigned long long>(quiet_->calls()), hostility().name,
              hostile_calls_.ToString().c_str());
  Engine::Counts counts;
  counts.calls_past_deadline = quiet_->calls_past_deadline();
  const uint64_t calls = quiet_->calls();
  quiet_.reset();
  const Left left = AwaitNothingLeft(operator_, 0);
  EXPECT_TRUE(left.nothing_but(0)) << left.ToString();
  Record("quiet_calls_served", calls, counts, left);
}

INSTANTIATE_TEST_SUITE_P(
    Hostilities, QuietTenantTest,
    ::testing::Combine(::testing::ValuesIn(kHostilities),
                       ::testing::Values(PQC_PATH_ONLY_LOCAL, PQC_PATH_ONLY_REMOTE)),
    [](const auto& parameters) {
      const bool is_local = std::get<1>(parameters.param) == PQC_PATH_ONLY_LOCAL;
      return std::string(std::get<0>(parameters.param).name) + (is_local ? "_local" : "_remote");
    });

}  // namespace
}  // namespace pqcached::testing
