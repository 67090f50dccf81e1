// Store's calls that recover state of an earlier process, and record state for the next one.
#include <algorithm>
#include <string>
#include <utility>

#include "kvstore/checksums.h"
#include "kvstore/clock.h"
#include "kvstore/live_index.h"
#include "kvstore/recovery.h"
#include "kvstore/refusal.h"
#include "kvstore/store_impl.h"

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

absl::Status KeepPool(DescriptorKeeper& keeper, const std::string& name,
                      const FileDescriptor& memory, bool strict) {
  if (!strict) return keeper.Keep(name, memory.get());
  absl::Status status = keeper.KeepMapped(name, memory.get());
  if (!status.ok()) return status;
  return SealMemfd(memory, WriteSeal::kFutureWrite);
}

}  // namespace

absl::Status StoreImpl::Open() {
  DescriptorKeeper* keeper = engine_->options.keeper;
  if (keeper == nullptr) return absl::OkStatus();
  const SteadyTime began = SteadyTime::Now();
  auto root = RootRecords::Open(engine_->options.exec, *keeper);
  if (!root.ok()) return root.status();
  root_ = *std::move(root);
  recovery_.recovered = root_->recovered();
  recovery_.dropped_records = root_->dropped_records();
  for (const CacheRecord& record : root_->caches()) {
    absl::Status status = RecoverCache(record);
    if (status.ok()) continue;
    if (!absl::IsDataLoss(status)) return status;  // the next attempt may succeed
    ++recovery_.dropped_records;
    root_->RemoveCache(record.cache_id);
    for (const std::string& name : {record.pool_name(), record.table_name()}) {
      if (absl::Status released = keeper->Release(name); !released.ok()) return released;
    }
  }
  recovery_.seconds = absl::ToDoubleSeconds(SteadyTime::Now() - began);
  return absl::OkStatus();
}

