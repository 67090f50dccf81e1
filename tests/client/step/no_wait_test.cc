// Steps that never wait, and what a client reports of a sequence without a call of the sidecar. The
// client's timeout is so long that a call which waits runs into the time limit of the test.
#include <atomic>
#include <thread>

#include "tests/client/step/step_fixture.h"

namespace pqcached::testing {
namespace {

class NoWaitTest : public StepTest {
 protected:
  NoWaitTest() : StepTest(600000) {}

  Result<Step> Begin(Sequence& sequence, uint64_t position, uint64_t flags = PQC_STEP_NO_WAIT) {
    const StepItem items[] = {{&sequence, position, 1}};
    return client_.BeginStep(items, &selection_, 0, flags);
  }

  // Begins again as the retry time says, within the test's own time limit.
  Step BeginWhenReady(Sequence& sequence, uint64_t position) {
    for (;;) {
      Result<Step> step = Begin(sequence, position);
      if (step.ok()) return std::move(*step);
      if (step.status().retry_ms() == 0) MustBeOk(step.status());
      std::this_thread::yield();
    }
  }

  Status Finish(Step& step, const Layer& layer, uint64_t position) {
    output_.resize(kOutput);
    lse_.resize(Layer::kQueryHeads);
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(step.Attend(number, layer.queries(), output_, lse_));
    }
    return step.End(Rows(layer, position, position + 1));
  }

  uint64_t WaitedCalls() { return Must(client_.Count()).rpcs; }
};

TEST_F(NoWaitTest, TheFirstStepGetsItsLeaseInTheBackground) {
  const Layer layer(400, 1);
  Sequence sequence = Fill(layer, 300);
  const uint64_t before = WaitedCalls();
  const Result<Step> first = Begin(sequence, 300);
  Expect(first.status(), PQC_DEADLINE_EXCEEDED, "items[0].sequence");
  EXPECT_GT(first.status().retry_ms(), 0u);
  for (uint64_t position = 300; position < 400; ++position) {
    Step step = BeginWhenReady(sequence, position);
    MustBeOk(Finish(step, layer, position));
  }
  EXPECT_EQ(WaitedCalls(), before);
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 0, 400);
}

TEST_F(NoWaitTest, APollTimeoutIsTheSameAsTheFlag) {
  const Layer layer(320, 2);
  Sequence sequence = Fill(layer, 300);
  const StepItem items[] = {{&sequence, 300, 1}};
  Expect(client_.BeginStep(items, &selection_, PQC_TIMEOUT_POLL).status(), PQC_DEADLINE_EXCEEDED,
         "items[0].sequence");
  Expect(client_.BeginStep(items, &selection_, 0, 16).status(), PQC_UNIMPLEMENTED, "options.flags");
}

TEST_F(NoWaitTest, WithoutAWorkerAStepIsUnavailableAtOnce) {
  const Layer layer(320, 3);
  Sequence sequence = Fill(layer, 300);
  MustBeOk(Decode(sequence, layer, 300));
  MustBeOk(sequence.Flush());
  for (uint64_t position = 301; position < 305; ++position) {
    sidecar_.EndWorker();
    for (int i = 0; i < 10; ++i) {
      const Result<Step> refused = Begin(sequence, position);
      Expect(refused.status(), PQC_UNAVAILABLE, "", "no new worker has started yet");
      EXPECT_EQ(refused.status().retry_ms(), 10u);  // a step that has waited in vain says 1 s
    }
    sidecar_.StartWorker();
    Step step = BeginWhenReady(sequence, position);
    MustBeOk(Finish(step, layer, position));
    MustBeOk(sequence.Flush());
  }
  ExpectRows(sequence, layer, 0, 305);
}

TEST_F(NoWaitTest, RowsThatAreNotStoredYetAreNotAwaited) {
  const Layer layer(400, 4);
  Sequence sequence = Fill(layer, 300);
  MustBeOk(Decode(sequence, layer, 300));
  MustBeOk(sequence.Flush());
  sidecar_.CloseGate();
  uint64_t position = 301;
  for (;; ++position) {  // until the first token that is not stored leaves the window
    Result<Step> step = Begin(sequence, position);
    if (!step.ok()) {
      Expect(step.status(), PQC_DEADLINE_EXCEEDED, "items[0].query_position");
      EXPECT_GT(step.status().retry_ms(), 0u);
      break;
    }
    MustBeOk(Finish(*step, layer, position));
  }
  EXPECT_EQ(position, 301 + kWindow);
  const pqc_progress waiting = Must(sequence.Progress());
  EXPECT_EQ(waiting.stored_tokens, 301u);
  EXPECT_EQ(waiting.passed_tokens, position);
  sidecar_.OpenGate();
  Step step = BeginWhenReady(sequence, position);
  MustBeOk(Finish(step, layer, position));
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Progress()).stored_tokens, position + 1);
  ExpectRows(sequence, layer, 0, position + 1);
}

