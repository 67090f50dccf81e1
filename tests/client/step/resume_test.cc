// A client whose sidecar's worker ends and is followed by another one: what it was told stays true,
// what was under way fails or is done again, and nothing of the old worker's memory is kept.
#include <chrono>
#include <thread>

#include "tests/client/step/step_fixture.h"
#include "tests/stopwatch.h"

namespace pqcached::testing {
namespace {

class ResumeTest : public StepTest {
 protected:
  void RestartWorker() {
    sidecar_.EndWorker();
    sidecar_.StartWorker();
  }

  Query QueryAt(const Layer& layer, uint64_t position) {
    return {.layer = 0, .query_position = position, .queries = layer.queries()};
  }

  // Within the test's own time limit.
  void AwaitConnections(int count) {
    while (sidecar_.connections != count) std::this_thread::yield();
  }
};

TEST_F(ResumeTest, ReadsGoOnAtTheNextWorker) {
  const Layer layer(600, 3);
  Sequence sequence = Fill(layer, 600);
  const Selected before = Must(sequence.TopK(QueryAt(layer, 599), selection_));
  for (int i = 0; i < 3; ++i) {
    RestartWorker();
    const Selected after = Must(sequence.TopK(QueryAt(layer, 599), selection_));
    EXPECT_EQ(after.positions, before.positions);
    ExpectRows(sequence, layer, 0, 600);
  }
  EXPECT_EQ(Must(client_.Count()).lease_count, 1u);
  EXPECT_EQ(sidecar_.store->ListLeases(kvstore::kAllTenants).size(), 1u);
}

TEST_F(ResumeTest, AStepInFlightFailsAndItsRepeatGoesOn) {
  const Layer layer(320, 4);
  Sequence sequence = Fill(layer, 300);
  const StepItem items[] = {{&sequence, 300}};
  std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
  {
    Step step = Must(client_.BeginStep(items, &selection_));
    MustBeOk(step.Attend(0, layer.queries(), output, lse));
    sidecar_.EndWorker();
    Expect(step.Attend(1, layer.queries(), output, lse), PQC_UNAVAILABLE, "", "worker");
    sidecar_.StartWorker();
    Expect(step.Attend(1, layer.queries(), output, lse), PQC_UNAVAILABLE, "", "worker");
    Expect(step.End(Rows(layer, 300, 301)), PQC_UNAVAILABLE, "", "worker");
  }
  for (uint64_t token = 300; token < 320; ++token) MustBeOk(Decode(sequence, layer, token));
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 0, 320);
}

TEST_F(ResumeTest, AStepThatDoesNotWaitIsRefusedWhileRowsAreOnTheirWay) {
  const Layer layer(400, 4);
  Sequence sequence = Fill(layer, 300);
  sidecar_.CloseGate();
  for (uint64_t token = 300; token < 310; ++token) MustBeOk(Decode(sequence, layer, token));
  const StepItem items[] = {{&sequence, 310}};
  const Selection narrow = {
      .index = selection_.index, .sink_tokens = 5, .window_tokens = 2, .ratio = 0.5};
  // A step that waits would still wait when the test's own time is over.
  constexpr uint32_t kHourMs = 3600 * 1000;
  const Result<Step> refused = client_.BeginStep(items, &narrow, kHourMs, PQC_STEP_NO_WAIT);
  Expect(refused.status(), PQC_DEADLINE_EXCEEDED, "items[0].query_position", "");
  EXPECT_GT(refused.status().retry_ms(), 0u);
  sidecar_.OpenGate();
  MustBeOk(sequence.Flush());
  Status status;
  do {  // until the client has the newer segment map
    status = client_.BeginStep(items, &narrow, 0, PQC_STEP_NO_WAIT).status();
  } while (status.code() == PQC_DEADLINE_EXCEEDED && status.retry_ms() > 0);
  MustBeOk(status);
}

TEST_F(ResumeTest, RowsThatWereNotAcknowledgedAreSentAgain) {
  const Layer layer(400, 5), other(400, 6);
  Sequence sequence = Fill(layer, 300);
  sidecar_.CloseGate();
  for (uint64_t token = 300; token < 310; ++token) MustBeOk(Decode(sequence, layer, token));
  MustBeOk(Decode(sequence, layer, 305, 1, {}, &other));  // a roll-back on its way
  sidecar_.EndWorker();
  sidecar_.OpenGate();
  sidecar_.StartWorker();
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 0, 305);
  ExpectRows(sequence, other, 305, 306);
  EXPECT_EQ(Must(sequence.Describe()).token_count, 306u);
  for (uint64_t token = 306; token < 320; ++token) {
    MustBeOk(Decode(sequence, layer, token));
    if (token % 3 == 0) RestartWorker();
  }
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 306, 320);
}

