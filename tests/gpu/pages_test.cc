// Selection of pages on the device against plain loops over the definition: all rules, page sizes
// and flags, sizes around pages, chunks and blocks, ties, items of different lengths at once.
#include "kernels/cuda/step/pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "tests/gpu/device_array.h"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kSeats = 3;
constexpr uint32_t kLanes = kSeats * kKvHeads;
constexpr uint32_t kTokens = 9000;
constexpr int32_t kUnwritten = -7;
// Items 1 and 0 have these seats; another seat is empty.
constexpr uint32_t kSeatOfItem[] = {2, 0};

struct Case {
  PageItem items[2];
  uint32_t k = 1;  // of both items, at most their candidates
  uint32_t page_tokens = 16;
  HeadRule heads = HeadRule::kEach;
  bool with_sink = false;
  bool with_window = false;
  uint32_t group_size = 2;
  GroupRule rule = GroupRule::kMaxLogit;
  PqGeometry geometry = {8, 2, 5};
  std::vector<OwnRange> excluded = {};
  uint32_t missing_capacity = 0;
  uint32_t first_position = 0;  // of the slots; at most where the candidates begin
};

bool IsExcluded(const Case& c, uint32_t token) {
  return std::any_of(c.excluded.begin(), c.excluded.end(),
                     [&](OwnRange gap) { return token >= gap.begin && token < gap.end; });
}

// Tables and codes of all lanes. Entries have few values, so that scores are often equal, and are
// not whole numbers, so that the order of sums counts.
class Problem {
 public:
  Problem(const Case& c, uint32_t seed) : case_(c), stride_(PlaneStride(kTokens)) {
    std::mt19937 random(seed);
    tables_.resize(kLanes * c.group_size * TableFloats(c.geometry));
    for (float& entry : tables_) entry = (static_cast<float>(random() % 7) - 3) * 0.3f;
    planes_.resize(kLanes * CodePlanesBytes(c.geometry, kTokens));
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      for (uint32_t subspace = 0; subspace < c.geometry.subspace_count; ++subspace) {
        for (uint32_t slot = 0; slot < kTokens; ++slot) {
          SetCode(c.geometry, planes(lane), stride_, subspace, slot,
                  static_cast<uint32_t>(random() % CentroidCount(c.geometry)));
        }
      }
    }
  }

  std::vector<uint32_t> Candidates(uint32_t item) const {
    std::vector<uint32_t> tokens;
    for (uint32_t token = case_.items[item].sink_end; token < case_.items[item].window_begin;
         ++token) {
      if (!IsExcluded(case_, token)) tokens.push_back(token);
    }
    return tokens;
  }

  // The pages that are in every list of an item.
  std::set<uint32_t> Listed(uint32_t item) const {
    const PageItem& ends = case_.items[item];
    std::set<uint32_t> pages;
    for (uint32_t token = 0; token < ends.window_end; ++token) {
      const bool is_listed = (case_.with_sink && token < ends.sink_end) ||
                             (case_.with_window && token >= ends.window_begin);
      if (is_listed && !IsExcluded(case_, token)) pages.insert(token / case_.page_tokens);
    }
    return pages;
  }

  // The largest score of each page that competes.
  std::map<uint32_t, double> Scores(uint32_t item, uint32_t list) const {
    const std::vector<uint32_t> tokens = Candidates(item);
    const bool is_joined = case_.heads != HeadRule::kEach;
    const uint32_t first_lane = kSeatOfItem[item] * kKvHeads;
    std::vector<double> scores = TokenScores(first_lane + list, tokens);
    for (uint32_t head = 1; is_joined && head < kKvHeads; ++head) {
      const std::vector<double> others = TokenScores(first_lane + head, tokens);
      for (size_t i = 0; i < tokens.size(); ++i) {
        scores[i] = case_.heads == HeadRule::kSum ? Add(scores[i], others[i])
                                                  : std::max(scores[i], others[i]);
      }
    }
    std::map<uint32_t, double> pages;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto [at, is_new] = pages.try_emplace(tokens[i] / case_.page_tokens, scores[i]);
      if (!is_new) at->second = std::max(at->second, scores[i]);
    }
    for (const uint32_t page : Listed(item)) pages.erase(page);
    return pages;
  }

  uint8_t* planes(uint32_t lane) {
    return planes_.data() + lane * CodePlanesBytes(case_.geometry, kTokens);
  }
  const std::vector<float>& tables() const { return tables_; }
  const std::vector<uint8_t>& all_planes() const { return planes_; }
  size_t stride() const { return stride_; }

 private:
  // Adds as floats where scores are exact.
  double Add(double a, double b) const {
    if (case_.rule == GroupRule::kSumSoftmax || case_.rule == GroupRule::kMaxSoftmax) return a + b;
    return double{static_cast<float>(a) + static_cast<float>(b)};
  }

  float Logit(uint32_t lane, uint32_t head, uint32_t slot) const {
    const PqGeometry& g = case_.geometry;
    const float* const table =
        tables_.data() + (size_t{lane} * case_.group_size + head) * TableFloats(g);
    const uint8_t* const codes = planes_.data() + lane * CodePlanesBytes(g, kTokens);
    float sum = 0;
    for (uint32_t i = 0; i < g.subspace_count; ++i) {
      sum += table[i * CentroidCount(g) + GetCode(g, codes, stride_, i, slot)];
    }
    return sum;
  }

  // The number by which the group rule compares tokens of one kv head.
  std::vector<double> TokenScores(uint32_t lane, const std::vector<uint32_t>& tokens) const {
    std::vector<double> scores(tokens.size(), 0.0);
    const GroupRule rule = case_.rule;
    for (uint32_t head = 0; head < case_.group_size; ++head) {
      double sum = 0;
      for (const uint32_t token : tokens) sum += std::exp(double{Logit(lane, head, token)});
      for (size_t i = 0; i < tokens.size(); ++i) {
        double value = double{Logit(lane, head, tokens[i])};
        if (rule == GroupRule::kSumSoftmax) value = std::exp(value) / sum;
        if (rule == GroupRule::kMaxSoftmax) value -= std::log(sum);
        const bool adds = rule == GroupRule::kSumSoftmax || rule == GroupRule::kMeanLogit;
        scores[i] = head == 0 ? value : adds ? Add(scores[i], value) : std::max(scores[i], value);
      }
    }
    return scores;
  }

  const Case& case_;
  size_t stride_;
  std::vector<float> tables_;
  std::vector<uint8_t> planes_;
};

