// Store: caches, their sequences, and everything that is asked of them. The one door of kvstore for
// the service.
//
// A *cache* owns one pool. A *sequence* is a list of segments, the last one open (the tail). Rows
// arrive per layer in position order (Ingest, Append), are indexed by BuildIndex, and are read by
// TopK, Score, Fetch and Attend. After the first BuildIndex later rows get the codes of their
// nearest centroids under the newest codebook as they arrive, those of the next turn of a
// conversation too.
//
// Sequences share what they have in common (ForkSequence, CreateSequence with token_ids): closed
// segments, and the filled part of a tail. What one of them adds or forgets is its own.
//
// Every call names a tenant; ids of another tenant are kNotFound. Nothing changes when a call
// fails.
//
// Thread-safe. Writers of one sequence (Ingest, Append, BuildIndex, Truncate) exclude each other:
// the second one gets kAborted at once. Readers never wait for writers; a dropped sequence's memory
// returns when its last reader is done.
#ifndef PQCACHED_KVSTORE_STORE_H_
#define PQCACHED_KVSTORE_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/exec.h"
#include "kvstore/clock.h"
#include "kvstore/heat.h"
#include "kvstore/keeper.h"
#include "kvstore/local_session.h"
#include "kvstore/model.h"

namespace pqcached::kvstore {

inline constexpr absl::Duration kMaxPin = absl::Hours(24 * 30);  // see PinSequence
inline constexpr size_t kMaxGroupKeyBytes = 64;

// Time of an engine's prefill per layer, a quadratic in the tokens: its keys may be clustered
// meanwhile. All 0: not known.
struct PrefillCost {
  double seconds_per_token_squared = 0;
  double seconds_per_token = 0;
  double seconds = 0;
};

// Pool bytes of one tenant, over the capacities of all its caches.
struct TenantQuota {
  size_t guaranteed_bytes = 0;  // that others cannot open
  size_t max_bytes = std::numeric_limits<size_t>::max();
};

struct StoreOptions {
  size_t max_pool_bytes = size_t{8} << 30;  // over all caches
  uint32_t max_caches = 64;
  uint32_t max_sequences = 4096;   // per cache
  uint32_t segment_tokens = 8192;  // capacity of a prefill segment; a multiple of kBlockTokens
  uint32_t tail_tokens = 1024;     // capacity of a tail segment; a multiple of kBlockTokens
  uint32_t epoch_tokens =
      32768;  // a codebook is trained on at least so many tokens, or on all there are
  uint32_t train_tokens = 8192;  // sample of a live codebook, per kv head
  double drift_ratio =
      1.25;  // a live index trains anew when the inertia of new keys exceeds this times the trained
  uint32_t merge_segments = 8;  // closed tails that are merged into one segment; 0 = never
  bool strict_memory = false;   // pools cannot be mapped for writing by anybody else, ever
  PrefillCost prefill_cost;     // reported by the engine, or configured
  std::string cost_file;        // where measured costs of builds are kept; empty = nowhere
  // Told, from a thread of the store, of work on a live index that failed (the pool is full).
  std::function<void(uint64_t sequence_id, const absl::Status& status)> live_index_failed;
  uint32_t max_leases = 4096;  // per session
  // A lease that its holder has not refreshed for so long is expired, which is found when leases are
  // listed: it is revoked, and keeps what was handed out until it ends.
  absl::Duration lease_timeout = absl::InfiniteDuration();
  size_t max_staging_bytes = size_t{256} << 20;  // per session
  // When a session or a sequence ends, closed segments of its named tokens stay for others who begin
  // with them, until they are evicted.
  bool retain = false;
  double max_retained_share = 0.8;  // of a pool
  EvictionPolicy eviction_policy = EvictionPolicy::kReuse;
  // A sequence of a living session may be evicted when nobody has used it for so long; zero = never. One of
  // a rank only with a group_key, when nobody has used any of its members.
  absl::Duration evict_idle = absl::Seconds(60);
  std::map<std::string, TenantQuota, std::less<>> tenant_quotas;
  // How often the limits of the machine and of control groups are read anew; zero = only by OpenCache.
  absl::Duration memory_check_interval = absl::ZeroDuration();
  std::string memory_root;  // that /proc and /sys stand under, for tests
  uint32_t threads = 0;     // of the serving and of the building arena; 0 = all cores
  kernels::Exec exec;       // instruction set
  // Holds what the store of the next process recovers; outlives the store. Null: nothing outlives it.
  DescriptorKeeper* keeper = nullptr;
};

// What a store found of an earlier process when it was made.
struct RecoveryReport {
  bool recovered = false;  // whether there was anything
  uint32_t caches = 0, sequences = 0, segments = 0;
  uint32_t dropped_records = 0;  // broken ones, with what they alone named
  size_t bytes = 0;              // of the pools, in use by what was recovered
  size_t quarantined_bytes = 0;  // of the pools, in use by nobody known
  double seconds = 0;
};

// A session as it is to be known to the next process.
struct KeptSession {
  std::string id;  // as in SequenceSpec::session
  std::string tenant;
  std::string client_name;
  std::string token;  // a secret
};

struct CacheInfo {
  uint64_t cache_id = 0;
  std::string tenant;
  CacheSpec spec;
  size_t capacity_bytes = 0, used_bytes = 0, free_bytes = 0, largest_free_bytes = 0;
  size_t page_bytes = 0;  // of the memory in force: 4096 or a huge page size
  uint32_t sequence_count = 0;
  uint32_t retained_count = 0;  // of them: their sessions are over
  size_t limit_bytes = 0;  // of used_bytes: the capacity, the quota, or less when memory is short
};

struct LayerInfo {
  uint32_t layer = 0;
  uint64_t row_count = 0;  // tokens whose rows are visible
  std::vector<LayerState>
      index_states;  // per index of the sequence, over all its segments (the lowest)
};

struct SegmentInfo {
  uint64_t segment_id = 0;
  TokenRange tokens;
  SegmentState state = SegmentState::kOpen;
  uint32_t slot_capacity = 0;
  std::vector<uint32_t> codebook_epochs;  // per index; ~0u when not built
};

struct SequenceInfo {
  uint64_t sequence_id = 0;
  uint64_t cache_id = 0;
  std::string session;       // that created it
  uint64_t token_count = 0;  // tokens complete over all stored layers
  std::vector<IndexDescriptor> indexes;
  absl::Status live_index = {};  // of the newest work on it: ok, or why it failed
  std::vector<LayerInfo> layers;
  std::vector<SegmentInfo> segments;
  size_t row_bytes = 0, index_bytes = 0,
         codebook_bytes = 0;  // content: what the figures call KV bytes and index bytes
  size_t used_bytes = 0;      // extents held in the pool, shared ones too
  size_t shared_bytes = 0;    // of used_bytes: rows that other sequences hold, too
  bool retained = false;      // its session is over
  absl::Duration pin_left = absl::ZeroDuration();
  absl::Duration idle = absl::ZeroDuration();  // since the last call on it
  std::string group_key = {};
};

// Rows of tokens [first_position, first_position + tokens) of one layer: keys [tokens, kv_heads,
// key_dim], values [.., value_dim].
struct LayerRows {
  uint32_t layer = 0;
  TensorView keys;
  TensorView values;
};

// An all-or-nothing ingest: chunks become visible together at Commit; destroyed without Commit,
// nothing happened. Single-thread.
class IngestTransaction {
 public:
  virtual ~IngestTransaction() = default;
  // Copies the rows. `first_position` must be the layer's next position; a range that is stored
  // already is acknowledged without a change.
  //
  // Errors: kInvalidArgument     layer, shape, strides, dtype, NaN or infinity (names the field,
  //                              for a bad number the token), positions with a gap or partly stored
  //         kResourceExhausted   the pool is full: the message gives the shortfall in bytes
  //         kOutOfRange          more than kMaxSequenceTokens
  virtual absl::Status Write(uint64_t first_position, const LayerRows& rows) = 0;
  // Makes all of it visible; returns the sequence's token_count.
  virtual absl::StatusOr<uint64_t> Commit() = 0;
};

struct BuildSpec {
  IndexDescriptor index;
  uint32_t iterations = 10;  // of k-means, 1..1000; with a seed the result is deterministic
  uint64_t seed = 0;
  uint32_t train_tokens = 0;  // sample per epoch and kv head; 0 = all
  uint32_t sink_tokens = 16;  // excluded from training
  SteadyTime deadline = SteadyTime::InfiniteFuture();
  // Asked between iterations, from several builder threads at once: true cancels. May be empty.
  std::function<bool()> cancelled = {};
};

// An index that the store keeps up by itself while rows arrive: a segment is indexed when it is full,
// tails as they close; closed tails are merged. The last segment of the first prefill is closed, and then
// indexed, by the first Append behind it, or by BuildIndex with the same index; that of later turns is
// coded while it is open. BuildIndex waits until all is indexed; its iterations, seed and train_tokens
// mean nothing then, and when it is cancelled the index goes on.
struct LiveIndex {
  IndexDescriptor index;
  // Of k-means, half of them where a codebook goes on from another one of its epoch; 0 = what the cost
  // model finds, at most 10.
  uint32_t iterations = 0;
  uint64_t seed = 0;
  uint32_t train_tokens = 0;  // sample per codebook and kv head; 0 = StoreOptions::train_tokens
  uint32_t sink_tokens = 16;  // excluded from training
};

struct SequenceSpec {
  std::string session;                   // owns the sequence: DropSession drops it
  std::vector<uint32_t> token_ids = {};  // of the prompt, as far as known: for shared prefixes
  std::string extra_key = {};            // of the prefix; at most 256 bytes
  std::optional<LiveIndex> live_index = {};
  // Of a rank's cache: what all ranks call the one sequence of their group that this is a part of; at
  // most kMaxGroupKeyBytes. Empty: it is tied to none.
  std::string group_key = {};
};

struct CreatedSequence {
  uint64_t sequence_id = 0;
  uint64_t token_count = 0;  // that it shares with others: the next position to ingest
};

struct BuildProgress {
  uint32_t layer = 0;
  uint32_t layers_done = 0, layer_count = 0;
  uint32_t epoch = 0, epoch_count = 0;
  uint32_t iterations = 0;
  double inertia = 0;
  double seconds = 0;      // since the build began
  size_t index_bytes = 0;  // codes and counts of this layer so far
  size_t codebook_bytes = 0;
};

// A query of one layer. Queries: fp32, fp16 or bf16 [query_length, query_heads, key_dim]. The tokens of a
// longer query (speculation) share one selection, over the heads of all of them: at most kMaxGroupSize
// queries per kv head. Score takes one token.
struct Query {
  uint32_t layer = 0;
  uint64_t query_position = 0;  // absolute position of the first query token; rows up to
                                // query_position - window_tokens must be stored
  TensorView queries;
};

struct Selected {
  uint32_t kv_heads = 0;
  uint32_t count = 0;                           // k, per kv head
  std::vector<uint32_t> positions;              // [kv_heads, count], ascending per head
  uint64_t sink_tokens = 0, window_tokens = 0;  // what the engine attends by itself
};

struct Scores {
  std::vector<float> logits;        // [query_heads, tokens], scaled
  std::vector<float> max, sum_exp;  // [query_heads], over these tokens: sum of exp(logit - max)
};

enum class RowPart : uint8_t { kRow = 0, kKey = 1, kValue = 2 };

struct Rows {
  kernels::DType dtype = kernels::DType::kF16;
  uint32_t kv_heads = 0, tokens = 0, dim = 0;
  std::vector<std::byte> data;  // [kv_heads, tokens, dim]
};

struct Attention {
  std::vector<float> output;  // [query_length, query_heads, value_dim]
  // [query_length, query_heads]; natural log of the scaled logits; -inf when nothing was selected
  std::vector<float> lse;
  Selected selected;  // `positions` only when asked for
};

struct StoreStats {
  uint32_t lease_count = 0;          // revoked ones included
  uint32_t revoked_lease_count = 0;  // that their holders have not let go of
  size_t staging_bytes = 0;          // of all sessions
  size_t shared_bytes = 0;           // rows that several sequences hold, counted once
  uint32_t live_work_count = 0;      // live indexes with work under way or waiting
  uint32_t retained_count = 0;       // sequences whose sessions are over
  uint32_t pinned_count = 0;
  uint64_t evicted_sequences = 0, evicted_bytes = 0;  // since the start; bytes that came free
  // Tokens of prompts that CreateSequence was given, in whole steps of 128, and those of them that it
  // found.
  uint64_t prompt_tokens = 0, matched_tokens = 0;
  size_t memory_available_bytes = 0;  // to this process: machine and control groups
  uint32_t recovered_sequences = 0;   // when the store was made
  size_t quarantined_bytes = 0;       // that clients of earlier processes may still map
  uint64_t data_loss_count = 0;       // layers of segments that failed their checksum
};

// Whether a request will fit.
struct AdmitSpec {
  uint64_t prefill_tokens = 0;                // that no other sequence holds
  uint64_t output_tokens = 0;                 // expected, appended one by one
  std::optional<IndexDescriptor> index = {};  // of all of them; the cache's default
};

enum class Verdict : uint8_t {
  kFitsNow = 1,
  kAfterEviction = 2,  // of what nobody uses
  kLater = 3,          // when others have let go of what they hold
  kNever = 4,          // more than the cache may hold
};

struct Admission {
  Verdict verdict = Verdict::kNever;
  size_t needed_bytes = 0;     // of extents
  size_t evicted_bytes = 0;    // kAfterEviction: that would have to go
  size_t shortfall_bytes = 0;  // kLater, kNever: what is missing
  size_t limit_bytes = 0;      // that the cache may hold
};

class Store {
 public:
  // With a keeper: recovers what an earlier process left with it. Its destructor leaves all of it to the
  // next process.
  //
  // Errors: kInvalidArgument naming the option; kFailedPrecondition when the keeper has pools or
  // records of another version (RootRecords::Open), which stay as they are; those of the keeper.
  static absl::StatusOr<std::unique_ptr<Store>> Create(const StoreOptions& options);
  virtual ~Store() = default;

