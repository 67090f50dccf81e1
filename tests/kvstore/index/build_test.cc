#include <atomic>
#include <cstring>
#include <map>
#include <set>

#include "kvstore/clock.h"
#include "kvstore/index/builder.h"
#include "kvstore/index/live_index.h"
#include "kvstore/rows/ingest.h"
#include "tests/kvstore/brute_force.h"
#include "tests/kvstore/cache_parts.h"
#include "tests/kvstore/index/nearest.h"

namespace pqcached::kvstore {
namespace {

using testing::CacheParts;
using testing::DecodedKeys;
using testing::DecodeKeys;
using testing::Dump;
using testing::ExpectNearest;
using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::Pq;
using testing::RandomFloats;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

const IndexDescriptor kIndex = Pq(2, 4);

TEST(SplitGenerations, GivesEachGenerationItsTokensAndTheRestToTheLast) {
  const auto cut = [](std::vector<uint32_t> ends) {
    std::vector<std::pair<uint32_t, uint32_t>> ranges;
    for (const CodebookGeneration& generation : SplitGenerations(ends, 100)) {
      ranges.emplace_back(generation.tokens.begin, generation.tokens.end);
    }
    return ranges;
  };
  using Ranges = std::vector<std::pair<uint32_t, uint32_t>>;
  EXPECT_EQ(cut({40}), (Ranges{{0, 40}}));
  EXPECT_EQ(cut({100}), (Ranges{{0, 100}}));
  EXPECT_EQ(cut({60, 120, 180}), (Ranges{{0, 180}}));
  EXPECT_EQ(cut({60, 120, 180, 240, 250}), (Ranges{{0, 120}, {120, 250}}));
  EXPECT_EQ(cut({100, 200, 300}), (Ranges{{0, 100}, {100, 200}, {200, 300}}));
}

TEST(MinGenerationTokens, GivesALongContextFourGenerationsAndNoneFewerTokensThanTheLeast) {
  EXPECT_EQ(MinGenerationTokens(1, 100), 100u);
  EXPECT_EQ(MinGenerationTokens(400, 100), 100u);
  EXPECT_EQ(MinGenerationTokens(401, 100), 101u);
  EXPECT_EQ(MinGenerationTokens(512 << 10, 32 << 10), 128u << 10);
  EXPECT_EQ(MinGenerationTokens(kMaxSequenceTokens, 1), kMaxSequenceTokens / 4);
  for (const uint32_t segments : {1u, 4u, 5u, 7u, 8u, 63u, 64u}) {
    std::vector<uint32_t> ends;
    for (uint32_t i = 1; i <= segments; ++i) ends.push_back(100 * i);
    EXPECT_LE(SplitGenerations(ends, MinGenerationTokens(ends.back(), 100)).size(), 4u) << segments;
  }
}

TEST(Build, CodesEveryTokenWithTheNearestCentroidOfItsGeneration) {
  TestSequence sequence;
  sequence.Ingest(700);  // generations [0, 256), [256, 700)
  sequence.Build(kIndex, 5, 16);
  const LayerModel& model = sequence.layer(3);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
  ExpectNearest(model, kIndex, decoded, {0, 256}, {0, 256});
  ExpectNearest(model, kIndex, decoded, {256, 700}, {256, 700});
}

// D1: rows that were never ingested must not take part in the training. The pool holds huge keys of
// an earlier sequence in the very slots that this one leaves empty.
TEST(Build, RowsThatWereNotIngestedDoNotTakePartInTheTraining) {
  std::vector<std::vector<float>> decoded;
  for (const bool poisoned : {false, true}) {
    TestSequence sequence;
    if (poisoned) {
      std::vector<Floats> rows;
      std::vector<LayerRows> layers;
      for (const LayerModel& model : sequence.layers()) {
        rows.push_back(sequence.RandomKeys(model, 512));
        rows.push_back(sequence.RandomValues(model, 512));
        for (float& element : rows[rows.size() - 2].data) element = 1e4f + 1e3f * element;
      }
      for (size_t i = 0; i < sequence.layers().size(); ++i) {
        layers.push_back({.layer = sequence.layers()[i].group.layers.front(),
                          .keys = rows[2 * i].view(),
                          .values = rows[2 * i + 1].view()});
      }
      ASSERT_TRUE(sequence.store().Append(kTenant, sequence.id(), 0, layers).ok());
      ASSERT_TRUE(sequence.store().DropSequence(kTenant, sequence.id()).ok());
      sequence.NewSequence();
      sequence.random().seed(5);
    }
    sequence.random().seed(5);
    sequence.Ingest(300);  // 84 slots of its third segment stay empty
    sequence.Build(kIndex, 6);
    const LayerModel& model = sequence.layer(1);
    decoded.push_back(DecodeKeys(sequence.store(), sequence.id(), model, kIndex).data);
  }
  EXPECT_EQ(decoded[0], decoded[1]);
}

// D1, the other half: the sink is stored and coded, but not trained on.
TEST(Build, TheSinkDoesNotTakePartInTheTraining) {
  constexpr uint32_t kSink = 16;
  std::vector<std::vector<float>> decoded;
  for (const float sink_key : {1.0f, 5e3f}) {
    TestSequence sequence;
    auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
    ASSERT_TRUE(ingest.ok());
    for (LayerModel& model : sequence.layers()) {
      Floats keys = sequence.RandomKeys(model, 256);
      const Floats values = sequence.RandomValues(model, 256);
      std::fill_n(keys.data.begin(), kSink * model.group.kv_heads * model.group.key_dim, sink_key);
      ASSERT_TRUE((*ingest)
                      ->Write(0, {.layer = model.group.layers.front(),
                                  .keys = keys.view(),
                                  .values = values.view()})
                      .ok());
      model.Append(keys, values);
    }
    ASSERT_TRUE((*ingest)->Commit().ok());
    ingest->reset();
    sequence.Build(kIndex, 6, kSink);
    const LayerModel& model = sequence.layer(1);
    DecodedKeys keys = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
    const size_t sink_floats = size_t{kSink} * model.group.kv_heads * model.group.key_dim;
    decoded.emplace_back(keys.data.begin() + static_cast<ptrdiff_t>(sink_floats), keys.data.end());
  }
  EXPECT_EQ(decoded[0], decoded[1]);
}

// D2: tokens that come after the build get the codes of their nearest centroids, and their own
// rows, from the first one on.
TEST(Build, AppendedTokensGetTheirNearestCentroidsUnderTheLastCodebook) {
  TestSequence sequence;
  sequence.Ingest(700);
  sequence.Build(kIndex, 8);
  sequence.Append(1);
  sequence.Append(63);
  sequence.Append(300);
  const LayerModel& model = sequence.layer(1);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
  ExpectNearest(model, kIndex, decoded, {700, 1064}, {256, 700});
}

TEST(Build, TokensAppendedAfterATruncationAreCodedAnew) {
  TestSequence sequence;
  sequence.Ingest(300);
  sequence.Build(kIndex, 8);
  sequence.Append(100);
  sequence.Truncate(330);
  sequence.Append(90);
  sequence.Truncate(300);
  sequence.Append(250);
  sequence.ExpectRowsMatch();
  const LayerModel& model = sequence.layer(1);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
  ExpectNearest(model, kIndex, decoded, {300, 550}, {0, 300});
}

// D3: nothing that a sequence finds in the pool comes from the sequence that held the memory before
// it.
TEST(Build, ASequenceInReusedMemorySeesOnlyItsOwn) {
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = size_t{4} << 20;  // little: memory is reused at once
  TestSequence sequence(spec);
  for (int round = 0; round < 5; ++round) {
    sequence.Ingest(200);
    sequence.Build(kIndex, 2);
    sequence.Append(100);
    sequence.ExpectRowsMatch();
    const LayerModel& model = sequence.layer(3);
    const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
    ExpectNearest(model, kIndex, decoded, {0, 300}, {0, 200});
    ASSERT_TRUE(sequence.store().DropSequence(kTenant, sequence.id()).ok());
    EXPECT_EQ(sequence.store().ListCaches("").front().used_bytes, 0u);
    sequence.NewSequence();
  }
}

// D4: a block that was read while it was filling is read whole later.
TEST(Build, APartlyFilledBlockIsSeenWholeAfterMoreTokensCame) {
  TestSequence sequence;
  sequence.Ingest(300);
  sequence.Build(kIndex, 2);
  for (const uint32_t tokens : {5u, 1u, 60u, 1u, 100u}) {
    sequence.Append(tokens);
    sequence.ExpectRowsMatch();
    const LayerModel& model = sequence.layer(1);
    std::vector<uint32_t> last(model.group.kv_heads, model.tokens - 1);
    const auto row = sequence.store().FetchTokens(kTenant, sequence.id(), 1, last, RowPart::kRow);
    ASSERT_TRUE(row.ok());
    EXPECT_EQ(testing::ToFloats(*row), model.Rows(model.tokens - 1, model.tokens));
  }
}

std::vector<float> BuildWith(uint32_t threads, const BuildSpec& spec) {
  StoreOptions options = SmallOptions();
  options.threads = threads;
  TestSequence sequence(SmallSpec(), options);
  sequence.Ingest(700);
  EXPECT_TRUE(sequence.store().BuildIndex(kTenant, sequence.id(), spec, {}).ok());
  return DecodeKeys(sequence.store(), sequence.id(), sequence.layer(1), spec.index).data;
}

TEST(Build, IsDeterministicUnderASeedForAnyNumberOfThreads) {
  for (const uint32_t train_tokens : {0u, 100u}) {
    const BuildSpec spec{
        .index = kIndex, .iterations = 5, .seed = 42, .train_tokens = train_tokens};
    const std::vector<float> once = BuildWith(1, spec);
    EXPECT_EQ(once, BuildWith(1, spec));
    EXPECT_EQ(once, BuildWith(4, spec));
    BuildSpec other = spec;
    other.seed = 43;
    EXPECT_NE(once, BuildWith(1, other));
    // A deadline that does not bind changes nothing.
    other = spec;
    other.deadline = SteadyTime::Now() + absl::Hours(1);
    EXPECT_EQ(once, BuildWith(2, other));
  }
}

TEST(Build, MoreIterationsFitBetter) {
  double last = std::numeric_limits<double>::infinity();
  for (const uint32_t iterations : {1u, 3u, 12u}) {
    TestSequence sequence;
    sequence.Ingest(256);
    double inertia = 0;
    ASSERT_TRUE(sequence.store()
                    .BuildIndex(kTenant, sequence.id(), {.index = kIndex, .iterations = iterations},
                                [&](const BuildProgress& progress) {
                                  inertia += progress.inertia;
                                  return true;
                                })
                    .ok());
    EXPECT_LT(inertia, last);
    last = inertia;
  }
}

TEST(Build, ReportsEachLayerAndGenerationOnce) {
  TestSequence sequence;
  sequence.Ingest(700);
  std::set<std::pair<uint32_t, uint32_t>> seen;
  uint32_t layers_done = 0;
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = kIndex, .iterations = 3}, [&](const BuildProgress& p) {
        EXPECT_TRUE(seen.emplace(p.layer, p.codebook_generation).second);
        EXPECT_EQ(p.layer_count, 2u);
        EXPECT_EQ(p.codebook_generation_count, 2u);
        EXPECT_EQ(p.iterations, 3u);
        EXPECT_GT(p.index_bytes, 0u);
        EXPECT_EQ(p.codebook_bytes, 2u * 2 * 32 * 16 * sizeof(float));
        EXPECT_GE(p.layers_done, layers_done);
        layers_done = p.layers_done;
        return true;
      });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(seen, (std::set<std::pair<uint32_t, uint32_t>>{{1, 0}, {1, 1}, {3, 0}, {3, 1}}));
  EXPECT_EQ(layers_done, 2u);
}

