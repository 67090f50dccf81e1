// The calls of the C ABI over mapped memory, against plain loops: rows in by staging, index,
// selection, rows out, attention.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/client/layer.h"
#include "tests/client/local/store_client.h"
#include "tests/rewritten_texts.h"

namespace pqcached {
namespace {

using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::OpenStoreClient;
using testing::Range;
using testing::Sidecar;
using testing::SmallSegments;
using testing::SpecOf;

constexpr uint64_t kSink = 5, kWindow = 20;

std::vector<std::vector<uint32_t>> ByHead(const Selected& selected) {
  std::vector<std::vector<uint32_t>> heads(selected.kv_heads);
  for (uint32_t head = 0; head < selected.kv_heads; ++head) {
    const auto begin = selected.positions.begin() + head * selected.count;
    heads[head].assign(begin, begin + selected.count);
  }
  return heads;
}

void ExpectNear(const std::vector<float>& actual, const std::vector<float>& expected,
                float tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance) << i;
  }
}

class LocalReadTest : public ::testing::Test {
 protected:
  Sequence Fill(const Layer& layer, uint64_t indexed) {
    Sequence sequence = Must(cache_.CreateSequence());
    MustBeOk(sequence.Ingest(0, 0, layer.keys(0, indexed), layer.values(0, indexed)));
    MustBeOk(sequence.BuildIndex({.iterations = 3, .seed = 1, .sink_tokens = kSink}));
    for (uint64_t token = indexed; token < layer.tokens(); token += 50) {
      const uint64_t end = std::min(layer.tokens(), token + 50);
      const LayerRows rows[] = {{0, layer.keys(token, end), layer.values(token, end)}};
      EXPECT_EQ(Must(sequence.Append(token, rows)), end);
    }
    return sequence;
  }

  static Query QueryAtEnd(const Layer& layer) {
    return {.layer = 0, .query_position = layer.tokens() - 1, .queries = layer.queries()};
  }

  Sidecar sidecar_{SmallSegments()};
  Client client_ = OpenStoreClient(sidecar_);
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0})));
};

TEST_F(LocalReadTest, AttendingToEverythingIsFullAttention) {
  EXPECT_EQ(client_.path(), PQC_PATH_LOCAL);
  for (const uint64_t tokens : {uint64_t{30}, uint64_t{255}, uint64_t{1301}}) {
    SCOPED_TRACE(tokens);
    const Layer layer(tokens, 3);
    Sequence sequence = Fill(layer, tokens - tokens / 4);
    Attention attention = Must(sequence.Attend(
        QueryAtEnd(layer), {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0}));
    EXPECT_EQ(attention.selected.count, tokens - kSink - kWindow);
    std::vector<uint32_t> own = Range(0, kSink);
    for (const uint32_t token : Range(tokens - kWindow, tokens)) own.push_back(token);
    attention.Merge(layer.Attend({Layer::kKvHeads, own}));
    const Attention full = layer.Attend({Layer::kKvHeads, Range(0, tokens)});
    ExpectNear(attention.output, full.output, 1e-4f);
    ExpectNear(attention.lse, full.lse, 1e-4f);
  }
}

