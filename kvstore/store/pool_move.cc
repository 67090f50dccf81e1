#include "kvstore/store/pool_move.h"

#include <cstddef>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/limits/granted_memory.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/read/pages.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

// Calls `visit(begin, size_bytes)` with each run of units in use, until it returns an error.
template <typename Visit>
absl::Status VisitUsed(const ExtentLedger& table, uint32_t unit_count, const Visit& visit) {
  for (uint32_t begin = 0; begin < unit_count; ++begin) {
    uint32_t end = begin;
    while (end < unit_count && table.is_used(end)) ++end;
    if (end == begin) continue;
    RETURN_IF_ERROR(
        visit(size_t{begin} << kExtentUnitShift, size_t{end - begin} << kExtentUnitShift));
    begin = end;
  }
  return absl::OkStatus();
}

}  // namespace

PoolMove::PoolMove(DescriptorKeeper& keeper, uint64_t cache_id) : keeper_(keeper) {
  names_.cache_id = cache_id;
}

absl::Status PoolMove::Plan(bool strict) {
  if (strict) {
    return FailedPrecondition("cache_id", "a pool of strict_memory stays where it is");
  }
  const std::string name = names_.move_plan_name();
  if (keeper_.Take(name).valid()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const FileDescriptor mark, keeper_.CreateMemory(name.c_str(), kMinExtentBytes));
  const absl::Status kept = keeper_.Keep(name, mark.get());
  // Another thread may have planned the same move.
  return absl::IsAlreadyExists(kept) ? absl::OkStatus() : kept;
}

absl::Status PoolMove::Run(const Parts& parts, RecoveryReport& report) {
  if (keeper_.Take(names_.move_plan_name()).valid()) {
    RETURN_IF_ERROR(keeper_.Release(names_.move_plan_name()));
    if (absl::Status status = Copy(parts); !status.ok()) {
      report.refused_moves.push_back(absl::StrCat("cache ", names_.cache_id, ": ", TextOf(status)));
      return absl::OkStatus();
    }
  }
  const FileDescriptor copy = keeper_.Take(names_.moved_pool_name());
  if (!copy.valid()) return absl::OkStatus();
  RETURN_IF_ERROR(Finish(copy));
  report.moved_caches.push_back(names_.cache_id);
  return absl::OkStatus();
}

absl::Status PoolMove::Copy(const Parts& parts) {
  const CacheRecord& record = parts.record;
  const FileDescriptor old_memory = keeper_.Take(record.pool_name());
  const auto unit_count =
      static_cast<uint32_t>((record.spec.capacity_bytes + kMinExtentBytes - 1) >> kExtentUnitShift);
  const size_t size_bytes = size_t{unit_count} << kExtentUnitShift;
  if (!old_memory.valid() || SizeOf(old_memory) < size_bytes) {
    return DataLoss("the pool is missing or too short");
  }
  size_t used_bytes = 0;
  RETURN_IF_ERROR(VisitUsed(parts.table, unit_count, [&](size_t, size_t run_bytes) {
    used_bytes += run_bytes;
    return absl::OkStatus();
  }));
  ASSIGN_OR_RETURN(auto promise, parts.ledger.Promise(record.tenant, MemoryUse::kPool, used_bytes,
                                                      "capacity_bytes"));
  const std::string name = record.moved_pool_name();
  ASSIGN_OR_RETURN(const FileDescriptor memory, keeper_.CreateMemory(name.c_str(), size_bytes));
  ASSIGN_OR_RETURN(const Mapping from,
                   Mapping::Map(old_memory, size_bytes, Mapping::Access::kRead));
  ASSIGN_OR_RETURN(const Mapping to, Mapping::Map(memory, size_bytes, Mapping::Access::kReadWrite));
  GrantedMemory granted(memory.get(), {to.data(), size_bytes}, kHugePageBytes, std::move(promise));
  RETURN_IF_ERROR(VisitUsed(parts.table, unit_count, [&](size_t begin, size_t run_bytes) {
    RETURN_IF_ERROR(granted.Ensure(begin, run_bytes));
    std::memcpy(to.data() + begin, from.data() + begin, run_bytes);
    return absl::OkStatus();
  }));
  DurableFence();
  return keeper_.Keep(name, memory.get());
}

absl::Status PoolMove::Finish(const FileDescriptor& copy) {
  RETURN_IF_ERROR(keeper_.Release(names_.pool_name()));
  RETURN_IF_ERROR(keeper_.Keep(names_.pool_name(), copy.get()));
  return keeper_.Release(names_.moved_pool_name());
}

}  // namespace pqcached::kvstore
