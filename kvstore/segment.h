// Segments: the extents that hold a token range, and the words to make and fill them.
//
// A segment's memory is written by the one writer of its sequence, and only in slots that no
// snapshot shows (sequence.h). Everything here is shared by shared_ptr: by the sequence and by each
// reader that still looks at it.
//
// Thread-compatible.
#ifndef PQCACHED_KVSTORE_SEGMENT_H_
#define PQCACHED_KVSTORE_SEGMENT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/checked_bytes.h"
#include "kvstore/heat.h"
#include "kvstore/model.h"
#include "kvstore/pool.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/record_table.h"

namespace pqcached::kvstore {

// The stored layers of a cache, ascending; a *layer slot* is an ordinal in it.
struct StoredLayers {
  struct Layer {
    uint32_t layer = 0;
    LayerShape shape;
    uint32_t first_head = 0;  // of its kv heads among those of all layers
  };
  std::vector<Layer> layers;
  uint32_t head_count = 0;  // over all layers

  explicit StoredLayers(const CacheSpec& spec);
  uint32_t size() const { return static_cast<uint32_t>(layers.size()); }
  // The layer of a kv head among those of all layers.
  uint32_t SlotOfHead(uint32_t head) const { return slot_of_head_[head]; }

 private:
  std::vector<uint32_t> slot_of_head_;  // [head_count]
};

// Centroids of one epoch, layer and index.
class Codebook {
 public:
  static size_t SizeBytes(const IndexDescriptor& index, const LayerShape& shape);
  // Writes the header; centroids are unspecified.
  Codebook(Extent extent, const IndexDescriptor& index, const LayerShape& shape, uint32_t epoch);
  // One that an earlier process wrote; null when it has another header.
  static std::shared_ptr<const Codebook> Recover(Extent extent, const IndexDescriptor& index,
                                                 const LayerShape& shape);

  CodebookHeader& header() const { return *reinterpret_cast<CodebookHeader*>(extent_.data()); }
  std::span<float> centroids(uint32_t kv_head) const;
  ExtentRef extent() const { return extent_.ref(); }
  size_t used_bytes() const { return extent_.size_bytes(); }
  // Content: what figures count.
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
  // `extents`: as many as AppendSizes asked for.
  SegmentRows(uint64_t segment_id, uint32_t first_position, uint32_t slot_capacity,
              std::vector<Extent> extents);

  uint64_t segment_id() const { return segment_id_; }
  uint32_t first_position() const { return first_position_; }
  uint32_t slot_capacity() const { return slot_capacity_; }
  uint32_t end_capacity() const { return first_position_ + slot_capacity_; }
  std::byte* rows(uint32_t head) const { return extents_[head].data(); }
  ExtentRef extent(uint32_t head) const { return extents_[head].ref(); }
  // [kv_heads] of a layer.
  std::span<const std::byte* const> heads(const StoredLayers::Layer& layer) const {
    return std::span(pointers_).subspan(layer.first_head, layer.shape.kv_heads);
  }
  size_t used_bytes() const;
  // Where it is written down, if it is; guarded by the table's mutex. Dies before the extents.
  RecordSlot& record() const { return record_; }
  // Recovery: what the next layer's rows are to be compared with; before it is shared. See checksums.h.
  void Expect(std::unique_ptr<const CheckedBytes> bytes) const {
    expected_.push_back(std::move(bytes));
  }
  const CheckedBytes* expected(uint32_t layer_slot) const {
    return layer_slot < expected_.size() ? expected_[layer_slot].get() : nullptr;
  }
  // Sequences that hold it, leases and readers of dropped ones included.
  uint32_t user_count() const { return user_count_.load(std::memory_order_relaxed); }
  // How it was used so far; no part of its content.
  Heat& heat() const { return heat_; }

 private:
  friend class SegmentUse;

