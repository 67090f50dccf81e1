// Store owns caches and their sequences: it stores, indexes and reads rows. The service calls
// nothing else of kvstore.
//
// A *row* is the KV entry [key, value] of one token, layer and kv head. A *cache* owns one pool of
// memory. A *sequence* is a list of segments; the last one is open (the tail, or active segment).
// Rows are written per layer in position order (Ingest, Append), indexed by BuildIndex, and read by
// TopK, Score, Fetch and Attend. Rows written after the first BuildIndex, those of the next turn of
// a conversation included, are coded with their nearest centroids under the newest codebook as they
// are written.
//
// Sequences share their common tokens (ForkSequence, CreateSequence with token_ids): closed
// segments, and the filled part of a tail. Rows that one of them adds or removes concern only
// itself.
//
// Every call names a tenant; ids of another tenant are kNotFound. A call that fails changes
// nothing.
//
// Thread-safe. Writers of one sequence (Ingest, Append, BuildIndex, Truncate) exclude each other:
// the second one returns kAborted at once, and may succeed when the first one has ended. Readers
// never wait for writers; a dropped sequence's memory is freed when its last reader is done.
//
// Status codes have the meaning of the table in proto/pqcached/v1/kv_cache.proto. Every call on a
// sequence may return kNotFound (no such sequence; dropped or evicted, and the message says which)
// and, while the sequence is suspended, kFailedPrecondition; calls that read rows, kDataLoss (a
// layer of a segment fails its checksum: drop the sequence). The comments below list the other
// errors.
//
// Example, which writes a prompt and attends to a tenth of it:
//
//     StoreOptions options;
//     options.max_pool_bytes = 64 << 20;
//     auto store = Store::Create(options);
//     if (!store.ok()) return store.status();
//     const IndexDescriptor index = {.kind = IndexKind::kPq, .subspace_count = 2, .bits = 6};
//     const LayerGroup group{.layers = {0}, .kv_heads = 2, .query_heads = 8,
//                            .key_dim = 64, .value_dim = 64};
//     const auto cache = (*store)->OpenCache(
//         "tenant", {.name = "demo", .model_fingerprint = "demo-1", .groups = {group},
//                    .capacity_bytes = 32 << 20, .default_index = index});
//     if (!cache.ok()) return cache.status();
//     const auto made = (*store)->CreateSequence("tenant", cache->cache_id, {.session = "demo"});
//     if (!made.ok()) return made.status();
//     {
//       auto ingest = (*store)->BeginIngest("tenant", made->sequence_id);
//       if (!ingest.ok()) return ingest.status();
//       absl::Status written = (*ingest)->Write(0, {.layer = 0, .keys = keys, .values = values});
//       if (!written.ok()) return written;
//       if (auto tokens = (*ingest)->Commit(); !tokens.ok()) return tokens.status();
//     }
//     absl::Status built = (*store)->BuildIndex("tenant", made->sequence_id, {.index = index}, {});
//     if (!built.ok()) return built;
//     return (*store)->Attend("tenant", made->sequence_id,
//                             {.layer = 0, .query_position = 1023, .queries = queries},
//                             {.index = index, .sink_tokens = 16, .window_tokens = 64,
//                              .budget_ratio = 0.1},
//                             /*want_positions=*/false);
#ifndef PQCACHED_KVSTORE_STORE_H_
#define PQCACHED_KVSTORE_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/exec.h"
#include "kvstore/cache_events.h"
#include "kvstore/local_session.h"
#include "kvstore/model.h"
#include "kvstore/segment_images.h"
#include "kvstore/selected_pages.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

class DescriptorKeeper;  // memory/keeper.h

