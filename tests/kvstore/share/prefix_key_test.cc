// Keys of prefixes, and what a group of query heads may ask at once.
#include <functional>
#include <random>

#include "kvstore/sequence/prefix.h"
#include "tests/kvstore/content.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::AppendContent;
using testing::Content;
using testing::Floats;
using testing::kTenant;
using testing::RandomFloats;
using testing::SharingStore;
using testing::SmallSpec;

TEST(PrefixKeys, DependOnAllThatMakesRowsDiffer) {
  const CacheSpec spec = SmallSpec();
  const PrefixKey root = PrefixRoot("tenant", spec, "key");
  EXPECT_EQ(PrefixRoot("tenant", spec, "key"), root);
  EXPECT_NE(PrefixRoot("tenantk", spec, "ey"), root);  // fields do not run into each other
  EXPECT_NE(PrefixRoot("other", spec, "key"), root);
  const auto changed = [&](const std::function<void(CacheSpec&)>& change) {
    CacheSpec other = spec;
    change(other);
    return PrefixRoot("tenant", other, "key") != root;
  };
  EXPECT_TRUE(changed([](CacheSpec& s) { s.model_fingerprint += "x"; }));
  EXPECT_TRUE(changed([](CacheSpec& s) { s.groups[0].dtype = kernels::DType::kBf16; }));
  EXPECT_TRUE(changed([](CacheSpec& s) { s.groups[0].layers = {1, 2}; }));
  EXPECT_TRUE(changed([](CacheSpec& s) { s.groups[0].kv_heads = 4; }));
  EXPECT_TRUE(changed([](CacheSpec& s) { s.groups[0].key_dim = 40; }));
  EXPECT_TRUE(changed([](CacheSpec& s) { s.groups[0].value_dim = 32; }));
  EXPECT_TRUE(changed([](CacheSpec& s) { s.groups[0].rope.theta = 1; }));
  EXPECT_TRUE(changed([](CacheSpec& s) { s.rank.kv_head_begin = 2; }));
  EXPECT_FALSE(changed([](CacheSpec& s) { s.capacity_bytes *= 2; }));
  std::vector<uint32_t> ids(kPrefixStepTokens, 1);
  const PrefixKey one = NextPrefixKey(root, ids);
  ids.back() = 2;
  EXPECT_NE(NextPrefixKey(root, ids), one);
  EXPECT_NE(NextPrefixKey(one, ids), NextPrefixKey(root, ids));
}

TEST(QueryLength, IsLimitedByTheQueriesPerKvHead) {
  CacheSpec spec = SmallSpec();
  spec.groups[0].query_heads = 32;  // 16 per kv head
  SharingStore shared(spec);
  std::mt19937_64 random(3);
  const uint64_t id = shared.Create().sequence_id;
  ASSERT_TRUE(AppendContent(*shared.store, id, shared.group, 0, Content(100, 4)).ok());
  const auto attend = [&](uint32_t length) {
    const Floats queries = RandomFloats(random, {length, 32, 32});
    return shared.store
        ->Attend(kTenant, id, {.layer = 1, .query_position = 99, .queries = queries.view()}, {},
                 false)
        .status();
  };
  EXPECT_TRUE(attend(4).ok());
  const absl::Status status = attend(5);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(status), "query.queries.shape");
}

}  // namespace
}  // namespace pqcached::kvstore
