// Steps of sequences with a live index: how the first of them ends the prefill.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "tests/client/step/step_fixture.h"

namespace pqcached {
namespace {

using testing::Expect;
using testing::kOutput;
using testing::kSink;
using testing::kTestTenant;
using testing::kWindow;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::Range;
using testing::SpecOf;
using testing::StepTest;

class LiveIndexTest : public StepTest {
 protected:
  static Sequence Create(Cache& cache) {
    SequenceOptions options;
    options.live_index = LiveIndex{};
    return Must(cache.CreateSequence(options));
  }

  void Ingest(Sequence& sequence, uint64_t begin, uint64_t end) {
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, begin, layer_.keys(begin, end), layer_.values(begin, end)));
    }
  }

  Status Begin(Sequence& sequence, uint64_t position, uint32_t timeout_ms = 0) {
    const StepItem items[] = {{&sequence, position}};
    return client_.BeginStep(items, &selection_, timeout_ms).status();
  }

  kvstore::SequenceInfo Describe(const Sequence& sequence) {
    return *sidecar_.store->DescribeSequence(kTestTenant, sequence.id());
  }

  // Calls `body` while a build of another index keeps the worker of live indexes idle.
  void WhileNothingIsIndexed(const Sequence& sequence, const std::function<void()>& body) {
    bool called = false;
    const absl::Status built = sidecar_.store->BuildIndex(
        kTestTenant, sequence.id(), {.index = {kvstore::IndexKind::kPq, 1, 4}, .iterations = 1},
        [&](const kvstore::BuildProgress&) {
          if (!called) body();
          called = true;
          return true;
        });
    ASSERT_TRUE(built.ok()) << built;
    ASSERT_TRUE(called);
  }

  void WaitIdle() {
    ASSERT_TRUE(sidecar_.store->WaitIdle(kvstore::SteadyTime::Now() + absl::Minutes(2)));
  }

  const Layer layer_{400, 21};
};

TEST_F(LiveIndexTest, TheFirstStepEndsThePrefillOnceAndWaitsForWhatItNeeds) {
  Sequence sequence = Create(cache_);
  Ingest(sequence, 0, 300);
  const StepItem items[] = {{&sequence, 300}};
  MustBeOk(client_.BeginStep(items, nullptr).status());  // selects nothing: ends nothing
  EXPECT_EQ(Describe(sequence).segments.back().state, kvstore::SegmentState::kOpen);
  EXPECT_EQ(sidecar_.closed_prefills, 0u);
  MustBeOk(Decode(sequence, layer_, 300));
  EXPECT_EQ(sidecar_.closed_prefills, 1u);
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Describe(sequence).segments.back().tokens.begin, 300u);  // a tail behind the prefill
  uint64_t before = sidecar_.calls;
  for (uint64_t position = 301; position < 330; ++position) {
    MustBeOk(Decode(sequence, layer_, position));
  }
  EXPECT_EQ(sidecar_.calls, before);
  MustBeOk(sequence.Flush());
  Ingest(sequence, 330, 350);  // the next turn
  MustBeOk(Decode(sequence, layer_, 350));
  EXPECT_EQ(sidecar_.closed_prefills, 2u);
  before = sidecar_.calls;
  MustBeOk(Decode(sequence, layer_, 351));
  EXPECT_EQ(sidecar_.calls, before);
  EXPECT_EQ(sidecar_.builds, 0u);
  const Attention full = layer_.Attend({Layer::kKvHeads, Range(kSink, 352 - kWindow)});
  for (size_t i = 0; i < kOutput; ++i) ASSERT_NEAR(output_[i], full.output[i], 1e-4f) << i;
}

TEST_F(LiveIndexTest, StepsOfASequenceAndItsForkAttendExactlyUntilTheIndexIsReady) {
  Sequence sequence = Create(cache_);
  Ingest(sequence, 0, 300);
  const Selection few = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.1};
  constexpr uint32_t kAll = 301 - kSink - kWindow;
  constexpr uint32_t kFew = 30 - kSink - kWindow;  // a tenth of 301 tokens
  const Attention all = layer_.Attend({Layer::kKvHeads, Range(kSink, 301 - kWindow)});
  const auto attend = [&](Sequence& of, std::vector<float>* output) {
    const StepItem items[] = {{&of, 300}};
    Step step = Must(client_.BeginStep(items, &few, 0, PQC_STEP_EXACT_UNTIL_INDEXED));
    std::vector<float> lse(Layer::kQueryHeads);
    std::vector<uint32_t> counts(1);
    output->resize(kOutput);
    MustBeOk(step.Attend(1, layer_.queries(), *output, lse, nullptr, counts));
    return counts[0];
  };
  std::vector<float> output;
  std::optional<Sequence> child;
  WhileNothingIsIndexed(sequence, [&] {
    child = Must(sequence.Fork());
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(attend(sequence, &output), kAll);
      for (size_t j = 0; j < kOutput; ++j) ASSERT_NEAR(output[j], all.output[j], 1e-4f) << j;
    }
    EXPECT_EQ(Must(sequence.Progress()).layers_ready, 0u);
    // The fork's own index may be ready by now.
    const uint32_t count = attend(*child, &output);
    EXPECT_TRUE(count == kAll || count == kFew) << count;
    for (size_t j = 0; count == kAll && j < kOutput; ++j) {
      ASSERT_NEAR(output[j], all.output[j], 1e-4f) << j;
    }
  });
  for (Sequence* each : {&sequence, &*child}) {
    while (attend(*each, &output) == kAll) std::this_thread::yield();
    EXPECT_EQ(attend(*each, &output), kFew);
    MustBeOk(Decode(*each, layer_, 300));
  }
}

