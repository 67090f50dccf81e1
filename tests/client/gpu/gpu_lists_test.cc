// Steps on a GPU that attend to rows which no selection has chosen, by the C++ wrapper: several items of several query
// tokens. One source for two programs: against the emulation of the device, and the real one.
#include <limits>
#include <vector>

#include "tests/client/gpu/gpu_wrapper_fixture.h"
#include "tests/client/step/positions_case.h"

namespace pqcached {
namespace {

using testing::Expect;
using testing::ExpectAttention;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::PositionsCase;
using testing::RangeCase;
using testing::SpanOf;

class GpuListsTest : public testing::GpuWrapperTest {};

TEST_F(GpuListsTest, ATailIsNotEstimatedAndMassNotCounted) {
  const Layer layer(400, 3);
  Sequence sequence = Fill(layer, 380);
  const StepItem items[] = {{&sequence, 380, 1}};
  const Selection selection{.window_tokens = 1, .ratio = 0.2, .tail_estimate = true};
  const Status refused = gpu_->BeginStep(items, selection, stream_).status();
  EXPECT_EQ(refused.code(), PQC_UNIMPLEMENTED) << refused.ToString();
  EXPECT_EQ(refused.field(), "options.selection.tail_estimate");
  const Selection by_mass{.window_tokens = 1, .attention_mass = 0.9};
  const Status refused_mass = gpu_->BeginStep(items, by_mass, stream_).status();
  EXPECT_EQ(refused_mass.code(), PQC_UNIMPLEMENTED) << refused_mass.ToString();
  EXPECT_EQ(refused_mass.field(), "options.selection.attention_mass");
}

TEST_F(GpuListsTest, AnyListsGiveTheAttentionOverTheirPositions) {
  const Layer layer(400, 3), other(300, 8);
  Sequence first = Fill(layer, 380), second = Fill(other, 290);
  const StepItem items[] = {{&first, 380, 3}, {&second, 290, 3}};
  using Order = PositionsCase::Order;
  uint32_t seed = 0;
  for (const uint32_t list_count : {1u, Layer::kKvHeads}) {
    for (const Order order : {Order::kAscending, Order::kShuffled, Order::kRepeated}) {
      for (const uint32_t most : {0u, 1u, 17u, 129u, 400u}) {
        const PositionsCase one({{&layer, RangeCase(3, 380, 4)}, {&other, RangeCase(3, 290, 5)}},
                                list_count, most / 2, most, order, ++seed);
        const DeviceArray<int32_t> positions(one.positions);
        const DeviceArray<uint32_t> lengths(one.lengths);
        const Tensors tensors(one.queries());
        Step step = Must(gpu_->BeginStep(items, stream_));
        for (const bool with_lengths : {false, true}) {
          SCOPED_TRACE(::testing::Message() << list_count << " lists of up to " << most
                                            << ", order " << static_cast<int>(order));
          PositionLists lists{.positions = SpanOf(positions), .list_count = list_count};
          if (with_lengths) lists.lengths = SpanOf(lengths);
          for (uint32_t number = 0; number < kLayers; ++number) {
            MustBeOk(step.AttendPositions(number, tensors.query(), lists, SpanOf(tensors.output),
                                          SpanOf(tensors.lse)));
            ExpectAttention(tensors.Get(stream_), one.Expected());
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// The keys in the cache are those of another layer: the logits take their place.
TEST_F(GpuListsTest, WithLogitsOnlyTheValuesAreRead) {
  const Layer layer(400, 3), other(300, 8), wrong(400, 11);
  const auto fill = [&](const Layer& rows, uint64_t tokens) {
    Sequence sequence = Must(cache_.CreateSequence());
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, 0, wrong.keys(0, tokens), rows.values(0, tokens)));
    }
    return sequence;
  };
  Sequence first = fill(layer, 380), second = fill(other, 290);
  const StepItem items[] = {{&first, 380, 3}, {&second, 290, 3}};
  const auto left_out = [](uint32_t head, uint32_t position) { return (head + position) % 3 == 0; };
  uint32_t seed = 0;
  for (const uint32_t list_count : {1u, Layer::kKvHeads}) {
    for (const uint32_t most : {0u, 1u, 17u, 129u, 400u}) {
      SCOPED_TRACE(::testing::Message() << list_count << " lists of up to " << most);
      const PositionsCase one({{&layer, RangeCase(3, 380, 4)}, {&other, RangeCase(3, 290, 5)}},
                              list_count, most / 2, most, PositionsCase::Order::kAscending, ++seed);
      const DeviceArray<int32_t> positions(one.positions);
      const DeviceArray<float> numbers(one.Logits(left_out));
      const Tensors tensors(one.queries());
      const Tensor logits =
          Tensor(SpanOf(numbers), {tensors.tokens, Layer::kQueryHeads, one.capacity}).OnGpu();
      Step step = Must(gpu_->BeginStep(items, stream_));
      for (uint32_t number = 0; number < kLayers; ++number) {
        MustBeOk(step.AttendPositions(
            number, {},
            {.positions = SpanOf(positions), .list_count = list_count, .logits = &logits},
            SpanOf(tensors.output), SpanOf(tensors.lse)));
        ExpectAttention(tensors.Get(stream_), one.Expected(left_out));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(GpuListsTest, ListsWithLogitsMustAscend) {
  const Layer layer(320, 3);
  Sequence sequence = Fill(layer, 300);
  const Tensors tensors(RangeCase(1, 300, 1).queries);
  const StepItem items[] = {{&sequence, 300, 1}};
  const DeviceArray<float> numbers(std::vector<float>(Layer::kQueryHeads * 3));
  const Tensor logits = Tensor(SpanOf(numbers), {1, Layer::kQueryHeads, 3}).OnGpu();
  const auto run = [&](const std::vector<int32_t>& list) {
    const DeviceArray<int32_t> positions(list);
    Step step = Must(gpu_->BeginStep(items, stream_));
    MustBeOk(step.AttendPositions(1, {}, {.positions = SpanOf(positions), .logits = &logits},
                                  SpanOf(tensors.output), SpanOf(tensors.lse)));
    return step.End(Rows(layer, 300, 301));
  };
  Expect(run({7, 9, 8}), PQC_INVALID_ARGUMENT, "lists.positions[2]", "above the position before");
  Expect(run({7, 7, -1}), PQC_INVALID_ARGUMENT, "lists.positions[1]", "in layer 1");
  Expect(run({7, 9, 300}), PQC_INVALID_ARGUMENT, "lists.positions[2]");
  EXPECT_EQ(Must(sequence.Describe()).token_count, 300u) << "a failed step stores no rows";
  MustBeOk(run({7, 9, -1}));
}

TEST_F(GpuListsTest, StepsWaitForTheRowsOfEarlierSteps) {
  const Layer layer(330, 3);
  Sequence sequence = Fill(layer, 300);
  for (uint64_t position = 300; position < 330; ++position) {
    const RangeCase query(1, position, static_cast<uint32_t>(position));
    const StepItem items[] = {{&sequence, position, 1}};
    const DeviceArray<int32_t> newest(std::vector<int32_t>{static_cast<int32_t>(position) - 1, 0});
    const Tensors tensors(query.queries);
    Step step = Must(gpu_->BeginStep(items, stream_));
    MustBeOk(step.AttendPositions(1, tensors.query(), {.positions = SpanOf(newest)},
                                  SpanOf(tensors.output), SpanOf(tensors.lse)));
    Attention expected;
    for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
      query.AddTokens(layer, 0, head, {0, static_cast<uint32_t>(position) - 1}, &expected);
    }
    ExpectAttention(tensors.Get(stream_), expected);
    MustBeOk(step.End(Rows(layer, position, position + 1)));
    if (HasFatalFailure()) return;
  }
}

TEST_F(GpuListsTest, TheEndOfTheStepRefusesAPositionThatIsOutOfRange) {
  const Layer layer(320, 3);
  Sequence sequence = Fill(layer, 300);
  const RangeCase query(1, 300, 1);
  const Tensors tensors(query.queries);
  const StepItem items[] = {{&sequence, 300, 1}};
  const auto run = [&](const std::vector<int32_t>& positions, const Selection* selection,
                       std::vector<uint32_t> lengths) {
    const DeviceArray<int32_t> list(positions);
    const DeviceArray<uint32_t> length(lengths);
    Step step = Must(selection ? gpu_->BeginStep(items, *selection, stream_)
                               : gpu_->BeginStep(items, stream_));
    PositionLists lists{.positions = SpanOf(list)};
    if (!lengths.empty()) lists.lengths = SpanOf(length);
    MustBeOk(step.AttendPositions(1, tensors.query(), lists, SpanOf(tensors.output),
                                  SpanOf(tensors.lse)));
    // What is in range is attended to all the same.
    Attention expected;
    for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
      query.AddTokens(layer, 0, head, {7, 9}, &expected);
    }
    ExpectAttention(tensors.Get(stream_), expected);
    return step.End(Rows(layer, 300, 301));
  };
  Expect(run({9, 7, 300}, nullptr, {}), PQC_INVALID_ARGUMENT, "lists.positions[2]", "in layer 1");
  Expect(run({-7, 9, 7}, nullptr, {}), PQC_INVALID_ARGUMENT, "lists.positions[0]", "in layer 1");
  Expect(run({9, 7}, nullptr, {3}), PQC_INVALID_ARGUMENT, "lists.lengths[0]", "lists.capacity");
  // With a selection, the rows before the window are read.
  Expect(run({9, 7, 285}, &selection_, {}), PQC_INVALID_ARGUMENT, "lists.positions[2]");
  EXPECT_EQ(Must(sequence.Describe()).token_count, 300u) << "a failed step stores no rows";
  MustBeOk(run({9, 7, -1, 300}, nullptr, {}));
}

TEST_F(GpuListsTest, WhatIsWrongIsRefusedByName) {
  const Layer layer(320, 3);
  Sequence sequence = Fill(layer, 300);
  const Tensors tensors(RangeCase(1, 300, 1).queries);
  const StepItem items[] = {{&sequence, 300, 1}};
  Step step = Must(gpu_->BeginStep(items, stream_));
  const auto attend = [&](const PositionLists& lists) {
    return step.AttendPositions(0, tensors.query(), lists, SpanOf(tensors.output),
                                SpanOf(tensors.lse));
  };
  const DeviceArray<int32_t> many(std::vector<int32_t>(513, 0));
  Expect(attend({.positions = SpanOf(many)}), PQC_OUT_OF_RANGE, "lists.capacity",
         "513, must be at most selected_capacity, 512");
  Expect(attend({.positions = SpanOf(many).first(9), .list_count = 3}), PQC_INVALID_ARGUMENT,
         "lists.list_count");
  Expect(attend({.positions = SpanOf(many).first(2 * Layer::kQueryHeads),
                 .list_count = Layer::kQueryHeads}),
         PQC_UNIMPLEMENTED, "lists.list_count", "a list per query head");
  const Tensor logits = tensors.query();
  Expect(attend({.positions = SpanOf(many).first(2), .logits = &logits}), PQC_INVALID_ARGUMENT,
         "lists.logits.shape", "query_heads, lists.capacity");
  const std::vector<float> numbers_on_host(Layer::kQueryHeads * 2);
  const Tensor host_logits(numbers_on_host, {1, Layer::kQueryHeads, 2});
  Expect(attend({.positions = SpanOf(many).first(2), .logits = &host_logits}), PQC_INVALID_ARGUMENT,
         "lists.logits.device");
  const std::vector<int32_t> on_host(4, 0);
  Expect(attend({.positions = on_host}), PQC_INVALID_ARGUMENT, "gpu",
         "positions is pageable host memory");
  const std::vector<uint32_t> lengths_on_host(1, 0);
  Expect(attend({.positions = SpanOf(many).first(4), .lengths = lengths_on_host}),
         PQC_INVALID_ARGUMENT, "gpu", "lengths is pageable host memory");
  // A step without a selection cannot select.
  Expect(step.Attend(0, tensors.query(), SpanOf(tensors.output), SpanOf(tensors.lse)),
         PQC_INVALID_ARGUMENT, "selection", "pqc_gpu_step_begin takes it");
  const DeviceArray<uint32_t> positions(Layer::kKvHeads * 512), counts(Layer::kKvHeads);
  Expect(Gpu::TopK(step, 0, tensors.query(), SpanOf(positions), 512, SpanOf(counts)),
         PQC_INVALID_ARGUMENT, "selection", "pqc_gpu_step_begin takes it");
  MustBeOk(attend({}));  // an empty list, and the step is as good as before
  ExpectAttention(
      tensors.Get(stream_),
      {.output = std::vector<float>(testing::kOutput),
       .lse = std::vector<float>(Layer::kQueryHeads, -std::numeric_limits<float>::infinity())});
  MustBeOk(step.End(Rows(layer, 300, 301)));
}

}  // namespace
}  // namespace pqcached
