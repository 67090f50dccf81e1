// Layers whose rows are values, beside layers with keys: the engine has their keys.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kvstore/fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::Floats;
using ::testing::HasSubstr;
using testing::kTenant;
using testing::LayerModel;
using testing::Pq;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

CacheSpec SpecWithValues(kernels::DType dtype = kernels::DType::kBf16) {
  CacheSpec spec = SmallSpec();
  spec.groups.push_back({.kind = LayerKind::kValues,
                         .layers = {0, 2},
                         .kv_heads = 3,
                         .query_heads = 6,
                         .key_dim = 0,
                         .value_dim = 48,
                         .dtype = dtype});
  return spec;
}

Query LogitsOf(const Floats& logits) {
  return {.layer = 2, .query_position = 299, .queries = logits.view(), .has_logits = true};
}

TEST(Values, AreStoredAsOtherRowsAre) {
  for (const kernels::DType dtype :
       {kernels::DType::kF16, kernels::DType::kBf16, kernels::DType::kF32}) {
    TestSequence sequence(SpecWithValues(dtype));
    std::mt19937_64 random(1);
    sequence.Ingest(300);
    for (int i = 0; i < 40; ++i) {
      const auto tokens = static_cast<uint32_t>(1 + random() % 150);
      if (i == 20) sequence.Build(Pq(2, 4));
      if (random() % 4 == 0) {
        sequence.Truncate(sequence.tokens() - std::min(sequence.tokens() - 1, tokens));
      } else if (random() % 2 == 0) {
        sequence.Append(tokens);
      } else {
        sequence.Ingest(tokens);
      }
      sequence.ExpectRowsMatch();
    }
    const auto info = sequence.store().DescribeSequence(kTenant, sequence.id());
    ASSERT_TRUE(info.ok()) << info.status();
    const size_t value_bytes = 2 * 3 * 48 * kernels::DTypeBytes(dtype);
    EXPECT_EQ(info->row_bytes, sequence.tokens() * (2 * 2 * 72 * 4 + value_bytes));
  }
}

TEST(Values, AreWeightedByGivenLogits) {
  TestSequence sequence(SpecWithValues(kernels::DType::kF16));
  sequence.Ingest(300);
  const LayerModel& model = sequence.layer(2);
  std::mt19937_64 random(7);
  Floats logits = testing::RandomFloats(random, {2, 6, 4});
  logits.data[1] = -std::numeric_limits<float>::infinity();
  const std::vector<uint32_t> positions = {0, 127, 128, 299, 5, 6, 7, 256, 1, 2, 3, 4};
  const auto attention =
      sequence.store().AttendPositions(kTenant, sequence.id(), LogitsOf(logits), positions, 4);
  ASSERT_TRUE(attention.ok()) << attention.status();
  for (uint32_t row = 0; row < 12; ++row) {
    const uint32_t kv_head = row % 6 / 2;
    double sum = 0;
    std::vector<double> output(48);
    for (uint32_t i = 0; i < 4; ++i) {
      const double weight = std::exp(double{logits.data[row * 4 + i]});
      sum += weight;
      for (uint32_t j = 0; j < 48; ++j) {
        output[j] += weight * double{model.value(positions[kv_head * 4 + i], kv_head)[j]};
      }
    }
    EXPECT_NEAR(attention->lse[row], std::log(sum), 5e-5);
    for (uint32_t j = 0; j < 48; ++j) {
      EXPECT_NEAR(attention->output[row * 48 + j], output[j] / sum, 1e-4);
    }
  }
}

