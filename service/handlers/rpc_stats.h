// RpcStats counts calls by method and status, and adds up their durations.
//
// Thread-safe and lock-free. A snapshot does not show all counters at the same instant.
#ifndef PQCACHED_SERVICE_HANDLERS_RPC_STATS_H_
#define PQCACHED_SERVICE_HANDLERS_RPC_STATS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>
#include "absl/strings/string_view.h"

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace pqcached::service {

enum class Rpc : uint8_t {
  kSession,
  kOpenCache,
  kCreateSequence,
  kDropSequence,
  kTruncateSequence,
  kForkSequence,
  kSuspendSequence,
  kResumeSequence,
  kMatchPrefix,
  kIngest,
  kCommit,
  kAppend,
  kClosePrefill,
  kBuildIndex,
  kTopK,
  kScore,
  kFetchBlocks,
  kFetchTokens,
  kAttend,
  kAttach,
  kDetach,
  kAdmit,
  kGetServerInfo,
  kListCaches,
  kListSequences,
  kDescribeSequence,
  kStats,
  kSetLogLevel,
  kListLeases,
  kEvict,
  kPin,
  kDrain,
  kSelfTest,
};
inline constexpr size_t kRpcCount = static_cast<size_t>(Rpc::kSelfTest) + 1;

// Returns the name in the proto: "CreateSequence".
absl::string_view RpcName(Rpc rpc);

// Returns gRPC's name of the code: "OK", "INVALID_ARGUMENT".
absl::string_view StatusName(absl::StatusCode code);

class RpcStats {
 public:
  static constexpr size_t kStatusCount = 17;

  struct Row {
    Rpc rpc;
    std::array<uint64_t, kStatusCount> count_by_status;
    absl::Duration total;
    absl::Duration longest;
  };

  void Record(Rpc rpc, absl::StatusCode code, absl::Duration elapsed);
  // Returns the counters of the rpcs that were called at least once.
  std::vector<Row> Snapshot() const;

 private:
  struct alignas(64) Counters {
    std::array<std::atomic<uint64_t>, kStatusCount> count_by_status = {};
    std::atomic<int64_t> total_nanoseconds = 0;
    std::atomic<int64_t> longest_nanoseconds = 0;
  };
  std::array<Counters, kRpcCount> counters_ = {};
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_RPC_STATS_H_
