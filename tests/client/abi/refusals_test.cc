// What the C ABI says of a refused call besides its message: the field, in the words of the header,
// and the retry time. Both paths say the same, and neither depends on the words of messages, so
// this program runs twice (tests/rewritten_texts.h).
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"
#include "tests/rewritten_texts.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::SpecOf;

constexpr uint64_t kTokens = 400;
constexpr uint32_t kRetryMemory = 1000;
constexpr uint32_t kNoRetry = 0;
constexpr int kMostAttempts = 100;

void Expect(const Status& status, pqc_status code, const std::string& field,
            uint32_t retry_ms = 0) {
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_EQ(status.field(), field) << status.ToString();
  EXPECT_EQ(status.retry_ms(), retry_ms) << status.ToString();
  EXPECT_TRUE(HasText(status.message(), field)) << status.ToString();
}

class RefusalsTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  void SetUp() override {
    const Status status =
        sequence_.Ingest(0, 0, layer_.keys(0, kTokens), layer_.values(0, kTokens));
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  Query QueryAt(uint64_t position) const {
    return {.layer = 0, .query_position = position, .queries = layer_.queries()};
  }
  Status Select(const Selection& selection, uint64_t position = kTokens - 1) {
    return sequence_.TopK(QueryAt(position), selection).status();
  }

  Daemon daemon_;
  Client client_ = daemon_.OpenClient("default", GetParam());
  Client operator_ = daemon_.OpenClient("default", PQC_PATH_ADMIN);
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0})));
  Sequence sequence_ = Must(cache_.CreateSequence());
  const Layer layer_{kTokens + 100, 1};
};

// Types that the library does not know are the sidecar's (tests/client/python/plugins_test.py).
TEST_P(RefusalsTest, OfIndexesByTheirType) {
  const auto made = client_.MakeIndex("pq", {{"bits", 6}});
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  EXPECT_EQ(made->kind, PQC_INDEX_PQ);
  EXPECT_EQ(made->bits, 6u);
  Expect(client_.MakeIndex("hnsw", {{"m", 16}}).status(), PQC_INVALID_ARGUMENT, "type");
  Expect(client_.MakeIndex("pq", {{"m", 16}}).status(), PQC_INVALID_ARGUMENT, "parameters[m]");
  Index plugin;
  plugin.kind = PQC_INDEX_PLUGIN;  // without the words of MakeIndex
  Expect(Select({.index = plugin, .ratio = 0.5}), PQC_INVALID_ARGUMENT, "selection.index.reserved");
  Index graph = Must(Index::Make("graph"));
  graph.reserved[PQC_INDEX_LAYOUT + 2] = 64;  // a degree that Make refuses
  Expect(Select({.index = graph, .ratio = 0.5}), PQC_INVALID_ARGUMENT, "selection.index.reserved");
  graph = Must(Index::Make("graph"));
  Expect(Select({.index = graph, .ratio = 0.5}), PQC_FAILED_PRECONDITION, "selection.index");
  Index clusters = Must(Index::Make("clusters"));
  clusters.reserved[PQC_INDEX_LAYOUT + 2] = 7;  // tokens that Make refuses
  Expect(Select({.index = clusters, .ratio = 0.5}), PQC_INVALID_ARGUMENT,
         "selection.index.reserved");
  Index words = Index::Pq(2, 6);
  words.reserved[PQC_INDEX_LAYOUT + 1] = 1;
  Expect(Select({.index = words, .ratio = 0.5}), PQC_UNIMPLEMENTED, "selection.index.reserved");
}

