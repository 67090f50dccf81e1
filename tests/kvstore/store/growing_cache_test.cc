// Caches without a capacity grow within the limits of their tenant, and become smaller again.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvstore/memory/pool.h"
#include "tests/kvstore/content.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::Content;
using testing::ExpectContent;
using testing::IngestContent;
using testing::kTenant;
using testing::MemoryKeeper;
using testing::NumberedContent;
using testing::SmallOptions;
using testing::SmallSpec;

constexpr size_t kMiB = size_t{1} << 20;
constexpr uint32_t kTokensPer4MiB = 128;  // 2 layers of 8 kv heads with 512 floats

// A spec with large rows. Capacity 0: it grows.
CacheSpec SpecOf(const std::string& name, size_t capacity_bytes = 0) {
  CacheSpec spec = SmallSpec(name);
  spec.groups[0].kv_heads = 8;
  spec.groups[0].query_heads = 8;
  spec.groups[0].key_dim = 256;
  spec.groups[0].value_dim = 256;
  spec.capacity_bytes = capacity_bytes;
  spec.default_index = {};
  return spec;
}

StoreOptions Options(size_t max_pool_bytes) {
  StoreOptions options = SmallOptions();
  options.segment_tokens = kTokensPer4MiB;
  options.retain = true;
  options.max_pool_bytes = max_pool_bytes;
  return options;
}

// Names of as many tokens as take this many bytes.
std::vector<uint32_t> Prompt(uint32_t number, size_t bytes) {
  std::vector<uint32_t> names(bytes / (4 * kMiB) * kTokensPer4MiB);
  for (uint32_t i = 0; i < names.size(); ++i) names[i] = number * 100000 + i;
  return names;
}

class GrowingCache : public ::testing::Test {
 protected:
  void Start(const StoreOptions& options) {
    store_.reset();
    auto store = Store::Create(options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  absl::StatusOr<uint64_t> Open(const CacheSpec& spec, const std::string& tenant = kTenant) {
    const auto opened = store_->OpenCache(tenant, spec);
    if (!opened.ok()) return opened.status();
    return opened->cache_id;
  }
  // Stores about this many bytes in a new sequence of the cache, with the names of `prompt`.
  absl::Status Fill(uint64_t cache_id, size_t bytes, const std::string& tenant = kTenant,
                    std::vector<uint32_t> prompt = {}) {
    const auto created = store_->CreateSequence(
        tenant, cache_id, {.session = "session", .token_ids = std::move(prompt)});
    if (!created.ok()) return created.status();
    sequence_id_ = created->sequence_id;
    auto ingest = store_->BeginIngest(tenant, sequence_id_);
    if (!ingest.ok()) return ingest.status();
    const auto pieces = static_cast<uint32_t>(bytes / (4 * kMiB));
    const Content content = NumberedContent(1, pieces * kTokensPer4MiB);
    const testing::ContentRows rows(content, SpecOf("").groups[0]);
    for (const LayerRows& layer : rows.layers) {
      if (auto status = (*ingest)->Write(0, layer); !status.ok()) return status;
    }
    return (*ingest)->Commit().status();
  }
  // Stores a sequence with these names, ends it, and returns how many of its tokens stay.
  uint64_t Retain(uint64_t cache_id, const std::vector<uint32_t>& prompt) {
    EXPECT_TRUE(Fill(cache_id, prompt.size() / kTokensPer4MiB * 4 * kMiB, kTenant, prompt).ok());
    store_->DropSession("session");
    return Match(cache_id, prompt);
  }
  uint64_t Match(uint64_t cache_id, const std::vector<uint32_t>& prompt) {
    return store_->MatchPrefix(kTenant, cache_id, prompt, {}).value_or(UINT64_MAX);
  }
  CacheInfo Info(const std::string& name) const {
    for (const CacheInfo& info : store_->ListCaches(kAllTenants)) {
      if (info.spec.name == name) return info;
    }
    ADD_FAILURE() << "no cache " << name;
    return {};
  }
  // The second call returns what is unused since the first.
  void ReturnUnused() {
    for (int i = 0; i < 3; ++i) store_->ApplyMemoryLimits();
  }

  std::unique_ptr<Store> store_;
  uint64_t sequence_id_ = 0;
};

TEST_F(GrowingCache, GrowsInStepsAndShrinksWhenItsRowsAreDropped) {
  Start(Options(160 * kMiB));
  const auto id = Open(SpecOf("grows"));
  ASSERT_TRUE(id.ok()) << id.status();
  EXPECT_EQ(Info("grows").capacity_bytes, kGrantBytes);
  EXPECT_TRUE(Info("grows").spec.grows);
  ASSERT_TRUE(Fill(*id, 80 * kMiB).ok());
  EXPECT_EQ(Info("grows").capacity_bytes, 2 * kGrantBytes);
  EXPECT_EQ(Info("grows").free_bytes + Info("grows").used_bytes, 2 * kGrantBytes);
  ASSERT_TRUE(Fill(*id, 60 * kMiB).ok());
  EXPECT_EQ(Info("grows").capacity_bytes, 160 * kMiB) << "the last step is what is left";
  const absl::Status refused = Fill(*id, 40 * kMiB);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("pool of 167772160 bytes"));
  EXPECT_EQ(store_->DropSession("session"), 3u);
  ReturnUnused();
  EXPECT_EQ(Info("grows").capacity_bytes, 0u);
  ASSERT_TRUE(Fill(*id, 40 * kMiB).ok());
  EXPECT_EQ(Info("grows").capacity_bytes, kGrantBytes);
}

TEST_F(GrowingCache, UnusedBytesServeOtherCachesOfTheTenant) {
  StoreOptions options = Options(512 * kMiB);
  options.tenant_quotas.by_tenant[kTenant] = {.guaranteed_bytes = 0, .max_bytes = 128 * kMiB};
  Start(options);
  const auto grows = Open(SpecOf("grows"));
  ASSERT_TRUE(grows.ok()) << grows.status();
  ASSERT_TRUE(Fill(*grows, 80 * kMiB).ok());
  const auto refused = Open(SpecOf("other", 64 * kMiB));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr("quota of tenant"));
  ASSERT_TRUE(store_->DropSequence(kTenant, sequence_id_).ok());
  ReturnUnused();
  ASSERT_TRUE(Open(SpecOf("other", 64 * kMiB)).ok());
  EXPECT_TRUE(Fill(*grows, 60 * kMiB).ok());
  const absl::Status full = Fill(*grows, 8 * kMiB);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), ::testing::HasSubstr("quota of tenant"));
  EXPECT_TRUE(Open(SpecOf("grows", 32 * kMiB)).ok()) << "an open cache is joined";
}

