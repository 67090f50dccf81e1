// Segments: the extents that hold the KV of a token range, and functions to create and fill them.
//
// A segment's memory is written by the one writer of its sequence, and only in slots that no
// snapshot shows (sequence.h). All parts are held by shared_ptr: by the sequence and by each reader
// that is still using them.
//
// Thread-compatible.
#ifndef PQCACHED_KVSTORE_SEQUENCE_SEGMENT_H_
#define PQCACHED_KVSTORE_SEQUENCE_SEGMENT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/memory/checked_bytes.h"
#include "kvstore/memory/compute.h"
#include "kvstore/memory/pool.h"
#include "kvstore/model.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/records/record_table.h"
#include "kvstore/sequence/heat.h"

namespace pqcached::kvstore {

// Stored layers of a cache, ascending; a *layer slot* is an ordinal in it.
struct StoredLayers {
  struct Layer {
    uint32_t layer = 0;
    LayerShape shape;
    uint32_t first_head = 0;  // of this layer's kv heads among those of all layers
  };
  std::vector<Layer> layers;
  uint32_t head_count = 0;     // over all layers
  uint32_t indexed_count = 0;  // layers that indexes have: the others have no codes

  explicit StoredLayers(const CacheSpec& spec);
  uint32_t size() const { return static_cast<uint32_t>(layers.size()); }
  // Returns the layer slot of a kv head, which is numbered among those of all layers.
  uint32_t SlotOfHead(uint32_t head) const { return slot_of_head_[head]; }

 private:
  std::vector<uint32_t> slot_of_head_;  // [head_count]
};

// Centroids of one codebook generation, layer and index.
class Codebook {
 public:
  static size_t SizeBytes(const IndexDescriptor& index, const LayerShape& shape);
  // Writes the header; centroids are unspecified.
  Codebook(Extent extent, const IndexDescriptor& index, const LayerShape& shape,
           uint32_t codebook_generation);
  // Returns the codebook that an earlier process wrote into the extent; null if its header does not
  // match.
  static std::shared_ptr<const Codebook> Recover(Extent extent, const IndexDescriptor& index,
                                                 const LayerShape& shape);

  CodebookHeader& header() const { return *reinterpret_cast<CodebookHeader*>(extent_.data()); }
  ExtentRef extent() const { return extent_.ref(); }
  UnitRange units() const { return extent_.units(); }
  size_t used_bytes() const { return extent_.size_bytes(); }
  // Returns the size without rounding, which statistics report.
  size_t content_bytes() const;

 private:
  explicit Codebook(Extent extent) : extent_(std::move(extent)) {}

  Extent extent_;
};

// Rows of a token range over all stored layers.
class SegmentRows {
 public:
  static void AppendSizes(const StoredLayers& layers, uint32_t slot_capacity,
                          std::vector<size_t>& sizes_bytes);
  // `extents`: of the sizes that AppendSizes returns, in the same order.
  SegmentRows(uint64_t segment_id, uint32_t first_position, uint32_t slot_capacity,
              std::vector<Extent> extents);

  uint64_t segment_id() const { return segment_id_; }
  uint32_t first_position() const { return first_position_; }
  uint32_t slot_capacity() const { return slot_capacity_; }
  uint32_t end_capacity() const { return first_position_ + slot_capacity_; }
  std::byte* rows(uint32_t head) const { return extents_[head].data(); }
  ExtentRef extent(uint32_t head) const { return extents_[head].ref(); }
  UnitRange units(uint32_t head) const { return extents_[head].units(); }
  // Returns the rows of each kv head of a layer: [kv_heads].
  std::span<const std::byte* const> heads(const StoredLayers::Layer& layer) const {
    return std::span(pointers_).subspan(layer.first_head, layer.shape.kv_heads);
  }
  size_t used_bytes() const;
  // Slot that records these rows, if there is one; guarded by the table's mutex. Destroyed before
  // the extents.
  RecordSlot& record() const { return record_; }
  // Recovery: adds the expected content of the next layer's rows; called before the object is
  // shared. See checksum/verify.h.
  void SetExpectedChecksums(std::unique_ptr<const CheckedBytes> bytes) const {
    expected_.push_back(std::move(bytes));
  }
  const CheckedBytes* expected(uint32_t layer_slot) const {
    return layer_slot < expected_.size() ? expected_[layer_slot].get() : nullptr;
  }
  // Returns the number of sequences that hold the segment, including leases and readers of dropped
  // sequences.
  uint32_t user_count() const { return user_count_.load(std::memory_order_relaxed); }
  // Usage history of the segment; not part of its content.
  SegmentUsage& heat() const { return heat_; }

