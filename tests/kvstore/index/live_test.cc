// Live indexes: codes, generations, drift, merges, and what happens around them.
#include <atomic>
#include <set>

#include "absl/strings/match.h"
#include "kvstore/clock.h"
#include "tests/kvstore/brute_force.h"
#include "tests/kvstore/index/live_parts.h"
#include "tests/kvstore/index/nearest.h"

namespace pqcached::kvstore {
namespace {

using testing::Add;
using testing::DecodedKeys;
using testing::DecodeKeys;
using testing::Describe;
using testing::ExpectCoded;
using testing::ExpectNearest;
using testing::ExpectSelects;
using testing::Finish;
using testing::Floats;
using testing::kChunk;
using testing::kIndex;
using testing::kTail;
using testing::kTenant;
using testing::LayerModel;
using testing::Live;
using testing::LiveOptions;
using testing::Pq;
using testing::SmallSpec;
using testing::TestSequence;
using testing::WaitIdle;
using testing::WhilePaused;

std::vector<uint32_t> Generations(const SequenceInfo& info) {
  std::vector<uint32_t> generations;
  for (const SegmentInfo& segment : info.segments) {
    generations.push_back(
        segment.codebook_generations.empty() ? ~0u : segment.codebook_generations.front());
  }
  return generations;
}

TEST(LiveIndex, IndexesChunksAsTheyFillUpAndBuildIndexFinishesTheLast) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 2 * kChunk + 60, 0, 1, /*append=*/false);
  WaitIdle(sequence.store());
  SequenceInfo info = Describe(sequence);
  ASSERT_EQ(info.segments.size(), 3u);
  EXPECT_NE(Generations(info)[0], ~0u);
  EXPECT_NE(Generations(info)[1], ~0u);
  EXPECT_EQ(info.layers.front().index_states.front(), LayerState::kFilled);  // 60 tokens wait
  uint32_t layers_done = 0;
  const absl::Status status = sequence.store().BuildIndex(kTenant, sequence.id(), {.index = kIndex},
                                                          [&](const BuildProgress& p) {
                                                            EXPECT_EQ(p.layers_done, ++layers_done);
                                                            EXPECT_GT(p.index_bytes, 0u);
                                                            EXPECT_GT(p.codebook_bytes, 0u);
                                                            return true;
                                                          });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(layers_done, 2u);
  WaitIdle(sequence.store());
  ExpectCoded(sequence);
  ExpectSelects(sequence);
  EXPECT_TRUE(Finish(sequence).ok());  // nothing is left
  sequence.ExpectRowsMatch();
}

TEST(LiveIndex, TheFirstTokenBehindAPrefillClosesItAndItIsIndexed) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, kChunk + 60, 0, 1, /*append=*/false);
  sequence.Append(1);
  WaitIdle(sequence.store());
  SequenceInfo info = Describe(sequence);
  ASSERT_EQ(info.segments.size(), 3u);
  EXPECT_EQ(info.segments[1].tokens.end, kChunk + 60);
  EXPECT_EQ(info.segments[1].state, SegmentState::kSealed);
  EXPECT_EQ(info.segments[2].slot_capacity, kTail);
  for (const LayerInfo& layer : info.layers) EXPECT_EQ(layer.index_states[0], LayerState::kReady);
  ExpectCoded(sequence);
  ExpectSelects(sequence);
  Add(sequence, 40, 0, 1, /*append=*/false);  // the next turn
  sequence.Append(3);
  Add(sequence, 2 * kTail, 0, 1, /*append=*/false);  // fills the tail, and opens a segment
  const size_t segments = Describe(sequence).segments.size();
  ASSERT_TRUE(Finish(sequence).ok());
  sequence.Append(3);  // there is room in it
  EXPECT_EQ(Describe(sequence).segments.size(), segments);
  sequence.Append(kTail);
  WaitIdle(sequence.store());
  info = Describe(sequence);
  for (const LayerInfo& layer : info.layers) EXPECT_EQ(layer.index_states[0], LayerState::kReady);
  sequence.ExpectRowsMatch();
  ExpectCoded(sequence);
  ExpectSelects(sequence);
}