TEST_F(GrowingCache, LeavesWhatOtherTenantsAreGuaranteed) {
  StoreOptions options = Options(128 * kMiB);
  options.tenant_quotas.by_tenant["sure"] = {.guaranteed_bytes = 64 * kMiB};
  Start(options);
  const auto id = Open(SpecOf("grows"));
  ASSERT_TRUE(id.ok()) << id.status();
  const absl::Status refused = Fill(*id, 80 * kMiB);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("guaranteed"));
  const auto sure = Open(SpecOf("sure"), "sure");
  ASSERT_TRUE(sure.ok()) << sure.status();
  EXPECT_TRUE(Fill(*sure, 60 * kMiB, "sure").ok());
}

TEST_F(GrowingCache, ItsLastStepIsWhatOtherCachesLeave) {
  Start(Options(256 * kMiB));
  ASSERT_TRUE(Open(SpecOf("other", 100 * kMiB)).ok());
  const auto id = Open(SpecOf("grows"));
  ASSERT_TRUE(id.ok()) << id.status();
  ASSERT_TRUE(Fill(*id, 132 * kMiB).ok());
  EXPECT_EQ(Info("grows").capacity_bytes, 156 * kMiB);
}

TEST_F(GrowingCache, NothingIsLeftForAnotherOne) {
  Start(Options(64 * kMiB));
  ASSERT_TRUE(Open(SpecOf("all", 64 * kMiB)).ok());
  const auto refused = Open(SpecOf("grows"));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr("capacity_bytes"));
}

TEST_F(GrowingCache, AdmissionCountsWhatItMayGrowBy) {
  Start(Options(160 * kMiB));
  const auto id = Open(SpecOf("grows"));
  ASSERT_TRUE(id.ok()) << id.status();
  const auto admit = [&](size_t bytes) {
    return *store_->Admit(kTenant, *id, {.prefill_tokens = bytes / (4 * kMiB) * kTokensPer4MiB});
  };
  EXPECT_EQ(admit(120 * kMiB).verdict, Verdict::kFitsNow);
  EXPECT_EQ(admit(164 * kMiB).verdict, Verdict::kExceedsCapacity);
  EXPECT_EQ(admit(164 * kMiB).limit_bytes, 160 * kMiB);
  ASSERT_TRUE(Open(SpecOf("other", 64 * kMiB)).ok());
  EXPECT_EQ(admit(120 * kMiB).verdict, Verdict::kRetryable);
  EXPECT_EQ(admit(120 * kMiB).shortfall_bytes, 24 * kMiB);
  EXPECT_EQ(admit(96 * kMiB).verdict, Verdict::kFitsNow);
}