 private:
  friend class SegmentUse;

  uint64_t segment_id_;
  uint32_t first_position_;
  uint32_t slot_capacity_;
  std::vector<Extent> extents_;             // [heads of all layers]
  std::vector<const std::byte*> pointers_;  // [heads of all layers]
  mutable std::atomic<uint32_t> user_count_ = 0;
  mutable std::vector<std::unique_ptr<const CheckedBytes>> expected_;  // per layer slot
  mutable RecordSlot record_;
  mutable SegmentUsage heat_;
};

// Memory of one layer of a segment's index.
class IndexData {
 public:
  explicit IndexData(Extent extent) : extent_(std::move(extent)) {}

  std::byte* data() const { return extent_.data(); }
  ExtentRef ref() const { return extent_.ref(); }
  UnitRange units() const { return extent_.units(); }
  size_t size_bytes() const { return extent_.size_bytes(); }
  // Same as the functions of SegmentRows.
  RecordSlot& record() const { return record_; }
  void SetExpectedChecksums(std::unique_ptr<const CheckedBytes> bytes) const {
    expected_ = std::move(bytes);
  }
  const CheckedBytes* expected() const { return expected_.get(); }

 private:
  Extent extent_;
  mutable std::unique_ptr<const CheckedBytes> expected_;
  mutable RecordSlot record_;
};

// Codes of a segment under one index, and the codebooks that they refer to.
class SegmentIndex {
 public:
  // Data of one layer; shared by the versions of a segment's index.
  struct Layer {
    std::shared_ptr<const IndexData> data;  // null: none yet
    std::shared_ptr<const Codebook> codebook;

    IndexDataHeader& header() const { return *reinterpret_cast<IndexDataHeader*>(data->data()); }
  };

  static size_t LayerBytes(const IndexDescriptor& index, const LayerShape& shape,
                           uint32_t slot_capacity);
  // Writes the header and zeroes the planes. Slots before `counted_begin` will not be counted.
  static Layer MakeLayer(const LayerShape& shape, uint32_t slot_capacity, uint32_t counted_begin,
                         Extent extent, std::shared_ptr<const Codebook> codebook);

  // Returns a layer that an earlier process wrote; without data if its header does not match.
  static Layer RecoverLayer(const LayerShape& shape, uint32_t slot_capacity, Extent extent,
                            std::shared_ptr<const Codebook> codebook);

  static void AppendSizes(const StoredLayers& layers, const IndexDescriptor& index,
                          uint32_t slot_capacity, std::vector<size_t>& sizes_bytes);
  // Creates all layers that have an index. `extents`: of the sizes that AppendSizes returns.
  // `codebooks`: per layer slot; null for layers without an index. Every layer counts as ready,
  // until BeginLayers.
  SegmentIndex(const StoredLayers& layers, uint32_t slot_capacity, uint32_t counted_begin,
               std::vector<Extent> extents, std::vector<std::shared_ptr<const Codebook>> codebooks);
  // Creates an index without layers; none is ready.
  SegmentIndex(const StoredLayers& layers, const IndexDescriptor& index);

  // Returns a copy that has `layer` in this slot, marked as ready.
  std::shared_ptr<const SegmentIndex> With(uint32_t layer_slot, Layer layer) const;

  // REQUIRES, for the functions with a layer_slot: the layer exists, as every ready layer does.
  IndexDataHeader& header(uint32_t layer_slot) const { return layers_[layer_slot].header(); }
  ExtentRef extent(uint32_t layer_slot) const { return layers_[layer_slot].data->ref(); }
  const Layer& layer(uint32_t layer_slot) const { return layers_[layer_slot]; }
  const std::shared_ptr<const Codebook>& codebook(uint32_t layer_slot) const {
    return layers_[layer_slot].codebook;
  }
  // Returns the codebook per layer slot; null where the layer does not exist.
  std::vector<std::shared_ptr<const Codebook>> codebooks() const;
  uint32_t codebook_generation() const;  // of the first existing layer; ~0u if none exists
  const IndexDescriptor& index() const { return index_; }
  size_t used_bytes() const;

