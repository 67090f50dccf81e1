// Headers in a pool name places inside their own extent, and no reader follows them anywhere else.
// Each extent lies between pages that cannot be read, so an access outside of it ends the test in
// every build.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/select/cells/pq_postings.h"
#include "kvstore/memory/pool.h"
#include "kvstore/read/attachment.h"
#include "kvstore/sequence/segment.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kHeads = 2, kSlots = 512, kKeyDim = 32, kRowBytes = 96;
constexpr IndexDescriptor kIndex{.kind = IndexKind::kPq, .subspace_count = 2, .bits = 5};
constexpr uint64_t kExtentBytes = kMinExtentBytes;
constexpr uint64_t kStep = kContentAlignment;

LayerShape Shape() {
  return {.dtype = kernels::DType::kF16,
          .key_dim = kKeyDim,
          .value_dim = 16,
          .kv_heads = kHeads,
          .query_heads = 4,
          .row_bytes = kRowBytes};
}

kernels::PqGeometry Geometry() { return GeometryOf(kIndex, kKeyDim); }

// Reads every byte to which the headers lead, as selection does.
uint64_t ReadAreas(const IndexDataHeader& data, const CodebookHeader& codebook) {
  uint64_t sum = 0;
  const auto read = [&sum](const auto* begin, size_t count) {
    for (size_t i = 0; i < count; ++i) sum += static_cast<uint64_t>(begin[i]);
  };
  for (uint32_t head = 0; head < kHeads; ++head) {
    read(Planes(data, head), (kernels::PlaneCount(Geometry()) - 1) * data.plane_stride_bytes +
                                 kernels::PlaneStride(kSlots));
    if (data.cell_count > 0) read(CellCounts(data, head), kernels::CellCount(Geometry()));
    if (data.cell_count > 0 && data.posting_slots_stride_bytes > 0) {
      read(PostingBegins(data, head), kernels::PostingBeginCount(Geometry(), kSlots));
      read(PostingSlots(data, head), kSlots);
    }
    const std::span<const float> centroids = Centroids(codebook, head);
    read(centroids.data(), centroids.size());
  }
  return sum;
}

// An area of an index extent, by the fields that place it, and its size per kv head.
struct Area {
  const char* name;  // in refusals
  uint64_t IndexDataHeader::*offset;
  uint64_t IndexDataHeader::*stride;
  uint64_t content_bytes;
};

const Area kAreas[] = {
    {"planes", &IndexDataHeader::plane_offset_bytes, &IndexDataHeader::head_stride_bytes,
     kernels::CodePlanesBytes(Geometry(), kSlots)},
    {"counts", &IndexDataHeader::counts_offset_bytes, &IndexDataHeader::counts_stride_bytes,
     kernels::CellCount(Geometry()) * sizeof(uint32_t)},
    {"postings", &IndexDataHeader::posting_begins_offset_bytes,
     &IndexDataHeader::posting_begins_stride_bytes,
     kernels::PostingBeginCount(Geometry(), kSlots) * sizeof(uint16_t)},
    {"postings", &IndexDataHeader::posting_slots_offset_bytes,
     &IndexDataHeader::posting_slots_stride_bytes, kSlots * sizeof(uint16_t)},
};

uint64_t AlignUp(uint64_t bytes) { return (bytes + kStep - 1) / kStep * kStep; }

// One segment of one layer. Every second unit of the pool is an extent; the others are guards.
class ExtentBoundsTest : public testing::Test {
 protected:
  static constexpr uint32_t kUnits = 9;

