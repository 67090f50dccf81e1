// Layout of a pool: everything that a client may read in mapped memory.
//
// A *pool* is the memory of one cache, a memfd that the sidecar alone writes. It is divided into
// *extents* of 2^order x 64 KiB, found by (offset, order) relative to the pool's start. Four kinds
// of content live in extents:
//
//   rows       one per (segment, layer, kv head): row slots, `row_bytes` apart, no header
//   index      one per (segment, layer, index): IndexDataHeader, then per kv head code planes and
//   cell counts codebook   one per (epoch, layer, index):   CodebookHeader, then per kv head
//   centroids order      one per (segment, layer) when row_order is kCellOrder: the permutation
//   slot -> token
//
// Which extents belong to a layer of a sequence is told by SegmentDescriptor and LayerDescriptor
// (attachment.h). They travel to the client when it attaches and with later answers; what changes
// without an answer stands in the ControlPage and its LeaseWords.
//
// Rules that make reading without a lock safe:
//   - A slot below the sequence's token count never changes while a lease is held; a slot at or
//     above it may change at any time and means nothing.
//   - LeaseWords::token_count grows monotonically while a lease is held (TruncateSequence revokes
//     the leases of others that it shortens); it is stored with release order after the bytes that
//     it announces, and loaded with acquire order.
//   - A READY layer is immutable: rows, index data, codebook and order.
//   - An extent is reused only after the lease is released or its session's socket is closed.
//
// All integers are little-endian; all structs are packed by construction (static_asserts below) and
// only ever grow at their end, with `layout_version` raised. Nothing here needs more than the
// standard library.
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
inline constexpr uint32_t kLayoutVersion = 3;
inline constexpr uint32_t kExtentUnitShift = 16;
inline constexpr size_t kMinExtentBytes = size_t{1} << kExtentUnitShift;
inline constexpr uint32_t kMaxExtentOrder = 24;   // 2^24 x 64 KiB = 1 TiB
inline constexpr uint32_t kBlockTokens = 128;     // unit of the GPU cache, of checksums and of I/O
inline constexpr size_t kContentAlignment = 128;  // of planes, counts, centroids in an extent

// Limits. Sizes from outside are checked against these before any arithmetic, so that no product
// below can overflow.
inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint32_t kMaxKvHeads = 256;
inline constexpr uint32_t kMaxQueryHeads = 1024;
inline constexpr uint32_t kMaxGroupSize = 64;  // query heads per kv head
inline constexpr uint32_t kMinHeadDim = 32;
inline constexpr uint32_t kMaxHeadDim = 256;
inline constexpr uint32_t kHeadDimMultiple = 8;
inline constexpr uint32_t kMaxSequenceTokens = uint32_t{1} << 30;
inline constexpr uint32_t kMaxSegmentTokens = uint32_t{1} << 20;
inline constexpr uint32_t kMaxIndexes = 4;  // over the same rows: pq m=2 b=6 beside m=4 b=8, ...
inline constexpr uint32_t kMaxExcludedRanges = 16;
inline constexpr uint32_t kMaxQueryLength = 8;

// Where an extent lies. order == kNoExtent means that there is none.
struct ExtentRef {
  static constexpr uint32_t kNoExtent = 0xffffffffu;
  uint32_t unit = 0;  // offset in the pool / kMinExtentBytes
  uint32_t order = kNoExtent;

  bool valid() const { return order != kNoExtent; }
  size_t offset_bytes() const { return size_t{unit} << kExtentUnitShift; }
  size_t size_bytes() const { return valid() ? kMinExtentBytes << order : 0; }
  friend bool operator==(const ExtentRef&, const ExtentRef&) = default;
};

// Life of a segment, over all its layers.
enum class SegmentState : uint32_t {
  kOpen = 0,    // its token count may still grow
  kClosed = 1,  // its token count is final
  kSealed = 2,  // every layer is READY under its sequence's default index
};

// Life of one layer of a segment, under one index.
enum class LayerState : uint32_t {
  kEmpty = 0,   // rows are missing
  kFilled = 1,  // all rows are there, the index is not: flat selection only
  kReady = 2,   // rows and index are there and immutable
};

// Order of the row slots of a layer.
enum class RowOrder : uint32_t {
  kToken = 0,  // slot i holds token `first_position + i`
  kCell = 1,   // slots are grouped by PQ cell; `order` maps slot -> token. Reserved: no sidecar of
               // this version writes it.
};

enum class IndexKind : uint32_t {
  kFlat = 0,  // exact scores over the rows; owns no index data
  kPq = 1,
};

// One index over a layer. Indexes of a sequence stand in slots 0..kMaxIndexes-1.
struct IndexDescriptor {
  IndexKind kind = IndexKind::kFlat;
  uint32_t subspace_count = 0;  // pq: m in {1, 2, 4, 8, 16}, divides key_dim
  uint32_t bits = 0;            // pq: b in 4..8
  uint32_t reserved = 0;
  friend bool operator==(const IndexDescriptor&, const IndexDescriptor&) = default;
};

