#include "kvstore/sequence/segment.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>
#include <optional>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::kvstore {
namespace {

std::vector<Extent> TakeFront(std::vector<Extent>& extents, size_t& next, size_t count) {
  const auto begin = extents.begin() + static_cast<ptrdiff_t>(next);
  next += count;
  return {std::make_move_iterator(begin),
          std::make_move_iterator(begin + static_cast<ptrdiff_t>(count))};
}

// Fills in all fields of the header that describe the memory's content.
void WriteHeader(const LayerShape& shape, uint32_t slot_capacity, uint32_t counted_begin,
                 const CodebookHeader& codebook, IndexDataHeader* header) {
  header->index = codebook.index;
  header->kv_head_count = shape.kv_heads;
  header->slot_capacity = slot_capacity;
  header->counted_begin = counted_begin;
  header->codebook_generation = codebook.codebook_generation;
  BuiltTypeOf(codebook.index).FormatData(shape, header);
}

// Returns the index of the codebooks, which are null for layers without one. REQUIRES: one is not.
const IndexDescriptor& IndexOf(std::span<const std::shared_ptr<const Codebook>> codebooks) {
  const auto found = std::find_if(codebooks.begin(), codebooks.end(),
                                  [](const auto& codebook) { return codebook != nullptr; });
  PQC_CHECK(found != codebooks.end());
  return (*found)->header().index;
}

std::vector<bool> HaveIndex(const StoredLayers& layers) {
  std::vector<bool> have;
  for (const StoredLayers::Layer& layer : layers.layers) have.push_back(layer.shape.has_index());
  return have;
}

uint16_t HalfRotaryDim(const LayerGroup& group) {
  const bool halves = group.rope.layout == Rope::kHalf && group.rope.rotary_dim <= group.key_dim;
  return halves ? static_cast<uint16_t>(group.rope.rotary_dim) : uint16_t{0};
}

// Returns whether a segment that is closed with these slots gets more than its codes.
bool HasClosing(const IndexDataHeader& header, uint32_t slot_end) {
  return slot_end > header.counted_begin && BuiltTypeOf(header.index).HasClosing(header);
}

}  // namespace

StoredLayers::StoredLayers(const CacheSpec& spec) {
  for (const LayerGroup& group : spec.groups) {
    if (group.kind == LayerKind::kNone) continue;
    for (const uint32_t layer : group.layers) {
      layers.push_back({.layer = layer,
                        .shape = {.dtype = group.dtype,
                                  .kind = group.kind,
                                  .half_rotary_dim = HalfRotaryDim(group),
                                  .key_dim = group.key_dim,
                                  .value_dim = group.value_dim,
                                  .kv_heads = group.kv_heads,
                                  .query_heads = group.query_heads,
                                  .row_bytes = group.row_bytes(),
                                  .scale = group.scale(),
                                  .softcap = group.softcap}});
    }
  }
  std::sort(layers.begin(), layers.end(),
            [](const Layer& a, const Layer& b) { return a.layer < b.layer; });
  for (uint32_t slot = 0; slot < size(); ++slot) {
    layers[slot].first_head = head_count;
    head_count += layers[slot].shape.kv_heads;
    if (layers[slot].shape.has_index()) ++indexed_count;
    slot_of_head_.resize(head_count, slot);
  }
}

size_t Codebook::SizeBytes(const IndexDescriptor& index, const LayerShape& shape) {
  return BuiltTypeOf(index).CodebookBytes(index, shape);
}

Codebook::Codebook(Extent extent, const IndexDescriptor& index, const LayerShape& shape,
                   uint32_t codebook_generation)
    : extent_(std::move(extent)) {
  PQC_CRASH_POINT();
  auto* header = new (extent_.data()) CodebookHeader;
  header->index = index;
  header->kv_head_count = shape.kv_heads;
  header->key_dim = shape.key_dim;
  header->codebook_generation = codebook_generation;
  BuiltTypeOf(index).FormatCodebook(shape, header);
}