TEST_F(LiveIndexTest, AStepFindsTheIndexBeforeAnyRowIsIndexed) {
  for (const uint64_t appended : {0, 1}) {
    Sequence sequence = Create(cache_);
    Ingest(sequence, 0, 100);
    WhileNothingIsIndexed(sequence, [&] {
      if (appended > 0) {
        EXPECT_TRUE(sequence.Append(100, Rows(layer_, 100, 101)).status().ok());
      }
      const Status status = Begin(sequence, 100 + appended);
      EXPECT_TRUE(status.ok()) << status.ToString();
    });
    MustBeOk(Decode(sequence, layer_, 100 + appended));
  }
}

TEST_F(LiveIndexTest, TheEndOfThePrefillWaitsForTheRowsOfEarlierSteps) {
  Sequence sequence = Create(cache_);
  Ingest(sequence, 0, 300);
  sidecar_.CloseGate();
  MustBeOk(EndOnly(sequence, layer_, 300, 1));
  Expect(Begin(sequence, 301, 20), PQC_DEADLINE_EXCEEDED, "items[0]", "not stored in time");
  EXPECT_EQ(sidecar_.closed_prefills, 0u);
  sidecar_.OpenGate();
  MustBeOk(Decode(sequence, layer_, 301));
  EXPECT_EQ(sidecar_.closed_prefills, 1u);
}

TEST_F(LiveIndexTest, AForeignWriterAbortsTheStepWithARetryTime) {
  Sequence sequence = Create(cache_);
  Ingest(sequence, 0, 300);
  {
    const auto writer = sidecar_.store->BeginIngest(kTestTenant, sequence.id());
    ASSERT_TRUE(writer.ok()) << writer.status();
    const Status status = Begin(sequence, 300);
    Expect(status, PQC_ABORTED, "items[0].sequence", "another writer");
    EXPECT_GT(status.retry_ms(), 0u);
  }
  EXPECT_EQ(sidecar_.closed_prefills, 1u);
  MustBeOk(Decode(sequence, layer_, 300));
  EXPECT_EQ(sidecar_.closed_prefills, 2u);
}

TEST_F(LiveIndexTest, AStepAfterOneThatWaitedInVainGivesTheReason) {
  CacheSpec spec = SpecOf("small", {0, 1});
  spec.capacity_bytes = 1 << 20;
  Cache small = Must(client_.OpenCache(spec));
  Sequence sequence = Create(small);
  constexpr uint32_t kTokens = 30;  // too few for codebooks that are trained ahead
  Ingest(sequence, 0, kTokens);
  std::vector<Sequence> others;  // fill the pool with rows
  const auto fill = [&] {
    Sequence& other = others.emplace_back(Must(small.CreateSequence()));
    const Status ingested = other.Ingest(0, 0, layer_.keys(0, 100), layer_.values(0, 100));
    return ingested.ok();
  };
  while (fill()) {
  }
  MustBeOk(Begin(sequence, kTokens));
  WaitIdle();
  ASSERT_EQ(Describe(sequence).live_index.code(), absl::StatusCode::kResourceExhausted);
  const StepItem items[] = {{&sequence, kTokens}};
  {
    Step step = Must(client_.BeginStep(items, &selection_, 20));
    std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
    EXPECT_EQ(step.Attend(0, layer_.queries(), output, lse).code(), PQC_DEADLINE_EXCEEDED);
  }
  EXPECT_EQ(Begin(sequence, kTokens).code(), PQC_RESOURCE_EXHAUSTED);
  WaitIdle();
  for (Sequence& other : others) MustBeOk(other.Drop());
  EXPECT_EQ(Begin(sequence, kTokens).code(), PQC_RESOURCE_EXHAUSTED);  // starts the work again
  WaitIdle();
  MustBeOk(Decode(sequence, layer_, kTokens));
}

}  // namespace
}  // namespace pqcached