  // Opens the tenant's cache of this name, or returns it when it is open with the same spec (its
  // capacity stays).
  //
  // Ranks of a group open one each, under one name: with the same fingerprint and rank_count, and
  // layers or kv heads that no other rank has.
  //
  // Errors: kFailedPrecondition  open with another fingerprint or shape, or a rank that does not go
  //                              with the others (names the field)
  //         kResourceExhausted   max_caches, max_pool_bytes, or the machine has less memory
  //         (shortfall in bytes), or the tenant's quota, or what others are guaranteed
  virtual absl::StatusOr<CacheInfo> OpenCache(std::string_view tenant, const CacheSpec& spec) = 0;

  // The sequence begins with the longest stored prefix of spec.token_ids (MatchPrefix), shared.
  //
  // With a group_key the ranks of a group (the caches of one tenant, name and rank.group) make one
  // sequence together: all are told the same token_count, that of the first call, whatever becomes of
  // other sequences between the calls; and all are evicted and pinned together, or none. Other ranks
  // begin with what the first call holds for them until all members have ended; then the key may be
  // used again. A fork is not tied.
  //
  // Errors: kInvalidArgument     token_ids, extra_key, live_index or group_key (too long; the cache has
  //                              no rank.group)
  //         kAlreadyExists       the rank has, or had, a sequence under the group_key, and not all ranks'
  //                              have ended
  //         kFailedPrecondition  group_key: another prompt than the first rank's; or the process has
  //                              begun anew since, and with it what was held: begin the key anew on all ranks
  //         kResourceExhausted   max_sequences
  virtual absl::StatusOr<CreatedSequence> CreateSequence(std::string_view tenant, uint64_t cache_id,
                                                         const SequenceSpec& spec) = 0;
  // A new sequence that shares the first `token_count` tokens (0 = all) and their indexes;
  // copy-on-write. A live index goes on in both.
  //
  // Errors: kOutOfRange  more tokens than are complete over all stored layers
  virtual absl::StatusOr<CreatedSequence> ForkSequence(std::string_view tenant,
                                                       uint64_t sequence_id, uint64_t token_count,
                                                       std::string_view session) = 0;
  // How many tokens of this prompt are stored under their ids in a sequence that lives: a multiple
  // of 128; the least over the ranks of the cache's group.
  virtual absl::StatusOr<uint64_t> MatchPrefix(std::string_view tenant, uint64_t cache_id,
                                               std::span<const uint32_t> token_ids,
                                               std::string_view extra_key) = 0;
  // Names tokens [first_position, + ids), stored or still to come.
  //
  // Errors: kInvalidArgument  a gap behind the tokens named so far, other ids than those, or more than
  //                           kMaxNamedAhead (prefix.h) behind what is stored
  virtual absl::Status NameTokens(std::string_view tenant, uint64_t sequence_id,
                                  uint64_t first_position, std::span<const uint32_t> token_ids) = 0;
  // What NameTokens would say; nothing is named.
  virtual absl::Status CheckNames(std::string_view tenant, uint64_t sequence_id,
                                  uint64_t first_position,
                                  std::span<const uint32_t> token_ids) const = 0;
  // Until ResumeSequence, every other call on it but Describe and Drop is kFailedPrecondition.
  // Returns the token_count. Suspending twice, or resuming what is not suspended, is no error.
  virtual absl::StatusOr<uint64_t> SuspendSequence(std::string_view tenant,
                                                   uint64_t sequence_id) = 0;
  virtual absl::StatusOr<uint64_t> ResumeSequence(std::string_view tenant,
                                                  uint64_t sequence_id) = 0;
  virtual absl::Status DropSequence(std::string_view tenant, uint64_t sequence_id) = 0;
  // Drops all sequences of a session and forgets that it is kept; returns how many.
  virtual uint32_t DropSession(std::string_view session) = 0;
  // Forgets the tokens from `token_count` on, in all layers. Returns the new token_count. With the last
  // token go the indexes: their codebooks were trained on keys that are gone. A live one begins anew,
  // another one is to be built again.
  //
  // Leases that it shortens are revoked, but `own_lease` (0 = none), whose holder knows. Ids of the
  // forgotten tokens are forgotten too.
  //
  // Errors: kInvalidArgument  beyond the sequence
  virtual absl::StatusOr<uint64_t> TruncateSequence(std::string_view tenant, uint64_t sequence_id,
                                                    uint64_t token_count,
                                                    uint64_t own_lease = 0) = 0;

