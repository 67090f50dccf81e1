// Whatever comes in, a call that fails names what is wrong and leaves the store as it was, byte for
// byte.

#include <functional>

#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::Dump;
using testing::Floats;
using ::testing::HasSubstr;
using testing::kTenant;
using testing::LayerModel;
using testing::Pq;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

constexpr uint32_t kTokens = 300;
const IndexDescriptor kIndex = Pq(2, 4);

class BadInput : public ::testing::Test {
 protected:
  BadInput() {
    sequence_.Ingest(kTokens);
    keys_ = sequence_.RandomKeys(model(), 3);
    values_ = sequence_.RandomValues(model(), 3);
    query_ = sequence_.RandomQuery(model());
  }

  Store& store() { return sequence_.store(); }
  uint64_t id() const { return sequence_.id(); }
  LayerModel& model() { return sequence_.layer(1); }

  // `call` fails with `code`, about `field`, and nothing has changed.
  void ExpectRefused(const std::function<absl::Status()>& call, StatusCode code,
                     const std::string& field, const std::string& text = "") {
    const std::string before = Dump(store());
    const absl::Status status = call();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldOf(status), field) << status;
    EXPECT_THAT(TextOf(status), HasSubstr(text));
    EXPECT_TRUE(Dump(store()) == before) << "the store changed: " << status;
  }

  // One chunk as a transaction of its own.
  absl::Status Ingest(uint64_t first_position, const LayerRows& rows) {
    auto ingest = store().BeginIngest(kTenant, id());
    if (!ingest.ok()) return ingest.status();
    if (absl::Status status = (*ingest)->Write(first_position, rows); !status.ok()) {
      EXPECT_EQ((*ingest)->Commit().status(), status);  // a failed chunk fails the whole ingest
      return status;
    }
    return (*ingest)->Commit().status();
  }

  void ExpectIngestRefused(uint64_t first_position, const LayerRows& rows, StatusCode code,
                           const std::string& field, const std::string& text = "") {
    ExpectRefused([&] { return Ingest(first_position, rows); }, code, field, text);
  }

  LayerRows GoodRows() const {
    return {.layer = 1, .keys = keys_.view(), .values = values_.view()};
  }
  Query GoodQuery() const {
    return {.layer = 1, .query_position = kTokens - 1, .queries = query_.view()};
  }

  TestSequence sequence_;
  Floats keys_;
  Floats values_;
  Floats query_;
};

TEST_F(BadInput, ShapeOfRows) {
  for (const std::vector<uint64_t>& shape :
       std::vector<std::vector<uint64_t>>{{},
                                          {3, 2},
                                          {3, 2, 32, 1},
                                          {3, 1, 32},
                                          {3, 2, 31},
                                          {3, 2, 40},
                                          {0, 2, 32},
                                          {uint64_t{1} << 40, 2, 32},
                                          {~uint64_t{0}, 2, 32},
                                          {4, 2, 32}}) {  // more than the data holds
    LayerRows rows = GoodRows();
    rows.keys.shape = shape;
    ExpectIngestRefused(kTokens, rows, StatusCode::kInvalidArgument, "rows.keys.shape");
  }
  LayerRows rows = GoodRows();
  rows.values.shape = {2, 2, 40};
  ExpectIngestRefused(kTokens, rows, StatusCode::kInvalidArgument, "rows.values.shape");
}

TEST_F(BadInput, StridesOfRows) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  for (const std::vector<int64_t>& strides :
       std::vector<std::vector<int64_t>>{{64, 32},
                                         {64, 32, 2},
                                         {64, 33, 1},
                                         {65, 32, 1},
                                         {-64, 32, 1},
                                         {64, -32, 1},
                                         {64, 32, -1},
                                         {kMax, 32, 1},
                                         {kMax / 4, kMax / 4, kMax / 4},
                                         {kMin, 32, 1},
                                         {kMax, kMin, 1},
                                         {64, kMax, kMin}}) {
    LayerRows rows = GoodRows();
    rows.keys.strides = strides;
    ExpectIngestRefused(kTokens, rows, StatusCode::kInvalidArgument, "rows.keys.strides");
  }
  LayerRows rows = GoodRows();
  rows.keys.data_bytes -= 1;
  ExpectIngestRefused(kTokens, rows, StatusCode::kInvalidArgument, "rows.keys.shape");
  rows.keys = {};
  ExpectIngestRefused(kTokens, rows, StatusCode::kInvalidArgument, "rows.keys.shape");
}