TEST_F(ResumeTest, AnAnswerThatWasLostWithItsWorkerIsARepeat) {
  const Layer layer(320, 7);
  Sequence sequence = Fill(layer, 300);
  sidecar_.lost_answers = 1;
  MustBeOk(Decode(sequence, layer, 300));
  RestartWorker();
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 301u);
  ExpectRows(sequence, layer, 0, 301);
}

TEST_F(ResumeTest, PrefillGoesOnWithANewRing) {
  const Layer layer(900, 8);
  Sequence sequence = Must(cache_.CreateSequence());
  for (uint64_t begin = 0; begin < 900; begin += 300) {
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, begin, layer.keys(begin, begin + 300),
                               layer.values(begin, begin + 300)));
      RestartWorker();
    }
  }
  ExpectRows(sequence, layer, 0, 900);
}

TEST_F(ResumeTest, MemoryOfAWorkerIsLetGoOfWhenNobodyReadsIt) {
  const Layer layer(400, 9);
  Sequence idle = Fill(layer, 400), busy = Fill(layer, 400);
  MustBeOk(idle.TopK(QueryAt(layer, 399), selection_).status());
  const StepItem items[] = {{&busy, 400}};
  Step step = Must(client_.BeginStep(items, &selection_));
  RestartWorker();
  AwaitConnections(2);  // the client's own thread has resumed; the step still reads
  { const Step ended = std::move(step); }
  AwaitConnections(1);
  EXPECT_EQ(Must(client_.Count()).lease_count, 0u);
  MustBeOk(idle.TopK(QueryAt(layer, 399), selection_).status());
}

TEST_F(ResumeTest, CallsEndWithTheirDeadlinesWhileThereIsNoWorker) {
  const Layer layer(320, 10);
  Sequence sequence = Fill(layer, 300);
  MustBeOk(Decode(sequence, layer, 300));
  MustBeOk(sequence.Flush());
  sidecar_.EndWorker();
  constexpr auto kMost =
      std::chrono::milliseconds(2000 + 1000);  // of StepTest, and what is allowed
  const auto bounded = [&](const char* name, const auto& call) {
    const Stopwatch watch;
    Expect(call(), PQC_UNAVAILABLE, "", "worker");
    EXPECT_LT(watch.Now(), kMost) << name;
  };
  bounded("Select", [&] { return sequence.TopK(QueryAt(layer, 300), selection_).status(); });
  bounded("Decode", [&] { return Decode(sequence, layer, 301); });
  bounded("Ingest",
          [&] { return sequence.Ingest(0, 301, layer.keys(301, 302), layer.values(301, 302)); });
  bounded("Create", [&] { return cache_.CreateSequence().status(); });
  sidecar_.StartWorker();
  MustBeOk(Decode(sequence, layer, 301));
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 0, 302);
}

TEST_F(ResumeTest, ASessionThatTheNextWorkerDoesNotKnowIsLostForEver) {
  const Layer layer(320, 11);
  Sequence sequence = Fill(layer, 300);
  sidecar_.knows_session = false;
  RestartWorker();
  Expect(sequence.TopK(QueryAt(layer, 299), selection_).status(), PQC_UNAVAILABLE, "",
         "session is lost");
  sidecar_.knows_session = true;
  Expect(Decode(sequence, layer, 300), PQC_UNAVAILABLE, "", "session is lost");
  Expect(cache_.CreateSequence().status(), PQC_UNAVAILABLE, "", "session is lost");
}

// A client that takes the status for a passing one says "no new worker has started yet" with a retry
// time, and repeats for ever.
TEST_F(ResumeTest, ASessionOfAnotherVersionThanTheNextWorkersIsLostForEver) {
  const Layer layer(320, 11);
  Sequence sequence = Fill(layer, 300);
  sidecar_.has_other_version = true;
  RestartWorker();
  const Status refused = sequence.TopK(QueryAt(layer, 299), selection_).status();
  Expect(refused, PQC_UNAVAILABLE, "", "session is lost");
  Expect(refused, PQC_UNAVAILABLE, "", "protocol version");
  EXPECT_EQ(refused.retry_ms(), 0u);
  sidecar_.has_other_version = false;
  Expect(Decode(sequence, layer, 300), PQC_UNAVAILABLE, "", "session is lost");
  Expect(cache_.CreateSequence().status(), PQC_UNAVAILABLE, "", "session is lost");
}

TEST_F(ResumeTest, AClientClosesWhileThereIsNoWorker) {
  const Layer layer(320, 12);
  Sequence sequence = Fill(layer, 300);
  sidecar_.CloseGate();
  MustBeOk(Decode(sequence, layer, 300));
  sidecar_.EndWorker();
  sidecar_.OpenGate();
  { const Client closing = std::move(client_); }
  Expect(sequence.Flush(), PQC_FAILED_PRECONDITION, "client", "closed");
}

}  // namespace
}  // namespace pqcached::testing
