// Calls in begin / poll / wait form, over a store in this process.
#include <atomic>
#include <chrono>
#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/client/step/operation_loop.h"
#include "tests/client/step/step_fixture.h"

namespace pqcached::testing {
namespace {

class OperationTest : public StepTest {
 protected:
  OperationTest() : StepTest(600000) {}

  Sequence FillUnindexed(const Layer& layer, uint64_t tokens) {
    Sequence sequence = Must(cache_.CreateSequence());
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, 0, layer.keys(0, tokens), layer.values(0, tokens)));
    }
    return sequence;
  }

  // Waits until so many builds have reached the sidecar.
  void AwaitBuilds(uint64_t count) {
    while (sidecar_.builds < count) std::this_thread::yield();
  }
  static Operation Build(Sequence& sequence) {
    return Must(Operation::BuildIndex(sequence, {.sink_tokens = kSink}));
  }
  // A build that stops at the door after its first codebook. One at a time: the store of the tests
  // calls from the threads that all of its builds use.
  Operation BuildUpTo(Door& door, Sequence& sequence, void* context = nullptr) {
    const BuildOptions options = {.sink_tokens = kSink,
                                  .progress = [&door](const pqc_build_progress&) {
                                    door.Pass();
                                    return true;
                                  }};
    return Must(Operation::BuildIndex(sequence, options, context));
  }

  const Layer layer_{400, 1};
  const int fd_ = Must(Events::Open(client_)).Fd();
};

TEST_F(OperationTest, AFlushEndsWhenTheRowsAreStored) {
  Sequence sequence = Fill(layer_, 300);
  sidecar_.CloseGate();
  MustBeOk(EndOnly(sequence, layer_, 300, 1));
  int context = 0;
  Operation flush = Must(Operation::Flush(sequence, &context));
  EXPECT_FALSE(flush.Poll().has_value());
  for (const uint32_t timeout_ms : {PQC_TIMEOUT_POLL, 20u}) {
    const Status waited = flush.Wait(timeout_ms);
    Expect(waited, PQC_DEADLINE_EXCEEDED, "timeout_ms");
    EXPECT_GT(waited.retry_ms(), 0u);
  }
  EXPECT_FALSE(IsReadable(fd_));
  EXPECT_EQ(TakeEvent(client_).kind, PQC_EVENT_NONE);
  sidecar_.OpenGate();
  EXPECT_TRUE(IsReadable(fd_, kLoopLimitMs));
  EXPECT_TRUE(IsReadable(fd_));  // until the event is taken
  MustBeOk(flush.Wait());
  MustBeOk(flush.Poll().value());
  const pqc_event event = TakeEvent(client_);
  EXPECT_EQ(event.kind, PQC_EVENT_OPERATION);
  EXPECT_EQ(event.operation, flush.get());
  EXPECT_FALSE(IsReadable(fd_));
  EXPECT_EQ(TakeEvent(client_).kind, PQC_EVENT_NONE);
  EXPECT_EQ(Must(sequence.Progress()).stored_tokens, 301u);
}

TEST_F(OperationTest, EventsHaveTheContextOfTheEngine) {
  Sequence sequence = Fill(layer_, 300);
  int context = 0;
  pqc_operation* operation = nullptr;
  ASSERT_EQ(pqc_sequence_flush_begin(sequence.get(), &context, &operation), PQC_OK);
  const pqc_event event = AwaitEvent(client_, fd_);
  EXPECT_EQ(event.operation, operation);
  EXPECT_EQ(event.context, &context);
  EXPECT_EQ(event.sequence_id, 0u);
  EXPECT_EQ(pqc_operation_close(operation, 0), PQC_OK);
}