TEST(Build, MakesTheSequenceReadyAndItsSegmentsSealed) {
  TestSequence sequence;
  sequence.Ingest(300);
  auto info = sequence.store().DescribeSequence(kTenant, sequence.id());
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->segments[0].state, SegmentState::kClosed);
  EXPECT_EQ(info->segments[2].state, SegmentState::kOpen);
  sequence.Build(kIndex);
  sequence.Append(10);
  info = sequence.store().DescribeSequence(kTenant, sequence.id());
  ASSERT_TRUE(info.ok());
  ASSERT_EQ(info->segments.size(), 4u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(info->segments[i].state, SegmentState::kSealed);
  EXPECT_EQ(info->segments[2].tokens.end, 300u);
  EXPECT_EQ(info->segments[3].state, SegmentState::kOpen);
  EXPECT_EQ(info->segments[3].tokens.begin, 300u);
  for (const LayerInfo& layer : info->layers) {
    EXPECT_THAT(layer.index_states, ::testing::ElementsAre(LayerState::kReady));
    EXPECT_EQ(layer.row_count, 310u);
  }
  EXPECT_EQ(info->row_bytes, 310u * 2 * 2 * 72 * 4);
  // Per layer and kv head: m=2 b=4 are nibbles, one byte a token; 256 counts and 257 begins of
  // lists per segment; two bytes a listed token.
  EXPECT_EQ(info->index_bytes, 4u * (310 + 4 * (256 * 4 + 257 * 2) + 310 * 2));
  EXPECT_EQ(info->used_bytes, sequence.store().ListCaches("").front().used_bytes);
}