TEST(Values, AreAllThatIsRead) {
  TestSequence sequence(SpecWithValues());
  sequence.Ingest(300);
  Store& store = sequence.store();
  const auto row = store.FetchBlocks(kTenant, sequence.id(), 2, {10, 200}, RowPart::kRow);
  const auto value = store.FetchBlocks(kTenant, sequence.id(), 2, {10, 200}, RowPart::kValue);
  ASSERT_TRUE(row.ok() && value.ok()) << row.status() << value.status();
  EXPECT_TRUE(row->data == value->data);
  EXPECT_EQ(row->dim, 48u);
  const auto refused = [](const absl::Status& status, const char* field) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.message(), HasSubstr(field));
    EXPECT_THAT(status.message(), HasSubstr("layer 2 stores values only"));
  };
  const std::vector<uint32_t> positions = {1, 2, 3};
  std::mt19937_64 random(2);
  const Floats queries = testing::RandomFloats(random, {1, 6, 64});
  const Query query{.layer = 2, .query_position = 299, .queries = queries.view()};
  const Selection selection{.budget_kind = BudgetKind::kCount, .budget_count = 5};
  refused(store.FetchBlocks(kTenant, sequence.id(), 2, {10, 200}, RowPart::kKey).status(), "part");
  refused(store.FetchTokens(kTenant, sequence.id(), 2, positions, RowPart::kKey).status(), "part");
  refused(store.TopK(kTenant, sequence.id(), query, selection).status(), "query.layer");
  refused(store.Attend(kTenant, sequence.id(), query, selection, false).status(), "query.layer");
  refused(store.Score(kTenant, sequence.id(), query, {}, {0, 9}).status(), "query.layer");
  refused(store.AttendPositions(kTenant, sequence.id(), query, positions, 1).status(),
          "query.layer");
  refused(store.AttendRange(kTenant, sequence.id(), query, {0, 9}, {}).status(), "query.layer");
}

TEST(Values, ComeWithoutKeys) {
  TestSequence sequence(SpecWithValues());
  sequence.Ingest(300);
  std::mt19937_64 random(2);
  const Floats values = testing::RandomFloats(random, {1, 3, 48});
  const auto write = [&](const LayerRows& rows) {
    auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
    EXPECT_TRUE(ingest.ok()) << ingest.status();
    return (*ingest)->Write(300, rows);
  };
  EXPECT_TRUE(write({.layer = 2, .keys = {}, .values = values.view()}).ok());
  const absl::Status keys = write({.layer = 2, .keys = values.view(), .values = values.view()});
  EXPECT_EQ(keys.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(keys.message(), HasSubstr("rows.keys: must be absent: layer 2 stores values only"));
  Floats bad = values;
  bad.data[50] = std::numeric_limits<float>::quiet_NaN();
  const absl::Status not_finite = write({.layer = 2, .keys = {}, .values = bad.view()});
  EXPECT_EQ(not_finite.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(not_finite.message(), HasSubstr("rows.values"));
  // A layer with keys needs them.
  const Floats other = testing::RandomFloats(random, {1, 2, 40});
  const absl::Status missing = write({.layer = 1, .keys = {}, .values = other.view()});
  EXPECT_THAT(missing.message(), HasSubstr("rows.keys.shape"));
  sequence.ExpectRowsMatch();
}

TEST(Values, HaveNoKeyDim) {
  const auto store = Store::Create(SmallOptions());
  ASSERT_TRUE(store.ok()) << store.status();
  CacheSpec spec = SpecWithValues();
  spec.groups[1].key_dim = 64;
  const auto with_keys = (*store)->OpenCache(kTenant, spec);
  EXPECT_EQ(with_keys.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(with_keys.status().message(), HasSubstr("layer_groups[1].key_dim: 64, must be 0"));
  spec.groups[1] = SmallSpec().groups[0];
  spec.groups[1].layers = {0};
  spec.groups[1].key_dim = 0;
  const auto without = (*store)->OpenCache(kTenant, spec);
  EXPECT_THAT(without.status().message(), HasSubstr("layer_groups[1].key_dim"));
}

TEST(Values, AreFoundAgainAfterARestart) {
  testing::MemoryKeeper keeper;
  StoreOptions options = SmallOptions();
  options.keeper = &keeper;
  FetchedBytes before;
  uint64_t id = 0;
  {
    TestSequence sequence(SpecWithValues(), options);
    sequence.Ingest(300);
    sequence.Append(9);
    id = sequence.id();
    before = sequence.store().FetchBlocks(kTenant, id, 2, {0, 309}, RowPart::kRow)->data;
  }
  const auto next = Store::Create(options);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ((*next)->Recovery().dropped_records, 0u);
  const auto after = (*next)->FetchBlocks(kTenant, id, 2, {0, 309}, RowPart::kRow);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_TRUE(after->data == before);
}

}  // namespace
}  // namespace pqcached::kvstore
