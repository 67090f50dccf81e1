// PqSelect, PqScore and PqCountCells: every level against brute force over the definition.
#include "kernels/select/pq_select.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "kernels/select/cells/pq_postings.h"
#include "tests/kernels/select/paired_geometries.h"
#include "tests/kernels/select/pq_case.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kSizes[] = {0, 1, 63, 64, 65, 127, 128, 129, 4097};

std::vector<PqGeometry> AllGeometries() {
  std::vector<PqGeometry> geometries;
  for (const uint32_t subspaces : {1u, 2u, 4u, 8u, 16u}) {
    for (uint32_t bits = 4; bits <= 8; ++bits) {
      geometries.push_back({.key_dim = 32, .subspace_count = subspaces, .bits = bits});
    }
  }
  return geometries;
}

std::string Describe(const PqCaseShape& shape) {
  return "m " + std::to_string(shape.geometry.subspace_count) + " b " +
         std::to_string(shape.geometry.bits) + " G " + std::to_string(shape.group_size) + " rule " +
         std::to_string(static_cast<int>(shape.rule)) + " codes " +
         std::to_string(static_cast<int>(shape.codes)) + " tables " +
         std::to_string(static_cast<int>(shape.tables)) + " codebooks " +
         std::to_string(shape.codebook_count) + " segments " +
         std::to_string(shape.segments.size());
}

// Runs all levels for each k and expects what Judge accepts.
void ExpectSelects(const PqCaseShape& shape, uint64_t seed, std::vector<uint32_t> counts) {
  const PqCase pq_case(shape, seed);
  for (const Level level : AvailableLevels()) {
    for (const uint32_t k : counts) {
      if (k > pq_case.candidate_count()) continue;
      const std::string fault = pq_case.Judge(pq_case.Select(level, k));
      ASSERT_EQ(fault, "") << LevelName(level) << " n " << pq_case.candidate_count() << " k " << k
                           << " " << Describe(shape) << " seed " << seed;
    }
  }
}

PqSegment WholeSegment(uint32_t slot_count, bool with_counts) {
  return {.slot_count = slot_count,
          .begin = 0,
          .end = slot_count,
          .with_counts = with_counts,
          .counted_begin = 0,
          .counted_end = slot_count};
}

TEST(PqSelectTest, MatchesBruteForceForAllGeometriesRulesAndSizes) {
  uint64_t seed = 0;
  for (const PqGeometry& geometry : AllGeometries()) {
    for (const GroupRule rule : kAllRules) {
      for (const uint32_t size : kSizes) {
        PqCaseShape shape{
            .geometry = geometry, .group_size = 1 + static_cast<uint32_t>(seed % 4), .rule = rule};
        shape.segments = {WholeSegment(size, seed % 2 == 0)};
        shape.segments[0].with_lists = seed % 3 == 0;
        ExpectSelects(shape, ++seed, {0, 1, size / 10, size / 2, size});
      }
    }
  }
}

TEST(PqSelectTest, BreaksTiesByPositionUnderStrangeTables) {
  uint64_t seed = 1000;
  for (const PqGeometry& geometry : AllGeometries()) {
    if (geometry.bits == 5 || geometry.bits == 7 || geometry.subspace_count > 4) continue;
    for (const GroupRule rule : kAllRules) {
      for (const TableKind tables : kAllTableKinds) {
        for (const CodeKind codes : kAllCodeKinds) {
          PqCaseShape shape{.geometry = geometry,
                            .group_size = 1 + static_cast<uint32_t>(seed % 4),
                            .rule = rule};
          shape.codes = codes;
          shape.tables = tables;
          shape.segments = {WholeSegment(300, true)};
          ExpectSelects(shape, ++seed, {1, 7, 150, 299, 300});
        }
      }
    }
  }
}

PqSegment RandomSegment(std::mt19937_64& random, uint32_t codebook_count) {
  const auto below = [&](uint32_t limit) { return static_cast<uint32_t>(random() % limit); };
  PqSegment segment{.slot_count = 1 + below(below(4) == 0 ? 3000 : 300)};
  segment.begin = below(3) == 0 ? below(segment.slot_count + 1) : 0;
  segment.end = below(3) == 0 ? segment.begin + below(segment.slot_count - segment.begin + 1)
                              : segment.slot_count;
  segment.codebook = below(codebook_count);
  if (below(4) == 0 && segment.end > segment.begin) {
    segment.excluded_begin = segment.begin + below(segment.end - segment.begin);
    segment.excluded_end = segment.excluded_begin + 1 + below(segment.end - segment.excluded_begin);
  }
  segment.with_counts = below(3) != 0;
  segment.with_lists = below(2) != 0;
  segment.counted_begin = below(2) == 0 ? below(segment.slot_count + 1) : segment.begin;
  segment.counted_end =
      below(2) == 0 ? segment.counted_begin + below(segment.slot_count - segment.counted_begin + 1)
                    : std::max(segment.counted_begin, segment.end);
  return segment;
}