// The codebooks of the two indexed layers have successive generations. Those of a training ahead are
// used when no row has followed; a layer that has grown by less than its rows is not trained again.
TEST(LiveIndex, APromptBelowASegmentIsTrainedWhileItsPrefillIsOpen) {
  struct Case {
    std::vector<uint32_t> chunks;
    uint32_t first_generation;  // of those that code the prompt
  };
  for (const Case& each : {Case{{20}, 0},       // too short: trained at the end
                           Case{{200}, 0},      // trained ahead
                           Case{{80, 120}, 2},  // trained ahead twice
                           Case{{80, 40}, 2},   // trained ahead on 80, and at the end
                           Case{{80, 120, 20}, 4}}) {
    SCOPED_TRACE(each.chunks.size() * 1000 + each.chunks.back());
    TestSequence sequence(SmallSpec(), LiveOptions());
    sequence.NewSequence(Live());
    for (const uint32_t tokens : each.chunks) {
      Add(sequence, tokens, 0, 1, /*append=*/false);
      WaitIdle(sequence.store());
      for (const LayerInfo& layer : Describe(sequence).layers) {
        EXPECT_NE(layer.index_states.empty() ? LayerState::kFilled : layer.index_states.front(),
                  LayerState::kReady);
      }
    }
    ASSERT_TRUE(sequence.store().ClosePrefill(kTenant, sequence.id()).ok());
    WaitIdle(sequence.store());
    EXPECT_EQ(Generations(Describe(sequence)).front(), each.first_generation);
    ExpectCoded(sequence);
    if (sequence.tokens() > 100) ExpectSelects(sequence);
    sequence.ExpectRowsMatch();
  }
}

// Rows that a truncation has replaced are not those that the codebook was trained on.
TEST(LiveIndex, ATruncationVoidsWhatWasTrainedAhead) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 200, 0, 1, /*append=*/false);
  WaitIdle(sequence.store());
  sequence.Truncate(100);
  Add(sequence, 100, 8, 1, /*append=*/false);
  ASSERT_TRUE(sequence.store().ClosePrefill(kTenant, sequence.id()).ok());
  WaitIdle(sequence.store());
  EXPECT_GE(Generations(Describe(sequence)).front(), 2u);
  ExpectCoded(sequence);
  ExpectSelects(sequence);
  sequence.ExpectRowsMatch();
}

TEST(LiveIndex, WithoutItAnAppendLeavesThePrefillOpen) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.Ingest(60);
  sequence.Append(1);
  EXPECT_EQ(Describe(sequence).segments.size(), 1u);
}

TEST(LiveIndex, GoesOnInASequenceThatIsRolledBackToNothing) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 2 * kChunk, 0, 1, /*append=*/false);
  WaitIdle(sequence.store());
  sequence.Truncate(0);
  EXPECT_TRUE(Describe(sequence).indexes.empty());
  Add(sequence, 2 * kChunk, 4, 1, /*append=*/false);  // other keys: nothing of before must be left
  ASSERT_TRUE(Finish(sequence).ok());
  WaitIdle(sequence.store());
  sequence.ExpectRowsMatch();
  ExpectCoded(sequence);
  ExpectSelects(sequence);
}

TEST(LiveIndex, WorkThatIsLeftIsCounted) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, kChunk, 0, 1, /*append=*/false);
  WaitIdle(sequence.store());
  WhilePaused(sequence, [&] {
    Add(sequence, kTail, 0, 1, /*append=*/true);
    EXPECT_EQ(sequence.store().Stats(kAllTenants).live_work_count, 1u);
  });
  WaitIdle(sequence.store());
  EXPECT_EQ(sequence.store().Stats(kAllTenants).live_work_count, 0u);
}

TEST(LiveIndex, ALayerIsReadyWhileTheNextOnesHaveNoRowsYet) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  LayerModel& model = sequence.layer(1);
  const Floats keys = sequence.RandomKeys(model, kChunk);
  const Floats values = sequence.RandomValues(model, kChunk);
  auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
  ASSERT_TRUE(ingest.ok());
  ASSERT_TRUE((*ingest)->Write(0, {.layer = 1, .keys = keys.view(), .values = values.view()}).ok());
  ASSERT_TRUE((*ingest)->Commit().ok());
  model.Append(keys, values);
  WaitIdle(sequence.store());
  const SequenceInfo info = Describe(sequence);
  EXPECT_EQ(info.layers[0].index_states.front(), LayerState::kReady);
  EXPECT_EQ(info.layers[1].index_states.front(), LayerState::kFilled);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
  ExpectNearest(model, kIndex, decoded, {0, kChunk}, {0, kChunk});
}

