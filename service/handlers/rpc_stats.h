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

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "service/handlers/rpcs.h"

namespace pqcached::service {

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
