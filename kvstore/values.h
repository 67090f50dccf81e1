// Values of the store's calls: the specs and queries that a caller passes, and
// the reports, rows and selections that the calls return. model.h has the
// values that describe a cache, local_session.h those of local access.
#ifndef PQCACHED_KVSTORE_VALUES_H_
#define PQCACHED_KVSTORE_VALUES_H_

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/dtype.h"
#include "kvstore/clock.h"
#include "kvstore/model.h"
#include "kvstore/read/layout.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

inline constexpr absl::Duration kMaxPin = absl::Hours(24 * 30);  // longest ttl of PinSequence
inline constexpr size_t kMaxGroupKeyBytes = 64;                  // of SequenceSpec::group_key

// State of an earlier process that a store found when it was created.
struct RecoveryReport {
  bool recovered = false;  // an earlier process had left state
  uint32_t caches = 0, sequences = 0, segments = 0, pages = 0;
  // Broken records, dropped with the state that only they referred to.
  uint32_t dropped_records = 0;
  std::vector<std::string> dropped = {};  // of caches and sequences: which, and why; at most 16
  size_t bytes = 0;                       // pool bytes used by the recovered sequences
  size_t quarantined_bytes = 0;           // pool bytes in use without a known owner
  double seconds = 0;
  std::vector<uint64_t> moved_caches = {};      // whose pools are in new memory (PlanPoolMove)
  std::vector<std::string> refused_moves = {};  // why planned moves were dropped
};

// A session as the next process will know it.
struct KeptSession {
  std::string id;  // as in SequenceSpec::session
  std::string tenant;
  std::string client_name;
  std::string token;  // a secret
};

// Limits of a page: of its key, of its bytes, and of its lease. A key of 16 bytes is a hash of 128
// bits; one of 64 has room for a hash of 256 bits, or its text, and for what distinguishes ranks
// and parts.
inline constexpr size_t kMinPageKeyBytes = 16;
inline constexpr size_t kMaxPageKeyBytes = 64;
inline constexpr size_t kMaxPageBytes = size_t{32} << 20;
inline constexpr absl::Duration kMaxPageLease = absl::Hours(1);

// A page to be stored: bytes under a key.
struct PageSource {
  std::string_view key;
  std::span<const std::byte> bytes;
};

// Numbered as in the proto.
//
// kStored   the page is stored now
// kPresent  a page has this key; it stays as it is, and the bytes of the call were not compared
// kNoRoom   nothing is stored: the pool, or the machine, has no memory for the page, even after all
//           pages that may be evicted are
enum class PageOutcome : uint8_t { kStored = 1, kPresent = 2, kNoRoom = 3 };

// A page that was found: its bytes stay readable as long as `hold` lives. Empty: it is not stored.
struct FoundPage {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> hold;
};

// Pages of one page cache, or of several.
struct PageCounts {
  uint64_t page_count = 0;
  uint64_t bytes = 0;             // content, without the rest of each page's last unit
  uint64_t hits = 0, misses = 0;  // keys of FindPages
  uint64_t evicted_pages = 0, evicted_bytes = 0;
  PageCounts& operator+=(const PageCounts& other);
};

struct CacheInfo {
  uint64_t cache_id = 0;
  std::string tenant;
  CacheSpec spec;
  size_t capacity_bytes = 0;  // of a cache that grows: to which it has grown
  size_t used_bytes = 0, free_bytes = 0, largest_free_bytes = 0;
  size_t page_bytes = 0;  // page size of the pool's memory: 4096 or a huge page size
  uint32_t sequence_count = 0;
  uint32_t cached_prefix_count = 0;  // sequences whose sessions have ended
  size_t limit_bytes = 0;  // of used_bytes: the capacity, the quota, or less if memory is short
  size_t quarantined_bytes = 0;  // of used_bytes: clients of earlier processes may still map them
  PageCounts pages = {};         // of a page cache
  PrefillReport prefill = {};    // what is known now
};

// A page cache: pages under keys, in a pool of their own.
struct PageCacheSpec {
  std::string name;           // 1..128 bytes; caches of rows and page caches share their names
  size_t capacity_bytes = 0;  // of the pool; > 0, rounded up to a multiple of kMinExtentBytes
  size_t quota_bytes = 0;  // limit of the bytes in use, at most capacity_bytes; 0 = capacity_bytes
};

// What OpenCache answers.
struct OpenedCache : CacheInfo {
  bool is_new = false;
};

struct LayerInfo {
  uint32_t layer = 0;
  uint64_t row_count = 0;  // tokens whose rows are visible
  // Per index of the sequence: the lowest state over all segments; kReady in a layer of a kind that
  // no index has.
  std::vector<LayerState> index_states;
  uint32_t query_sample_count = 0;  // positions whose queries are kept
};

