#include "kvstore/records/root_records.h"

#include <algorithm>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/read/layout.h"
#include "kvstore/records/cache_image.h"
#include "kvstore/records/record_bytes.h"
#include "kvstore/records/record_table.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

constexpr uint64_t kRootMagic = 0x3252'4443'4351'5051;
constexpr uint64_t kUnversionedMagic = 0x3152'4443'4351'5051;  // its header ends with session_end
constexpr uint64_t kUnversioned = 1;                           // layout_version and record_version
constexpr uint64_t kVersions = uint64_t{kRecordVersion} << 32 | kLayoutVersion;
constexpr size_t kRootHeaderBytes = 4096;
constexpr uint32_t kCacheSlots = 256;
constexpr size_t kCacheSlotBytes = size_t{16} << 10;
constexpr uint32_t kSessionSlots = 4096;
constexpr size_t kSessionSlotBytes = 1024;
constexpr size_t kRootChunkBytes = size_t{64} << 10;  // pages are allocated in steps of this size
constexpr size_t kRootBytes =
    kRootHeaderBytes + kCacheSlots * kCacheSlotBytes + kSessionSlots * kSessionSlotBytes;
enum Kind : uint32_t { kCacheKind = 1, kSessionKind = 2 };

std::vector<std::byte> Encode(const KeptSession& session) {
  std::vector<std::byte> bytes(kSessionSlotBytes);
  RecordWriter writer(bytes);
  for (const std::string* text :
       {&session.id, &session.tenant, &session.client_name, &session.token}) {
    writer.AddText(*text);
  }
  bytes.resize(writer.ok() ? writer.size_bytes() : kSessionSlotBytes);
  return bytes;
}

}  // namespace

struct RootRecords::Header {
  std::atomic<uint64_t> magic;
  DurableCounter next_id;
  DurableCounter cache_end;    // slots from this one on were never used
  DurableCounter session_end;  // same for sessions
  DurableCounter versions;     // record_version << 32 | layout_version
};

namespace {

// Refuses memory that a process with other structs wrote, except for extents that this one reads as
// well; Read then writes its own versions. Versions that have rotted are not
// compared: the records below them have checksums.
absl::Status CheckVersions(uint64_t versions) {
  const auto layout_version = static_cast<uint32_t>(versions);
  const auto record_version = static_cast<uint32_t>(versions >> 32);
  if (ReadsExtent(layout_version) && record_version == kRecordVersion) return absl::OkStatus();
  return FailedPrecondition(
      "", absl::StrCat(
              "the kept pools and records have layout_version ", layout_version,
              " and record_version ", record_version, "; this sidecar reads layout_version ",
              kLayoutVersion, " and record_version ", kRecordVersion,
              "; nothing was changed: start the earlier sidecar again, or remove what it keeps "
              "(the files of pool_directory, or the descriptors by stopping the service)"));
}

}  // namespace

std::string CacheRecord::pool_name() const { return absl::StrCat("pool-", cache_id); }
std::string CacheRecord::table_name() const { return absl::StrCat("records-", cache_id); }
std::string CacheRecord::move_plan_name() const { return absl::StrCat("move-", cache_id); }
std::string CacheRecord::moved_pool_name() const { return absl::StrCat("moved-", cache_id); }

std::vector<std::string> CacheRecord::names() const {
  return {pool_name(), table_name(), move_plan_name(), moved_pool_name()};
}

absl::StatusOr<Mapping> RootRecords::MapKept(DescriptorKeeper& keeper) {
  const FileDescriptor kept = keeper.Take(kMemoryName);
  if (!kept.valid()) return Mapping();
  if (const size_t kept_bytes = std::min(SizeOf(kept), kRootBytes);
      kept_bytes >= kRootHeaderBytes) {
    auto memory = Mapping::Map(kept, kept_bytes, Mapping::Access::kReadWrite);
    if (!memory.ok()) return memory.status();
    const auto& header = *reinterpret_cast<const Header*>(memory->data());
    const uint64_t magic = header.magic.load(std::memory_order_acquire);
    if (magic == kUnversionedMagic) return CheckVersions(kUnversioned << 32 | kUnversioned);
    if (magic == kRootMagic) {
      const std::optional<uint64_t> versions = header.versions.ReadExact();
      RETURN_IF_ERROR(CheckVersions(versions.value_or(kVersions)));
      if (kept_bytes == kRootBytes) return memory;
    }
  }
  RETURN_IF_ERROR(keeper.Release(kMemoryName));
  return Mapping();
}