  virtual absl::StatusOr<std::unique_ptr<IngestTransaction>> BeginIngest(std::string_view tenant,
                                                                         uint64_t sequence_id) = 0;
  // Appends the rows of new tokens for all stored layers at once (each exactly once); closes and
  // opens tails as needed. A repeat is acknowledged, a gap refused. Returns the token_count.
  // Errors: as IngestTransaction::Write.
  virtual absl::StatusOr<uint64_t> Append(std::string_view tenant, uint64_t sequence_id,
                                          uint64_t first_position,
                                          std::span<const LayerRows> layers) = 0;

  // Closes the open tail, trains a codebook per epoch, layer and kv head, and codes all rows. Writers
  // go on meanwhile; what they add is coded too. Each layer is ready when it is published, in
  // ascending order as far as the workers allow. `progress` is called from a builder thread after
  // each (layer, epoch), one call at a time; false cancels. A cancelled or failed build leaves no
  // index.
  //
  // Errors: kInvalidArgument     a field of `spec`
  //         kFailedPrecondition  no tokens, or the layers hold different token counts (names the layer)
  //         kAlreadyExists       the sequence has this index
  //         kResourceExhausted   pool (shortfall in bytes), or kMaxIndexes
  //         kDeadlineExceeded    before the first usable codebook of every layer; later the build
  //                              ends early with fewer iterations
  //         kCancelled           `progress` returned false, or `cancelled` true
  virtual absl::Status BuildIndex(std::string_view tenant, uint64_t sequence_id,
                                  const BuildSpec& spec,
                                  const std::function<bool(const BuildProgress&)>& progress) = 0;