TEST_P(RefusalsTest, OfReads) {
  const Index flat = Index::Flat();
  Expect(Select({.index = flat, .ratio = 1.5}), PQC_INVALID_ARGUMENT, "selection.ratio");
  Expect(Select({.index = flat, .token_count = kTokens + 1}), PQC_INVALID_ARGUMENT,
         "selection.token_count");
  Expect(Select({.index = flat, .window_tokens = uint64_t{1} << 40}), PQC_INVALID_ARGUMENT,
         "selection.window_tokens");
  Expect(Select({.index = flat, .excluded = {{10, 20}, {15, 30}}, .ratio = 0.5}),
         PQC_INVALID_ARGUMENT, "selection.excluded[1]");
  Expect(Select({.index = Index::Pq(2, 6), .ratio = 0.5}), PQC_FAILED_PRECONDITION,
         "selection.index");
  Expect(Select({.index = Index::Pq(3, 6), .ratio = 0.5}), PQC_INVALID_ARGUMENT,
         "selection.index.subspaces");
  Expect(Select({.index = Index::Pq(2, 9), .ratio = 0.5}), PQC_INVALID_ARGUMENT,
         "selection.index.bits");
  Index unknown = Index::Pq(2, 6);
  unknown.reserved[PQC_INDEX_LAYOUT] = 3;
  Expect(Select({.index = unknown, .ratio = 0.5}), PQC_INVALID_ARGUMENT, "selection.index.layout");
  Index flat_with_layout = flat;
  flat_with_layout.reserved[PQC_INDEX_LAYOUT] = PQC_SUBSPACES_CONTIGUOUS;
  Expect(Select({.index = flat_with_layout, .ratio = 0.5}), PQC_INVALID_ARGUMENT,
         "selection.index.layout");
  Expect(Select({.index = flat, .ratio = 0.5}, kTokens + 50), PQC_OUT_OF_RANGE,
         "query.query_position");
  Expect(Select({.index = flat, .ratio = 0.5}, uint64_t{1} << 40), PQC_INVALID_ARGUMENT,
         "query.query_position");
  const std::vector<float> nan(Layer::kQueryHeads * Layer::kKeyDim, std::nanf(""));
  const Query not_finite{.layer = 0,
                         .query_position = kTokens - 1,
                         .queries = Tensor(nan, {1, Layer::kQueryHeads, Layer::kKeyDim})};
  Expect(sequence_.TopK(not_finite, {.index = flat, .ratio = 0.5}).status(), PQC_INVALID_ARGUMENT,
         "query.queries");
  Expect(sequence_.Score(QueryAt(kTokens - 1), Index::Pq(2, 6), {0, 4}).status(),
         PQC_FAILED_PRECONDITION, "index");
  Expect(sequence_.Score(QueryAt(kTokens - 1), Index::Pq(3, 6), {0, 4}).status(),
         PQC_INVALID_ARGUMENT, "index.subspaces");
  Expect(sequence_.Score(QueryAt(kTokens - 1), flat, {0, kTokens + 1}).status(), PQC_OUT_OF_RANGE,
         "tokens");
  const std::vector<uint32_t> beyond = {1, 2, 1, kTokens}, descending = {2, 1, 1, 2};
  Expect(sequence_.Attend(QueryAt(kTokens - 1), beyond, 2).status(), PQC_OUT_OF_RANGE,
         "positions[3]");
  Expect(sequence_.Attend(QueryAt(kTokens - 1), descending, 2).status(), PQC_INVALID_ARGUMENT,
         "positions[1]");
  std::vector<float> rows(2 * 2 * (Layer::kKeyDim + Layer::kValueDim));
  const auto out = std::as_writable_bytes(std::span(rows));
  Expect(sequence_.FetchTokens(0, beyond, 2, PQC_ROW, out), PQC_OUT_OF_RANGE, "positions[3]");
  Expect(sequence_.FetchBlocks(0, {kTokens - 1, kTokens + 1}, PQC_ROW, out), PQC_OUT_OF_RANGE,
         "tokens");
}

