// The store against a plain model, over random operations.

#include <cstdlib>

#include "tests/kvstore/brute_force.h"
#include "tests/sanitizers.h"

namespace pqcached::kvstore {
namespace {

using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::Pq;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;
using testing::ToFloats;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kFewSteps = 10'000;
#else
constexpr int kFewSteps = 80'000;
#endif
// tests/long.sh models goes on for much longer.
const int kSteps = std::getenv("PQCACHED_FULL_TESTS") != nullptr ? 8'000'000 : kFewSteps;
constexpr uint32_t kMaxTokens = 900;
const IndexDescriptor kIndexes[] = {Pq(2, 4), Pq(1, 6), Pq(4, 4)};

class RandomOperations {
 public:
  RandomOperations(const CacheSpec& spec, uint64_t seed) : sequence_(spec, SmallOptions(), seed) {}

  void Run(int steps) {
    for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      Step();
    }
    ::testing::Test::RecordProperty("model_test_operations", steps);
    sequence_.ExpectRowsMatch();
    ExpectAccounting();
  }

 private:
  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(sequence_.random()() % below); }

  void Step() {
    const uint32_t dice = Random(1000);
    if (dice < 200) return Grow();
    if (dice < 300) return Truncate();
    if (dice < 320) return Build();
    if (dice < 330) return Restart();
    if (dice < 600) return FetchBlocks();
    if (dice < 850) return FetchTokens();
    if (dice < 990) return TopK();
    ExpectAccounting();
  }

  void Grow() {
    if (sequence_.tokens() > kMaxTokens) return Restart();
    const uint32_t tokens = 1 + Random(Random(4) == 0 ? 200 : 8);
    if (indexes_ > 0 || Random(3) == 0) {
      sequence_.Append(tokens);
      // Append opens tails of its own size, so that the open segment begins where the model cannot
      // easily know.
    } else {
      sequence_.Ingest(tokens);
    }
  }

  void Truncate() {
    const auto info = sequence_.store().DescribeSequence(kTenant, sequence_.id());
    ASSERT_TRUE(info.ok());
    ASSERT_EQ(info->token_count, sequence_.tokens());
    uint32_t begin = sequence_.tokens();
    if (!info->segments.empty() && info->segments.back().state == SegmentState::kOpen) {
      begin = static_cast<uint32_t>(info->segments.back().tokens.begin);
    }
    sequence_.Truncate(begin + Random(sequence_.tokens() - begin + 1));
  }

  void Build() {
    if (sequence_.tokens() == 0 || indexes_ == std::size(kIndexes)) return;
    sequence_.Build(kIndexes[indexes_++], 1 + Random(3), Random(20));
  }

  void Restart() {
    ASSERT_TRUE(sequence_.store().DropSequence(kTenant, sequence_.id()).ok());
    ASSERT_EQ(sequence_.store().ListCaches("").front().used_bytes, 0u);
    sequence_.NewSequence();
    indexes_ = 0;
  }

  LayerModel& AnyLayer() {
    return sequence_.layers()[Random(static_cast<uint32_t>(sequence_.layers().size()))];
  }

  void FetchBlocks() {
    if (sequence_.tokens() == 0) return;
    const LayerModel& model = AnyLayer();
    const uint32_t begin = Random(model.tokens);
    const uint32_t end = begin + 1 + Random(std::min(model.tokens - begin, 20u));
    const auto rows =
        sequence_.store().FetchBlocks(kTenant, sequence_.id(), model.group.layers.front(),
                                      {begin, std::min(end, model.tokens)}, RowPart::kRow);
    ASSERT_TRUE(rows.ok()) << rows.status();
    ASSERT_EQ(ToFloats(*rows), model.Rows(begin, std::min(end, model.tokens)));
  }