TEST(LiveIndex, AMatureGenerationHasOneCodebookAndLaterChunksAreOnlyCoded) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  for (int chunk = 0; chunk < 6; ++chunk) Add(sequence, kChunk, 0, 1, /*append=*/false);
  ASSERT_TRUE(Finish(sequence).ok());
  WaitIdle(sequence.store());
  const std::vector<uint32_t> generations = Generations(Describe(sequence));
  ASSERT_EQ(generations.size(), 6u);
  EXPECT_EQ(std::set<uint32_t>(generations.begin(), generations.end()).size(), 1u);
  ExpectCoded(sequence);
}

TEST(LiveIndex, KeysThatDriftAwayBeginANewGeneration) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  for (int chunk = 0; chunk < 4; ++chunk) Add(sequence, kChunk, 0, 1, /*append=*/false);
  for (int chunk = 0; chunk < 2; ++chunk) Add(sequence, kChunk, 4, 1, /*append=*/false);
  ASSERT_TRUE(Finish(sequence).ok());
  WaitIdle(sequence.store());
  const std::vector<uint32_t> generations = Generations(Describe(sequence));
  ASSERT_EQ(generations.size(), 6u);
  EXPECT_EQ(generations[0], generations[3]);
  EXPECT_NE(generations[3], generations[4]);
  EXPECT_EQ(generations[4], generations[5]);
  ExpectCoded(sequence);
}

TEST(LiveIndex, TailsAreMergedAndKeepTheirTokens) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, kChunk + kTail + 30, 0, 1, /*append=*/false);  // the rest is longer than a tail
  ASSERT_TRUE(Finish(sequence).ok());
  for (int i = 0; i < 30; ++i) sequence.Append(37);  // eight full tails, and 86 tokens more
  WaitIdle(sequence.store());
  const SequenceInfo info = Describe(sequence);
  ASSERT_EQ(info.segments.size(), 2u + 2 + 1);
  for (const size_t merged : {2u, 3u}) {
    EXPECT_EQ(info.segments[merged].slot_capacity, 4 * kTail);
    EXPECT_EQ(info.segments[merged].tokens.end - info.segments[merged].tokens.begin, 4 * kTail);
    EXPECT_EQ(info.segments[merged].state, SegmentState::kSealed);
  }
  EXPECT_EQ(info.segments[4].state, SegmentState::kOpen);
  EXPECT_EQ(info.used_bytes, sequence.store().ListCaches("").front().used_bytes);
  sequence.ExpectRowsMatch();
  ExpectCoded(sequence);
  ExpectSelects(sequence);
}

TEST(LiveIndex, TailsOfANewTopicGetACodebookOfTheirOwn) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 4 * kChunk, 0, 1, /*append=*/false);
  ASSERT_TRUE(Finish(sequence).ok());
  WaitIdle(sequence.store());
  const uint32_t prefill_generation = Generations(Describe(sequence)).front();
  for (int i = 0; i < 3; ++i) {
    Add(sequence, kTail, 4, 1, /*append=*/true);
    WaitIdle(sequence.store());
  }
  const std::vector<uint32_t> generations = Generations(Describe(sequence));
  ASSERT_EQ(generations.size(), 7u);
  EXPECT_EQ(generations[3], prefill_generation);
  for (size_t i = 4; i < 6; ++i) EXPECT_NE(generations[i], prefill_generation) << i;
  ExpectCoded(sequence);
}

TEST(LiveIndex, IsDeterministicUnderASeedForAnyNumberOfThreads) {
  const auto run = [](uint64_t seed, uint32_t threads) {
    StoreOptions options = LiveOptions();
    options.threads = threads;
    TestSequence sequence(SmallSpec(), options);
    sequence.NewSequence(Live(seed));
    for (int chunk = 0; chunk < 5; ++chunk) Add(sequence, kChunk, 0, 1, /*append=*/false);
    EXPECT_TRUE(Finish(sequence).ok());
    WaitIdle(sequence.store());
    return DecodeKeys(sequence.store(), sequence.id(), sequence.layer(1), kIndex).data;
  };
  const std::vector<float> once = run(1, 1);
  EXPECT_TRUE(once == run(1, 3));
  EXPECT_FALSE(once == run(2, 1));
}