struct StoreOptions {
  size_t max_pool_bytes = size_t{8} << 30;  // over all caches
  uint32_t max_caches = 64;
  uint32_t max_sequences = 4096;  // per cache
  // Most capacity of a prefill segment; a multiple of kBlockTokens. The end of a prompt whose
  // tokens have names gets a shorter one.
  uint32_t segment_tokens = 8192;
  // Most capacity of a segment of appended tokens; a multiple of kBlockTokens. Short sequences get
  // shorter ones.
  uint32_t tail_tokens = 1024;
  // Tokens that a codebook is trained on at least, or all tokens of the sequence.
  uint32_t codebook_tokens = 32768;
  uint32_t train_tokens = 8192;  // sample of a live codebook, per kv head
  // A live index trains a new codebook when the inertia of new keys exceeds this times the inertia
  // of the trained ones.
  double drift_ratio = 1.25;
  uint32_t merge_segments = 8;  // closed tails that are merged into one segment; 0 = never
  bool strict_memory = false;   // no other process can ever map pools for writing
  // Rows that are stored already are compared with those of a call that repeats them; the call is
  // kInvalidArgument when they differ. Otherwise the repeated rows are not read.
  bool compare_repeats = false;
  PrefillCost prefill_cost;  // of caches whose engines report none
  std::string cost_file;     // file of the measured costs of builds; empty = none
  // Called from a thread of the store when work on a live index has failed (the pool is full).
  std::function<void(uint64_t sequence_id, const absl::Status& status)> on_live_index_failure;
  // Called by OpenCache when it has dropped a cache that no session used, for a new one.
  std::function<void(const std::string& tenant, const CacheInfo& cache)> on_cache_evicted;
  uint32_t max_leases = 4096;  // per session
  // A lease that its holder has not refreshed for this long is revoked, up to a quarter of this, or
  // 1 s, later. Its memory stays in place until the lease ends.
  absl::Duration lease_timeout = absl::InfiniteDuration();
  // Called from a thread of the store when it has revoked `count` leases of a session for that.
  std::function<void(const std::string& session, uint32_t count)> on_expired_leases;
  size_t max_staging_bytes = size_t{256} << 20;  // per session
  // Memory of the messages that the caller receives; the store promises it to no cache.
  size_t request_memory_bytes = 0;
  // When a session or a sequence ends, its named tokens remain in steps of 128 as a cached prefix
  // for later sequences, until they are evicted; also by SequenceSpec::retention.
  bool retain = false;
  double max_retained_share = 0.8;  // share of a pool that cached prefixes may use
  EvictionPolicy eviction_policy = EvictionPolicy::kReuse;
  // A sequence of a living session may be evicted when no call has used it for this long; zero =
  // never. A rank's sequence only with a group_key, when no call has used any member of the group.
  absl::Duration evict_idle_after = absl::Seconds(60);
  TenantQuotas tenant_quotas;  // until SetTenantQuotas
  // Free bytes of all pools that have pages ahead of their use, so that the next rows need not wait
  // for the kernel to clear them: a thread allocates them again when they are used, and OpenCache
  // returns when a new pool has its part of them (memory/idle_reserve.h). 0: pages are allocated by
  // the calls that first use them.
  // Other free memory returns to the machine when it is unused (ApplyMemoryLimits).
  size_t idle_reserve_bytes = 0;
  // Interval of returning unused memory, and of reading the memory limits of the machine and of
  // control groups; zero = only OpenCache reads them, and no memory returns.
  absl::Duration memory_check_interval = absl::ZeroDuration();
  std::string memory_root;                    // prefix of the paths /proc and /sys, for tests
  size_t event_log_events = kEventLogEvents;  // that each cache with a reader holds
  uint32_t threads = 0;  // of the serving and of the building arena; 0 = all cores
  kernels::Exec exec;    // instruction set
  // Keeps the state that the store of the next process recovers; outlives the store. Null: the
  // state ends with the process.
  DescriptorKeeper* keeper = nullptr;
};

// An ingest of several chunks, all or nothing: they become visible together at Commit; without
// Commit the destructor discards them. Other writers of the sequence return kAborted while it
// lives. For one thread at a time.
class IngestTransaction {
 public:
  virtual ~IngestTransaction() = default;
  // Copies the rows of tokens [first_position, first_position + tokens) of one layer.
  // `first_position` must be the layer's next position; a range that is stored already is
  // acknowledged without a change. After an error, all further calls return it.
  //
  // Errors: kInvalidArgument     layer, shape, strides, dtype, NaN or infinity (names the field,
  //                              for a bad number the token); positions with a gap or partly stored
  //         kResourceExhausted   the pool is full: the message gives the shortfall in bytes; may
  //                              succeed later, when sequences have ended
  //         kOutOfRange          more than kMaxSequenceTokens: never succeeds
  //         kFailedPrecondition  after Commit
  virtual absl::Status Write(uint64_t first_position, const LayerRows& rows) = 0;
  // Copies queries, for indexes that are trained on them (sequence/query_samples.h). Their tokens
  // must be stored at Commit. After an error, all further calls return it.
  //
  // Errors: kInvalidArgument    layer, also of a kind that has no index; positions that do not
  //                             ascend; shape, strides, dtype, NaN or infinity (names the field)
  //         kResourceExhausted, kFailedPrecondition  as Write
  virtual absl::Status AddSamples(const LayerSamples& samples) = 0;
  // Makes all rows visible, once; returns the sequence's token_count.
  //
  // Errors: that of a failed Write or AddSamples; kInvalidArgument (query samples of tokens that
  // are not stored); kFailedPrecondition (a second Commit); kNotFound (the sequence was dropped)
  virtual absl::StatusOr<uint64_t> Commit() = 0;
};

