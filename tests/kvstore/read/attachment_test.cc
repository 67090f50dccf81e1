// Attachments: what is written is read again, and nothing that a garbled image or a garbled pool says
// leads outside the pool.
#include "kvstore/read/attachment.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <new>
#include <random>

namespace pqcached::kvstore {
namespace {

constexpr size_t kPoolBytes = 64 * kMinExtentBytes;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kSlots = 256;
constexpr IndexDescriptor kPq{.kind = IndexKind::kPq, .subspace_count = 2, .bits = 4};
constexpr uint32_t kLayers[] = {3, 7};

LayerShape Shape() {
  return {.dtype = kernels::DType::kF16,
          .key_dim = 32,
          .value_dim = 40,
          .kv_heads = kHeads,
          .query_heads = 4,
          .row_bytes = 144};
}

// Memory with nothing before and behind it: a read outside ends the test.
class GuardedPool {
 public:
  GuardedPool() {
    reserved_ =
        mmap(nullptr, kPoolBytes + 2 * kGuardBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    data_ = static_cast<std::byte*>(reserved_) + kGuardBytes;
    EXPECT_EQ(mprotect(data_, kPoolBytes, PROT_READ | PROT_WRITE), 0);
  }
  ~GuardedPool() { munmap(reserved_, kPoolBytes + 2 * kGuardBytes); }
  GuardedPool(const GuardedPool&) = delete;
  GuardedPool& operator=(const GuardedPool&) = delete;
  std::byte* data() { return data_; }

 private:
  static constexpr size_t kGuardBytes = size_t{1} << 30;
  void* reserved_ = nullptr;
  std::byte* data_ = nullptr;
};

// Two segments of two layers with one pq index: the first closed with all its slots, the second the
// open tail. Extents go from the pool's start to its end.
class AttachmentTest : public testing::Test {
 protected:
  AttachmentTest() {
    attachment_.header.sequence_id = 11;
    attachment_.header.version = 5;
    attachment_.header.token_count = kSlots + 3;
    attachment_.header.index_count = 2;
    attachment_.header.indexes[0] = kPq;
    attachment_.layer_tokens = {kSlots + 3, kSlots + 9};
    for (uint32_t i = 0; i < 2; ++i) {
      attachment_.segments.push_back({.segment_id = 100 + i,
                                      .first_position = i * kSlots,
                                      .slot_capacity = kSlots,
                                      .token_end = i == 0 ? kSlots : 0});
      for (const uint32_t layer : kLayers) attachment_.layers.push_back(MakeLayer(layer));
    }
    attachment_.header.layer_count = 2;
    attachment_.header.segment_count = 2;
    attachment_.header.row_extent_count = static_cast<uint32_t>(attachment_.row_extents.size());
  }

  ExtentRef NextExtent() {
    const ExtentRef extent{.unit = next_unit_, .order = 0};
    next_unit_ = next_unit_ == 0 ? kPoolBytes / kMinExtentBytes - 20 : next_unit_ + 1;
    return extent;
  }

  LayerDescriptor MakeLayer(uint32_t layer) {
    LayerDescriptor descriptor;
    descriptor.layer = layer;
    descriptor.row_bytes = Shape().row_bytes;
    descriptor.kv_head_count = kHeads;
    descriptor.row_extent_begin = static_cast<uint32_t>(attachment_.row_extents.size());
    for (uint32_t head = 0; head < kHeads; ++head) attachment_.row_extents.push_back(NextExtent());
    descriptor.state[0] = descriptor.state[1] = LayerState::kReady;
    descriptor.index_data[0] = NextExtent();
    descriptor.codebook[0] = NextExtent();
    auto* data = new (pool_.data() + descriptor.index_data[0].offset_bytes()) IndexDataHeader;
    data->index = kPq;
    data->kv_head_count = kHeads;
    data->slot_capacity = kSlots;
    data->plane_offset_bytes = 128;
    data->plane_stride_bytes = kernels::PlaneStride(kSlots);
    data->head_stride_bytes = kernels::CodePlanesBytes(GeometryOf(kPq, 32), kSlots);
    data->counts_offset_bytes = 128 + kHeads * data->head_stride_bytes;
    data->counts_stride_bytes = 1024;
    data->cell_count = 256;
    data->counted_end = kSlots;
    auto* codebook = new (pool_.data() + descriptor.codebook[0].offset_bytes()) CodebookHeader;
    codebook->index = kPq;
    codebook->kv_head_count = kHeads;
    codebook->key_dim = 32;
    codebook->centroid_offset_bytes = 128;
    codebook->head_stride_bytes = 32 * 16 * sizeof(float);
    return descriptor;
  }