TEST(LiveIndex, AFullPoolIsToldKeepsTheRowsAndCanBeMadeUpFor) {
  std::atomic<int> told = 0;
  StoreOptions options = LiveOptions();
  options.on_live_index_failure = [&told](uint64_t, const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    ++told;
  };
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = size_t{2} << 20;
  TestSequence sequence(spec, options);
  Add(sequence, 2 * kChunk, 0, 1, /*append=*/false);  // takes half of the pool
  const uint64_t other = sequence.id();
  sequence.NewSequence(Live());
  Add(sequence, 2 * kChunk, 0, 1, /*append=*/false);
  WaitIdle(sequence.store());
  EXPECT_GT(told.load(), 0);
  EXPECT_EQ(Describe(sequence).live_index.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Finish(sequence).code(), absl::StatusCode::kResourceExhausted);
  sequence.ExpectRowsMatch();
  ASSERT_TRUE(sequence.store().DropSequence(kTenant, other).ok());
  ASSERT_TRUE(Finish(sequence).ok());
  WaitIdle(sequence.store());
  ExpectCoded(sequence);
  sequence.ExpectRowsMatch();
}

TEST(LiveIndex, ABuildOfAnotherIndexKeepsItsDeadlineWhileItWaits) {
  constexpr uint32_t kTokens = 8192;
  StoreOptions options = LiveOptions();
  options.segment_tokens = options.codebook_tokens = options.train_tokens = kTokens;
  TestSequence sequence(SmallSpec(), options);
  SequenceSpec spec = Live();
  spec.live_index->iterations = 100;  // it is in progress for long
  sequence.NewSequence(spec);
  Add(sequence, kTokens, 0, 1, /*append=*/false);
  absl::Status status;
  const auto waited = [&status] { return absl::StrContains(status.message(), "another index"); };
  while (!waited() && sequence.store().Stats(kAllTenants).live_work_count > 0) {
    status = sequence.store().BuildIndex(
        kTenant, sequence.id(),
        {.index = Pq(1, 4), .deadline = SteadyTime::Now() + absl::Milliseconds(5)}, {});
  }
  EXPECT_TRUE(waited()) << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  WaitIdle(sequence.store());
  ASSERT_TRUE(sequence.store().BuildIndex(kTenant, sequence.id(), {.index = Pq(1, 4)}, {}).ok());
}

TEST(LiveIndex, FinishingKeepsItsDeadlineAndCanBeCancelled) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  EXPECT_EQ(Finish(sequence).code(), absl::StatusCode::kFailedPrecondition);  // no tokens
  Add(sequence, kChunk, 0, 1, /*append=*/false);
  WaitIdle(sequence.store());
  WhilePaused(sequence, [&] {
    Add(sequence, kTail, 0, 1, /*append=*/false);
    EXPECT_EQ(sequence.store()
                  .BuildIndex(
                      kTenant, sequence.id(),
                      {.index = kIndex, .deadline = SteadyTime::Now() + absl::Milliseconds(5)}, {})
                  .code(),
              absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(sequence.store()
                  .BuildIndex(kTenant, sequence.id(),
                              {.index = kIndex, .is_cancelled = [] { return true; }}, {})
                  .code(),
              absl::StatusCode::kCancelled);
  });
  ASSERT_TRUE(Finish(sequence).ok());
  WaitIdle(sequence.store());  // else codes may change between the looks at them
  ExpectCoded(sequence);
}

TEST(LiveIndex, AForkGoesOnByItselfAndMergesNothingThatIsShared) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 4 * kChunk, 0, 1, /*append=*/false);
  ASSERT_TRUE(Finish(sequence).ok());
  for (int i = 0; i < 3; ++i) sequence.Append(kTail);
  WaitIdle(sequence.store());
  const auto fork = sequence.store().ForkSequence(kTenant, sequence.id(), 0, "other");
  ASSERT_TRUE(fork.ok()) << fork.status();
  const auto forked = sequence.store().DescribeSequence(kTenant, fork->sequence_id);
  ASSERT_TRUE(forked.ok()) << forked.status();
  EXPECT_EQ(forked->indexes.size(), 1u);
  for (int i = 0; i < 2; ++i) sequence.Append(kTail);
  WaitIdle(sequence.store());
  EXPECT_EQ(Describe(sequence).segments.size(), 4u + 5);  // shared tails stay as they are
  ASSERT_TRUE(sequence.store().DropSequence(kTenant, fork->sequence_id).ok());
  for (int i = 0; i < 4; ++i) sequence.Append(kTail);  // nine in all; the last one stays open
  WaitIdle(sequence.store());
  EXPECT_EQ(Describe(sequence).segments.size(), 4u + 2 + 1);
  sequence.ExpectRowsMatch();
  ExpectCoded(sequence);
}