  // Errors of the following: kInvalidArgument (field and limit), kNotFound, kOutOfRange (positions
  // that are not stored), kFailedPrecondition (the sequence has no such index: build it), kAborted (the
  // layer's is under way: repeat later).
  virtual absl::StatusOr<Selected> TopK(std::string_view tenant, uint64_t sequence_id,
                                        const Query& query, const Selection& selection) = 0;
  virtual absl::StatusOr<Scores> Score(std::string_view tenant, uint64_t sequence_id,
                                       const Query& query, const IndexDescriptor& index,
                                       TokenRange tokens) = 0;
  virtual absl::StatusOr<Rows> FetchRange(std::string_view tenant, uint64_t sequence_id,
                                          uint32_t layer, TokenRange tokens, RowPart part) = 0;
  // positions: [kv_heads, count].
  virtual absl::StatusOr<Rows> FetchTokens(std::string_view tenant, uint64_t sequence_id,
                                           uint32_t layer, std::span<const uint32_t> positions,
                                           RowPart part) = 0;
  virtual absl::StatusOr<Attention> Attend(std::string_view tenant, uint64_t sequence_id,
                                           const Query& query, const Selection& selection,
                                           bool want_positions) = 0;
  // Over given positions instead of a selection: [kv_heads, count], ascending per head.
  virtual absl::StatusOr<Attention> AttendPositions(std::string_view tenant, uint64_t sequence_id,
                                                    const Query& query,
                                                    std::span<const uint32_t> positions) = 0;

