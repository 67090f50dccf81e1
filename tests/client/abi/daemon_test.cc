// The whole way through the client library and a real pqcached: rows in, index, selection, rows
// out, attention.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"
#include "tests/client/range_case.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::ExpectAttention;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::Range;
using testing::RangeCase;
using testing::SpecOf;

constexpr uint64_t kSink = 5, kWindow = 20;

// Sink and window as the engine attends them, for a context of `tokens`.
std::vector<std::vector<uint32_t>> Own(uint64_t tokens) {
  std::vector<uint32_t> own = Range(0, kSink);
  for (const uint32_t token : Range(tokens - kWindow, tokens)) own.push_back(token);
  return {Layer::kKvHeads, own};
}

std::vector<std::vector<uint32_t>> ByHead(const Selected& selected) {
  std::vector<std::vector<uint32_t>> heads(selected.kv_heads);
  for (uint32_t head = 0; head < selected.kv_heads; ++head) {
    const auto begin = selected.positions.begin() + head * selected.count;
    heads[head].assign(begin, begin + selected.count);
  }
  return heads;
}

void ExpectNear(const Attention& actual, const Attention& expected, float tolerance) {
  ASSERT_EQ(actual.output.size(), expected.output.size());
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    ASSERT_NEAR(actual.lse[i], expected.lse[i], tolerance) << "lse of query head " << i;
  }
  for (size_t i = 0; i < expected.output.size(); ++i) {
    ASSERT_NEAR(actual.output[i], expected.output[i], tolerance) << "output " << i;
  }
}

class DaemonTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  // A sequence of one layer whose first `indexed` tokens were there when the index was built, the
  // others appended.
  Sequence Fill(Cache& cache, const Layer& layer, uint64_t indexed) {
    Sequence sequence = Must(cache.CreateSequence());
    for (uint64_t token = 0; token < indexed; token += 300) {
      const uint64_t end = std::min(indexed, token + 300);
      MustBeOk(sequence.Ingest(0, token, layer.keys(token, end), layer.values(token, end)));
    }
    MustBeOk(sequence.BuildIndex({.iterations = 3, .seed = 1, .sink_tokens = kSink}));
    for (uint64_t token = indexed; token < layer.tokens(); token += 50) {
      Append(sequence, layer, token, std::min(layer.tokens(), token + 50));
    }
    return sequence;
  }

  void Append(Sequence& sequence, const Layer& layer, uint64_t begin, uint64_t end) {
    const LayerRows rows[] = {{0, layer.keys(begin, end), layer.values(begin, end)}};
    const uint64_t tokens = Must(sequence.Append(begin, rows));
    if (tokens != end) throw std::runtime_error("appended to " + std::to_string(tokens));
  }

  static Query QueryAtEnd(const Layer& layer) {
    return {.layer = 0, .query_position = layer.tokens() - 1, .queries = layer.queries()};
  }

  Daemon daemon_;
  Client client_ = daemon_.OpenClient("default", GetParam());
};

TEST_P(DaemonTest, AttendingToEverythingAndMergingIsFullAttention) {
  for (const pqc_dtype dtype : {PQC_F32, PQC_F16, PQC_BF16}) {
    SCOPED_TRACE(dtype);
    // Stored rows are rounded: by 2^-11 (fp16) or 2^-8 (bf16) of keys and values of size 1, over sums
    // of 64.
    const float tolerance = dtype == PQC_F32 ? 1e-4f : dtype == PQC_F16 ? 5e-3f : 5e-2f;
    for (const uint64_t tokens : {uint64_t{kSink + kWindow + 1}, uint64_t{255}, uint64_t{1301}}) {
      SCOPED_TRACE(tokens);
      const Layer layer(tokens, 3);
      CacheSpec spec =
          SpecOf("full" + std::to_string(tokens) + "-" + std::to_string(dtype), {0}, dtype);
      spec.capacity_bytes = 8 << 20;  // many fit beside each other
      Cache cache = Must(client_.OpenCache(spec));
      Sequence sequence = Fill(cache, layer, tokens - tokens / 4);
      Attention attention = Must(sequence.Attend(
          QueryAtEnd(layer), {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0}));
      EXPECT_EQ(attention.selected.count, tokens - kSink - kWindow);
      attention.Merge(layer.Attend(Own(tokens)));
      ExpectNear(attention, layer.Attend({Layer::kKvHeads, Range(0, tokens)}), tolerance);
    }
  }
}

