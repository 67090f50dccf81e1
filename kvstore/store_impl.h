// StoreImpl implements Store: it looks up caches and sequences and forwards each call to the module
// that does the work. store.cc: caches, reads and reports; store_sequences.cc: calls that create
// and change sequences; store_local.cc: local access; store_pressure.cc: retention, eviction and
// admission; store_recovery.cc: recovery and kept state.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_STORE_IMPL_H_
#define PQCACHED_KVSTORE_STORE_IMPL_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvstore/cache.h"
#include "kvstore/eviction.h"
#include "kvstore/local_sessions.h"
#include "kvstore/memory_watch.h"
#include "kvstore/mutex.h"
#include "kvstore/rank_sequences.h"
#include "kvstore/reader.h"
#include "kvstore/root_records.h"
#include "kvstore/sequence.h"
#include "kvstore/store.h"

namespace pqcached::kvstore {

class StoreImpl final : public Store {
 public:
  StoreImpl(const StoreOptions& options, uint32_t threads)
      : engine_(std::make_unique<Engine>(options, threads)),
        local_(options.max_leases, options.max_staging_bytes, options.lease_timeout,
               options.keeper) {
    if (options.memory_check_interval > absl::ZeroDuration()) {
      watch_ = std::make_unique<MemoryWatch>(options.memory_check_interval,
                                             [this] { ApplyMemoryLimits(); });
    }
  }

  ~StoreImpl() override;

  // Recovers the memory that the keeper holds; called once, before all other calls.
  absl::Status Open();

  Engine& engine() { return *engine_; }  // for tests

  absl::StatusOr<CacheInfo> OpenCache(std::string_view tenant, const CacheSpec& spec) override;
  absl::StatusOr<CreatedSequence> CreateSequence(std::string_view tenant, uint64_t cache_id,
                                                 const SequenceSpec& spec) override;
  absl::StatusOr<CreatedSequence> ForkSequence(std::string_view tenant, uint64_t sequence_id,
                                               uint64_t token_count,
                                               std::string_view session) override;
  absl::StatusOr<uint64_t> MatchPrefix(std::string_view tenant, uint64_t cache_id,
                                       std::span<const uint32_t> token_ids,
                                       std::string_view extra_key) override;
  absl::Status NameTokens(std::string_view tenant, uint64_t sequence_id, uint64_t first_position,
                          std::span<const uint32_t> token_ids) override;
  absl::Status CheckNames(std::string_view tenant, uint64_t sequence_id, uint64_t first_position,
                          std::span<const uint32_t> token_ids) const override;
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
  absl::Status BuildIndex(std::string_view tenant, uint64_t sequence_id, const BuildSpec& spec,
                          const std::function<bool(const BuildProgress&)>& progress) override;
  absl::StatusOr<Selected> TopK(std::string_view tenant, uint64_t sequence_id, const Query& query,
                                const Selection& selection) override;
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
                                            const Query& query,
                                            std::span<const uint32_t> positions) override;
  absl::StatusOr<SessionMemory> OpenLocalSession(std::string_view session,
                                                 uint64_t boot_word) override;
  absl::StatusOr<SharedMemory> OpenPool(std::string_view tenant, uint64_t cache_id) override;
  absl::StatusOr<SharedMemory> OpenStaging(std::string_view session, uint64_t slot_bytes,
                                           uint32_t slot_count) override;
  absl::StatusOr<StagedBytes> ClaimStaging(std::string_view session,
                                           const StagingReference& reference) override;
  absl::StatusOr<AttachedSequence> Attach(std::string_view tenant, uint64_t sequence_id,
                                          std::string_view session,
                                          const LeaseState& lease) override;
  absl::StatusOr<VersionedImage> RefreshLease(std::string_view session,
                                              const LeaseState& lease) override;
  absl::Status Detach(std::string_view session, uint64_t lease_id) override;
  std::vector<LeaseInfo> ListLeases() override;
  StoreStats Stats() override;
  absl::StatusOr<Admission> Admit(std::string_view tenant, uint64_t cache_id,
                                  const AdmitSpec& spec) override;
  absl::Status PinSequence(std::string_view tenant, uint64_t sequence_id,
                           absl::Duration ttl) override;
  absl::Status EvictSequence(uint64_t sequence_id) override;

