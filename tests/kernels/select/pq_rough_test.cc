// Rough scores: the functions of every instruction set against plain loops. A selection proves its
// own result and falls back where the proof fails, so wrong rough scores would only be slow there.
#include "kernels/select/scan/pq_rough.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/base/exec.h"
#include "kernels/select/pq.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kSlack = 64;  // see RoughList
constexpr uint32_t kSizes[] = {1, 31, 32, 33, 63, 64, 65, 1024, 1025, 2047, 2048, 2049, 4500};

struct NamedLossOps {
  Level level;
  const LossOps* ops;
};

#if defined(__aarch64__)
const std::vector<NamedLossOps> kAllLossOps = {{Level::kNeon, &kLossOpsNeon}};
constexpr Level kLanesLevel = Level::kNeon;
#define PQCACHED_LANES 1
#elif defined(__x86_64__)
const std::vector<NamedLossOps> kAllLossOps = {{Level::kAvx2, &kLossOpsAvx2},
                                               {Level::kAvx512Vbmi, &kLossOpsAvx512Vbmi}};
constexpr Level kLanesLevel = Level::kAvx2;
#define PQCACHED_LANES 1
#else
const std::vector<NamedLossOps> kAllLossOps;
#endif

std::vector<PqGeometry> Geometries() {
  std::vector<PqGeometry> geometries;
  for (const uint32_t subspaces : {2u, 4u, 8u, 16u}) {
    for (uint32_t bits = 4; bits <= 8; ++bits) {
      geometries.push_back({.key_dim = 32, .subspace_count = subspaces, .bits = bits});
    }
  }
  return geometries;
}

// Slots with random codes, and no byte more.
struct Codes {
  Codes(const PqGeometry& g, uint32_t count, std::mt19937_64& random)
      : geometry(g), slot_count(count), planes(size_t{count} * PlaneCount(g)) {
    for (uint32_t slot = 0; slot < count; ++slot) {
      for (uint32_t j = 0; j < g.subspace_count; ++j) {
        SetCode(g, planes.data(), count, j, slot,
                static_cast<uint32_t>(random() % CentroidCount(g)));
      }
    }
  }

  RoughSlots Slots(uint32_t first_position) const {
    return {.subspace_count = geometry.subspace_count,
            .bits = geometry.bits,
            .nibble_planes = HasNibblePlanes(geometry),
            .planes = planes.data(),
            .plane_stride = slot_count,
            .slot_count = slot_count,
            .first_position = first_position};
  }

  uint32_t Code(uint32_t subspace, uint32_t slot) const {
    return GetCode(geometry, planes.data(), slot_count, subspace, slot);
  }

  PqGeometry geometry;
  uint32_t slot_count;
  std::vector<uint8_t> planes;
};

// Losses of which about one in `rarity` sums is listed.
std::vector<uint8_t> RandomLosses(const PqGeometry& g, uint32_t rarity, std::mt19937_64& random) {
  std::vector<uint8_t> losses(TableFloats(g) + kSlack);
  const uint32_t share = 256 / g.subspace_count;
  for (uint8_t& loss : losses) {
    loss = static_cast<uint8_t>(random() % 256);
    if (random() % rarity == 0 || rarity == 1) loss = static_cast<uint8_t>(random() % share);
  }
  return losses;
}

struct Listed {
  std::vector<uint32_t> positions;
  std::vector<uint8_t> losses;

  bool operator==(const Listed&) const = default;
};

Listed ListPlainly(const Codes& codes, const std::vector<uint8_t>& losses, uint32_t first) {
  Listed listed;
  for (uint32_t slot = 0; slot < codes.slot_count; ++slot) {
    uint32_t sum = 0;
    for (uint32_t j = 0; j < codes.geometry.subspace_count; ++j) {
      sum += losses[j * CentroidCount(codes.geometry) + codes.Code(j, slot)];
    }
    if (sum > kMaxLoss) continue;
    listed.positions.push_back(first + slot);
    listed.losses.push_back(static_cast<uint8_t>(sum));
  }
  return listed;
}

TEST(LossOpsTest, ListExactlyTheTokensOfSmallLoss) {
  std::mt19937_64 random(1);
  for (const PqGeometry& geometry : Geometries()) {
    for (const uint32_t size : kSizes) {
      for (const uint32_t rarity : {1u, 2u, 4u, 16u}) {
        const Codes codes(geometry, size, random);
        const std::vector<uint8_t> losses = RandomLosses(geometry, rarity, random);
        const Listed expected = ListPlainly(codes, losses, 700);
        for (const NamedLossOps& each : kAllLossOps) {
          if (!HasLevel(each.level)) continue;
          constexpr uint32_t kBefore = 3;
          std::vector<uint32_t> positions(kBefore + size + kSlack);
          std::vector<uint8_t> listed(kBefore + size + kSlack);
          RoughList list = {.positions = positions.data(),
                            .scores = nullptr,
                            .losses = listed.data(),
                            .count = kBefore};
          each.ops->list(codes.Slots(700), losses.data(), list);
          const Listed found = {{positions.begin() + kBefore, positions.begin() + list.count},
                                {listed.begin() + kBefore, listed.begin() + list.count}};
          ASSERT_EQ(found, expected)
              << LevelName(each.level) << " m " << geometry.subspace_count << " b " << geometry.bits
              << " n " << size << " rarity " << rarity;
        }
      }
    }
  }
}