std::shared_ptr<const Codebook> Codebook::Recover(Extent extent, const IndexDescriptor& index,
                                                  const LayerShape& shape) {
  std::shared_ptr<const Codebook> found(new Codebook(std::move(extent)));
  const CodebookHeader& header = found->header();
  const bool readable = ReadsExtent(header.layout_version) && header.index == index;
  const bool same = header.magic == CodebookHeader::kMagic && readable &&
                    header.kv_head_count == shape.kv_heads && header.key_dim == shape.key_dim &&
                    BuiltTypeOf(index).ReadsCodebook(header, shape);
  return same ? found : nullptr;
}

size_t Codebook::content_bytes() const {
  return BuiltTypeOf(header().index).CodebookContentBytes(header());
}

void SegmentRows::AppendSizes(const StoredLayers& layers, uint32_t slot_capacity,
                              std::vector<size_t>& sizes_bytes) {
  for (const StoredLayers::Layer& layer : layers.layers) {
    sizes_bytes.insert(sizes_bytes.end(), layer.shape.kv_heads,
                       size_t{slot_capacity} * layer.shape.row_bytes);
  }
}

SegmentRows::SegmentRows(uint64_t segment_id, uint32_t first_position, uint32_t slot_capacity,
                         std::vector<Extent> extents)
    : segment_id_(segment_id),
      first_position_(first_position),
      slot_capacity_(slot_capacity),
      extents_(std::move(extents)) {
  for (const Extent& extent : extents_) pointers_.push_back(extent.data());
}

size_t SegmentRows::used_bytes() const {
  return std::accumulate(extents_.begin(), extents_.end(), size_t{0},
                         [](size_t sum, const Extent& e) { return sum + e.size_bytes(); });
}

size_t SegmentIndex::LayerBytes(const IndexDescriptor& index, const LayerShape& shape,
                                uint32_t slot_capacity) {
  return BuiltTypeOf(index).DataBytes(index, shape, slot_capacity);
}

SegmentIndex::Layer SegmentIndex::MakeLayer(const LayerShape& shape, uint32_t slot_capacity,
                                            uint32_t counted_begin, Extent extent,
                                            std::shared_ptr<const Codebook> codebook) {
  const IndexDescriptor& index = codebook->header().index;
  PQC_CRASH_POINT();
  std::memset(extent.data(), 0, BuiltTypeOf(index).ZeroedDataBytes(index, shape, slot_capacity));
  WriteHeader(shape, slot_capacity, counted_begin, codebook->header(),
              new (extent.data()) IndexDataHeader);
  return {.data = std::make_shared<const IndexData>(std::move(extent)),
          .codebook = std::move(codebook)};
}

SegmentIndex::Layer SegmentIndex::RecoverLayer(const LayerShape& shape, uint32_t slot_capacity,
                                               Extent extent,
                                               std::shared_ptr<const Codebook> codebook) {
  const auto& found = *reinterpret_cast<const IndexDataHeader*>(extent.data());
  const uint32_t counted_end = found.counted_end.load(std::memory_order_acquire);
  IndexDataHeader wanted;
  WriteHeader(shape, slot_capacity, found.counted_begin, codebook->header(), &wanted);
  if (ReadsExtent(found.layout_version)) wanted.layout_version = found.layout_version;
  wanted.counted_end.store(counted_end);
  const bool in_range = found.counted_begin <= slot_capacity && counted_end <= slot_capacity &&
                        (counted_end == 0 || counted_end > found.counted_begin);
  if (!in_range || std::memcmp(static_cast<const void*>(&found), static_cast<const void*>(&wanted),
                               sizeof(wanted)) != 0) {
    return {};
  }
  return {.data = std::make_shared<const IndexData>(std::move(extent)),
          .codebook = std::move(codebook)};
}

void SegmentIndex::AppendSizes(const StoredLayers& layers, const IndexDescriptor& index,
                               uint32_t slot_capacity, std::vector<size_t>& sizes_bytes) {
  for (const StoredLayers::Layer& layer : layers.layers) {
    if (layer.shape.has_index())
      sizes_bytes.push_back(LayerBytes(index, layer.shape, slot_capacity));
  }
}

