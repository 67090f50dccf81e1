// Layout of a pool: everything that a client may read in mapped memory.
//
// A *row* is the KV entry [key, value] of one token, layer and kv head. A *segment* holds a range
// of tokens of a sequence over all stored layers, at most `slot_capacity` of them; a *slot* is the
// place of one token in it. A *codebook generation* is a range of segments that share one
// codebook per layer and index.
//
// A *pool* is the memory of one cache, a memfd that only the sidecar writes. It is divided into
// *extents* of 2^order x 64 KiB, addressed by (offset, order) relative to the pool's start. Extents
// have four kinds of content:
//
//   kind      one extent per                  content
//   rows      (segment, layer, kv head)       row slots, `row_bytes` apart, no header
//   index     (segment, layer, index)         IndexDataHeader, then per kv head: code planes, cell
//                                             counts, posting lists
//   codebook  (generation, layer, index)      CodebookHeader, then per kv head: centroids, maps
//   order     (segment, layer), only when     the permutation slot -> token
//             row_order is RowOrder::kCell
//
// SegmentDescriptor and LayerDescriptor name the extents of each layer of a sequence
// (attachment.h). The client receives them when it attaches and with later answers. State that
// changes without an answer is stored in the ControlPage and its LeaseWords.
//
// Rules that make reading without a lock safe:
//   - A slot below the sequence's token count never changes while a lease is held; a slot at or
//     above it may change at any time and has no meaning.
//   - LeaseWords::token_count grows monotonically while a lease is held (TruncateSequence revokes
//     the leases of other holders that it shortens). It is stored with release order after the
//     bytes that it publishes, and loaded with acquire order.
//   - A READY layer is immutable: rows, index data, codebook and order.
//   - An extent is reused only after the lease is released or its session's socket is closed.
//
// All integers are little-endian. All structs are packed by construction (static_asserts below).
// With `layout_version` raised they grow at their end, or give a reserved field a name, and change
// in no other way. This header needs only the standard library.
#ifndef PQCACHED_KVSTORE_READ_LAYOUT_H_
#define PQCACHED_KVSTORE_READ_LAYOUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pqcached::kvstore {

// Version of the structs below and of AttachmentHeader. A change of any of them raises it and adds
// rows to tests/kvstore/read/layout_version_test.cc:
//   1  first
//   2  IndexDataHeader has posting lists
//   3  ControlPage has slot words
//   4  CodebookHeader has paired_dims, IndexDescriptor has a layout of sub-spaces
//   5  SubspaceLayout has kWeighted, whose codebooks have maps of keys and queries
//   6  IndexKind has kGraph
//   7  IndexKind has kClusters
inline constexpr uint32_t kLayoutVersion = 7;
// Oldest version of extents that an earlier process may have left in a pool and that this one
// reads: paired_dims and the layout are 0 there, which is what they mean.
inline constexpr uint32_t kOldestExtentVersion = 3;
constexpr bool ReadsExtent(uint32_t layout_version) {
  return layout_version >= kOldestExtentVersion && layout_version <= kLayoutVersion;
}
inline constexpr uint32_t kExtentUnitShift = 16;
inline constexpr size_t kMinExtentBytes = size_t{1} << kExtentUnitShift;
inline constexpr uint32_t kMaxExtentOrder = 24;   // 2^24 x 64 KiB = 1 TiB
inline constexpr uint32_t kBlockTokens = 128;     // unit of the GPU cache, of checksums and of I/O
inline constexpr size_t kContentAlignment = 128;  // of planes, counts and centroids in an extent