  // Reads the memory limits of the machine and of control groups and adapts to them. When memory is
  // short, it stops touching pages, returns free pages and those of evicted retained sequences to
  // the machine, and stops the pools from growing.
  void ApplyMemoryLimits();
  RecoveryReport Recovery() const override;
  absl::Status KeepSession(const KeptSession& session) override;
  std::vector<KeptSession> KeptSessions() const override;
  void EndQuarantine() override;
  std::vector<CacheInfo> ListCaches(std::string_view tenant) override;
  absl::StatusOr<std::vector<SequenceInfo>> ListSequences(std::string_view tenant,
                                                          uint64_t cache_id) override;
  absl::StatusOr<SequenceInfo> DescribeSequence(std::string_view tenant,
                                                uint64_t sequence_id) override;

 private:
  // Held by shared_ptr: a call keeps its cache and sequence alive while other calls drop them.
  struct Found {
    std::shared_ptr<const Cache> cache;
    std::shared_ptr<Sequence> sequence;
    std::shared_ptr<NamedTokens> names = {};

    bool retained() const { return sequence->session().empty(); }
  };

  struct Prefix {
    PrefixKey root;
    std::shared_ptr<const Snapshot> snapshot;  // null: nothing is shared
  };

  struct NewSequence {
    std::string session;
    std::shared_ptr<const Snapshot> first;  // null: it starts empty
    PrefixKey root;
    std::span<const uint32_t> token_ids;
    std::optional<LiveIndex> live_index = {};
    std::string group_key = {};
  };