TEST_F(NoWaitTest, ALiveIndexEndsItsPrefillInTheBackground) {
  const Layer layer(700, 5);
  SequenceOptions options;
  options.live_index = LiveIndex{.sink_tokens = kSink};
  Sequence sequence = Must(cache_.CreateSequence(options));
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(sequence.Ingest(number, 0, layer.keys(0, 600), layer.values(0, 600)));
  }
  const uint64_t before = WaitedCalls();
  for (uint64_t position = 600; position < 610; ++position) {
    Step step = BeginWhenReady(sequence, position);
    for (uint32_t number = 0; number < kLayers; ++number) {
      Status status;
      output_.resize(kOutput);
      lse_.resize(Layer::kQueryHeads);
      do {  // the call itself may be repeated in a step that does not wait
        status = step.Attend(number, layer.queries(), output_, lse_);
        if (!status.ok()) {
          Expect(status, PQC_DEADLINE_EXCEEDED, status.field().c_str());
          EXPECT_GT(status.retry_ms(), 0u);
        }
      } while (!status.ok());
    }
    MustBeOk(step.End(Rows(layer, position, position + 1)));
  }
  EXPECT_EQ(WaitedCalls(), before);
  EXPECT_GE(sidecar_.closed_prefills, 1u);
}

// An answer in the background may be older than a truncation by another call.
TEST(SequenceStateTest, AnAnswerFromBeforeATruncationIsNotUsed) {
  client::SequenceState state;
  state.SetDescribed(300, 0);
  EXPECT_EQ(state.token_count, 300u);
  state.SetDescribed(200, 0);  // rows have been stored since
  EXPECT_EQ(state.token_count, 300u);
  state.SetTruncated(100);
  state.SetDescribed(310, 0);
  EXPECT_EQ(state.token_count, 100u);
  state.SetDescribed(310, 1);
  EXPECT_EQ(state.token_count, 310u);
}

TEST_F(NoWaitTest, AMissingIndexIsReportedOnceItIsKnown) {
  const Layer layer(320, 6);
  Sequence sequence = Must(cache_.CreateSequence());
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(sequence.Ingest(number, 0, layer.keys(0, 300), layer.values(0, 300)));
  }
  Status status = Begin(sequence, 300).status();
  while (status.code() == PQC_DEADLINE_EXCEEDED) {
    std::this_thread::yield();
    status = Begin(sequence, 300).status();
  }
  Expect(status, PQC_FAILED_PRECONDITION, status.field().c_str());
  EXPECT_EQ(status.retry_ms(), 0u);
  MustBeOk(sequence.BuildIndex({.sink_tokens = kSink}));
  Step step = BeginWhenReady(sequence, 300);
  MustBeOk(Finish(step, layer, 300));
}

TEST_F(NoWaitTest, ProgressIsKnownWithoutACall) {
  const Layer layer(320, 7);
  Sequence sequence = Fill(layer, 300);
  const uint64_t before = WaitedCalls();
  pqc_progress progress = Must(sequence.Progress());
  EXPECT_EQ(progress.layer_count, kLayers);
  while (progress.is_unattached) {  // the lease comes in the background
    std::this_thread::yield();
    progress = Must(sequence.Progress());
  }
  EXPECT_EQ(progress.stored_tokens, 300u);
  EXPECT_EQ(progress.passed_tokens, 300u);
  EXPECT_EQ(progress.indexed_tokens, 300u);
  EXPECT_EQ(progress.layers_ready, kLayers);
  EXPECT_EQ(progress.has_index, 1u);
  EXPECT_EQ(progress.is_suspended, 0u);
  EXPECT_EQ(progress.is_restarting, 0u);
  EXPECT_EQ(progress.is_lost, 0u);
  EXPECT_EQ(progress.row_status, PQC_OK);
  EXPECT_EQ(WaitedCalls(), before);

  MustBeOk(sequence.Suspend());
  EXPECT_EQ(Must(sequence.Progress()).is_suspended, 1u);
  Must(sequence.Resume());
  EXPECT_EQ(Must(sequence.Progress()).is_suspended, 0u);

  sidecar_.EndWorker();
  EXPECT_EQ(Must(sequence.Progress()).is_restarting, 1u);
  sidecar_.knows_session = false;
  sidecar_.StartWorker();
  while (!Must(sequence.Progress()).is_lost) std::this_thread::yield();
  EXPECT_EQ(Must(sequence.Progress()).is_restarting, 0u);
}