// See the top of this file.
class Store : public SegmentImages {
 public:
  // Creates a store. With a keeper, recovers the state that an earlier process left with it; the
  // destructor leaves the state to the next process.
  //
  // Errors: kInvalidArgument naming the option; kFailedPrecondition when the keeper has pools or
  // records of another version (RootRecords::Open), which stay as they are; those of the keeper.
  static absl::StatusOr<std::unique_ptr<Store>> Create(const StoreOptions& options);

  // Opens the tenant's cache of this name, or returns it when it is open with the same spec (its
  // capacity does not change). A cache with capacity_bytes 0 grows in steps of 64 MiB when its rows
  // need them and the limits allow, and ApplyMemoryLimits reduces it to what it has used since the
  // call before; it counts towards the limits with what it has grown to.
  //
  // `session` uses the cache from now on, until DropSession. When the limits or the machine admit
  // no new cache, caches of the tenant that no session uses are dropped (on_cache_evicted), those
  // first that have been unused longest, if that suffices; none with a pinned prefix.
  //
  // Ranks of a group open one cache each, under one name: with the same fingerprint and rank_count,
  // and layers or kv heads that no other rank has.
  //
  // Errors: kInvalidArgument, kUnimplemented  a field of the spec, with its limit: never succeeds
  //         kFailedPrecondition  open with another fingerprint or shape, or the rank does not fit
  //                              the others (names the field)
  //         kResourceExhausted   max_caches, max_pool_bytes, the tenant's quotas, bytes guaranteed
  //                              to other tenants, or less memory on the machine (shortfall in
  //                              bytes)
  //         kAborted             another call has been opening the same cache for 5 s: repeat
  virtual absl::StatusOr<OpenedCache> OpenCache(std::string_view tenant, const CacheSpec& spec,
                                                std::string_view session) = 0;
  // Does the same for a caller without sessions, who uses the cache until DropCache.
  absl::StatusOr<OpenedCache> OpenCache(std::string_view tenant, const CacheSpec& spec) {
    return OpenCache(tenant, spec, {});
  }
  // Replaces the quotas of all tenants. What is open already stays, even above them.
  virtual void SetTenantQuotas(TenantQuotas quotas) = 0;
  // Closes a cache, drops its cached prefixes and returns its memory to the machine. With `force`
  // also drops sequences of sessions, which notice it at their next call. `tenant` may be
  // kAllTenants.
  //
  // Errors: kNotFound            cache_id
  //         kFailedPrecondition  cache_id, without `force`: a session has a sequence there, or a
  //                              prefix is pinned (the message names it), or a page is leased
  //         kUnavailable         a call is still creating a sequence there: repeat
  virtual absl::StatusOr<DroppedCache> DropCache(std::string_view tenant, uint64_t cache_id,
                                                 bool force) = 0;

  // ---- Pages: bytes under keys, in caches of their own (pages/keyed_pages.h). Calls on sequences
  // refuse a page cache, and these calls a cache of rows (kFailedPrecondition naming cache_id).
  // With a keeper, pages outlive the process, without their leases.