TEST(Build, ACancelIsNoticedBetweenIterations) {
  TestSequence sequence;
  sequence.Ingest(300);
  std::atomic<int> asked = 0;
  const absl::Status status =
      sequence.store().BuildIndex(kTenant, sequence.id(),
                                  {.index = kIndex,
                                   .iterations = 1000,
                                   .is_cancelled = [&asked] { return asked.fetch_add(1) >= 5; }},
                                  [](const BuildProgress&) { return true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_TRUE(sequence.store().DescribeSequence(kTenant, sequence.id())->indexes.empty());
  sequence.Build(kIndex, 2);
}

TEST(Build, CancelledLeavesNoIndexAndCanBeRepeated) {
  TestSequence sequence;
  sequence.Ingest(700);
  sequence.Build(Pq(1, 4), 1);  // closes the last segment, which a cancelled build does too
  const std::string before = Dump(sequence.store());
  for (uint32_t reports : {0u, 1u, 3u}) {
    uint32_t seen = 0;
    const absl::Status status =
        sequence.store().BuildIndex(kTenant, sequence.id(), {.index = kIndex},
                                    [&](const BuildProgress&) { return seen++ < reports; });
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
    EXPECT_TRUE(Dump(sequence.store()) == before);
  }
  sequence.Build(kIndex);
}

TEST(Build, ThatMissesItsDeadlineLeavesNoTrace) {
  TestSequence sequence;
  sequence.Ingest(700);
  const std::string before = Dump(sequence.store());
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = kIndex, .deadline = SteadyTime::Now() - absl::Seconds(1)},
      {});
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Dump(sequence.store()) == before);
}

