// StoreImpl implements Store: it owns the store's parts and forwards each call to the part that
// does the work. caches.h: the open caches; sequence/stored_sequences.h: their sequences;
// lifecycle.h: creates and ends sequences; evict/: eviction, admission and memory pressure;
// share/local_sessions.h: local access. store.cc: checks, reads and changes; images.cc: segment
// images; store_pages.cc: page caches; store_reports.cc: descriptions and statistics;
// store_recovery.cc: recovery and kept state.
//
// Thread-safe. It has no lock: each part has its own.
#ifndef PQCACHED_KVSTORE_STORE_STORE_IMPL_H_
#define PQCACHED_KVSTORE_STORE_STORE_IMPL_H_

#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "kvstore/checksum/checksums.h"
#include "kvstore/evict/evictor.h"
#include "kvstore/index/cost_model.h"
#include "kvstore/index/live_index.h"
#include "kvstore/limits/repeater.h"
#include "kvstore/records/root_records.h"
#include "kvstore/rows/snapshot_reads.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/stored_sequences.h"
#include "kvstore/share/local_sessions.h"
#include "kvstore/share/rank_sequences.h"
#include "kvstore/store.h"
#include "kvstore/store/cache_memory.h"
#include "kvstore/store/caches.h"
#include "kvstore/store/lifecycle.h"
#include "kvstore/store/prefix_sharing.h"

namespace pqcached::kvstore {

class StoreImpl final : public Store {
 public:
  // `root`: null without a keeper.
  StoreImpl(const StoreOptions& options, uint32_t threads, std::unique_ptr<RootRecords> root);
  ~StoreImpl() override;

  // Recovers what the root records name; called once, before all other calls.
  absl::Status Recover();