TEST_F(BadInput, StridesThatStayInsideAreTaken) {
  LayerRows rows = GoodRows();
  rows.keys.strides = {64, 32, 1};
  rows.values.strides = {0, 0, 1};  // one value for all
  rows.keys.shape[0] = 1;
  rows.keys.strides[0] = std::numeric_limits<int64_t>::min();  // never walked
  rows.values.shape[0] = 1;
  EXPECT_TRUE(Ingest(kTokens, rows).ok());
}

TEST_F(BadInput, DtypeAndLayerOfRows) {
  LayerRows rows = GoodRows();
  rows.keys.dtype = static_cast<kernels::DType>(9);
  ExpectIngestRefused(kTokens, rows, StatusCode::kInvalidArgument, "rows.keys.dtype");
  rows = GoodRows();
  rows.values.dtype = static_cast<kernels::DType>(0);
  ExpectIngestRefused(kTokens, rows, StatusCode::kInvalidArgument, "rows.values.dtype");
  for (const uint32_t layer : {0u, 2u, 4u, 1023u, ~0u}) {
    rows = GoodRows();
    rows.layer = layer;
    ExpectIngestRefused(kTokens, rows, StatusCode::kInvalidArgument, "rows.layer",
                        std::to_string(layer));
  }
}

TEST_F(BadInput, NanAndInfinityNameTokenLayerAndPart) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (Floats* part : {&keys_, &values_}) {
      float& element = part->data[part->data.size() - 7];  // of the last token, second head
      const float good = element;
      element = bad;
      ExpectIngestRefused(kTokens, GoodRows(), StatusCode::kInvalidArgument,
                          part == &keys_ ? "rows.keys" : "rows.values", "layer 1: token 302");
      ExpectRefused(
          [&] {
            const LayerRows rows[] = {GoodRows(), GoodRows()};
            LayerRows both[] = {rows[0], rows[1]};
            both[1].layer = 3;
            return store().Append(kTenant, id(), kTokens, both).status();
          },
          StatusCode::kInvalidArgument, part == &keys_ ? "rows[0].keys" : "rows[0].values",
          "token 302");
      element = good;
    }
  }
}

TEST_F(BadInput, OfSeveralBadRowsTheFirstTokenIsNamed) {
  keys_ = sequence_.RandomKeys(model(), 300);
  values_ = sequence_.RandomValues(model(), 300);
  const auto spoil = [](Floats& part, uint64_t token, uint64_t head) {
    part.data[(token * part.shape[1] + head) * part.shape[2] + 5] = std::nanf("");
  };
  spoil(keys_, 299, 0);
  ExpectIngestRefused(kTokens, GoodRows(), StatusCode::kInvalidArgument, "rows.keys");
  spoil(keys_, 131, 0);
  spoil(values_, 130, 1);
  ExpectIngestRefused(kTokens, GoodRows(), StatusCode::kInvalidArgument, "rows.values");
  spoil(keys_, 7, 1);
  ExpectIngestRefused(kTokens, GoodRows(), StatusCode::kInvalidArgument, "rows.keys");
}

TEST_F(BadInput, FiniteNumbersBeyondTheStoredDtypeCountAsInfinite) {
  CacheSpec spec = SmallSpec();
  spec.groups[0].dtype = kernels::DType::kF16;
  TestSequence sequence(spec);
  Floats keys = sequence.RandomKeys(sequence.layer(1), 2);
  const Floats values = sequence.RandomValues(sequence.layer(1), 2);
  keys.data.back() = 1e6f;
  auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
  ASSERT_TRUE(ingest.ok());
  const absl::Status status =
      (*ingest)->Write(0, {.layer = 1, .keys = keys.view(), .values = values.view()});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(status), "rows.keys");
}