absl::StatusOr<Mapping> RootRecords::Make(DescriptorKeeper& keeper) {
  ASSIGN_OR_RETURN(auto created, keeper.CreateMemory(kMemoryName, kRootBytes));
  auto memory = Mapping::Map(created, kRootBytes, Mapping::Access::kReadWrite);
  if (!memory.ok()) return memory.status();
  RETURN_IF_ERROR(AllocatePages({memory->data(), kRootHeaderBytes}, kMemoryName));
  auto* header = new (memory->data()) Header{};
  header->next_id.Reset(0);
  header->cache_end.Reset(0);
  header->session_end.Reset(0);
  header->versions.Reset(kVersions);
  StoreInOrder(header->magic, kRootMagic);
  RETURN_IF_ERROR(keeper.Keep(kMemoryName, created.get()));
  return memory;
}

absl::StatusOr<std::unique_ptr<RootRecords>> RootRecords::Open(const kernels::Exec& exec,
                                                               DescriptorKeeper& keeper) {
  auto memory = MapKept(keeper);
  if (!memory.ok()) return memory.status();
  const bool recovered = memory->data() != nullptr;
  if (!recovered) memory = Make(keeper);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<RootRecords> root(new RootRecords(exec, *std::move(memory)));
  root->recovered_ = recovered;
  root->Read();
  std::set<std::string> named;
  for (const CacheRecord& cache : root->caches_) {
    for (std::string& name : cache.names()) named.insert(std::move(name));
  }
  for (const std::string& name : keeper.Names()) {
    const bool ours = name.starts_with("pool-") || name.starts_with("records-") ||
                      name.starts_with("move-") || name.starts_with("moved-");
    // An unnamed pool or table was created by a process that was killed before it recorded the
    // cache.
    if (!ours || named.contains(name)) continue;
    RETURN_IF_ERROR(keeper.Release(name));
  }
  return root;
}

RootRecords::RootRecords(const kernels::Exec& exec, Mapping memory)
    : memory_(std::move(memory)),
      granted_(-1, {memory_.data(), memory_.size_bytes()}, kRootChunkBytes, /*promise=*/nullptr),
      cache_slots_(exec, {memory_.data() + kRootHeaderBytes, kCacheSlots * kCacheSlotBytes},
                   kCacheSlotBytes, kCacheKind),
      session_slots_(exec,
                     {memory_.data() + kRootHeaderBytes + kCacheSlots * kCacheSlotBytes,
                      kSessionSlots * kSessionSlotBytes},
                     kSessionSlotBytes, kSessionKind),
      free_caches_(kCacheSlots),
      free_sessions_(kSessionSlots) {}

void RootRecords::Read() {
  const MutexLock lock(&mutex_);
  next_id_ = std::max<uint64_t>(1, header().next_id.Read().value_or(kAfterAllIds));
  header().next_id.Reset(next_id_);  // repairs it if it was corrupt
  header().versions.Reset(kVersions);
  ReadCaches();
  ReadSessions();
}

void RootRecords::ReadCaches() {
  const uint64_t end =
      std::min<uint64_t>(header().cache_end.Read().value_or(kCacheSlots), kCacheSlots);
  free_caches_.StartWithTaken(static_cast<uint32_t>(end));
  for (uint32_t slot = 0; slot < end; ++slot) {
    const SlotArray::Content content = cache_slots_.Read(slot);
    CacheRecord cache;
    RecordReader reader(content.bytes);
    cache.cache_id = reader.Get<uint64_t>();
    cache.tenant = reader.GetText();
    cache.sequence_slots = reader.Get<uint32_t>();
    cache.heap_bytes = reader.Get<uint64_t>();
    auto spec = ReadSpec(reader);
    const bool good = content.state == SlotArray::State::kFull && spec.has_value() &&
                      reader.done() && !slot_of_cache_.contains(cache.cache_id);
    if (good) {
      cache.spec = *std::move(spec);
      next_id_ = std::max(next_id_, cache.cache_id + 1);
      slot_of_cache_.emplace(cache.cache_id, slot);
      caches_.push_back(std::move(cache));
      continue;
    }
    if (content.state != SlotArray::State::kEmpty) ++dropped_records_;
    cache_slots_.Clear(slot);
    free_caches_.Give(slot);
  }
}

void RootRecords::ReadSessions() {
  const uint64_t end =
      std::min<uint64_t>(header().session_end.Read().value_or(kSessionSlots), kSessionSlots);
  free_sessions_.StartWithTaken(static_cast<uint32_t>(end));
  for (uint32_t slot = 0; slot < end; ++slot) {
    const SlotArray::Content content = session_slots_.Read(slot);
    RecordReader reader(content.bytes);
    Session found{.slot = slot, .earlier = true, .session = {}};
    for (std::string* text : {&found.session.id, &found.session.tenant, &found.session.client_name,
                              &found.session.token}) {
      *text = reader.GetText();
    }
    const std::string id = found.session.id;
    const bool good = content.state == SlotArray::State::kFull && reader.done();
    if (good && sessions_.emplace(id, std::move(found)).second) continue;
    if (content.state != SlotArray::State::kEmpty) ++dropped_records_;
    session_slots_.Clear(slot);
    free_sessions_.Give(slot);
  }
}