// A batch of more than 256 items takes several RPCs, and an error names the item of the batch.
TEST_P(RefusalsTest, OfLargeBatches) {
  if (GetParam() != PQC_PATH_ONLY_REMOTE) return;  // the local path makes no RPC
  constexpr uint32_t kItems = 300, kGone = 280;
  std::vector<Sequence> sequences;
  std::vector<StepItem> items;
  std::vector<float> queries, output(size_t{kItems} * Layer::kQueryHeads * Layer::kValueDim),
      lse(size_t{kItems} * Layer::kQueryHeads);
  for (uint32_t i = 0; i < kItems; ++i) sequences.push_back(Must(sequence_.Fork()));
  for (Sequence& sequence : sequences) {
    items.push_back({&sequence, kTokens});
    const auto* numbers = static_cast<const float*>(layer_.queries().c().ptr);
    queries.insert(queries.end(), numbers, numbers + Layer::kQueryHeads * Layer::kKeyDim);
  }
  const Tensor packed(queries, {kItems, Layer::kQueryHeads, Layer::kKeyDim});
  const Selection flat{.index = Index::Flat(), .sink_tokens = 4, .window_tokens = 16, .ratio = 0.5};
  const std::vector<pqc_token_range> ranges(kItems, {0, 8});
  Step step = Must(client_.BeginStep(items, &flat));
  ASSERT_TRUE(step.TopK(0, packed).ok());
  const std::string gone = std::to_string(sequences[kGone].id());
  Must(operator_.AdminJson("Evict", R"({"sequence_id": ")" + gone + R"("})"));
  const std::string field = "items[" + std::to_string(kGone) + "]";
  for (const Status& status : {step.TopK(0, packed).status(), step.Attend(0, packed, output, lse),
                               step.AttendRange(0, packed, ranges, output, lse)}) {
    EXPECT_EQ(status.code(), PQC_NOT_FOUND) << status.ToString();
    EXPECT_TRUE(status.field().starts_with(field)) << status.field();
  }
}

TEST_P(RefusalsTest, OfRowsAndIndexes) {
  const auto ingest = [&](uint64_t first, const Tensor& keys) {
    return sequence_.Ingest(0, first, keys, layer_.values(0, 10));
  };
  Expect(ingest(kTokens + 1, layer_.keys(0, 10)), PQC_INVALID_ARGUMENT, "first_position");
  const std::vector<float> nan(10 * 2 * Layer::kKeyDim, std::nanf(""));
  const Tensor bad(nan, {10, 2, Layer::kKeyDim});
  Expect(ingest(kTokens, bad), PQC_INVALID_ARGUMENT, "keys");
  const LayerRows good[] = {{0, layer_.keys(0, 10), layer_.values(0, 10)}};
  const LayerRows twice[] = {good[0], good[0]};
  const LayerRows spoilt[] = {{0, bad, layer_.values(0, 10)}};
  Expect(sequence_.Append(kTokens + 1, good).status(), PQC_INVALID_ARGUMENT, "first_position");
  Expect(sequence_.Append(kTokens, twice).status(), PQC_INVALID_ARGUMENT, "layers[1].layer");
  Expect(sequence_.Append(kTokens, spoilt).status(), PQC_INVALID_ARGUMENT, "layers[0].keys");
  Expect(sequence_.BuildIndex({.index = Index::Pq(3, 6)}), PQC_INVALID_ARGUMENT,
         "options.index.subspaces");
  Index unknown = Index::Pq(2, 6);
  unknown.reserved[PQC_INDEX_LAYOUT] = 3;
  Expect(sequence_.BuildIndex({.index = unknown}), PQC_INVALID_ARGUMENT, "options.index.layout");
  Expect(sequence_.BuildIndex({.index = Index::Flat()}), PQC_INVALID_ARGUMENT, "options.index");
  Expect(sequence_.BuildIndex({.iterations = 1001}), PQC_INVALID_ARGUMENT, "options.iterations");
}