TEST_F(LocalReadTest, SelectionsAreThoseOfTheSidecar) {
  const Layer layer(1100, 4);
  Sequence sequence = Fill(layer, 900);
  for (const Index& index : {Index::Flat(), Index::Pq(4, 8)}) {  // the latter is the default
    const Selection selection = {.index = index,
                                 .sink_tokens = kSink,
                                 .window_tokens = kWindow,
                                 .excluded = {{100, 300}, {640, 641}},
                                 .token_count = 125};
    const Selected selected = Must(sequence.TopK(QueryAtEnd(layer), selection));
    const pqc_tensor queries = layer.queries().c();
    kvstore::Selection terms{.sink_tokens = kSink,
                             .window_tokens = kWindow,
                             .excluded = {{100, 300}, {640, 641}},
                             .budget_kind = kvstore::BudgetKind::kCount,
                             .budget_count = 125};
    if (index.kind == PQC_INDEX_PQ) terms.index = {kvstore::IndexKind::kPq, 4, 8};
    const auto expected = sidecar_.store->TopK(
        testing::kTestTenant, sequence.id(),
        {.layer = 0,
         .query_position = 1099,
         .queries = {.data = static_cast<const std::byte*>(queries.ptr),
                     .data_bytes = Layer::kQueryHeads * Layer::kKeyDim * sizeof(float),
                     .dtype = kernels::DType::kF32,
                     .shape = {1, Layer::kQueryHeads, Layer::kKeyDim},
                     .strides = {}}},
        terms);
    ASSERT_TRUE(expected.ok()) << expected.status();
    EXPECT_EQ(selected.positions, expected->positions);
    EXPECT_EQ(selected.sink_tokens, kSink);
    EXPECT_EQ(selected.window_tokens, kWindow);
  }
  const Selected best = Must(sequence.TopK(QueryAtEnd(layer), {.index = Index::Flat(),
                                                               .sink_tokens = kSink,
                                                               .window_tokens = kWindow,
                                                               .token_count = 125}));
  EXPECT_EQ(ByHead(best), layer.Best(Range(kSink, 1100 - kWindow), 100));
}

TEST_F(LocalReadTest, RowsOfSeveralSlotsComeBackAsTheyWentIn) {
  const Layer layer(9000, 8);  // 6.6 MiB through slots of 1 MiB
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0, layer.keys(0, 9000), layer.values(0, 9000)));
  EXPECT_GT(sidecar_.commits, 3u);
  std::vector<float> keys(2 * 8850 * Layer::kKeyDim);
  MustBeOk(sequence.FetchBlocks(0, {150, 9000}, PQC_KEY, std::as_writable_bytes(std::span(keys))));
  for (uint32_t head = 0; head < 2; ++head) {
    for (uint64_t token = 0; token < 8850; ++token) {
      ASSERT_EQ(std::memcmp(&keys[(head * 8850 + token) * Layer::kKeyDim],
                            layer.key(token + 150, head), Layer::kKeyDim * sizeof(float)),
                0)
          << token;
    }
  }
  std::vector<float> rows(2 * 3 * (Layer::kKeyDim + Layer::kValueDim));
  const uint32_t positions[] = {8999, 0, 256, 3, 599, 3};
  MustBeOk(sequence.FetchTokens(0, positions, 3, PQC_ROW, std::as_writable_bytes(std::span(rows))));
  for (uint32_t i = 0; i < 6; ++i) {
    const float* row = &rows[i * (Layer::kKeyDim + Layer::kValueDim)];
    EXPECT_EQ(std::memcmp(row, layer.key(positions[i], i / 3), Layer::kKeyDim * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(row + Layer::kKeyDim, layer.value(positions[i], i / 3),
                          Layer::kValueDim * sizeof(float)),
              0);
  }
}

TEST_F(LocalReadTest, ScoresAreTheLogits) {
  const Layer layer(700, 9);
  Sequence sequence = Fill(layer, 600);
  const Scores scores = Must(sequence.Score(QueryAtEnd(layer), Index::Flat(), {250, 680}));
  for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
    double sum = 0;
    for (uint64_t token = 250; token < 680; ++token) {
      const double logit = layer.Logit(token, head);
      ASSERT_NEAR(scores.logits[head * 430 + token - 250], logit, 1e-4);
      sum += std::exp(logit - scores.max[head]);
    }
    EXPECT_NEAR(scores.sum_exp[head], sum, 1e-3 * sum);
  }
}