TEST_F(OperationTest, AnIngestStoresAllLayersAndNamesTokens) {
  Sequence sequence = Must(cache_.CreateSequence());
  std::optional<Operation> ingest;
  {
    std::vector<uint32_t> ids(256);
    for (uint32_t i = 0; i < ids.size(); ++i) ids[i] = 1000 + i;
    std::vector<LayerRows> rows = Rows(layer_, 0, 300);
    sidecar_.CloseGate();
    ingest = Must(Operation::Ingest(sequence, 0, rows, {.begin = 0, .token_ids = ids}));
    rows.assign(rows.size(), {});  // only the elements stay
    ids.assign(ids.size(), 0);
  }
  EXPECT_FALSE(ingest->Poll().has_value());
  EXPECT_EQ(Must(sequence.Progress()).is_changing, 1u);
  Expect(sequence.Ingest(0, 300, layer_.keys(300, 310), layer_.values(300, 310)), PQC_ABORTED,
         "sequence");
  sidecar_.OpenGate();
  MustBeOk(ingest->Wait());
  EXPECT_EQ(Must(sequence.Progress()).is_changing, 0u);
  EXPECT_EQ(Must(sequence.Describe()).token_count, 300u);
  ExpectRows(sequence, layer_, 0, 300);
  Prompt prompt;
  for (uint32_t i = 0; i < 256; ++i) prompt.token_ids.push_back(1000 + i);
  EXPECT_EQ(Must(cache_.MatchPrefix(prompt)), 256u);
}

TEST_F(OperationTest, PagedRowsAreReadThroughTheCallersBlocks) {
  Sequence sequence = Must(cache_.CreateSequence());
  // Blocks of 16 tokens: the rows of the layer, in place.
  const std::vector<uint32_t> blocks = {0, 1, 2, 3};
  const auto memory = [](const float* first, uint32_t dim) {
    return Tensor(first, PQC_F32, {25, 16, Layer::kKvHeads, dim});
  };
  std::vector<LayerRows> rows;
  for (uint32_t number = 0; number < kLayers; ++number) {
    rows.push_back({number, Tensor::Paged(memory(layer_.key(0, 0), Layer::kKeyDim), blocks, 60),
                    Tensor::Paged(memory(layer_.value(0, 0), Layer::kValueDim), blocks, 60)});
  }
  Operation ingest = Must(Operation::Ingest(sequence, 0, rows));
  rows.clear();  // and the block tables with them; the blocks stay
  MustBeOk(ingest.Wait());
  ExpectRows(sequence, layer_, 0, 60);
}

TEST_F(OperationTest, ErrorsAreThoseOfThePlainCall) {
  Sequence sequence = FillUnindexed(layer_, 300);
  std::vector<LayerRows> rows = Rows(layer_, 310, 320);
  const Status plain = sequence.Ingest(0, 310, rows[0].keys, rows[0].values);
  Status status = Must(Operation::Ingest(sequence, 310, rows)).Wait();
  EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(status.ToString(), plain.ToString());
  EXPECT_EQ(status.field(), plain.field());

  std::vector<float> bad(layer_.key(300, 0), layer_.key(310, 0));
  bad[7] = std::numeric_limits<float>::quiet_NaN();
  rows = Rows(layer_, 300, 310);
  rows[1].keys = Tensor(bad, {10, Layer::kKvHeads, Layer::kKeyDim});
  status = Must(Operation::Ingest(sequence, 300, rows)).Wait();
  EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT) << status.ToString();
  // The layer before it is stored, and a repeat with good rows continues.
  MustBeOk(Must(Operation::Ingest(sequence, 300, Rows(layer_, 300, 310))).Wait());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 310u);

  MustBeOk(sequence.BuildIndex({.sink_tokens = kSink}));
  Operation again = Must(Operation::BuildIndex(sequence, {.sink_tokens = kSink}));
  Expect(again.Wait(), PQC_ALREADY_EXISTS, again.Wait().field().c_str());
  Expect(again.Poll().value(), PQC_ALREADY_EXISTS, again.Wait().field().c_str());  // repeated
}