// Remotely, the long query takes several messages.
TEST_P(DaemonTest, RangesAreAttendedExactly) {
  const Layer layer(1300, 3);
  Cache cache = Must(client_.OpenCache(SpecOf("ranges", {0})));
  Sequence sequence = Fill(cache, layer, 1000);
  for (const uint64_t tokens : {uint64_t{1}, uint64_t{3}, uint64_t{40}}) {
    for (const pqc_token_range range :
         {pqc_token_range{0, 1300}, pqc_token_range{100, 1290}, pqc_token_range{1300, 1300}}) {
      const RangeCase one(tokens, 1270, 4);
      const Attention attention = Must(sequence.AttendRange(one.query(), range));
      EXPECT_EQ(attention.selected.count, range.end - range.begin);
      ExpectAttention(attention, one.Expected(layer, range));
    }
  }
  const RangeCase longest(8192, 200, 5);
  const Attention attention = Must(sequence.AttendRange(longest.query(), {150, 300}));
  ExpectAttention(attention, longest.Expected(layer, {150, 300}));
  const Status beyond = sequence.AttendRange(longest.query(), {150, 1301}).status();
  EXPECT_EQ(beyond.code(), PQC_OUT_OF_RANGE);
  EXPECT_EQ(beyond.field(), "tokens");
}

TEST_P(DaemonTest, FlatSelectsTheBestTokensOfAllSegments) {
  const Layer layer(1100, 4);
  Cache cache = Must(client_.OpenCache(SpecOf("flat", {0})));
  Sequence sequence = Fill(cache, layer, 900);
  const Selected selected = Must(sequence.TopK(QueryAtEnd(layer), {.index = Index::Flat(),
                                                                   .sink_tokens = kSink,
                                                                   .window_tokens = kWindow,
                                                                   .token_count = 125}));
  EXPECT_EQ(selected.count, 125 - kSink - kWindow);
  EXPECT_EQ(selected.sink_tokens, kSink);
  EXPECT_EQ(selected.window_tokens, kWindow);
  EXPECT_EQ(ByHead(selected), layer.Best(Range(kSink, 1100 - kWindow), 100));
}

TEST_P(DaemonTest, PqSelectsAscendingPositionsOutsideOfWhatIsExcluded) {
  const Layer layer(1100, 5);
  Cache cache = Must(client_.OpenCache(SpecOf("pq", {0})));
  Sequence sequence = Fill(cache, layer, 900);
  const Selection selection = {.sink_tokens = kSink,
                               .window_tokens = kWindow,
                               .excluded = {{100, 300}, {640, 641}},
                               .ratio = 0.5};
  const Selected selected = Must(sequence.TopK(QueryAtEnd(layer), selection));
  EXPECT_EQ(selected.count, 550 - kSink - kWindow);
  for (const std::vector<uint32_t>& head : ByHead(selected)) {
    for (size_t i = 0; i < head.size(); ++i) {
      ASSERT_TRUE(i == 0 || head[i - 1] < head[i]);
      ASSERT_GE(head[i], kSink);
      ASSERT_LT(head[i], 1100 - kWindow);
      ASSERT_FALSE(head[i] >= 100 && head[i] < 300) << head[i];
      ASSERT_NE(head[i], 640u);
    }
  }
  const Attention attention = Must(sequence.Attend(QueryAtEnd(layer), selection));
  ExpectNear(attention, layer.Attend(ByHead(selected)), 1e-4f);
  const Attention again =
      Must(sequence.Attend(QueryAtEnd(layer), selected.positions, selected.count));
  ExpectNear(again, attention, 1e-6f);
}