// Every token of a paged engine's sequence, wherever its blocks lie.
TEST_F(LocalReadTest, PagedRowsOfAnyOrderAreReadByTheirBlockTable) {
  constexpr uint64_t kTokens = 300, kBlock = 16, kBlocks = 40;
  constexpr uint64_t kHeads = Layer::kKvHeads, kKey = Layer::kKeyDim, kValue = Layer::kValueDim;
  const Layer layer(kTokens, 10);
  std::vector<uint32_t> table;
  for (uint64_t i = 0; i * kBlock < kTokens; ++i) {
    table.push_back(static_cast<uint32_t>((i * 7 + 3) % kBlocks));
  }
  // K as [blocks, 2, tokens, heads, dim], V as [blocks, heads, tokens, dim], and V transposed, with
  // tokens side by side.
  std::vector<float> k(kBlocks * 2 * kBlock * kHeads * kKey), v(kBlocks * kHeads * kBlock * kValue),
      transposed(v.size());
  for (uint64_t token = 0; token < kTokens; ++token) {
    const uint64_t block = table[token / kBlock], at = token % kBlock;
    for (uint32_t head = 0; head < kHeads; ++head) {
      std::memcpy(&k[((block * 2 * kBlock + at) * kHeads + head) * kKey], layer.key(token, head),
                  kKey * sizeof(float));
      for (uint64_t d = 0; d < kValue; ++d) {
        const float number = layer.value(token, head)[d];
        v[((block * kHeads + head) * kBlock + at) * kValue + d] = number;
        transposed[((block * kHeads + head) * kValue + d) * kBlock + at] = number;
      }
    }
  }
  const auto stride = [](uint64_t elements) { return static_cast<int64_t>(elements); };
  const Tensor paged_k =
      Tensor::Paged({k.data(),
                     PQC_F32,
                     {kBlocks, kBlock, kHeads, kKey},
                     {stride(2 * kBlock * kHeads * kKey), stride(kHeads * kKey), stride(kKey), 1}},
                    table, kTokens);
  const Tensor paged_v = Tensor::Paged(
      {v.data(),
       PQC_F32,
       {kBlocks, kBlock, kHeads, kValue},
       {stride(kHeads * kBlock * kValue), stride(kValue), stride(kBlock * kValue), 1}},
      table, kTokens);
  const Tensor paged_transposed = Tensor::Paged(
      {transposed.data(),
       PQC_F32,
       {kBlocks, kBlock, kHeads, kValue},
       {stride(kHeads * kBlock * kValue), 1, stride(kBlock * kValue), stride(kBlock)}},
      table, kTokens);
  for (const Tensor& values : {paged_v, paged_transposed}) {
    Sequence sequence = Must(cache_.CreateSequence());
    MustBeOk(sequence.Ingest(0, 0, paged_k, values));
    const Attention attention =
        Must(sequence.Attend(QueryAtEnd(layer), {.index = Index::Flat(), .ratio = 1.0}));
    ExpectNear(attention.output, layer.Attend({Layer::kKvHeads, Range(0, kTokens)}).output, 1e-4f);
  }
  std::vector<uint32_t> wrong = table;
  wrong[5] = kBlocks;
  Sequence sequence = Must(cache_.CreateSequence());
  const Status refused = sequence.Ingest(
      0, 0,
      Tensor::Paged({k.data(),
                     PQC_F32,
                     {kBlocks, kBlock, kHeads, kKey},
                     {stride(2 * kBlock * kHeads * kKey), stride(kHeads * kKey), stride(kKey), 1}},
                    wrong, kTokens),
      paged_v);
  EXPECT_EQ(refused.code(), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(refused.field(), "keys.block_table.blocks[5]") << refused.ToString();
}

TEST_F(LocalReadTest, TheQueriesOfASpeculationShareOneSelection) {
  const Layer layer(800, 11);
  Sequence sequence = Fill(layer, 700);
  constexpr uint32_t kLength = 3;
  const size_t one = Layer::kQueryHeads * Layer::kKeyDim;
  const float* numbers = static_cast<const float*>(layer.queries().c().ptr);
  std::vector<float> several;
  for (uint32_t token = 0; token < kLength; ++token) {
    for (size_t i = 0; i < one; ++i)
      several.push_back(numbers[i] * (1.0f + 0.25f * static_cast<float>(token)));
  }
  const Query query = {.layer = 0,
                       .query_position = 799,
                       .queries = {several, {kLength, Layer::kQueryHeads, Layer::kKeyDim}}};
  const Selection selection = {
      .index = Index::Flat(), .sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2};
  const Selected selected = Must(sequence.TopK(query, selection));
  const Attention attention = Must(sequence.Attend(query, selection));
  ASSERT_EQ(attention.lse.size(), kLength * Layer::kQueryHeads);
  // The first token's queries are the layer's: over the shared positions its attention is known.
  const Attention first = layer.Attend(ByHead(selected));
  ExpectNear(
      {attention.output.begin(), attention.output.begin() + Layer::kQueryHeads * Layer::kValueDim},
      first.output, 1e-4f);
  // And each token alone over these positions gives its part.
  for (uint32_t token = 0; token < kLength; ++token) {
    const Query alone = {.layer = 0,
                         .query_position = 799 + token,
                         .queries = {std::span(several).subspan(token * one, one),
                                     {Layer::kQueryHeads, Layer::kKeyDim}}};
    const Attention part = Must(sequence.Attend(alone, selected.positions, selected.count));
    const auto begin = attention.output.begin() + token * Layer::kQueryHeads * Layer::kValueDim;
    ExpectNear({begin, begin + Layer::kQueryHeads * Layer::kValueDim}, part.output, 1e-5f);
  }
}

TEST_F(LocalReadTest, WhatIsNotThereIsRefusedInTheSidecarsWords) {
  const Layer layer(400, 12);
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0, layer.keys(0, 400), layer.values(0, 400)));
  const auto expect = [](const Status& status, pqc_status code, const char* field,
                         const char* part = "") {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(status.field(), field) << status.ToString();
    EXPECT_TRUE(HasText(status.message(), part)) << status.ToString();
  };
  const Query query = QueryAtEnd(layer);
  const Index flat = Index::Flat();
  expect(sequence.TopK(query, {.ratio = 0.5}).status(), PQC_FAILED_PRECONDITION, "selection.index",
         "build it");
  expect(sequence.TopK(query, {.index = Index::Pq(3, 6), .ratio = 0.5}).status(),
         PQC_INVALID_ARGUMENT, "selection.index.subspaces");
  expect(sequence.TopK(query, {.index = flat, .ratio = 0.0}).status(), PQC_INVALID_ARGUMENT,
         "selection.ratio");
  expect(sequence.TopK(query, {.index = flat, .token_count = 401}).status(), PQC_INVALID_ARGUMENT,
         "selection.token_count");
  expect(sequence.TopK(query, {.index = flat, .excluded = {{10, 20}, {15, 30}}, .ratio = 0.5})
             .status(),
         PQC_INVALID_ARGUMENT, "selection.excluded[1]");
  expect(sequence
             .TopK({.layer = 0, .query_position = 500, .queries = layer.queries()},
                   {.index = flat, .ratio = 0.5})
             .status(),
         PQC_OUT_OF_RANGE, "query.query_position", "400 are stored");
  const std::vector<uint32_t> beyond = {1, 2, 1, 400}, unsorted = {2, 1, 1, 2};
  expect(sequence.Attend(query, beyond, 2).status(), PQC_OUT_OF_RANGE, "positions[3]");
  expect(sequence.Attend(query, unsorted, 2).status(), PQC_INVALID_ARGUMENT, "positions[1]",
         "ascend");
  std::vector<float> rows(2 * 2 * (Layer::kKeyDim + Layer::kValueDim));
  expect(sequence.FetchBlocks(0, {399, 401}, PQC_ROW, std::as_writable_bytes(std::span(rows))),
         PQC_OUT_OF_RANGE, "tokens");
}