  // Opens a page cache, under the same rules as OpenCache. Errors: those of OpenCache
  virtual absl::StatusOr<OpenedCache> OpenPageCache(std::string_view tenant,
                                                    const PageCacheSpec& spec,
                                                    std::string_view session) = 0;
  // Stores pages, each for itself, and returns an outcome for each. When the pool is full, the
  // pages that were used longest ago are evicted, but none of this call, and none that is leased.
  //
  // Errors: kInvalidArgument  a key or the bytes of a page (names it, with its limit); nothing is
  //                           stored
  //         kNotFound         cache_id
  virtual absl::StatusOr<std::vector<PageOutcome>> PutPages(std::string_view tenant,
                                                            uint64_t cache_id,
                                                            std::span<const PageSource> pages) = 0;
  // Finds the pages of the keys, in their order, and counts as their use. Those that are found stay
  // for `lease` from now on, whatever is stored (at most kMaxPageLease; zero = no longer than the
  // returned objects).
  //
  // Errors: kInvalidArgument  a key, or lease (names it, with its limit)
  //         kNotFound         cache_id
  virtual absl::StatusOr<std::vector<FoundPage>> FindPages(std::string_view tenant,
                                                           uint64_t cache_id,
                                                           std::span<const std::string_view> keys,
                                                           absl::Duration lease) = 0;

  // Creates a sequence that begins with the longest stored prefix of spec.token_ids (MatchPrefix),
  // which it shares.
  //
  // With a group_key the ranks of a group (the caches of one tenant, name and rank.group) create
  // one sequence together: all receive the token_count of the first call, even if other sequences
  // end between the calls; and all are evicted and pinned together, or none. The first call
  // reserves the prefixes for the other ranks until all members have ended; then the key may be
  // used again. A fork is not tied.
  //
  // Errors: kInvalidArgument     token_ids, extra_key, live_index or group_key (too long; the cache
  //                              has no rank.group)
  //         kNotFound            the cache
  //         kAlreadyExists       the rank has, or had, a sequence under the group_key, and not all
  //                              ranks' have ended
  //         kFailedPrecondition  group_key: another prompt than the first rank's, or the process
  //                              has restarted since its call, and lost the reserved prefixes:
  //                              create the sequences of all ranks again
  //         kResourceExhausted   max_sequences, or no room for its record (with a keeper)
  virtual absl::StatusOr<CreatedSequence> CreateSequence(std::string_view tenant, uint64_t cache_id,
                                                         const SequenceSpec& spec) = 0;
  // Creates a sequence of `session` that shares the first `token_count` tokens (0 = all) and their
  // indexes, copy-on-write. A live index continues in both; an index that is still being built is
  // not shared.
  //
  // Errors: kOutOfRange  more tokens than are complete over all stored layers
  virtual absl::StatusOr<CreatedSequence> ForkSequence(std::string_view tenant,
                                                       uint64_t sequence_id, uint64_t token_count,
                                                       std::string_view session) = 0;
  // Returns how many tokens of this prompt are stored under their names in any sequence, a cached
  // prefix included: a multiple of 128; the least over the ranks of the cache's group.
  //
  // Errors: kNotFound (the cache); kInvalidArgument (names: of at most 2^22 tokens; extra_key)
  virtual absl::StatusOr<uint64_t> MatchPrefix(std::string_view tenant, uint64_t cache_id,
                                               const TokenNames& names,
                                               std::string_view extra_key) = 0;
  // Returns the keys by which events name the tokens of a prompt: the root of its chain, then one
  // key per whole step of 128 tokens, stored or not. Errors: as MatchPrefix.
  virtual absl::StatusOr<std::vector<PrefixKey>> PrefixKeys(std::string_view tenant,
                                                            uint64_t cache_id,
                                                            const TokenNames& names,
                                                            std::string_view extra_key) const = 0;
  // Returns whether the cache has events after `position` (cache_events.h). Errors: kNotFound  the
  // cache
  virtual absl::StatusOr<bool> HasEvents(std::string_view tenant, uint64_t cache_id,
                                         const EventPosition& position) const = 0;
  // Returns the cache's events after `position`, at most `most`, and moves the position behind
  // them. They describe the keys that this cache holds: of a rank, its own, of which MatchPrefix
  // finds those that all ranks hold. REQUIRES: most >= 1. Errors: kNotFound  the cache
  virtual absl::StatusOr<std::vector<CacheEvent>> ReadEvents(std::string_view tenant,
                                                             uint64_t cache_id,
                                                             EventPosition& position,
                                                             size_t most) = 0;
  // Names tokens from first_position on, stored or not yet. A content key names the 128 tokens from
  // a multiple of 128 on. TruncateSequence removes the names of the removed tokens, and the content
  // key of a step that it cuts; forks inherit those of the shared tokens.
  //
  // Errors: kInvalidArgument  a gap behind the tokens named so far, other names than theirs, names
  //                           of the other kind, or more than kMaxNamedAhead tokens
  //                           (sequence/prefix.h) ahead of those stored
  virtual absl::Status NameTokens(std::string_view tenant, uint64_t sequence_id,
                                  uint64_t first_position, const TokenNames& names) = 0;
  // Returns the status that NameTokens would return; names nothing.
  virtual absl::Status CheckNames(std::string_view tenant, uint64_t sequence_id,
                                  uint64_t first_position, const TokenNames& names) const = 0;
  // Suspends the sequence: until ResumeSequence, every call that reads or changes it returns
  // kFailedPrecondition; Describe, Pin and Drop still work. Revokes its leases. Both return the
  // token_count. Suspending twice, or resuming a sequence that is not suspended, is no error.
  virtual absl::StatusOr<uint64_t> SuspendSequence(std::string_view tenant,
                                                   uint64_t sequence_id) = 0;
  virtual absl::StatusOr<uint64_t> ResumeSequence(std::string_view tenant,
                                                  uint64_t sequence_id) = 0;
  // Drops the sequence; with StoreOptions::retain, its named tokens remain in steps of 128 as a
  // cached prefix under another id. Its memory is freed when its last reader and lease have ended.
  virtual absl::Status DropSequence(std::string_view tenant, uint64_t sequence_id) = 0;
  // Ends a session: drops all its sequences, leases and local memory, and removes its record
  // (KeepSession). Returns the number of sequences.
  virtual uint32_t DropSession(std::string_view session) = 0;
  // Removes the tokens from `token_count` on, in all layers, and their names. Returns the new
  // token_count. Removing all tokens removes the indexes, because their codebooks were trained on
  // removed keys: a live index starts again, another one has to be built again.
  //
  // Revokes leases on the removed tokens, except `own_lease` (0 = none), whose holder makes the
  // call.
  //
  // Errors: kInvalidArgument  token_count is more than the sequence has
  //         kAborted          another writer
  virtual absl::StatusOr<uint64_t> TruncateSequence(std::string_view tenant, uint64_t sequence_id,
                                                    uint64_t token_count,
                                                    uint64_t own_lease = 0) = 0;

