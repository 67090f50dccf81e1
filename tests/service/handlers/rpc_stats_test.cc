// Counters of calls.
#include "service/handlers/rpc_stats.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

namespace pqcached::service {
namespace {

TEST(RpcStatsTest, AddsUpFromManyThreads) {
  RpcStats stats;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&stats] {
      for (int i = 0; i < 1000; ++i) {
        stats.Record(Rpc::kTopK, i % 4 == 0 ? absl::StatusCode::kNotFound : absl::StatusCode::kOk,
                     absl::Microseconds(i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<RpcStats::Row> rows = stats.Snapshot();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(RpcName(rows[0].rpc), "TopK");
  EXPECT_EQ(rows[0].count_by_status[static_cast<size_t>(absl::StatusCode::kOk)], 3000u);
  EXPECT_EQ(rows[0].count_by_status[static_cast<size_t>(absl::StatusCode::kNotFound)], 1000u);
  EXPECT_EQ(rows[0].longest, absl::Microseconds(999));
  EXPECT_EQ(rows[0].total, absl::Microseconds(4 * 999 * 500));
}

TEST(RpcStatsTest, NamesEveryRpcAndStatus) {
  std::set<std::string> names;
  for (size_t i = 0; i < kRpcCount; ++i) names.insert(std::string(RpcName(static_cast<Rpc>(i))));
  EXPECT_EQ(names.size(), kRpcCount);
  EXPECT_EQ(RpcName(Rpc::kAttend), "Attend");
  EXPECT_EQ(RpcName(Rpc::kSelfTest), "SelfTest");
  EXPECT_EQ(StatusName(absl::StatusCode::kOk), "OK");
  EXPECT_EQ(StatusName(absl::StatusCode::kUnauthenticated), "UNAUTHENTICATED");
  EXPECT_EQ(StatusName(static_cast<absl::StatusCode>(99)), "UNKNOWN");
}

}  // namespace
}  // namespace pqcached::service