// A cache of one float layer, and the sequence in it, without a store.
struct BareSequence {
  BareSequence(const StoreOptions& options, uint32_t tokens) : parts(options, options.threads) {
    CacheSpec spec = SmallSpec();
    spec.groups[0].layers = {0};
    auto pool = Pool::Create({.capacity_bytes = spec.capacity_bytes});
    EXPECT_TRUE(pool.ok()) << pool.status();
    cache = std::make_shared<Cache>(1, "default", spec, *std::move(pool), parts.shared());
    sequence = std::make_shared<Sequence>(1, "session", 1);
    std::mt19937_64 random(3);
    const Floats keys = RandomFloats(random, {tokens, 2, 32});
    const Floats values = RandomFloats(random, {tokens, 2, 40});
    auto ingest = BeginIngest(cache, *WriteLease::Acquire(sequence), /*has_live_index=*/false,
                              /*announced=*/{});
    EXPECT_TRUE(ingest.ok()) << ingest.status();
    EXPECT_TRUE(
        (*ingest)->Write(0, {.layer = 0, .keys = keys.view(), .values = values.view()}).ok());
    EXPECT_TRUE((*ingest)->Commit().ok());
  }

  CacheParts parts;
  std::shared_ptr<const Cache> cache;
  std::shared_ptr<Sequence> sequence;
};

// On a clock that only the build's own questions move: a tick per question.
TEST(Build, UnderADeadlineEndsBeforeItWithFewerIterations) {
  StoreOptions options = SmallOptions();
  options.threads = 1;
  options.codebook_tokens = 16384;
  BareSequence bare(options, 12000);
  const SteadyTime began = SteadyTime();
  const SteadyTime deadline = began + absl::Seconds(100);
  SteadyTime now = began;
  const BuildClock clock = [&now] { return now += absl::Seconds(1); };
  uint32_t most = 0;
  const absl::Status status = BuildSequenceIndex(
      *bare.cache, bare.parts.live, *WriteLease::Acquire(bare.sequence),
      {.index = Pq(2, 8), .iterations = 1000, .deadline = deadline},
      [&](const BuildProgress& p) {
        most = std::max(most, p.iterations);
        return true;
      },
      clock);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_LT(now, deadline);
  EXPECT_GT(now, began + absl::Seconds(50)) << "the time was there and was not used";
  EXPECT_GT(most, 2u);
  EXPECT_LT(most, 100u);  // a tick each
}

