// Attention over ranges of a stored sequence, and selections of all candidates, against loops in
// double precision.
#include <numeric>
#include <string>

#include "kvstore/read/range_ops.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::AttendExactly;
using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::Partial;
using testing::Pq;
using testing::RandomFloats;
using testing::SmallSpec;
using testing::TestSequence;

double OutputTolerance(kernels::DType dtype) {
  return dtype == kernels::DType::kBf16 ? 2e-2 : 1e-4;
}
double LseTolerance(kernels::DType dtype) { return dtype == kernels::DType::kBf16 ? 2e-3 : 1e-4; }

std::vector<uint32_t> Positions(uint64_t begin, uint64_t end) {
  std::vector<uint32_t> positions(begin < end ? end - begin : 0);
  std::iota(positions.begin(), positions.end(), static_cast<uint32_t>(begin));
  return positions;
}

// Each query token attends to the positions of `rows` up to its own.
void ExpectCausal(const LayerModel& model, const Floats& queries, uint64_t query_position,
                  TokenRange rows, const Attention& attention) {
  const uint32_t heads = model.group.query_heads, dim = model.group.value_dim;
  const size_t tokens = attention.lse.size() / heads;
  ASSERT_EQ(attention.output.size(), tokens * heads * dim);
  for (size_t token = 0; token < tokens; ++token) {
    const std::vector<uint32_t> seen =
        Positions(rows.begin, std::min(rows.end, query_position + token + 1));
    for (uint32_t head = 0; head < heads; ++head) {
      const size_t at = token * heads + head;
      const Partial exact = AttendExactly(model, &queries.data[at * model.group.key_dim],
                                          head / model.group.group_size(), seen);
      if (seen.empty()) {
        ASSERT_EQ(attention.lse[at], -std::numeric_limits<float>::infinity());
      } else {
        ASSERT_NEAR(attention.lse[at], exact.lse, LseTolerance(model.group.dtype)) << at;
      }
      for (uint32_t i = 0; i < dim; ++i) {
        ASSERT_NEAR(attention.output[at * dim + i], exact.output[i],
                    OutputTolerance(model.group.dtype))
            << at << " " << i;
      }
    }
  }
}

Floats QueriesOf(const LayerModel& model, uint64_t tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  return RandomFloats(random, {tokens, model.group.query_heads, model.group.key_dim});
}

class AttendRangeOfStore : public ::testing::TestWithParam<std::tuple<kernels::DType, uint32_t>> {
 protected:
  static CacheSpec Spec() {
    CacheSpec spec = SmallSpec();
    spec.groups[0].layers = {1};
    spec.groups[0].dtype = std::get<0>(GetParam());
    spec.groups[0].query_heads = 2 * std::get<1>(GetParam());
    return spec;
  }
  void ExpectExact(uint64_t query_position, uint64_t tokens, TokenRange rows) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens at " << query_position << " over ["
                                      << rows.begin << ", " << rows.end << ")");
    const LayerModel& model = sequence_.layer(1);
    const Floats queries = QueriesOf(model, tokens, tokens + query_position);
    const auto attention = sequence_.store().AttendRange(
        kTenant, sequence_.id(),
        {.layer = 1, .query_position = query_position, .queries = queries.view()}, rows, {});
    ASSERT_TRUE(attention.ok()) << attention.status();
    EXPECT_EQ(attention->selected.count, rows.end - rows.begin);
    ExpectCausal(model, queries, query_position, rows, *attention);
  }

  TestSequence sequence_{Spec()};
};

INSTANTIATE_TEST_SUITE_P(Shapes, AttendRangeOfStore,
                         ::testing::Combine(::testing::Values(kernels::DType::kF16,
                                                              kernels::DType::kBf16,
                                                              kernels::DType::kF32),
                                            ::testing::Values(1u, 3u, 8u)));

TEST_P(AttendRangeOfStore, EqualsCausalAttentionInDoublePrecision) {
  sequence_.Ingest(400);  // over several segments, without an index
  for (const uint64_t tokens : {1u, 2u, 9u, 31u, 33u, 100u}) {
    ExpectExact(400, tokens, {0, 400});            // a chunk behind its prefix
    ExpectExact(400 - tokens, tokens, {0, 400});   // a chunk that is stored
    ExpectExact(400 - tokens, tokens, {37, 391});  // a part of both
    ExpectExact(10, tokens, {127, 129});           // around a segment's end, partly not seen
    ExpectExact(0, tokens, {0, 1});
    ExpectExact(200, tokens, {64, 64});  // an empty range
  }
}