TEST_F(OperationTest, BadArgumentsAreRefusedAtTheBeginning) {
  Sequence sequence = FillUnindexed(layer_, 300);
  std::vector<LayerRows> rows = Rows(layer_, 300, 310);
  rows[1].layer = 7;
  Expect(Operation::Ingest(sequence, 300, rows).status(), PQC_INVALID_ARGUMENT, "layers[1].layer");
  rows[1] = {1, layer_.values(300, 310), layer_.values(300, 310)};
  Expect(Operation::Ingest(sequence, 300, rows).status(), PQC_INVALID_ARGUMENT,
         "layers[1].keys.shape[2]");
  Expect(Operation::Ingest(sequence, 300, {}).status(), PQC_INVALID_ARGUMENT, "layers");
  Expect(Operation::Ingest(sequence, uint64_t{1} << 30, Rows(layer_, 0, 1)).status(),
         PQC_INVALID_ARGUMENT, "first_position");
  pqc_operation* operation = nullptr;
  pqc_build_options build = PQC_INIT(pqc_build_options);
  build.struct_size = 8;
  EXPECT_EQ(pqc_build_index_begin(sequence.get(), &build, nullptr, &operation),
            PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "options.struct_size");
  EXPECT_EQ(Must(sequence.Progress()).is_changing, 0u);
  EXPECT_EQ(pqc_sequence_flush_begin(nullptr, nullptr, &operation), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_sequence_flush_begin(sequence.get(), nullptr, nullptr), PQC_INVALID_ARGUMENT);
  uint32_t done = 1;
  EXPECT_EQ(pqc_operation_poll(nullptr, &done), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(done, 0u);
  EXPECT_EQ(pqc_operation_wait(nullptr, 0), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_operation_cancel(nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_operation_close(nullptr, 0), PQC_OK);
}

TEST_F(OperationTest, AnIngestReservesItsSequenceFromTheBeginningToTheEnd) {
  Sequence sequence = Fill(layer_, 300);
  sidecar_.CloseGate();
  Operation ingest = Must(Operation::Ingest(sequence, 300, Rows(layer_, 300, 310)));
  Expect(Operation::BuildIndex(sequence).status(), PQC_ABORTED, "sequence");
  Expect(Operation::Ingest(sequence, 300, Rows(layer_, 300, 310)).status(), PQC_ABORTED,
         "sequence");
  Expect(sequence.Truncate(10), PQC_ABORTED, "sequence");
  const StepItem items[] = {{&sequence, 300}};
  Expect(client_.BeginStep(items, nullptr).status(), PQC_ABORTED, "items[0].sequence");
  MustBeOk(Must(Operation::Flush(sequence)).Wait());  // changes nothing
  EXPECT_FALSE(ingest.Poll().has_value());
  sidecar_.OpenGate();
  MustBeOk(ingest.Wait());
  {
    const StepItem next[] = {{&sequence, 310}};
    Step step = Must(client_.BeginStep(next, &selection_));
    Expect(Operation::Ingest(sequence, 310, Rows(layer_, 310, 320)).status(), PQC_ABORTED,
           "sequence");
    EXPECT_EQ(Must(sequence.Progress()).is_changing, 0u);
  }
  MustBeOk(Decode(sequence, layer_, 310));
}

TEST_F(OperationTest, StepsThatAreRefusedDoNotDisturbAReservation) {
  Sequence sequence = Fill(layer_, 300);
  std::atomic<bool> done = false;
  std::thread beginner([&] {
    while (!done) {
      const StepItem items[] = {{&sequence, 300}};
      static_cast<void>(client_.BeginStep(items, nullptr));
    }
  });
  for (int i = 0; i < 100; ++i) {
    Result<Operation> ingest = Operation::Ingest(sequence, 300, Rows(layer_, 300, 310));
    if (ingest.ok()) {
      const Status status = ingest->Wait();
      EXPECT_TRUE(status.ok()) << status.ToString();
    } else {
      EXPECT_EQ(ingest.status().code(), PQC_ABORTED) << ingest.status().ToString();
    }
  }
  done = true;
  beginner.join();
}

TEST_F(OperationTest, ABuildReservesItsSequenceUntilItIsRunning) {
  Sequence sequence = FillUnindexed(layer_, 300);
  Door door;
  Operation build = BuildUpTo(door, sequence);
  door.AwaitPassing(1);
  MustBeOk(EndOnly(sequence, layer_, 300, 1));
  MustBeOk(sequence.Flush());
  MustBeOk(Must(Operation::Ingest(sequence, 301, Rows(layer_, 301, 310))).Wait());
  const Status second = Must(Operation::BuildIndex(sequence)).Wait();
  EXPECT_EQ(second.code(), PQC_ABORTED) << second.ToString();
  EXPECT_FALSE(build.Poll().has_value());
  door.Open();
  MustBeOk(build.Wait());
  MustBeOk(Decode(sequence, layer_, 310));
}

TEST_F(OperationTest, ACancelledBuildLeavesNoIndex) {
  Sequence sequence = FillUnindexed(layer_, 300);
  Door door;
  Operation build = BuildUpTo(door, sequence);
  door.AwaitPassing(1);
  build.Cancel();
  EXPECT_FALSE(build.Poll().has_value());
  door.Open();  // the codebook in progress is finished, and the next one is not
  Expect(build.Wait(), PQC_CANCELLED, build.Wait().field().c_str());
  const StepItem items[] = {{&sequence, 300}};
  EXPECT_FALSE(client_.BeginStep(items, &selection_).ok());
  MustBeOk(Must(Operation::BuildIndex(sequence, {.sink_tokens = kSink})).Wait());
  MustBeOk(Decode(sequence, layer_, 300));
}

TEST_F(OperationTest, BuildsLeaveThreadsForOtherOperations) {
  Sequence sequences[] = {FillUnindexed(layer_, 300), FillUnindexed(layer_, 300),
                          FillUnindexed(layer_, 300), FillUnindexed(layer_, 300)};
  sidecar_.CloseGate();
  std::vector<Operation> builds;
  for (Sequence& sequence : sequences) builds.push_back(Build(sequence));
  AwaitBuilds(2);
  MustBeOk(Must(Operation::Flush(sequences[0])).Wait());
  EXPECT_EQ(sidecar_.builds, 2u);
  // The last one waits, and ends at once: its sequence is free.
  builds[3].Cancel();
  Expect(builds[3].Poll().value(), PQC_CANCELLED, "operation");
  EXPECT_EQ(Must(sequences[2].Progress()).is_changing, 1u);
  EXPECT_EQ(Must(sequences[3].Progress()).is_changing, 0u);
  sidecar_.OpenGate();
  for (int i = 0; i < 3; ++i) MustBeOk(builds[i].Wait());
  EXPECT_EQ(sidecar_.builds, 3u);
}

TEST_F(OperationTest, TooManyOperationsAreRefused) {
  Sequence sequence = FillUnindexed(layer_, 300), other = Fill(layer_, 300);
  sidecar_.CloseGate();
  MustBeOk(EndOnly(other, layer_, 300, 1));
  std::vector<Operation> flushes;
  Status status;
  while (status.ok() && flushes.size() < 2000) {
    auto flush = Operation::Flush(other);
    status = flush.status();
    if (flush.ok()) flushes.push_back(std::move(*flush));
  }
  Expect(status, PQC_RESOURCE_EXHAUSTED, "operation");
  EXPECT_GT(status.retry_ms(), 0u);
  EXPECT_GE(flushes.size(), 1024u);
  Expect(Operation::BuildIndex(sequence).status(), PQC_RESOURCE_EXHAUSTED, "operation");
  EXPECT_EQ(Must(sequence.Progress()).is_changing, 0u);  // it is not reserved
  sidecar_.OpenGate();
  for (Operation& flush : flushes) MustBeOk(flush.Wait());
}

TEST_F(OperationTest, ACloseThatRunsOutOfTimeLeavesTheHandleOpen) {
  Sequence sequence = FillUnindexed(layer_, 300);
  Door door;
  Operation build = BuildUpTo(door, sequence);
  door.AwaitPassing(1);
  Expect(build.Close(PQC_TIMEOUT_POLL), PQC_DEADLINE_EXCEEDED, "timeout_ms");
  Expect(build.Close(10), PQC_DEADLINE_EXCEEDED, "timeout_ms");
  EXPECT_FALSE(build.Poll().has_value());
  door.Open();
  EXPECT_TRUE(IsReadable(fd_, kLoopLimitMs));
  MustBeOk(build.Close());
  EXPECT_FALSE(IsReadable(fd_));  // the event has ended with the handle
  EXPECT_EQ(TakeEvent(client_).kind, PQC_EVENT_NONE);
}

TEST_F(OperationTest, ADroppedSequenceEndsItsOperations) {
  Sequence sequence = FillUnindexed(layer_, 300), other = FillUnindexed(layer_, 300);
  Sequence third = FillUnindexed(layer_, 300);
  sidecar_.CloseGate();
  Operation build = Build(sequence), kept = Build(other);
  AwaitBuilds(2);
  Operation waiting = Build(third);
  static_cast<void>(sequence.Drop());
  static_cast<void>(third.Drop());
  Expect(waiting.Poll().value(), PQC_CANCELLED, "operation");
  EXPECT_FALSE(build.Poll().has_value());
  sidecar_.OpenGate();
  EXPECT_FALSE(build.Wait().ok());
  MustBeOk(kept.Wait());  // it is of another sequence
}

TEST_F(OperationTest, ASequenceThatAReorderingDropsEndsItsOperations) {
  Sequence busy = Fill(layer_, 300);
  std::vector<Sequence> beams;
  for (int i = 0; i < 2; ++i) beams.push_back(Fill(layer_, 300));
  sidecar_.CloseGate();
  MustBeOk(EndOnly(busy, layer_, 300, 1));
  std::vector<Operation> running;  // one for each thread
  for (int i = 0; i < 4; ++i) running.push_back(Must(Operation::Flush(busy)));
  Operation waiting = Must(Operation::Flush(beams[1]));
  MustBeOk(Sequence::Reorder(&beams, std::vector<uint32_t>{0}));
  const auto ended = waiting.Poll();
  sidecar_.OpenGate();
  ASSERT_TRUE(ended.has_value());
  Expect(*ended, PQC_CANCELLED, "operation");
  for (Operation& operation : running) MustBeOk(operation.Wait());
}

TEST_F(OperationTest, ASequenceIsDroppedWhileItIsFlushed) {
  Sequence sequence = Fill(layer_, 300);
  sidecar_.CloseGate();
  MustBeOk(EndOnly(sequence, layer_, 300, 1));
  Operation flush = Must(Operation::Flush(sequence));
  Expect(flush.Wait(50), PQC_DEADLINE_EXCEEDED, "timeout_ms");
  std::thread dropper([&] { static_cast<void>(sequence.Drop()); });
  // The rows are forgotten: there is nothing left to wait for.
  EXPECT_TRUE(IsReadable(fd_, kLoopLimitMs));
  MustBeOk(flush.Wait());
  sidecar_.OpenGate();
  dropper.join();
}

TEST_F(OperationTest, AnIngestIsClosedWhileItReadsTheRows) {
  Sequence sequence = Must(cache_.CreateSequence());
  sidecar_.CloseGate();
  Operation ingest = Must(Operation::Ingest(sequence, 0, Rows(layer_, 0, 300)));
  Expect(ingest.Wait(50), PQC_DEADLINE_EXCEEDED, "timeout_ms");  // it has begun
  Expect(ingest.Close(20), PQC_DEADLINE_EXCEEDED, "timeout_ms");
  sidecar_.OpenGate();
  // The layer in progress is stored, and the next one is not.
  Expect(ingest.Wait(), PQC_CANCELLED, "operation");
  MustBeOk(ingest.Close());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 0u);
  MustBeOk(Must(Operation::Ingest(sequence, 0, Rows(layer_, 0, 300))).Wait());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 300u);
}