TEST_F(LocalReadTest, RollingBackAndAppendingShowsTheNewRows) {
  const Layer layer(500, 13), other(500, 14);
  Sequence sequence = Fill(layer, 400);
  const Query query = QueryAtEnd(layer);
  const Selection all = {.index = Index::Flat(), .ratio = 1.0};
  ExpectNear(Must(sequence.Attend(query, all)).output,
             layer.Attend({Layer::kKvHeads, Range(0, 500)}).output, 1e-4f);
  MustBeOk(sequence.Truncate(450));
  EXPECT_EQ(sequence.Attend(query, all).status().code(), PQC_OUT_OF_RANGE);
  const LayerRows rows[] = {{0, other.keys(450, 500), other.values(450, 500)}};
  EXPECT_EQ(Must(sequence.Append(450, rows)), 500u);
  std::vector<float> keys(2 * 500 * Layer::kKeyDim);
  MustBeOk(sequence.FetchBlocks(0, {0, 500}, PQC_KEY, std::as_writable_bytes(std::span(keys))));
  EXPECT_EQ(std::memcmp(&keys[449 * Layer::kKeyDim], layer.key(449, 0), Layer::kKeyDim * 4), 0);
  EXPECT_EQ(std::memcmp(&keys[450 * Layer::kKeyDim], other.key(450, 0), Layer::kKeyDim * 4), 0);
}