struct SegmentInfo {
  uint64_t segment_id = 0;
  TokenRange tokens;
  SegmentState state = SegmentState::kOpen;
  uint32_t slot_capacity = 0;
  std::vector<uint32_t> codebook_generations;  // per index; ~0u when not built
};

struct SequenceInfo {
  uint64_t sequence_id = 0;
  uint64_t cache_id = 0;
  std::string session;       // the session that created it
  uint64_t token_count = 0;  // tokens complete over all stored layers
  std::vector<IndexDescriptor> indexes;
  std::optional<IndexDescriptor> live_index_descriptor = {};
  absl::Status live_index = {};  // outcome of the newest work on it: ok, or why it failed
  std::vector<LayerInfo> layers;
  std::vector<SegmentInfo> segments;
  // Content, without padding and unused capacity.
  size_t row_bytes = 0, index_bytes = 0, codebook_bytes = 0;
  size_t used_bytes = 0;          // extents held in the pool, shared ones too
  size_t shared_bytes = 0;        // of used_bytes: rows that other sequences hold, too
  bool is_cached_prefix = false;  // its session has ended
  absl::Duration pin_left = absl::ZeroDuration();
  absl::Duration idle = absl::ZeroDuration();  // since the last call on it
  std::string group_key = {};
};

// Rows of tokens [first_position, first_position + tokens) of one layer: keys
// [tokens, kv_heads, key_dim], values [.., value_dim]. Of a layer of kind values the keys are
// empty.
struct LayerRows {
  uint32_t layer = 0;
  TensorView keys;
  TensorView values;
};

// Queries of tokens at ascending positions of one layer, [positions, query_heads, key_dim].
struct LayerSamples {
  uint32_t layer = 0;
  std::vector<uint64_t> positions;
  TensorView queries;
};

struct BuildSpec {
  IndexDescriptor index;
  // Iterations of k-means, at most 1000; 0: as many as fit into the engine's prefill of the rows,
  // at most 10, and 10 when its time is not known. With a number and a seed the result is
  // deterministic.
  uint32_t iterations = 10;
  uint64_t seed = 0;
  uint32_t train_tokens = 0;  // sample per generation and kv head; 0 = all
  uint32_t sink_tokens = 16;  // first tokens, excluded from training
  // Replaces an index that the sequence has, when the new one is done.
  bool rebuild = false;
  // Conditions of `rebuild`, of which one that is met suffices; 0: none of this kind, and with none
  // at all it always does. The first is met if the keys of a segment have drifted by more than this
  // ratio from those of its codebook in some layer, as StoreOptions::drift_ratio.
  double rebuild_drift = 0;
  // Is met if the sequence has at least so many tokens that it did not have at the last build of
  // the index. Of an index that no call of this process has built, all tokens count.
  uint64_t rebuild_tokens = 0;
  SteadyTime deadline = SteadyTime::InfiniteFuture();
  // Called between iterations, by several builder threads concurrently: true
  // cancels. May be empty.
  std::function<bool()> is_cancelled = {};
};

// Incremental index: the store indexes rows by itself while they are written. A
// segment is indexed when it is full, tails as they close; closed tails are
// merged. The last segment of the first prefill is closed, and then indexed, by
// ClosePrefill, by the first Append behind it, or by BuildIndex with the same
// index; that of later turns is coded while it is open. BuildIndex waits until
// all rows are indexed; its iterations, seed and train_tokens then have no
// effect, and when it is cancelled the index continues.
struct LiveIndex {
  IndexDescriptor index;
  // Iterations of k-means, half as many where a codebook starts from another
  // one of its generation; 0 = as many as the cost model finds to fit into the
  // prefill (PQCache, section 3.3, equation 3), at most 10.
  uint32_t iterations = 0;
  uint64_t seed = 0;
  uint32_t train_tokens = 0;  // sample per codebook and kv head; 0 = StoreOptions::train_tokens
  uint32_t sink_tokens = 16;  // excluded from training
};

// An engine's name of kBlockTokens tokens, for engines that do not know token ids: 128 bits that
// differ where the tokens differ. It need not cover the tokens before them.
using ContentKey = std::array<uint32_t, 4>;

// Names of consecutive tokens, in one of two ways: an id for each token, or a content key for each
// kBlockTokens tokens. All names of a sequence are of one kind.
struct TokenNames {
  std::span<const uint32_t> token_ids = {};
  std::span<const ContentKey> content_keys = {};

