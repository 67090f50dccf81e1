// Histories against a model of llama.cpp's cache: sequences that grow, shrink, are copied, and are
// restored without a graph.
#include "client/engines/llama/histories.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

namespace pqcached::llama {
namespace {

constexpr uint32_t kCells = 256;
constexpr uint32_t kSequences = 3;

// A cache whose cells have a content each, and the sequences that have the cells.
struct Cache {
  std::vector<uint64_t> content = std::vector<uint64_t>(kCells, 0);
  std::vector<uint32_t> sequences[kSequences];
  uint64_t next_content = 1;

  bool IsFree(uint32_t cell) const {
    return std::all_of(std::begin(sequences), std::end(sequences), [cell](const auto& cells) {
      return std::find(cells.begin(), cells.end(), cell) == cells.end();
    });
  }
  uint32_t FreeCell() const {
    for (uint32_t cell = 0; cell < kCells; ++cell) {
      if (IsFree(cell)) return cell;
    }
    return kCells;
  }
};

uint64_t ContentOf(const void* cache, uint32_t cell) {
  return static_cast<const Cache*>(cache)->content[cell];
}

class HistoriesTest : public testing::Test {
 protected:
  void Shortened(const std::shared_ptr<History>& history, uint32_t keep) {
    EXPECT_LT(keep, history->size());
    Histories::Shorten(history.get(), keep);
  }

  // A graph that decodes a token of each given sequence, and checks the histories.
  void Decode(const std::vector<uint32_t>& numbers) {
    std::vector<uint32_t> written;
    for (const uint32_t number : numbers) {
      const uint32_t cell = cache_.FreeCell();
      if (cell == kCells) return;
      cache_.sequences[number].push_back(cell);
      written.push_back(cell);
    }
    histories_.Write(written,
                     [this](const auto& history, uint32_t keep) { Shortened(history, keep); });
    // Otherwise the sidecar's thread might copy rows while they are written.
    for (const auto& history : histories_.all()) {
      for (const uint32_t cell : written) EXPECT_FALSE(history->has.Has(cell));
    }
    for (const uint32_t cell : written) cache_.content[cell] = cache_.next_content++;
    std::vector<std::shared_ptr<History>> taken;
    std::vector<std::set<uint32_t>> expected_of_taken;
    for (const uint32_t number : numbers) {
      CellSet seen(kCells);
      std::set<uint32_t> expected;
      for (const uint32_t cell : cache_.sequences[number]) {
        if (std::find(written.begin(), written.end(), cell) != written.end()) continue;
        seen.Add(cell);
        expected.insert(cell);
      }
      if (expected.empty()) continue;
      const auto history = histories_.Continue(
          seen, taken, &ContentOf, &cache_,
          [this](const auto& shortened, uint32_t keep) { Shortened(shortened, keep); });
      Check(*history, expected);
      taken.push_back(history);
      expected_of_taken.push_back(expected);
    }
    for (size_t i = 0; i < taken.size(); ++i) Check(*taken[i], expected_of_taken[i]);
  }

  // Checks that a history has the expected cells, each once, and remembers their content.
  void Check(History& history, const std::set<uint32_t>& expected) {
    EXPECT_EQ(std::set<uint32_t>(history.cells.begin(), history.cells.end()), expected);
    EXPECT_EQ(history.cells.size(), expected.size());
    for (uint32_t i = 0; i < history.size(); ++i) {
      EXPECT_EQ(history.prints[i], cache_.content[history.cells[i]]);
    }
    for (uint32_t cell = 0; cell < kCells; ++cell) {
      EXPECT_EQ(history.has.Has(cell), expected.contains(cell));
    }
    const uint32_t end = history.size() - std::min(history.size(), 3u), begin = std::min(2u, end);
    history.Hide(begin, end);
    for (uint32_t i = 0; i < history.size(); ++i) {
      EXPECT_EQ(history.hidden.Has(history.cells[i]), i >= begin && i < end) << i;
    }
  }

