#include "tests/fuzz/images.h"

#include <algorithm>
#include <cstring>

#include "kernels/select/pq.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using kvstore::Attachment;
using kvstore::IndexDescriptor;
using kvstore::IndexKind;
using kvstore::LayerDescriptor;
using kvstore::LayerView;
using kvstore::SegmentView;

constexpr uint32_t kHeads = 2;
constexpr uint32_t kSlots = 256;
constexpr size_t kMaxChanges = 16;

// Two segments of one layer with a pq index and a flat one.
Attachment Good() {
  Attachment good;
  good.header.sequence_id = 11;
  good.header.version = 5;
  good.header.token_count = kSlots + 3;
  good.header.index_count = 2;
  good.header.indexes[0] = {.kind = IndexKind::kPq, .subspace_count = 2, .bits = 4};
  good.layer_tokens = {kSlots + 3};
  uint32_t unit = 0;
  const auto next = [&unit] { return kvstore::ExtentRef{.unit = unit++, .order = 0}; };
  for (uint32_t i = 0; i < 2; ++i) {
    good.segments.push_back({.segment_id = 100 + i,
                             .first_position = i * kSlots,
                             .slot_capacity = kSlots,
                             .token_end = i == 0 ? kSlots : 0});
    LayerDescriptor layer;
    layer.layer = kImageLayer;
    layer.row_bytes = ImageShape().row_bytes;
    layer.kv_head_count = kHeads;
    layer.row_extent_begin = static_cast<uint32_t>(good.row_extents.size());
    for (uint32_t head = 0; head < kHeads; ++head) good.row_extents.push_back(next());
    layer.state[0] = layer.state[1] = kvstore::LayerState::kReady;
    layer.index_data[0] = next();
    layer.codebook[0] = next();
    good.layers.push_back(layer);
  }
  good.header.layer_count = 1;
  good.header.segment_count = 2;
  good.header.row_extent_count = static_cast<uint32_t>(good.row_extents.size());
  return good;
}

// What the index extents of Good() hold.
void WriteHeaders(const Attachment& good, std::byte* pool) {
  const IndexDescriptor index = good.header.indexes[0];
  for (const LayerDescriptor& layer : good.layers) {
    auto* data = new (pool + layer.index_data[0].offset_bytes()) kvstore::IndexDataHeader;
    data->index = index;
    data->kv_head_count = kHeads;
    data->slot_capacity = kSlots;
    data->plane_offset_bytes = 128;
    data->plane_stride_bytes = kernels::PlaneStride(kSlots);
    data->head_stride_bytes = kernels::CodePlanesBytes(kvstore::GeometryOf(index, 32), kSlots);
    data->counts_offset_bytes = 128 + kHeads * data->head_stride_bytes;
    data->counts_stride_bytes = 1024;
    data->cell_count = 256;
    data->counted_end = kSlots;
    auto* codebook = new (pool + layer.codebook[0].offset_bytes()) kvstore::CodebookHeader;
    codebook->index = index;
    codebook->kv_head_count = kHeads;
    codebook->key_dim = 32;
    codebook->centroid_offset_bytes = 128;
    codebook->head_stride_bytes = 32 * 16 * sizeof(float);
  }
}

volatile uint64_t read_sum = 0;  // that nothing read below is left out

// Changes aligned numbers somewhere in the image, or in a header of the pool.
void Change(const Attachment& good, Bytes& bytes, std::byte* pool, std::vector<std::byte>* image) {
  for (size_t i = 0; i < kMaxChanges && !bytes.empty(); ++i) {
    const bool in_pool = bytes.Byte() % 2 == 1;
    const size_t choice = bytes.Byte();
    const size_t place = 4 * static_cast<size_t>(bytes.Byte());
    const LayerDescriptor& layer = good.layers[choice % 2];
    const size_t offset =
        (choice / 2 % 2 == 0 ? layer.index_data[0] : layer.codebook[0]).offset_bytes();
    const uint64_t number = bytes.Number();
    const size_t width = choice / 4 % 2 == 0 ? 4 : 8;
    if (in_pool) {
      std::memcpy(pool + offset + place % 128, &number, width);
    } else if (place + width <= image->size()) {
      std::memcpy(image->data() + place, &number, width);
    }
  }
}

}  // namespace

kvstore::LayerShape ImageShape() {
  return {.dtype = kernels::DType::kF16,
          .key_dim = 32,
          .value_dim = 40,
          .kv_heads = kHeads,
          .query_heads = 4,
          .row_bytes = 144};
}

std::vector<std::byte> ImageOf(Bytes& bytes, std::byte* pool) {
  static const Attachment good = Good();
  static const std::vector<std::byte> good_image = EncodeAttachment(good);
  WriteHeaders(good, pool);
  std::vector<std::byte> image = good_image;
  if (bytes.Byte() % 2 == 0) {
    Change(good, bytes, pool, &image);
  } else {  // an image of the fuzzer's own
    const std::string raw = bytes.Text(~size_t{0});
    image.resize(raw.size());
    if (!raw.empty()) std::memcpy(image.data(), raw.data(), raw.size());
  }
  return image;
}

void ReadAll(kvstore::MappedLayer& mapped, const std::byte* pool, uint32_t tokens) {
  const auto read = [pool](const void* begin, size_t size) {
    const auto* bytes = static_cast<const std::byte*>(begin);
    if (size == 0) return;
    if (bytes < pool || bytes + size > pool + kImagePoolBytes)
      Found("a view leads outside of the pool");
    read_sum = read_sum + static_cast<uint64_t>(bytes[0]) + static_cast<uint64_t>(bytes[size - 1]);
  };
  const LayerView view = mapped.View(tokens);
  for (const SegmentView& segment : view.segments) {
    for (uint32_t head = 0; head < view.shape.kv_heads; ++head) {
      read(segment.rows[head], size_t{segment.token_count} * view.shape.row_bytes);
      if (segment.index_data != nullptr) {
        const kvstore::IndexDataHeader& data = *segment.index_data;
        const auto* base = reinterpret_cast<const std::byte*>(segment.index_data);
        read(base + data.plane_offset_bytes + head * data.head_stride_bytes,
             data.head_stride_bytes);
        if (data.cell_count != 0) {
          read(base + data.counts_offset_bytes + head * data.counts_stride_bytes,
               data.cell_count * sizeof(uint32_t));
        }
      }
      if (segment.codebook != nullptr) {
        const kvstore::CodebookHeader& codebook = *segment.codebook;
        if (!kernels::IsValid(kvstore::GeometryOf(codebook))) Found("a codebook's cut is invalid");
        read(reinterpret_cast<const std::byte*>(segment.codebook) + codebook.centroid_offset_bytes +
                 head * codebook.head_stride_bytes,
             codebook.head_stride_bytes);
      }
    }
  }
}

std::vector<std::string> ImageSeeds() {
  const std::vector<std::byte> image = EncodeAttachment(Good());
  const std::string raw(reinterpret_cast<const char*>(image.data()), image.size());
  std::vector<std::string> seeds = {std::string(), std::string(1, '\1') + raw,
                                    std::string("\0\1\0\20\0\0\0\0\0", 9)};
  // Each number of the image becomes 8 (the pool has so many extents), 1, and the largest number.
  for (size_t place = 0; place < image.size() / 4; ++place) {
    for (const char number : {'\6', '\1', '\43'}) {
      seeds.push_back(std::string(3, '\0') + static_cast<char>(place) + number);
    }
  }
  return seeds;
}

}  // namespace pqcached::fuzz