TEST_P(RefusalsTest, OfQuerySamples) {
  const std::vector<uint64_t> positions = {0, 7, kTokens - 1};
  std::vector<float> numbers(positions.size() * Layer::kQueryHeads * Layer::kKeyDim, 0.5f);
  const auto add = [&](uint32_t layer, const std::vector<uint64_t>& at) {
    const QuerySamples samples{
        layer, at, Tensor(numbers.data(), PQC_F32, {3, Layer::kQueryHeads, Layer::kKeyDim})};
    return sequence_.AddQuerySamples({&samples, 1});
  };
  Expect(sequence_.BuildIndex({.index = Index::Pq(2, 6, PQC_SUBSPACES_WEIGHTED)}),
         PQC_FAILED_PRECONDITION, "options.index");
  Expect(add(9, positions), PQC_INVALID_ARGUMENT, "samples[0].layer");
  Expect(add(0, {0, 7, 7}), PQC_INVALID_ARGUMENT, "samples[0].positions");
  Expect(add(0, {}), PQC_INVALID_ARGUMENT, "samples[0].position_count");
  Expect(add(0, {0, 7}), PQC_INVALID_ARGUMENT, "samples[0].queries.shape");
  Expect(add(0, {0, 7, kTokens}), PQC_INVALID_ARGUMENT, "samples.positions");
  Expect(add(0, {0, 7, uint64_t{1} << 40}), PQC_INVALID_ARGUMENT, "samples.positions[2]");
  Expect(sequence_.AddQuerySamples({}), PQC_INVALID_ARGUMENT, "samples");
  numbers[5] = std::nanf("");
  Expect(add(0, positions), PQC_INVALID_ARGUMENT, "samples.queries");
  numbers[5] = 0;
  EXPECT_TRUE(add(0, positions).ok());
  EXPECT_TRUE(sequence_.BuildIndex({.index = Index::Pq(2, 6, PQC_SUBSPACES_WEIGHTED)}).ok());
}

TEST_P(RefusalsTest, OfSequencesAndCaches) {
  Expect(sequence_.Fork(kTokens + 1).status(), PQC_OUT_OF_RANGE, "token_count");
  Expect(sequence_.Truncate(kTokens + 1), PQC_INVALID_ARGUMENT, "token_count");
  Expect(sequence_.Pin(uint64_t{1} << 60), PQC_INVALID_ARGUMENT, "ttl_ms");
  Expect(cache_.CreateSequence({.live_index = LiveIndex{.index = Index::Pq(2, 9)}}).status(),
         PQC_INVALID_ARGUMENT, "options.index.bits");
  Expect(cache_.CreateSequence({.group_key = "key"}).status(), PQC_INVALID_ARGUMENT,
         "options.group_key");
  CacheSpec spec = SpecOf("other", {0});
  spec.groups[0].key_dim = 36;
  Expect(client_.OpenCache(spec).status(), PQC_INVALID_ARGUMENT, "spec.groups[0].key_dim");
  spec = SpecOf("other", {0});
  spec.rank_group = "group";
  Expect(client_.OpenCache(spec).status(), PQC_INVALID_ARGUMENT, "spec.rank_count");
  spec = SpecOf("cache", {0});
  spec.model_fingerprint = "another";
  Expect(client_.OpenCache(spec).status(), PQC_FAILED_PRECONDITION, "spec.model_fingerprint");
  Expect(client_.AdminJson("DescribeSequence", "{\"sequence_id\": \"999\"}").status(),
         PQC_NOT_FOUND, "sequence_id");
  Expect(client_.AdminJson("Nothing").status(), PQC_INVALID_ARGUMENT, "method");
  Expect(client_.AdminJson("Stats", "{").status(), PQC_INVALID_ARGUMENT, "request");
  ASSERT_TRUE(sequence_.Suspend().ok());
  Expect(Select({.ratio = 0.5}), PQC_FAILED_PRECONDITION, "sequence");
  const LayerRows rows[] = {{0, layer_.keys(0, 1), layer_.values(0, 1)}};
  Expect(sequence_.Append(kTokens, rows).status(), PQC_FAILED_PRECONDITION, "sequence");
}

