// A volume that is full refuses calls, and loses nothing: no store touches memory that it was not
// granted.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/memory/file_keeper.h"
#include "tests/kvstore/content.h"
#include "tests/kvstore/fixture.h"
#include "tests/kvstore/small_volume.h"
#include "tests/skip.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::AppendContent;
using testing::Content;
using testing::NumberedContent;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::SmallVolume;

class FullVolume : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!volume_.valid()) PQC_SKIP("root") << "this process may not mount";
    Restart();
  }
  void Restart() {
    world_.reset();
    keeper_.reset();
    auto keeper = FileKeeper::Open(volume_.path());
    ASSERT_TRUE(keeper.ok()) << keeper.status();
    keeper_ = *std::move(keeper);
    StoreOptions options = SmallOptions();
    options.keeper = keeper_.get();
    CacheSpec spec = SmallSpec();
    spec.capacity_bytes = size_t{40} << 20;
    world_ = std::make_unique<SharingStore>(spec, options);
  }
  void ExpectStored(uint64_t id, const Content& content) {
    testing::ExpectContent(*world_->store, id, world_->group, content);
  }

  // Makes sequences, of which only records are stored, until one is refused.
  void MakeEmptySequences() {
    absl::Status status;
    while (status.ok()) {
      status =
          world_->store->CreateSequence(testing::kTenant, world_->cache_id, {.session = "session"})
              .status();
    }
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  }
  SmallVolume volume_{size_t{48} << 20};
  std::unique_ptr<FileKeeper> keeper_;
  std::unique_ptr<SharingStore> world_;
};

TEST_F(FullVolume, RefusesRowsAndRecordsAndLosesNothing) {
  std::vector<std::pair<uint64_t, Content>> stored;
  const auto fill = [&](uint32_t times) {
    for (uint32_t i = 0; i < times; ++i) {
      const auto made =
          world_->store->CreateSequence(testing::kTenant, world_->cache_id, {.session = "session"});
      if (!made.ok()) return made.status();
      Content content = NumberedContent(static_cast<uint8_t>(i), 40);
      const auto count =
          AppendContent(*world_->store, made->sequence_id, world_->group, 0, content);
      if (!count.ok()) content.clear();
      stored.emplace_back(made->sequence_id, std::move(content));
      if (!count.ok()) return count.status();
    }
    return absl::OkStatus();
  };
  EXPECT_TRUE(fill(20).ok());
  volume_.FillUp(size_t{1} << 20);
  const absl::Status full = fill(4000);
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted) << full;
  EXPECT_EQ(ShortageOf(full), Shortage::kMemory) << full;
  for (int i = 0; i < 3; ++i) {  // also the recovery of a full volume
    for (const auto& [id, content] : stored) ExpectStored(id, content);
    EXPECT_EQ(fill(4000).code(), StatusCode::kResourceExhausted);
    MakeEmptySequences();
    Restart();
  }
  const size_t before = stored.size();
  ASSERT_TRUE(volume_.FreeUp());
  EXPECT_EQ(fill(4000).code(), StatusCode::kResourceExhausted) << "the pool is full";
  EXPECT_GT(stored.size(), before + 1);
  Restart();
  for (const auto& [id, content] : stored) ExpectStored(id, content);
}

}  // namespace
}  // namespace pqcached::kvstore