  // Reads every byte that a view leads to.
  uint64_t ReadAll(MappedLayer& layer) {
    uint64_t sum = 0;
    const auto read = [&](const void* begin, size_t size_bytes) {
      EXPECT_GE(begin, pool_.data());
      EXPECT_LE(static_cast<const std::byte*>(begin) + size_bytes, pool_.data() + kPoolBytes);
      for (size_t i = 0; i < size_bytes; i += 32) sum += static_cast<const uint8_t*>(begin)[i];
      sum += static_cast<const uint8_t*>(begin)[size_bytes - 1];
    };
    const LayerView view = layer.View(~0u);
    for (const SegmentView& segment : view.segments) {
      for (uint32_t head = 0; head < view.shape.kv_heads; ++head) {
        read(segment.rows[head], size_t{segment.token_count} * view.shape.row_bytes);
        if (segment.index_data == nullptr) continue;
        const IndexDataHeader& data = *segment.index_data;
        read(Planes(data, head),
             kernels::PlaneCount(GeometryOf(data.index, 32)) * size_t{data.plane_stride_bytes});
        if (data.cell_count > 0) read(CellCounts(data, head), data.cell_count * sizeof(uint32_t));
        const std::span<const float> centroids = Centroids(*segment.codebook, head);
        read(centroids.data(), centroids.size_bytes());
      }
    }
    return sum;
  }

  // Whether the image is taken and leads to views; reads all of them.
  bool Use(std::span<const std::byte> image) {
    Attachment parsed;
    if (!ParseAttachment(image, kPoolBytes, &parsed).empty()) return false;
    bool made_all = true;
    for (const uint32_t slot : {0u, 1u, kMaxIndexes}) {
      for (const uint32_t layer : kLayers) {
        MappedLayer mapped;
        const bool made =
            MappedLayer::Make(parsed, layer, Shape(), slot, pool_.data(), &mapped).empty();
        if (made) sum_ += ReadAll(mapped);
        made_all = made_all && made;
      }
    }
    return made_all;
  }

  std::string Parse() {
    Attachment parsed;
    return ParseAttachment(EncodeAttachment(attachment_), kPoolBytes, &parsed);
  }