  ExtentBoundsTest() {
    void* memory = mmap(nullptr, kUnits * kExtentBytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pool_ = static_cast<std::byte*>(memory);
    for (uint32_t unit = 1; unit < kUnits; unit += 2) {
      EXPECT_EQ(mprotect(pool_ + unit * kExtentBytes, kExtentBytes, PROT_READ | PROT_WRITE), 0);
    }
    data_ = new (pool_ + 5 * kExtentBytes) IndexDataHeader;
    codebook_ = new (pool_ + 7 * kExtentBytes) CodebookHeader;
    Reset();
    LayerDescriptor layer;
    layer.layer = 3;
    layer.row_bytes = kRowBytes;
    layer.kv_head_count = kHeads;
    layer.state[0] = LayerState::kReady;
    layer.index_data[0] = {.unit = 5, .order = 0};
    layer.codebook[0] = {.unit = 7, .order = 0};
    attachment_.header.layer_count = attachment_.header.segment_count = 1;
    attachment_.header.row_extent_count = kHeads;
    attachment_.header.index_count = 1;
    attachment_.header.indexes[0] = kIndex;
    attachment_.header.token_count = kSlots;
    attachment_.layer_tokens = {kSlots};
    attachment_.segments = {{.first_position = 0, .slot_capacity = kSlots, .token_end = kSlots}};
    attachment_.layers = {layer};
    attachment_.row_extents = {{.unit = 1, .order = 0}, {.unit = 3, .order = 0}};
  }
  ~ExtentBoundsTest() override { munmap(pool_, kUnits * kExtentBytes); }

  // Writes headers that are right.
  void Reset() {
    new (data_) IndexDataHeader;
    data_->index = kIndex;
    data_->kv_head_count = kHeads;
    data_->slot_capacity = kSlots;
    data_->plane_stride_bytes = kernels::PlaneStride(kSlots);
    data_->cell_count = kernels::CellCount(Geometry());
    data_->counted_end = kSlots;
    uint64_t next = AlignUp(sizeof(IndexDataHeader));
    for (const Area& area : kAreas) {
      data_->*area.offset = next;
      data_->*area.stride = AlignUp(area.content_bytes);
      next += kHeads * (data_->*area.stride);
    }
    new (codebook_) CodebookHeader;
    codebook_->index = kIndex;
    codebook_->kv_head_count = kHeads;
    codebook_->key_dim = kKeyDim;
    codebook_->centroid_offset_bytes = AlignUp(sizeof(CodebookHeader));
    codebook_->head_stride_bytes = CentroidBytes();
  }
  static uint64_t CentroidBytes() { return kernels::CentroidFloats(Geometry()) * sizeof(float); }

  // Returns why the layer is refused; "" when it is taken, after reading all of it.
  std::string Use() {
    MappedLayer mapped;
    std::string wrong = MappedLayer::Make(attachment_, 3, Shape(), 0, pool_, &mapped);
    if (!wrong.empty()) return wrong.substr(wrong.find(": ") + 2);
    const LayerView view = mapped.View(kSlots);
    sum_ += ReadAreas(*view.segments[0].index_data, *view.segments[0].codebook);
    return "";
  }

  // Checks what becomes of values of one field, whose right value is put back afterwards.
  template <class Field>
  void Expect(Field& field, const std::vector<uint64_t>& taken,
              const std::vector<uint64_t>& refused, const std::string& name) {
    const Field right = field;
    for (const uint64_t value : taken) {
      field = static_cast<Field>(value);
      EXPECT_EQ(Use(), "") << name << " " << value;
    }
    for (const uint64_t value : refused) {
      field = static_cast<Field>(value);
      EXPECT_EQ(Use(), name) << value;
    }
    field = right;
  }

  // Checks the places of an area: it may reach the end of its extent, and no further.
  void ExpectPlaces(uint64_t& offset, uint64_t& stride, uint64_t content, size_t header_bytes,
                    const std::string& name) {
    const uint64_t last = kExtentBytes - kHeads * stride;
    const uint64_t end = kExtentBytes;
    Expect(offset, {last, AlignUp(header_bytes)},
           {last + kStep, last + 1, end, end + kStep, 0 - kStep, 0, uint64_t{1} << 63}, name);
    const uint64_t widest = (end - offset) / kHeads / kStep * kStep;
    Expect(stride, {widest, AlignUp(content)},
           {widest + kStep, widest - 1, end + kStep, AlignUp(content) - kStep, uint64_t{1} << 63,
            0 - kStep},
           name);
  }

  std::byte* pool_ = nullptr;
  IndexDataHeader* data_ = nullptr;
  CodebookHeader* codebook_ = nullptr;
  Attachment attachment_;
  uint64_t sum_ = 0;
};

TEST_F(ExtentBoundsTest, TheAttachmentIsValid) {
  Attachment parsed;
  EXPECT_EQ(ParseAttachment(EncodeAttachment(attachment_), kUnits * kExtentBytes, &parsed), "");
  EXPECT_EQ(Use(), "");
}

TEST_F(ExtentBoundsTest, AreasOfAnIndexReachTheEndOfTheirExtentAndNoFurther) {
  for (const Area& area : kAreas) {
    SCOPED_TRACE(area.name);
    ExpectPlaces(data_->*area.offset, data_->*area.stride, area.content_bytes,
                 sizeof(IndexDataHeader), area.name);
    EXPECT_EQ(Use(), "");
  }
}

TEST_F(ExtentBoundsTest, CentroidsReachTheEndOfTheirExtentAndNoFurther) {
  ExpectPlaces(codebook_->centroid_offset_bytes, codebook_->head_stride_bytes, CentroidBytes(),
               sizeof(CodebookHeader), "centroids");
}

TEST_F(ExtentBoundsTest, PlanesStayInTheAreaOfTheirHead) {
  const uint64_t right = data_->plane_stride_bytes;
  Expect(data_->plane_stride_bytes, {}, {right - kStep, 0, kExtentBytes + kStep, 0 - kStep},
         "plane_stride_bytes");
  Expect(data_->plane_stride_bytes, {}, {right + 1}, "plane_stride_bytes");
  Expect(data_->plane_stride_bytes, {}, {right + kStep}, "planes");
  // The last head's planes end with the extent.
  data_->plane_stride_bytes = right + kStep;
  data_->head_stride_bytes = 2 * (right + kStep);
  data_->plane_offset_bytes = kExtentBytes - kHeads * data_->head_stride_bytes;
  EXPECT_EQ(Use(), "");
}

TEST_F(ExtentBoundsTest, HeadersOfAnotherShapeAreRefused) {
  Expect(data_->magic, {}, {0, CodebookHeader::kMagic}, "magic");
  Expect(data_->index.bits, {}, {4, 6, 8, 0}, "index");
  Expect(data_->kv_head_count, {}, {0, 1, 3, ~0u}, "kv_head_count");
  Expect(data_->slot_capacity, {}, {0, 256, 640, ~0u}, "slot_capacity");
  Expect(codebook_->magic, {}, {0, IndexDataHeader::kMagic}, "magic");
  Expect(codebook_->index.subspace_count, {}, {1, 4, 16, 0}, "index");
  Expect(codebook_->kv_head_count, {}, {0, 1, 3, ~0u}, "kv_head_count");
  Expect(codebook_->key_dim, {}, {0, 16, 64, 256, ~0u}, "key_dim");
}

TEST_F(ExtentBoundsTest, CountsAndListsAreThoseOfTheCells) {
  Expect(data_->cell_count, {}, {1, 1023, 1025, 4096, ~0u}, "cell_count");
  Expect(data_->counted_begin, {0, kSlots}, {kSlots + 1, ~0u}, "counted_begin");
  for (const uint32_t counted_end : {0u, kSlots, kSlots + 1, ~0u}) {
    data_->counted_end = counted_end;
    EXPECT_EQ(Use(), counted_end <= kSlots ? "" : "counted_end");
  }
  data_->counted_end = kSlots;
  Expect(data_->posting_begins_stride_bytes, {}, {0}, "postings");
  Expect(data_->posting_slots_stride_bytes, {}, {0}, "postings");
  data_->cell_count = 0;
  EXPECT_EQ(Use(), "postings") << "lists without cells";
  data_->posting_begins_stride_bytes = data_->posting_slots_stride_bytes = 0;
  EXPECT_EQ(Use(), "");
}

// Recovery takes over extents whose headers an earlier process wrote.
class RecoveredExtentTest : public testing::Test {
 protected:
  RecoveredExtentTest() {
    auto made = Pool::Create({.capacity_bytes = 5 * kExtentBytes});
    EXPECT_TRUE(made.ok()) << made.status();
    pool_ = *std::move(made);
    guards_ = *pool_->Allocate(std::vector<size_t>(5, kExtentBytes));
    // The places of the codebook and of the layer become free.
    std::erase_if(guards_, [](const Extent& extent) { return extent.ref().unit % 2 == 1; });
    const auto codebook = std::make_shared<const Codebook>(Take(kCodebook), kIndex, Shape(), 4);
    const auto layer =
        SegmentIndex::MakeLayer(Shape(), kSlots, /*counted_begin=*/8, Take(kData), codebook);
    layer.header().counted_end = kSlots;
    std::memcpy(right_codebook_, pool_->data(kCodebook), sizeof(right_codebook_));
    std::memcpy(right_data_, pool_->data(kData), sizeof(right_data_));
    for (const Extent& guard : guards_) Protect(guard, PROT_NONE);
  }
  ~RecoveredExtentTest() override {
    for (const Extent& guard : guards_) Protect(guard, PROT_READ | PROT_WRITE);
  }

