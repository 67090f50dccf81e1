// Rows that a call repeats, compared with the stored ones.
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvstore/refusal.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::Dump;
using testing::Floats;
using ::testing::HasSubstr;
using testing::kTenant;
using testing::LayerModel;
using testing::SmallOptions;
using testing::TestSequence;

constexpr uint32_t kTokens = 300;

class ComparedRepeats : public ::testing::Test {
 protected:
  static StoreOptions Comparing() {
    StoreOptions options = SmallOptions();
    options.compare_repeats = true;
    return options;
  }
  ComparedRepeats() : sequence_(testing::SmallSpec(), Comparing()) {
    sequence_.Ingest(kTokens);
    keys_ = sequence_.RandomKeys(model(), 3);
    values_ = sequence_.RandomValues(model(), 3);
    // The stored rows of tokens in three segments, over several tiles.
    stored_keys_ = PartOf(model().keys, model().group.key_dim);
    stored_values_ = PartOf(model().values, model().group.value_dim);
  }

  static constexpr uint32_t kBegin = 20, kCount = 250;

  Floats PartOf(const std::vector<float>& stored, uint32_t dim) {
    const size_t token = size_t{model().group.kv_heads} * dim;
    const auto begin = stored.begin() + static_cast<ptrdiff_t>(kBegin * token);
    return {.shape = {kCount, model().group.kv_heads, dim},
            .data = {begin, begin + static_cast<ptrdiff_t>(kCount * token)}};
  }
  LayerRows Stored() const {
    return {.layer = 1, .keys = stored_keys_.view(), .values = stored_values_.view()};
  }
  // Changes an element.
  static float& At(Floats& floats, uint32_t token, uint32_t head, uint32_t element) {
    return floats.data[(size_t{token} * floats.shape[1] + head) * floats.shape[2] + element];
  }

  Store& store() { return sequence_.store(); }
  uint64_t id() const { return sequence_.id(); }
  LayerModel& model() { return sequence_.layer(1); }
  LayerRows GoodRows() const {
    return {.layer = 1, .keys = keys_.view(), .values = values_.view()};
  }
  // `call` fails with `code`, about `field`, and nothing has changed.
  void ExpectRefused(const std::function<absl::Status()>& call, StatusCode code,
                     const std::string& field, const std::string& text) {
    const std::string before = Dump(store());
    const absl::Status status = call();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldOf(status), field) << status;
    EXPECT_THAT(TextOf(status), HasSubstr(text));
    EXPECT_TRUE(Dump(store()) == before) << "the store changed: " << status;
  }
  absl::Status Ingest(uint64_t first_position, const LayerRows& rows) {
    auto ingest = store().BeginIngest(kTenant, id());
    if (!ingest.ok()) return ingest.status();
    if (absl::Status status = (*ingest)->Write(first_position, rows); !status.ok()) return status;
    return (*ingest)->Commit().status();
  }
  void ExpectIngestRefused(uint64_t first_position, const LayerRows& rows, StatusCode code,
                           const std::string& field, const std::string& text) {
    ExpectRefused([&] { return Ingest(first_position, rows); }, code, field, text);
  }

  TestSequence sequence_;
  Floats keys_, values_;
  Floats stored_keys_, stored_values_;
};

TEST_F(ComparedRepeats, EqualRowsAreAcknowledged) {
  const std::string before = Dump(store());
  EXPECT_TRUE(Ingest(kBegin, Stored()).ok());
  EXPECT_TRUE(Dump(store()) == before);
}

TEST_F(ComparedRepeats, TheFirstDifferenceIsNamed) {
  At(stored_values_, 249, 1, 3) += 1;
  ExpectIngestRefused(kBegin, Stored(), StatusCode::kInvalidArgument, "rows.values",
                      "in layer 1 at position 269, kv head 1, element 3 of the value");
  At(stored_keys_, 200, 0, 31) = -77;
  ExpectIngestRefused(kBegin, Stored(), StatusCode::kInvalidArgument, "rows.keys",
                      "in layer 1 at position 220, kv head 0, element 31 of the key");
  At(stored_values_, 107, 1, 0) = 0.5f;  // the last of the first segment
  ExpectIngestRefused(kBegin, Stored(), StatusCode::kInvalidArgument, "rows.values", "0.5; ");
  At(stored_keys_, 107, 1, 1) = 0.25f;  // keys precede values
  ExpectIngestRefused(kBegin, Stored(), StatusCode::kInvalidArgument, "rows.keys",
                      "position 127, kv head 1, element 1 of the key");
  At(stored_keys_, 0, 0, 0) = std::numeric_limits<float>::infinity();
  ExpectIngestRefused(kBegin, Stored(), StatusCode::kInvalidArgument, "rows.keys", "token 20 has");
}

TEST_F(ComparedRepeats, AnAppendNamesTheLayerToo) {
  LayerRows rows[] = {GoodRows(), GoodRows()};
  rows[1].layer = 3;
  ExpectRefused([&] { return store().Append(kTenant, id(), 10, rows).status(); },
                StatusCode::kInvalidArgument, "rows[0].keys", "in layer 1 at position 10");
  const uint64_t end = kTokens;
  ASSERT_TRUE(store().Append(kTenant, id(), end, rows).ok());
  ASSERT_TRUE(store().Append(kTenant, id(), end, rows).ok());
  At(keys_, 2, 1, 4) += 1;
  ExpectRefused([&] { return store().Append(kTenant, id(), end, rows).status(); },
                StatusCode::kInvalidArgument, "rows[0].keys", "position 302, kv head 1, element 4");
}

}  // namespace
}  // namespace pqcached::kvstore