  TokenNames() = default;
  template <typename Ids>
  requires std::convertible_to<const Ids&, std::span<const uint32_t>> TokenNames(const Ids& ids)
      : token_ids(ids) {}  // NOLINT: ids are names
  TokenNames(std::span<const uint32_t> ids, std::span<const ContentKey> keys)
      : token_ids(ids), content_keys(keys) {}

  bool empty() const { return token_ids.empty() && content_keys.empty(); }
};

// Says whether the named tokens of a sequence remain as a cached prefix when it ends.
enum class Retention : uint32_t { kByOption = 0, kAlways = 1, kNever = 2 };  // StoreOptions::retain

struct SequenceSpec {
  std::string session;  // owns the sequence: DropSession drops it
  // Names of the prompt, as far as known, for shared prefixes: at most 2^22 ids, or as many content
  // keys as name 2^22 tokens.
  std::vector<uint32_t> token_ids = {};
  std::vector<ContentKey> content_keys = {};
  TokenNames names() const { return {token_ids, content_keys}; }
  std::string extra_key = {};  // further identity of the prefix; at most 256 bytes
  std::optional<LiveIndex> live_index = {};
  // Only in a rank's cache: name under which all ranks create their parts of
  // one sequence; at most kMaxGroupKeyBytes. Empty: the sequence is not tied to
  // others.
  std::string group_key = {};
  Retention retention = Retention::kByOption;  // a fork has that of its parent
};

struct CreatedSequence {
  uint64_t sequence_id = 0;
  uint64_t token_count = 0;  // tokens shared with other sequences: the next position to ingest
};

// Progress of a build after one codebook of one layer.
struct BuildProgress {
  uint32_t layer = 0;
  uint32_t layers_done = 0, layer_count = 0;
  uint32_t codebook_generation = 0, codebook_generation_count = 0;
  uint32_t iterations = 0;
  double inertia = 0;
  double seconds = 0;      // since the build began
  size_t index_bytes = 0;  // codes and counts of this layer so far
  size_t codebook_bytes = 0;
};

// A query of one layer. Queries: fp32, fp16 or bf16 [query_length, query_heads,
// key_dim]. The tokens of a longer query (speculation) share one selection,
// over the heads of all of them: at most kMaxGroupSize queries per kv head.
// Score takes one token.
struct Query {
  uint32_t layer = 0;
  // Absolute position of the first query token; rows up to query_position -
  // window_tokens must be stored.
  uint64_t query_position = 0;
  TensorView queries;
  // AttendPositions: `queries` has logits of the positions, [query_length,
  // query_heads, count], which the caller has computed (LayerQuery).
  bool has_logits = false;
};

struct Selected {
  uint32_t kv_heads = 0;
  uint32_t count = 0;               // k, per set
  std::vector<uint32_t> positions;  // [kv_heads, count], ascending per set
  uint64_t sink_tokens = 0,
           window_tokens = 0;  // tokens that the engine attends itself
};

struct Scores {
  std::vector<float> logits;  // [query_heads, tokens], scaled
  std::vector<float> max,
      sum_exp;  // [query_heads], over these tokens: sum of exp(logit - max)
};

// Leaves new elements as they are: for memory that is written once, and completely.
template <typename T>
struct UnclearedAllocator : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = UnclearedAllocator<U>;
  };
  template <typename U>
  void construct(U* place) noexcept {
    ::new (static_cast<void*>(place)) U;
  }
};
using FetchedBytes = std::vector<std::byte, UnclearedAllocator<std::byte>>;

struct Rows {
  kernels::DType dtype = kernels::DType::kF16;
  uint32_t kv_heads = 0, tokens = 0, dim = 0;
  FetchedBytes data;        // [kv_heads, tokens, dim]
  uint64_t rows_epoch = 0;  // see Snapshot
};

// A partial attention over the selected tokens: the engine merges it with its
// own over sink and window.
struct Attention {
  std::vector<float> output;  // [query_length, query_heads, value_dim]
  // [query_length, query_heads]: natural log of the sum of exp(scaled logits);
  // -inf when nothing was selected.
  std::vector<float> lse;
  Selected selected;  // `positions` only when requested
};

// Order of eviction.
//
// kLru     evicts the segment with the oldest last use first
// kReuse   least frequently used, with dynamic aging: each hit raises a segment's worth by one, and
//          an eviction raises the worth of all later uses. Segments that were used once are evicted
//          before segments that are reused repeatedly, however recent their use is, and old hits
//          lose weight over time
enum class EvictionPolicy : uint8_t { kLru = 0, kReuse = 1 };

