// What a real pqcached refuses, seen through the client: the documented status, with the field in
// the message, and nothing changed. And its end, seen by its clients.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
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

class DaemonErrorsTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  void SetUp() override {
    const Status status =
        sequence_.Ingest(0, 0, layer_.keys(0, kTokens), layer_.values(0, kTokens));
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  // A call failed with this code about this field ("" = none), and its message has `part`.
  static void Expect(const Status& status, pqc_status code, const std::string& field,
                     const std::string& part = "") {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(status.field(), field) << status.ToString();
    EXPECT_TRUE(HasText(status.message(), part)) << status.ToString();
  }

  void ExpectUnchanged() {
    const Result<pqc_sequence_info> info = sequence_.Describe();
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    EXPECT_EQ(info->token_count, kTokens);
  }

  Status Ingest(uint64_t first, const Tensor& keys, const Tensor& values) {
    return sequence_.Ingest(0, first, keys, values);
  }

  Status Select(const Selection& selection, uint64_t query_position = kTokens - 1) {
    return sequence_
        .TopK({.layer = 0, .query_position = query_position, .queries = layer_.queries()},
              selection)
        .status();
  }

  Daemon daemon_;
  Client client_ = daemon_.OpenClient("default", GetParam());
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0})));
  Sequence sequence_ = Must(cache_.CreateSequence());
  const Layer layer_{kTokens + 100, 1};
};

TEST_P(DaemonErrorsTest, GapsAreRefusedAndRepeatsAcknowledged) {
  Expect(Ingest(kTokens + 1, layer_.keys(0, 10), layer_.values(0, 10)), PQC_INVALID_ARGUMENT,
         "first_position");
  EXPECT_TRUE(
      Ingest(kTokens - 10, layer_.keys(kTokens - 10, kTokens), layer_.values(kTokens - 10, kTokens))
          .ok());
  ExpectUnchanged();
}

TEST_P(DaemonErrorsTest, NanAndInfinityAreRefused) {
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    std::vector<float> keys(10 * 2 * Layer::kKeyDim), values(10 * 2 * Layer::kValueDim);
    keys[7 * 2 * Layer::kKeyDim + 5] = bad;
    Expect(Ingest(kTokens, {keys, {10, 2, Layer::kKeyDim}}, {values, {10, 2, Layer::kValueDim}}),
           PQC_INVALID_ARGUMENT, "keys");
    keys[7 * 2 * Layer::kKeyDim + 5] = 0;
    values[3] = bad;
    Expect(Ingest(kTokens, {keys, {10, 2, Layer::kKeyDim}}, {values, {10, 2, Layer::kValueDim}}),
           PQC_INVALID_ARGUMENT, "values");
  }
  ExpectUnchanged();
}

TEST_P(DaemonErrorsTest, ShapesMustBeTheCaches) {
  const std::vector<float> some(10 * 2 * 64);
  const Tensor keys = layer_.keys(0, 10), values = layer_.values(0, 10);
  Expect(Ingest(kTokens, {some, {10, 2, 32}}, values), PQC_INVALID_ARGUMENT, "keys.shape[2]");
  Expect(Ingest(kTokens, {some, {10, 1, 64}}, values), PQC_INVALID_ARGUMENT, "keys.shape[1]");
  Expect(Ingest(kTokens, {some, {1, 1, 1, 1, 1}}, values), PQC_INVALID_ARGUMENT, "keys.ndim");
  Expect(Ingest(kTokens, {some, {20, 64}}, values), PQC_INVALID_ARGUMENT, "keys.ndim");
  Expect(Ingest(kTokens, {some, {0, 2, 64}}, values), PQC_INVALID_ARGUMENT, "keys.shape[0]");
  Expect(Ingest(kTokens, keys, {some, {9, 2, 32}}), PQC_INVALID_ARGUMENT, "values.shape[0]");
  Expect(Ingest(kTokens, keys, {nullptr, PQC_F32, {10, 2, 32}}), PQC_INVALID_ARGUMENT,
         "values.ptr");
  Expect(sequence_.Ingest(1, kTokens, keys, values), PQC_INVALID_ARGUMENT, "layer");
  Expect(Ingest(uint64_t{1} << 40, keys, values), PQC_INVALID_ARGUMENT, "first_position");
  const Tensor queries(some, {Layer::kQueryHeads, 32});
  Expect(sequence_.TopK({.layer = 0, .query_position = 9, .queries = queries}, {}).status(),
         PQC_INVALID_ARGUMENT, "query.queries.shape[1]");
  const std::vector<float> many(9 * Layer::kQueryHeads * Layer::kKeyDim);
  const Tensor nine(many, {9, Layer::kQueryHeads, Layer::kKeyDim});
  Expect(sequence_.TopK({.layer = 0, .query_position = 9, .queries = nine}, {}).status(),
         PQC_INVALID_ARGUMENT, "query.queries.shape[0]");
  ExpectUnchanged();
}

