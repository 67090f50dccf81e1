#include "kvstore/read/attachment.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "kvstore/read/indexes/index_types.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kMaxRowBytes = 2 * kMaxHeadDim * sizeof(float);

size_t Padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

// Copies the values to the start of `rest` and returns the bytes after them.
template <typename T>
std::span<std::byte> Put(const std::vector<T>& values, std::span<std::byte> rest) {
  const size_t size_bytes = values.size() * sizeof(T);
  if (size_bytes > 0) std::memcpy(rest.data(), values.data(), size_bytes);
  return rest.subspan(size_bytes);
}

// Copies values.size() values from the start of `image` and removes them from it. REQUIRES: the
// image holds that many.
template <typename T>
void Take(std::span<const std::byte>& image, std::vector<T>& values) {
  const size_t size_bytes = values.size() * sizeof(T);
  if (size_bytes > 0) std::memcpy(values.data(), image.data(), size_bytes);
  image = image.subspan(size_bytes);
}

std::string At(std::string_view what, size_t i) {
  return std::string(what) + "[" + std::to_string(i) + "]";
}

// Returns true when the block that names the extent lies in the pool.
bool IsInPool(const ExtentRef& extent, size_t pool_bytes) {
  return extent.order <= kMaxExtentOrder && extent.offset_bytes() <= pool_bytes &&
         extent.size_bytes() <= pool_bytes - extent.offset_bytes();
}

// Returns whether an index with these parameters exists. Their fit to the keys of a layer is
// checked where the layer is mapped.
bool IsValid(const IndexDescriptor& index) {
  const IndexType* const type = FindIndexType(index);
  return type != nullptr && HasAllowedValues(*type, index);
}

std::string OtherVersion(uint32_t layout_version) {
  return "layout_version is " + std::to_string(layout_version) + "; this client reads " +
         std::to_string(kLayoutVersion);
}

// Checks the two fields that every layout version begins with.
std::string CheckVersion(std::span<const std::byte> image) {
  uint32_t fields[2];  // magic, layout_version
  if (image.size() < sizeof(fields)) return "size";
  std::memcpy(fields, image.data(), sizeof(fields));
  if (fields[0] != AttachmentHeader::kMagic) return "magic";
  return fields[1] == kLayoutVersion ? "" : OtherVersion(fields[1]);
}

std::string CheckHeader(const AttachmentHeader& header, size_t image_bytes) {
  if (header.layer_count == 0 || header.layer_count > kMaxLayers) return "layer_count";
  if (header.index_count > kMaxIndexes) return "index_count";
  for (uint32_t i = 0; i < header.index_count; ++i) {
    if (!IsValid(header.indexes[i])) return At("indexes", i);
  }
  // No product overflows: layer_count is small, and the others have 32 bits.
  const uint64_t wanted_bytes =
      sizeof(header) + Padded(header.layer_count * sizeof(uint32_t)) +
      uint64_t{header.segment_count} * sizeof(SegmentDescriptor) +
      uint64_t{header.segment_count} * header.layer_count * sizeof(LayerDescriptor) +
      uint64_t{header.row_extent_count} * sizeof(ExtentRef);
  if (wanted_bytes != image_bytes) {
    return "size is " + std::to_string(image_bytes) + " bytes; the counts say " +
           std::to_string(wanted_bytes);
  }
  return {};
}

// Returns the end position (exclusive) of the slots that this sequence may ever show of a segment.
uint32_t EndPosition(const SegmentDescriptor& segment) {
  return segment.token_end != 0 ? segment.token_end
                                : segment.first_position + segment.slot_capacity;
}