// Limits. Sizes that another process supplies are checked against these before any arithmetic, so
// that no product below can overflow.
inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint32_t kMaxKvHeads = 256;
inline constexpr uint32_t kMaxQueryHeads = 1024;
inline constexpr uint32_t kMaxGroupSize = 64;  // query heads per kv head
inline constexpr uint32_t kMinHeadDim = 32;
inline constexpr uint32_t kMaxHeadDim = 256;
inline constexpr uint32_t kHeadDimMultiple = 8;
inline constexpr uint32_t kMaxSequenceTokens = uint32_t{1} << 30;
inline constexpr uint32_t kMaxSegmentTokens = uint32_t{1} << 20;
inline constexpr uint32_t kMaxIndexes = 4;  // over the same rows: pq m=2 b=6 and m=4 b=8, ...
inline constexpr uint32_t kMaxExcludedRanges = 16;
inline constexpr uint32_t kMaxQueryLength = 8;
inline constexpr uint32_t kMaxRangeQueryLength = 8192;  // of attention over a range

// Location of an extent in its pool, and the block of 2^order units that it begins and that is long
// enough for it; the sidecar may use the rest of the block for other extents. order == kNoExtent
// marks the absence of an extent.
struct ExtentRef {
  static constexpr uint32_t kNoExtent = 0xffffffffu;
  uint32_t unit = 0;  // offset in the pool / kMinExtentBytes
  uint32_t order = kNoExtent;

  bool valid() const { return order != kNoExtent; }
  size_t offset_bytes() const { return size_t{unit} << kExtentUnitShift; }
  size_t size_bytes() const { return valid() ? kMinExtentBytes << order : 0; }
  friend bool operator==(const ExtentRef&, const ExtentRef&) = default;
};

// Life cycle of a segment, over all its layers.
enum class SegmentState : uint32_t {
  kOpen = 0,    // its token count may still grow
  kClosed = 1,  // its token count is final
  kSealed = 2,  // every layer is READY under an index of its sequence, or its cache needs none
};

// Life cycle of one layer of a segment, under one index.
enum class LayerState : uint32_t {
  kEmpty = 0,   // rows are missing
  kFilled = 1,  // all rows are written, the index is not: flat selection only
  kReady = 2,   // rows and index are complete and immutable
};

// Order of the row slots of a layer.
enum class RowOrder : uint32_t {
  kToken = 0,  // slot i holds token `first_position + i`
  // Slots are grouped by PQ cell; `order` maps slot -> token. Reserved: no sidecar of this version
  // writes it.
  kCell = 1,
};

enum class IndexKind : uint32_t {
  kFlat = 0,  // exact scores over the rows; has no index data
  kPq = 1,
  kGraph = 2,     // graphs over keys, one for each query head (RetrievalAttention)
  kClusters = 3,  // clusters of keys, for tail estimates (RetroInfer)
};

// Cut of the sub-spaces of a pq index from a key. Numbered as in the proto.
enum class SubspaceLayout : uint32_t {
  kPairs = 0,       // keeps pairs of a rotary embedding together, where the cache's rope names them
  kContiguous = 1,  // consecutive dims
  // Consecutive dims of a rotated key, whose rotation query samples have determined
  // (kernels/train/key_map.h).
  kWeighted = 2,
};

// One index over a layer. A sequence has at most kMaxIndexes of them, numbered by index slot.
struct IndexDescriptor {
  IndexKind kind = IndexKind::kFlat;
  // pq: m, divides key_dim, at most half of it. graph: neighbours of a key by projection. clusters:
  // tokens of a cluster
  uint32_t subspace_count = 0;
  uint32_t bits = 0;  // pq: b in 1..8. graph: nearest keys of a query sample
  // Of pq. graph: the number of query samples, at most
  SubspaceLayout layout = SubspaceLayout::kPairs;
  friend bool operator==(const IndexDescriptor&, const IndexDescriptor&) = default;
};

