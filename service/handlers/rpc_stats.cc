#include "service/handlers/rpc_stats.h"

#include <algorithm>

namespace pqcached::service {
namespace {

constexpr std::array<absl::string_view, RpcStats::kStatusCount> kStatusNames = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

size_t StatusIndex(absl::StatusCode code) {
  const size_t index = static_cast<size_t>(code);
  return index < RpcStats::kStatusCount ? index : static_cast<size_t>(absl::StatusCode::kUnknown);
}

}  // namespace

absl::string_view StatusName(absl::StatusCode code) { return kStatusNames[StatusIndex(code)]; }

void RpcStats::Record(Rpc rpc, absl::StatusCode code, absl::Duration elapsed) {
  Counters& counters = counters_[static_cast<size_t>(rpc)];
  const int64_t nanoseconds = absl::ToInt64Nanoseconds(elapsed);
  counters.count_by_status[StatusIndex(code)].fetch_add(1, std::memory_order_relaxed);
  counters.total_nanoseconds.fetch_add(nanoseconds, std::memory_order_relaxed);
  int64_t longest = counters.longest_nanoseconds.load(std::memory_order_relaxed);
  while (longest < nanoseconds && !counters.longest_nanoseconds.compare_exchange_weak(
                                      longest, nanoseconds, std::memory_order_relaxed)) {
  }
}

std::vector<RpcStats::Row> RpcStats::Snapshot() const {
  std::vector<Row> rows;
  for (size_t i = 0; i < kRpcCount; ++i) {
    const Counters& counters = counters_[i];
    Row row{static_cast<Rpc>(i),
            {},
            absl::Nanoseconds(counters.total_nanoseconds.load(std::memory_order_relaxed)),
            absl::Nanoseconds(counters.longest_nanoseconds.load(std::memory_order_relaxed))};
    for (size_t status = 0; status < kStatusCount; ++status) {
      row.count_by_status[status] =
          counters.count_by_status[status].load(std::memory_order_relaxed);
    }
    const bool called = std::any_of(row.count_by_status.begin(), row.count_by_status.end(),
                                    [](uint64_t count) { return count > 0; });
    if (called) rows.push_back(row);
  }
  return rows;
}

}  // namespace pqcached::service
