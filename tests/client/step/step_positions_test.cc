// Attention over positions that the engine gives, by the C ABI on the local path.
#include <cmath>

#include "tests/client/step/positions_case.h"
#include "tests/client/step/step_fixture.h"

namespace pqcached {
namespace {

using testing::Expect;
using testing::ExpectAttention;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::PositionsCase;
using testing::RangeCase;
using testing::StepTest;

class PositionsTest : public StepTest {
 protected:
  static Attention Room(uint64_t tokens) {
    return {.output = std::vector<float>(tokens * testing::kOutput),
            .lse = std::vector<float>(tokens * Layer::kQueryHeads)};
  }
};

TEST_F(PositionsTest, AnyListsGiveTheAttentionOverTheirPositions) {
  const Layer layer(400, 3), other(300, 8);
  Sequence first = Fill(layer, 380), second = Fill(other, 290);
  const StepItem items[] = {{&first, 380, 1}, {&second, 290, 3}};
  using Order = PositionsCase::Order;
  uint32_t seed = 0;
  for (const uint32_t list_count : {1u, Layer::kKvHeads}) {
    for (const Order order : {Order::kAscending, Order::kShuffled, Order::kRepeated}) {
      for (const uint32_t most : {0u, 1u, 17u, 64u, 400u}) {
        const PositionsCase one({{&layer, RangeCase(1, 380, 4)}, {&other, RangeCase(3, 290, 5)}},
                                list_count, most / 2, most, order, ++seed);
        for (const bool with_lengths : {false, true}) {
          SCOPED_TRACE(::testing::Message() << list_count << " lists of up to " << most
                                            << ", order " << static_cast<int>(order));
          Step step =
              Must(client_.BeginStep(items, nullptr));  // no selection, and no index is used
          const std::vector<float> queries = one.queries();
          Attention attention = Room(4);
          for (uint32_t number = 0; number < kLayers; ++number) {
            MustBeOk(
                step.AttendPositions(number, {queries, {4, Layer::kQueryHeads, Layer::kKeyDim}},
                                     one.lists(with_lengths), attention.output, attention.lse));
            ExpectAttention(attention, one.Expected());
          }
        }
      }
    }
  }
}

TEST_F(PositionsTest, CountsAreThoseOfTheLongestList) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 300);
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence.get();
  item.query_position = 300;
  pqc_step* step = nullptr;
  ASSERT_EQ(pqc_step_begin(handle_, &item, 1, nullptr, &step), PQC_OK);
  const Tensor tensor = layer.queries();
  const pqc_tensor queries = tensor.c();
  const int32_t positions[] = {7, 7, 3, -1, 299, -1, -1, -1};
  Attention attention = Room(1);
  uint32_t count = 99;
  pqc_position_lists lists = PQC_INIT(pqc_position_lists);
  lists.positions = positions;
  lists.list_count = 2;
  lists.capacity = 4;
  pqc_step_attention out = PQC_INIT(pqc_step_attention);
  out.output = attention.output.data();
  out.output_capacity = attention.output.size();
  out.lse = attention.lse.data();
  out.lse_capacity = attention.lse.size();
  out.counts = &count;
  EXPECT_EQ(pqc_step_attend_positions(step, 0, &queries, &lists, &out), PQC_OK);
  EXPECT_EQ(count, 2u);
  lists.positions = nullptr;
  EXPECT_EQ(pqc_step_attend_positions(step, 0, &queries, &lists, &out), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "lists.positions");
  lists.capacity = 0;
  EXPECT_EQ(pqc_step_attend_positions(step, 0, &queries, &lists, &out), PQC_OK);
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(attention.output[0], 0.0f);
  pqc_step_abandon(step);
}

// Rows of the steps before are in flight when the next one begins.
TEST_F(PositionsTest, StepsWaitForTheRowsOfEarlierSteps) {
  const Layer layer(330, 3);
  Sequence sequence = Fill(layer, 300);
  for (uint64_t position = 300; position < 330; ++position) {
    const RangeCase query(1, position, static_cast<uint32_t>(position));
    const StepItem items[] = {{&sequence, position, 1}};
    Step step = Must(client_.BeginStep(items, nullptr));
    const int32_t newest[] = {static_cast<int32_t>(position) - 1, 0};
    Attention attention = Room(1), expected;
    MustBeOk(step.AttendPositions(1, query.query().queries, {.positions = newest}, attention.output,
                                  attention.lse));
    for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
      query.AddTokens(layer, 0, head, {0, static_cast<uint32_t>(position) - 1}, &expected);
    }
    ExpectAttention(attention, expected);
    MustBeOk(step.End(Rows(layer, position, position + 1)));
  }
}

