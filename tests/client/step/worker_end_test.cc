// Steps whose worker is killed: they read on in the memory that they have mapped, and their rows are
// stored by the next worker.
#include <array>
#include <thread>

#include "tests/client/step/step_fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::testing {
namespace {

// Constructed before the sidecar, which keeps its memory there.
struct Keeping {
  kvstore::StoreOptions Options() {
    kvstore::StoreOptions options = SmallSegments();
    options.keeper = &keeper;
    return options;
  }
  kvstore::testing::MemoryKeeper keeper;
};

class WorkerEndTest : public Keeping, public StepTest {
 protected:
  WorkerEndTest() : StepTest(2000, {.thread_count = 2}, Options()) {}

  // What a step attends to in each layer.
  struct Seen {
    std::array<std::vector<float>, kLayers> outputs;
    bool operator==(const Seen&) const = default;
  };
  Status Attend(Step& step, const Layer& layer, uint32_t number, Seen* seen) {
    std::vector<float> lse(Layer::kQueryHeads);
    seen->outputs[number].resize(kOutput);
    return step.Attend(number, layer.queries(), seen->outputs[number], lse);
  }
  Seen AttendAll(Sequence& sequence, const Layer& layer, uint64_t position) {
    Seen seen;
    const StepItem items[] = {{&sequence, position}};
    Step step = Must(client_.BeginStep(items, &selection_));
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(Attend(step, layer, number, &seen));
    }
    return seen;
  }
};

TEST_F(WorkerEndTest, AStepGoesOnWithoutAWorkerAndTheNextOneStoresItsRows) {
  const Layer layer(320, 4);
  Sequence sequence = Fill(layer, 300);
  for (uint64_t position = 300; position < 310; ++position) {
    const Seen expected = AttendAll(sequence, layer, position);
    const StepItem items[] = {{&sequence, position}};
    Seen seen;
    Step step = Must(client_.BeginStep(items, &selection_));
    MustBeOk(Attend(step, layer, 0, &seen));
    sidecar_.KillWorker();
    MustBeOk(Attend(step, layer, 1, &seen));
    MustBeOk(step.Check());
    MustBeOk(step.End(Rows(layer, position, position + 1)));
    EXPECT_EQ(seen, expected);
    sidecar_.StartWorker();
    MustBeOk(sequence.Flush());
  }
  EXPECT_EQ(Must(sequence.Describe()).token_count, 310u);
  ExpectRows(sequence, layer, 0, 310);
}

TEST_F(WorkerEndTest, AStepGoesOnWhenTheWorkerIsReplacedMeanwhile) {
  const Layer layer(320, 4);
  Sequence sequence = Fill(layer, 300);
  for (uint64_t position = 300; position < 310; ++position) {
    const Seen expected = AttendAll(sequence, layer, position);
    const StepItem items[] = {{&sequence, position}};
    Seen seen;
    Step step = Must(client_.BeginStep(items, &selection_));
    sidecar_.KillWorker();
    sidecar_.StartWorker();
    // The client notices at some time: with the loop, both before and between the layers.
    if (position % 2 == 0)
      while (sidecar_.connections < 2) std::this_thread::yield();
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(Attend(step, layer, number, &seen));
    }
    MustBeOk(step.End(Rows(layer, position, position + 1)));
    EXPECT_EQ(seen, expected);
    while (sidecar_.connections > 1) std::this_thread::yield();  // the former memory is released
  }
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 0, 310);
}

TEST_F(WorkerEndTest, AStepWhoseSequenceTheNextWorkerLacksIsRefused) {
  const Layer layer(320, 4);
  Sequence sequence = Fill(layer, 300);
  const StepItem items[] = {{&sequence, 300}};
  Seen seen;
  Step step = Must(client_.BeginStep(items, &selection_));
  sidecar_.KillWorker();
  sidecar_.store->DropSession(sidecar_.local_session());  // the next worker knows no lease
  ASSERT_TRUE(sidecar_.store->DropSequence(kTestTenant, sequence.id()).ok());
  sidecar_.StartWorker();
  Status status = Attend(step, layer, 0, &seen);
  if (status.ok()) status = step.Check();
  Expect(status, PQC_NOT_FOUND, "items[0].sequence");
}

TEST_F(WorkerEndTest, AStepOfASessionThatItsWorkerEndsIsRefused) {
  const Layer layer(320, 4);
  Sequence sequence = Fill(layer, 300);
  const StepItem items[] = {{&sequence, 300}};
  Seen seen;
  Step step = Must(client_.BeginStep(items, &selection_));
  sidecar_.EndWorker();
  Expect(step.Check(), PQC_UNAVAILABLE, "", "worker");
  Expect(Attend(step, layer, 0, &seen), PQC_UNAVAILABLE, "", "worker");
}

TEST_F(WorkerEndTest, RowsOfEarlierStepsThatTheStepNeedsAreStoredByTheNextWorker) {
  const Layer layer(400, 4);
  Sequence sequence = Fill(layer, 300);
  sidecar_.CloseGate();
  for (uint64_t token = 300; token < 330; ++token) {
    const StepItem items[] = {{&sequence, token}};
    MustBeOk(Must(client_.BeginStep(items, nullptr)).End(Rows(layer, token, token + 1)));
  }
  const StepItem items[] = {{&sequence, 330}};
  Step step = Must(client_.BeginStep(items, nullptr));
  sidecar_.KillWorker();
  sidecar_.StartWorker();
  sidecar_.OpenGate();
  Seen seen;
  for (uint32_t number = 0; number < kLayers; ++number) {
    std::vector<float> lse(Layer::kQueryHeads);
    seen.outputs[number].resize(kOutput);
    MustBeOk(step.Attend(number, layer.queries(), seen.outputs[number], lse, &selection_));
  }
  MustBeOk(step.End(Rows(layer, 330, 331)));
  EXPECT_EQ(seen, AttendAll(sequence, layer, 330));
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 0, 331);
}

TEST_F(WorkerEndTest, AStepThatDoesNotWaitGoesOnToo) {
  const Layer layer(320, 4);
  Sequence sequence = Fill(layer, 300);
  const Seen expected = AttendAll(sequence, layer, 300);
  const StepItem items[] = {{&sequence, 300}};
  for (const bool replaced : {false, true}) {
    Status ended;
    do {
      Seen seen;
      auto step = client_.BeginStep(items, &selection_, 0, PQC_STEP_NO_WAIT);
      if (!step.ok()) {
        ASSERT_GT(step.status().retry_ms(), 0u) << step.status().ToString();
        continue;
      }
      const uint64_t calls = sidecar_.calls;
      const std::vector<uint32_t> none = {0};  // of the tokens are accepted
      sidecar_.KillWorker();
      if (replaced) {
        sidecar_.StartWorker();
        while (sidecar_.connections < 2) std::this_thread::yield();
      }
      for (uint32_t number = 0; number < kLayers; ++number) {
        MustBeOk(Attend(*step, layer, number, &seen));
      }
      EXPECT_EQ(seen, expected);
      // The lease of the next worker is acquired meanwhile, or the step begins again.
      ended = step->End(Rows(layer, 300, 301), none);
      EXPECT_EQ(sidecar_.calls, calls) << "no call waits for an answer";
      EXPECT_TRUE(ended.ok() || ended.retry_ms() > 0) << ended.ToString();
      EXPECT_TRUE(replaced || ended.ok()) << ended.ToString();
      if (!replaced) sidecar_.StartWorker();
    } while (!ended.ok());
  }
}

}  // namespace
}  // namespace pqcached::testing