std::string CheckSegments(const Attachment& attachment) {
  uint64_t end = 0;
  for (size_t i = 0; i < attachment.segments.size(); ++i) {
    const SegmentDescriptor& segment = attachment.segments[i];
    const bool last = i + 1 == attachment.segments.size();
    if (segment.first_position != end) return At("segments", i) + ".first_position";
    if (segment.slot_capacity == 0 || segment.slot_capacity > kMaxSegmentTokens ||
        segment.slot_capacity % kBlockTokens != 0) {
      return At("segments", i) + ".slot_capacity";
    }
    const uint64_t capacity_end = uint64_t{segment.first_position} + segment.slot_capacity;
    const bool open = segment.token_end == 0 && last;
    if (!open && (segment.token_end <= segment.first_position || segment.token_end > capacity_end ||
                  segment.token_end > kMaxSequenceTokens)) {
      return At("segments", i) + ".token_end";
    }
    end = open ? capacity_end : segment.token_end;
  }
  for (size_t i = 0; i < attachment.layer_tokens.size(); ++i) {
    const uint32_t tokens = attachment.layer_tokens[i];
    if (tokens > end || tokens > kMaxSequenceTokens) return At("layer_tokens", i);
  }
  if (attachment.header.token_count !=
      *std::min_element(attachment.layer_tokens.begin(), attachment.layer_tokens.end())) {
    return "token_count";
  }
  return {};
}

// Checks the index data of one layer of one segment, which exists exactly when the layer is READY.
std::string CheckIndexes(const AttachmentHeader& header, const LayerDescriptor& layer,
                         size_t pool_bytes) {
  for (uint32_t i = 0; i < kMaxIndexes; ++i) {
    if (layer.state[i] > LayerState::kReady) return At("state", i);
    const bool indexed = i < header.index_count && IsBuilt(header.indexes[i]) &&
                         layer.state[i] == LayerState::kReady;
    if (!indexed) {
      if (layer.index_data[i].valid()) return At("index_data", i);
      if (layer.codebook[i].valid()) return At("codebook", i);
      continue;
    }
    if (!IsInPool(layer.index_data[i], pool_bytes)) return At("index_data", i);
    if (!IsInPool(layer.codebook[i], pool_bytes)) return At("codebook", i);
  }
  return {};
}

std::string CheckLayer(const Attachment& attachment, const SegmentDescriptor& segment,
                       const LayerDescriptor& layer, const LayerDescriptor& first,
                       size_t pool_bytes) {
  if (layer.layer >= kMaxLayers || layer.layer != first.layer) return "layer";
  if (layer.row_order != RowOrder::kToken || layer.order.valid()) return "row_order";
  if (layer.row_bytes == 0 || layer.row_bytes > kMaxRowBytes ||
      layer.row_bytes != first.row_bytes) {
    return "row_bytes";
  }
  if (layer.kv_head_count == 0 || layer.kv_head_count > kMaxKvHeads ||
      layer.kv_head_count != first.kv_head_count) {
    return "kv_head_count";
  }
  if (uint64_t{layer.row_extent_begin} + layer.kv_head_count > attachment.row_extents.size()) {
    return "row_extent_begin";
  }
  const size_t rows_bytes = size_t{segment.slot_capacity} * layer.row_bytes;
  for (uint32_t head = 0; head < layer.kv_head_count; ++head) {
    const ExtentRef& extent = attachment.row_extents[layer.row_extent_begin + head];
    if (!IsInPool(extent, pool_bytes) || extent.size_bytes() < rows_bytes) {
      return At("row_extents", layer.row_extent_begin + head);
    }
  }
  return CheckIndexes(attachment.header, layer, pool_bytes);
}

std::string CheckLayers(const Attachment& attachment, size_t pool_bytes) {
  const uint32_t layer_count = attachment.header.layer_count;
  for (size_t i = 0; i < attachment.layers.size(); ++i) {
    const LayerDescriptor& layer = attachment.layers[i];
    if (i > 0 && i < layer_count && layer.layer <= attachment.layers[i - 1].layer) {
      return At("layers", i) + ".layer";
    }
    if (std::string wrong = CheckLayer(attachment, attachment.segments[i / layer_count], layer,
                                       attachment.layers[i % layer_count], pool_bytes);
        !wrong.empty()) {
      return At("layers", i) + "." + wrong;
    }
  }
  return {};
}