uint64_t RootRecords::NewId() {
  const MutexLock lock(&mutex_);
  const uint64_t id = next_id_++;
  if (!detached_) header().next_id.RaiseTo(next_id_);
  return id;
}

void RootRecords::MarkIdUsed(uint64_t id) {
  const MutexLock lock(&mutex_);
  next_id_ = std::max(next_id_, id + 1);
  header().next_id.RaiseTo(next_id_);
}

absl::Status RootRecords::MakePresent(std::span<const std::byte> slot) {
  return granted_.Ensure(static_cast<size_t>(slot.data() - memory_.data()), slot.size());
}

absl::Status RootRecords::AddCache(const CacheRecord& cache) {
  const MutexLock lock(&mutex_);
  if (detached_) return absl::OkStatus();
  const auto slot = free_caches_.Take();
  if (!slot.has_value()) {
    return ResourceExhausted(
        "max_caches", absl::StrCat("at most ", kCacheSlots, " caches are kept"), kRetryMemory);
  }
  if (absl::Status status = MakePresent(cache_slots_.slot(*slot)); !status.ok()) {
    free_caches_.Give(*slot);
    return status;
  }
  header().cache_end.RaiseTo(free_caches_.end());
  RecordWriter writer(cache_slots_.Open(*slot));
  writer.Add(cache.cache_id);
  writer.AddText(cache.tenant);
  writer.Add(cache.sequence_slots);
  writer.Add(cache.heap_bytes);
  WriteSpec(cache.spec, writer);
  if (!writer.ok()) {
    free_caches_.Give(*slot);
    return ResourceExhausted("", "the description of the cache is too long to be recorded",
                             kNoRetry);
  }
  cache_slots_.Commit(*slot, writer.size_bytes());
  slot_of_cache_[cache.cache_id] = *slot;
  return absl::OkStatus();
}

void RootRecords::RemoveCache(uint64_t cache_id) {
  const MutexLock lock(&mutex_);
  const auto it = slot_of_cache_.find(cache_id);
  if (detached_ || it == slot_of_cache_.end()) return;
  cache_slots_.Clear(it->second);
  free_caches_.Give(it->second);
  slot_of_cache_.erase(it);
}

absl::Status RootRecords::KeepSession(const KeptSession& session) {
  const std::vector<std::byte> bytes = Encode(session);
  const MutexLock lock(&mutex_);
  if (detached_) return Unavailable("", "the store is shutting down", kNoRetry);
  if (bytes.size() > session_slots_.content_bytes()) {
    return InvalidArgument("session",
                           absl::StrCat("more than ", session_slots_.content_bytes() - 16,
                                        " bytes of id, tenant, name and token"));
  }
  const auto known = sessions_.find(session.id);
  if (known != sessions_.end()) {
    return AlreadyExists("session", absl::StrCat(session.id, " is kept already"));
  }
  const auto slot = free_sessions_.Take();
  if (!slot.has_value()) {
    return ResourceExhausted("max_sessions",
                             absl::StrCat("at most ", kSessionSlots, " sessions are kept"),
                             kRetryMemory);
  }
  if (absl::Status status = MakePresent(session_slots_.slot(*slot)); !status.ok()) {
    free_sessions_.Give(*slot);
    return status;
  }
  header().session_end.RaiseTo(free_sessions_.end());
  session_slots_.Put(*slot, bytes);
  sessions_.emplace(session.id, Session{.slot = *slot, .earlier = false, .session = session});
  return absl::OkStatus();
}

void RootRecords::ForgetSession(std::string_view id) {
  const MutexLock lock(&mutex_);
  const auto it = sessions_.find(id);
  if (detached_ || it == sessions_.end()) return;
  session_slots_.Clear(it->second.slot);
  free_sessions_.Give(it->second.slot);
  sessions_.erase(it);
}

std::vector<KeptSession> RootRecords::KeptSessions() const {
  std::vector<KeptSession> kept;
  const MutexLock lock(&mutex_);
  for (const auto& [id, session] : sessions_) {
    if (session.earlier) kept.push_back(session.session);
  }
  return kept;
}

void RootRecords::Detach() {
  const MutexLock lock(&mutex_);
  detached_ = true;
}

}  // namespace pqcached::kvstore