TEST_P(DaemonErrorsTest, SelectionsHaveLimits) {
  const Index flat = Index::Flat();
  Expect(Select({.index = flat, .ratio = 0.0}), PQC_INVALID_ARGUMENT, "selection.ratio");
  Expect(Select({.index = flat, .ratio = 1.5}), PQC_INVALID_ARGUMENT, "selection.ratio");
  for (const double factor : {0.5, 8.5, -1.0}) {
    Expect(Select({.index = flat, .ratio = 0.5, .rerank_factor = factor}), PQC_INVALID_ARGUMENT,
           "selection.rerank_factor");
  }
  Expect(Select({.index = flat, .sink_tokens = 4, .window_tokens = 8, .token_count = 12}),
         PQC_INVALID_ARGUMENT, "selection.token_count");
  Expect(Select({.index = flat, .token_count = kTokens + 1}), PQC_INVALID_ARGUMENT,
         "selection.token_count");
  Expect(Select({.index = flat, .excluded = {{10, 20}, {15, 30}}, .ratio = 0.5}),
         PQC_INVALID_ARGUMENT, "selection.excluded[1]");
  Expect(
      Select({.index = flat, .excluded = std::vector<pqc_token_range>(17, {1, 2}), .ratio = 0.5}),
      PQC_INVALID_ARGUMENT, "selection.excluded_count");
  Expect(Select({.index = Index::Pq(2, 6), .ratio = 0.5}), PQC_FAILED_PRECONDITION,
         "selection.index");
  Expect(Select({.index = Index::Pq(3, 6), .ratio = 0.5}), PQC_INVALID_ARGUMENT,
         "selection.index.subspaces");
}

// Any number may be in an enum of a caller in C.
template <class Enum>
void SetRaw(uint32_t number, Enum* field) {
  std::memcpy(field, &number, sizeof(number));
}

TEST_P(DaemonErrorsTest, UnknownNumbersInEnumsAreRefused) {
  const Tensor queries = layer_.queries();
  pqc_query query = PQC_INIT(pqc_query);
  query.query_position = kTokens - 1;
  query.queries = queries.c();
  pqc_positions out = PQC_INIT(pqc_positions);
  const auto select = [&](const pqc_selection& selection) {
    return Status(pqc_topk(sequence_.get(), &query, &selection, &out));
  };
  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.ratio = 0.5;
  SetRaw(5, &selection.group_rule);
  Expect(select(selection), PQC_INVALID_ARGUMENT, "selection.group_rule");
  SetRaw(0, &selection.group_rule);
  SetRaw(2, &selection.budget);  // attention mass, which is 0
  Expect(select(selection), PQC_INVALID_ARGUMENT, "selection.attention_mass");
  SetRaw(77, &selection.budget);
  Expect(select(selection), PQC_INVALID_ARGUMENT, "selection.budget");
  SetRaw(0, &selection.budget);
  SetRaw(9, &selection.index.kind);
  Expect(select(selection), PQC_INVALID_ARGUMENT, "selection.index.kind");
  SetRaw(2, &selection.index.kind);
  SetRaw(0, &query.queries.dtype);
  Expect(select(selection), PQC_INVALID_ARGUMENT, "query.queries.dtype");
  SetRaw(3, &query.queries.dtype);
  SetRaw(1, &query.queries.device);
  Expect(select(selection), PQC_UNIMPLEMENTED, "query.queries.device");
  SetRaw(0, &query.queries.device);
  query.queries.reserved[1] = 1;
  Expect(select(selection), PQC_UNIMPLEMENTED, "query.queries.reserved");
  query.queries.reserved[1] = 0;
  EXPECT_TRUE(select(selection).ok()) << pqc_last_error();
}