TEST_P(DaemonTest, SelectionsLargerThanExpectedAreReadWhole) {
  const Layer layer(9000, 6);
  Cache cache = Must(client_.OpenCache(SpecOf("large", {0}, PQC_F16)));
  Sequence sequence = Must(cache.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0, layer.keys(0, 9000), layer.values(0, 9000)));
  const Selected selected =
      Must(sequence.TopK(QueryAtEnd(layer), {.index = Index::Flat(), .ratio = 1.0}));
  EXPECT_EQ(ByHead(selected), (std::vector<std::vector<uint32_t>>(2, Range(0, 9000))));
}

TEST_P(DaemonTest, ACapacityThatIsTooSmallTellsTheSize) {
  const Layer layer(400, 7);
  Cache cache = Must(client_.OpenCache(SpecOf("small", {0})));
  Sequence sequence = Fill(cache, layer, 400);
  // The wrapper asks again by itself; the C call leaves it to its caller.
  pqc_sequence* handle = sequence.get();
  const Tensor queries = layer.queries();
  pqc_query query = PQC_INIT(pqc_query);
  query.query_position = 399;
  query.queries = queries.c();
  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.ratio = 0.5;
  uint32_t positions[2 * 200];
  pqc_positions out = PQC_INIT(pqc_positions);
  out.positions = positions;
  out.capacity = 2 * 200 - 1;
  EXPECT_EQ(pqc_topk(handle, &query, &selection, &out), PQC_OUT_OF_RANGE);
  EXPECT_EQ(out.count, 200u);
  EXPECT_EQ(out.kv_heads, 2u);
  out.capacity = 2 * 200;
  EXPECT_EQ(pqc_topk(handle, &query, &selection, &out), PQC_OK);
  out = PQC_INIT(pqc_positions);  // the count only
  EXPECT_EQ(pqc_topk(handle, &query, &selection, &out), PQC_OK);
  EXPECT_EQ(out.count, 200u);
}