  // Begins an ingest, and excludes other writers until the transaction is destroyed or committed.
  //
  // Errors: kAborted  another writer
  virtual absl::StatusOr<std::unique_ptr<IngestTransaction>> BeginIngest(std::string_view tenant,
                                                                         uint64_t sequence_id) = 0;
  // Appends the rows of new tokens for all stored layers at once (each exactly once, with the same
  // number of tokens); closes and opens tails as needed. A range that is stored already is
  // acknowledged, a gap is refused. Returns the token_count.
  //
  // Errors: as IngestTransaction::Write; kAborted (another writer)
  virtual absl::StatusOr<uint64_t> Append(std::string_view tenant, uint64_t sequence_id,
                                          uint64_t first_position,
                                          std::span<const LayerRows> layers) = 0;

  // Closes the first prefill of a sequence with an incremental index: closes the open segment, so
  // that it is indexed, and adds the index to the sequence, so that reads are kAborted, not
  // kFailedPrecondition, until their layer is indexed. Does not wait for that. Changes nothing when
  // the prefill is closed, the sequence has no incremental index, or it has no tokens. When the
  // work on the index has failed, it is started again, and its error is returned.
  //
  // Errors: kFailedPrecondition  the layers hold different token counts (names the layer)
  //         kAborted             another writer
  //         kResourceExhausted   kMaxIndexes
  //         and those of the work on the index: kResourceExhausted (pool, with the shortfall in
  //         bytes), kDataLoss
  virtual absl::Status ClosePrefill(std::string_view tenant, uint64_t sequence_id) = 0;