SegmentIndex::SegmentIndex(const StoredLayers& layers, uint32_t slot_capacity,
                           uint32_t counted_begin, std::vector<Extent> extents,
                           std::vector<std::shared_ptr<const Codebook>> codebooks)
    : SegmentIndex(layers, IndexOf(codebooks)) {
  PQC_CHECK(extents.size() == layers.indexed_count && codebooks.size() == layers.size());
  auto extent = extents.begin();
  for (uint32_t slot = 0; slot < layers.size(); ++slot) {
    if (!has_index_[slot]) continue;
    layers_[slot] = MakeLayer(layers.layers[slot].shape, slot_capacity, counted_begin,
                              std::move(*extent++), std::move(codebooks[slot]));
    MarkReady(slot);
  }
}

SegmentIndex::SegmentIndex(const StoredLayers& layers, const IndexDescriptor& index)
    : SegmentIndex(index, HaveIndex(layers)) {}

SegmentIndex::SegmentIndex(const IndexDescriptor& index, std::vector<bool> has_index)
    : index_(index),
      has_index_(std::move(has_index)),
      layers_(has_index_.size()),
      layer_ready_(std::make_unique<std::atomic<bool>[]>(has_index_.size())) {}

std::shared_ptr<const SegmentIndex> SegmentIndex::With(uint32_t layer_slot, Layer layer) const {
  const std::shared_ptr<SegmentIndex> other(new SegmentIndex(index_, has_index_));
  other->layers_ = layers_;
  other->layers_[layer_slot] = std::move(layer);
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    if (slot == layer_slot || ready(slot)) other->MarkReady(slot);
  }
  return other;
}

std::vector<std::shared_ptr<const Codebook>> SegmentIndex::codebooks() const {
  std::vector<std::shared_ptr<const Codebook>> codebooks;
  for (const Layer& layer : layers_) codebooks.push_back(layer.codebook);
  return codebooks;
}

uint32_t SegmentIndex::codebook_generation() const {
  for (const Layer& layer : layers_) {
    if (layer.codebook != nullptr) return layer.codebook->header().codebook_generation;
  }
  return ~0u;
}

void SegmentIndex::BeginLayers() {
  for (size_t slot = 0; slot < layers_.size(); ++slot) layer_ready_[slot].store(false);
}

bool SegmentIndex::all_ready() const {
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    if (!complete(slot)) return false;
  }
  return true;
}

bool SegmentIndex::recovered() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) {
    return layer.data != nullptr && layer.data->expected() != nullptr;
  });
}

size_t SegmentIndex::used_bytes() const {
  return std::accumulate(layers_.begin(), layers_.end(), size_t{0},
                         [](size_t sum, const Layer& layer) {
                           return sum + (layer.data == nullptr ? 0 : layer.data->size_bytes());
                         });
}

size_t IndexContentBytes(const LayerShape& shape, const IndexDescriptor& index,
                         uint32_t slot_capacity, uint32_t slot_count) {
  return BuiltTypeOf(index).DataContentBytes(index, shape, slot_capacity, slot_count);
}