  static void Protect(const Extent& extent, int protection) {
    EXPECT_EQ(mprotect(extent.data(), kExtentBytes, protection), 0);
  }

  // Allocates one of the two extents that are free, the first one first.
  Extent Take(ExtentRef place) {
    Extent taken = std::move(pool_->Allocate(std::vector<size_t>{kExtentBytes})->front());
    EXPECT_EQ(taken.ref(), place);
    return taken;
  }

  // Puts the right headers back.
  void Reset() {
    std::memcpy(pool_->data(kCodebook), right_codebook_, sizeof(right_codebook_));
    std::memcpy(pool_->data(kData), right_data_, sizeof(right_data_));
  }

  // Returns whether the codebook and the layer are recovered; reads all of them.
  bool Recover() {
    auto codebook = Codebook::Recover(Take(kCodebook), kIndex, Shape());
    if (codebook == nullptr) return false;
    const auto layer = SegmentIndex::RecoverLayer(Shape(), kSlots, Take(kData), codebook);
    if (layer.data == nullptr) return false;
    sum_ += ReadAreas(layer.header(), codebook->header());
    return true;
  }

  static constexpr ExtentRef kCodebook{.unit = 1, .order = 0}, kData{.unit = 3, .order = 0};
  std::shared_ptr<Pool> pool_;
  std::vector<Extent> guards_;
  std::byte right_codebook_[sizeof(CodebookHeader)];
  std::byte right_data_[sizeof(IndexDataHeader)];
  uint64_t sum_ = 0;
};

TEST_F(RecoveredExtentTest, RightHeadersAreTaken) {
  Reset();
  EXPECT_TRUE(Recover());
}

TEST_F(RecoveredExtentTest, AnyOtherPlaceInAHeaderIsRefused) {
  Reset();
  auto& data = *reinterpret_cast<IndexDataHeader*>(pool_->data(kData));
  auto& codebook = *reinterpret_cast<CodebookHeader*>(pool_->data(kCodebook));
  const auto expect_refused = [&](const char* name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    for (const uint64_t change : {uint64_t{1}, kStep, kExtentBytes, ~uint64_t{0}}) {
      Reset();
      field = static_cast<Field>(field + static_cast<Field>(change));
      EXPECT_FALSE(Recover()) << name << " + " << change;
    }
  };
  for (const Area& area : kAreas) {
    expect_refused(area.name, data.*area.offset);
    expect_refused(area.name, data.*area.stride);
  }
  expect_refused("plane_stride_bytes", data.plane_stride_bytes);
  expect_refused("kv_head_count", data.kv_head_count);
  expect_refused("slot_capacity", data.slot_capacity);
  expect_refused("cell_count", data.cell_count);
  expect_refused("bits", data.index.bits);
  expect_refused("codebook_generation", data.codebook_generation);
  expect_refused("centroid_offset_bytes", codebook.centroid_offset_bytes);
  expect_refused("head_stride_bytes", codebook.head_stride_bytes);
  expect_refused("kv_head_count", codebook.kv_head_count);
  expect_refused("key_dim", codebook.key_dim);
  expect_refused("bits", codebook.index.bits);
  expect_refused("magic", codebook.magic);
  Reset();
  codebook.paired_dims = kKeyDim;  // of a cache without rotary pairs
  EXPECT_FALSE(Recover());
}

TEST_F(RecoveredExtentTest, ExtentsOfTheVersionsThatAreReadAreTaken) {
  auto& data = *reinterpret_cast<IndexDataHeader*>(pool_->data(kData));
  auto& codebook = *reinterpret_cast<CodebookHeader*>(pool_->data(kCodebook));
  for (uint32_t* const version : {&data.layout_version, &codebook.layout_version}) {
    for (uint32_t other = 0; other <= kLayoutVersion + 1; ++other) {
      Reset();
      *version = other;
      EXPECT_EQ(Recover(), other >= kOldestExtentVersion && other <= kLayoutVersion) << other;
    }
  }
}

TEST_F(RecoveredExtentTest, CountedSlotsAreThoseOfTheSegment) {
  const auto recover = [this](uint32_t begin, uint32_t end) {
    Reset();
    auto& data = *reinterpret_cast<IndexDataHeader*>(pool_->data(kData));
    data.counted_begin = begin;
    data.counted_end = end;
    return Recover();
  };
  EXPECT_TRUE(recover(0, 0));
  EXPECT_TRUE(recover(8, 0));
  EXPECT_TRUE(recover(kSlots, 0));
  EXPECT_TRUE(recover(kSlots - 1, kSlots));
  EXPECT_FALSE(recover(kSlots + 1, 0));
  EXPECT_FALSE(recover(8, kSlots + 1));
  EXPECT_FALSE(recover(8, 8));
  EXPECT_FALSE(recover(8, 7));
  EXPECT_FALSE(recover(~0u, ~0u));
}

}  // namespace
}  // namespace pqcached::kvstore
