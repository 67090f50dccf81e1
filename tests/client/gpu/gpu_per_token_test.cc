// Steps on a GPU whose query tokens have a selection each: what a step of each token alone gives at the item's query
// position, launched and captured. One source for two programs: against the emulation of the device, and the real one.
#include <vector>

#include "gpu/graph.h"
#include "tests/client/gpu/gpu_wrapper_fixture.h"
#include "tests/client/range_case.h"

namespace pqcached {
namespace {

using testing::Expect;
using testing::ExpectAttention;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::RangeCase;
using testing::SpanOf;

constexpr uint32_t kLength = 3;
constexpr uint64_t kStride = 512;
constexpr size_t kQuery = Layer::kQueryHeads * Layer::kKeyDim;

// Positions [lists, kv_heads, kStride] and counts [lists, kv_heads] on the device.
struct Lists {
  explicit Lists(size_t lists)
      : positions(lists * Layer::kKvHeads * kStride), counts(lists * Layer::kKvHeads) {}

  std::vector<uint32_t> Get(size_t list, uint32_t head) const {
    const size_t lane = list * Layer::kKvHeads + head;
    const std::vector<uint32_t> all = positions.Get();
    const auto begin = all.begin() + static_cast<ptrdiff_t>(lane * kStride);
    return {begin, begin + counts.Get()[lane]};
  }

  DeviceArray<uint32_t> positions, counts;
};

class GpuPerTokenTest : public testing::GpuWrapperTest {
 protected:
  Result<Step> Begin(std::span<const StepItem> items) {
    return gpu_->BeginStep(items, chosen_, stream_, 0, PQC_STEP_SELECT_PER_TOKEN);
  }

  // Select and attend of one layer.
  static void Run(Step& step, uint32_t layer, const Tensors& tensors, const Lists& lists) {
    MustBeOk(Gpu::TopK(step, layer, tensors.query(), SpanOf(lists.positions), kStride,
                       SpanOf(lists.counts)));
    MustBeOk(step.Attend(layer, tensors.query(), SpanOf(tensors.output), SpanOf(tensors.lse)));
  }

  // The results of one query token, by a step of its own that is abandoned.
  struct Alone {
    std::vector<std::vector<uint32_t>> positions;  // [kv_heads]
    Attention attention;
  };
  Alone SelectAlone(Sequence& sequence, uint64_t position, uint32_t layer,
                    const std::vector<float>& query) {
    const StepItem items[] = {{&sequence, position, 1}};
    const Tensors tensors(query);
    const Lists lists(1);
    Step step = Must(gpu_->BeginStep(items, chosen_, stream_));
    Run(step, layer, tensors, lists);
    Alone alone;
    alone.attention = tensors.Get(stream_);
    for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
      alone.positions.push_back(lists.Get(0, head));
    }
    return alone;
  }

  static std::vector<float> Slice(const std::vector<float>& all, size_t token, size_t size) {
    const auto begin = all.begin() + static_cast<ptrdiff_t>(token * size);
    return {begin, begin + static_cast<ptrdiff_t>(size)};
  }

  // That the results of each query token are those of the token alone.
  void ExpectAlone(const std::vector<std::vector<Alone>>& right, const Tensors& tensors,
                   const Lists& lists) {
    const Attention found = tensors.Get(stream_);
    for (size_t i = 0; i < right.size(); ++i) {
      for (uint32_t token = 0; token < kLength; ++token) {
        const size_t at = i * kLength + token;
        for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
          ASSERT_EQ(lists.Get(at, head), right[i][token].positions[head]) << i << " " << token;
        }
        ExpectAttention({.output = Slice(found.output, at, testing::kOutput),
                         .lse = Slice(found.lse, at, Layer::kQueryHeads)},
                        right[i][token].attention, 1e-6f);
      }
    }
  }

  const Selection chosen_ = {
      .sink_tokens = testing::kSink, .window_tokens = testing::kWindow, .ratio = 0.2};
};

TEST_F(GpuPerTokenTest, EachTokenSelectsAsAloneLaunchedAndCaptured) {
  const Layer layers[] = {Layer(420, 3), Layer(330, 8)};
  Sequence sequences[] = {Fill(layers[0], 380), Fill(layers[1], 290)};
  const uint64_t ends[] = {380, 290};
  gpu::Graph graph;
  Tensors tensors(std::vector<float>(2 * kLength * kQuery));
  const Lists lists(2 * kLength);
  for (uint32_t round = 0; round < 4; ++round) {
    std::vector<float> queries;
    std::vector<StepItem> items;
    std::vector<std::vector<Alone>> right(2);
    for (uint32_t i = 0; i < 2; ++i) {
      const RangeCase query(kLength, ends[i] + round, 10 * round + i);
      items.push_back({&sequences[i], ends[i] + round, kLength});
      queries.insert(queries.end(), query.queries.begin(), query.queries.end());
      for (uint32_t token = 0; token < kLength; ++token) {
        right[i].push_back(
            SelectAlone(sequences[i], ends[i] + round, 1, Slice(query.queries, token, kQuery)));
      }
      EXPECT_NE(right[i][0].positions, right[i][1].positions) << "the tokens choose differently";
    }
    tensors.queries.Set(queries);
    Step step = Must(Begin(items));
    if (round < 2) {
      Run(step, 1, tensors, lists);
    } else {
      if (round == 2) {
        ASSERT_TRUE(graph.Begin(stream_).ok());
        Run(step, 1, tensors, lists);
        ASSERT_TRUE(graph.End().ok());
      }
      ASSERT_TRUE(graph.Launch(stream_).ok());
    }
    ExpectAlone(right, tensors, lists);
    std::vector<LayerRows> rows = Rows(layers[0], 0, 2 * kLength);
    MustBeOk(step.End(rows, std::vector<uint32_t>{1, 1}));
    if (HasFatalFailure()) return;
  }
}

TEST_F(GpuPerTokenTest, TheFlagChangesNothingForPositionsAndForSingleTokens) {
  const Layer layer(400, 3);
  Sequence sequence = Fill(layer, 380);
  const RangeCase query(kLength, 380, 4);
  const Tensors tensors(query.queries);
  const DeviceArray<int32_t> list(std::vector<int32_t>{9, 7, 350});
  const StepItem items[] = {{&sequence, 380, kLength}};
  {
    Step step = Must(Begin(items));
    MustBeOk(step.AttendPositions(1, tensors.query(), {.positions = SpanOf(list)},
                                  SpanOf(tensors.output), SpanOf(tensors.lse)));
    Attention right;
    for (uint32_t token = 0; token < kLength; ++token) {
      for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
        query.AddTokens(layer, token, head, {7, 9, 350}, &right);
      }
    }
    ExpectAttention(tensors.Get(stream_), right);
  }
  const std::vector<float> first = Slice(query.queries, 0, kQuery);
  const Alone alone = SelectAlone(sequence, 380, 0, first);
  const StepItem single[] = {{&sequence, 380, 1}};
  const Tensors one(first);
  const Lists lists(1);
  Step step = Must(Begin(single));
  Run(step, 0, one, lists);
  ExpectAttention(one.Get(stream_), alone.attention, 1e-6f);
  EXPECT_EQ(lists.Get(0, 1), alone.positions[1]);
}

}  // namespace
}  // namespace pqcached