TEST_P(DaemonErrorsTest, PositionsMustBeStoredAndAscending) {
  const Query query = {.layer = 0, .query_position = kTokens - 1, .queries = layer_.queries()};
  const std::vector<uint32_t> beyond = {1, 2, 1, kTokens};
  for (const std::vector<uint32_t>& positions : {std::vector<uint32_t>{1, 1, 1, 2}, {2, 1, 1, 2}}) {
    Expect(sequence_.Attend(query, positions, 2).status(), PQC_INVALID_ARGUMENT, "positions[1]");
  }
  // The C++ wrapper refuses this itself, so its text is never rewritten.
  const Status too_few = sequence_.Attend(query, beyond, 3).status();
  EXPECT_EQ(too_few.code(), PQC_INVALID_ARGUMENT) << too_few.ToString();
  EXPECT_EQ(too_few.field(), "positions") << too_few.ToString();
  Expect(sequence_.Attend(query, beyond, 2).status(), PQC_OUT_OF_RANGE, "positions[3]");
  std::vector<float> rows(2 * 2 * (Layer::kKeyDim + Layer::kValueDim));
  const auto out = std::as_writable_bytes(std::span(rows));
  Expect(sequence_.FetchTokens(0, beyond, 2, PQC_ROW, out), PQC_OUT_OF_RANGE, "positions[3]");
  Expect(sequence_.FetchBlocks(0, {kTokens - 1, kTokens + 1}, PQC_ROW, out), PQC_OUT_OF_RANGE,
         "tokens");
  Expect(sequence_.FetchBlocks(0, {0, 3}, PQC_ROW, std::as_writable_bytes(std::span(rows))),
         PQC_OUT_OF_RANGE, "out_bytes");
}

TEST_P(DaemonErrorsTest, RowsAfterTheBuildLeaveNoGap) {
  const Status built = sequence_.BuildIndex({.iterations = 2});
  ASSERT_TRUE(built.ok()) << built.ToString();
  Expect(Ingest(kTokens + 1, layer_.keys(0, 5), layer_.values(0, 5)), PQC_INVALID_ARGUMENT,
         "first_position");
  const LayerRows gap[] = {{0, layer_.keys(0, 5), layer_.values(0, 5)}};
  Expect(sequence_.Append(kTokens + 1, gap).status(), PQC_INVALID_ARGUMENT, "first_position");
  const LayerRows twice[] = {gap[0], gap[0]};
  Expect(sequence_.Append(kTokens, twice).status(), PQC_INVALID_ARGUMENT, "layers[1].layer");
  ExpectUnchanged();
}

TEST_P(DaemonErrorsTest, CachesOfOneNameMustAgree) {
  CacheSpec spec = SpecOf("cache", {0});
  EXPECT_TRUE(client_.OpenCache(spec).ok());
  spec.model_fingerprint = "another model";
  Expect(client_.OpenCache(spec).status(), PQC_FAILED_PRECONDITION, "spec.model_fingerprint");
  spec = SpecOf("cache", {0}, PQC_F16);
  Expect(client_.OpenCache(spec).status(), PQC_FAILED_PRECONDITION, "spec.groups[0].dtype");
}

TEST_P(DaemonErrorsTest, CachesHaveLimits) {
  CacheSpec spec = SpecOf("limits", {0});
  spec.groups[0].key_dim = 36;
  Expect(client_.OpenCache(spec).status(), PQC_INVALID_ARGUMENT, "spec.groups[0].key_dim");
  spec = SpecOf("limits", {0});
  SetRaw(6, &spec.groups[0].kind);
  Expect(client_.OpenCache(spec).status(), PQC_INVALID_ARGUMENT, "spec.groups[0].kind");
  spec.groups[0].kind = PQC_LAYERS_WINDOW;
  Expect(client_.OpenCache(spec).status(), PQC_INVALID_ARGUMENT, "spec.groups[0].window_tokens");
  for (const pqc_layer_kind kind : {PQC_LAYERS_SELECTED, PQC_LAYERS_FULL, PQC_LAYERS_NONE}) {
    spec.groups[0].kind = kind;
    spec.groups[0].window_tokens = 8;
    Expect(client_.OpenCache(spec).status(), PQC_INVALID_ARGUMENT, "spec.groups[0].window_tokens");
  }
  spec = SpecOf("limits", {0});
  spec.capacity_bytes = uint64_t{1} << 40;
  Expect(client_.OpenCache(spec).status(), PQC_RESOURCE_EXHAUSTED, "spec.capacity_bytes");
  spec = SpecOf("", {0});
  Expect(client_.OpenCache(spec).status(), PQC_INVALID_ARGUMENT, "spec.name");
}