  // ---- Local access: sessions of clients on this host, which read mapped memory (local_session.h).

  // Makes the control memory of a session. The descriptor is read-only and the caller's to close.
  virtual absl::StatusOr<SessionMemory> OpenLocalSession(std::string_view session,
                                                         uint64_t boot_word) = 0;
  // A read-only descriptor of a cache's pool, the caller's to close.
  virtual absl::StatusOr<SharedMemory> OpenPool(std::string_view tenant, uint64_t cache_id) = 0;
  // Makes the session's staging ring; once. The descriptor is writable and the caller's to close.
  //
  // Errors: kAlreadyExists; kInvalidArgument  slot_bytes, slot_count; kResourceExhausted
  virtual absl::StatusOr<SharedMemory> OpenStaging(std::string_view session, uint64_t slot_bytes,
                                                   uint32_t slot_count) = 0;
  // Claims the slot for one call and gives its bytes, which the client may change at any time. The
  // claim ends with the returned object.
  //
  // Errors: kInvalidArgument (slot, offset, size), kFailedPrecondition (no staging; stale
  // generation; slot in flight)
  virtual absl::StatusOr<StagedBytes> ClaimStaging(std::string_view session,
                                                   const StagingReference& reference) = 0;
  // Takes a lease on what the sequence is now, or refreshes one.
  //
  // Errors: kFailedPrecondition (the session is not local, the sequence is suspended), kNotFound,
  // kResourceExhausted (leases of the session)
  virtual absl::StatusOr<AttachedSequence> Attach(std::string_view tenant, uint64_t sequence_id,
                                                  std::string_view session,
                                                  const LeaseState& lease) = 0;
  // The newest attachment of a lease, empty when known_version is it; lets go of older ones.
  virtual absl::StatusOr<VersionedImage> RefreshLease(std::string_view session,
                                                      const LeaseState& lease) = 0;
  virtual absl::Status Detach(std::string_view session, uint64_t lease_id) = 0;
  virtual std::vector<LeaseInfo> ListLeases() = 0;
  virtual StoreStats Stats() = 0;