// A sequence that shares memory with a fork moves to fresh memory before it grows. Ingest answers
// without a new image, so the client's image still has slots for the next tokens in the old memory.
TEST_F(LocalReadTest, ASequenceThatMovedShowsItsNewRows) {
  const Layer layer(300, 21), other(300, 22);
  const auto read = [](Sequence& sequence, uint64_t end) {
    std::vector<float> keys(2 * end * Layer::kKeyDim);
    MustBeOk(sequence.FetchBlocks(0, {0, end}, PQC_KEY, std::as_writable_bytes(std::span(keys))));
    return keys;
  };
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0, layer.keys(0, 250), layer.values(0, 250)));
  const Sequence fork = Must(sequence.Fork(250));
  MustBeOk(sequence.Truncate(200));
  read(sequence, 200);
  MustBeOk(sequence.Ingest(0, 200, other.keys(200, 240), other.values(200, 240)));
  const std::vector<float> keys = read(sequence, 240);
  EXPECT_EQ(std::memcmp(&keys[199 * Layer::kKeyDim], layer.key(199, 0), Layer::kKeyDim * 4), 0);
  for (uint64_t token = 200; token < 240; ++token) {
    EXPECT_EQ(std::memcmp(&keys[token * Layer::kKeyDim], other.key(token, 0), Layer::kKeyDim * 4),
              0)
        << token;
  }
}

TEST_F(LocalReadTest, ASequenceThatOthersDropGivesNotFoundAndSuspendedOnesSaySo) {
  const Layer layer(300, 15);
  Sequence sequence = Fill(layer, 300);
  const Selection selection = {.ratio = 0.5};
  MustBeOk(sequence.TopK(QueryAtEnd(layer), selection).status());
  MustBeOk(sequence.Suspend());
  EXPECT_EQ(sequence.TopK(QueryAtEnd(layer), selection).status().code(), PQC_FAILED_PRECONDITION);
  EXPECT_EQ(Must(sequence.Resume()), 300u);
  const Selected before = Must(sequence.TopK(QueryAtEnd(layer), selection));
  EXPECT_EQ(before.count, 150u);
  ASSERT_TRUE(sidecar_.store->DropSequence(testing::kTestTenant, sequence.id()).ok());
  EXPECT_EQ(sequence.TopK(QueryAtEnd(layer), selection).status().code(), PQC_NOT_FOUND);
}