  // Closes the open tail, trains a codebook per generation, layer and kv head, and codes all rows
  // (PQCache, SIGMOD 2025, section 3.1, step 2). Returns when all layers are ready. Writers
  // continue concurrently; rows that they add are coded too. Each layer is ready when it is
  // published, in ascending order as far as the workers allow. `progress` is called from a builder
  // thread after each (layer, codebook generation), one call at a time; false cancels. A
  // cancelled or failed build leaves no index.
  //
  // Errors: kInvalidArgument     a field of `spec`; flat, which needs no build
  //         kFailedPrecondition  no tokens, or the layers hold different token counts (names the
  //                              layer)
  //         kAlreadyExists       the sequence has this index
  //         kAborted             another build of this index, or another writer: may succeed later
  //         kResourceExhausted   pool (shortfall in bytes), or kMaxIndexes
  //         kDeadlineExceeded    before the first usable codebook of every layer; later the build
  //                              ends early with fewer iterations, and succeeds
  //         kCancelled           `progress` returned false, or `is_cancelled` true
  //
  // With spec.rebuild, an index that exists is replaced when the new one is done: readers use the
  // earlier one until then, and keep it when the build fails. kAlreadyExists: no condition of the
  // rebuild is met.
  virtual absl::Status BuildIndex(std::string_view tenant, uint64_t sequence_id,
                                  const BuildSpec& spec,
                                  const std::function<bool(const BuildProgress&)>& progress) = 0;

  // Reading. Errors of the following: kInvalidArgument (field and limit), kOutOfRange (positions
  // that are not stored), kFailedPrecondition (the sequence has no such index: build it), kAborted
  // (the layer's index is being built: repeat later).

  // Returns the k best tokens for a query: per query head approximate scores, the sum over the
  // sub-spaces of the query's inner product with the key's centroid (PQCache, section 3.1, step 4),
  // or exact ones (flat); selection.group_rule joins the heads of a kv head.
  virtual absl::StatusOr<Selected> TopK(std::string_view tenant, uint64_t sequence_id,
                                        const Query& query, const Selection& selection) = 0;
  // Returns the pages with the best tokens for a query (read/token_pages.h).
  virtual absl::StatusOr<SelectedPages> TopPages(std::string_view tenant, uint64_t sequence_id,
                                                 const Query& query, const Selection& selection,
                                                 const PageTerms& terms) = 0;
  // Returns the logits of the tokens of a range under an index, for a query of one token;
  // query_position has no effect.
  virtual absl::StatusOr<Scores> Score(std::string_view tenant, uint64_t sequence_id,
                                       const Query& query, const IndexDescriptor& index,
                                       TokenRange tokens) = 0;
  // Returns the rows of a token range, not empty: [kv_heads, tokens, dim] of the cache's dtype.
  virtual absl::StatusOr<Rows> FetchBlocks(std::string_view tenant, uint64_t sequence_id,
                                           uint32_t layer, TokenRange tokens, RowPart part) = 0;
  // Returns the rows at positions [kv_heads, count], in any order: [kv_heads, count, dim].
  virtual absl::StatusOr<Rows> FetchTokens(std::string_view tenant, uint64_t sequence_id,
                                           uint32_t layer, std::span<const uint32_t> positions,
                                           RowPart part) = 0;
  // Selects as TopK, and returns the partial attention over the selected rows, with exact logits.
  virtual absl::StatusOr<Attention> Attend(std::string_view tenant, uint64_t sequence_id,
                                           const Query& query, const Selection& selection,
                                           bool want_positions) = 0;
  // Returns the partial attention over given positions, [sets, count] and ascending per set: a set
  // for each kv head, or one for each query head. Needs no index; query_position has no effect on
  // the result. The query may have logits of the positions, whose path in refusals is "logits".
  virtual absl::StatusOr<Attention> AttendPositions(std::string_view tenant, uint64_t sequence_id,
                                                    const Query& query,
                                                    std::span<const uint32_t> positions,
                                                    uint32_t count) = 0;
  // Returns the attention over all rows of a range, which may be empty, causal by query position:
  // query token i, at query_position + i, attends to the rows up to its own position. Needs no
  // index. The query may have kMaxRangeQueryLength tokens. `is_cancelled` may be empty, and is
  // called by this thread between parts of the work of some tenths of a second; true ends the call
  // (kCancelled).
  virtual absl::StatusOr<Attention> AttendRange(std::string_view tenant, uint64_t sequence_id,
                                                const Query& query, TokenRange tokens,
                                                const std::function<bool()>& is_cancelled) = 0;

  // ---- Local access: sessions of clients on this host, which read mapped memory
  // (local_session.h).