TEST(LiveIndex, RefusesBadFieldsByName) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  const auto create = [&](const LiveIndex& live) {
    return sequence.store()
        .CreateSequence(kTenant, sequence.cache_id(), {.session = "s", .live_index = live})
        .status();
  };
  EXPECT_EQ(create({.index = {}}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.index = Pq(3, 4)}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.index = Pq(2, 9)}).code(), absl::StatusCode::kInvalidArgument);
  const absl::Status status = create({.index = kIndex, .iterations = 1001});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("live_index.iterations"));
  EXPECT_EQ(sequence.store().ListCaches("").front().sequence_count, 1u);
}

TEST(LiveIndex, AnotherIndexIsBuiltBesideIt) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 3 * kChunk + 10, 0, 1, /*append=*/false);
  ASSERT_TRUE(Finish(sequence).ok());
  sequence.Build(Pq(4, 4));
  for (int i = 0; i < 9; ++i) sequence.Append(70);
  WaitIdle(sequence.store());
  ExpectCoded(sequence);
  const LayerModel& model = sequence.layer(1);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, Pq(4, 4));
  ExpectNearest(model, Pq(4, 4), decoded, {0, 3 * kChunk + 10}, {0, 3 * kChunk + 10});
}

// Nothing waits for the worker, whatever it is doing.
TEST(LiveIndex, DropsAndShutdownsWhileItWorksAreSafe) {
  for (int round = 0; round < 6; ++round) {
    TestSequence sequence(SmallSpec(), LiveOptions());
    for (int i = 0; i < 3; ++i) {
      sequence.NewSequence(Live());
      Add(sequence, 5 * kChunk, 0, 1, /*append=*/false);
      if (i == 1) {
        ASSERT_TRUE(sequence.store().SuspendSequence(kTenant, sequence.id()).ok());
      }
      if (i < 2 && round % 2 == 0) {
        ASSERT_TRUE(sequence.store().DropSequence(kTenant, sequence.id()).ok());
      }
    }
    if (round % 3 == 0) WaitIdle(sequence.store());
  }
}

// Random ingests, appends, roll backs, forks and drops, with the worker at work all the time.
TEST(LiveIndex, SurvivesRandomInterleavings) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    TestSequence sequence(SmallSpec(), LiveOptions(), seed);
    sequence.NewSequence(Live(seed));
    std::mt19937_64& random = sequence.random();
    std::vector<uint64_t> forks;
    for (int step = 0; step < 40; ++step) {
      const auto tokens = static_cast<uint32_t>(1 + random() % 150);
      switch (random() % 9) {
        case 0:
        case 1:
          Add(sequence, 2 * tokens, static_cast<float>(random() % 3), 1, /*append=*/false);
          break;
        case 2:
          if (sequence.tokens() > 0) {
            ASSERT_TRUE(Finish(sequence).ok());
          }
          break;
        case 3:
          if (sequence.tokens() > 100) sequence.Truncate(sequence.tokens() - tokens % 100);
          break;
        case 4: {
          const auto fork = sequence.store().ForkSequence(kTenant, sequence.id(), 0, "fork");
          ASSERT_TRUE(fork.ok()) << fork.status();
          forks.push_back(fork->sequence_id);
          break;
        }
        case 5:
          if (forks.empty()) break;
          ASSERT_TRUE(sequence.store().DropSequence(kTenant, forks.back()).ok());
          forks.pop_back();
          break;
        case 6:
          ASSERT_TRUE(sequence.store().ClosePrefill(kTenant, sequence.id()).ok());
          break;
        default:
          Add(sequence, tokens, 0, 1, /*append=*/true);
      }
    }
    ASSERT_TRUE(Finish(sequence).ok());
    WaitIdle(sequence.store());
    sequence.ExpectRowsMatch();
    ExpectSelects(sequence);
    ExpectCoded(sequence);
    for (const uint64_t fork : forks) {
      ASSERT_TRUE(sequence.store().DropSequence(kTenant, fork).ok());
    }
    ASSERT_TRUE(sequence.store().DropSequence(kTenant, sequence.id()).ok());
    EXPECT_EQ(sequence.store().ListCaches("").front().used_bytes, 0u) << seed;
  }
}

}  // namespace
}  // namespace pqcached::kvstore