TEST(PqSelectTest, MatchesBruteForceOverManySpansAndCodebooks) {
  std::mt19937_64 random(42);
  const std::vector<PqGeometry> geometries = AllGeometries();
  // tests/long.sh models goes on for much longer.
  const uint32_t round_count = std::getenv("PQCACHED_FULL_TESTS") != nullptr ? 10'000 : 400;
  for (uint32_t round = 0; round < round_count; ++round) {
    PqCaseShape shape;
    // Half of the rounds for geometries with cells.
    do {
      shape.geometry = geometries[random() % geometries.size()];
    } while (round % 2 == 0 && !HasCells(shape.geometry));
    shape.group_size = 1 + static_cast<uint32_t>(random() % 8);
    shape.rule = kAllRules[random() % 4];
    shape.codebook_count = 1 + static_cast<uint32_t>(random() % 3);
    shape.codes = kAllCodeKinds[random() % 2];
    shape.tables = kAllTableKinds[random() % 2];
    const auto segment_count = static_cast<uint32_t>(random() % 6);
    for (uint32_t i = 0; i < segment_count; ++i) {
      shape.segments.push_back(RandomSegment(random, shape.codebook_count));
    }
    const auto any = static_cast<uint32_t>(random() % 1000);
    ExpectSelects(shape, random(), {1, any, any / 10});
  }
}

// Selections few enough that they come from lists.
TEST(PqSelectTest, MatchesBruteForceByPostingLists) {
  uint64_t seed = 7000;
  for (const PqGeometry geometry :
       {PqGeometry{32, 2, 6}, PqGeometry{32, 2, 4}, PqGeometry{32, 1, 8}, PqGeometry{32, 2, 5}}) {
    for (const GroupRule rule : kAllRules) {
      for (const TableKind tables : {TableKind::kNormal, TableKind::kTies, TableKind::kInfinite}) {
        PqCaseShape shape{.geometry = geometry, .rule = rule, .codebook_count = 2};
        shape.group_size = 1 + static_cast<uint32_t>(seed % 4);
        shape.tables = tables;
        shape.codes = kAllCodeKinds[seed % 4];
        // Several pages, a tail without lists, a range left out, slots that are not candidates.
        const uint32_t long_size = seed % 8 == 0 ? 2 * kPostingPageSlots + 300 : 6000;
        shape.segments = {WholeSegment(long_size, seed % 2 == 0), WholeSegment(5000, true),
                          WholeSegment(70, false), WholeSegment(4097, false)};
        for (const size_t i : {0, 1, 3}) shape.segments[i].with_lists = true;
        shape.segments[0].begin = 5;
        shape.segments[0].end -= 7;
        shape.segments[1].excluded_begin = 2000;
        shape.segments[1].excluded_end = 2100;
        shape.segments[1].codebook = 1;
        shape.segments[3].counted_begin = 64;
        shape.segments[3].counted_end -= 64;
        ExpectSelects(shape, ++seed, {1, 30, 300});
      }
    }
  }
}

TEST(PqSelectTest, MatchesBruteForceOverManyShortSegmentsWithLists) {
  uint64_t seed = 8000;
  for (const GroupRule rule : {GroupRule::kSumSoftmax, GroupRule::kMaxLogit}) {
    for (const CodeKind codes : kAllCodeKinds) {
      PqCaseShape shape{.geometry = {32, 2, 6}, .group_size = 2, .rule = rule, .codebook_count = 3};
      shape.codes = codes;
      for (uint32_t i = 0; i < 90; ++i) {
        PqSegment& segment = shape.segments.emplace_back(WholeSegment(400 + i, false));
        segment.with_lists = i % 7 != 0;
        segment.codebook = i / 30;
      }
      ExpectSelects(shape, ++seed, {1, 10, 500});
    }
  }
}

// Lists are counted together, in 16 bits: no cell may have more tokens than these hold.
TEST(PqSelectTest, MatchesBruteForceWhereOneCellHasTheTokensOfManyLists) {
  PqCaseShape shape{.geometry = {32, 2, 6}, .group_size = 2, .codes = CodeKind::kOneCell};
  for (const uint32_t size : {kPostingPageSlots, kPostingPageSlots, 30000u, 100u, 32767u, 2669u}) {
    shape.segments.push_back(WholeSegment(size, false));
    shape.segments.back().with_lists = true;
  }
  ExpectSelects(shape, 8500, {1, 500});
}

// Enough tokens for rough scores, which a sample, the tables or the codes may lead astray.
TEST(PqSelectTest, MatchesBruteForceByRoughScores) {
  uint64_t seed = 6000;
  for (const PqGeometry& geometry : AllGeometries()) {
    if (HasCells(geometry)) continue;
    for (const GroupRule rule : kAllRules) {
      for (const uint32_t group_size : {1u, 4u, 5u}) {
        PqCaseShape shape{.geometry = geometry, .group_size = group_size, .rule = rule};
        shape.codebook_count = 2;
        shape.tables = kAllTableKinds[seed % 7];
        shape.codes = kAllCodeKinds[seed / 7 % 4];
        shape.segments = {WholeSegment(3000, false), WholeSegment(1111, false),
                          WholeSegment(64, false)};
        shape.segments[0].excluded_begin = 1000;
        shape.segments[0].excluded_end = 1003;
        shape.segments[1].begin = 3;
        shape.segments[1].codebook = 1;
        ExpectSelects(shape, ++seed, {1, 33, 400, 2500});
      }
    }
  }
}