TEST(LossOpsTest, FindTheLossOfARankAndTheTokensAroundIt) {
  std::mt19937_64 random(2);
  for (const uint32_t size : kSizes) {
    std::vector<uint8_t> losses(size);
    for (uint8_t& loss : losses) loss = static_cast<uint8_t>(random() % (kMaxLoss + 1));
    std::vector<uint8_t> sorted = losses;
    std::sort(sorted.begin(), sorted.end());
    std::vector<uint32_t> positions(size + kSlack);
    std::iota(positions.begin(), positions.end(), 90u);
    for (const NamedLossOps& each : kAllLossOps) {
      if (!HasLevel(each.level)) continue;
      SCOPED_TRACE(testing::Message() << LevelName(each.level) << " n " << size);
      for (const uint32_t k : {1u, size / 2 + 1, size}) {
        const uint8_t kth = each.ops->find(losses.data(), size, k);
        ASSERT_EQ(kth, sorted[k - 1]);
        for (const int width : {0, 5, 300}) {
          const int low = std::max(kth - width, 0);
          const int high = std::min(kth + width, static_cast<int>(kMaxLoss));
          std::vector<uint32_t> indices(size + kSlack);
          const BandCount count =
              each.ops->list_band(losses.data(), size, static_cast<uint8_t>(low),
                                  static_cast<uint8_t>(high), indices.data());
          std::vector<uint32_t> band;
          std::vector<uint32_t> above;
          for (uint32_t i = 0; i < size; ++i) {
            if (losses[i] >= low && losses[i] <= high) band.push_back(i);
            if (losses[i] < low) above.push_back(90 + i);
          }
          indices.resize(count.band);
          ASSERT_EQ(indices, band);
          ASSERT_EQ(count.above, above.size());
          if (above.empty()) continue;
          const RoughList list = {.positions = positions.data(),
                                  .scores = nullptr,
                                  .losses = losses.data(),
                                  .count = size};
          std::vector<uint32_t> taken(above.size());  // nothing beyond its end may be written
          each.ops->take_below(list, static_cast<uint8_t>(low), taken.data(), count.above);
          ASSERT_EQ(taken, above);
        }
      }
    }
  }
}

#if defined(PQCACHED_LANES)

// Entries and what a group's heads make of them. Small integers: every order of the operations
// gives the same float.
struct LaneCase {
  LaneCase(const PqGeometry& geometry, uint32_t lane_count, LaneRule lane_rule,
           std::mt19937_64& random)
      : lanes(lane_count), rule(lane_rule) {
    const size_t count = TableFloats(geometry) * lanes;
    entries = static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
    const uint32_t most = geometry.subspace_count > 8 ? 2 : 3;
    for (size_t i = 0; i < count; ++i) entries[i] = static_cast<float>(1 + random() % most);
  }
  ~LaneCase() { std::free(entries); }
  LaneCase(const LaneCase&) = delete;
  LaneCase& operator=(const LaneCase&) = delete;

  float Score(const Codes& codes, uint32_t slot, std::vector<double>& sums) const {
    float score = 0.0f;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      float value = rule == LaneRule::kMaxOfSums ? 0.0f : 1.0f;
      for (uint32_t j = 0; j < codes.geometry.subspace_count; ++j) {
        const size_t row = j * CentroidCount(codes.geometry) + codes.Code(j, slot);
        const float entry = entries[row * lanes + lane];
        value = rule == LaneRule::kMaxOfSums ? value + entry : value * entry;
      }
      score = rule == LaneRule::kSumOfProducts ? score + value : std::max(score, value);
      if (rule != LaneRule::kMaxOfSums) sums[lane] += double{value};
    }
    return score;
  }

  uint32_t lanes;
  LaneRule rule;
  float* entries;
};

struct ListedScores {
  std::vector<uint32_t> positions;
  std::vector<float> scores;
  std::vector<double> lane_sums;

  bool operator==(const ListedScores&) const = default;
};