TEST_P(AttendRangeOfStore, LongQueriesTakeManyTiles) {
  sequence_.Ingest(700);
  ExpectExact(0, 700, {0, 700});
}

// Few tasks: the rows are split between threads, and the pieces merged.
TEST_P(AttendRangeOfStore, LongRangesAreSplitBetweenThreads) {
  sequence_.Ingest(5000);
  ExpectExact(5000, 1, {0, 5000});
  ExpectExact(4990, 7, {3, 4997});
}

// Runs tasks in order on the caller's thread, as many workers.
ParallelFor ManyWorkers(uint32_t count) {
  return {.worker_count = count,
          .run = [count](uint32_t task_count, const ParallelFor::Body& body) {
            for (uint32_t task = 0; task < task_count; ++task) body(task, task % count);
          }};
}

TEST(AttendRangeLayer, AnyNumberOfWorkersAndRangesGivesTheSame) {
  constexpr uint32_t kRows = 9000, kDim = 32, kTokens = 5, kHeads = 2;
  std::mt19937_64 random(3);
  const Floats rows = RandomFloats(random, {2, kRows, 2 * kDim});
  const Floats queries = RandomFloats(random, {kTokens, kHeads, kDim});
  const std::byte* heads[] = {reinterpret_cast<const std::byte*>(rows.data.data()),
                              reinterpret_cast<const std::byte*>(&rows.data[kRows * 2 * kDim])};
  const SegmentView segment{.first_position = 0, .token_count = kRows, .rows = heads};
  const LayerView view{.shape = {.dtype = kernels::DType::kF32,
                                 .key_dim = kDim,
                                 .value_dim = kDim,
                                 .kv_heads = 2,
                                 .query_heads = kHeads,
                                 .row_bytes = 2 * kDim * sizeof(float),
                                 .scale = 0.2f},
                       .segments = {&segment, 1}};
  constexpr ptrdiff_t kFloat = sizeof(float);
  const LayerQuery query{.query_position = 8000,
                         .query_length = kTokens,
                         .data = reinterpret_cast<const std::byte*>(queries.data.data()),
                         .strides_bytes = {kHeads * kDim * kFloat, kDim * kFloat, kFloat}};
  const PositionRange all[] = {{5, 4000}, {4100, 4101}, {5000, 8003}};
  std::vector<float> expected;
  for (const uint32_t workers : {1u, 2u, 3u, 16u, 100u}) {
    std::vector<float> output(kTokens * kHeads * kDim), lse(kTokens * kHeads);
    ReadScratch scratch;
    EXPECT_EQ(
        AttendRangeLayer({}, view,
                         {.query = query,
                          .rows = all,
                          .out = AttentionOut::Packed(output.data(), lse.data(), kHeads, kDim)},
                         ManyWorkers(workers), scratch),
        kNoQueryHead);
    output.insert(output.end(), lse.begin(), lse.end());
    if (expected.empty()) expected = output;
    for (size_t i = 0; i < output.size(); ++i) {
      ASSERT_NEAR(output[i], expected[i], 2e-5) << workers << " workers, " << i;
    }
  }
}