std::string CheckIndexData(const std::byte* data, size_t extent_bytes, const IndexDescriptor& index,
                           const LayerShape& shape, uint32_t slot_capacity) {
  const auto& header = *reinterpret_cast<const IndexDataHeader*>(data);
  if (header.magic != IndexDataHeader::kMagic) return "magic";
  if (!ReadsExtent(header.layout_version)) return OtherVersion(header.layout_version);
  if (header.index != index) return "index";
  if (header.kv_head_count != shape.kv_heads) return "kv_head_count";
  if (header.slot_capacity != slot_capacity) return "slot_capacity";
  if (std::string wrong =
          BuiltTypeOf(index).CheckData(header, extent_bytes, index, shape, slot_capacity);
      !wrong.empty()) {
    return wrong;
  }
  if (header.counted_begin > slot_capacity) return "counted_begin";
  if (header.counted_end.load(std::memory_order_acquire) > slot_capacity) return "counted_end";
  return {};
}

std::string CheckCodebook(const std::byte* data, size_t extent_bytes, const IndexDescriptor& index,
                          const LayerShape& shape) {
  const auto& header = *reinterpret_cast<const CodebookHeader*>(data);
  if (header.magic != CodebookHeader::kMagic) return "magic";
  if (!ReadsExtent(header.layout_version)) return OtherVersion(header.layout_version);
  if (header.index != index) return "index";
  if (header.kv_head_count != shape.kv_heads) return "kv_head_count";
  if (header.key_dim != shape.key_dim) return "key_dim";
  return BuiltTypeOf(index).CheckCodebook(header, extent_bytes, index, shape);
}

// Returns the ordinal of a layer among those of the attachment; layer_count when it has no such
// layer.
uint32_t FindLayer(const Attachment& attachment, uint32_t layer) {
  const uint32_t layer_count = attachment.header.layer_count;
  for (uint32_t i = 0; i < layer_count && i < attachment.layers.size(); ++i) {
    if (attachment.layers[i].layer == layer) return i;
  }
  return layer_count;
}

}  // namespace

std::vector<std::byte> EncodeAttachment(const Attachment& attachment) {
  AttachmentHeader header = attachment.header;
  header.layer_count = static_cast<uint32_t>(attachment.layer_tokens.size());
  header.segment_count = static_cast<uint32_t>(attachment.segments.size());
  header.row_extent_count = static_cast<uint32_t>(attachment.row_extents.size());
  std::vector<uint32_t> tokens = attachment.layer_tokens;
  tokens.resize(Padded(tokens.size() * sizeof(uint32_t)) / sizeof(uint32_t), 0);

  std::vector<std::byte> image(sizeof(header) + tokens.size() * sizeof(uint32_t) +
                               attachment.segments.size() * sizeof(SegmentDescriptor) +
                               attachment.layers.size() * sizeof(LayerDescriptor) +
                               attachment.row_extents.size() * sizeof(ExtentRef));
  std::memcpy(image.data(), &header, sizeof(header));
  std::span<std::byte> rest = std::span(image).subspan(sizeof(header));
  rest = Put(tokens, rest);
  rest = Put(attachment.segments, rest);
  rest = Put(attachment.layers, rest);
  Put(attachment.row_extents, rest);
  return image;
}