  Cache cache_;
  Histories histories_{kCells};
};

TEST_F(HistoriesTest, AreWhatQueryTokensSee) {
  std::mt19937 random(3);
  const auto pick = [&random](uint32_t count) { return static_cast<uint32_t>(random()) % count; };
  for (int i = 0; i < 20000 && !HasFailure(); ++i) {
    std::vector<uint32_t>& cells = cache_.sequences[pick(kSequences)];
    const uint32_t kind = pick(20);
    if (kind < 12) {
      std::vector<uint32_t> numbers;
      for (uint32_t number = 0; number < kSequences; ++number) {
        if (pick(2) == 0) numbers.push_back(number);
      }
      Decode(numbers);
    } else if (kind < 14) {  // a roll-back
      cells.resize(pick(static_cast<uint32_t>(cells.size()) + 1));
    } else if (kind < 15) {
      cells = cache_.sequences[pick(kSequences)];
    } else if (kind < 16) {  // a restored state: other contents, of which no graph knows
      for (const uint32_t cell : cells) cache_.content[cell] = cache_.next_content++;
    } else if (kind < 17 && !cells.empty()) {  // tokens that are removed from the middle
      cells.erase(cells.begin() + pick(static_cast<uint32_t>(cells.size())));
    } else if (kind < 18 && pick(10) == 0) {
      cells.clear();
    }
  }
}

TEST_F(HistoriesTest, AGrowingSequenceKeepsItsHistoryAndItsOrder) {
  for (int i = 0; i < 100; ++i) Decode({0});
  ASSERT_EQ(histories_.all().size(), 1u);
  const History& history = *histories_.all().front();
  EXPECT_TRUE(std::is_sorted(history.cells.begin(), history.cells.end()));
  EXPECT_EQ(history.size(), 99u);  // all but the one that the last graph wrote
}

TEST_F(HistoriesTest, ARollBackKeepsTheTokensBefore) {
  for (int i = 0; i < 100; ++i) Decode({0});
  const auto history = histories_.all().front();
  cache_.sequences[0].resize(60);
  Decode({0});
  ASSERT_EQ(histories_.all().size(), 1u);
  EXPECT_EQ(histories_.all().front(), history);
  EXPECT_EQ(history->size(), 60u);
}

TEST_F(HistoriesTest, AForkHasAHistoryOfItsOwn) {
  for (int i = 0; i < 100; ++i) Decode({0});
  cache_.sequences[1] = cache_.sequences[0];
  for (int i = 0; i < 10; ++i) Decode({0, 1});
  EXPECT_EQ(histories_.all().size(), 2u);
}

TEST_F(HistoriesTest, ATokenThatSeesMoreThanAnotherSequencesTokenHasAHistoryOfItsOwn) {
  for (int i = 0; i < 50; ++i) Decode({0});
  cache_.sequences[1] = cache_.sequences[0];
  for (int i = 0; i < 20; ++i) Decode({1});
  Decode({0, 1});
  Decode({0, 1});
}

// No history ends that a query token of the graph has, even if there are more sequences.
TEST_F(HistoriesTest, TheLongestUnusedHistoryEnds) {
  const auto begin = [this](uint32_t number, std::span<const std::shared_ptr<History>> taken) {
    CellSet seen(kCells);
    for (uint32_t cell = 3 * number; cell < 3 * number + 3; ++cell) seen.Add(cell);
    return histories_.Continue(seen, taken, &ContentOf, &cache_,
                               [](const auto&, uint32_t) { FAIL(); });
  };
  std::vector<std::shared_ptr<History>> begun;
  for (uint32_t i = 0; i < 64; ++i) begun.push_back(begin(i, {}));
  EXPECT_EQ(begin(64, begun), nullptr) << "all are taken";
  EXPECT_NE(begin(64, std::span(begun).first(1)), nullptr);
  EXPECT_EQ(histories_.all().size(), 64u);
  EXPECT_FALSE(begun[0]->is_gone);
  EXPECT_TRUE(begun[1]->is_gone);
  EXPECT_FALSE(begun[2]->is_gone);
}

// A history of 10 tokens in the cells 0 to 9, of which [2, 6) are offloaded.
class OffloadedHistoryTest : public HistoriesTest {
 protected:
  OffloadedHistoryTest() {
    history_ = histories_.Continue(CellSet(kCells), {}, &ContentOf, &cache_,
                                   [](const auto&, uint32_t) { FAIL(); });
    for (uint32_t cell = 0; cell < 10; ++cell) {
      cache_.content[cell] = cache_.next_content++;
      Histories::Append(history_.get(), cell, cache_.content[cell]);
    }
    histories_.Offload(history_.get(), 2, 6);
  }