TEST_P(DaemonTest, RowsComeBackAsTheyWentIn) {
  const Layer layer(700, 8);
  Cache cache = Must(client_.OpenCache(SpecOf("rows", {0})));
  Sequence sequence = Fill(cache, layer, 600);
  std::vector<float> keys(2 * 500 * Layer::kKeyDim), values(2 * 500 * Layer::kValueDim),
      rows(2 * 3 * (Layer::kKeyDim + Layer::kValueDim));
  MustBeOk(sequence.FetchBlocks(0, {150, 650}, PQC_KEY, std::as_writable_bytes(std::span(keys))));
  MustBeOk(
      sequence.FetchBlocks(0, {150, 650}, PQC_VALUE, std::as_writable_bytes(std::span(values))));
  for (uint32_t head = 0; head < 2; ++head) {
    for (uint64_t token = 0; token < 500; ++token) {
      const size_t at = head * 500 + token;
      ASSERT_EQ(std::memcmp(&keys[at * Layer::kKeyDim], layer.key(token + 150, head),
                            Layer::kKeyDim * sizeof(float)),
                0);
      ASSERT_EQ(std::memcmp(&values[at * Layer::kValueDim], layer.value(token + 150, head),
                            Layer::kValueDim * sizeof(float)),
                0);
    }
  }
  const uint32_t positions[] = {699, 0, 256, 3, 599, 3};
  MustBeOk(sequence.FetchTokens(0, positions, 3, PQC_ROW, std::as_writable_bytes(std::span(rows))));
  for (uint32_t i = 0; i < 6; ++i) {
    const float* row = &rows[i * (Layer::kKeyDim + Layer::kValueDim)];
    EXPECT_EQ(std::memcmp(row, layer.key(positions[i], i / 3), Layer::kKeyDim * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(row + Layer::kKeyDim, layer.value(positions[i], i / 3),
                          Layer::kValueDim * sizeof(float)),
              0);
  }
}

// Longer than a message, and on the local path than a ring of slots' first parts.
TEST_P(DaemonTest, LongPromptsComeInWholeOrNotAtAll) {
  constexpr uint64_t kTokens = 30000;  // 23 MiB
  const Layer layer(kTokens, 11);
  CacheSpec spec = SpecOf("long", {0});
  spec.capacity_bytes = 128 << 20;
  Cache cache = Must(client_.OpenCache(spec));
  Sequence sequence = Must(cache.CreateSequence());
  const size_t key_floats = size_t{Layer::kKvHeads} * Layer::kKeyDim;
  std::vector<float> spoilt(kTokens * key_floats);
  std::memcpy(spoilt.data(), layer.key(0, 0), spoilt.size() * sizeof(float));
  for (const uint64_t token : {uint64_t{29999}, uint64_t{20000}}) {
    spoilt[token * key_floats + 3] = NAN;
    const Status status =
        sequence.Ingest(0, 0, {spoilt.data(), PQC_F32, {kTokens, Layer::kKvHeads, Layer::kKeyDim}},
                        layer.values(0, kTokens));
    EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT);
    EXPECT_NE(status.message().find("token " + std::to_string(token)), std::string::npos)
        << status.message();
    EXPECT_EQ(Must(sequence.Describe()).token_count, 0u);
  }
  MustBeOk(sequence.Ingest(0, 0, layer.keys(0, 10), layer.values(0, 10)));
  MustBeOk(sequence.Ingest(0, 10, layer.keys(10, kTokens), layer.values(10, kTokens)));
  std::vector<float> rows(size_t{2} * 30 * (Layer::kKeyDim + Layer::kValueDim));
  for (uint64_t first = 0; first < kTokens; first += 30) {
    MustBeOk(sequence.FetchBlocks(0, {first, first + 30}, PQC_ROW,
                                  std::as_writable_bytes(std::span(rows))));
    for (uint64_t i = 0; i < 60; ++i) {
      const float* row = &rows[i * (Layer::kKeyDim + Layer::kValueDim)];
      const uint64_t token = first + i % 30;
      const auto head = static_cast<uint32_t>(i / 30);
      ASSERT_EQ(std::memcmp(row, layer.key(token, head), Layer::kKeyDim * sizeof(float)), 0);
      ASSERT_EQ(std::memcmp(row + Layer::kKeyDim, layer.value(token, head),
                            Layer::kValueDim * sizeof(float)),
                0);
    }
  }
}

TEST_P(DaemonTest, StridedTensorsAreReadByTheirStrides) {
  constexpr uint64_t kTokens = 300;
  const Layer layer(kTokens, 9);
  // The same numbers as [kv_heads, tokens, dim], and values with dims backwards and a gap between
  // tokens.
  std::vector<float> keys(2 * kTokens * Layer::kKeyDim),
      values(2 * kTokens * (Layer::kValueDim + 3));
  for (uint32_t head = 0; head < 2; ++head) {
    for (uint64_t token = 0; token < kTokens; ++token) {
      std::memcpy(&keys[(head * kTokens + token) * Layer::kKeyDim], layer.key(token, head),
                  Layer::kKeyDim * sizeof(float));
      for (uint32_t d = 0; d < Layer::kValueDim; ++d) {
        values[(token * 2 + head) * (Layer::kValueDim + 3) + Layer::kValueDim - 1 - d] =
            layer.value(token, head)[d];
      }
    }
  }
  Cache cache = Must(client_.OpenCache(SpecOf("strided", {0})));
  Sequence sequence = Must(cache.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0,
                           {keys.data(),
                            PQC_F32,
                            {kTokens, 2, Layer::kKeyDim},
                            {Layer::kKeyDim, kTokens * Layer::kKeyDim, 1}},
                           {&values[Layer::kValueDim - 1],
                            PQC_F32,
                            {kTokens, 2, Layer::kValueDim},
                            {2 * (Layer::kValueDim + 3), Layer::kValueDim + 3, -1}}));
  const Attention attention =
      Must(sequence.Attend(QueryAtEnd(layer), {.index = Index::Flat(), .ratio = 1.0}));
  ExpectNear(attention, layer.Attend({2, Range(0, kTokens)}), 1e-4f);
}

