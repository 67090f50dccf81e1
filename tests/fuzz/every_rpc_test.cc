// The seeds of the fuzz target `handlers` call every rpc of the sidecar.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "service/handlers/rpcs.h"
#include "tests/fuzz/handlers/seeds.h"
#include "tests/fuzz/handlers/world.h"
#include "tests/service/handlers/direct_sidecar.h"

namespace pqcached::fuzz {
namespace {

using service::Rpc;

// Rpcs that the target does not call, and why.
const std::map<Rpc, std::string>& LeftOut() {
  static const auto* const left_out = new std::map<Rpc, std::string>{
      {Rpc::kSession, "a stream for the life of a session, which needs a server"},
      {Rpc::kDrain, "refuses the calls of later inputs on the same sidecar"},
      {Rpc::kSelfTest, "takes seconds, and reads nothing that clients have stored"},
      {Rpc::kEraseTenant, "ends what later inputs use"},
      {Rpc::kDropCache, "ends what later inputs use"},
      {Rpc::kEndSession, "ends what later inputs use"},
      {Rpc::kSetTenantLimits, "refuses the calls of later inputs on the same sidecar"},
      {Rpc::kEndQuarantine, "restarts the worker, which a sidecar without processes has not"},
      {Rpc::kExportSequence, "writes files, for which the sidecar has no directory"},
      {Rpc::kImportSequence, "reads files, for which the sidecar has no directory"},
  };
  return *left_out;
}

TEST(FuzzHandlers, SeedsCallEveryRpcSuccessfully) {
  World world({.is_slow = false});
  std::map<Rpc, uint64_t> successes;
  for (const std::string& seed : CallSeeds()) {
    world.Run({reinterpret_cast<const uint8_t*>(seed.data()), seed.size()});
    ASSERT_FALSE(world.worn());
  }
  for (const service::RpcStats::Row& row : world.sidecar().stats.Snapshot()) {
    successes[row.rpc] = row.count_by_status[0];
  }
  for (size_t i = 0; i < service::kRpcCount; ++i) {
    const auto rpc = static_cast<Rpc>(i);
    EXPECT_EQ(successes[rpc] > 0, !LeftOut().contains(rpc)) << service::RpcName(rpc);
  }
}

// The streams Session and Ingest have calls of their own.
TEST(DirectSidecar, HasAnEntryForEveryUnaryRpc) {
  std::map<Rpc, int> entries;
  for (const service::RpcEntry& entry : service::RpcEntries()) ++entries[entry.rpc];
  for (size_t i = 0; i < service::kRpcCount; ++i) {
    const auto rpc = static_cast<Rpc>(i);
    const bool is_stream = rpc == Rpc::kSession || rpc == Rpc::kIngest;
    EXPECT_EQ(entries[rpc], is_stream ? 0 : 1) << service::RpcName(rpc);
  }
}

}  // namespace
}  // namespace pqcached::fuzz