// Header of an index extent, which holds the data of one segment and layer under one pq index.
//
// Offsets are in bytes from the start of the header:
//
//   code planes    plane_offset_bytes + kv_head * head_stride_bytes: one plane after the other,
//                  `plane_stride_bytes` apart, padded with zero codes (kernels/select/pq.h defines
//                  the sub-spaces of each plane)
//   cell counts    counts_offset_bytes + kv_head * counts_stride_bytes, when cell_count > 0:
//                  uint32_t[cell_count], the number of slots in [counted_begin, counted_end) that
//                  have each joint code (*cell*)
//   posting lists  of the same slots (kernels/select/cells/pq_postings.h): the begins of every page
//                  at posting_begins_offset_bytes + kv_head * posting_begins_stride_bytes, the
//                  slots at posting_slots_offset_bytes + kv_head * posting_slots_stride_bytes; both
//                  strides are 0 without lists
//
// Cells are counted only where m*b <= 12 and 2 * slot_capacity >= 2^(m*b): scanning the codes of a
// smaller segment is faster than reading its counts. counted_end is stored once, with release
// order, when the segment is closed. Before that it is 0 and counts and lists have no meaning.
//
// Under an index of kind kGraph the planes of a kv head are graphs (kernels/graph/graph.h), one for
// each of its query heads, whose nodes are the slots [counted_begin, counted_end). There are no
// counts and lists. Under kClusters a kv head has the numbers of tokens of its clusters, rows of
// plane_stride_bytes for these, and the codes of the slots (kvstore/read/indexes/clusters.h).
struct IndexDataHeader {
  static constexpr uint32_t kMagic = 0x58444950;  // "PIDX"
  uint32_t magic = kMagic;
  uint32_t layout_version = kLayoutVersion;
  IndexDescriptor index;
  uint32_t kv_head_count = 0;
  uint32_t slot_capacity = 0;
  uint64_t plane_offset_bytes = 0;
  uint64_t head_stride_bytes = 0;
  uint64_t plane_stride_bytes = 0;
  uint64_t counts_offset_bytes = 0;
  uint64_t counts_stride_bytes = 0;
  uint32_t cell_count = 0;
  uint32_t counted_begin = 0;  // slots before it (sink tokens) are coded but not counted
  std::atomic<uint32_t> counted_end = 0;
  // Ordinal of the codebook generation, within the sequence, that coded these slots.
  uint32_t codebook_generation = 0;
  uint64_t posting_begins_offset_bytes = 0;
  uint64_t posting_begins_stride_bytes = 0;
  uint64_t posting_slots_offset_bytes = 0;
  uint64_t posting_slots_stride_bytes = 0;
};

// Header of a codebook extent, which holds the centroids of one codebook generation, layer and
// index.
//
// The centroids of a kv head are float[m][2^b][key_dim / m] at centroid_offset_bytes + kv_head *
// head_stride_bytes. Under SubspaceLayout::kWeighted the maps of keys and of queries follow, at the
// next multiple of kContentAlignment each: float[key_dim][key_dim], input by output. The codebook
// says itself how its sub-spaces are cut: those of earlier versions are contiguous under any layout
// of their index.
//
// Under an index of kind kGraph a kv head has query samples in place of centroids: their number for
// each query head, uint32_t, and at the next multiple of kContentAlignment float[query_heads of the
// kv head][most samples][key_dim]. Under kClusters it has nothing.
struct CodebookHeader {
  static constexpr uint32_t kMagic = 0x4b424350;  // "PCBK"
  uint32_t magic = kMagic;
  uint32_t layout_version = kLayoutVersion;
  IndexDescriptor index;
  uint32_t kv_head_count = 0;
  uint32_t key_dim = 0;
  uint64_t centroid_offset_bytes = 0;
  uint64_t head_stride_bytes = 0;
  uint32_t codebook_generation = 0;
  uint32_t trained_token_count = 0;
  uint32_t iteration_count = 0;
  uint32_t paired_dims = 0;  // see kernels/select/pq.h
  // Mean squared distance of the training keys to their centroids, summed over sub-spaces.
  double inertia = 0;
};

// Location of the rows and index data of one layer of a segment.
struct LayerDescriptor {
  uint32_t layer = 0;
  RowOrder row_order = RowOrder::kToken;
  uint32_t row_bytes = 0;
  uint32_t kv_head_count = 0;
  // Its row extents are row_extents[row_extent_begin .. + kv_head_count) of the attachment.
  uint32_t row_extent_begin = 0;
  uint32_t reserved = 0;
  ExtentRef order;                     // permutation slot -> token; valid when row_order is kCell
  ExtentRef index_data[kMaxIndexes];   // valid when state is kReady and the index is not kFlat
  ExtentRef codebook[kMaxIndexes];     // valid under the same condition
  LayerState state[kMaxIndexes] = {};  // per index of the sequence
};