  uint64_t segment_id_;
  uint32_t first_position_;
  uint32_t slot_capacity_;
  std::vector<Extent> extents_;             // [heads of all layers]
  std::vector<const std::byte*> pointers_;  // likewise
  mutable std::atomic<uint32_t> user_count_ = 0;
  mutable std::vector<std::unique_ptr<const CheckedBytes>> expected_;  // per layer slot
  mutable RecordSlot record_;
  mutable Heat heat_;
};

// Memory of one layer of a segment's index.
class IndexData {
 public:
  explicit IndexData(Extent extent) : extent_(std::move(extent)) {}

  std::byte* data() const { return extent_.data(); }
  ExtentRef ref() const { return extent_.ref(); }
  size_t size_bytes() const { return extent_.size_bytes(); }
  // As those of SegmentRows.
  RecordSlot& record() const { return record_; }
  void Expect(std::unique_ptr<const CheckedBytes> bytes) const { expected_ = std::move(bytes); }
  const CheckedBytes* expected() const { return expected_.get(); }

 private:
  Extent extent_;
  mutable std::unique_ptr<const CheckedBytes> expected_;
  mutable RecordSlot record_;
};

// Codes of a segment under one index, and the codebooks that they mean.
class SegmentIndex {
 public:
  // What one layer holds; shared by the versions of a segment's index.
  struct Layer {
    std::shared_ptr<const IndexData> data;  // null: none yet
    std::shared_ptr<const Codebook> codebook;

    IndexDataHeader& header() const { return *reinterpret_cast<IndexDataHeader*>(data->data()); }
  };

  static size_t LayerBytes(const IndexDescriptor& index, const LayerShape& shape,
                           uint32_t slot_capacity);
  // Writes the header and zero planes. Slots before `counted_begin` will not be counted.
  static Layer MakeLayer(const LayerShape& shape, uint32_t slot_capacity, uint32_t counted_begin,
                         Extent extent, std::shared_ptr<const Codebook> codebook);

  // One that an earlier process wrote; without data when it has another header.
  static Layer RecoverLayer(const LayerShape& shape, uint32_t slot_capacity, Extent extent,
                            std::shared_ptr<const Codebook> codebook);

  static void AppendSizes(const StoredLayers& layers, const IndexDescriptor& index,
                          uint32_t slot_capacity, std::vector<size_t>& sizes_bytes);
  // All layers made. `codebooks`: per layer slot. Every layer counts as ready, until BeginLayers.
  SegmentIndex(const StoredLayers& layers, uint32_t slot_capacity, uint32_t counted_begin,
               std::vector<Extent> extents, std::vector<std::shared_ptr<const Codebook>> codebooks);
  // No layer made, none ready.
  SegmentIndex(const IndexDescriptor& index, uint32_t layer_count);

  // The same with another layer in this slot, which is ready.
  std::shared_ptr<const SegmentIndex> With(uint32_t layer_slot, Layer layer) const;

  // Of the following, those with a layer_slot REQUIRE that the layer is made, as ready ones are.
  IndexDataHeader& header(uint32_t layer_slot) const { return layers_[layer_slot].header(); }
  ExtentRef extent(uint32_t layer_slot) const { return layers_[layer_slot].data->ref(); }
  const Layer& layer(uint32_t layer_slot) const { return layers_[layer_slot]; }
  const std::shared_ptr<const Codebook>& codebook(uint32_t layer_slot) const {
    return layers_[layer_slot].codebook;
  }
  // Per layer slot; null where the layer is not made.
  std::vector<std::shared_ptr<const Codebook>> codebooks() const;
  uint32_t epoch() const;  // of the first layer that is made; ~0u without
  const IndexDescriptor& index() const { return index_; }
  size_t used_bytes() const;