TEST_F(OperationTest, RowsOfAFlushGoToTheNextWorker) {
  Sequence sequence = Fill(layer_, 300);
  MustBeOk(Decode(sequence, layer_, 300));
  sidecar_.EndWorker();
  // The step that is in progress at a worker's end is refused; rows wait behind the gate instead.
  sidecar_.CloseGate();
  sidecar_.StartWorker();
  Status status;
  do {  // until the session is attached again
    status = EndOnly(sequence, layer_, 301, 1);
  } while (!status.ok() && status.retry_ms() > 0);
  MustBeOk(status);
  Operation flush = Must(Operation::Flush(sequence));
  sidecar_.EndWorker();
  EXPECT_FALSE(flush.Poll().has_value());
  sidecar_.StartWorker();
  sidecar_.OpenGate();
  MustBeOk(flush.Wait());
  ExpectRows(sequence, layer_, 0, 302);
}

TEST_F(OperationTest, AClosedClientEndsItsOperations) {
  Sequence sequences[] = {FillUnindexed(layer_, 300), FillUnindexed(layer_, 300),
                          FillUnindexed(layer_, 300)};
  std::optional<Client> client(std::move(client_));
  sidecar_.CloseGate();
  std::vector<Operation> builds;
  for (Sequence& sequence : sequences) builds.push_back(Build(sequence));
  AwaitBuilds(2);
  std::thread closer([&] { client.reset(); });
  // The one that waits ends at once, the others after their present codebook.
  Expect(builds[2].Wait(), PQC_CANCELLED, "operation");
  EXPECT_FALSE(builds[0].Poll().has_value());
  sidecar_.OpenGate();
  closer.join();
  for (Operation& build : builds) {
    ASSERT_TRUE(build.Poll().has_value());
    EXPECT_EQ(build.Poll()->code(), PQC_CANCELLED) << build.Poll()->ToString();
  }
  Expect(Operation::Flush(sequences[0]).status(), PQC_FAILED_PRECONDITION, "client");
}