// A token range of one sequence over all its layers.
struct SegmentDescriptor {
  uint64_t segment_id = 0;
  uint32_t first_position = 0;  // absolute position of slot 0
  uint32_t slot_capacity = 0;   // a multiple of kBlockTokens
  // End position (exclusive) of this sequence's tokens in the segment; 0 for the active segment,
  // whose end is the sequence's token count.
  uint32_t token_end = 0;
  uint32_t reserved = 0;
};

// Words of one lease that the sidecar updates without sending an answer to the session.
struct LeaseWords {
  static constexpr uint32_t kRevoked = 1;    // truncated, dropped or expired: the client detaches
  static constexpr uint32_t kSuspended = 2;  // set until ResumeSequence
  std::atomic<uint64_t> lease_id = 0;        // 0: these words are unused
  // Version of the newest attachment, written before the first token_count that belongs to it. When
  // it is higher than the client's, tokens that the client did not count before may be in other
  // places than its attachment's; it fetches new descriptors to read these.
  std::atomic<uint64_t> version = 0;
  std::atomic<uint32_t> token_count = 0;  // complete in all stored layers
  std::atomic<uint32_t> flags = 0;
  uint32_t reserved[10] = {};
};

// Maximum number of slots in a session's staging ring.
inline constexpr uint32_t kMaxStagingSlots = 1024;

// First page of a session's read-only control memory. The slot words and LeaseWords[word_count]
// follow it.
//
// A slot word is the completion counter of one staging slot, an atomic 64-bit number: every call
// that names the slot with a lower generation has finished, or will be refused.
struct ControlPage {
  static constexpr uint32_t kMagic = 0x4c544350;  // "PCTL"
  uint32_t magic = kMagic;
  uint32_t layout_version = kLayoutVersion;
  // Boot id of the worker that serves the session; 0 after the worker has ended (WorkerEnd), or has
  // ended the session. The client checks it after each step, before it uses the results.
  std::atomic<uint64_t> boot_word = 0;
  std::atomic<uint32_t> wake_word = 0;  // shared futex; incremented whenever a word below changes
  uint32_t word_count = 0;
  uint64_t words_offset_bytes = 0;
  uint32_t slot_word_count = 0;  // 0: the sidecar publishes no slot words
  uint32_t reserved = 0;
  uint64_t slot_words_offset_bytes = 0;
};

// Part of the first page of control memory that says how a worker has ended; zero while it serves,
// in memory of older sidecars, and when the worker itself ended the session.
//
// The rows that a client has mapped stay as they are after a worker's end, until the client closes
// its connection; what the next worker is asked to do may change them only where no sequence shows
// them. So a client that reads them uses its results when no next worker serves yet, or when its
// lease of the next worker shows that the sequence is still there.
struct WorkerEnd {
  static constexpr size_t kOffsetBytes = 1024;
  // Boot word of the worker, written by the supervisor or the next worker before
  // ControlPage::boot_word becomes 0.
  std::atomic<uint64_t> boot_word = 0;
  std::atomic<uint32_t> has_successor = 0;  // 1: written by the next worker before it serves
  uint32_t reserved = 0;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(ExtentRef) == 8 && sizeof(IndexDescriptor) == 16);
static_assert(sizeof(IndexDataHeader) == 120 && sizeof(CodebookHeader) == 72);
static_assert(sizeof(LeaseWords) == 64 && sizeof(SegmentDescriptor) == 24 &&
              sizeof(LayerDescriptor) == 112);
static_assert(sizeof(ControlPage) == 48 && sizeof(WorkerEnd) == 16);
static_assert(std::is_trivially_copyable_v<LayerDescriptor> &&
              std::is_trivially_copyable_v<SegmentDescriptor>);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_LAYOUT_H_