TEST_F(PositionsTest, AStepThatDoesNotWaitIsTriedAgainWhenTheRowsAreStored) {
  const Layer layer(310, 3);
  Sequence sequence = Fill(layer, 300);
  MustBeOk(EndOnly(sequence, layer, 300, 1));
  MustBeOk(sequence.Flush());
  sidecar_.CloseGate();
  MustBeOk(EndOnly(sequence, layer, 301, 1));  // not stored before the gate opens
  const RangeCase query(1, 302, 4);
  const int32_t newest[] = {301};
  const pqc_token_range range[] = {{0, 302}};
  const StepItem items[] = {{&sequence, 302, 1}};
  Attention attention = Room(1);
  Step step = Must(client_.BeginStep(items, nullptr, 0, PQC_STEP_NO_WAIT));
  const Tensor queries = query.query().queries;
  const auto by_range = [&] {
    return step.AttendRange(0, queries, range, attention.output, attention.lse);
  };
  const auto by_positions = [&] {
    return step.AttendPositions(0, queries, {.positions = newest}, attention.output, attention.lse);
  };
  for (const Status& status : {by_range(), by_positions()}) {
    Expect(status, PQC_DEADLINE_EXCEEDED, "items[0].query_position");
    EXPECT_GT(status.retry_ms(), 0u);
  }
  sidecar_.OpenGate();
  MustBeOk(sequence.Flush());
  MustBeOk(by_range());
  MustBeOk(by_positions());
}

TEST_F(PositionsTest, BadListsAreNamed) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 300), other = Fill(layer, 200);
  const StepItem items[] = {{&sequence, 300, 2}, {&other, 150, 1}};
  Step step = Must(client_.BeginStep(items, nullptr));
  const RangeCase query(3, 298, 4);
  Attention attention = Room(3);
  const auto attend = [&](const PositionLists& lists, const RangeCase& with) {
    return step.AttendPositions(0, with.query().queries, lists, attention.output, attention.lse);
  };
  const auto attend_to = [&](std::vector<int32_t> positions, std::vector<uint32_t> lengths = {}) {
    return attend({.positions = positions, .lengths = lengths}, query);
  };
  MustBeOk(attend_to({299, 1, 149, 0}));
  Expect(attend_to({300, 1, 149, 0}), PQC_INVALID_ARGUMENT, "lists.positions[0]", "300");
  Expect(attend_to({299, 1, 149, 150}), PQC_INVALID_ARGUMENT, "lists.positions[3]", "150");
  Expect(attend_to({299, -2, 149, 0}), PQC_INVALID_ARGUMENT, "lists.positions[1]", "-2");
  Expect(attend_to({299, -1, 149, 0}, {2, 2}), PQC_INVALID_ARGUMENT, "lists.positions[1]", "-1");
  MustBeOk(attend_to({299, -1, 149, 0}, {1, 2}));
  MustBeOk(attend_to({299, -1, -1, 1 << 30}));  // nothing behind the first -1 is read
  Expect(attend_to({299, 1, 149, 0}, {2, 3}), PQC_INVALID_ARGUMENT, "lists.lengths[1]", "3");
  Expect(attend_to({1, 2, 3, 4}, {2}), PQC_INVALID_ARGUMENT, "lists.lengths");
  Expect(attend_to({1, 2, 3}), PQC_INVALID_ARGUMENT, "lists.positions");
  const std::vector<int32_t> six = {1, 2, 3, 4, 5, 6};
  Expect(attend({.positions = six, .list_count = 3}, query), PQC_INVALID_ARGUMENT,
         "lists.list_count", "kv_heads");
  Expect(attend({.positions = six, .list_count = 0}, query), PQC_INVALID_ARGUMENT,
         "lists.positions");
  RangeCase infinite = query;
  infinite.queries[0] = INFINITY;
  Expect(attend({.positions = {six.data(), 4}}, infinite), PQC_INVALID_ARGUMENT,
         "items[0].queries");
  Expect(attend({.positions = {six.data(), 4}}, RangeCase(2, 298, 4)), PQC_INVALID_ARGUMENT,
         "queries.shape");
}

}  // namespace
}  // namespace pqcached
