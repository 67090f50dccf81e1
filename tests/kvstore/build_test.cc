#include <atomic>
#include <cstring>
#include <map>
#include <set>

#include "kvstore/builder.h"
#include "tests/kvstore/brute_force.h"

namespace pqcached::kvstore {
namespace {

using testing::DecodedKeys;
using testing::DecodeKeys;
using testing::Dump;
using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::Pq;
using testing::RandomFloats;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

constexpr uint32_t kSubspaces = 2;
const IndexDescriptor kIndex = Pq(kSubspaces, 4);

using Centroid = std::vector<float>;

Centroid Part(const float* key, uint32_t key_dim, uint32_t subspace) {
  const uint32_t dim = key_dim / kSubspaces;
  return {key + subspace * dim, key + (subspace + 1) * dim};
}

double Distance(const Centroid& a, const Centroid& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return sum;
}

// The centroids that tokens [begin, end) are coded with, as far as they are used.
std::set<Centroid> UsedCentroids(const LayerModel& model, const DecodedKeys& decoded,
                                 uint32_t kv_head, uint32_t subspace, uint32_t begin,
                                 uint32_t end) {
  std::set<Centroid> used;
  for (uint32_t token = begin; token < end; ++token) {
    used.insert(Part(decoded.key(token, kv_head), model.group.key_dim, subspace));
  }
  return used;
}

// Every token of [begin, end) is coded with the nearest of the centroids that [codebook_begin,
// codebook_end) uses.
void ExpectNearest(const LayerModel& model, const DecodedKeys& decoded, PositionRange tokens,
                   PositionRange codebook) {
  for (uint32_t kv_head = 0; kv_head < model.group.kv_heads; ++kv_head) {
    for (uint32_t subspace = 0; subspace < kSubspaces; ++subspace) {
      const std::set<Centroid> used =
          UsedCentroids(model, decoded, kv_head, subspace, codebook.begin, codebook.end);
      ASSERT_LE(used.size(), size_t{1} << kIndex.bits);
      for (uint32_t token = tokens.begin; token < tokens.end; ++token) {
        const Centroid key = Part(model.key(token, kv_head), model.group.key_dim, subspace);
        const Centroid coded = Part(decoded.key(token, kv_head), model.group.key_dim, subspace);
        ASSERT_EQ(used.count(coded), 1u) << "token " << token << " is coded by another codebook";
        for (const Centroid& centroid : used) {
          ASSERT_LE(Distance(key, coded), Distance(key, centroid) + 1e-3) << "token " << token;
        }
      }
    }
  }
}

TEST(CutEpochs, GivesEachEpochItsTokensAndTheRestToTheLast) {
  const auto cut = [](std::vector<uint32_t> ends) {
    std::vector<std::pair<uint32_t, uint32_t>> ranges;
    for (const Epoch& epoch : CutEpochs(ends, 100)) {
      ranges.emplace_back(epoch.tokens.begin, epoch.tokens.end);
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

TEST(Build, CodesEveryTokenWithTheNearestCentroidOfItsEpoch) {
  TestSequence sequence;
  sequence.Ingest(700);  // epochs [0, 256), [256, 700)
  sequence.Build(kIndex, 5, 16);
  const LayerModel& model = sequence.layer(3);
  const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
  ExpectNearest(model, decoded, {0, 256}, {0, 256});
  ExpectNearest(model, decoded, {256, 700}, {256, 700});
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
  ExpectNearest(model, decoded, {700, 1064}, {256, 700});
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
  ExpectNearest(model, decoded, {300, 550}, {0, 300});
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
    ExpectNearest(model, decoded, {0, 300}, {0, 200});
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
    other.deadline = absl::Now() + absl::Hours(1);
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

TEST(Build, ReportsEachLayerAndEpochOnce) {
  TestSequence sequence;
  sequence.Ingest(700);
  std::set<std::pair<uint32_t, uint32_t>> seen;
  uint32_t layers_done = 0;
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = kIndex, .iterations = 3}, [&](const BuildProgress& p) {
        EXPECT_TRUE(seen.emplace(p.layer, p.epoch).second);
        EXPECT_EQ(p.layer_count, 2u);
        EXPECT_EQ(p.epoch_count, 2u);
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
  // Per layer and kv head: m=2 b=4 are nibbles, one byte a token; 256 counts and 257 begins of lists
  // per segment; two bytes a listed token.
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
                                   .cancelled = [&asked] { return asked.fetch_add(1) >= 5; }},
                                  [](const BuildProgress&) { return true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_TRUE(sequence.store().DescribeSequence(kTenant, sequence.id())->indexes.empty());
  sequence.Build(kIndex, 2);
}

TEST(Build, CancelledLeavesNoTraceAndCanBeRepeated) {
  TestSequence sequence;
  sequence.Ingest(700);
  const std::string before = Dump(sequence.store());
  for (uint32_t reports : {0u, 1u, 3u}) {
    uint32_t seen = 0;
    const absl::Status status =
        sequence.store().BuildIndex(kTenant, sequence.id(), {.index = kIndex},
                                    [&](const BuildProgress&) { return seen++ < reports; });
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(Dump(sequence.store()), before);
  }
  sequence.Ingest(10);  // the prefill is still open
  sequence.Build(kIndex);
}

TEST(Build, ThatMissesItsDeadlineLeavesNoTrace) {
  TestSequence sequence;
  sequence.Ingest(700);
  const std::string before = Dump(sequence.store());
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = kIndex, .deadline = absl::Now() - absl::Seconds(1)}, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Dump(sequence.store()), before);
}

TEST(Build, UnderADeadlineEndsInTimeWithFewerIterations) {
  TestSequence sequence;
  sequence.Ingest(4000);
  uint32_t most = 0;
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(),
      {.index = Pq(2, 8), .iterations = 1000, .deadline = absl::Now() + absl::Milliseconds(500)},
      [&](const BuildProgress& p) {
        most = std::max(most, p.inertia > 0 ? 1u : 0u);
        return true;
      });
  // On a machine so busy that not even the first codebooks come in time, the other documented
  // answer.
  if (!status.ok()) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    return;
  }
  EXPECT_EQ(most, 1u);
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
  EXPECT_EQ(Dump(sequence.store()), before);
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
  EXPECT_EQ(build({.index = Pq(2, 3)}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build({.index = Pq(2, 9)}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build({.index = kIndex, .iterations = 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build({.index = kIndex, .iterations = 1001}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build({.index = kIndex}), absl::StatusCode::kOk);
  const std::string before = Dump(sequence.store());
  EXPECT_EQ(build({.index = kIndex}), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Dump(sequence.store()), before);
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