TEST_F(BadInput, PositionsWithAGapOrPartlyStoredOrTooFar) {
  ExpectIngestRefused(kTokens + 1, GoodRows(), StatusCode::kInvalidArgument, "first_position",
                      "a gap");
  ExpectIngestRefused(kTokens - 1, GoodRows(), StatusCode::kInvalidArgument, "first_position",
                      "partly stored");
  ExpectIngestRefused(kMaxSequenceTokens, GoodRows(), StatusCode::kOutOfRange, "first_position");
  ExpectIngestRefused(~uint64_t{0}, GoodRows(), StatusCode::kOutOfRange, "first_position");
}

TEST_F(BadInput, ARepeatIsAcknowledgedWithoutAChange) {
  const std::string before = Dump(store());
  EXPECT_TRUE(Ingest(kTokens - 3, GoodRows()).ok());
  EXPECT_TRUE(Ingest(0, GoodRows()).ok());
  LayerRows rows[] = {GoodRows(), GoodRows()};
  rows[1].layer = 3;
  const auto count = store().Append(kTenant, id(), 10, rows);
  ASSERT_TRUE(count.ok()) << count.status();
  EXPECT_EQ(*count, kTokens);
  EXPECT_TRUE(Dump(store()) == before);
}

TEST_F(BadInput, AnIngestThatIsNotCommittedHappenedNot) {
  const std::string before = Dump(store());
  {
    auto ingest = store().BeginIngest(kTenant, id());
    ASSERT_TRUE(ingest.ok());
    const Floats keys = sequence_.RandomKeys(model(), 1000);
    const Floats values = sequence_.RandomValues(model(), 1000);
    ASSERT_TRUE(
        (*ingest)->Write(kTokens, {.layer = 1, .keys = keys.view(), .values = values.view()}).ok());
  }
  EXPECT_TRUE(Dump(store()) == before);
  sequence_.Ingest(10);  // and the sequence goes on
  sequence_.ExpectRowsMatch();
}