// What memory was promised for.
enum class MemoryUse : uint8_t {
  kPool = 1,      // rows and indexes of a cache
  kRecords = 2,   // records of a cache for the next process
  kStaging = 3,   // rings through which clients pass rows
  kControl = 4,   // words of local sessions
  kRequests = 5,  // messages that are received; how much of it is allocated is not known
  kSetAside = 6,  // files that could not be recovered, until an operator deletes them
};

// Memory that one tenant was promised for one use. Requests and files that were set aside belong
// to no tenant.
struct MemoryAccount {
  std::string tenant;
  MemoryUse use = MemoryUse::kPool;
  size_t promised_bytes = 0;
  size_t allocated_bytes = 0;  // backed by pages now
};

// Tenant of calls that reach all tenants, for operators. No tenant has this name.
inline constexpr std::string_view kAllTenants;
// Selects caches by id.
using CacheFilter = std::function<bool(uint64_t cache_id)>;

// Counts of one tenant or of all. Those marked `all` are 0 for one tenant.
struct StoreStats {
  uint32_t lease_count = 0;          // revoked ones included
  uint32_t revoked_lease_count = 0;  // revoked leases that their holders have not released
  size_t staging_bytes = 0;          // of all sessions
  size_t shared_bytes = 0;           // rows that several sequences hold, counted once
  uint32_t live_work_count = 0;      // all: live indexes with work in progress or waiting
  uint32_t cached_prefix_count = 0;  // sequences whose sessions have ended
  uint32_t pinned_count = 0;
  uint64_t evicted_sequences = 0,
           evicted_bytes = 0;  // all: since the start; bytes freed by eviction
  // All: tokens of the prompts of CreateSequence, in whole steps of 128, and those
  // found in the cache.
  uint64_t prompt_tokens = 0, matched_tokens = 0;
  size_t memory_available_bytes = 0;       // all: to this process, by machine and control groups
  std::vector<MemoryAccount> memory = {};  // promised memory, by tenant and use
  uint32_t recovered_sequences = 0;        // all: recovered when the store was created
  size_t quarantined_bytes = 0;            // bytes that clients of earlier processes may still map
  uint64_t data_loss_count = 0;  // all: layers of segments, and pages, that failed their checksum
  PageCounts pages = {};
};

// What EraseTenant has removed.
struct ErasedTenant {
  uint32_t sequences = 0;
  uint32_t cached_prefixes = 0;
  size_t bytes = 0;            // of extents
  size_t remaining_bytes = 0;  // of extents that calls in progress still use
  uint32_t set_aside_files = 0;
  size_t set_aside_bytes = 0;
  // Folders of files that were set aside whose owners cannot be read: they may contain data of the
  // tenant.
  std::vector<std::string> unreadable_folders = {};
};

// What DropCache has freed.
struct DroppedCache {
  uint32_t sequences = 0;  // cached prefixes included
  size_t bytes = 0;        // of pages
};

// A request for Admit.
struct AdmitSpec {
  uint64_t prefill_tokens = 0;                // tokens that no other sequence holds
  uint64_t output_tokens = 0;                 // expected, appended one by one
  std::optional<IndexDescriptor> index = {};  // over all tokens; absent = the cache's default
};

// Answer of Admit: when a request fits into the cache's memory.
enum class Verdict : uint8_t {
  kFitsNow = 1,
  kFitsAfterEviction = 2,  // when cached prefixes and idle sequences are evicted
  kRetryable = 3,          // when sequences in use have ended or shrunk
  kExceedsCapacity = 4,    // exceeds the limit of the cache
};

struct Admission {
  Verdict verdict = Verdict::kExceedsCapacity;
  size_t needed_bytes = 0;     // of extents
  size_t bytes_to_evict = 0;   // kFitsAfterEviction: bytes to evict
  size_t shortfall_bytes = 0;  // kRetryable, kExceedsCapacity: missing bytes
  size_t limit_bytes = 0;      // bytes that the cache may use at present
};

// Limits of one tenant.
struct TenantQuota {
  // In pool bytes, over the capacities of all its caches.
  size_t guaranteed_bytes = 0;  // reserved: other tenants' caches cannot use them
  size_t max_bytes = std::numeric_limits<size_t>::max();
  uint32_t max_caches = std::numeric_limits<uint32_t>::max();
  size_t max_staging_bytes = std::numeric_limits<size_t>::max();  // over all its sessions
};

struct TenantQuotas {
  TenantQuota others;  // of each tenant that by_tenant does not name
  std::map<std::string, TenantQuota, std::less<>> by_tenant;

  const TenantQuota& Of(std::string_view tenant) const {
    const auto found = by_tenant.find(tenant);
    return found == by_tenant.end() ? others : found->second;
  }
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_VALUES_H_