TEST_P(DaemonTest, FlatScoresAreTheLogits) {
  const Layer layer(800, 10);
  Cache cache = Must(client_.OpenCache(SpecOf("scores", {0})));
  Sequence sequence = Fill(cache, layer, 700);
  const Scores scores = Must(sequence.Score(QueryAtEnd(layer), Index::Flat(), {200, 750}));
  for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
    double max = -INFINITY, sum = 0;
    for (uint64_t token = 200; token < 750; ++token) {
      const double logit = layer.Logit(token, head);
      ASSERT_NEAR(scores.logits[head * 550 + token - 200], logit, 1e-4);
      max = std::max(max, logit);
    }
    for (uint64_t token = 200; token < 750; ++token)
      sum += std::exp(layer.Logit(token, head) - max);
    EXPECT_NEAR(scores.max[head], max, 1e-4);
    EXPECT_NEAR(scores.sum_exp[head], sum, 1e-3 * sum);
  }
}

TEST_P(DaemonTest, AppendsMayBeRepeatedAndRolledBack) {
  const Layer layer(700, 11), other(700, 12);
  Cache cache = Must(client_.OpenCache(SpecOf("append", {0})));
  Sequence sequence = Fill(cache, layer, 600);
  Append(sequence, layer, 650, 700);  // a repeat
  EXPECT_EQ(Must(sequence.Describe()).token_count, 700u);
  MustBeOk(sequence.Truncate(660));
  EXPECT_EQ(Must(sequence.Describe()).token_count, 660u);
  Append(sequence, other, 660, 700);
  const Selection everything = {.ratio = 1.0};
  std::vector<float> keys(2 * 40 * Layer::kKeyDim);
  MustBeOk(sequence.FetchBlocks(0, {660, 700}, PQC_KEY, std::as_writable_bytes(std::span(keys))));
  EXPECT_EQ(std::memcmp(keys.data(), other.key(660, 0), Layer::kKeyDim * sizeof(float)), 0);
}

TEST_P(DaemonTest, SequenceInfoCountsWhatIsHeld) {
  const Layer layer(700, 13);
  Cache cache = Must(client_.OpenCache(SpecOf("info", {0})));
  Sequence sequence = Fill(cache, layer, 600);
  const pqc_sequence_info info = Must(sequence.Describe());
  EXPECT_EQ(info.token_count, 700u);
  EXPECT_EQ(info.row_bytes, 700u * 2 * (Layer::kKeyDim + Layer::kValueDim) * sizeof(float));
  EXPECT_GT(info.index_bytes, 0u);
  EXPECT_GT(info.codebook_bytes, 0u);
  EXPECT_GE(info.used_bytes, info.row_bytes + info.index_bytes + info.codebook_bytes);
  EXPECT_GE(info.segment_count, 3u);
  EXPECT_EQ(info.index_count, 1u);
}