class PagesDeviceTest : public DeviceTest {
 protected:
  void Check(const Case& c) {
    Problem problem(c, ++seed_);
    const DeviceArray<uint8_t> planes(problem.all_planes());
    const DeviceArray<float> tables(problem.tables());
    std::vector<SeatItem> seats(kSeats);
    std::vector<PageItem> items(kSeats);
    // An empty seat has what an earlier step has left.
    items[1] = {4, 100, 120};
    std::vector<SelectLane> lanes(kLanes);
    std::vector<SelectChunk> chunks(kLanes * kLaneChunks);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = {.chunk_begin = lane * kLaneChunks, .chunk_end = lane * kLaneChunks};
    }
    for (uint32_t item = 0; item < 2; ++item) {
      const uint32_t seat = kSeatOfItem[item];
      seats[seat] = {.item = item};
      items[seat] = c.items[item];
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        const uint32_t lane = seat * kKvHeads + head;
        lanes[lane].k = std::min(c.k, static_cast<uint32_t>(problem.Candidates(item).size()));
        AddChunks(problem.Candidates(item),
                  planes.data() + (problem.planes(lane) - problem.planes(0)), problem.stride(),
                  c.first_position, lane, lanes[lane], chunks);
      }
    }
    const uint32_t list_count = c.heads == HeadRule::kEach ? kKvHeads : 1;
    uint32_t needed[2];
    for (uint32_t item = 0; item < 2; ++item) {
      const size_t competing = problem.Scores(item, 0).size();
      const size_t candidates = problem.Candidates(item).size();
      const size_t wanted = (c.k + c.page_tokens - 1) / c.page_tokens;
      needed[item] =
          static_cast<uint32_t>(problem.Listed(item).size() +
                                (c.k >= candidates ? competing : std::min(wanted, competing)));
    }
    const uint32_t capacity = std::max(needed[0], needed[1]) + 3 - c.missing_capacity;
    const DeviceArray<SeatItem> device_seats(seats);
    const DeviceArray<PageItem> device_items(items);
    const DeviceArray<OwnRange> excluded(c.excluded);
    const DeviceArray<SelectLane> device_lanes(lanes);
    const DeviceArray<SelectChunk> device_chunks(chunks);
    const DeviceArray<int32_t> lists(
        std::vector<int32_t>(2 * list_count * capacity + 1, kUnwritten));
    const DeviceArray<uint32_t> lengths(2);
    const DeviceArray<std::byte> scratch(
        PageScratchBytes({c.group_size, kLanes, static_cast<uint32_t>(chunks.size()), kTokens}));
    const DeviceArray<unsigned long long> refused(std::vector<unsigned long long>{0});
    Finish(SelectPages(
        {.seat_shape = {.seat_capacity = kSeats, .kv_heads = kKvHeads, .group_size = c.group_size},
         .seats = device_seats.data(),
         .items = device_items.data(),
         .excluded = excluded.data(),
         .excluded_capacity = static_cast<uint32_t>(c.excluded.size()),
         .geometry = c.geometry,
         .rule = c.rule,
         .candidates = {.lane_capacity = kLanes,
                        .chunk_capacity = static_cast<uint32_t>(chunks.size()),
                        .lanes = device_lanes.data(),
                        .chunks = device_chunks.data()},
         .lane_chunk_capacity = kLaneChunks,
         .tables = tables.data(),
         .token_capacity = kTokens,
         .pages = {.page_tokens = c.page_tokens,
                   .heads = c.heads,
                   .with_sink = c.with_sink,
                   .with_window = c.with_window,
                   .lists = lists.data(),
                   .capacity = capacity,
                   .lengths = lengths.data()},
         .refused_capacity = {.noted = refused.data(), .tag = 5},
         .scratch = scratch.data(),
         .scratch_bytes = scratch.size()},
        stream_));
    const std::vector<int32_t> found = lists.Get();
    EXPECT_EQ(found.back(), kUnwritten);
    for (uint32_t item = 0; item < 2; ++item) {
      ASSERT_EQ(lengths.Get()[item], std::min(needed[item], capacity)) << "item " << item;
      for (uint32_t list = 0; list < list_count; ++list) {
        const auto begin = found.begin() + (item * list_count + list) * capacity;
        const std::vector<int32_t> pages(begin, begin + capacity);
        CheckList(c, problem, item, list, pages, needed[item]);
        if (HasFatalFailure()) return;
      }
    }
    // One of the items whose pages do not fit.
    const unsigned long long noted = refused.Get()[0];
    const unsigned long long item = noted & ((1ULL << kRefusedTagShift) - 1);
    EXPECT_EQ(noted >> kRefusedTagShift, item == 0 ? 0u : 5u);
    ASSERT_LE(item, 2u);
    EXPECT_TRUE(item == 0 ? needed[0] <= capacity && needed[1] <= capacity
                          : needed[item - 1] > capacity);
  }

 private:
  static constexpr uint32_t kLaneChunks = 8;

  // Cuts the candidates where they are not contiguous, and slots at multiples of kChunkTokens.
  static void AddChunks(const std::vector<uint32_t>& tokens, const uint8_t* planes, size_t stride,
                        uint32_t first_position, uint32_t lane, SelectLane& entry,
                        std::vector<SelectChunk>& chunks) {
    for (const uint32_t token : tokens) {
      const uint32_t slot = token - first_position;
      const bool continues = entry.chunk_end > entry.chunk_begin && slot % kChunkTokens != 0 &&
                             chunks[entry.chunk_end - 1].slot_end == slot;
      if (!continues) {
        ASSERT_LT(entry.chunk_end, entry.chunk_begin + kLaneChunks);
        chunks[entry.chunk_end++] = {.planes = planes + first_position,
                                     .stride = stride,
                                     .slot_begin = slot,
                                     .slot_end = slot,
                                     .first_position = first_position,
                                     .table = lane,
                                     .lane = lane};
      }
      chunks[entry.chunk_end - 1].slot_end = slot + 1;
    }
  }

  static void CheckList(const Case& c, const Problem& problem, uint32_t item, uint32_t list,
                        const std::vector<int32_t>& pages, uint32_t needed) {
    const size_t length = std::min<size_t>(needed, pages.size());
    ASSERT_TRUE(std::all_of(pages.begin() + static_cast<ptrdiff_t>(length), pages.end(),
                            [](int32_t page) { return page == -1; }));
    ASSERT_TRUE(std::is_sorted(pages.begin(), pages.begin() + static_cast<ptrdiff_t>(length)));
    const std::set<uint32_t> chosen(pages.begin(), pages.begin() + static_cast<ptrdiff_t>(length));
    ASSERT_EQ(chosen.size(), length) << "a page is listed twice";
    const std::set<uint32_t> listed = problem.Listed(item);
    std::vector<std::pair<double, uint32_t>> ranked;  // the best one first
    for (const auto& [page, score] : problem.Scores(item, list)) ranked.push_back({-score, page});
    std::sort(ranked.begin(), ranked.end());
    const size_t count = needed - listed.size();
    const bool is_exact = c.rule == GroupRule::kMeanLogit || c.rule == GroupRule::kMaxLogit;
    if (is_exact) {  // also the choice among equal pages
      std::set<uint32_t> right = listed;
      for (size_t i = 0; i < count; ++i) right.insert(ranked[i].second);
      std::vector<uint32_t> first(right.begin(), right.end());
      first.resize(length);
      ASSERT_EQ(std::vector<uint32_t>(chosen.begin(), chosen.end()), first);
      return;
    }
    for (const uint32_t page : listed) ASSERT_TRUE(chosen.contains(page)) << page;
    for (const auto& [score, page] : ranked) {
      const double least = count == 0 ? -1e300 : ranked[count - 1].first;
      const double slack = 1e-5 * (1e-3 + std::abs(least));
      if (chosen.contains(page)) {
        ASSERT_LE(score, least + slack) << "page " << page;
      } else {
        ASSERT_GE(score, least - slack) << "page " << page;
      }
    }
  }

  uint32_t seed_ = 0;
};