TEST_F(LocalReadTest, ALostSessionIsUnavailableAndAClosedClientSaysSo) {
  const Layer layer(300, 16);
  Sequence sequence = Fill(layer, 300);
  MustBeOk(sequence.TopK(QueryAtEnd(layer), {.ratio = 0.5}).status());
  sidecar_.knows_session = false;
  sidecar_.ended = true;
  EXPECT_EQ(sequence.TopK(QueryAtEnd(layer), {.ratio = 0.5}).status().code(), PQC_UNAVAILABLE);
  { const Client closing = std::move(client_); }
  EXPECT_EQ(sequence.TopK(QueryAtEnd(layer), {.ratio = 0.5}).status().code(),
            PQC_FAILED_PRECONDITION);
}

TEST_F(LocalReadTest, LeasesAreCountedAndGivenBack) {
  const Layer layer(300, 17);
  Sequence first = Fill(layer, 300), second = Fill(layer, 300);
  MustBeOk(first.TopK(QueryAtEnd(layer), {.ratio = 0.5}).status());
  MustBeOk(second.TopK(QueryAtEnd(layer), {.ratio = 0.5}).status());
  EXPECT_EQ(Must(client_.Count()).lease_count, 2u);
  EXPECT_GT(Must(client_.Count()).mapped_bytes, uint64_t{32} << 20 >> 1);
  EXPECT_EQ(sidecar_.store->ListLeases(kvstore::kAllTenants).size(), 2u);
  MustBeOk(first.Drop());
  EXPECT_EQ(sidecar_.store->ListLeases(kvstore::kAllTenants).size(), 1u);
  EXPECT_EQ(Must(client_.Count()).lease_count, 1u);
}

TEST_F(LocalReadTest, ManyThreadsReadWhileRowsAreAppended) {
  const Layer layer(1500, 18);
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0, layer.keys(0, 400), layer.values(0, 400)));
  MustBeOk(sequence.BuildIndex({.sink_tokens = kSink}));
  std::atomic<bool> done = false;
  const Query query = {.layer = 0, .query_position = 399, .queries = layer.queries()};
  const Selection selection = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.3};
  const Selected expected = Must(sequence.TopK(query, selection));
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      do {
        EXPECT_EQ(Must(sequence.TopK(query, selection)).positions, expected.positions);
      } while (!done);
    });
  }
  for (uint64_t token = 400; token < 1500; token += 25) {
    const LayerRows rows[] = {{0, layer.keys(token, token + 25), layer.values(token, token + 25)}};
    EXPECT_EQ(Must(sequence.Append(token, rows)), token + 25);
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
}

TEST(LocalHookTest, TheEnginesParallelForRunsTheKernels) {
  std::atomic<int> runs = 0;
  Sidecar sidecar(SmallSegments());
  Client client = OpenStoreClient(sidecar, {.hook =
                                                [](void* context, uint32_t count,
                                                   void (*body)(void*, uint32_t), void* argument) {
                                                  ++*static_cast<std::atomic<int>*>(context);
                                                  for (uint32_t i = count; i-- > 0;)
                                                    body(argument, i);
                                                },
                                            .hook_context = &runs,
                                            .thread_count = 3});
  Cache cache = Must(client.OpenCache(SpecOf("hook", {0})));
  const Layer layer(2500, 19);
  Sequence sequence = Must(cache.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0, layer.keys(0, 2500), layer.values(0, 2500)));
  const Attention attention =
      Must(sequence.Attend({.layer = 0, .query_position = 2499, .queries = layer.queries()},
                           {.index = Index::Flat(), .ratio = 1.0}));
  EXPECT_GE(runs, 2);
  ExpectNear(attention.output, layer.Attend({Layer::kKvHeads, Range(0, 2500)}).output, 1e-4f);
}

}  // namespace
}  // namespace pqcached