// Start of an index extent: what one segment and layer holds for one pq index.
//
// At plane_offset_bytes + kv_head * head_stride_bytes: code planes, one after the other,
// `plane_stride_bytes` apart (kernels/pq.h tells which sub-spaces a plane holds), padded with zero
// codes. At counts_offset_bytes + kv_head * counts_stride_bytes, when cell_count > 0:
// uint32_t[cell_count], how many of the slots [counted_begin, counted_end) have each joint code
// (m*b <= 12 and 2 * slot_capacity >= 2^(m*b) only: smaller segments are faster read than counted).
// Likewise the posting lists of the same slots (kernels/pq_postings.h): the begins of every page at
// posting_begins_offset_bytes + kv_head * posting_begins_stride_bytes, the slots at
// posting_slots_offset_bytes + kv_head * posting_slots_stride_bytes. counted_end is stored once, with
// release order, when the segment is closed; until then it is 0, nothing is counted or listed, and
// counts and lists mean nothing. Without lists their strides are 0.
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
  uint32_t counted_begin = 0;  // slots before it (the sink) are coded but not counted
  std::atomic<uint32_t> counted_end = 0;
  uint32_t codebook_epoch = 0;  // ordinal of the codebook of its sequence that coded these slots
  uint64_t posting_begins_offset_bytes = 0;
  uint64_t posting_begins_stride_bytes = 0;
  uint64_t posting_slots_offset_bytes = 0;
  uint64_t posting_slots_stride_bytes = 0;
};

// Start of a codebook extent: centroids of one epoch, layer and index.
//
// At centroid_offset_bytes + kv_head * head_stride_bytes: float[m][2^b][key_dim / m].
struct CodebookHeader {
  static constexpr uint32_t kMagic = 0x4b424350;  // "PCBK"
  uint32_t magic = kMagic;
  uint32_t layout_version = kLayoutVersion;
  IndexDescriptor index;
  uint32_t kv_head_count = 0;
  uint32_t key_dim = 0;
  uint64_t centroid_offset_bytes = 0;
  uint64_t head_stride_bytes = 0;
  uint32_t epoch = 0;
  uint32_t trained_token_count = 0;
  uint32_t iteration_count = 0;
  uint32_t reserved = 0;
  double inertia =
      0;  // mean squared distance of the trained keys to their centroids, summed over sub-spaces
};

// Rows of one layer of a segment.
struct LayerDescriptor {
  uint32_t layer = 0;
  RowOrder row_order = RowOrder::kToken;
  uint32_t row_bytes = 0;
  uint32_t kv_head_count = 0;
  uint32_t row_extent_begin = 0;  // its row extents are row_extents[row_extent_begin ..
                                  // + kv_head_count) of the attachment
  uint32_t reserved = 0;
  ExtentRef order;                     // permutation, when row_order is kCell
  ExtentRef index_data[kMaxIndexes];   // valid when state is kReady and the index is no kFlat
  ExtentRef codebook[kMaxIndexes];     // likewise
  LayerState state[kMaxIndexes] = {};  // per index of the sequence
};

// A token range of one sequence over all its layers.
struct SegmentDescriptor {
  uint64_t segment_id = 0;
  uint32_t first_position = 0;  // absolute position of slot 0
  uint32_t slot_capacity = 0;   // a multiple of kBlockTokens
  uint32_t token_end = 0;       // position behind the last token that this sequence has in it; 0
                                // while it is the open tail, which ends with the token count
  uint32_t reserved = 0;
};

// What changes for one lease without an answer to its session.
struct LeaseWords {
  static constexpr uint32_t kRevoked = 1;    // shortened, dropped or expired: detach
  static constexpr uint32_t kSuspended = 2;  // until ResumeSequence
  std::atomic<uint64_t> lease_id = 0;        // 0 = these words are unused
  std::atomic<uint64_t> version = 0;         // of the newest attachment: a higher one than the
                                             // client's tells it to fetch descriptors
  std::atomic<uint32_t> token_count = 0;     // complete over all stored layers
  std::atomic<uint32_t> flags = 0;
  uint32_t reserved[10] = {};
};

// At most so many slots has a session's staging ring.
inline constexpr uint32_t kMaxStagingSlots = 1024;

// First page of a session's read-only control memory; slot words and LeaseWords[word_count] follow.
//
// A slot word is an atomic 64-bit number: no call that names the slot with a lower generation is at work
// any more, or will be taken.
struct ControlPage {
  static constexpr uint32_t kMagic = 0x4c544350;  // "PCTL"
  uint32_t magic = kMagic;
  uint32_t layout_version = kLayoutVersion;
  // Of the worker that serves; 0 when it has ended. Checked after each step, before results are
  // used.
  std::atomic<uint64_t> boot_word = 0;
  std::atomic<uint32_t> wake_word = 0;  // futex (shared): raised whenever a word below changes
  uint32_t word_count = 0;
  uint64_t words_offset_bytes = 0;
  uint32_t slot_word_count = 0;  // 0: slots are not told of
  uint32_t reserved = 0;
  uint64_t slot_words_offset_bytes = 0;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(ExtentRef) == 8 && sizeof(IndexDescriptor) == 16);
static_assert(sizeof(IndexDataHeader) == 120 && sizeof(CodebookHeader) == 72);
static_assert(sizeof(LeaseWords) == 64 && sizeof(SegmentDescriptor) == 24 &&
              sizeof(LayerDescriptor) == 112);
static_assert(sizeof(ControlPage) == 48);
static_assert(std::is_trivially_copyable_v<LayerDescriptor> &&
              std::is_trivially_copyable_v<SegmentDescriptor>);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_LAYOUT_H_
