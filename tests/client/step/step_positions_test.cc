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
  for (const uint32_t list_count : {1u, Layer::kKvHeads, Layer::kQueryHeads}) {
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

// The keys in the cache are those of another layer: the logits take their place.
TEST_F(PositionsTest, WithLogitsOnlyTheValuesAreRead) {
  const Layer layer(400, 3), other(300, 8), wrong(400, 11);
  const auto fill = [&](const Layer& rows, uint64_t tokens) {
    Sequence sequence = Must(cache_.CreateSequence());
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, 0, wrong.keys(0, tokens), rows.values(0, tokens)));
    }
    return sequence;
  };
  Sequence first = fill(layer, 380), second = fill(other, 290);
  const StepItem items[] = {{&first, 380, 1}, {&second, 290, 3}};
  const auto nothing = [](uint32_t, uint32_t) { return false; };
  const auto by_head = [](uint32_t head, uint32_t position) { return (head + position) % 3 == 0; };
  const auto all_of_one = [](uint32_t head, uint32_t) { return head == 4; };
  uint32_t seed = 0;
  for (const uint32_t list_count : {1u, Layer::kKvHeads, Layer::kQueryHeads}) {
    for (const uint32_t most : {0u, 1u, 17u, 64u, 400u}) {
      const PositionsCase one({{&layer, RangeCase(1, 380, 4)}, {&other, RangeCase(3, 290, 5)}},
                              list_count, most / 2, most, PositionsCase::Order::kAscending, ++seed);
      for (const bool with_lengths : {false, true}) {
        SCOPED_TRACE(::testing::Message() << list_count << " lists of up to " << most);
        Step step = Must(client_.BeginStep(items, nullptr));
        const auto check = [&](const auto& left_out) {
          const std::vector<float> numbers = one.Logits(left_out);
          const Tensor logits(numbers, {4, Layer::kQueryHeads, one.capacity});
          PositionLists lists = one.lists(with_lengths);
          lists.logits = &logits;
          Attention attention = Room(4);
          MustBeOk(step.AttendPositions(1, {}, lists, attention.output, attention.lse));
          ExpectAttention(attention, one.Expected(left_out));
        };
        check(nothing);
        check(by_head);
        check(all_of_one);
      }
    }
  }
}

TEST_F(PositionsTest, LogitsMayBeOfAnyDtypeAndStrides) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 300);
  const StepItem items[] = {{&sequence, 300, 1}};
  Step step = Must(client_.BeginStep(items, nullptr));
  const int32_t positions[] = {2, 5, 7};
  // 16 bits of bf16 numbers 0, 1 and 2, of all query heads, in the order [capacity, query_heads].
  std::vector<uint16_t> numbers;
  for (const uint16_t number : std::vector<uint16_t>{0x0000, 0x3f80, 0x4000}) {
    numbers.insert(numbers.end(), Layer::kQueryHeads, number);
  }
  const Tensor logits(numbers.data(), PQC_BF16, {Layer::kQueryHeads, 3}, {1, Layer::kQueryHeads});
  Attention attention = Room(1);
  MustBeOk(step.AttendPositions(0, {}, {.positions = positions, .logits = &logits},
                                attention.output, attention.lse));
  const double sum = 1 + std::exp(1.0) + std::exp(2.0);
  for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
    EXPECT_NEAR(attention.lse[head], std::log(sum), 1e-5);
    double first = 0;
    for (int i = 0; i < 3; ++i) {
      first += std::exp(i) / sum *
               double{layer.value(static_cast<uint64_t>(positions[i]), head / Layer::kGroup)[0]};
    }
    EXPECT_NEAR(attention.output[head * Layer::kValueDim], first, 1e-5);
  }
}

// The weights of a softmax over all keys, of which the others get no part.
TEST_F(PositionsTest, WithoutRenormalisationTheOutputIsScaledByTheEngine) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 300);
  const RangeCase query(1, 300, 4);
  const PositionsCase one({{&layer, query}}, Layer::kKvHeads, 32, 32,
                          PositionsCase::Order::kAscending, 1);
  const StepItem items[] = {{&sequence, 300, 1}};
  Step step = Must(client_.BeginStep(items, nullptr));
  const std::vector<float> numbers = one.Logits([](uint32_t, uint32_t) { return false; });
  const Tensor logits(numbers, {Layer::kQueryHeads, one.capacity});
  PositionLists lists = one.lists(/*with_lengths=*/true);
  lists.logits = &logits;
  Attention attention = Room(1), all;
  MustBeOk(step.AttendPositions(0, {}, lists, attention.output, attention.lse));
  for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
    query.AddTokens(layer, 0, head, testing::Range(0, 300), &all);
    const float scale = std::exp(attention.lse[head] - all.lse[head]);
    for (uint32_t i = 0; i < Layer::kValueDim; ++i) {
      double expected = 0;
      for (const uint32_t position : one.chosen[head / Layer::kGroup]) {
        expected +=
            std::exp(double{query.Logit(layer, 0, head, position)} - double{all.lse[head]}) *
            double{layer.value(position, head / Layer::kGroup)[i]};
      }
      ASSERT_NEAR(attention.output[head * Layer::kValueDim + i] * scale, expected, 1e-5);
    }
  }
}

TEST_F(PositionsTest, BadLogitsAreNamed) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 300), other = Fill(layer, 200);
  const StepItem items[] = {{&sequence, 300, 2}, {&other, 150, 1}};
  Step step = Must(client_.BeginStep(items, nullptr));
  Attention attention = Room(3);
  const auto attend = [&](std::vector<int32_t> positions, const Tensor& logits,
                          std::vector<uint32_t> lengths = {}) {
    return step.AttendPositions(0, {},
                                {.positions = positions, .lengths = lengths, .logits = &logits},
                                attention.output, attention.lse);
  };
  constexpr uint64_t kHeads = Layer::kQueryHeads;
  std::vector<float> numbers(3 * kHeads * 2);
  const Tensor good(numbers, {3, kHeads, 2});
  MustBeOk(attend({1, 299, 0, 149}, good));
  Expect(attend({299, 1, 0, 149}, good), PQC_INVALID_ARGUMENT, "lists.positions[1]", "ascend");
  Expect(attend({1, 299, 7, 7}, good), PQC_INVALID_ARGUMENT, "lists.positions[3]", "7 after 7");
  Expect(attend({1, 300, 7, 8}, good), PQC_INVALID_ARGUMENT, "lists.positions[1]", "300");
  const auto refused_shape = [&](const Tensor& logits) {
    Expect(attend({1, 299, 0, 149}, logits), PQC_INVALID_ARGUMENT, "lists.logits.shape",
           "must be [3, 6, 2]: query tokens of all items, query_heads, lists.capacity");
  };
  refused_shape({numbers, {3, kHeads, 1}});
  refused_shape({numbers, {2, kHeads, 2}});
  refused_shape({numbers, {3, kHeads - 1, 2}});
  refused_shape({numbers, {3 * kHeads, 2}});
  Expect(attend({1, 299, 0, 149}, {nullptr, PQC_F32, {3, kHeads, 2}}), PQC_INVALID_ARGUMENT,
         "lists.logits.ptr");
  for (const float bad : {NAN, INFINITY}) {
    numbers[2 * (2 * kHeads + 5) + 1] = bad;  // of the second item
    Expect(attend({1, 299, 0, 149}, good), PQC_INVALID_ARGUMENT, "items[1].logits", "query head 5");
    MustBeOk(attend({1, 299, 149, -1}, good));  // behind the list
    MustBeOk(attend({1, 299, 149, 0}, good, {2, 1}));
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