TEST_F(BadInput, SecondWriterIsAborted) {
  auto ingest = store().BeginIngest(kTenant, id());
  ASSERT_TRUE(ingest.ok());
  const LayerRows rows[] = {GoodRows()};
  ExpectRefused([&] { return store().BeginIngest(kTenant, id()).status(); }, StatusCode::kAborted,
                "sequence_id", "another writer");
  ExpectRefused([&] { return store().Append(kTenant, id(), kTokens, rows).status(); },
                StatusCode::kAborted, "sequence_id", "another writer");
  ExpectRefused([&] { return store().BuildIndex(kTenant, id(), {.index = kIndex}, {}); },
                StatusCode::kAborted, "sequence_id", "another writer");
  ExpectRefused([&] { return store().TruncateSequence(kTenant, id(), kTokens).status(); },
                StatusCode::kAborted, "sequence_id", "another writer");
  ASSERT_TRUE((*ingest)->Commit().ok());  // ends the writing
  EXPECT_EQ((*ingest)->Commit().status().code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(store().TruncateSequence(kTenant, id(), kTokens).ok());
}

TEST_F(BadInput, ADropNeedsNoTurnAndTheWriterFindsOut) {
  auto ingest = store().BeginIngest(kTenant, id());
  ASSERT_TRUE(ingest.ok());
  EXPECT_TRUE(store().DropSequence(kTenant, id()).ok());
  EXPECT_EQ((*ingest)->Commit().status().code(), StatusCode::kNotFound);
  EXPECT_EQ(store().DropSequence(kTenant, id()).code(), StatusCode::kNotFound);
}

TEST_F(BadInput, IngestAfterThePrefillWasClosed) {
  sequence_.Build(kIndex);
  ExpectIngestRefused(kTokens + 1, GoodRows(), StatusCode::kInvalidArgument, "first_position",
                      "a gap");
  EXPECT_TRUE(Ingest(0, GoodRows()).ok());  // a repeat still is none
}

TEST_F(BadInput, LayersOfAnAppend) {
  const auto append = [&](std::vector<LayerRows> rows) {
    return [this, rows] { return store().Append(kTenant, id(), kTokens, rows).status(); };
  };
  LayerRows other = GoodRows();
  other.layer = 3;
  ExpectRefused(append({}), StatusCode::kInvalidArgument, "rows", "layer 1 is missing");
  ExpectRefused(append({GoodRows()}), StatusCode::kInvalidArgument, "rows", "layer 3 is missing");
  ExpectRefused(append({GoodRows(), GoodRows()}), StatusCode::kInvalidArgument, "rows[1].layer");
  LayerRows shorter = other;
  shorter.keys.shape[0] = 2;
  shorter.values.shape[0] = 2;
  ExpectRefused(append({GoodRows(), shorter}), StatusCode::kInvalidArgument, "rows[1].keys.shape",
                "layer 3 has 2 tokens");
}

TEST_F(BadInput, Truncations) {
  const auto truncate = [&](uint64_t count) {
    return [this, count] { return store().TruncateSequence(kTenant, id(), count).status(); };
  };
  ExpectRefused(truncate(kTokens + 1), StatusCode::kInvalidArgument, "token_count");
  ExpectRefused(truncate(~uint64_t{0}), StatusCode::kInvalidArgument, "token_count");
}

TEST_F(BadInput, UnknownForeignAndDroppedIds) {
  const std::string other = "other";
  ExpectRefused([&] { return store().CreateSequence(kTenant, 999, {.session = "s"}).status(); },
                StatusCode::kNotFound, "cache_id", "999");
  ExpectRefused(
      [&] {
        return store().CreateSequence(other, sequence_.cache_id(), {.session = "s"}).status();
      },
      StatusCode::kNotFound, "cache_id");
  ExpectRefused([&] { return store().ListSequences(other, sequence_.cache_id()).status(); },
                StatusCode::kNotFound, "cache_id");
  for (const auto& [of, named] :
       std::vector<std::pair<std::string, uint64_t>>{{other, id()}, {kTenant, 12345}}) {
    const std::string& tenant = of;  // as variables, which every compiler lets lambdas capture
    const uint64_t sequence_id = named;
    const auto expect = [&](const std::function<absl::Status()>& call) {
      ExpectRefused(call, StatusCode::kNotFound, "sequence_id", std::to_string(sequence_id));
    };
    const LayerRows rows[] = {GoodRows()};
    const uint32_t positions[] = {0, 0};
    expect([&] { return store().DropSequence(tenant, sequence_id); });
    expect([&] { return store().TruncateSequence(tenant, sequence_id, 0).status(); });
    expect([&] { return store().BeginIngest(tenant, sequence_id).status(); });
    expect([&] { return store().Append(tenant, sequence_id, 0, rows).status(); });
    expect([&] { return store().ClosePrefill(tenant, sequence_id); });
    expect([&] { return store().BuildIndex(tenant, sequence_id, {.index = kIndex}, {}); });
    expect([&] { return store().TopK(tenant, sequence_id, GoodQuery(), {}).status(); });
    expect([&] { return store().Score(tenant, sequence_id, GoodQuery(), {}, {0, 1}).status(); });
    expect([&] {
      return store().FetchBlocks(tenant, sequence_id, 1, {0, 1}, RowPart::kRow).status();
    });
    expect([&] {
      return store().FetchTokens(tenant, sequence_id, 1, positions, RowPart::kRow).status();
    });
    expect([&] { return store().Attend(tenant, sequence_id, GoodQuery(), {}, false).status(); });
    expect([&] {
      return store().AttendPositions(tenant, sequence_id, GoodQuery(), positions, 1).status();
    });
    expect([&] { return store().DescribeSequence(tenant, sequence_id).status(); });
  }
  ASSERT_TRUE(store().DropSequence(kTenant, id()).ok());
  ExpectRefused([&] { return store().DescribeSequence(kTenant, id()).status(); },
                StatusCode::kNotFound, "sequence_id", std::to_string(id()));
  EXPECT_EQ(store().ListCaches("").front().used_bytes, 0u);
}

TEST_F(BadInput, Selections) {
  sequence_.Build(kIndex);
  const auto expect = [&](const Selection& selection, StatusCode code, const std::string& field) {
    ExpectRefused([&] { return store().TopK(kTenant, id(), GoodQuery(), selection).status(); },
                  code, field);
    ExpectRefused(
        [&] { return store().Attend(kTenant, id(), GoodQuery(), selection, true).status(); }, code,
        field);
  };
  const auto count = [](uint64_t budget) {
    return Selection{.index = kIndex,
                     .sink_tokens = 10,
                     .window_tokens = 20,
                     .budget_kind = BudgetKind::kCount,
                     .budget_count = budget};
  };
  expect(count(0), StatusCode::kInvalidArgument, "selection.token_count");
  expect(count(30), StatusCode::kInvalidArgument, "selection.token_count");  // k = 0
  expect(count(301), StatusCode::kInvalidArgument, "selection.token_count");
  expect(count(~uint64_t{0}), StatusCode::kInvalidArgument, "selection.token_count");
  for (const double ratio : {0.0, -0.5, 1.0001, std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity()}) {
    expect({.index = kIndex, .budget_ratio = ratio}, StatusCode::kInvalidArgument,
           "selection.token_ratio");
  }
  expect({.index = kIndex, .group_rule = static_cast<GroupRule>(7)}, StatusCode::kInvalidArgument,
         "selection.group_rule");
  expect({.index = kIndex, .excluded = {{5, 5}}}, StatusCode::kInvalidArgument,
         "selection.excluded[0]");
  expect({.index = kIndex, .excluded = {{5, 8}, {7, 9}}}, StatusCode::kInvalidArgument,
         "selection.excluded[1]");
  expect({.index = kIndex, .excluded = {{5, ~0u}}}, StatusCode::kInvalidArgument,
         "selection.excluded[0]");
  ExcludedRanges many;
  for (uint32_t i = 0; i < 17; ++i) many.push_back({2 * i, 2 * i + 1});
  expect({.index = kIndex, .excluded = many}, StatusCode::kInvalidArgument, "selection.excluded");
  expect({.index = Pq(4, 8)}, StatusCode::kFailedPrecondition, "selection.index");
  expect({.index = Pq(5, 8)}, StatusCode::kInvalidArgument, "selection.index.pq.subspaces");
  expect({.index = Pq(2, 9)}, StatusCode::kInvalidArgument, "selection.index.pq.bits");
  expect({.index = {.kind = static_cast<IndexKind>(9)}}, StatusCode::kInvalidArgument,
         "selection.index.kind");
}

TEST_F(BadInput, Queries) {
  const auto expect = [&](const Query& query, StatusCode code, const std::string& field) {
    ExpectRefused([&] { return store().TopK(kTenant, id(), query, {}).status(); }, code, field);
    ExpectRefused([&] { return store().Attend(kTenant, id(), query, {}, true).status(); }, code,
                  field);
  };
  Query query = GoodQuery();
  query.layer = 2;
  expect(query, StatusCode::kInvalidArgument, "query.layer");
  query = GoodQuery();
  query.query_position = kTokens;  // its own row is not stored
  expect(query, StatusCode::kOutOfRange, "query.query_position");
  query.query_position = ~uint64_t{0};
  expect(query, StatusCode::kInvalidArgument, "query.query_position");
  query = GoodQuery();
  query.queries.shape = {1, 2, 64};
  expect(query, StatusCode::kInvalidArgument, "query.queries.shape");
  query = GoodQuery();
  query.queries.strides = {0, 0, 5};
  expect(query, StatusCode::kInvalidArgument, "query.queries.strides");
  const Floats two = testing::RandomFloats(sequence_.random(), {2, 4, 32});
  query.queries = two.view();
  query.query_position = kMaxSequenceTokens - 1;  // and the second one behind the end
  expect(query, StatusCode::kInvalidArgument, "query.query_position");
  const Floats nine = testing::RandomFloats(sequence_.random(), {9, 4, 32});
  query.queries = nine.view();
  expect(query, StatusCode::kInvalidArgument, "query.queries.shape");
  query_.data[40] = std::numeric_limits<float>::quiet_NaN();
  expect(GoodQuery(), StatusCode::kInvalidArgument, "query.queries");
}

TEST_F(BadInput, RangesAndPositions) {
  const auto fetch = [&](TokenRange tokens) {
    return [this, tokens] {
      return store().FetchBlocks(kTenant, id(), 1, tokens, RowPart::kKey).status();
    };
  };
  ExpectRefused(fetch({5, 5}), StatusCode::kInvalidArgument, "tokens");
  ExpectRefused(fetch({6, 5}), StatusCode::kInvalidArgument, "tokens");
  ExpectRefused(fetch({0, kTokens + 1}), StatusCode::kOutOfRange, "tokens");
  ExpectRefused(fetch({0, ~uint64_t{0}}), StatusCode::kOutOfRange, "tokens");
  ExpectRefused(
      [&] {
        return store().FetchBlocks(kTenant, id(), 1, {0, 1}, static_cast<RowPart>(7)).status();
      },
      StatusCode::kInvalidArgument, "part");
  ExpectRefused(
      [&] {
        return store().FetchBlocks(kTenant, id(), 2, {0, 1}, RowPart::kKey).status();
      },
      StatusCode::kInvalidArgument, "layer");
  ExpectRefused(
      [&] {
        return store().Score(kTenant, id(), GoodQuery(), {}, {0, kTokens + 1}).status();
      },
      StatusCode::kOutOfRange, "tokens");
  ExpectRefused(
      [&] {
        return store().Score(kTenant, id(), GoodQuery(), kIndex, {0, 1}).status();
      },
      StatusCode::kFailedPrecondition, "index");
  const auto attend = [&](std::vector<uint32_t> positions) {
    return [this, positions] {
      const auto count = static_cast<uint32_t>(positions.size() + 1) / 2;
      return store().AttendPositions(kTenant, id(), GoodQuery(), positions, count).status();
    };
  };
  ExpectRefused(attend({0}), StatusCode::kInvalidArgument, "positions");
  ExpectRefused(attend({0, 300}), StatusCode::kOutOfRange, "positions[1]");
  ExpectRefused(attend({0, 1, 5, 5}), StatusCode::kInvalidArgument, "positions[3]");
  ExpectRefused(attend({1, 0, 5, 6}), StatusCode::kInvalidArgument, "positions[1]");
  const uint32_t beyond[] = {0, kTokens};
  ExpectRefused(
      [&] { return store().FetchTokens(kTenant, id(), 1, beyond, RowPart::kRow).status(); },
      StatusCode::kOutOfRange, "positions[1]");
}

TEST_F(BadInput, FullPoolSaysTheShortfallAndKeepsEverything) {
  CacheSpec spec = SmallSpec("small");
  spec.capacity_bytes = size_t{1} << 20;
  TestSequence sequence(spec);
  sequence.Ingest(500);  // 4 segments of 4 x 64 KiB: all of it
  const std::string before = Dump(sequence.store());
  auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
  ASSERT_TRUE(ingest.ok());
  const Floats keys = sequence.RandomKeys(sequence.layer(1), 200);
  const Floats values = sequence.RandomValues(sequence.layer(1), 200);
  const LayerRows rows{.layer = 1, .keys = keys.view(), .values = values.view()};
  const absl::Status status = (*ingest)->Write(500, rows);
  ingest->reset();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  // Tokens up to 700 need two more segments.
  EXPECT_THAT(TextOf(status), HasSubstr("524288 bytes short"));
  LayerRows both[] = {rows, rows};
  both[1].layer = 3;
  EXPECT_EQ(sequence.store().Append(kTenant, sequence.id(), 500, both).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE(Dump(sequence.store()) == before);
  sequence.ExpectRowsMatch();
  sequence.Append(12);  // what still fits
  sequence.ExpectRowsMatch();
}

TEST_F(BadInput, CacheSpecs) {
  const auto expect = [&](const std::function<void(CacheSpec&)>& spoil, StatusCode code,
                          const std::string& field) {
    CacheSpec spec = SmallSpec("another");
    spec.capacity_bytes = size_t{1} << 20;
    spoil(spec);
    ExpectRefused([&] { return store().OpenCache(kTenant, spec).status(); }, code, field);
  };
  const StatusCode invalid = StatusCode::kInvalidArgument;
  expect([](CacheSpec& s) { s.name.clear(); }, invalid, "name");
  expect([](CacheSpec& s) { s.name.assign(129, 'x'); }, invalid, "name");
  expect([](CacheSpec& s) { s.model_fingerprint.clear(); }, invalid, "model_fingerprint");
  expect([](CacheSpec& s) { s.groups.clear(); }, invalid, "layer_groups");
  expect([](CacheSpec& s) { s.groups[0].layers = {}; }, invalid, "layer_groups[0].layers");
  expect([](CacheSpec& s) { s.groups[0].layers = {3, 1}; }, invalid, "layer_groups[0].layers[1]");
  expect([](CacheSpec& s) { s.groups[0].layers = {1024}; }, invalid, "layer_groups[0].layers[0]");
  expect([](CacheSpec& s) { s.groups.push_back(s.groups[0]); }, invalid,
         "layer_groups[1].layers[0]");
  expect([](CacheSpec& s) { s.groups[0].kv_heads = 0; }, invalid, "layer_groups[0].kv_heads");
  expect([](CacheSpec& s) { s.groups[0].kv_heads = 257; }, invalid, "layer_groups[0].kv_heads");
  expect([](CacheSpec& s) { s.groups[0].query_heads = 0; }, invalid, "layer_groups[0].query_heads");
  expect([](CacheSpec& s) { s.groups[0].query_heads = 5; }, invalid, "layer_groups[0].query_heads");
  expect([](CacheSpec& s) { s.groups[0].query_heads = 1026; }, invalid,
         "layer_groups[0].query_heads");
  expect([](CacheSpec& s) { s.groups[0].query_heads = 130; }, StatusCode::kUnimplemented,
         "layer_groups[0].query_heads");
  expect([](CacheSpec& s) { s.groups[0].key_dim = 24; }, invalid, "layer_groups[0].key_dim");
  expect([](CacheSpec& s) { s.groups[0].key_dim = 36; }, invalid, "layer_groups[0].key_dim");
  expect([](CacheSpec& s) { s.groups[0].key_dim = 264; }, invalid, "layer_groups[0].key_dim");
  expect([](CacheSpec& s) { s.groups[0].value_dim = 0; }, StatusCode::kUnimplemented,
         "layer_groups[0].value_dim");
  expect([](CacheSpec& s) { s.groups[0].value_dim = 33; }, invalid, "layer_groups[0].value_dim");
  expect([](CacheSpec& s) { s.groups[0].dtype = static_cast<kernels::DType>(0); }, invalid,
         "layer_groups[0].dtype");
  expect([](CacheSpec& s) { s.groups[0].softmax_scale = -1; }, invalid,
         "layer_groups[0].softmax_scale");
  expect([](CacheSpec& s) { s.groups[0].softcap = NAN; }, invalid, "layer_groups[0].softcap");
  expect([](CacheSpec& s) { s.groups[0].kind = LayerKind{6}; }, invalid, "layer_groups[0].kind");
  expect([](CacheSpec& s) { s.groups[0].kind = LayerKind::kNone; }, invalid, "layer_groups");
  expect([](CacheSpec& s) { s.default_index = Pq(16, 0); }, invalid, "default_index.pq.bits");
  expect([](CacheSpec& s) { s.groups[0].key_dim = 40, s.default_index = Pq(16, 4); }, invalid,
         "default_index.pq.subspaces");
  expect([](CacheSpec& s) { s.capacity_bytes = size_t{2} << 30; }, StatusCode::kResourceExhausted,
         "capacity_bytes");
}

TEST_F(BadInput, AnOpenCacheIsJoinedOnlyWithItsOwnFingerprintAndShape) {
  const auto expect = [&](const std::function<void(CacheSpec&)>& change, const std::string& field) {
    CacheSpec spec = SmallSpec();
    change(spec);
    ExpectRefused([&] { return store().OpenCache(kTenant, spec).status(); },
                  StatusCode::kFailedPrecondition, field);
  };
  expect([](CacheSpec& s) { s.model_fingerprint = "other"; }, "model_fingerprint");
  expect([](CacheSpec& s) { s.groups[0].layers = {1}; }, "layer_groups[0].layers");
  expect([](CacheSpec& s) { s.groups[0].key_dim = 64; }, "layer_groups[0].key_dim");
  expect([](CacheSpec& s) { s.groups[0].dtype = kernels::DType::kF16; }, "layer_groups[0].dtype");
  expect([](CacheSpec& s) { s.groups[0].softmax_scale = 3; }, "layer_groups[0].softmax_scale");
  expect([](CacheSpec& s) { s.groups[0].rope.theta = 1e4; }, "layer_groups[0].rope");
  expect([](CacheSpec& s) { s.groups[0].kind = LayerKind::kFull; }, "layer_groups[0].kind");
  CacheSpec other_default = SmallSpec();
  other_default.default_index = Pq(4, 4);
  const auto joined = store().OpenCache(kTenant, other_default);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_FALSE(joined->is_new);
  EXPECT_EQ(joined->cache_id, sequence_.cache_id());
  const auto foreign = store().OpenCache("other", SmallSpec());
  ASSERT_TRUE(foreign.ok());
  EXPECT_NE(foreign->cache_id, sequence_.cache_id());
}

TEST(BadOptions, AreNamed) {
  const auto expect = [](const std::function<void(StoreOptions&)>& spoil,
                         const std::string& field) {
    StoreOptions options = SmallOptions();
    spoil(options);
    const absl::Status status = Store::Create(options).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(FieldOf(status), field) << status;
  };
  expect([](StoreOptions& o) { o.max_pool_bytes = 0; }, "max_pool_bytes");
  expect([](StoreOptions& o) { o.max_caches = 0; }, "max_caches");
  expect([](StoreOptions& o) { o.max_sequences = 0; }, "max_sequences");
  expect([](StoreOptions& o) { o.segment_tokens = 100; }, "segment_tokens");
  expect([](StoreOptions& o) { o.tail_tokens = 0; }, "tail_tokens");
  expect([](StoreOptions& o) { o.tail_tokens = kMaxSegmentTokens + 128; }, "tail_tokens");
  expect([](StoreOptions& o) { o.codebook_tokens = 0; }, "codebook_tokens");
  expect([](StoreOptions& o) { o.threads = 100000; }, "threads");
}

TEST(Limits, OfCachesAndSequencesAreKept) {
  StoreOptions options = SmallOptions();
  options.max_caches = 2;
  options.max_sequences = 2;
  TestSequence sequence(SmallSpec(), options);
  ASSERT_TRUE(sequence.store().OpenCache(kTenant, SmallSpec("b")).ok());
  EXPECT_EQ(sequence.store().OpenCache(kTenant, SmallSpec("c")).status().code(),
            StatusCode::kResourceExhausted);
  sequence.NewSequence();
  EXPECT_EQ(sequence.store()
                .CreateSequence(kTenant, sequence.cache_id(), {.session = "s"})
                .status()
                .code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(sequence.store().DropSession("session"), 2u);
  EXPECT_EQ(sequence.store().DropSession("session"), 0u);
  EXPECT_TRUE(sequence.store().CreateSequence(kTenant, sequence.cache_id(), {.session = "s"}).ok());
}

}  // namespace
}  // namespace pqcached::kvstore