TEST(PqSelectTest, MatchesBruteForceOverLongSpans) {
  uint64_t seed = 6500;
  for (const PqGeometry geometry :
       {PqGeometry{32, 4, 8}, PqGeometry{32, 8, 4}, PqGeometry{32, 4, 6}}) {
    for (const uint32_t group_size : {1u, 4u, 8u, 16u}) {
      for (const CodeKind codes : kAllCodeKinds) {
        PqCaseShape shape{.geometry = geometry, .group_size = group_size};
        shape.codes = codes;
        shape.segments = {WholeSegment(20001, false)};
        ExpectSelects(shape, ++seed, {1, 200, 2000});
      }
    }
  }
}

TEST(PqSelectTest, MatchesBruteForceOverManyBlocks) {
  uint64_t seed = 9000;
  for (const PqGeometry geometry :
       {PqGeometry{32, 4, 8}, PqGeometry{32, 16, 4}, PqGeometry{32, 2, 6}}) {
    for (const GroupRule rule : kAllRules) {
      for (const TableKind tables :
           {TableKind::kNormal, TableKind::kPeaked, TableKind::kTies, TableKind::kHuge}) {
        PqCaseShape shape{.geometry = geometry, .group_size = 3, .rule = rule};
        shape.codebook_count = 2;
        shape.tables = tables;
        shape.codes = seed % 2 == 0 ? CodeKind::kUniform : CodeKind::kFewCells;
        shape.segments = {WholeSegment(9001, true), WholeSegment(70, true)};
        shape.segments[1].codebook = 1;
        ExpectSelects(shape, ++seed, {1, 100, 4000});
      }
    }
  }
}

TEST(PqScoreTest, GivesTheSameBitsAtEveryLevel) {
  uint64_t seed = 5000;
  std::vector<PqGeometry> geometries = AllGeometries();
  for (const PqGeometry& rare : RareGeometries()) geometries.push_back(rare);
  for (const PqGeometry& geometry : geometries) {
    for (const uint32_t size : kSizes) {
      for (const TableKind tables : {TableKind::kNormal, TableKind::kInfinite}) {
        PqCaseShape shape{.geometry = geometry, .group_size = 3};
        shape.tables = tables;
        shape.segments = {WholeSegment(size + 5, false)};
        shape.segments[0].begin = 5;
        const PqCase pq_case(shape, ++seed);
        std::vector<float> expected(3 * size);
        for (const Level level : AvailableLevels()) {
          std::vector<float> logits(3 * size, std::numeric_limits<float>::quiet_NaN());
          PqScore(Exec{level}, {.geometry = geometry,
                                .group_size = 3,
                                .span = pq_case.spans()[0],
                                .tables = pq_case.tables(),
                                .logits = logits});
          if (level == Level::kReference) expected = logits;
          ASSERT_EQ(logits, expected) << LevelName(level) << " n " << size << Describe(shape);
        }
      }
    }
  }
}

TEST(PqScoreTest, IsCloseToTheSumInDoublePrecision) {
  const PqGeometry geometry{.key_dim = 64, .subspace_count = 8, .bits = 8};
  PqCaseShape shape{.geometry = geometry};
  shape.segments = {WholeSegment(777, false)};
  const PqCase pq_case(shape, 3);
  std::vector<float> logits(777);
  PqScore(Exec{Level::kReference}, {.geometry = geometry,
                                    .group_size = 1,
                                    .span = pq_case.spans()[0],
                                    .tables = pq_case.tables(),
                                    .logits = logits});
  for (uint32_t slot = 0; slot < 777; ++slot) {
    double sum = 0.0;
    for (uint32_t subspace = 0; subspace < 8; ++subspace) {
      sum += pq_case.tables()[subspace * 256 + pq_case.spans()[0].planes[subspace * 777 + slot]];
    }
    EXPECT_NEAR(logits[slot], sum, 1e-5);
  }
}

TEST(PqCountCellsTest, CountsEveryCellAtEveryLevel) {
  for (const PqGeometry& geometry : AllGeometries()) {
    if (!HasCells(geometry)) continue;
    PqCaseShape shape{.geometry = geometry};
    shape.segments = {WholeSegment(1000, false)};
    const PqCase pq_case(shape, 9);
    const PqSpan& span = pq_case.spans()[0];
    for (const Level level : AvailableLevels()) {
      std::vector<uint32_t> counts(CellCount(geometry), 1u);
      PqCountCells(Exec{level}, {.geometry = geometry,
                                 .planes = span.planes,
                                 .plane_stride = span.plane_stride,
                                 .slot_begin = 3,
                                 .slot_end = 997,
                                 .cell_counts = counts});
      for (uint32_t slot = 3; slot < 997; ++slot) {
        --counts[GetCell(geometry, span.planes, span.plane_stride, slot)];
      }
      EXPECT_EQ(counts, std::vector<uint32_t>(CellCount(geometry), 1u)) << LevelName(level);
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
