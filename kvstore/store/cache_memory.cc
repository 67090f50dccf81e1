#include "kvstore/store/cache_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/refusal.h"
#include "kvstore/store/pool_move.h"

namespace pqcached::kvstore {
namespace {

// Dropped sequences may still be held for a while, and their slots are freed only afterwards.
constexpr uint32_t kSlotsPerSequence = 2;
constexpr uint32_t kMaxSequenceSlots = uint32_t{1} << 24;
constexpr uint64_t kLeastHeapBytes = uint64_t{16} << 20;
constexpr uint64_t kMostHeapBytes = uint64_t{64} << 30;  // of which only used pages are touched
constexpr uint64_t kPoolBytesPerHeapByte = 8;

RecordTable::Shape ShapeOf(const CacheRecord& record) {
  const StoredLayers layers(record.spec);
  return {.unit_count = static_cast<uint32_t>((record.spec.capacity_bytes + kMinExtentBytes - 1) >>
                                              kExtentUnitShift),
          .head_count = layers.head_count,
          .layer_count = layers.size(),
          .sequence_slots = record.sequence_slots,
          .heap_bytes = record.heap_bytes};
}

uint64_t HeapBytes(size_t capacity_bytes) {
  const uint64_t wanted = capacity_bytes / kPoolBytesPerHeapByte;
  return std::clamp(wanted / HeapBlock::kUnitBytes * HeapBlock::kUnitBytes, kLeastHeapBytes,
                    kMostHeapBytes);
}

absl::StatusOr<std::shared_ptr<Pool>> NewPool(Pool::Options options) {
  ASSIGN_OR_RETURN(auto pool, Pool::Create(std::move(options)));
  pool->TouchReserve();
  return pool;
}

absl::Status KeepPool(DescriptorKeeper& keeper, const std::string& name,
                      const FileDescriptor& memory, bool strict) {
  if (!strict) return keeper.Keep(name, memory.get());
  RETURN_IF_ERROR(keeper.KeepMapped(name, memory.get()));
  return SealMemfd(memory, WriteSeal::kFutureWrite);
}

}  // namespace

Pool::Options CacheMemory::OptionsOf(const CacheSpec& spec) const {
  return {.capacity_bytes = spec.capacity_bytes,
          .idle_reserve = idle_reserve_,
          .strict = options_.strict_memory,
          .quota_bytes = spec.quota_bytes,
          .grows = spec.grows};
}

absl::StatusOr<std::shared_ptr<const Cache>> CacheMemory::Make(std::string_view tenant,
                                                               const CacheSpec& spec) {
  Pool::Options options = OptionsOf(spec);
  if (spec.capacity_bytes > kMinExtentBytes << kMaxExtentOrder) {
    return Pool::Create(std::move(options)).status();  // fails with the limit in the message
  }
  if (spec.grows) {
    options.promise = ledger_.Restore(tenant, MemoryUse::kPool, 0);
  } else {
    ASSIGN_OR_RETURN(options.promise, ledger_.Promise(tenant, MemoryUse::kPool, spec.capacity_bytes,
                                                      "capacity_bytes"));
  }
  const uint64_t cache_id = NewId();
  DescriptorKeeper* keeper = options_.keeper;
  // A strict pool cannot be mapped for writing again, so it is kept only by keepers that keep
  // mappings.
  if (keeper == nullptr || (options.strict && !keeper->supports_mappings())) {
    ASSIGN_OR_RETURN(auto pool, NewPool(std::move(options)));
    return std::make_shared<const Cache>(cache_id, std::string(tenant), spec, std::move(pool),
                                         shared_);
  }
  const CacheRecord record{
      .cache_id = cache_id,
      .tenant = std::string(tenant),
      .spec = spec,
      .sequence_slots = kSlotsPerSequence *
                        std::min(options_.max_sequences, kMaxSequenceSlots / kSlotsPerSequence),
      .heap_bytes = HeapBytes(spec.capacity_bytes)};
  const RecordTable::Shape shape = ShapeOf(record);
  ASSIGN_OR_RETURN(auto table,
                   RecordTable::Create(options_.exec, *keeper, record.table_name(), shape,
                                       ledger_.Restore(tenant, MemoryUse::kRecords, 0)));
  const std::string name = record.pool_name();
  const size_t size_bytes = size_t{shape.unit_count} << kExtentUnitShift;
  const bool strict = options.strict;
  ASSIGN_OR_RETURN(auto memory,
                   strict ? CreateMemfd(name.c_str(), size_bytes)  // KeepPool adds the last seal
                          : keeper->CreateMemory(name.c_str(), size_bytes));
  options.memory = memory.get();
  options.ledger = table;
  ASSIGN_OR_RETURN(auto pool, NewPool(std::move(options)));
  absl::Status status = KeepPool(*keeper, name, memory, strict);
  if (status.ok()) status = keeper->Keep(record.table_name(), table->descriptor());
  // Recorded after the memory is kept, so that every record has its memory.
  if (status.ok()) status = root_->AddCache(record);
  if (!status.ok()) {
    for (const std::string& each : {record.pool_name(), record.table_name()}) {
      status.Update(keeper->Release(each));
    }
    return status;
  }
  return std::make_shared<const Cache>(cache_id, std::string(tenant), spec, std::move(pool),
                                       shared_, std::move(table));
}

absl::StatusOr<std::shared_ptr<const Cache>> CacheMemory::Recover(const CacheRecord& record,
                                                                  RecoveryReport& report) {
  DescriptorKeeper& keeper = *options_.keeper;
  if (record.spec.capacity_bytes > kMinExtentBytes << kMaxExtentOrder ||
      record.heap_bytes != HeapBytes(record.spec.capacity_bytes) ||
      record.sequence_slots > kMaxSequenceSlots) {
    return DataLoss("the record of a cache has sizes that no sidecar wrote");
  }
  ASSIGN_OR_RETURN(auto table, RecordTable::Open(
                                   options_.exec, keeper.Take(record.table_name()), ShapeOf(record),
                                   ledger_.Restore(record.tenant, MemoryUse::kRecords, 0)));
  RETURN_IF_ERROR(PoolMove(keeper, record.cache_id)
                      .Run({.record = record, .table = *table, .ledger = ledger_}, report));
  const FileDescriptor memory = keeper.Take(record.pool_name());
  Mapping mapping = keeper.TakeMapping(record.pool_name());
  Pool::Options options = OptionsOf(record.spec);
  options.memory = memory.get();
  options.ledger = table;
  options.promise = ledger_.Restore(record.tenant, MemoryUse::kPool,
                                    record.spec.grows ? 0 : record.spec.capacity_bytes);
  if (!memory.valid() || SizeOf(memory) < options.capacity_bytes) {
    return DataLoss("the pool is missing or too short");
  }
  if (HasFutureWriteSeal(memory) != options.strict) {
    return DataLoss("the pool was made with another strict_memory");
  }
  if (options.strict && mapping.size_bytes() < options.capacity_bytes) {
    return DataLoss("the pool is strict, and its mapping is gone");
  }
  options.mapping = std::move(mapping);
  ASSIGN_OR_RETURN(auto pool, Pool::Create(std::move(options)));
  return std::make_shared<const Cache>(record.cache_id, record.tenant, record.spec, std::move(pool),
                                       shared_, std::move(table));
}

}  // namespace pqcached::kvstore