// Rows that come while a build runs are neither refused nor left without codes.
TEST(Build, LetsWritersGoOnAndCodesWhatTheyAdd) {
  TestSequence sequence;
  sequence.Ingest(300);
  uint32_t reports = 0;
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = kIndex, .iterations = 3}, [&](const BuildProgress&) {
        sequence.Append(reports++ == 0 ? 150 : 20);
        return true;
      });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_GE(reports, 2u);
  sequence.Append(40);
  sequence.ExpectRowsMatch();
  const LayerModel& model = sequence.layer(3);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
  ExpectNearest(model, kIndex, decoded, {0, model.tokens}, {0, 300});
  const auto info = sequence.store().DescribeSequence(kTenant, sequence.id());
  ASSERT_TRUE(info.ok());
  for (const LayerInfo& layer : info->layers) {
    EXPECT_THAT(layer.index_states, ::testing::ElementsAre(LayerState::kReady));
  }
}

TEST(Build, RowsThatComeMeanwhileAreCodedUnderTheLastOfSeveralGenerations) {
  TestSequence sequence;
  sequence.Ingest(700);  // generations [0, 256), [256, 700)
  uint32_t reports = 0;
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = kIndex, .iterations = 3}, [&](const BuildProgress&) {
        sequence.Append(reports++ == 0 ? 150 : 20);
        return true;
      });
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_GE(reports, 4u) << "two generations of two layers";
  sequence.ExpectRowsMatch();
  for (const uint32_t layer : {1u, 3u}) {
    const LayerModel& model = sequence.layer(layer);
    const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
    ExpectNearest(model, kIndex, decoded, {0, 256}, {0, 256});
    ExpectNearest(model, kIndex, decoded, {256, model.tokens}, {256, 700});
  }
}

TEST(Build, MakesLayersReadyOneByOne) {
  StoreOptions options = SmallOptions();
  options.threads = 1;
  TestSequence sequence(SmallSpec(), options);
  sequence.Ingest(300);
  std::vector<std::pair<uint32_t, LayerState>> last;
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = kIndex, .iterations = 2}, [&](const BuildProgress& p) {
        const auto info = sequence.store().DescribeSequence(kTenant, sequence.id());
        EXPECT_TRUE(info.ok());
        last.emplace_back(p.layer, info->layers.back().index_states.front());
        return true;
      });
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(last.size(), 2u);
  EXPECT_EQ(last[0], std::pair(1u, LayerState::kFilled));
  EXPECT_EQ(last[1], std::pair(3u, LayerState::kReady));
}

TEST(Build, InAFullPoolSaysTheShortfallAndLeavesNoTrace) {
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = size_t{1} << 20;  // rows of three segments take 12 x 64 KiB
  TestSequence sequence(spec);
  sequence.Ingest(300);
  const std::string before = Dump(sequence.store());
  const absl::Status status =
      sequence.store().BuildIndex(kTenant, sequence.id(), {.index = kIndex}, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("bytes short"));
  EXPECT_TRUE(Dump(sequence.store()) == before);
  sequence.ExpectRowsMatch();
}

TEST(Build, RefusesWhatItCannotDo) {
  TestSequence sequence;
  const auto build = [&](const BuildSpec& spec) {
    return sequence.store().BuildIndex(kTenant, sequence.id(), spec, {}).code();
  };
  EXPECT_EQ(build({.index = kIndex}), absl::StatusCode::kFailedPrecondition);  // no tokens
  sequence.Ingest(200);
  EXPECT_EQ(build({.index = {}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build({.index = Pq(3, 4)}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build({.index = Pq(2, 0)}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build({.index = Pq(2, 9)}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build({.index = kIndex, .iterations = 1001}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build({.index = kIndex}), absl::StatusCode::kOk);
  const std::string before = Dump(sequence.store());
  EXPECT_EQ(build({.index = kIndex}), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Dump(sequence.store()) == before);
  for (const uint32_t subspaces : {1u, 4u, 8u}) sequence.Build(Pq(subspaces, 4));
  EXPECT_EQ(build({.index = Pq(16, 4)}), absl::StatusCode::kResourceExhausted);
}

TEST(Build, RefusesLayersOfDifferentLengthByName) {
  TestSequence sequence;
  sequence.Ingest(100);
  auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
  ASSERT_TRUE(ingest.ok());
  LayerModel& model = sequence.layer(3);
  const Floats keys = sequence.RandomKeys(model, 50);
  const Floats values = sequence.RandomValues(model, 50);
  ASSERT_TRUE(
      (*ingest)->Write(100, {.layer = 3, .keys = keys.view(), .values = values.view()}).ok());
  ASSERT_TRUE((*ingest)->Commit().ok());
  const absl::Status status =
      sequence.store().BuildIndex(kTenant, sequence.id(), {.index = kIndex}, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("layer 3"));
}

}  // namespace
}  // namespace pqcached::kvstore