  GuardedPool pool_;
  Attachment attachment_;
  uint32_t next_unit_ = 0;
  uint64_t sum_ = 0;
};

TEST_F(AttachmentTest, WhatIsEncodedIsParsed) {
  const std::vector<std::byte> image = EncodeAttachment(attachment_);
  Attachment parsed;
  ASSERT_EQ(ParseAttachment(image, kPoolBytes, &parsed), "");
  EXPECT_EQ(parsed.header.sequence_id, 11u);
  EXPECT_EQ(parsed.header.version, 5u);
  EXPECT_EQ(parsed.header.indexes[0], kPq);
  EXPECT_EQ(parsed.layer_tokens, attachment_.layer_tokens);
  EXPECT_EQ(parsed.row_extents, attachment_.row_extents);
  ASSERT_EQ(parsed.segments.size(), 2u);
  EXPECT_EQ(parsed.segments[1].first_position, kSlots);
  EXPECT_EQ(EncodeAttachment(parsed), image);
}

TEST_F(AttachmentTest, OddLayerCountsArePadded) {
  attachment_.layer_tokens = {0};
  attachment_.segments.clear();
  attachment_.layers.clear();
  attachment_.row_extents.clear();
  attachment_.header.token_count = 0;
  const std::vector<std::byte> image = EncodeAttachment(attachment_);
  EXPECT_EQ(image.size(), sizeof(AttachmentHeader) + 8);
  Attachment parsed;
  ASSERT_EQ(ParseAttachment(image, kPoolBytes, &parsed), "");
  MappedLayer mapped;
  ASSERT_EQ(MappedLayer::Make(parsed, 3, Shape(), 0, pool_.data(), &mapped), "");
  EXPECT_TRUE(mapped.View(100).segments.empty());
}

TEST_F(AttachmentTest, ViewsShowTheTokensAskedFor) {
  Attachment parsed;
  ASSERT_EQ(ParseAttachment(EncodeAttachment(attachment_), kPoolBytes, &parsed), "");
  MappedLayer mapped;
  ASSERT_EQ(MappedLayer::Make(parsed, 7, Shape(), 0, pool_.data(), &mapped), "");
  EXPECT_TRUE(mapped.ready());
  EXPECT_EQ(mapped.View(0).segments.size(), 0u);
  EXPECT_EQ(mapped.View(kSlots).segments.size(), 1u);
  EXPECT_EQ(mapped.View(kSlots + 1).token_count(), kSlots + 1);
  const LayerView all = mapped.View(~0u);
  EXPECT_EQ(all.token_count(), 2 * kSlots);
  const LayerDescriptor& tail = attachment_.layers[3];
  EXPECT_EQ(all.segments[1].rows[1],
            pool_.data() + attachment_.row_extents[tail.row_extent_begin + 1].offset_bytes());
  EXPECT_EQ(static_cast<const void*>(all.segments[1].codebook),
            pool_.data() + tail.codebook[0].offset_bytes());
}

TEST_F(AttachmentTest, ASegmentWithoutTheIndexIsNotReady) {
  attachment_.layers[2].state[0] = LayerState::kFilled;
  attachment_.layers[2].index_data[0] = attachment_.layers[2].codebook[0] = {};
  Attachment parsed;
  ASSERT_EQ(ParseAttachment(EncodeAttachment(attachment_), kPoolBytes, &parsed), "");
  MappedLayer mapped;
  ASSERT_EQ(MappedLayer::Make(parsed, 3, Shape(), 0, pool_.data(), &mapped), "");
  EXPECT_FALSE(mapped.ready());
  EXPECT_NE(mapped.View(~0u).segments[0].index_data, nullptr);
  EXPECT_EQ(mapped.View(~0u).segments[1].index_data, nullptr);
  ASSERT_EQ(MappedLayer::Make(parsed, 7, Shape(), 0, pool_.data(), &mapped), "");
  EXPECT_TRUE(mapped.ready());
}

TEST_F(AttachmentTest, MakeNamesWhatDoesNotFit) {
  const auto make = [&](uint32_t layer, const LayerShape& shape, uint32_t slot) {
    MappedLayer mapped;
    return MappedLayer::Make(attachment_, layer, shape, slot, pool_.data(), &mapped);
  };
  LayerShape heads = Shape();
  heads.kv_heads = 4;
  LayerShape rows = Shape();
  rows.row_bytes = 160;
  LayerShape key = Shape();
  key.key_dim = 64;
  EXPECT_EQ(make(4, Shape(), 0), "layer");
  EXPECT_EQ(make(3, Shape(), 2), "index_slot");
  EXPECT_EQ(make(3, heads, 0), "shape.kv_heads");
  EXPECT_EQ(make(3, rows, 0), "shape.row_bytes");
  EXPECT_EQ(make(3, key, 0), "segments[0] codebook: key_dim");
}

TEST_F(AttachmentTest, WrongFieldsAreNamed) {
  const auto refused = [&](auto change) {
    const Attachment good = attachment_;
    change(attachment_);
    const std::string wrong = Parse();
    attachment_ = good;
    return wrong;
  };
  EXPECT_EQ(refused([](Attachment& a) { a.header.magic = 1; }), "magic");
  for (const uint32_t other : {1u, 2u, kLayoutVersion + 1}) {
    EXPECT_EQ(refused([&](Attachment& a) { a.header.layout_version = other; }),
              "layout_version is " + std::to_string(other) + "; this client reads " +
                  std::to_string(kLayoutVersion));
  }
  EXPECT_EQ(refused([](Attachment& a) { a.header.index_count = 5; }), "index_count");
  EXPECT_EQ(refused([](Attachment& a) { a.header.indexes[0].bits = 9; }), "indexes[0]");
  EXPECT_EQ(refused([](Attachment& a) { a.header.indexes[0].layout = SubspaceLayout{3}; }),
            "indexes[0]");
  EXPECT_EQ(refused([](Attachment& a) { a.header.token_count = 1; }), "token_count");
  EXPECT_EQ(refused([](Attachment& a) { a.segments[1].first_position = 300; }),
            "segments[1].first_position");
  EXPECT_EQ(refused([](Attachment& a) { a.segments[0].token_end = 0; }), "segments[0].token_end");
  EXPECT_EQ(refused([](Attachment& a) { a.segments[0].slot_capacity = 100; }),
            "segments[0].slot_capacity");
  EXPECT_EQ(refused([](Attachment& a) { a.layer_tokens[1] = 3 * kSlots; }), "layer_tokens[1]");
  EXPECT_EQ(refused([](Attachment& a) { a.layers[1].layer = 3; }), "layers[1].layer");
  EXPECT_EQ(refused([](Attachment& a) { a.layers[2].layer = 4; }), "layers[2].layer");
  EXPECT_EQ(refused([](Attachment& a) { a.layers[0].row_order = RowOrder::kCell; }),
            "layers[0].row_order");
  EXPECT_EQ(refused([](Attachment& a) { a.layers[3].row_bytes = 4096; }), "layers[3].row_bytes");
  EXPECT_EQ(refused([](Attachment& a) { a.layers[3].row_extent_begin = ~0u; }),
            "layers[3].row_extent_begin");
  EXPECT_EQ(refused([](Attachment& a) { a.row_extents[5].unit = 64; }), "layers[2].row_extents[5]");
  EXPECT_EQ(refused([](Attachment& a) { a.row_extents[5].order = 25; }),
            "layers[2].row_extents[5]");
  EXPECT_EQ(refused([](Attachment& a) { a.layers[0].codebook[0] = {}; }), "layers[0].codebook[0]");
  EXPECT_EQ(refused([](Attachment& a) { a.layers[0].index_data[1] = {.unit = 0, .order = 0}; }),
            "layers[0].index_data[1]");
  // Rows that need more than their extent has.
  EXPECT_EQ(refused([](Attachment& a) {
              for (LayerDescriptor& layer : a.layers) layer.row_bytes = 2048;
            }),
            "layers[0].row_extents[0]");
}

TEST_F(AttachmentTest, EveryCutImageIsRefused) {
  const std::vector<std::byte> image = EncodeAttachment(attachment_);
  Attachment parsed;
  for (size_t size = 0; size < image.size(); ++size) {
    EXPECT_NE(ParseAttachment(std::span(image).first(size), kPoolBytes, &parsed), "") << size;
  }
  std::vector<std::byte> longer = image;
  longer.push_back(std::byte{0});
  EXPECT_NE(ParseAttachment(longer, kPoolBytes, &parsed), "");
  EXPECT_NE(ParseAttachment(image, kPoolBytes - 25 * kMinExtentBytes, &parsed), "");
}

TEST_F(AttachmentTest, AnImageOfAnotherLayoutIsRefusedByItsVersionWhateverItsSize) {
  attachment_.header.layout_version = kLayoutVersion - 1;
  const std::vector<std::byte> image = EncodeAttachment(attachment_);
  Attachment parsed;
  for (const size_t size : {size_t{8}, sizeof(AttachmentHeader) - 8, image.size()}) {
    EXPECT_EQ(ParseAttachment(std::span(image).first(size), kPoolBytes, &parsed),
              "layout_version is " + std::to_string(kLayoutVersion - 1) + "; this client reads " +
                  std::to_string(kLayoutVersion));
  }
}

TEST_F(AttachmentTest, HeadersOfAnotherLayoutInThePoolAreRefusedWithBothVersions) {
  const LayerDescriptor& tail = attachment_.layers.back();
  const auto make_with = [&](uint32_t* layout_version, uint32_t other) {
    *layout_version = other;
    MappedLayer mapped;
    std::string wrong = MappedLayer::Make(attachment_, 7, Shape(), 0, pool_.data(), &mapped);
    *layout_version = kLayoutVersion;
    return wrong;
  };
  auto* data = reinterpret_cast<IndexDataHeader*>(pool_.data() + tail.index_data[0].offset_bytes());
  auto* codebook =
      reinterpret_cast<CodebookHeader*>(pool_.data() + tail.codebook[0].offset_bytes());
  for (const uint32_t other : {kOldestExtentVersion - 1, kLayoutVersion + 1}) {
    const std::string versions = "layout_version is " + std::to_string(other) +
                                 "; this client reads " + std::to_string(kLayoutVersion);
    EXPECT_EQ(make_with(&data->layout_version, other), "segments[1] index data: " + versions);
    EXPECT_EQ(make_with(&codebook->layout_version, other), "segments[1] codebook: " + versions);
  }
  // Extents that an earlier worker left.
  EXPECT_EQ(make_with(&data->layout_version, kOldestExtentVersion), "");
  EXPECT_EQ(make_with(&codebook->layout_version, kOldestExtentVersion), "");
}

TEST_F(AttachmentTest, ACodebookThatCutsSubspacesInAnImpossibleWayIsRefused) {
  const LayerDescriptor& tail = attachment_.layers.back();
  auto* codebook =
      reinterpret_cast<CodebookHeader*>(pool_.data() + tail.codebook[0].offset_bytes());
  const auto make_with = [&](uint32_t paired_dims) {
    codebook->paired_dims = paired_dims;
    MappedLayer mapped;
    return MappedLayer::Make(attachment_, 7, Shape(), 0, pool_.data(), &mapped);
  };
  const uint32_t key_dim = Shape().key_dim;
  EXPECT_EQ(make_with(key_dim), "");
  for (const uint32_t wrong : {1u, key_dim / 2, key_dim - 2, key_dim + 1, 2 * key_dim, ~0u}) {
    EXPECT_EQ(make_with(wrong), "segments[1] codebook: paired_dims") << wrong;
  }
  attachment_.header.indexes[0].layout = SubspaceLayout::kContiguous;
  for (const LayerDescriptor& layer : attachment_.layers) {
    if (!layer.index_data[0].valid()) continue;
    std::byte* const data = pool_.data() + layer.index_data[0].offset_bytes();
    reinterpret_cast<IndexDataHeader*>(data)->index.layout = SubspaceLayout::kContiguous;
    std::byte* const centroids = pool_.data() + layer.codebook[0].offset_bytes();
    reinterpret_cast<CodebookHeader*>(centroids)->index.layout = SubspaceLayout::kContiguous;
  }
  EXPECT_EQ(make_with(key_dim), "segments[1] codebook: paired_dims");
  EXPECT_EQ(make_with(0), "");
}

TEST_F(AttachmentTest, FlippedImagesNeverLeadOutsideThePool) {
  const std::vector<std::byte> image = EncodeAttachment(attachment_);
  ASSERT_TRUE(Use(image));
  size_t refused = 0;
  for (size_t i = 0; i < image.size(); ++i) {
    for (const int flip : {0x01, 0x10, 0x80, 0xff}) {
      std::vector<std::byte> changed = image;
      changed[i] ^= static_cast<std::byte>(flip);
      refused += Use(changed) ? 0 : 1;
    }
  }
  EXPECT_GT(refused, image.size());
}

TEST_F(AttachmentTest, WordsOfAllKindsNeverLeadOutsideThePool) {
  const std::vector<std::byte> image = EncodeAttachment(attachment_);
  for (size_t i = 0; i + 4 <= image.size(); i += 4) {
    for (const uint32_t word : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xfffffffeu, 0xffffffffu}) {
      std::vector<std::byte> changed = image;
      std::memcpy(changed.data() + i, &word, sizeof(word));
      Use(changed);
    }
  }
  std::minstd_rand random(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::byte> changed = image;
    for (int flips = 0; flips < 8; ++flips) {
      changed[random() % changed.size()] = static_cast<std::byte>(random());
    }
    Use(changed);
  }
}

TEST_F(AttachmentTest, FlippedHeadersInThePoolNeverLeadOutsideTheirExtents) {
  const std::vector<std::byte> image = EncodeAttachment(attachment_);
  const LayerDescriptor& tail = attachment_.layers.back();
  size_t refused = 0;
  for (const auto& [extent, size_bytes] : {std::pair(tail.index_data[0], sizeof(IndexDataHeader)),
                                           std::pair(tail.codebook[0], sizeof(CodebookHeader))}) {
    std::byte* header = pool_.data() + extent.offset_bytes();
    for (size_t i = 0; i < size_bytes; ++i) {
      for (const int flip : {0x01, 0x80, 0xff}) {
        header[i] ^= static_cast<std::byte>(flip);
        refused += Use(image) ? 0 : 1;
        header[i] ^= static_cast<std::byte>(flip);
      }
    }
    for (size_t i = 0; i + 8 <= size_bytes; i += 8) {
      uint64_t old = 0;
      std::memcpy(&old, header + i, 8);
      for (const uint64_t word : {uint64_t{0}, uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{127}}) {
        std::memcpy(header + i, &word, 8);
        Use(image);
      }
      std::memcpy(header + i, &old, 8);
    }
  }
  EXPECT_GT(refused, 100u);
  EXPECT_TRUE(Use(image));
}

}  // namespace
}  // namespace pqcached::kvstore