TEST(AttendRangeOfStoreErrors, NameTheFieldAndTheLimit) {
  TestSequence sequence;
  sequence.Ingest(100);
  const LayerModel& model = sequence.layer(1);
  const auto attend = [&](uint64_t tokens, uint64_t position, TokenRange rows,
                          const std::function<bool()>& is_cancelled = {}) {
    const Floats queries = QueriesOf(model, tokens, 1);
    return sequence.store()
        .AttendRange(kTenant, sequence.id(),
                     {.layer = 1, .query_position = position, .queries = queries.view()}, rows,
                     is_cancelled)
        .status();
  };
  EXPECT_EQ(attend(1, 99, {0, 101}).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(attend(1, 99, {7, 6}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(attend(kMaxRangeQueryLength + 1, 0, {0, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(attend(2, kMaxSequenceTokens - 1, {0, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(attend(1, 99, {0, 100}, [] { return true; }).code(), absl::StatusCode::kCancelled);
  Floats queries = QueriesOf(model, 70, 1);
  queries.data[(65 * model.group.query_heads + 1) * model.group.key_dim] = INFINITY;
  const auto bad = sequence.store().AttendRange(
      kTenant, sequence.id(), {.layer = 1, .query_position = 99, .queries = queries.view()},
      {0, 100}, {});
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(bad.status().message().find("query head 1"), std::string::npos) << bad.status();
}

// A selection of all candidates is computed by ranges: with masked ranges, speculation, and
// positions on request.
TEST(SelectionOfAllCandidates, IsExactAttentionOverThem) {
  TestSequence sequence;
  sequence.Ingest(400);
  sequence.Build(Pq(2, 4));
  const LayerModel& model = sequence.layer(1);
  const Floats queries = QueriesOf(model, 3, 5);
  std::vector<uint32_t> candidates;
  for (const uint32_t position : Positions(16, 380)) {
    if ((position < 40 || position >= 90) && position != 200) candidates.push_back(position);
  }
  for (const bool want_positions : {false, true}) {
    for (const uint64_t retrieved : {uint64_t{0}, uint64_t{1000}}) {
      Selection selection{.index = Pq(2, 4),
                          .sink_tokens = 16,
                          .window_tokens = 20,
                          .excluded = {{40, 90}, {200, 201}},
                          .budget_ratio = 1.0};
      if (retrieved > 0) {
        selection.budget_kind = BudgetKind::kRetrieved;
        selection.budget_count = retrieved;
      }
      const Query query{.layer = 1, .query_position = 399, .queries = queries.view()};
      const auto attention =
          sequence.store().Attend(kTenant, sequence.id(), query, selection, want_positions);
      ASSERT_TRUE(attention.ok()) << attention.status();
      ASSERT_EQ(attention->selected.count, candidates.size());
      EXPECT_EQ(attention->selected.positions.size(), want_positions ? 2 * candidates.size() : 0);
      const auto given = sequence.store().TopK(kTenant, sequence.id(), query, selection);
      ASSERT_TRUE(given.ok()) << given.status();
      for (size_t i = 0; i < 2 * candidates.size(); ++i) {
        ASSERT_EQ(given->positions[i], candidates[i % candidates.size()]);
        if (want_positions) {
          ASSERT_EQ(attention->selected.positions[i], given->positions[i]);
        }
      }
      const uint32_t heads = model.group.query_heads;
      for (size_t at = 0; at < 3 * heads; ++at) {
        const uint32_t kv_head = static_cast<uint32_t>(at % heads) / model.group.group_size();
        const Partial exact =
            AttendExactly(model, &queries.data[at * model.group.key_dim], kv_head, candidates);
        ASSERT_NEAR(attention->lse[at], exact.lse, 1e-4);
        ASSERT_NEAR(attention->output[at * model.group.value_dim], exact.output[0], 1e-4);
      }
    }
  }
}

TEST(SelectionOfAllCandidates, RetrievedTokensAreThoseOfTheSameCount) {
  TestSequence sequence;
  sequence.Ingest(400);
  sequence.Build(Pq(2, 4));
  const LayerModel& model = sequence.layer(1);
  const Floats queries = QueriesOf(model, 1, 5);
  const Query query{.layer = 1, .query_position = 399, .queries = queries.view()};
  Selection selection{.index = Pq(2, 4),
                      .sink_tokens = 16,
                      .window_tokens = 20,
                      .budget_kind = BudgetKind::kCount,
                      .budget_count = 16 + 20 + 33};
  const auto counted = sequence.store().TopK(kTenant, sequence.id(), query, selection);
  selection.budget_kind = BudgetKind::kRetrieved;
  selection.budget_count = 33;
  const auto retrieved = sequence.store().TopK(kTenant, sequence.id(), query, selection);
  ASSERT_TRUE(counted.ok() && retrieved.ok()) << counted.status() << retrieved.status();
  EXPECT_EQ(retrieved->count, 33u);
  EXPECT_EQ(retrieved->positions, counted->positions);
  selection.budget_count = 0;
  EXPECT_EQ(sequence.store().TopK(kTenant, sequence.id(), query, selection).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace pqcached::kvstore