  // For work that publishes layer by layer (Sequence::PublishIndex): no layer is ready, until
  // MarkReady says so. A ready layer has its codebook, and codes of every row that is shown; of a
  // closed segment it never changes again.
  void BeginLayers();
  void MarkReady(uint32_t layer_slot) const {
    layer_ready_[layer_slot].store(true, std::memory_order_release);
  }
  bool ready(uint32_t layer_slot) const {
    return layer_ready_[layer_slot].load(std::memory_order_acquire);
  }
  bool all_ready() const;
  // Whether any of it is to be compared with what an earlier process wrote (checksums.h).
  bool recovered() const;

 private:
  IndexDescriptor index_;
  std::vector<Layer> layers_;                         // per layer slot
  std::unique_ptr<std::atomic<bool>[]> layer_ready_;  // per layer slot
};

// Bytes of codes, counts and posting lists of one layer of a segment under an index, without
// rounding: what figures count.
size_t IndexContentBytes(const LayerShape& shape, const IndexDescriptor& index,
                         uint32_t slot_capacity, uint32_t slot_count);

class SegmentUse;  // sequence.h

// A segment as one snapshot sees it.
struct SegmentEntry {
  std::shared_ptr<const SegmentRows> rows;
  // Per index of the sequence; null where the segment has none (yet).
  std::vector<std::shared_ptr<const SegmentIndex>> indexes;
  bool closed = false;  // its token count is final
  uint32_t token_end =
      0;  // position behind the last token that this sequence has in it; 0 while open
  std::shared_ptr<const SegmentUse> use = nullptr;  // the sequence's share; Sequence sets it
};

// What a new segment has to hold besides rows: codes under these codebooks (per layer slot).
// Per index; an empty one makes no codes.
using NewestCodebooks = std::vector<std::vector<std::shared_ptr<const Codebook>>>;

struct NewSegment {
  uint64_t segment_id = 0;
  uint32_t first_position = 0;
  uint32_t slot_capacity = 0;
};

// Makes the segments, all or none. Errors: kResourceExhausted with the shortfall over all of them.
absl::StatusOr<std::vector<SegmentEntry>> CreateSegments(Pool& pool, const StoredLayers& layers,
                                                         std::span<const NewSegment> segments,
                                                         const NewestCodebooks& codebooks);

// Codes the slots [slot_begin, slot_end) of one layer and kv head. `scratch`:
// kernels::PqEncodeScratchBytes, 64-byte aligned.
void EncodeSlots(const kernels::Exec& exec, const StoredLayers::Layer& layer,
                 const SegmentRows& rows, const SegmentIndex::Layer& index, uint32_t kv_head,
                 PositionRange slots, std::span<std::byte> scratch);
inline void EncodeSlots(const kernels::Exec& exec, const StoredLayers::Layer& layer,
                        const SegmentRows& rows, const SegmentIndex& index, uint32_t layer_slot,
                        uint32_t kv_head, PositionRange slots, std::span<std::byte> scratch) {
  if (!index.ready(layer_slot)) return;  // whoever makes the layer codes all of it
  EncodeSlots(exec, layer, rows, index.layer(layer_slot), kv_head, slots, scratch);
}

// Counts the cells of the slots [counted_begin, slot_end) of one layer and writes their posting
// lists, when the segment counts cells (IndexDataHeader::cell_count), and announces them; once, and not
// before the layer is ready. REQUIRES: the segment is closed, or about to be.
void CountCells(const kernels::Exec& exec, const StoredLayers::Layer& layer,
                const SegmentIndex& index, uint32_t layer_slot, uint32_t slot_end);
// The same in two steps: one kv head, and the word that announces all heads.
void CountHead(const kernels::Exec& exec, const StoredLayers::Layer& layer,
               const SegmentIndex::Layer& index, uint32_t kv_head, uint32_t slot_end);
void AnnounceCounts(const SegmentIndex::Layer& index, uint32_t slot_end);

// Per index of the list, the codebooks of the segment that was coded last: those that new rows are
// coded with. Empty where no segment is ready in all layers.
NewestCodebooks NewestOf(std::span<const SegmentEntry> segments, size_t index_count);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEGMENT_H_