TEST_F(OperationTest, AClosedClientEndsTheWaitForAWorker) {
  Sequence sequence = Fill(layer_, 300);
  sidecar_.EndWorker();
  Operation flush = Must(Operation::Flush(sequence));
  Operation ingest = Must(Operation::Ingest(sequence, 300, Rows(layer_, 300, 310)));
  Expect(flush.Wait(100), PQC_DEADLINE_EXCEEDED, "timeout_ms");
  Expect(ingest.Wait(PQC_TIMEOUT_POLL), PQC_DEADLINE_EXCEEDED, "timeout_ms");
  { const Client closed(std::move(client_)); }
  Expect(flush.Poll().value(), PQC_CANCELLED, "client");
  Expect(ingest.Poll().value(), PQC_CANCELLED, "client");
}

// A coroutine that runs until its first wait when it is called.
struct Task {
  struct promise_type {
    Task get_return_object() { return {}; }
    std::suspend_never initial_suspend() { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
  };
};

struct Outcome {
  Status ingested, built, flushed;
  std::thread::id thread;
  bool done = false;
};

Task Prefill(Sequence& sequence, std::vector<LayerRows> rows, Outcome& outcome) {
  Operation ingest = Must(Operation::Ingest(sequence, 0, rows));
  outcome.ingested = co_await ingest;
  Operation build = Must(Operation::BuildIndex(sequence, {.sink_tokens = kSink}));
  outcome.built = co_await build;
  outcome.thread = std::this_thread::get_id();
  Operation flush = Must(Operation::Flush(sequence));
  MustBeOk(flush.Wait());
  outcome.flushed = co_await flush;  // it has ended already
  outcome.done = true;
}

TEST_F(OperationTest, CoroutinesResumeOnTheThreadThatDispatches) {
  Events events = Must(Events::Open(client_));
  Sequence sequences[] = {Must(cache_.CreateSequence()), Must(cache_.CreateSequence())};
  Outcome outcomes[2];
  sidecar_.CloseGate();
  for (int i = 0; i < 2; ++i) Prefill(sequences[i], Rows(layer_, 0, 300), outcomes[i]);
  EXPECT_FALSE(outcomes[0].done);
  Operation unawaited = Must(Operation::Flush(sequences[0], &outcomes[0]));
  sidecar_.OpenGate();
  int others = 0;
  while (!outcomes[0].done || !outcomes[1].done || others == 0) {
    ASSERT_TRUE(IsReadable(events.Fd(), kLoopLimitMs));
    MustBeOk(events.Dispatch([&](const pqc_event& event) {
      EXPECT_EQ(event.kind, PQC_EVENT_OPERATION);
      EXPECT_EQ(event.operation, unawaited.get());
      EXPECT_EQ(event.context, &outcomes[0]);
      ++others;
    }));
  }
  EXPECT_EQ(others, 1);
  for (const Outcome& outcome : outcomes) {
    MustBeOk(outcome.ingested);
    MustBeOk(outcome.built);
    MustBeOk(outcome.flushed);
    EXPECT_EQ(outcome.thread, std::this_thread::get_id());
  }
  EXPECT_FALSE(IsReadable(events.Fd()));
  MustBeOk(Decode(sequences[1], layer_, 300));
}

}  // namespace
}  // namespace pqcached::testing
