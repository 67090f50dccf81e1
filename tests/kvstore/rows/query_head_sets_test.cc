// Sets of tokens for each query head, in place of one for each kv head.
#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::AttendExactly;
using testing::Floats;
using ::testing::HasSubstr;
using testing::kTenant;
using testing::LayerModel;
using testing::Partial;
using testing::Pq;
using testing::TestSequence;

constexpr uint32_t kTokens = 800;

Selection PerQueryHead(const IndexDescriptor& index, float rerank_factor = 1) {
  return {.index = index,
          .per_query_head = true,
          .sink_tokens = 4,
          .window_tokens = 32,
          .rerank_factor = rerank_factor,
          .budget_ratio = 0.15};
}

Query QueryOf(const LayerModel& model, const Floats& queries) {
  return {.layer = model.group.layers.front(),
          .query_position = kTokens - 1,
          .queries = queries.view()};
}

// Returns the set of one query head, as that of a group whose heads all have its query.
std::vector<uint32_t> SetOf(TestSequence& sequence, const LayerModel& model, const Floats& queries,
                            uint32_t head, Selection selection) {
  Floats equal = queries;
  const uint32_t dim = model.group.key_dim;
  for (uint32_t other = 0; other < model.group.query_heads; ++other) {
    std::copy_n(&queries.data[head * dim], dim, &equal.data[other * dim]);
  }
  selection.per_query_head = false;
  selection.group_rule = GroupRule::kMaxLogit;
  const auto selected =
      sequence.store().TopK(kTenant, sequence.id(), QueryOf(model, equal), selection);
  EXPECT_TRUE(selected.ok()) << selected.status();
  if (!selected.ok()) return {};
  const auto begin =
      selected->positions.begin() + head / model.group.group_size() * selected->count;
  return {begin, begin + selected->count};
}

class QueryHeadSets : public ::testing::Test {
 protected:
  QueryHeadSets() {
    sequence_.Ingest(600);
    for (const IndexDescriptor& index : {Pq(2, 6), Pq(4, 8)}) sequence_.Build(index, 3, 16);
    sequence_.Append(kTokens - 600);
  }

  TestSequence sequence_;
  const LayerModel& model_ = sequence_.layer(3);
};

TEST_F(QueryHeadSets, AreThoseOfTheHeadAlone) {
  const uint32_t heads = model_.group.query_heads;
  for (const IndexDescriptor& index : {IndexDescriptor{}, Pq(2, 6), Pq(4, 8)}) {
    for (const float rerank : {1.0f, 2.0f}) {
      const Floats queries = sequence_.RandomQuery(model_);
      const Selection selection = PerQueryHead(index, rerank);
      const auto selected =
          sequence_.store().TopK(kTenant, sequence_.id(), QueryOf(model_, queries), selection);
      ASSERT_TRUE(selected.ok()) << selected.status();
      ASSERT_EQ(selected->kv_heads, heads);
      ASSERT_EQ(selected->positions.size(), size_t{heads} * selected->count);
      std::vector<std::vector<uint32_t>> sets;
      for (uint32_t head = 0; head < heads; ++head) {
        const auto begin = selected->positions.begin() + head * selected->count;
        sets.emplace_back(begin, begin + selected->count);
        EXPECT_EQ(sets.back(), SetOf(sequence_, model_, queries, head, selection)) << head;
      }
      EXPECT_NE(sets[0], sets[1]) << "two heads of one kv head";
    }
  }
}

TEST_F(QueryHeadSets, AreAttendedByTheirHeads) {
  const uint32_t heads = model_.group.query_heads, dim = model_.group.key_dim;
  for (const IndexDescriptor& index : {IndexDescriptor{}, Pq(4, 8)}) {
    const Floats queries = sequence_.RandomQuery(model_);
    const auto attention =
        sequence_.store().Attend(kTenant, sequence_.id(), QueryOf(model_, queries),
                                 PerQueryHead(index, 2), /*want_positions=*/true);
    ASSERT_TRUE(attention.ok()) << attention.status();
    const Selected& selected = attention->selected;
    ASSERT_EQ(selected.kv_heads, heads);
    for (uint32_t head = 0; head < heads; ++head) {
      const std::span<const uint32_t> set =
          std::span(selected.positions).subspan(head * selected.count, selected.count);
      EXPECT_TRUE(
          std::ranges::equal(set, SetOf(sequence_, model_, queries, head, PerQueryHead(index, 2))));
      const Partial expected =
          AttendExactly(model_, &queries.data[head * dim], head / model_.group.group_size(), set);
      EXPECT_NEAR(attention->lse[head], expected.lse, 1e-4);
      for (uint32_t i = 0; i < model_.group.value_dim; ++i) {
        EXPECT_NEAR(attention->output[head * model_.group.value_dim + i], expected.output[i], 1e-4);
      }
    }
  }
}

// The set of a head takes what any of the tokens wants most.
TEST_F(QueryHeadSets, AreSharedByTheTokensOfASpeculation) {
  const uint32_t heads = model_.group.query_heads, dim = model_.group.key_dim;
  Floats queries = sequence_.RandomQuery(model_);
  const Floats one = queries;
  queries.shape[0] = 2;
  queries.data.insert(queries.data.end(), one.data.begin(), one.data.end());
  const auto both = sequence_.store().Attend(kTenant, sequence_.id(), QueryOf(model_, queries),
                                             PerQueryHead(Pq(4, 8)), /*want_positions=*/true);
  ASSERT_TRUE(both.ok()) << both.status();
  ASSERT_EQ(both->selected.kv_heads, heads);
  const uint32_t count = both->selected.count;
  for (uint32_t row = 0; row < 2 * heads; ++row) {
    const uint32_t head = row % heads;
    const std::span<const uint32_t> set =
        std::span(both->selected.positions).subspan(head * count, count);
    const Partial expected =
        AttendExactly(model_, &one.data[head * dim], head / model_.group.group_size(), set);
    EXPECT_NEAR(both->lse[row], expected.lse, 1e-4);
    EXPECT_NEAR(both->output[row * model_.group.value_dim], expected.output[0], 1e-4);
  }
}

TEST_F(QueryHeadSets, OfAllCandidatesAreEqual) {
  Selection all = PerQueryHead(Pq(4, 8));
  all.budget_ratio = 1;
  const Floats queries = sequence_.RandomQuery(model_);
  const auto selected =
      sequence_.store().TopK(kTenant, sequence_.id(), QueryOf(model_, queries), all);
  ASSERT_TRUE(selected.ok()) << selected.status();
  EXPECT_EQ(selected->kv_heads, model_.group.query_heads);
  EXPECT_EQ(selected->positions.size(), size_t{model_.group.query_heads} * (kTokens - 36));
  const auto attention =
      sequence_.store().Attend(kTenant, sequence_.id(), QueryOf(model_, queries), all, true);
  ASSERT_TRUE(attention.ok()) << attention.status();
  EXPECT_EQ(attention->selected.positions, selected->positions);
}

TEST_F(QueryHeadSets, AreNotOfPages) {
  const Floats queries = sequence_.RandomQuery(model_);
  const auto pages = sequence_.store().TopPages(kTenant, sequence_.id(), QueryOf(model_, queries),
                                                PerQueryHead({}), {.page_tokens = 16});
  EXPECT_EQ(pages.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(pages.status().message(), HasSubstr("selection.group_rule"));
}

}  // namespace
}  // namespace pqcached::kvstore