  // Marks all layers as not ready, for work that publishes layer by layer (Sequence::PublishIndex)
  // and calls MarkReady for each. A ready layer has its codebook and the codes of every visible
  // row; in a closed segment it never changes again.
  void BeginLayers();
  void MarkReady(uint32_t layer_slot) const {
    layer_ready_[layer_slot].store(true, std::memory_order_release);
  }
  bool ready(uint32_t layer_slot) const {
    return layer_ready_[layer_slot].load(std::memory_order_acquire);
  }
  // Returns whether the layer is ready, or has no index.
  bool complete(uint32_t layer_slot) const { return !has_index_[layer_slot] || ready(layer_slot); }
  bool all_ready() const;  // of the layers that have an index
  // Returns whether any part is still to be compared with the checksums of an earlier process
  // (checksum/verify.h).
  bool recovered() const;

 private:
  SegmentIndex(const IndexDescriptor& index, std::vector<bool> has_index);

  IndexDescriptor index_;
  std::vector<bool> has_index_;                       // per layer slot
  std::vector<Layer> layers_;                         // per layer slot
  std::unique_ptr<std::atomic<bool>[]> layer_ready_;  // per layer slot
};

// Returns the bytes of codes, counts and posting lists of one layer of a segment under an index,
// without rounding, which statistics report.
size_t IndexContentBytes(const LayerShape& shape, const IndexDescriptor& index,
                         uint32_t slot_capacity, uint32_t slot_count);

class SegmentUse;  // sequence.h

// A segment as one snapshot sees it.
struct SegmentEntry {
  std::shared_ptr<const SegmentRows> rows;
  // Per index of the sequence; null where the segment does not have that index (yet).
  std::vector<std::shared_ptr<const SegmentIndex>> indexes;
  bool closed = false;  // its token count is final
  // Position after the last token that this sequence has in the segment; 0 while open.
  uint32_t token_end = 0;
  std::shared_ptr<const SegmentUse> use = nullptr;  // this sequence's share; set by Sequence
};

// Codebooks [indexes][layer slots] under which a new segment's rows are encoded; null for layers
// without an index. An index with an empty list gets no codes.
using NewestCodebooks = std::vector<std::vector<std::shared_ptr<const Codebook>>>;

// Returns the least slot_capacity that holds these tokens.
constexpr uint32_t RoundUpToBlock(uint32_t tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
}

struct NewSegment {
  uint64_t segment_id = 0;
  uint32_t first_position = 0;
  uint32_t slot_capacity = 0;
};

// Creates the segments, all or none. Errors: kResourceExhausted; the message gives the shortfall
// over all of them.
absl::StatusOr<std::vector<SegmentEntry>> CreateSegments(Pool& pool, const StoredLayers& layers,
                                                         std::span<const NewSegment> segments,
                                                         const NewestCodebooks& codebooks);

// Encodes the given slots of one layer and kv head. `scratch`: EncodeScratchBytes of the index
// type, 64-byte aligned.
void EncodeSlots(const kernels::Exec& exec, const StoredLayers::Layer& layer,
                 const SegmentRows& rows, const SegmentIndex::Layer& index, uint32_t kv_head,
                 PositionRange slots, std::span<std::byte> scratch);
inline void EncodeSlots(const kernels::Exec& exec, const StoredLayers::Layer& layer,
                        const SegmentRows& rows, const SegmentIndex& index, uint32_t layer_slot,
                        uint32_t kv_head, PositionRange slots, std::span<std::byte> scratch) {
  if (!index.ready(layer_slot)) return;  // a layer that becomes ready later is encoded as a whole
  EncodeSlots(exec, layer, rows, index.layer(layer_slot), kv_head, slots, scratch);
}

// Makes what the index type adds to closed segments of the slots [counted_begin, slot_end) of one
// layer, such as the counts of a pq index, and announces it. Does nothing before the layer is
// ready, or when it was done already.
//
// REQUIRES: the segment is closed, or about to be.
void CloseLayer(Compute& compute, const StoredLayers::Layer& layer, const SegmentRows& rows,
                const SegmentIndex& index, uint32_t layer_slot, uint32_t slot_end);
// CloseLayer in two steps: CloseHead works on one kv head, PublishClosing announces all heads.
// CloseHead returns false after `keep_going` has: PublishClosing must then not be called.
bool CloseHead(Compute& compute, const StoredLayers::Layer& layer, const SegmentRows& rows,
               const SegmentIndex::Layer& index, uint32_t kv_head, uint32_t slot_end,
               const std::function<bool()>& keep_going = {});
void PublishClosing(const SegmentIndex::Layer& index, uint32_t slot_end);

// Returns, per index of the list, the newest codebooks, with which new rows are encoded. Empty for
// an index that no segment has ready in all layers.
NewestCodebooks NewestOf(std::span<const SegmentEntry> segments, size_t index_count);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_SEGMENT_H_