TEST_F(GrowingCache, CachedPrefixesHaveTheirShareOfAllThatItMayHave) {
  Start(Options(160 * kMiB));
  const auto id = Open(SpecOf("grows"));
  ASSERT_TRUE(id.ok()) << id.status();
  const std::vector<uint32_t> first = Prompt(1, 60 * kMiB);
  EXPECT_EQ(Retain(*id, first), first.size()) << "60 of 160 MiB; 64 are granted";
  const std::vector<uint32_t> second = Prompt(2, 80 * kMiB);
  EXPECT_EQ(Retain(*id, second), second.size());
  EXPECT_LT(Match(*id, first), first.size()) << "128 MiB are the share of 0.8";
}

TEST_F(GrowingCache, CachedPrefixesGiveWayToOtherCachesOfTheTenant) {
  StoreOptions options = Options(320 * kMiB);
  options.tenant_quotas.by_tenant[kTenant] = {.max_bytes = 160 * kMiB};
  Start(options);
  const auto id = Open(SpecOf("grows"));
  ASSERT_TRUE(id.ok()) << id.status();
  const std::vector<uint32_t> prompt = Prompt(1, 100 * kMiB);
  ASSERT_EQ(Retain(*id, prompt), prompt.size());
  const auto other = Open(SpecOf("other"));
  ASSERT_TRUE(other.ok()) << other.status();
  const absl::Status filled = Fill(*other, 140 * kMiB);
  EXPECT_TRUE(filled.ok()) << filled;
  EXPECT_LT(Match(*id, prompt), prompt.size());
  EXPECT_GT(Match(*id, prompt), 0u) << "no more than is needed";
  EXPECT_FALSE(Fill(*other, 40 * kMiB).ok()) << "the quota holds";
}

TEST_F(GrowingCache, CachedPrefixesStayWhenTheyAreTooFew) {
  StoreOptions options = Options(320 * kMiB);
  options.tenant_quotas.by_tenant[kTenant] = {.max_bytes = 160 * kMiB};
  Start(options);
  const auto id = Open(SpecOf("grows"));
  ASSERT_TRUE(id.ok()) << id.status();
  const std::vector<uint32_t> prompt = Prompt(1, 60 * kMiB);
  ASSERT_EQ(Retain(*id, prompt), prompt.size());
  ASSERT_TRUE(Fill(*id, 20 * kMiB).ok());  // stays
  const auto other = Open(SpecOf("other"));
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_FALSE(Fill(*other, 152 * kMiB).ok());
  EXPECT_EQ(Match(*id, prompt), prompt.size());
  EXPECT_TRUE(Fill(*other, 120 * kMiB).ok()) << "these make room for it";
  EXPECT_LT(Match(*id, prompt), prompt.size());
}

TEST_F(GrowingCache, CachedPrefixesStayWhenAnotherTenantGrows) {
  Start(Options(160 * kMiB));
  const auto id = Open(SpecOf("grows"));
  ASSERT_TRUE(id.ok()) << id.status();
  const std::vector<uint32_t> prompt = Prompt(1, 100 * kMiB);
  ASSERT_EQ(Retain(*id, prompt), prompt.size());
  const auto other = Open(SpecOf("other"), "stranger");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_FALSE(Fill(*other, 80 * kMiB, "stranger").ok());
  EXPECT_EQ(Match(*id, prompt), prompt.size());
}

TEST_F(GrowingCache, TheNextProcessFindsItWithWhatItUses) {
  MemoryKeeper keeper;
  StoreOptions options = Options(160 * kMiB);
  options.keeper = &keeper;
  Start(options);
  CacheSpec spec = SpecOf("grows");
  spec.quota_bytes = 512 * kMiB;  // more than it can ever have
  const auto id = Open(spec);
  ASSERT_TRUE(id.ok()) << id.status();
  ASSERT_TRUE(Fill(*id, 80 * kMiB).ok());
  Start(options);
  EXPECT_EQ(store_->Recovery().dropped_records, 0u);
  EXPECT_TRUE(Info("grows").spec.grows);
  EXPECT_GE(Info("grows").capacity_bytes, 80 * kMiB);
  ExpectContent(*store_, sequence_id_, SpecOf("").groups[0],
                NumberedContent(1, 20 * kTokensPer4MiB));
  EXPECT_EQ(Open(SpecOf("other", 84 * kMiB)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Open(SpecOf("other", 64 * kMiB)).ok());
}

}  // namespace
}  // namespace pqcached::kvstore