  // Creates the control memory of a session of `tenant`. `boot_word` identifies this worker. The
  // caller owns the descriptor, which is read-only.
  //
  // Errors: kResourceExhausted  memory
  virtual absl::StatusOr<SessionMemory> OpenLocalSession(std::string_view tenant,
                                                         std::string_view session,
                                                         uint64_t boot_word) = 0;
  // Takes the staging ring of a session of an earlier process: its memory is in the ledger, and
  // freed when the returned object ends.
  virtual std::shared_ptr<const void> AdoptStaging(std::string_view tenant,
                                                   FileDescriptor ring) = 0;
  // Returns a read-only descriptor of a cache's pool, which the caller owns. `session`: the local
  // session whose client receives it; empty when the mapping ends with this process.
  //
  // Errors: kNotFound            no such cache of the tenant
  //         kFailedPrecondition  session: it is not local
  virtual absl::StatusOr<SharedMemory> OpenPool(std::string_view tenant, std::string_view session,
                                                uint64_t cache_id) = 0;
  // Keeps all pages of a cache's pool in place until the end of the session, so that its client may
  // page-lock them: until then no memory of this cache returns to the machine.
  //
  // Errors: as OpenPool
  virtual absl::Status HoldPool(std::string_view tenant, std::string_view session,
                                uint64_t cache_id) = 0;
  // Creates the session's staging ring of slot_count slots of slot_bytes; once. All of its memory
  // is allocated now, and freed by DropSession, although the caller, which owns the descriptor, may
  // still hold it. The descriptor is writable. `tenant`: the session's.
  //
  // Errors: kInvalidArgument     slot_bytes (a multiple of 1 MiB), slot_count
  //         kAlreadyExists       the session has one
  //         kFailedPrecondition  the session is not local
  //         kResourceExhausted   max_staging_bytes, or the machine's memory
  virtual absl::StatusOr<SharedMemory> OpenStaging(std::string_view tenant,
                                                   std::string_view session, uint64_t slot_bytes,
                                                   uint32_t slot_count) = 0;
  // Claims the slot for one call and returns its bytes, which the client may change at any time.
  // The returned object releases the claim.
  //
  // Errors: kInvalidArgument (slot, offset, size), kFailedPrecondition (no staging; stale
  // generation: never succeeds; slot in flight: may succeed later)
  virtual absl::StatusOr<StagedBytes> ClaimStaging(std::string_view session,
                                                   const StagingReference& reference) = 0;
  // Acquires a lease on the sequence's present state, or refreshes one (lease.lease_id not 0): the
  // bytes that the returned attachment names stay in place until the lease is released, or a newer
  // version is acknowledged.
  //
  // Errors: kFailedPrecondition (the session is not local; the lease is revoked: detach, and attach
  // again), kNotFound (also the lease), kInvalidArgument (a lease of another sequence;
  // known_version), kResourceExhausted (max_leases; too many unacknowledged attachments)
  virtual absl::StatusOr<AttachedSequence> Attach(std::string_view tenant, uint64_t sequence_id,
                                                  std::string_view session,
                                                  const LeaseState& lease) = 0;
  // Returns the newest attachment of a lease, empty when it is known_version, and releases older
  // ones.
  //
  // Errors: as Attach
  virtual absl::StatusOr<VersionedImage> RefreshLease(std::string_view session,
                                                      const LeaseState& lease) = 0;
  // Releases a lease. Errors: kNotFound (the lease)
  virtual absl::Status Detach(std::string_view session, uint64_t lease_id) = 0;
  // Returns the leases of a tenant's sessions, or all; revokes those that have expired
  // (StoreOptions::lease_timeout).
  virtual std::vector<LeaseInfo> ListLeases(std::string_view tenant) = 0;
  // Returns counters and gauges over the caches and sessions of a tenant, or over all. Those of the
  // machine, and those that are not counted by tenant, are 0 for one tenant (StoreStats).
  virtual StoreStats Stats(std::string_view tenant) = 0;
  // Waits until the threads of the store have no work left (incremental indexes, checksums) and
  // returns true, or returns false at the deadline.
  virtual bool WaitIdle(SteadyTime deadline) = 0;
  // Returns free memory to the machine that was not used lately, reads the memory limits of the
  // machine and of control groups and adapts to them, as the store does every
  // memory_check_interval. After the third call without a change, the memory of all pools is at
  // most idle_reserve_bytes and 1.2 times their used bytes; a strict pool, or one on hugetlbfs,
  // keeps all.
  // When memory is short, stops touching pages, returns other free pages and those of evicted
  // cached prefixes, and stops the pools from growing.
  virtual void ApplyMemoryLimits() = 0;