TEST_P(RefusalsTest, SayWhenToRepeat) {
  CacheSpec spec = SpecOf("tiny", {0});
  spec.capacity_bytes = 1 << 20;
  Cache tiny = Must(client_.OpenCache(spec));
  Sequence sequence = Must(tiny.CreateSequence());
  const Layer large(4000, 2);
  Expect(sequence.Ingest(0, 0, large.keys(0, 4000), large.values(0, 4000)), PQC_RESOURCE_EXHAUSTED,
         "", kRetryMemory);
  ASSERT_TRUE(operator_.AdminJson("Drain").ok());
  Expect(cache_.CreateSequence().status(), PQC_UNAVAILABLE, "", kRetryMemory);
}

TEST_P(RefusalsTest, AreOfTheThreadsLastCall) {
  Expect(Select({.index = Index::Flat(), .ratio = 1.5}), PQC_INVALID_ARGUMENT, "selection.ratio");
  EXPECT_STREQ(pqc_last_error_field(), "selection.ratio");
  EXPECT_EQ(pqc_last_error_retry_ms(), 0u);
  ASSERT_TRUE(operator_.AdminJson("Drain").ok());
  EXPECT_STREQ(pqc_last_error_field(), "");
  EXPECT_FALSE(cache_.CreateSequence().ok());
  EXPECT_EQ(pqc_last_error_retry_ms(), kRetryMemory);
  std::thread([] {
    EXPECT_STREQ(pqc_last_error_field(), "");
    EXPECT_EQ(pqc_last_error_retry_ms(), 0u);
  }).join();
  EXPECT_EQ(pqc_last_error_retry_ms(), kRetryMemory);
  ASSERT_TRUE(sequence_.Describe().ok());
  EXPECT_STREQ(pqc_last_error(), "");
  EXPECT_STREQ(pqc_last_error_field(), "");
  EXPECT_EQ(pqc_last_error_retry_ms(), 0u);
}

// A lost session does not come back; a sidecar that is not running may start.
// A remote session ends with its stream. A local one waits for a sidecar that resumes it.
// A sidecar that has ended may start again, so its clients' calls are worth repeating, until
// another sidecar answers that it does not have the session.
class LostSessionTest : public ::testing::TestWithParam<pqc_path_choice> {};

TEST_P(LostSessionTest, IsFinalOnceAnotherSidecarAnswers) {
  constexpr uint32_t kTimeoutMs = 1500;  // the first calls need some of it on a busy machine
  const auto daemon = std::make_unique<Daemon>();
  daemon->OpenClient();  // waits until it serves
  const auto open = [&] {
    return Client::Open(
        {.endpoint = daemon->endpoint(), .timeout_ms = kTimeoutMs, .path = GetParam()});
  };
  Client client = Must(open());
  Cache cache = Must(client.OpenCache(SpecOf("cache", {0})));
  Sequence sequence = Must(cache.CreateSequence());
  daemon->process().Signal(SIGTERM);
  daemon->process().Wait();
  Expect(sequence.Describe().status(), PQC_UNAVAILABLE, "", kRetryMemory);
  Expect(open().status(), PQC_UNAVAILABLE, "", kRetryMemory);

  const Daemon next({"--listen", daemon->endpoint()});
  Status status;
  for (int i = 0; i < kMostAttempts; ++i) {
    status = sequence.Describe().status();
    if (status.code() != PQC_UNAVAILABLE || status.retry_ms() == kNoRetry) break;
  }
  Expect(status, PQC_UNAVAILABLE, "", kNoRetry);
}

std::string PathName(const ::testing::TestParamInfo<pqc_path_choice>& path) {
  return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
}

INSTANTIATE_TEST_SUITE_P(Paths, RefusalsTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL), PathName);
INSTANTIATE_TEST_SUITE_P(Paths, LostSessionTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL), PathName);

}  // namespace
}  // namespace pqcached