  using Store::OpenCache;
  absl::StatusOr<OpenedCache> OpenCache(std::string_view tenant, const CacheSpec& spec,
                                        std::string_view session) override;
  absl::StatusOr<CreatedSequence> CreateSequence(std::string_view tenant, uint64_t cache_id,
                                                 const SequenceSpec& spec) override;
  absl::StatusOr<CreatedSequence> ForkSequence(std::string_view tenant, uint64_t sequence_id,
                                               uint64_t token_count,
                                               std::string_view session) override;
  absl::StatusOr<uint64_t> MatchPrefix(std::string_view tenant, uint64_t cache_id,
                                       const TokenNames& names,
                                       std::string_view extra_key) override;
  absl::StatusOr<std::vector<PrefixKey>> PrefixKeys(std::string_view tenant, uint64_t cache_id,
                                                    const TokenNames& names,
                                                    std::string_view extra_key) const override;
  absl::StatusOr<bool> HasEvents(std::string_view tenant, uint64_t cache_id,
                                 const EventPosition& position) const override;
  absl::StatusOr<std::vector<CacheEvent>> ReadEvents(std::string_view tenant, uint64_t cache_id,
                                                     EventPosition& position, size_t most) override;
  absl::Status NameTokens(std::string_view tenant, uint64_t sequence_id, uint64_t first_position,
                          const TokenNames& names) override;
  absl::Status CheckNames(std::string_view tenant, uint64_t sequence_id, uint64_t first_position,
                          const TokenNames& names) const override;
  absl::StatusOr<uint64_t> SuspendSequence(std::string_view tenant, uint64_t sequence_id) override;
  absl::StatusOr<uint64_t> ResumeSequence(std::string_view tenant, uint64_t sequence_id) override;
  absl::Status DropSequence(std::string_view tenant, uint64_t sequence_id) override;
  uint32_t DropSession(std::string_view session) override;
  absl::StatusOr<uint64_t> TruncateSequence(std::string_view tenant, uint64_t sequence_id,
                                            uint64_t token_count, uint64_t own_lease) override;
  absl::StatusOr<std::unique_ptr<IngestTransaction>> BeginIngest(std::string_view tenant,
                                                                 uint64_t sequence_id) override;
  absl::StatusOr<uint64_t> Append(std::string_view tenant, uint64_t sequence_id,
                                  uint64_t first_position,
                                  std::span<const LayerRows> layers) override;
  absl::Status ClosePrefill(std::string_view tenant, uint64_t sequence_id) override;
  absl::Status BuildIndex(std::string_view tenant, uint64_t sequence_id, const BuildSpec& spec,
                          const std::function<bool(const BuildProgress&)>& progress) override;
  absl::StatusOr<Selected> TopK(std::string_view tenant, uint64_t sequence_id, const Query& query,
                                const Selection& selection) override;
  absl::StatusOr<SelectedPages> TopPages(std::string_view tenant, uint64_t sequence_id,
                                         const Query& query, const Selection& selection,
                                         const PageTerms& terms) override;
  absl::StatusOr<Scores> Score(std::string_view tenant, uint64_t sequence_id, const Query& query,
                               const IndexDescriptor& index, TokenRange tokens) override;
  absl::StatusOr<Rows> FetchBlocks(std::string_view tenant, uint64_t sequence_id, uint32_t layer,
                                   TokenRange tokens, RowPart part) override;
  absl::StatusOr<Rows> FetchTokens(std::string_view tenant, uint64_t sequence_id, uint32_t layer,
                                   std::span<const uint32_t> positions, RowPart part) override;
  absl::StatusOr<Attention> Attend(std::string_view tenant, uint64_t sequence_id,
                                   const Query& query, const Selection& selection,
                                   bool want_positions) override;
  absl::StatusOr<Attention> AttendPositions(std::string_view tenant, uint64_t sequence_id,
                                            const Query& query, std::span<const uint32_t> positions,
                                            uint32_t count) override;
  absl::StatusOr<Attention> AttendRange(std::string_view tenant, uint64_t sequence_id,
                                        const Query& query, TokenRange tokens,
                                        const std::function<bool()>& is_cancelled) override;
  absl::StatusOr<SessionMemory> OpenLocalSession(std::string_view tenant, std::string_view session,
                                                 uint64_t boot_word) override;
  std::shared_ptr<const void> AdoptStaging(std::string_view tenant, FileDescriptor ring) override;
  absl::StatusOr<SharedMemory> OpenPool(std::string_view tenant, std::string_view session,
                                        uint64_t cache_id) override;
  absl::Status HoldPool(std::string_view tenant, std::string_view session,
                        uint64_t cache_id) override;
  absl::StatusOr<SharedMemory> OpenStaging(std::string_view tenant, std::string_view session,
                                           uint64_t slot_bytes, uint32_t slot_count) override;
  absl::StatusOr<StagedBytes> ClaimStaging(std::string_view session,
                                           const StagingReference& reference) override;
  absl::StatusOr<AttachedSequence> Attach(std::string_view tenant, uint64_t sequence_id,
                                          std::string_view session,
                                          const LeaseState& lease) override;
  absl::StatusOr<VersionedImage> RefreshLease(std::string_view session,
                                              const LeaseState& lease) override;
  absl::Status Detach(std::string_view session, uint64_t lease_id) override;
  std::vector<LeaseInfo> ListLeases(std::string_view tenant) override;
  StoreStats Stats(std::string_view tenant) override;
  absl::StatusOr<Admission> Admit(std::string_view tenant, uint64_t cache_id,
                                  const AdmitSpec& spec) override;
  absl::Status PinSequence(std::string_view tenant, uint64_t sequence_id,
                           absl::Duration ttl) override;
  absl::Status EvictSequence(std::string_view tenant, uint64_t sequence_id) override;
  void SetTenantQuotas(TenantQuotas quotas) override;
  absl::StatusOr<OpenedCache> OpenPageCache(std::string_view tenant, const PageCacheSpec& spec,
                                            std::string_view session) override;
  absl::StatusOr<std::vector<PageOutcome>> PutPages(std::string_view tenant, uint64_t cache_id,
                                                    std::span<const PageSource> pages) override;
  absl::StatusOr<std::vector<FoundPage>> FindPages(std::string_view tenant, uint64_t cache_id,
                                                   std::span<const std::string_view> keys,
                                                   absl::Duration lease) override;
  absl::StatusOr<DroppedCache> DropCache(std::string_view tenant, uint64_t cache_id,
                                         bool force) override;
  absl::StatusOr<ErasedTenant> EraseTenant(std::string_view tenant,
                                           absl::Duration patience) override;