TEST_P(DaemonTest, BuildsReportEachLayerAndCanBeCancelledAndRepeated) {
  // Long enough that the cancellation after the first layer comes in time.
  const Layer layer(4000, 14);
  const std::vector<uint32_t> numbers = {0, 1, 2, 3, 4, 9};
  Cache cache = Must(client_.OpenCache(SpecOf("build", numbers, PQC_F16)));
  Sequence sequence = Must(cache.CreateSequence());
  for (const uint32_t number : numbers) {
    MustBeOk(sequence.Ingest(number, 0, layer.keys(0, 4000), layer.values(0, 4000)));
  }
  const Status cancelled = sequence.BuildIndex(
      {.iterations = 100, .progress = [](const pqc_build_progress&) { return false; }});
  EXPECT_EQ(cancelled.code(), PQC_CANCELLED) << cancelled.ToString();
  std::vector<uint32_t> layers;
  Status built;
  do {  // until the sidecar has seen that the first one was cancelled
    layers.clear();
    built =
        sequence.BuildIndex({.iterations = 3, .progress = [&](const pqc_build_progress& progress) {
                               layers.push_back(progress.layer);
                               return true;
                             }});
  } while (built.code() == PQC_ABORTED);
  ASSERT_TRUE(built.ok()) << built.ToString();
  // One message per layer and codebook generation; layers are built at the same time.
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  EXPECT_EQ(layers, numbers);
  EXPECT_EQ(sequence.BuildIndex().code(), PQC_ALREADY_EXISTS);
}

TEST_P(DaemonTest, TwoClientsAndTwoCachesWorkAtOnce) {
  Client other = daemon_.OpenClient("other-tenant", GetParam());
  Cache caches[] = {Must(client_.OpenCache(SpecOf("one", {0}))),
                    Must(other.OpenCache(SpecOf("two", {0})))};
  const Layer layers[] = {Layer(600, 15), Layer(640, 16)};
  const Attention expected[] = {layers[0].Attend({2, Range(0, 600)}),
                                layers[1].Attend({2, Range(0, 640)})};
  std::vector<std::thread> threads;
  std::atomic<int> done = 0;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const int which = thread % 2;
      const Layer& layer = layers[which];
      for (int repeat = 0; repeat < 3; ++repeat) {
        Sequence sequence = Fill(caches[which], layer, 500);
        for (const Index& index : {Index(), Index::Flat()}) {
          const Attention attention =
              Must(sequence.Attend(QueryAtEnd(layer), {.index = index, .ratio = 1.0}));
          ExpectNear(attention, expected[which], 1e-4f);
        }
        MustBeOk(sequence.Drop());
        ++done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done, 12);
}

