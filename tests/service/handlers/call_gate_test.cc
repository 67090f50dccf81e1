// The deadline that the gate gives each rpc.
#include "service/handlers/call_gate.h"

#include <gtest/gtest.h>

#include "tests/service/handlers/direct_sidecar.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;

constexpr absl::Duration kDefault = absl::Seconds(20);
constexpr absl::Duration kMost = absl::Seconds(50);

class CallGateTest : public testing::Test {
 protected:
  static Config ConfigOfTest() {
    Config config = SmallConfig();
    config.default_timeout = kDefault;
    config.max_timeout = kMost;
    return config;
  }

  // The time that the gate gives the rpc of a client that wants it by `deadline`.
  absl::Duration TimeOf(Rpc rpc, SteadyTime deadline) {
    const absl::StatusOr<service::Call> call = sidecar_.gate.Begin(
        rpc, {.door = RuleOf(rpc).tenant || RuleOf(rpc).anyone ? Door::kSocket : Door::kAdminSocket,
              .session_token = client_.token,
              .boot_id = sidecar_.boot_id,
              .deadline = deadline});
    EXPECT_TRUE(call.ok()) << call.status();
    if (!call.ok()) return absl::ZeroDuration();
    sidecar_.gate.End(*call, absl::OkStatus());
    return call->deadline - call->started;
  }

  DirectSidecar sidecar_{ConfigOfTest()};
  const Client client_ = sidecar_.Open("engine");
};

TEST_F(CallGateTest, EveryRpcHasADeadlineAndNoneBeyondMaxTimeout) {
  for (size_t i = 0; i < kRpcCount; ++i) {
    const Rpc rpc = static_cast<Rpc>(i);
    SCOPED_TRACE(RpcName(rpc));
    EXPECT_EQ(TimeOf(rpc, SteadyTime::InfiniteFuture()),
              rpc == Rpc::kBuildIndex || rpc == Rpc::kWatchEvents ? kMost : kDefault);
    EXPECT_EQ(TimeOf(rpc, SteadyTime::Now() + absl::Hours(1)), kMost);
    EXPECT_LE(TimeOf(rpc, SteadyTime::Now() + absl::Seconds(30)), absl::Seconds(30));
  }
}

}  // namespace
}  // namespace pqcached::service