TEST_P(DaemonErrorsTest, AFullPoolTellsTheShortfallAndKeepsWhatIsThere) {
  CacheSpec spec = SpecOf("tiny", {0});
  spec.capacity_bytes = 1 << 20;
  Cache tiny = Must(client_.OpenCache(spec));
  Sequence sequence = Must(tiny.CreateSequence());
  ASSERT_TRUE(sequence.Ingest(0, 0, layer_.keys(0, 200), layer_.values(0, 200)).ok());
  const Layer large(4000, 2);
  Expect(sequence.Ingest(0, 200, large.keys(0, 4000), large.values(0, 4000)),
         PQC_RESOURCE_EXHAUSTED, "", "bytes");
  EXPECT_EQ(Must(sequence.Describe()).token_count, 200u);
}

TEST_P(DaemonErrorsTest, AppendsLargerThanAMessageAreRefused) {
  Daemon daemon({"--max-message-bytes", "1mib"});
  Client client = daemon.OpenClient("default", GetParam());
  Cache cache = Must(client.OpenCache(SpecOf("cache", {0})));
  Sequence sequence = Must(cache.CreateSequence());
  const Layer layer(3000, 3);
  ASSERT_TRUE(sequence.Ingest(0, 0, layer.keys(0, 3000), layer.values(0, 3000)).ok());
  ASSERT_TRUE(sequence.BuildIndex({.iterations = 1}).ok());
  const LayerRows rows[] = {{0, layer.keys(0, 2000), layer.values(0, 2000)}};
  Expect(sequence.Append(3000, rows).status(), PQC_INVALID_ARGUMENT, "layers", "max_message_bytes");
  // Reads of the same size are cut, and joined.
  std::vector<float> all(3000 * 2 * (Layer::kKeyDim + Layer::kValueDim));
  const Status fetched =
      sequence.FetchBlocks(0, {0, 3000}, PQC_ROW, std::as_writable_bytes(std::span(all)));
  EXPECT_TRUE(fetched.ok()) << fetched.ToString();
  EXPECT_EQ(all[0], layer.key(0, 0)[0]);
}

TEST_P(DaemonErrorsTest, SequencesBelongToTheirTenantAndSession) {
  const std::string id = std::to_string(sequence_.id());
  {
    Client other = daemon_.OpenClient("default", GetParam());
    Cache cache = Must(other.OpenCache(SpecOf("cache", {0})));
    const Sequence sequence = Must(cache.CreateSequence());
    EXPECT_NE(
        Must(client_.AdminJson("ListSequences")).find("\"" + std::to_string(sequence.id()) + "\""),
        std::string::npos);
  }
  const std::string listed = Must(client_.AdminJson("ListSequences"));
  EXPECT_NE(listed.find("\"" + id + "\""), std::string::npos) << listed;
  ASSERT_TRUE(sequence_.Drop().ok());
  Expect(client_.AdminJson("DescribeSequence", "{\"sequence_id\": \"" + id + "\"}").status(),
         PQC_NOT_FOUND, "sequence_id", id);
}

TEST_P(DaemonErrorsTest, ADaemonThatStopsOrDiesIsUnavailableForItsOldClients) {
  for (const int signal : {SIGTERM, SIGKILL}) {
    Daemon daemon;
    daemon.AwaitServing();
    Client client =
        Must(Client::Open({.endpoint = daemon.endpoint(), .timeout_ms = 1500, .path = GetParam()}));
    Cache cache = Must(client.OpenCache(SpecOf("cache", {0})));
    Sequence sequence = Must(cache.CreateSequence());
    daemon.process().Signal(signal);
    daemon.process().Wait();
    const auto begin = std::chrono::steady_clock::now();
    Expect(sequence.Describe().status(), PQC_UNAVAILABLE, "");
    Expect(sequence.Truncate(0), PQC_UNAVAILABLE, "");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonErrorsTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