TEST_P(DaemonTest, OneSequenceIsReadByManyThreads) {
  const Layer layer(600, 17);
  Cache cache = Must(client_.OpenCache(SpecOf("readers", {0})));
  Sequence sequence = Fill(cache, layer, 500);
  const Selection selection = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2};
  const Selected expected = Must(sequence.TopK(QueryAtEnd(layer), selection));
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int repeat = 0; repeat < 25; ++repeat) {
        EXPECT_EQ(Must(sequence.TopK(QueryAtEnd(layer), selection)).positions, expected.positions);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(DaemonTest, AdmitsWhatFitsAndPinsAgainstEviction) {
  const Layer layer(600, 18);
  Cache cache = Must(client_.OpenCache(SpecOf("admit", {0})));
  Sequence sequence = Fill(cache, layer, 500);
  const pqc_admission fits = Must(cache.Admit(1000, 100));
  EXPECT_EQ(fits.verdict, PQC_FITS_NOW);
  EXPECT_GE(fits.needed_bytes, 1100u * Layer::kKvHeads * (Layer::kKeyDim + Layer::kValueDim) * 4);
  const pqc_admission never = Must(cache.Admit(uint64_t{1} << 24));
  EXPECT_EQ(never.verdict, PQC_FITS_NEVER);
  EXPECT_GT(never.needed_bytes, never.limit_bytes);
  EXPECT_GT(never.shortfall_bytes, 0u);

  MustBeOk(sequence.Pin(60'000));
  MustBeOk(sequence.Pin(0));
  EXPECT_EQ(sequence.Pin(uint64_t{366} * 24 * 3600 * 1000).code(), PQC_INVALID_ARGUMENT);
}

// The indexes of both are kept side by side; rows are shared.
TEST_P(DaemonTest, EachHandleOfACacheHasItsOwnDefaultIndex) {
  const Layer layer(700, 23);
  const Index narrow = Index::Pq(2, 4), wide = Index::Pq(8, 6);
  CacheSpec spec = SpecOf("defaults", {0});
  spec.default_index = narrow;
  Cache first = Must(client_.OpenCache(spec));
  spec.default_index = wide;
  Cache second = Must(client_.OpenCache(spec));
  spec.default_index = Index::Flat();
  Cache third = Must(client_.OpenCache(spec));
  const Query query = QueryAtEnd(layer);
  const auto expect = [&](Sequence& sequence, const Index& built, const Index& other) {
    const Selected by_default = Must(sequence.TopK(query, {.token_count = 200}));
    const Selected by_name = Must(sequence.TopK(query, {.index = built, .token_count = 200}));
    EXPECT_EQ(by_default.positions, by_name.positions);
    EXPECT_EQ(sequence.TopK(query, {.index = other, .token_count = 200}).status().code(),
              PQC_FAILED_PRECONDITION);
  };
  Sequence one = Fill(first, layer, 700), two = Fill(second, layer, 700);
  expect(one, narrow, wide);
  expect(two, wide, narrow);
  EXPECT_LT(Must(third.Admit(100'000)).needed_bytes, Must(first.Admit(100'000)).needed_bytes);

  Sequence exact = Must(third.CreateSequence());
  MustBeOk(exact.Ingest(0, 0, layer.keys(0, 700), layer.values(0, 700)));
  EXPECT_EQ(ByHead(Must(exact.TopK(query, {.token_count = 200}))), layer.Best(Range(0, 700), 200));

  SequenceOptions live;
  live.live_index.emplace();
  Sequence grown = Must(second.CreateSequence(live));
  MustBeOk(grown.Ingest(0, 0, layer.keys(0, 700), layer.values(0, 700)));
  MustBeOk(grown.BuildIndex());
  expect(grown, wide, narrow);
}

TEST_P(DaemonTest, TheDefaultIndexIsM4B8) {
  const Layer layer(700, 23);
  Cache cache = Must(client_.OpenCache(SpecOf("default", {0})));
  Sequence sequence = Fill(cache, layer, 700);
  const Query query = QueryAtEnd(layer);
  const Selected by_default = Must(sequence.TopK(query, {.token_count = 200}));
  const Selected by_name =
      Must(sequence.TopK(query, {.index = Index::Pq(4, 8), .token_count = 200}));
  EXPECT_EQ(by_default.positions, by_name.positions);
}

TEST_P(DaemonTest, ADroppedCacheIsGoneAndItsNameIsFree) {
  const Layer layer(300, 18);
  Cache cache = Must(client_.OpenCache(SpecOf("dropped", {0})));
  Sequence sequence = Fill(cache, layer, 300);
  Status refused = cache.Drop();
  EXPECT_EQ(refused.code(), PQC_FAILED_PRECONDITION) << refused.ToString();
  EXPECT_EQ(refused.field(), "cache");
  MustBeOk(sequence.Drop());
  MustBeOk(cache.Drop());
  EXPECT_EQ(cache.CreateSequence().status().code(), PQC_NOT_FOUND);
  refused = cache.Drop();
  EXPECT_EQ(refused.code(), PQC_NOT_FOUND) << refused.ToString();
  CacheSpec other = SpecOf("dropped", {0, 1});  // would be refused while the first one was open
  Cache next = Must(client_.OpenCache(other));
  MustBeOk(next.CreateSequence().status());
}

// Two ranks of a model, each with a client of its own.
TEST_P(DaemonTest, RanksMakeOneSequenceByItsKey) {
  const Layer layer(400, 19);
  Client clients[] = {daemon_.OpenClient("default", GetParam()),
                      daemon_.OpenClient("default", GetParam())};
  const SequenceOptions prompt = {.prompt = {.token_ids = Range(0, 400)}};
  SequenceOptions tied = prompt;
  tied.group_key = std::string("request\1\0", 9);
  std::vector<Cache> caches;
  std::vector<Sequence> holders;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    CacheSpec spec = SpecOf("ranks", {0});
    spec.rank_group = "group";
    spec.rank = rank;
    spec.rank_count = 2;
    spec.kv_head_begin = rank * Layer::kKvHeads;
    caches.push_back(Must(clients[rank].OpenCache(spec)));
    holders.push_back(Must(caches[rank].CreateSequence(prompt)));
    MustBeOk(holders[rank].Ingest(0, 0, layer.keys(0, 400), layer.values(0, 400)));
  }
  uint64_t shared = 0;
  Sequence first = Must(caches[0].CreateSequence(tied, &shared));
  EXPECT_EQ(shared, 384u);
  MustBeOk(holders[1].Drop());
  EXPECT_EQ(Must(caches[1].MatchPrefix(prompt.prompt)), 384u);  // that are retained
  SequenceOptions other = tied;
  other.prompt.extra_key = "image";
  EXPECT_EQ(caches[1].CreateSequence(other).status().code(), PQC_FAILED_PRECONDITION);
  EXPECT_EQ(caches[0].CreateSequence(tied).status().code(), PQC_ALREADY_EXISTS);
  Sequence second = Must(caches[1].CreateSequence(tied, &shared));
  EXPECT_EQ(shared, 384u);
  std::vector<float> keys(2 * 384 * Layer::kKeyDim);
  MustBeOk(second.FetchBlocks(0, {0, 384}, PQC_KEY, std::as_writable_bytes(std::span(keys))));
  for (uint64_t token = 0; token < 384; ++token) {
    ASSERT_EQ(std::memcmp(&keys[token * Layer::kKeyDim], layer.key(token, 0),
                          Layer::kKeyDim * sizeof(float)),
              0);
  }
  const auto ask = [&](const char* method, const Sequence& of) {
    return clients[0].AdminJson(method, "{\"sequence_id\": \"" + std::to_string(of.id()) + "\"}");
  };
  EXPECT_NE(Must(ask("DescribeSequence", second)).find("request\\\\001\\\\000"), std::string::npos);
  tied.group_key = "another";  // that nobody reads, and so leases
  Sequence members[] = {Must(caches[0].CreateSequence(tied)), Must(caches[1].CreateSequence(tied))};
  Must(ask("Evict", members[1]));
  for (Sequence& each : members) EXPECT_EQ(each.Describe().status().code(), PQC_NOT_FOUND);
  MustBeOk(first.Describe().status());
}

TEST_P(DaemonTest, GroupKeysThatAreWrongAreRefused) {
  Cache cache = Must(client_.OpenCache(SpecOf("alone", {0})));
  const auto refused = [&](const SequenceOptions& options, const char* why) {
    const Status status = cache.CreateSequence(options).status();
    EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT);
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  };
  refused({.group_key = std::string(65, 'k')}, "options.group_key_bytes: 65, must be at most 64");
  refused({.group_key = std::string(64, 'k')}, "group_key: the cache has no rank.group");
  pqc_sequence_options options = PQC_INIT(pqc_sequence_options);
  options.group_key_bytes = 1;
  pqc_sequence* sequence = nullptr;
  EXPECT_EQ(pqc_sequence_create_with(cache.get(), &options, &sequence, nullptr),
            PQC_INVALID_ARGUMENT);
  EXPECT_NE(std::string(pqc_last_error()).find("options.group_key: must not be NULL"),
            std::string::npos);
}

TEST(DaemonPathTest, AClientThatComesWhileTheSidecarStartsIsLocal) {
  for (int start = 0; start < 8; ++start) {
    const Daemon daemon;
    EXPECT_EQ(daemon.OpenClient("default", PQC_PATH_ANY).path(), PQC_PATH_LOCAL) << start;
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
