// Ranks: parts of one model, each with a cache of its own under one name.

#include <functional>

#include "tests/kvstore/content.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::Content;
using testing::ContentOf;
using testing::ExpectContent;
using testing::IngestContent;
using testing::kTenant;
using testing::Pq;
using testing::RandomIds;
using testing::SmallOptions;
using testing::SmallSpec;

class Ranks : public ::testing::Test {
 protected:
  static CacheSpec Spec(uint32_t rank) {
    CacheSpec spec = SmallSpec("model");
    spec.capacity_bytes = size_t{8} << 20;
    spec.rank = {.group = "group", .rank = rank, .rank_count = 2, .kv_head_begin = 2 * rank};
    return spec;
  }
  absl::StatusOr<CacheInfo> Open(const CacheSpec& spec) { return store_->OpenCache(kTenant, spec); }
  void ExpectRefused(const CacheSpec& spec, StatusCode code, const std::string& field) {
    const std::string before = testing::Dump(*store_);
    const absl::Status status = Open(spec).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldOf(status), field) << status;
    EXPECT_EQ(testing::Dump(*store_), before);
  }

  std::unique_ptr<Store> store_ = *Store::Create(SmallOptions());
};

TEST_F(Ranks, EachHasAPoolOfItsOwnUnderOneName) {
  const auto one = Open(Spec(0));
  const auto two = Open(Spec(1));
  ASSERT_TRUE(one.ok() && two.ok()) << one.status() << two.status();
  EXPECT_NE(one->cache_id, two->cache_id);
  EXPECT_EQ(Open(Spec(0))->cache_id, one->cache_id);
  EXPECT_EQ(Open(Spec(1))->cache_id, two->cache_id);
}

TEST_F(Ranks, APrefixIsWhatAllOfThemHold) {
  std::mt19937_64 random(8);
  const std::vector<uint32_t> ids = RandomIds(random, 512);
  const Content content = ContentOf(ids);
  const auto one = Open(Spec(0));
  ASSERT_TRUE(one.ok());
  const auto store_tokens = [&](uint64_t cache_id, size_t tokens) {
    const auto created =
        store_->CreateSequence(kTenant, cache_id, {.session = "s", .token_ids = ids});
    ASSERT_TRUE(created.ok()) << created.status();
    ASSERT_TRUE(IngestContent(*store_, created->sequence_id, SmallSpec().groups[0],
                              created->token_count,
                              std::span(content).subspan(created->token_count, tokens))
                    .ok());
  };
  store_tokens(one->cache_id, 512);
  EXPECT_EQ(*store_->MatchPrefix(kTenant, one->cache_id, ids, ""), 0u);  // a rank is missing
  const auto two = Open(Spec(1));
  ASSERT_TRUE(two.ok());
  EXPECT_EQ(*store_->MatchPrefix(kTenant, one->cache_id, ids, ""), 0u);
  store_tokens(two->cache_id, 300);
  EXPECT_EQ(*store_->MatchPrefix(kTenant, one->cache_id, ids, ""), 256u);
  EXPECT_EQ(*store_->MatchPrefix(kTenant, two->cache_id, ids, ""), 256u);
  for (const uint64_t cache_id : {one->cache_id, two->cache_id}) {
    const auto created =
        store_->CreateSequence(kTenant, cache_id, {.session = "s", .token_ids = ids});
    ASSERT_TRUE(created.ok());
    EXPECT_EQ(created->token_count, 256u);
    ExpectContent(*store_, created->sequence_id, SmallSpec().groups[0],
                  std::span(content).first(256));
  }
}

TEST_F(Ranks, ThatDoNotGoTogetherAreRefusedByTheField) {
  ASSERT_TRUE(Open(Spec(0)).ok());
  const auto refused = [&](const std::function<void(CacheSpec&)>& change, StatusCode code,
                           const std::string& field) {
    CacheSpec spec = Spec(1);
    change(spec);
    ExpectRefused(spec, code, field);
  };
  const auto other = StatusCode::kFailedPrecondition;
  const auto bad = StatusCode::kInvalidArgument;
  refused([](CacheSpec& s) { s.model_fingerprint += "x"; }, other, "model_fingerprint");
  refused([](CacheSpec& s) { s.rank.rank_count = 3; }, other, "rank.rank_count");
  refused([](CacheSpec& s) { s.rank.group += "x"; }, other, "rank.group");
  refused([](CacheSpec& s) { s.rank = {}; }, other, "rank.group");
  refused([](CacheSpec& s) { s.groups[0].key_dim = 64; }, other, "layer_groups[0].key_dim");
  refused([](CacheSpec& s) { s.groups[0].value_dim = 64; }, other, "layer_groups[0].value_dim");
  refused([](CacheSpec& s) { s.groups[0].dtype = kernels::DType::kF16; }, other,
          "layer_groups[0].dtype");
  refused([](CacheSpec& s) { s.groups[0].query_heads = 8; }, other, "layer_groups[0].query_heads");
  refused([](CacheSpec& s) { s.groups[0].softcap = 2; }, other, "layer_groups[0].softcap");
  refused([](CacheSpec& s) { s.groups[0].softmax_scale = 2; }, other,
          "layer_groups[0].softmax_scale");
  refused([](CacheSpec& s) { s.groups[0].rope.theta = 2; }, other, "layer_groups[0].rope");
  refused([](CacheSpec& s) { s.groups[0].kind = LayerKind::kFull; }, other, "layer_groups[0].kind");
  refused([](CacheSpec& s) { s.rank.kv_head_begin = 1; }, other, "rank.kv_head_begin");
  refused([](CacheSpec& s) { s.rank.rank = 2; }, bad, "rank.rank");
  refused([](CacheSpec& s) { s.rank.rank_count = 0; }, bad, "rank.rank_count");
  refused([](CacheSpec& s) { s.rank.rank_count = 1025; }, bad, "rank.rank_count");
  refused([](CacheSpec& s) { s.rank.kv_head_begin = 255; }, bad, "rank.kv_head_begin");
  refused([](CacheSpec& s) { s.rank.kv_head_begin = ~0u; }, bad, "rank.kv_head_begin");
  refused([](CacheSpec& s) { s.rank.layer_begin = 2; }, bad, "rank.layer_begin");
  refused([](CacheSpec& s) { s.rank.group.assign(129, 'x'); }, bad, "rank.group");
  refused([](CacheSpec& s) { s.rank.group.clear(); }, bad, "rank.group");
  CacheSpec moved = Spec(0);
  moved.rank.kv_head_begin = 4;
  ExpectRefused(moved, other, "rank.kv_head_begin");
  CacheSpec later_layers = Spec(1);  // a pipeline: other layers, the same heads
  later_layers.groups[0].layers = {5, 7};
  later_layers.rank.kv_head_begin = 0;
  later_layers.rank.layer_begin = 5;
  EXPECT_TRUE(Open(later_layers).ok());
}

}  // namespace
}  // namespace pqcached::kvstore