  Histories::Match Find(const std::vector<uint32_t>& cells, uint64_t position) {
    CellSet seen(kCells);
    for (const uint32_t cell : cells) seen.Add(cell);
    found_ = nullptr;
    return histories_.FindOffloaded(seen, position, &ContentOf, &cache_, &found_);
  }

  std::shared_ptr<History> history_, found_;
};

TEST_F(OffloadedHistoryTest, IsFoundByItsPositionAndItsCells) {
  EXPECT_EQ(Find({0, 1, 6, 7, 8, 9}, 10), Histories::Match::kFound);
  EXPECT_EQ(found_, history_);
  EXPECT_EQ(Find({0, 1, 6, 7}, 8), Histories::Match::kFound) << "after a roll-back";
  EXPECT_EQ(Find({0, 1}, 6), Histories::Match::kFound);
  EXPECT_EQ(Find({0, 1}, 4), Histories::Match::kFound) << "a roll-back into the offloaded tokens";
}

TEST_F(OffloadedHistoryTest, IsNotFoundWhenAnythingElseIsSeen) {
  EXPECT_EQ(Find({0, 1, 6, 7, 8, 9}, 9), Histories::Match::kBroken) << "another position";
  EXPECT_EQ(Find({0, 1, 6, 7, 8, 9}, 11), Histories::Match::kBroken) << "a shift to later ones";
  EXPECT_EQ(Find({0, 1, 6, 7, 9}, 9), Histories::Match::kBroken) << "a hole";
  EXPECT_EQ(Find({0, 1, 6, 7, 8, 9, 20}, 11), Histories::Match::kBroken) << "a token more";
  EXPECT_EQ(Find({6, 7, 8, 9}, 10), Histories::Match::kBroken) << "without the sink";
  EXPECT_EQ(Find({30, 31}, 9), Histories::Match::kBroken) << "another sequence that lacks tokens";
  cache_.content[7] = cache_.next_content++;
  EXPECT_EQ(Find({0, 1, 6, 7, 8, 9}, 10), Histories::Match::kBroken) << "a rotated key";
}

TEST_F(OffloadedHistoryTest, SequencesThatLackNothingAreNoneOfIt) {
  EXPECT_EQ(Find({}, 0), Histories::Match::kNone);
  EXPECT_EQ(Find({30, 31, 32}, 3), Histories::Match::kNone);
  EXPECT_EQ(Find({0, 1}, 2), Histories::Match::kNone) << "the application has removed the rest";
}

TEST_F(OffloadedHistoryTest, WrittenCellsOfOffloadedTokensDoNotShortenIt) {
  histories_.Write(std::vector<uint32_t>{2, 3, 4, 5}, [](const auto&, uint32_t) { FAIL(); });
  bool is_shortened = false;
  histories_.Write(std::vector<uint32_t>{8}, [&](const auto& history, uint32_t keep) {
    is_shortened = true;
    EXPECT_EQ(keep, 8u);
    Shortened(history, keep);
  });
  EXPECT_TRUE(is_shortened);
  EXPECT_TRUE(history_->has_offloaded());
  Shortened(history_, 4);
  EXPECT_EQ(history_->offloaded_end, 4u);
  Shortened(history_, 2);
  EXPECT_FALSE(history_->has_offloaded());
}

}  // namespace
}  // namespace pqcached::llama