  // ---- Memory pressure. Sequences that were evicted are kNotFound, as if dropped; the message says so.

  // Whether such a request would fit, by what allocation will take; a promise of nothing, since others
  // allocate too.
  //
  // Errors: kNotFound, kInvalidArgument (index), kOutOfRange (tokens)
  virtual absl::StatusOr<Admission> Admit(std::string_view tenant, uint64_t cache_id,
                                          const AdmitSpec& spec) = 0;
  // Keeps the sequence from being evicted for this long, and what is retained of it; its counterparts in
  // other ranks (by group_key, or by their tokens), too. With a keeper, whoever recovers the sequence goes on. Zero: no longer. Empty tenant: of
  // any tenant (for admin).
  //
  // Errors: kNotFound, kInvalidArgument (ttl), kResourceExhausted (records)
  virtual absl::Status PinSequence(std::string_view tenant, uint64_t sequence_id,
                                   absl::Duration ttl) = 0;
  // Drops a sequence that nobody uses, whosever it is, and retains nothing of it; with a group_key all
  // members, or none.
  //
  // Errors: kNotFound; kFailedPrecondition naming the member, and the lease, the pin, or the work that holds it
  virtual absl::Status EvictSequence(uint64_t sequence_id) = 0;

  // ---- What outlives the process (StoreOptions::keeper).

  virtual RecoveryReport Recovery() const = 0;
  // Writes a session down for the next process, before its client hears of it, until DropSession. No
  // effect without a keeper.
  //
  // Errors: kAlreadyExists, kResourceExhausted, kInvalidArgument (too long)
  virtual absl::Status KeepSession(const KeptSession& session) = 0;
  // Those of earlier processes that were not dropped since. Whoever serves them drops the others'
  // sequences (SequenceInfo::session).
  virtual std::vector<KeptSession> KeptSessions() const = 0;
  // Nobody maps any more what earlier processes handed out: it may be used again.
  virtual void EndQuarantine() = 0;

  // Empty tenant: all tenants (for admin).
  virtual std::vector<CacheInfo> ListCaches(std::string_view tenant) = 0;
  virtual absl::StatusOr<std::vector<SequenceInfo>> ListSequences(std::string_view tenant,
                                                                  uint64_t cache_id) = 0;
  virtual absl::StatusOr<SequenceInfo> DescribeSequence(std::string_view tenant,
                                                        uint64_t sequence_id) = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_H_