  // Shares the longest stored prefix of a prompt.
  Prefix SharePrefix(const std::shared_ptr<const Cache>& cache, std::span<const uint32_t> token_ids,
                     std::string_view extra_key) const;
  absl::StatusOr<Found> FindInAnyTenant(uint64_t sequence_id) const;
  absl::StatusOr<Found> Find(std::string_view tenant, uint64_t sequence_id) const;
  absl::StatusOr<std::shared_ptr<const Cache>> FindCache(std::string_view tenant,
                                                         uint64_t cache_id) const;
  absl::StatusOr<Reading> Read(std::string_view tenant, uint64_t sequence_id) const;
  absl::StatusOr<std::shared_ptr<const Cache>> MakeCache(std::string_view tenant,
                                                         const CacheSpec& spec,
                                                         size_t machine_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks that the spec is compatible with the open caches of its group's other ranks. Errors:
  // kFailedPrecondition naming the incompatible field.
  absl::Status CheckRanks(std::string_view tenant, const CacheSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the open caches of its group, including itself; without a group, only itself.
  std::vector<std::shared_ptr<const Cache>> CachesOfGroup(
      const std::shared_ptr<const Cache>& cache) const;
  // Returns, for each rank, a share of the longest prefix of the prompt that all ranks hold; the
  // number of tokens is the same in all of them.
  RankPrefixes ShareRankPrefixes(const std::shared_ptr<const Cache>& cache,
                                 std::span<const uint32_t> token_ids,
                                 std::string_view extra_key) const;
  // Creates a sequence with a group_key.
  absl::StatusOr<CreatedSequence> CreateGroupMember(const std::shared_ptr<const Cache>& cache,
                                                    const SequenceSpec& spec);
  // Updates the statistics of prompt and matched tokens for a new sequence.
  void CountPrefix(const Cache& cache, const SequenceSpec& spec, const Snapshot* found);
  // Returns the number of the prompt's tokens that every rank of the cache's group holds.
  uint32_t MatchRanks(const std::shared_ptr<const Cache>& cache,
                      std::span<const uint32_t> token_ids, std::string_view extra_key) const;
  // Starts the incremental index of a new sequence; drops the sequence if that fails.
  absl::StatusOr<CreatedSequence> StartLiveIndex(absl::StatusOr<CreatedSequence> created,
                                                 const std::optional<LiveIndex>& live_index);
  // Adds a new sequence. Errors: kResourceExhausted (max_sequences), and those of
  // NamedTokens::Name.
  absl::StatusOr<CreatedSequence> AddSequence(std::shared_ptr<const Cache> cache, NewSequence made);
  // Creates the memory of a new cache, and records it if there is a keeper. Errors: those of Pool
  // and of the keeper.
  absl::StatusOr<std::shared_ptr<const Cache>> MakeMemory(std::string_view tenant,
                                                          const CacheSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Pool::Options PoolOptions(size_t capacity_bytes) const;
  uint64_t NewId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Recovers one cache. Errors: kDataLoss if nothing of the cache can be recovered.
  absl::Status RecoverCache(const CacheRecord& record);
  std::vector<std::shared_ptr<const Cache>> AllCaches() const;
  CacheInfo DescribeCache(const std::shared_ptr<const Cache>& cache) const;
  void RemoveFromMap(uint64_t sequence_id);

  // InstallReclaimer sets the reclaimer of a cache's pool; RemoveReclaimers stops the memory watch
  // and removes all reclaimers.
  void InstallReclaimer(const std::shared_ptr<const Cache>& cache);
  void RemoveReclaimers();
  // Checks `capacity_bytes` against the tenant's quota and the guarantees of other tenants. Errors:
  // kResourceExhausted naming the quota.
  absl::Status CheckTenantQuota(std::string_view tenant, size_t capacity_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops a sequence and retains the prefix that other sequences may share.
  void EndSequence(const Found& found);
  void Retain(const Found& found);
  std::vector<Found> SequencesOf(const Cache& cache, bool retained_only) const;
  std::vector<Candidate> Candidates(const Cache& cache, bool retained_only) const;
  bool MakeRoom(const Cache& cache, std::span<const size_t> sizes_bytes);
  // Shortens or evicts the victims; returns the number of freed bytes.
  size_t ExecuteEviction(const Cache& cache, std::span<const Candidate> candidates,
                         std::span<const Victim> victims);
  bool ExecuteEviction(const Cache& cache, const Candidate& candidate, const Victim& victim);
  // Evicts a sequence together with the members of its group in other ranks, or none. Errors:
  // kFailedPrecondition naming the member that is in use.
  absl::Status EvictAllMembers(const Found& found);
  // Returns whether the sequence is not in use, and either retained or idle together with all
  // members of its group.
  bool IsEvictable(const Found& found) const;
  // Checks that no sequence is leased or pinned, for a precise error to admin. Errors:
  // kFailedPrecondition naming the lease or the pin.
  absl::Status CheckUnused(std::span<const std::shared_ptr<Sequence>> sequences);
  bool Shorten(const Found& found, uint32_t keep_tokens);
  // Returns the sequences of other ranks that begin with the same tokens, by more than
  // `keep_tokens`.
  std::vector<Found> RankCounterparts(const Cache& cache, const NamedTokens& names,
                                      uint32_t keep_tokens) const;
  // Evicts retained sequences until the others hold at most `most_bytes`; returns the number of
  // freed bytes.
  size_t ShrinkRetained(const Cache& cache, size_t most_bytes);
  // Evicts one retained sequence if the cache has max_sequences.
  void EvictForCount(const Cache& cache);

  const std::unique_ptr<Engine> engine_;  // declared before the caches that use it
  std::unique_ptr<RootRecords> root_;     // null without a keeper; set by Open, like recovery_
  RecoveryReport recovery_;

  LocalSessions local_;
  RankSequences rank_sequences_;

  EvictedIds evicted_;
  std::atomic<uint64_t> evicted_sequences_ = 0;
  std::atomic<uint64_t> evicted_bytes_ = 0;
  std::atomic<uint64_t> prompt_tokens_ = 0;
  std::atomic<uint64_t> matched_tokens_ = 0;
  Mutex retain_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);  // serializes Retain

  mutable Mutex mutex_;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, std::shared_ptr<const Cache>> caches_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, Found> sequences_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, uint32_t> sequence_counts_ ABSL_GUARDED_BY(mutex_);  // per cache

  std::unique_ptr<MemoryWatch> watch_;  // null: memory limits are not watched
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_IMPL_H_
