// Attention over positions that the engine gives, against a real pqcached on both paths.
#include <gtest/gtest.h>

#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"
#include "tests/client/step/positions_case.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::ExpectAttention;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::PositionsCase;
using testing::RangeCase;
using testing::SpecOf;

class DaemonPositionsTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  // A sequence without an index.
  Sequence Fill(const Layer& layer, uint64_t tokens) {
    Sequence sequence = Must(cache_.CreateSequence());
    MustBeOk(sequence.Ingest(0, 0, layer.keys(0, tokens), layer.values(0, tokens)));
    return sequence;
  }

  Daemon daemon_;
  Client client_ = daemon_.OpenClient("default", GetParam());
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0})));
};

TEST_P(DaemonPositionsTest, AnyListsGiveTheAttentionOverTheirPositions) {
  const Layer layer(400, 3), other(300, 8);
  Sequence first = Fill(layer, 380), second = Fill(other, 290);
  const StepItem items[] = {{&first, 380, 1}, {&second, 290, 3}};
  using Order = PositionsCase::Order;
  uint32_t seed = 0;
  for (const uint32_t list_count : {1u, Layer::kKvHeads, Layer::kQueryHeads}) {
    for (const Order order : {Order::kAscending, Order::kShuffled, Order::kRepeated}) {
      for (const uint32_t most : {0u, 2u, 17u, 400u}) {
        SCOPED_TRACE(::testing::Message() << list_count << " lists of up to " << most << ", order "
                                          << static_cast<int>(order));
        const PositionsCase one({{&layer, RangeCase(1, 380, 4)}, {&other, RangeCase(3, 290, 5)}},
                                list_count, most / 2, most, order, ++seed);
        Step step = Must(client_.BeginStep(items, nullptr));
        const std::vector<float> queries = one.queries();
        Attention attention{.output = std::vector<float>(4 * Layer::kQueryHeads * Layer::kValueDim),
                            .lse = std::vector<float>(4 * Layer::kQueryHeads)};
        MustBeOk(step.AttendPositions(0, {queries, {4, Layer::kQueryHeads, Layer::kKeyDim}},
                                      one.lists(/*with_lengths=*/true), attention.output,
                                      attention.lse));
        ExpectAttention(attention, one.Expected());
      }
    }
  }
}

TEST_P(DaemonPositionsTest, LogitsTakeThePlaceOfTheKeys) {
  const Layer layer(400, 3), other(300, 8), wrong(400, 11);
  const auto fill = [&](const Layer& rows, uint64_t tokens) {
    Sequence sequence = Must(cache_.CreateSequence());
    MustBeOk(sequence.Ingest(0, 0, wrong.keys(0, tokens), rows.values(0, tokens)));
    return sequence;
  };
  Sequence first = fill(layer, 380), second = fill(other, 290);
  const StepItem items[] = {{&first, 380, 1}, {&second, 290, 3}};
  const auto left_out = [](uint32_t head, uint32_t position) { return (head + position) % 3 == 0; };
  uint32_t seed = 0;
  for (const uint32_t list_count : {1u, Layer::kKvHeads, Layer::kQueryHeads}) {
    for (const uint32_t most : {0u, 2u, 17u, 64u, 400u}) {
      SCOPED_TRACE(::testing::Message() << list_count << " lists of up to " << most);
      const PositionsCase one({{&layer, RangeCase(1, 380, 4)}, {&other, RangeCase(3, 290, 5)}},
                              list_count, most / 2, most, PositionsCase::Order::kAscending, ++seed);
      Step step = Must(client_.BeginStep(items, nullptr));
      std::vector<float> numbers = one.Logits(left_out);
      const Tensor logits(numbers, {4, Layer::kQueryHeads, one.capacity});
      PositionLists lists = one.lists(/*with_lengths=*/true);
      lists.logits = &logits;
      Attention attention{.output = std::vector<float>(4 * Layer::kQueryHeads * Layer::kValueDim),
                          .lse = std::vector<float>(4 * Layer::kQueryHeads)};
      const auto attend = [&] {
        return step.AttendPositions(0, {}, lists, attention.output, attention.lse);
      };
      MustBeOk(attend());
      ExpectAttention(attention, one.Expected(left_out));
      if (most < 17) continue;
      for (const float bad : {NAN, INFINITY}) {
        numbers[(3 * Layer::kQueryHeads + 4) * one.capacity] = bad;
        const Status status = attend();
        EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT);
        EXPECT_EQ(status.field(), "items[1].logits");
      }
    }
  }
}

// The positions of all items are more than one request takes.
TEST_P(DaemonPositionsTest, LongListsOfManyItemsAreSplit) {
  constexpr uint64_t kTokens = 16'000;
  const Layer layer(kTokens, 3);
  std::vector<Sequence> sequences;
  std::vector<StepItem> items;
  std::vector<PositionsCase::Item> cases;
  sequences.push_back(Fill(layer, kTokens));
  for (int i = 1; i < 40; ++i) sequences.push_back(Must(sequences[0].Fork()));
  for (Sequence& sequence : sequences) {
    items.push_back({&sequence, kTokens, 1});
    cases.push_back({&layer, RangeCase(1, kTokens, static_cast<uint32_t>(items.size()))});
  }
  const PositionsCase one(cases, Layer::kKvHeads, kTokens - 9, kTokens,
                          PositionsCase::Order::kAscending, 7);
  Step step = Must(client_.BeginStep(items, nullptr));
  std::vector<float> queries = one.queries();
  const uint64_t count = items.size();
  Attention attention{.output = std::vector<float>(count * Layer::kQueryHeads * Layer::kValueDim),
                      .lse = std::vector<float>(count * Layer::kQueryHeads)};
  const auto attend = [&] {
    return step.AttendPositions(0, {queries, {count, Layer::kQueryHeads, Layer::kKeyDim}},
                                one.lists(true), attention.output, attention.lse);
  };
  MustBeOk(attend());
  ExpectAttention(attention, one.Expected());
  queries[10 * Layer::kQueryHeads * Layer::kKeyDim] = INFINITY;
  const Status status = attend();
  EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(status.field(), "items[10].queries");
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonPositionsTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
