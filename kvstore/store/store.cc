#include "kvstore/store/store_impl.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/checksum/verify.h"
#include "kvstore/evict/admission.h"
#include "kvstore/evict/memory_pressure.h"
#include "kvstore/index/builder.h"
#include "kvstore/limits/memory_limits.h"
#include "kvstore/model.h"
#include "kvstore/refusal.h"
#include "kvstore/rows/ingest.h"

namespace pqcached::kvstore {
namespace {

// Bounds of the interval at which expired leases are looked for.
constexpr absl::Duration kLeastLeaseInterval = absl::Milliseconds(10);
constexpr absl::Duration kMostLeaseInterval = absl::Seconds(1);

constexpr uint32_t kMaxThreads = 1024;

absl::Status CheckTokens(absl::string_view option, uint32_t tokens) {
  if (tokens == 0 || tokens > kMaxSegmentTokens || tokens % kBlockTokens != 0) {
    return InvalidArgument(option,
                           absl::StrCat(tokens, ", must be a multiple of ", kBlockTokens, " in [",
                                        kBlockTokens, ", ", kMaxSegmentTokens, "]"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const StoreOptions& options) {
  if (options.max_pool_bytes < kMinExtentBytes) {
    return InvalidArgument("max_pool_bytes", absl::StrCat(options.max_pool_bytes,
                                                          ", must be at least ", kMinExtentBytes));
  }
  if (options.max_caches == 0) return InvalidArgument("max_caches", "0");
  if (options.max_sequences == 0) return InvalidArgument("max_sequences", "0");
  if (!(options.max_retained_share >= 0 && options.max_retained_share <= 1)) {
    return InvalidArgument("max_retained_share",
                           absl::StrCat(options.max_retained_share, ", must lie in [0, 1]"));
  }
  if (options.codebook_tokens == 0) return InvalidArgument("codebook_tokens", "0");
  if (options.threads > kMaxThreads) {
    return InvalidArgument("threads",
                           absl::StrCat(options.threads, ", must be at most ", kMaxThreads));
  }
  if (!kernels::HasLevel(options.exec.level)) {
    return InvalidArgument("exec.level", "the machine lacks these instructions");
  }
  RETURN_IF_ERROR(CheckTokens("segment_tokens", options.segment_tokens));
  return CheckTokens("tail_tokens", options.tail_tokens);
}

}  // namespace

StoreImpl::StoreImpl(const StoreOptions& options, uint32_t threads,
                     std::unique_ptr<RootRecords> root)
    : options_(options),
      root_(std::move(root)),
      compute_(options.exec, threads),
      costs_(options.exec, options.cost_file),
      live_(options.on_live_index_failure),
      checksums_(options.keeper == nullptr ? nullptr : std::make_unique<Checksums>()),
      ledger_(std::make_shared<MemoryLedger>(options.memory_root)),
      request_memory_(
          options.request_memory_bytes == 0
              ? nullptr
              : ledger_->Restore("", MemoryUse::kRequests, options.request_memory_bytes)),
      cache_memory_(options_, {compute_, costs_, counters_, SegmentingOptions::Of(options)},
                    root_.get(), *ledger_),
      caches_(options_, cache_memory_,
              {.held = [this] { return HeldCaches(); },
               .drop = [this](const Caches::CachePointer& cache) { DropUnused(cache); }}),
      local_(options.max_leases, options.max_staging_bytes, options.lease_timeout, *ledger_,
             options.keeper, options.tenant_quotas, options.on_expired_leases),
      prefixes_(caches_),
      evictor_({.options = options_,
                .sequences = sequences_,
                .ranks = ranks_,
                .live = live_,
                .local = local_}),
      lifecycle_({.options = options_,
                  .memory = cache_memory_,
                  .sequences = sequences_,
                  .ranks = ranks_,
                  .prefixes = prefixes_,
                  .caches = caches_,
                  .evictor = evictor_,
                  .live = live_,
                  .checksums = checksums_.get()}) {
  if (options.memory_check_interval > absl::ZeroDuration()) {
    memory_watch_ = std::make_unique<Repeater>("pqc-memory", options.memory_check_interval,
                                               [this] { ApplyMemoryLimits(); });
  }
  if (options.lease_timeout < absl::InfiniteDuration()) {
    const absl::Duration interval =
        std::clamp(options.lease_timeout / 4, kLeastLeaseInterval, kMostLeaseInterval);
    lease_watch_ = std::make_unique<Repeater>("pqc-leases", interval,
                                              [this] { local_.ListLeases(kAllTenants); });
  }
}

StoreImpl::~StoreImpl() {
  lease_watch_.reset();
  memory_watch_.reset();
  const auto caches = caches_.All();
  for (const auto& cache : caches) cache->pool->SetReclaimer({});
  if (root_ == nullptr) return;
  live_.Stop();
  checksums_->Stop();
  // Detaches the records, so that they stay unchanged while the objects they describe are
  // destroyed.
  root_->Detach();
  for (const auto& cache : caches) {
    if (cache->records != nullptr) cache->records->Detach();
  }
}

absl::StatusOr<std::unique_ptr<Store>> Store::Create(const StoreOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  const uint32_t threads =
      options.threads > 0 ? options.threads : std::max(1u, std::thread::hardware_concurrency());
  std::unique_ptr<RootRecords> root;
  if (options.keeper != nullptr) {
    ASSIGN_OR_RETURN(auto opened, RootRecords::Open(options.exec, *options.keeper));
    root = std::move(opened);
  }
  auto store = std::make_unique<StoreImpl>(options, threads, std::move(root));
  RETURN_IF_ERROR(store->Recover());
  return store;
}

void StoreImpl::InstallReclaimer(const std::shared_ptr<const Cache>& cache) {
  cache->pool->SetReclaimer([this, weak = std::weak_ptr(cache)](std::span<const size_t> sizes) {
    const std::shared_ptr<const Cache> alive = weak.lock();
    if (alive == nullptr) return false;
    if (caches_.Grow(alive, sizes)) return true;
    const bool has_room =
        alive->pages != nullptr ? alive->pages->MakeRoom(sizes) : evictor_.MakeRoom(*alive, sizes);
    return has_room || (TakeFromRetained(alive, sizes) && caches_.Grow(alive, sizes));
  });
}

bool StoreImpl::TakeFromRetained(const Caches::CachePointer& cache,
                                 std::span<const size_t> sizes_bytes) {
  if (!cache->spec.grows) return false;
  size_t missing_bytes = cache->pool->MissingGrantBytes(sizes_bytes);
  missing_bytes -= std::min(missing_bytes, caches_.GrowableBytes(cache));
  const auto unused_bytes = [](const Cache& other) {
    const size_t granted_bytes = other.pool->granted_bytes();
    return granted_bytes - std::min(granted_bytes, other.pool->usage().used_bytes);
  };
  std::vector<Caches::CachePointer> others;
  size_t obtainable_bytes = 0;
  for (const Caches::CachePointer& other : caches_.OfTenant(cache->tenant)) {
    if (other == cache || !other->spec.grows || other->pages != nullptr) continue;
    if (other->pool->KeepsPages()) continue;  // nothing would return
    obtainable_bytes += unused_bytes(*other) + evictor_.RetainedBytes(*other);
    others.push_back(other);
  }
  if (obtainable_bytes < missing_bytes) return false;  // nothing is evicted in vain
  for (const Caches::CachePointer& other : others) {
    if (missing_bytes == 0) break;
    const size_t before_bytes = other->pool->granted_bytes();
    const size_t unused = unused_bytes(*other);
    if (missing_bytes > unused) evictor_.FreeRetained(*other, missing_bytes - unused);
    other->pool->ReturnGrant(/*at_once=*/true);
    const size_t returned_bytes = before_bytes - other->pool->granted_bytes();
    other->pool->ReturnFreePages(returned_bytes);
    missing_bytes -= std::min(missing_bytes, returned_bytes);
  }
  return missing_bytes == 0;
}

void StoreImpl::SetTenantQuotas(TenantQuotas quotas) {
  local_.SetQuotas(quotas);
  caches_.SetQuotas(std::move(quotas));
}

absl::StatusOr<OpenedCache> StoreImpl::OpenCache(std::string_view tenant, const CacheSpec& spec,
                                                 std::string_view session) {
  ASSIGN_OR_RETURN(const Caches::Opened opened, caches_.Open(tenant, spec, session));
  if (opened.is_new) InstallReclaimer(opened.cache);
  return OpenedCache{Describe(*opened.cache), opened.is_new};
}

void StoreImpl::DropUnused(const Caches::CachePointer& cache) {
  const CacheInfo info = Describe(*cache);
  const auto dropped = DropCache(cache->tenant, cache->cache_id, /*force=*/false);
  if (!dropped.ok() && caches_.FindInAnyTenant(cache->cache_id).ok()) return;
  if (options_.on_cache_evicted) options_.on_cache_evicted(cache->tenant, info);
}

absl::StatusOr<StoredSequence> StoreImpl::FindForAdmin(std::string_view tenant,
                                                       uint64_t sequence_id) const {
  return tenant == kAllTenants ? sequences_.FindInAnyTenant(sequence_id)
                               : sequences_.Find(tenant, sequence_id);
}

absl::StatusOr<Caches::CachePointer> StoreImpl::FindCacheForAdmin(std::string_view tenant,
                                                                  uint64_t cache_id) const {
  return tenant == kAllTenants ? caches_.FindInAnyTenant(cache_id) : caches_.Find(tenant, cache_id);
}

absl::StatusOr<Reading> StoreImpl::Read(std::string_view tenant, uint64_t sequence_id) const {
  ASSIGN_OR_RETURN(auto found, sequences_.Find(tenant, sequence_id));
  ASSIGN_OR_RETURN(auto snapshot, found.sequence->Read());
  return Reading{.cache = std::move(found.cache), .snapshot = std::move(snapshot)};
}

absl::StatusOr<CreatedSequence> StoreImpl::CreateSequence(std::string_view tenant,
                                                          uint64_t cache_id,
                                                          const SequenceSpec& spec) {
  ASSIGN_OR_RETURN(const auto cache, caches_.FindKind(tenant, cache_id, CacheKind::kRows));
  return lifecycle_.Create(cache, spec);
}

absl::StatusOr<CreatedSequence> StoreImpl::ForkSequence(std::string_view tenant,
                                                        uint64_t sequence_id, uint64_t token_count,
                                                        std::string_view session) {
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  return lifecycle_.Fork(found, token_count, session);
}

absl::StatusOr<Selected> StoreImpl::TopK(std::string_view tenant, uint64_t sequence_id,
                                         const Query& query, const Selection& selection) {
  ASSIGN_OR_RETURN(const auto reading, Read(tenant, sequence_id));
  return kvstore::TopK(reading, query, selection);
}

absl::StatusOr<SelectedPages> StoreImpl::TopPages(std::string_view tenant, uint64_t sequence_id,
                                                  const Query& query, const Selection& selection,
                                                  const PageTerms& terms) {
  ASSIGN_OR_RETURN(const auto reading, Read(tenant, sequence_id));
  return kvstore::TopPages(reading, query, selection, terms);
}

absl::StatusOr<Scores> StoreImpl::Score(std::string_view tenant, uint64_t sequence_id,
                                        const Query& query, const IndexDescriptor& index,
                                        TokenRange tokens) {
  ASSIGN_OR_RETURN(const auto reading, Read(tenant, sequence_id));
  return kvstore::Score(reading, query, index, tokens);
}

absl::StatusOr<Rows> StoreImpl::FetchBlocks(std::string_view tenant, uint64_t sequence_id,
                                            uint32_t layer, TokenRange tokens, RowPart part) {
  ASSIGN_OR_RETURN(const auto reading, Read(tenant, sequence_id));
  return kvstore::FetchBlocks(reading, layer, tokens, part);
}

absl::StatusOr<Rows> StoreImpl::FetchTokens(std::string_view tenant, uint64_t sequence_id,
                                            uint32_t layer, std::span<const uint32_t> positions,
                                            RowPart part) {
  ASSIGN_OR_RETURN(const auto reading, Read(tenant, sequence_id));
  return kvstore::FetchTokens(reading, layer, positions, part);
}

absl::StatusOr<Attention> StoreImpl::Attend(std::string_view tenant, uint64_t sequence_id,
                                            const Query& query, const Selection& selection,
                                            bool want_positions) {
  ASSIGN_OR_RETURN(const auto reading, Read(tenant, sequence_id));
  return kvstore::Attend(reading, query, selection, want_positions);
}

absl::StatusOr<Attention> StoreImpl::AttendPositions(std::string_view tenant, uint64_t sequence_id,
                                                     const Query& query,
                                                     std::span<const uint32_t> positions,
                                                     uint32_t count) {
  ASSIGN_OR_RETURN(const auto reading, Read(tenant, sequence_id));
  return kvstore::AttendPositions(reading, query, positions, count);
}

absl::StatusOr<Attention> StoreImpl::AttendRange(std::string_view tenant, uint64_t sequence_id,
                                                 const Query& query, TokenRange tokens,
                                                 const std::function<bool()>& is_cancelled) {
  ASSIGN_OR_RETURN(const auto reading, Read(tenant, sequence_id));
  return kvstore::AttendRange(reading, query, tokens, is_cancelled);
}

absl::StatusOr<SessionMemory> StoreImpl::OpenLocalSession(std::string_view tenant,
                                                          std::string_view session,
                                                          uint64_t boot_word) {
  return local_.Open(tenant, session, boot_word);
}

std::shared_ptr<const void> StoreImpl::AdoptStaging(std::string_view tenant, FileDescriptor ring) {
  return AdoptStagingRing(*ledger_, tenant, std::move(ring));
}

absl::StatusOr<SharedMemory> StoreImpl::OpenPool(std::string_view tenant, std::string_view session,
                                                 uint64_t cache_id) {
  ASSIGN_OR_RETURN(const auto cache, caches_.Find(tenant, cache_id));
  if (!session.empty()) RETURN_IF_ERROR(local_.NotePool(session, cache_id));
  return cache->pool->Share();
}

absl::Status StoreImpl::HoldPool(std::string_view tenant, std::string_view session,
                                 uint64_t cache_id) {
  ASSIGN_OR_RETURN(const auto cache, caches_.Find(tenant, cache_id));
  return local_.HoldPool(session, cache_id, cache->pool->HoldPages());
}

absl::StatusOr<SharedMemory> StoreImpl::OpenStaging(std::string_view tenant,
                                                    std::string_view session, uint64_t slot_bytes,
                                                    uint32_t slot_count) {
  return local_.OpenStaging(tenant, session, slot_bytes, slot_count);
}

absl::StatusOr<StagedBytes> StoreImpl::ClaimStaging(std::string_view session,
                                                    const StagingReference& reference) {
  return local_.ClaimStaging(session, reference);
}

absl::StatusOr<AttachedSequence> StoreImpl::Attach(std::string_view tenant, uint64_t sequence_id,
                                                   std::string_view session,
                                                   const LeaseState& lease) {
  ASSIGN_OR_RETURN(auto found, sequences_.Find(tenant, sequence_id));
  ASSIGN_OR_RETURN(const auto leased, found.sequence->Read());
  // Verified only once: later content is written by this process.
  RETURN_IF_ERROR(VerifyList(*found.cache, *leased->list));
  return local_.Attach(std::move(found.cache), std::move(found.sequence), session, lease);
}

absl::StatusOr<VersionedImage> StoreImpl::RefreshLease(std::string_view session,
                                                       const LeaseState& lease) {
  return local_.Refresh(session, lease);
}

absl::Status StoreImpl::Detach(std::string_view session, uint64_t lease_id) {
  return local_.Detach(session, lease_id);
}

std::vector<LeaseInfo> StoreImpl::ListLeases(std::string_view tenant) {
  return local_.ListLeases(tenant);
}

absl::StatusOr<uint64_t> StoreImpl::MatchPrefix(std::string_view tenant, uint64_t cache_id,
                                                const TokenNames& names,
                                                std::string_view extra_key) {
  ASSIGN_OR_RETURN(const auto cache, caches_.FindKind(tenant, cache_id, CacheKind::kRows));
  RETURN_IF_ERROR(CheckPrefix(names, extra_key));
  return prefixes_.Match(cache, NameView(names), extra_key);
}

absl::StatusOr<std::vector<PrefixKey>> StoreImpl::PrefixKeys(std::string_view tenant,
                                                             uint64_t cache_id,
                                                             const TokenNames& names,
                                                             std::string_view extra_key) const {
  ASSIGN_OR_RETURN(const auto cache, caches_.FindKind(tenant, cache_id, CacheKind::kRows));
  RETURN_IF_ERROR(CheckPrefix(names, extra_key));
  return ChainOf(PrefixRoot(cache->tenant, cache->spec, extra_key), NameView(names));
}

absl::StatusOr<bool> StoreImpl::HasEvents(std::string_view tenant, uint64_t cache_id,
                                          const EventPosition& position) const {
  ASSIGN_OR_RETURN(const auto cache, caches_.FindKind(tenant, cache_id, CacheKind::kRows));
  return cache->prefixes->HasEvents(position);
}

absl::StatusOr<std::vector<CacheEvent>> StoreImpl::ReadEvents(std::string_view tenant,
                                                              uint64_t cache_id,
                                                              EventPosition& position,
                                                              size_t most) {
  ASSIGN_OR_RETURN(const auto cache, caches_.Find(tenant, cache_id));
  return cache->prefixes->ReadEvents(position, most, options_.event_log_events);
}

absl::Status StoreImpl::NameTokens(std::string_view tenant, uint64_t sequence_id,
                                   uint64_t first_position, const TokenNames& names) {
  RETURN_IF_ERROR(CheckOneKind(names));
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  if (const auto running = found.sequence->Read(); !running.ok()) return running.status();
  return found.names->Name(first_position, NameView(names));
}

absl::Status StoreImpl::CheckNames(std::string_view tenant, uint64_t sequence_id,
                                   uint64_t first_position, const TokenNames& names) const {
  RETURN_IF_ERROR(CheckOneKind(names));
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  if (const auto running = found.sequence->Read(); !running.ok()) return running.status();
  return found.names->Check(first_position, NameView(names));
}

absl::StatusOr<uint64_t> StoreImpl::SuspendSequence(std::string_view tenant, uint64_t sequence_id) {
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  return found.sequence->Suspend(true);
}

absl::StatusOr<uint64_t> StoreImpl::ResumeSequence(std::string_view tenant, uint64_t sequence_id) {
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  return found.sequence->Suspend(false);
}

absl::Status StoreImpl::DropSequence(std::string_view tenant, uint64_t sequence_id) {
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  lifecycle_.End(found);
  return absl::OkStatus();
}

uint32_t StoreImpl::DropSession(std::string_view session) {
  local_.Drop(session);  // first, so that the session's client discards results
  if (session.empty()) return 0;
  const std::vector<StoredSequence> dropped = sequences_.OfSession(session);
  for (const StoredSequence& found : dropped) lifecycle_.End(found);
  caches_.Leave(session);
  if (root_ != nullptr) root_->ForgetSession(session);
  return static_cast<uint32_t>(dropped.size());
}

absl::StatusOr<uint64_t> StoreImpl::TruncateSequence(std::string_view tenant, uint64_t sequence_id,
                                                     uint64_t token_count, uint64_t own_lease) {
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  ASSIGN_OR_RETURN(auto lease, WriteLease::Acquire(found.sequence));
  return TruncateRows(std::move(lease), token_count, own_lease);
}

absl::StatusOr<std::unique_ptr<IngestTransaction>> StoreImpl::BeginIngest(std::string_view tenant,
                                                                          uint64_t sequence_id) {
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  ASSIGN_OR_RETURN(auto lease, WriteLease::Acquire(found.sequence));
  const AnnouncedEnd announced = found.names == nullptr ? AnnouncedEnd{} : found.names->named_end();
  return kvstore::BeginIngest(found.cache, std::move(lease), HasLiveIndex(sequence_id), announced);
}

absl::StatusOr<uint64_t> StoreImpl::Append(std::string_view tenant, uint64_t sequence_id,
                                           uint64_t first_position,
                                           std::span<const LayerRows> layers) {
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  ASSIGN_OR_RETURN(auto lease, WriteLease::Acquire(found.sequence));
  return AppendRows(found.cache, std::move(lease), HasLiveIndex(sequence_id), first_position,
                    layers);
}

absl::Status StoreImpl::ClosePrefill(std::string_view tenant, uint64_t sequence_id) {
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  return CloseSequencePrefill(*found.cache, live_, found.sequence);
}

absl::Status StoreImpl::BuildIndex(std::string_view tenant, uint64_t sequence_id,
                                   const BuildSpec& spec,
                                   const std::function<bool(const BuildProgress&)>& progress) {
  ASSIGN_OR_RETURN(const auto found, sequences_.Find(tenant, sequence_id));
  const Hold hold(*found.sequence);  // held longer than the write lease
  RETURN_IF_ERROR(CheckRebuildDue(*found.cache, *found.sequence, spec));
  ASSIGN_OR_RETURN(auto lease, WriteLease::Acquire(found.sequence));
  return BuildSequenceIndex(*found.cache, live_, std::move(lease), spec, progress);
}

absl::Status StoreImpl::PinSequence(std::string_view tenant, uint64_t sequence_id,
                                    absl::Duration ttl) {
  if (ttl < absl::ZeroDuration() || ttl > kMaxPin) {
    return InvalidArgument("ttl", absl::StrCat(absl::ToDoubleSeconds(ttl), " s, must lie in [0, ",
                                               absl::ToDoubleSeconds(kMaxPin), "]"));
  }
  ASSIGN_OR_RETURN(const auto found, FindForAdmin(tenant, sequence_id));
  const int64_t until =
      ttl > absl::ZeroDuration() ? BootNanos() + absl::ToInt64Nanoseconds(ttl) : 0;
  RETURN_IF_ERROR(found.sequence->PinUntil(until));
  if (found.sequence->holds().claimed()) {
    return NotFound("sequence_id", absl::StrCat("sequence ", sequence_id, " was evicted"));
  }
  std::vector<std::shared_ptr<Sequence>> others =
      ranks_.MembersOf(*found.cache, found.sequence).alive;
  others.erase(others.begin());  // the sequence itself
  for (const StoredSequence& other : evictor_.RankCounterparts(*found.cache, *found.names, 0)) {
    others.push_back(other.sequence);
  }
  for (const auto& other : others) {
    if (absl::Status status = other->PinUntil(until); !status.ok() && !absl::IsNotFound(status)) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Admission> StoreImpl::Admit(std::string_view tenant, uint64_t cache_id,
                                           const AdmitSpec& spec) {
  ASSIGN_OR_RETURN(const auto cache, caches_.FindKind(tenant, cache_id, CacheKind::kRows));
  return kvstore::Admit(*cache, spec, evictor_, caches_.GrowableBytes(cache));
}

absl::Status StoreImpl::EvictSequence(std::string_view tenant, uint64_t sequence_id) {
  ASSIGN_OR_RETURN(const auto found, FindForAdmin(tenant, sequence_id));
  return evictor_.Evict(found);
}

void StoreImpl::ApplyMemoryLimits() {
  kvstore::ApplyMemoryLimits(ReadMemoryLimits(options_.memory_root), caches_.All(), evictor_);
}

bool StoreImpl::WaitIdle(SteadyTime deadline) {
  return live_.WaitIdle(deadline) && (checksums_ == nullptr || checksums_->WaitIdle(deadline));
}

}  // namespace pqcached::kvstore