TEST_F(NoWaitTest, ProgressOfAnUnindexedAndOfALiveSequence) {
  const Layer layer(700, 8);
  SequenceOptions options;
  options.live_index = LiveIndex{.sink_tokens = kSink};
  Sequence live = Must(cache_.CreateSequence(options)), plain = Must(cache_.CreateSequence());
  for (Sequence* sequence : {&live, &plain}) {
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence->Ingest(number, 0, layer.keys(0, 600), layer.values(0, 600)));
    }
  }
  pqc_progress progress = Must(plain.Progress());
  while (progress.is_unattached) progress = Must(plain.Progress());
  EXPECT_EQ(progress.stored_tokens, 600u);
  EXPECT_EQ(progress.has_index, 0u);
  EXPECT_EQ(progress.layers_ready, 0u);
  // The first segments are coded without any call; the last one when the prefill is closed.
  while (Must(live.Progress()).indexed_tokens == 0) std::this_thread::yield();
  EXPECT_LT(Must(live.Progress()).indexed_tokens, 600u);
  MustBeOk(live.BuildIndex({.sink_tokens = kSink}));
  while (Must(live.Progress()).layers_ready < kLayers) std::this_thread::yield();
  EXPECT_EQ(Must(live.Progress()).indexed_tokens, 600u);
}

TEST_F(NoWaitTest, TheNumberOfThreadsMayChangeWhileStepsRun) {
  const Layer layer(400, 9);
  Sequence sequence = Fill(layer, 300);
  MustBeOk(Decode(sequence, layer, 300));
  const std::vector<float> expected = output_;
  const StepItem items[] = {{&sequence, 300, 1}};  // the same position again
  std::atomic<bool> done = false;
  std::thread changer([&] {
    for (uint32_t i = 0; !done; ++i) MustBeOk(client_.SetThreads(1 + i % 5));
  });
  for (int i = 0; i < 200; ++i) {
    Step step = Must(client_.BeginStep(items, &selection_));
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(step.Attend(number, layer.queries(), output_, lse_));
    }
    EXPECT_EQ(output_, expected);
  }
  done = true;
  changer.join();
  Expect(client_.SetThreads(257), PQC_INVALID_ARGUMENT, "thread_count");
}

class HookTest : public StepTest {
 protected:
  // Runs everything on the calling thread, and keeps the largest count.
  static void Run(void* context, uint32_t count, void (*body)(void* context, uint32_t index),
                  void* argument) {
    auto& most = *static_cast<std::atomic<uint32_t>*>(context);
    if (count > most) most = count;
    for (uint32_t i = 0; i < count; ++i) body(argument, i);
  }

  HookTest() : StepTest(2000, {.hook = &Run, .hook_context = &most_, .thread_count = 3}) {}

  static inline std::atomic<uint32_t> most_ = 0;
};

TEST_F(HookTest, TheEnginesThreadsAreUsedAsFarAsItAllows) {
  const Layer layer(320, 10);
  Sequence sequences[] = {Fill(layer, 300), Fill(layer, 300), Fill(layer, 300)};
  const StepItem items[] = {{&sequences[0], 300}, {&sequences[1], 300}, {&sequences[2], 300}};
  std::vector<float> queries, output(3 * kOutput), lse(size_t{3} * Layer::kQueryHeads);
  for (int i = 0; i < 3; ++i) {
    const auto* numbers = static_cast<const float*>(layer.queries().c().ptr);
    queries.insert(queries.end(), numbers, numbers + Layer::kQueryHeads * Layer::kKeyDim);
  }
  const uint32_t counts[] = {3, PQC_THREADS_CALLER, 2};
  const uint32_t expected[] = {3, 0, 2};
  for (int i = 0; i < 3; ++i) {
    most_ = 0;
    MustBeOk(client_.SetThreads(counts[i]));
    Step step = Must(client_.BeginStep(items, &selection_));
    MustBeOk(step.Attend(0, {queries, {3, Layer::kQueryHeads, Layer::kKeyDim}}, output, lse));
    EXPECT_EQ(most_, expected[i]);
  }
}

}  // namespace
}  // namespace pqcached::testing