ListedScores ListByLanes(const Codes& codes, const LaneCase& lanes, float least) {
  std::vector<uint32_t> positions(codes.slot_count + kSlack);
  std::vector<float> scores(codes.slot_count + kSlack);
  std::vector<double> sums(lanes.lanes);
  RoughList list = {
      .positions = positions.data(), .scores = scores.data(), .losses = nullptr, .count = 0};
  ListLanes(codes.Slots(11), {lanes.lanes, lanes.rule, lanes.entries}, least, sums.data(), list);
  positions.resize(list.count);
  scores.resize(list.count);
  return {positions, scores, sums};
}

TEST(LanesTest, ListExactlyTheTokensOfLargeScore) {
  if (!HasLevel(kLanesLevel)) return;
  std::mt19937_64 random(3);
  for (const PqGeometry& geometry : Geometries()) {
    for (const uint32_t size : kSizes) {
      const Codes codes(geometry, size, random);
      const uint32_t lane_count = 4u << random() % 3;
      for (const LaneRule rule :
           {LaneRule::kSumOfProducts, LaneRule::kMaxOfProducts, LaneRule::kMaxOfSums}) {
        const LaneCase lanes(geometry, lane_count, rule, random);
        ListedScores all;
        all.lane_sums.resize(lane_count);
        for (uint32_t slot = 0; slot < size; ++slot) {
          all.positions.push_back(11 + slot);
          all.scores.push_back(lanes.Score(codes, slot, all.lane_sums));
        }
        std::vector<float> sorted = all.scores;
        std::sort(sorted.begin(), sorted.end());
        // The third bound lists some tokens of every block: few on average, at times many in a row.
        for (const float least :
             {0.0f, sorted[size / 2], sorted[size - 1 - size / 40], sorted[size - 1]}) {
          ListedScores expected = {.positions = {}, .scores = {}, .lane_sums = all.lane_sums};
          for (uint32_t slot = 0; slot < size; ++slot) {
            if (all.scores[slot] < least) continue;
            expected.positions.push_back(11 + slot);
            expected.scores.push_back(all.scores[slot]);
          }
          ASSERT_EQ(ListByLanes(codes, lanes, least), expected)
              << "m " << geometry.subspace_count << " b " << geometry.bits << " n " << size
              << " lanes " << lane_count << " rule " << static_cast<int>(rule) << " least "
              << least;
        }
      }
    }
  }
}

TEST(LanesTest, FindTheTokensOfABandAndAboveIt) {
  if (!HasLevel(kLanesLevel)) return;
  std::mt19937_64 random(4);
  for (const uint32_t size : kSizes) {
    std::vector<float> scores(size);
    for (float& score : scores) score = static_cast<float>(random() % 100);
    std::vector<uint32_t> positions(size + kSlack);
    std::iota(positions.begin(), positions.end(), 90u);
    std::vector<uint32_t> band;
    std::vector<uint32_t> above;
    for (uint32_t i = 0; i < size; ++i) {
      if (scores[i] > 60.0f) above.push_back(90 + i);
      if (scores[i] >= 30.0f && scores[i] <= 60.0f) band.push_back(i);
    }
    SCOPED_TRACE(size);
    std::vector<uint32_t> indices(size + kSlack);
    const BandCount count = ListLaneBand(scores.data(), size, 30.0f, 60.0f, indices.data());
    indices.resize(count.band);
    ASSERT_EQ(indices, band);
    ASSERT_EQ(count.above, above.size());
    const RoughList list = {
        .positions = positions.data(), .scores = scores.data(), .losses = nullptr, .count = size};
    std::vector<uint32_t> taken(above.size());  // nothing beyond its end may be written
    TakeLanesAbove(list, 60.0f, taken.data(), count.above);
    ASSERT_EQ(taken, above);
  }
}

TEST(LanesTest, InterleaveTheRowsOfHeads) {
  if (!HasLevel(kLanesLevel)) return;
  for (uint32_t heads = 2; heads <= 16; ++heads) {
    const uint32_t lanes = heads <= 4 ? 4 : heads <= 8 ? 8 : 16;
    for (const uint32_t count : {16u, 64u, 256u}) {
      const uint32_t stride = count + 5;
      std::vector<float> rows(size_t{heads} * stride);
      std::iota(rows.begin(), rows.end(), 1.0f);
      const size_t floats = size_t{count} * lanes;
      const auto deleter = [](float* at) { std::free(at); };
      const std::unique_ptr<float, decltype(deleter)> to(
          static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float))), deleter);
      InterleaveLanes(rows.data(), stride, heads, count, lanes, to.get());
      std::vector<float> expected(floats);
      for (uint32_t c = 0; c < count; ++c) {
        for (uint32_t i = 0; i < heads; ++i) expected[c * lanes + i] = rows[i * stride + c];
      }
      ASSERT_EQ(std::vector<float>(to.get(), to.get() + floats), expected)
          << heads << " heads, " << count << " codes";
    }
  }
}

#endif

}  // namespace
}  // namespace pqcached::kernels