std::string ParseAttachment(std::span<const std::byte> image, size_t pool_bytes,
                            Attachment* attachment) {
  Attachment parsed;
  if (std::string wrong = CheckVersion(image); !wrong.empty()) return wrong;
  if (image.size() < sizeof(parsed.header)) return "size";
  std::memcpy(&parsed.header, image.data(), sizeof(parsed.header));
  if (std::string wrong = CheckHeader(parsed.header, image.size()); !wrong.empty()) return wrong;
  const AttachmentHeader& header = parsed.header;

  std::span<const std::byte> rest = image.subspan(sizeof(header));
  parsed.layer_tokens.resize(header.layer_count);
  Take(rest, parsed.layer_tokens);
  rest = rest.subspan(Padded(header.layer_count * sizeof(uint32_t)) -
                      header.layer_count * sizeof(uint32_t));
  parsed.segments.resize(header.segment_count);
  Take(rest, parsed.segments);
  parsed.layers.resize(size_t{header.segment_count} * header.layer_count);
  Take(rest, parsed.layers);
  parsed.row_extents.resize(header.row_extent_count);
  Take(rest, parsed.row_extents);

  if (std::string wrong = CheckSegments(parsed); !wrong.empty()) return wrong;
  if (std::string wrong = CheckLayers(parsed, pool_bytes); !wrong.empty()) return wrong;
  *attachment = std::move(parsed);
  return {};
}

std::string MappedLayer::Make(const Attachment& attachment, uint32_t layer, const LayerShape& shape,
                              uint32_t index_slot, const std::byte* pool, MappedLayer* mapped) {
  const AttachmentHeader& header = attachment.header;
  MappedLayer made;
  made.shape_ = shape;
  if (index_slot != kMaxIndexes && index_slot >= header.index_count) return "index_slot";
  const IndexDescriptor index =
      index_slot == kMaxIndexes ? IndexDescriptor{} : header.indexes[index_slot];
  const bool with_codes = IsBuilt(index);
  if (!CheckIndex(index, shape.key_dim, "").ok()) return "shape.key_dim";
  made.ready_ = index_slot != kMaxIndexes;

  const uint32_t ordinal = FindLayer(attachment, layer);
  if (ordinal == header.layer_count && !attachment.segments.empty()) return "layer";
  made.rows_.resize(attachment.segments.size() * shape.kv_heads);
  for (size_t i = 0; i < attachment.segments.size(); ++i) {
    const SegmentDescriptor& segment = attachment.segments[i];
    const LayerDescriptor& descriptor = attachment.layers[i * header.layer_count + ordinal];
    if (descriptor.kv_head_count != shape.kv_heads) return "shape.kv_heads";
    if (descriptor.row_bytes != shape.row_bytes) return "shape.row_bytes";
    const std::byte** rows = made.rows_.data() + i * shape.kv_heads;
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      rows[head] = pool + attachment.row_extents[descriptor.row_extent_begin + head].offset_bytes();
    }
    SegmentView view{.first_position = segment.first_position,
                     .token_count = EndPosition(segment) - segment.first_position,
                     .rows = {rows, shape.kv_heads}};
    if (with_codes && descriptor.state[index_slot] != LayerState::kReady) made.ready_ = false;
    if (with_codes && descriptor.state[index_slot] == LayerState::kReady) {
      const ExtentRef data = descriptor.index_data[index_slot];
      const ExtentRef codebook = descriptor.codebook[index_slot];
      const std::byte* data_begin = pool + data.offset_bytes();
      const std::byte* codebook_begin = pool + codebook.offset_bytes();
      std::string wrong =
          CheckIndexData(data_begin, data.size_bytes(), index, shape, segment.slot_capacity);
      if (!wrong.empty()) return At("segments", i) + " index data: " + wrong;
      wrong = CheckCodebook(codebook_begin, codebook.size_bytes(), index, shape);
      if (!wrong.empty()) return At("segments", i) + " codebook: " + wrong;
      view.index_data = reinterpret_cast<const IndexDataHeader*>(data_begin);
      view.codebook = reinterpret_cast<const CodebookHeader*>(codebook_begin);
    }
    made.full_.push_back(view);
  }
  *mapped = std::move(made);
  return {};
}

LayerView MappedLayer::View(uint32_t token_count) {
  shown_.clear();
  for (SegmentView segment : full_) {
    if (segment.first_position >= token_count) break;
    segment.token_count = std::min(segment.token_count, token_count - segment.first_position);
    shown_.push_back(segment);
  }
  return LayerView{.shape = shape_, .segments = shown_};
}

}  // namespace pqcached::kvstore