  void FetchTokens() {
    if (sequence_.tokens() == 0) return;
    const LayerModel& model = AnyLayer();
    const uint32_t per_head = 1 + Random(6);
    std::vector<uint32_t> positions(per_head * model.group.kv_heads);
    for (uint32_t& position : positions) position = Random(model.tokens);  // in any order
    const auto keys = sequence_.store().FetchTokens(
        kTenant, sequence_.id(), model.group.layers.front(), positions, RowPart::kKey);
    const auto values = sequence_.store().FetchTokens(
        kTenant, sequence_.id(), model.group.layers.front(), positions, RowPart::kValue);
    ASSERT_TRUE(keys.ok() && values.ok()) << keys.status() << values.status();
    std::vector<float> wanted_keys;
    std::vector<float> wanted_values;
    for (size_t i = 0; i < positions.size(); ++i) {
      const auto kv_head = static_cast<uint32_t>(i / per_head);
      const float* key = model.key(positions[i], kv_head);
      const float* value = model.value(positions[i], kv_head);
      wanted_keys.insert(wanted_keys.end(), key, key + model.group.key_dim);
      wanted_values.insert(wanted_values.end(), value, value + model.group.value_dim);
    }
    ASSERT_EQ(ToFloats(*keys), wanted_keys);
    ASSERT_EQ(ToFloats(*values), wanted_values);
  }

  // Values of tokens come from Score, whose logits other tests hold against decoded codes.
  void TopK() {
    if (sequence_.tokens() == 0) return;
    const LayerModel& model = AnyLayer();
    Selection selection{.index = {},
                        .group_rule = GroupRule::kMeanLogit,
                        .sink_tokens = Random(40),
                        .window_tokens = Random(40),
                        .budget_ratio = 0.3};
    if (indexes_ > 0 && Random(4) > 0) selection.index = kIndexes[Random(indexes_)];
    const Floats query = sequence_.RandomQuery(model);
    const Query asked{.layer = model.group.layers.front(),
                      .query_position = model.tokens - 1,
                      .queries = query.view()};
    const auto selected = sequence_.store().TopK(kTenant, sequence_.id(), asked, selection);
    const auto scores =
        sequence_.store().Score(kTenant, sequence_.id(), asked, selection.index, {0, model.tokens});
    ASSERT_TRUE(selected.ok() && scores.ok()) << selected.status() << scores.status();
    if (selected->count == 0) return;
    std::vector<uint32_t> candidates;
    for (uint32_t token = selection.sink_tokens; token + selection.window_tokens < model.tokens;
         ++token) {
      candidates.push_back(token);
    }
    const uint32_t group = model.group.group_size();
    for (uint32_t kv_head = 0; kv_head < model.group.kv_heads; ++kv_head) {
      std::vector<double> values;
      for (const uint32_t token : candidates) {
        double sum = 0;
        for (uint32_t g = 0; g < group; ++g) {
          sum += scores->logits[size_t{kv_head * group + g} * model.tokens + token];
        }
        values.push_back(sum);
      }
      testing::ExpectLargest(
          candidates, values,
          std::span(selected->positions).subspan(kv_head * selected->count, selected->count));
    }
  }

  void ExpectAccounting() {
    const auto info = sequence_.store().DescribeSequence(kTenant, sequence_.id());
    ASSERT_TRUE(info.ok());
    const CacheInfo cache = sequence_.store().ListCaches("").front();
    ASSERT_EQ(info->used_bytes, cache.used_bytes);
    ASSERT_EQ(cache.used_bytes + cache.free_bytes, cache.capacity_bytes);
    size_t row_bytes = 0;
    for (const LayerModel& model : sequence_.layers()) {
      row_bytes += size_t{model.tokens} * model.group.kv_heads * model.group.row_bytes();
    }
    ASSERT_EQ(info->row_bytes, row_bytes);
    ASSERT_EQ(info->indexes.size(), indexes_);
    uint64_t position = 0;
    for (const SegmentInfo& segment : info->segments) {
      ASSERT_EQ(segment.tokens.begin, position);
      position = segment.tokens.end;
    }
    ASSERT_EQ(position, sequence_.tokens());
  }

  TestSequence sequence_;
  uint32_t indexes_ = 0;
};

TEST(StoreModel, RandomOperationsAgreeWithAPlainModel) {
  RandomOperations(SmallSpec(), 11).Run(kSteps);
}

TEST(StoreModel, RandomOperationsAgreeWithAPlainModelOverTwoLayerGroups) {
  CacheSpec spec = SmallSpec();
  spec.groups[0].dtype = kernels::DType::kF16;
  spec.groups.push_back({.kind = LayerKind::kNone, .layers = {0, 5}});
  spec.groups.push_back({.kind = LayerKind::kSelected,
                         .layers = {2},
                         .kv_heads = 1,
                         .query_heads = 3,
                         .key_dim = 64,
                         .value_dim = 32,
                         .dtype = kernels::DType::kBf16});
  RandomOperations(spec, 12).Run(kSteps / 4);
}

}  // namespace
}  // namespace pqcached::kvstore