TEST_F(PagesDeviceTest, AllRulesSelectTheBestPages) {
  for (const GroupRule rule : {GroupRule::kSumSoftmax, GroupRule::kMaxSoftmax,
                               GroupRule::kMeanLogit, GroupRule::kMaxLogit}) {
    for (const HeadRule heads : {HeadRule::kEach, HeadRule::kMax, HeadRule::kSum}) {
      for (const uint32_t group_size : {1u, 3u}) {
        for (const uint32_t page_tokens : {16u, 32u, 64u}) {
          SCOPED_TRACE(::testing::Message()
                       << "rule " << static_cast<int>(rule) << " heads " << static_cast<int>(heads)
                       << " group " << group_size << " page " << page_tokens);
          Check({.items = {{4, 700, 721}, {20, 333, 340}},
                 .k = 101,
                 .page_tokens = page_tokens,
                 .heads = heads,
                 .with_sink = group_size == 1,
                 .with_window = page_tokens == 32,
                 .group_size = group_size,
                 .rule = rule,
                 .geometry = page_tokens == 64 ? PqGeometry{8, 4, 4} : PqGeometry{8, 2, 6}});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(PagesDeviceTest, SizesAroundPagesChunksAndBlocks) {
  for (const uint32_t tokens :
       {0u, 1u, 15u, 16u, 17u, 37u, 4091u, 4092u, 4093u, 8175u, 8176u, 8177u, 8192u, 8212u}) {
    for (const HeadRule heads : {HeadRule::kEach, HeadRule::kSum}) {
      for (const uint32_t k : {0u, 1u, 16u, 17u, 1000u, 9000u}) {
        SCOPED_TRACE(::testing::Message() << tokens << " tokens, k " << k);
        Check({.items = {{4, 4 + tokens, 9 + tokens}, {0, 1, 1}},
               .k = k,
               .heads = heads,
               .with_window = true,
               .rule = GroupRule::kMeanLogit});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(PagesDeviceTest, ChunksMayBeginWithinPages) {
  for (const uint32_t first_position : {1u, 8u, 15u, 40u}) {
    for (const uint32_t tokens : {1u, 4095u, 4096u, 4097u, 8192u}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens from " << first_position);
      Check({.items = {{first_position, first_position + tokens, 8300}, {40, 333, 340}},
             .k = tokens - tokens / 3,
             .heads = HeadRule::kMax,
             .first_position = first_position});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(PagesDeviceTest, PagesOfSinkAndWindowAreListedWithoutExcludedOnes) {
  const std::vector<std::vector<OwnRange>> all_excluded = {
      {}, {{0, 5}, {64, 96}, {620, 650}, {}}, {{0, 16}, {33, 47}, {688, 720}}, {{0, 2000}}};
  for (const std::vector<OwnRange>& excluded : all_excluded) {
    for (const bool with_sink : {false, true}) {
      for (const bool with_window : {false, true}) {
        for (const uint32_t k : {1u, 64u, 650u}) {
          SCOPED_TRACE(::testing::Message() << excluded.size() << " excluded, sink " << with_sink
                                            << " window " << with_window << " k " << k);
          Case c = {.items = {{40, 650, 725}, {3, 3, 12}},
                    .k = k,
                    .heads = HeadRule::kMax,
                    .with_sink = with_sink,
                    .with_window = with_window,
                    .excluded = excluded};
          Check(c);
          c.page_tokens = 64;
          c.heads = HeadRule::kEach;
          Check(c);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(PagesDeviceTest, PagesBeyondTheCapacityAreLeftOutAndNoted) {
  for (const uint32_t missing : {3u, 4u, 8u}) {
    Check({.items = {{4, 700, 721}, {4, 333, 340}},
           .k = 150,
           .with_sink = true,
           .missing_capacity = missing});
    Check({.items = {{4, 100, 121}, {4, 333, 340}},
           .k = 150,
           .with_sink = true,
           .missing_capacity = missing});
    if (HasFatalFailure()) return;
  }
}

TEST_F(PagesDeviceTest, RefusesWhatIsOutOfRange) {
  const SelectPagesArgs right = {.seat_shape = {.seat_capacity = 0, .kv_heads = 2},
                                 .geometry = {8, 2, 5},
                                 .scratch_bytes = size_t{1} << 20};
  EXPECT_TRUE(SelectPages(right, stream_).ok());
  SelectPagesArgs wrong = right;
  wrong.seat_shape.group_size = 65;
  EXPECT_FALSE(SelectPages(wrong, stream_).ok());
  wrong = right;
  wrong.seat_shape.seat_capacity = 40000;
  wrong.candidates.lane_capacity = 80000;
  EXPECT_FALSE(SelectPages(wrong, stream_).ok());
  wrong = right;
  wrong.seat_shape.seat_capacity = 1;  // more lanes than the candidates have
  EXPECT_FALSE(SelectPages(wrong, stream_).ok());
  for (const uint32_t page_tokens : {0u, 8u, 48u, 128u}) {
    wrong = right;
    wrong.pages.page_tokens = page_tokens;
    EXPECT_FALSE(SelectPages(wrong, stream_).ok());
  }
  wrong = right;
  wrong.geometry.bits = 9;
  EXPECT_FALSE(SelectPages(wrong, stream_).ok());
  wrong = right;
  wrong.candidates.lane_capacity = 6;
  wrong.token_capacity = kTokens;
  wrong.scratch_bytes = 1000;
  EXPECT_FALSE(SelectPages(wrong, stream_).ok());
}

}  // namespace
}  // namespace pqcached::kernels::cuda