absl::StatusOr<std::vector<SegmentEntry>> CreateSegments(Pool& pool, const StoredLayers& layers,
                                                         std::span<const NewSegment> segments,
                                                         const NewestCodebooks& codebooks) {
  std::vector<size_t> sizes_bytes;
  for (const NewSegment& segment : segments) {
    SegmentRows::AppendSizes(layers, segment.slot_capacity, sizes_bytes);
    for (const auto& of_index : codebooks) {
      if (of_index.empty()) continue;
      SegmentIndex::AppendSizes(layers, IndexOf(of_index), segment.slot_capacity, sizes_bytes);
    }
  }
  ASSIGN_OR_RETURN(std::vector<Extent> extents, pool.Allocate(sizes_bytes));
  std::vector<SegmentEntry> entries;
  size_t next = 0;
  for (const NewSegment& segment : segments) {
    SegmentEntry entry;
    entry.rows = std::make_shared<SegmentRows>(segment.segment_id, segment.first_position,
                                               segment.slot_capacity,
                                               TakeFront(extents, next, layers.head_count));
    for (const auto& of_index : codebooks) {
      if (of_index.empty()) {
        entry.indexes.push_back(nullptr);
        continue;
      }
      entry.indexes.push_back(
          std::make_shared<SegmentIndex>(layers, segment.slot_capacity, /*counted_begin=*/0,
                                         TakeFront(extents, next, layers.indexed_count), of_index));
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

void EncodeSlots(const kernels::Exec& exec, const StoredLayers::Layer& layer,
                 const SegmentRows& rows, const SegmentIndex::Layer& index, uint32_t kv_head,
                 PositionRange slots, std::span<std::byte> scratch) {
  if (slots.begin >= slots.end) return;
  PQC_CRASH_POINT();
  BuiltTypeOf(index.header().index)
      .Encode(exec,
              {.shape = layer.shape,
               .kv_head = kv_head,
               .codebook = &index.codebook->header(),
               .rows = rows.rows(layer.first_head + kv_head) +
                       size_t{slots.begin} * layer.shape.row_bytes,
               .slots = slots,
               .data = &index.header()},
              scratch);
}

void CloseLayer(Compute& compute, const StoredLayers::Layer& layer, const SegmentRows& rows,
                const SegmentIndex& index, uint32_t layer_slot, uint32_t slot_end) {
  if (!index.ready(layer_slot) || index.header(layer_slot).counted_end.load() != 0) return;
  for (uint32_t kv_head = 0; kv_head < layer.shape.kv_heads; ++kv_head) {
    CloseHead(compute, layer, rows, index.layer(layer_slot), kv_head, slot_end);
  }
  PublishClosing(index.layer(layer_slot), slot_end);
}

bool CloseHead(Compute& compute, const StoredLayers::Layer& layer, const SegmentRows& rows,
               const SegmentIndex::Layer& index, uint32_t kv_head, uint32_t slot_end,
               const std::function<bool()>& keep_going) {
  IndexDataHeader& header = index.header();
  if (!HasClosing(header, slot_end)) return true;
  const BuiltIndexType& type = BuiltTypeOf(header.index);
  const CloseArgs args{.shape = layer.shape,
                       .kv_head = kv_head,
                       .codebook = &index.codebook->header(),
                       .rows = rows.rows(layer.first_head + kv_head),
                       .slot_end = slot_end,
                       .data = &header,
                       .keep_going = keep_going};
  const size_t scratch_bytes = type.CloseScratchBytes(args);
  std::optional<ScratchPool::Buffer> scratch;
  if (scratch_bytes > 0) scratch.emplace(compute.scratch.Take(scratch_bytes));
  PQC_CRASH_POINT();
  return type.CloseHead(compute.exec, args, scratch ? scratch->bytes() : std::span<std::byte>());
}

void PublishClosing(const SegmentIndex::Layer& index, uint32_t slot_end) {
  IndexDataHeader& header = index.header();
  if (!HasClosing(header, slot_end)) return;
  PQC_CRASH_POINT();
  header.counted_end.store(slot_end, std::memory_order_release);
}

NewestCodebooks NewestOf(std::span<const SegmentEntry> segments, size_t index_count) {
  NewestCodebooks newest(index_count);
  for (const SegmentEntry& entry : segments) {
    for (size_t i = 0; i < entry.indexes.size() && i < index_count; ++i) {
      const auto& index = entry.indexes[i];
      if (index == nullptr || !index->all_ready()) continue;
      if (newest[i].empty()) {
        newest[i] = index->codebooks();
        continue;
      }
      for (uint32_t slot = 0; slot < newest[i].size(); ++slot) {
        const auto& codebook = index->codebook(slot);
        if (codebook == nullptr) continue;
        if (codebook->header().codebook_generation >= newest[i][slot]->header().codebook_generation)
          newest[i][slot] = codebook;
      }
    }
  }
  return newest;
}

}  // namespace pqcached::kvstore
