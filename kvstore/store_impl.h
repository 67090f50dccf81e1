// StoreImpl: the maps behind Store's calls. What a call does stands elsewhere; here things are found
// and handed on. store.cc: caches, reads and reports; store_sequences.cc: what makes and changes
// sequences; store_local.cc: local access; store_pressure.cc: who gives way when memory is short.
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
                                             [this] { FollowMemoryLimits(); });
    }
  }

  ~StoreImpl() override;

  // Recovers what the keeper holds; once, before anything else.
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
  absl::StatusOr<Rows> FetchRange(std::string_view tenant, uint64_t sequence_id, uint32_t layer,
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

  // Reads the limits of the machine and of control groups, and follows them: when memory is short, no
  // more pages are touched, free ones and those of retained sequences are given back, and pools grow
  // no further.
  void FollowMemoryLimits();
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
  // shared_ptr: calls keep their cache and sequence while others drop them.
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
    std::shared_ptr<const Snapshot> first;  // null: with nothing
    PrefixKey root;
    std::span<const uint32_t> token_ids;
    std::optional<LiveIndex> live_index = {};
    std::string group_key = {};
  };

  // The longest stored prefix of a prompt, shared.
  Prefix SharePrefix(const std::shared_ptr<const Cache>& cache, std::span<const uint32_t> token_ids,
                     std::string_view extra_key) const;
  absl::StatusOr<Found> FindOfAnyTenant(uint64_t sequence_id) const;
  absl::StatusOr<Found> Find(std::string_view tenant, uint64_t sequence_id) const;
  absl::StatusOr<std::shared_ptr<const Cache>> FindCache(std::string_view tenant,
                                                         uint64_t cache_id) const;
  absl::StatusOr<Reading> Read(std::string_view tenant, uint64_t sequence_id) const;
  absl::StatusOr<std::shared_ptr<const Cache>> MakeCache(std::string_view tenant,
                                                         const CacheSpec& spec,
                                                         size_t machine_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The caches of the other ranks of its group that are open. Errors: kFailedPrecondition naming the
  // field that does not go with them.
  absl::Status CheckRanks(std::string_view tenant, const CacheSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The open caches of its group, itself too; without a group, itself.
  std::vector<std::shared_ptr<const Cache>> RanksOf(
      const std::shared_ptr<const Cache>& cache) const;
  // What each rank shares of the prompt, the same number of tokens, the most that all of them hold.
  RankPrefixes SettleRanks(const std::shared_ptr<const Cache>& cache,
                           std::span<const uint32_t> token_ids, std::string_view extra_key) const;
  // CreateSequence with a group_key.
  absl::StatusOr<CreatedSequence> CreateTied(const std::shared_ptr<const Cache>& cache,
                                             const SequenceSpec& spec);
  // Counts what a prompt of a new sequence has found.
  void CountPrefix(const Cache& cache, const SequenceSpec& spec, const Snapshot* found);
  // Tokens of the prompt that every rank of the cache's group holds.
  uint32_t MatchRanks(const std::shared_ptr<const Cache>& cache,
                      std::span<const uint32_t> token_ids, std::string_view extra_key) const;
  // Begins to keep up the index of a sequence that was made.
  absl::StatusOr<CreatedSequence> KeepUp(absl::StatusOr<CreatedSequence> created,
                                         const std::optional<LiveIndex>& live_index);
  // Puts a new sequence among the others. Errors: kResourceExhausted (max_sequences), and those of
  // NamedTokens::Name.
  absl::StatusOr<CreatedSequence> AddSequence(std::shared_ptr<const Cache> cache, NewSequence made);
  // The memory of a new cache, written down when there is a keeper. Errors: those of Pool and keeper.
  absl::StatusOr<std::shared_ptr<const Cache>> MakeMemory(std::string_view tenant,
                                                          const CacheSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Pool::Options PoolOptions(size_t capacity_bytes) const;
  uint64_t NewId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Errors: kDataLoss when nothing of the cache can be recovered.
  absl::Status RecoverCache(const CacheRecord& record);
  std::vector<std::shared_ptr<const Cache>> AllCaches() const;
  CacheInfo DescribeCache(const std::shared_ptr<const Cache>& cache) const;
  void Forget(uint64_t sequence_id);

  // Begins and ends to make room in the pool of a cache.
  void ServePressure(const std::shared_ptr<const Cache>& cache);
  void EndPressure();
  // What may be opened beside `tenant`'s quota and the guarantees of others. Errors:
  // kResourceExhausted naming the quota.
  absl::Status CheckTenantQuota(std::string_view tenant, size_t capacity_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops a sequence at its end and retains of it what may serve others.
  void EndSequence(const Found& found);
  void Retain(const Found& found);
  std::vector<Found> SequencesOf(const Cache& cache, bool retained_only) const;
  std::vector<Candidate> Candidates(const Cache& cache, bool retained_only) const;
  bool MakeRoom(const Cache& cache, std::span<const size_t> sizes_bytes);
  // Returns the bytes that came free.
  size_t CarryOut(const Cache& cache, std::span<const Candidate> candidates,
                  std::span<const Victim> victims);
  bool CarryOut(const Cache& cache, const Candidate& candidate, const Victim& victim);
  // With those of other ranks that are one with it. Errors: kFailedPrecondition naming the one that
  // somebody holds now; then all stay.
  absl::Status EvictWhole(const Found& found);
  // Whether nobody holds it, and it is retained, or idle with all that it is tied to.
  bool MayBeEvicted(const Found& found) const;
  // What admin is told before it tries. Errors: kFailedPrecondition naming the lease or the pin.
  absl::Status CheckUnused(std::span<const std::shared_ptr<Sequence>> sequences);
  bool Shorten(const Found& found, uint32_t keep_tokens);
  // Of the other ranks, with more than `keep_tokens` of the same tokens.
  std::vector<Found> Counterparts(const Cache& cache, const NamedTokens& names,
                                  uint32_t keep_tokens) const;
  // Evicts retained sequences until those left hold at most so much; returns the bytes that came free.
  size_t ShrinkRetained(const Cache& cache, size_t most_bytes);
  // When max_sequences are there: one retained sequence makes room for another one.
  void EvictForCount(const Cache& cache);

  const std::unique_ptr<Engine> engine_;  // before the caches that use it
  std::unique_ptr<RootRecords> root_;     // null without a keeper; set by Open, as recovery_
  RecoveryReport recovery_;

  LocalSessions local_;
  RankSequences rank_sequences_;

  EvictedIds evicted_;
  std::atomic<uint64_t> evicted_sequences_ = 0;
  std::atomic<uint64_t> evicted_bytes_ = 0;
  std::atomic<uint64_t> prompt_tokens_ = 0;
  std::atomic<uint64_t> matched_tokens_ = 0;
  Mutex retain_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);  // one end of a sequence at a time

  mutable Mutex mutex_;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, std::shared_ptr<const Cache>> caches_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, Found> sequences_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, uint32_t> sequence_counts_ ABSL_GUARDED_BY(mutex_);  // per cache

  std::unique_ptr<MemoryWatch> watch_;  // null: nobody watches
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_IMPL_H_