  // ---- Memory pressure. Sequences that were evicted are kNotFound, as if dropped; the message
  // says so.

  // Returns whether a request fits, computed as allocation would do it for a prompt whose tokens
  // have names. Reserves nothing: other requests may allocate first.
  //
  // Errors: kNotFound (the cache), kInvalidArgument (index), kOutOfRange (more than
  // kMaxSequenceTokens)
  //
  // `tenant` may be kAllTenants.
  virtual absl::StatusOr<Admission> Admit(std::string_view tenant, uint64_t cache_id,
                                          const AdmitSpec& spec) = 0;
  // Protects the sequence from eviction for `ttl` (at most kMaxPin; zero ends the protection), the
  // cached prefix that remains of it, and its counterparts in other ranks (by group_key, or by
  // their tokens). With a keeper, the pin holds in the next process. `tenant` may be kAllTenants.
  //
  // Errors: kInvalidArgument (ttl), kResourceExhausted (no room for its record)
  virtual absl::Status PinSequence(std::string_view tenant, uint64_t sequence_id,
                                   absl::Duration ttl) = 0;
  // Drops a sequence that is not in use, without a cached prefix; with a group_key all members, or
  // none. `tenant` may be kAllTenants.
  //
  // Errors: kFailedPrecondition  a lease, a pin, or work in progress holds it (names the member and
  //                              its holder): succeeds once they have ended
  virtual absl::Status EvictSequence(std::string_view tenant, uint64_t sequence_id) = 0;

  // Drops all sequences and cached prefixes of a tenant, pinned ones too, and removes its files
  // among those that were set aside. Overwrites the freed memory with zeros, for which it waits at
  // most `patience` for calls in progress. The caches stay open.
  //
  // Errors: kUnavailable  a file that was set aside cannot be removed
  virtual absl::StatusOr<ErasedTenant> EraseTenant(std::string_view tenant,
                                                   absl::Duration patience) = 0;

  // ---- What outlives the process (StoreOptions::keeper).

  // Returns what Create recovered of an earlier process.
  virtual RecoveryReport Recovery() const = 0;
  // Records a session for the next process, until DropSession; called before its client receives
  // the token. No effect without a keeper.
  //
  // Errors: kAlreadyExists, kResourceExhausted (too many sessions), kInvalidArgument (too long)
  virtual absl::Status KeepSession(const KeptSession& session) = 0;
  // Returns the recorded sessions of earlier processes that were not dropped since. The service
  // drops the sequences of all other sessions (SequenceInfo::session).
  virtual std::vector<KeptSession> KeptSessions() const = 0;
  // Makes the quarantined memory of all caches free for which `may_be_mapped` is false: no client
  // maps their pools of earlier processes any more. Returns the number of caches that had some.
  virtual uint32_t EndQuarantineExcept(const CacheFilter& may_be_mapped) = 0;
  // Does the same for all caches.
  void EndQuarantine() {
    EndQuarantineExcept([](uint64_t) { return false; });
  }
  // Plans that the next process moves the pool of a cache to new memory when it recovers the cache
  // (RecoveryReport::moved_caches). Clients of earlier processes map the old memory only, so the
  // quarantine of the cache can end then. The next process drops the plan when it has too little
  // memory for a copy of the pool.
  //
  // Errors: kNotFound            no such cache
  //         kFailedPrecondition  the cache does not outlive the process, or it is strict
  //         kResourceExhausted   the keeper has no room
  virtual absl::Status PlanPoolMove(uint64_t cache_id) = 0;

  // Returns the open caches of a tenant, or of kAllTenants.
  virtual std::vector<CacheInfo> ListCaches(std::string_view tenant) = 0;
  // Returns the sequences of a cache, by ascending id. `tenant` may be kAllTenants. Errors:
  // kNotFound (the cache)
  virtual absl::StatusOr<std::vector<SequenceInfo>> ListSequences(std::string_view tenant,
                                                                  uint64_t cache_id) = 0;
  // Returns the state of one sequence, a suspended one too. `tenant` may be kAllTenants.
  virtual absl::StatusOr<SequenceInfo> DescribeSequence(std::string_view tenant,
                                                        uint64_t sequence_id) = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_STORE_H_