  absl::StatusOr<ExportedSequence> ExportSequence(std::string_view tenant, uint64_t sequence_id,
                                                  const ImagePlace& place) override;
  absl::StatusOr<ImportedSequence> ImportSequence(std::string_view tenant, uint64_t cache_id,
                                                  const ImagePlace& place) override;

  bool WaitIdle(SteadyTime deadline) override;
  void ApplyMemoryLimits() override;
  RecoveryReport Recovery() const override;
  absl::Status KeepSession(const KeptSession& session) override;
  std::vector<KeptSession> KeptSessions() const override;
  uint32_t EndQuarantineExcept(const CacheFilter& may_be_mapped) override;
  absl::Status PlanPoolMove(uint64_t cache_id) override;
  std::vector<CacheInfo> ListCaches(std::string_view tenant) override;
  absl::StatusOr<std::vector<SequenceInfo>> ListSequences(std::string_view tenant,
                                                          uint64_t cache_id) override;
  absl::StatusOr<SequenceInfo> DescribeSequence(std::string_view tenant,
                                                uint64_t sequence_id) override;

 private:
  // Return a sequence or a cache of the tenant, or of any tenant for kAllTenants.
  absl::StatusOr<StoredSequence> FindForAdmin(std::string_view tenant, uint64_t sequence_id) const;
  absl::StatusOr<Caches::CachePointer> FindCacheForAdmin(std::string_view tenant,
                                                         uint64_t cache_id) const;
  absl::StatusOr<Reading> Read(std::string_view tenant, uint64_t sequence_id) const;
  bool HasLiveIndex(uint64_t sequence_id) const { return live_.SpecOf(sequence_id).has_value(); }
  CacheInfo Describe(const Cache& cache) const;
  // Counts the sequences, and the bytes that several of them share.
  void CountSequences(std::string_view tenant, StoreStats& stats) const;
  void ReportSidecar(StoreStats& stats) const;
  // Recovers one cache. Errors: kDataLoss if nothing of the cache can be recovered.
  absl::Status RecoverCache(const CacheRecord& record);
  // Returns the caches that may not be dropped for a new one.
  std::set<uint64_t> HeldCaches() const;
  // Drops a cache that no session uses, unless it is held by then.
  void DropUnused(const Caches::CachePointer& cache);
  // Makes the cache's pool evict when it is full.
  void InstallReclaimer(const std::shared_ptr<const Cache>& cache);
  // Evicts cached prefixes of the tenant's other caches, and reduces the use that was granted to
  // them, so that this cache can grow by extents of these sizes. Returns whether it can.
  bool TakeFromRetained(const Caches::CachePointer& cache, std::span<const size_t> sizes_bytes);

  // Each part uses only those above it.
  const StoreOptions options_;
  const std::unique_ptr<RootRecords> root_;  // null without a keeper
  RecoveryReport recovery_;                  // written by Recover
  Compute compute_;
  CostModel costs_;
  SegmentCounters counters_;
  IncrementalIndexer live_;
  const std::unique_ptr<Checksums> checksums_;  // null without a keeper
  const std::shared_ptr<MemoryLedger> ledger_;  // pools that readers hold outlive the store
  const std::shared_ptr<MemoryPromise> request_memory_;  // null when there is none
  CacheMemory cache_memory_;
  Caches caches_;
  LocalSessions local_;
  RankSequences ranks_;
  StoredSequences sequences_;
  PrefixSharing prefixes_;
  Evictor evictor_;
  Lifecycle lifecycle_;
  std::unique_ptr<Repeater> memory_watch_;  // null: memory limits are not watched
  std::unique_ptr<Repeater> lease_watch_;   // null: leases do not expire
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_STORE_IMPL_H_
