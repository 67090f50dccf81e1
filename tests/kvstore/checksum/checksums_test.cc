// Bytes of a pool that rot while nobody looks after them: never served.

#include "kvstore/checksum/checksums.h"
#include "kvstore/clock.h"
#include "tests/kvstore/content.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::AppendContent;
using testing::Content;
using testing::ContentOf;
using testing::ExpectContent;
using testing::Floats;
using testing::IngestContent;
using testing::kTenant;
using testing::MemoryKeeper;
using testing::Pq;
using testing::RandomFloats;
using testing::RandomIds;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;

constexpr uint32_t kTokens = 300;  // two closed segments, and a tail that BuildIndex closes
const IndexDescriptor kIndex = Pq(2, 4);

class ChecksumsOf : public ::testing::Test {
 protected:
  ChecksumsOf() {
    Restart();
    id_ = world_->Create().sequence_id;
    content_ = ContentOf(RandomIds(random_, kTokens));
    EXPECT_TRUE(IngestContent(store(), id_, group_, 0, content_).ok());
    EXPECT_TRUE(store().BuildIndex(kTenant, id_, {.index = kIndex, .iterations = 1}, {}).ok());
  }

  void Restart() {
    if (world_.has_value()) {
      store().WaitIdle(SteadyTime::InfiniteFuture());
      world_.reset();
    }
    StoreOptions options = SmallOptions();
    options.keeper = &keeper_;
    world_.emplace(SmallSpec(), options);
  }
  Store& store() { return *world_->store; }

  // Flips a bit of the pool wherever these bytes stand in it. Returns how often that is.
  uint32_t Spoil(std::span<const std::byte> bytes) {
    const FileDescriptor pool = keeper_.Take("pool-1");
    const auto mapping = Mapping::Map(pool, SizeOf(pool), Mapping::Access::kReadWrite);
    EXPECT_TRUE(mapping.ok());
    uint32_t found = 0;
    std::byte* end = mapping->data() + mapping->size_bytes();
    for (std::byte* at = mapping->data();
         (at = std::search(at, end, bytes.begin(), bytes.end())) != end; ++at) {
      *at ^= std::byte{1};
      ++found;
    }
    return found;
  }
  absl::Status Fetch(uint32_t layer, uint64_t begin, uint64_t end) {
    return store().FetchBlocks(kTenant, id_, layer, {begin, end}, RowPart::kRow).status();
  }
  absl::Status TopK(uint32_t layer, const IndexDescriptor& index) {
    const Floats query = RandomFloats(random_, {1, group_.query_heads, group_.key_dim});
    return store()
        .TopK(kTenant, id_,
              {.layer = layer, .query_position = content_.size() - 1, .queries = query.view()},
              {.index = index, .budget_ratio = 0.3})
        .status();
  }
  absl::Status Attach() {
    EXPECT_TRUE(store().OpenLocalSession("tenant", "session", 1).ok());
    return store().Attach(kTenant, id_, "session", {}).status();
  }

  std::mt19937_64 random_{3};
  LayerGroup group_ = SmallSpec().groups[0];
  MemoryKeeper keeper_;
  std::optional<SharingStore> world_;
  uint64_t id_ = 0;
  Content content_;
};

TEST_F(ChecksumsOf, WholeBytesAreRead) {
  for (int restart = 0; restart < 2; ++restart) {
    Restart();
    ExpectContent(store(), id_, group_, content_);
    EXPECT_TRUE(TopK(1, kIndex).ok());
    const absl::Status attached = Attach();
    EXPECT_TRUE(attached.ok()) << attached;
    EXPECT_EQ(store().Stats(kAllTenants).data_loss_count, 0u);
  }
}

TEST_F(ChecksumsOf, RowsThatRottedAreNotServed) {
  const auto rows = store().FetchBlocks(kTenant, id_, 3, {200, 201}, RowPart::kRow);
  ASSERT_TRUE(rows.ok());
  Restart();
  const std::span<const std::byte> one(rows->data);
  ASSERT_EQ(Spoil(one.first(one.size() / group_.kv_heads)), 1u);
  const auto lost = absl::StatusCode::kDataLoss;
  EXPECT_EQ(Fetch(3, 200, 201).code(), lost);
  EXPECT_EQ(Fetch(3, 200, 201).code(), lost);
  EXPECT_TRUE(Fetch(1, 0, kTokens).ok());
  EXPECT_EQ(TopK(3, {}).code(), lost);
  EXPECT_TRUE(TopK(1, kIndex).ok());
  EXPECT_EQ(Attach().code(), lost);
  EXPECT_EQ(store().BuildIndex(kTenant, id_, {.index = Pq(1, 4), .iterations = 1}, {}).code(),
            lost);
  EXPECT_EQ(store().Stats(kAllTenants).data_loss_count, 1u);
  // Nor to those that share them.
  const auto fork = store().ForkSequence(kTenant, id_, 256, "session");
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(
      store().FetchBlocks(kTenant, fork->sequence_id, 3, {0, 256}, RowPart::kRow).status().code(),
      lost);
  Restart();
  EXPECT_EQ(Fetch(3, 200, 201).code(), lost);
}

TEST_F(ChecksumsOf, CodebooksThatRottedAreNotServed) {
  // Nothing else in the pool begins like a codebook's header.
  const uint32_t magic = CodebookHeader::kMagic;
  const FileDescriptor pool = keeper_.Take("pool-1");
  const auto mapping = Mapping::Map(pool, SizeOf(pool), Mapping::Access::kReadWrite);
  ASSERT_TRUE(mapping.ok());
  Restart();
  uint32_t spoilt = 0;
  for (size_t offset = 0; offset < mapping->size_bytes(); offset += kMinExtentBytes) {
    if (std::memcmp(mapping->data() + offset, &magic, sizeof(magic)) != 0) continue;
    mapping->data()[offset + 200] ^= std::byte{4};  // in a centroid
    ++spoilt;
  }
  EXPECT_EQ(spoilt, 2u);  // of two layers, in one generation
  EXPECT_EQ(TopK(1, kIndex).code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(TopK(1, {}).ok());
  ExpectContent(store(), id_, group_, content_);
  EXPECT_EQ(Attach().code(), absl::StatusCode::kDataLoss);
}

TEST_F(ChecksumsOf, TailsThatAreOverwrittenAreNoLoss) {
  const uint64_t open = world_->Create().sequence_id;
  const Content first = ContentOf(RandomIds(random_, 100));
  ASSERT_TRUE(IngestContent(store(), open, group_, 0, first).ok());
  const uint64_t fork = world_->Fork(open, 90).sequence_id;
  Restart();
  ASSERT_TRUE(store().DropSequence(kTenant, fork).ok());
  ASSERT_TRUE(store().TruncateSequence(kTenant, open, 10).ok());
  Content second(first.begin(), first.begin() + 10);
  const Content added = ContentOf(RandomIds(random_, 60));
  ASSERT_TRUE(AppendContent(store(), open, group_, 10, added).ok());
  second.insert(second.end(), added.begin(), added.end());
  Restart();
  ExpectContent(store(), open, group_, second);
  EXPECT_EQ(store().Stats(kAllTenants).data_loss_count, 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