absl::Status StoreImpl::RecoverCache(const CacheRecord& record) {
  DescriptorKeeper& keeper = *engine_->options.keeper;
  if (record.spec.capacity_bytes > kMinExtentBytes << kMaxExtentOrder ||
      record.heap_bytes != HeapBytes(record.spec.capacity_bytes) ||
      record.sequence_slots > kMaxSequenceSlots) {
    return DataLoss("the record of a cache has sizes that no sidecar wrote");
  }
  auto table =
      RecordTable::Open(engine_->options.exec, keeper.Take(record.table_name()), ShapeOf(record));
  if (!table.ok()) return table.status();
  const FileDescriptor memory = keeper.Take(record.pool_name());
  Mapping mapping = keeper.TakeMapping(record.pool_name());
  Pool::Options options = PoolOptions(record.spec.capacity_bytes);
  options.memory = memory.get();
  options.ledger = *table;
  options.quota_bytes = record.spec.quota_bytes;
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
  auto pool = Pool::Create(std::move(options));
  if (!pool.ok()) return pool.status();
  auto cache = std::make_shared<const Cache>(record.cache_id, record.tenant, record.spec,
                                             *std::move(pool), engine_.get(), *table);
  RecoveredCache recovered = RecoverSequences(*cache);
  const PoolUsage usage = cache->pool->usage();
  ++recovery_.caches;
  recovery_.sequences += static_cast<uint32_t>(recovered.sequences.size());
  recovery_.segments += recovered.segments;
  recovery_.dropped_records += recovered.dropped_records;
  recovery_.bytes += usage.used_bytes - usage.quarantined_bytes;
  recovery_.quarantined_bytes += usage.quarantined_bytes;
  engine_->next_segment_id = std::max(engine_->next_segment_id.load(), (*table)->next_segment_id());
  {
    const MutexLock lock(&mutex_);
    caches_.emplace(record.cache_id, cache);
    for (const RecoveredSequence& found : recovered.sequences) {
      root_->MarkIdUsed(found.identity.sequence_id);
      ++sequence_counts_[record.cache_id];
      sequences_.emplace(found.identity.sequence_id, Found{cache, found.sequence, found.names});
    }
  }
  for (const RecoveredSequence& found : recovered.sequences) {
    if (!found.identity.group_key.empty()) rank_sequences_.Restore(*cache, found.sequence);
  }
  InstallReclaimer(cache);
  for (const RecoveredSequence& found : recovered.sequences) {
    engine_->checksums->Add(cache, found.sequence);
    if (!found.identity.live_index.has_value()) continue;
    absl::Status status = engine_->live->Add(cache, found.sequence, *found.identity.live_index);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

Pool::Options StoreImpl::PoolOptions(size_t capacity_bytes) const {
  return {.capacity_bytes = capacity_bytes,
          .touch_threads = std::max(1u, engine_->serving.worker_count() / 2),
          .strict = engine_->options.strict_memory};
}

uint64_t StoreImpl::NewId() { return root_ != nullptr ? root_->NewId() : next_id_++; }

absl::StatusOr<std::shared_ptr<const Cache>> StoreImpl::MakeMemory(std::string_view tenant,
                                                                   const CacheSpec& spec) {
  Pool::Options options = PoolOptions(spec.capacity_bytes);
  options.quota_bytes = spec.quota_bytes;
  if (spec.capacity_bytes > kMinExtentBytes << kMaxExtentOrder) {
    return Pool::Create(std::move(options)).status();  // fails with the limit in the message
  }
  const uint64_t cache_id = NewId();
  DescriptorKeeper* keeper = engine_->options.keeper;
  // A strict pool cannot be mapped for writing again, so it is kept only by keepers that keep
  // mappings.
  if (keeper == nullptr || (options.strict && !keeper->supports_mappings())) {
    auto pool = Pool::Create(std::move(options));
    if (!pool.ok()) return pool.status();
    return std::make_shared<const Cache>(cache_id, std::string(tenant), spec, *std::move(pool),
                                         engine_.get());
  }
  const CacheRecord record{
      .cache_id = cache_id,
      .tenant = std::string(tenant),
      .spec = spec,
      .sequence_slots = kSlotsPerSequence * std::min(engine_->options.max_sequences,
                                                     kMaxSequenceSlots / kSlotsPerSequence),
      .heap_bytes = HeapBytes(spec.capacity_bytes)};
  const RecordTable::Shape shape = ShapeOf(record);
  auto table = RecordTable::Create(engine_->options.exec, *keeper, record.table_name(), shape);
  if (!table.ok()) return table.status();
  const std::string name = record.pool_name();
  const size_t size_bytes = size_t{shape.unit_count} << kExtentUnitShift;
  const bool strict = options.strict;
  auto memory = strict ? CreateMemfd(name.c_str(), size_bytes)  // KeepPool adds the last seal
                       : keeper->CreateMemory(name.c_str(), size_bytes);
  if (!memory.ok()) return memory.status();
  options.memory = memory->get();
  options.ledger = *table;
  auto pool = Pool::Create(std::move(options));
  if (!pool.ok()) return pool.status();
  absl::Status status = KeepPool(*keeper, name, *memory, strict);
  if (status.ok()) status = keeper->Keep(record.table_name(), (*table)->descriptor());
  // Recorded after the memory is kept, so that every record has its memory.
  if (status.ok()) status = root_->AddCache(record);
  if (!status.ok()) {
    for (const std::string& each : {record.pool_name(), record.table_name()}) {
      status.Update(keeper->Release(each));
    }
    return status;
  }
  return std::make_shared<const Cache>(cache_id, std::string(tenant), spec, *std::move(pool),
                                       engine_.get(), *std::move(table));
}

// Detaches the records, so that they stay unchanged while the objects they describe are destroyed.
StoreImpl::~StoreImpl() {
  RemoveReclaimers();
  if (root_ == nullptr) return;
  engine_->live->Stop();
  engine_->checksums->Stop();
  root_->Detach();
  for (const auto& cache : AllCaches()) {
    if (cache->records != nullptr) cache->records->Detach();
  }
}

std::vector<std::shared_ptr<const Cache>> StoreImpl::AllCaches() const {
  std::vector<std::shared_ptr<const Cache>> caches;
  const MutexLock lock(&mutex_);
  for (const auto& [id, cache] : caches_) caches.push_back(cache);
  return caches;
}

RecoveryReport StoreImpl::Recovery() const { return recovery_; }

absl::Status StoreImpl::KeepSession(const KeptSession& session) {
  return root_ == nullptr ? absl::OkStatus() : root_->KeepSession(session);
}

std::vector<KeptSession> StoreImpl::KeptSessions() const {
  return root_ == nullptr ? std::vector<KeptSession>{} : root_->KeptSessions();
}

void StoreImpl::EndQuarantine() {
  for (const auto& cache : AllCaches()) cache->pool->EndQuarantine();
}

}  // namespace pqcached::kvstore
