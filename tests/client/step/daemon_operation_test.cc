// Calls in begin / poll / wait form, and events, against a real pqcached on both paths.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/daemon.h"
#include "tests/client/step/operation_loop.h"

namespace pqcached {
namespace {

using testing::AwaitEvent;
using testing::CountOwn;
using testing::Daemon;
using testing::Door;
using testing::IsReadable;
using testing::kLoopLimitMs;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::SpecOf;
using testing::TakeEvent;

constexpr uint64_t kSink = 4;
constexpr uint32_t kLayers = 2;

// Waits until there is a worker.
void KillWorker(pid_t supervisor) {
  const std::string pid = std::to_string(supervisor);
  for (;;) {
    std::ifstream workers("/proc/" + pid + "/task/" + pid + "/children");
    pid_t worker = 0;
    if (workers >> worker) {
      kill(worker, SIGKILL);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// The client's threads for operations.
int CountOperationThreads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name == "pqc-operation") ++count;
  }
  return count;
}

// Repeats a call for as long as no worker answers.
template <class Call>
Status Repeat(const Call& call) {
  Status status = call();
  while (status.code() == PQC_UNAVAILABLE && status.retry_ms() > 0) status = call();
  return status;
}

class DaemonOperationTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  bool local() const { return GetParam() == PQC_PATH_ONLY_LOCAL; }

  static std::vector<LayerRows> Rows(const Layer& layer, uint64_t begin, uint64_t end) {
    return testing::RowsOf(layer, begin, end, kLayers);
  }
  static Operation Ingest(Sequence& sequence, const Layer& layer, uint64_t begin, uint64_t end) {
    return Must(Operation::Ingest(sequence, begin, Rows(layer, begin, end)));
  }
  // A step that attends to nothing, so that its rows wait to be stored.
  void End(Sequence& sequence, uint64_t position) {
    const StepItem items[] = {{&sequence, position}};
    Step step = Must(client_.BeginStep(items, nullptr));
    MustBeOk(step.End(Rows(layer_, position, position + 1)));
  }
  Client Open() { return daemon_.OpenClient("default", GetParam()); }

  const Layer layer_{700, 1};
  Daemon daemon_;
  Client client_ = Open();
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0, 1})));
};

TEST_P(DaemonOperationTest, ALoopServesARequestFromIngestToFlush) {
  const int fd = Must(Events::Open(client_)).Fd();
  Sequence sequence = Must(cache_.CreateSequence());
  const auto await = [&](Operation operation) {
    const pqc_event event = AwaitEvent(client_, fd);
    EXPECT_EQ(event.kind, PQC_EVENT_OPERATION);
    EXPECT_EQ(event.operation, operation.get());
    EXPECT_FALSE(IsReadable(fd));
    MustBeOk(operation.Poll().value());
  };
  await(Ingest(sequence, layer_, 0, 600));
  EXPECT_EQ(Must(sequence.Describe()).token_count, 600u);
  std::atomic<int> calls = 0;
  const BuildOptions options = {.sink_tokens = kSink, .progress = [&](const pqc_build_progress&) {
                                  ++calls;
                                  return true;
                                }};
  await(Must(Operation::BuildIndex(sequence, options)));
  EXPECT_GE(calls, 2);
  EXPECT_EQ(Must(sequence.Describe()).index_count, 1u);
  for (uint64_t position = 600; position < 620; ++position) End(sequence, position);
  await(Must(Operation::Flush(sequence)));
  EXPECT_EQ(Must(sequence.Describe()).token_count, 620u);
}

TEST_P(DaemonOperationTest, ErrorsAreThoseOfThePlainCall) {
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(Ingest(sequence, layer_, 0, 300).Wait());
  const std::vector<LayerRows> gap = Rows(layer_, 310, 320);
  const Status plain = sequence.Ingest(0, 310, gap[0].keys, gap[0].values);
  Operation refused = Must(Operation::Ingest(sequence, 310, gap));
  EXPECT_EQ(refused.Wait().ToString(), plain.ToString());
  EXPECT_EQ(refused.Wait().code(), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(refused.Poll().value().field(), plain.field());

  std::vector<float> bad(layer_.key(300, 0), layer_.key(310, 0));
  bad[7] = std::numeric_limits<float>::quiet_NaN();
  std::vector<LayerRows> rows = Rows(layer_, 300, 310);
  rows[1].keys = Tensor(bad, {10, Layer::kKvHeads, Layer::kKeyDim});
  const Status status = Must(Operation::Ingest(sequence, 300, rows)).Wait();
  EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT) << status.ToString();
  EXPECT_EQ(status.field(), "layers[1].keys") << status.ToString();
  EXPECT_EQ(Must(sequence.Describe()).token_count, 300u);
  MustBeOk(Ingest(sequence, layer_, 300, 310).Wait());  // continues with the second layer
  EXPECT_EQ(Must(sequence.Describe()).token_count, 310u);

  MustBeOk(sequence.BuildIndex({.iterations = 2, .sink_tokens = kSink}));
  EXPECT_EQ(Must(Operation::BuildIndex(sequence)).Wait().code(), PQC_ALREADY_EXISTS);
}

TEST_P(DaemonOperationTest, ACancelledBuildLeavesNoIndex) {
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(Ingest(sequence, layer_, 0, 700).Wait());
  Door door;
  const BuildOptions options = {.sink_tokens = kSink, .progress = [&](const pqc_build_progress&) {
                                  door.Pass();
                                  return true;
                                }};
  // The door is in the client: the sidecar may have finished the build when the client cancels it.
  Operation build = Must(Operation::BuildIndex(sequence, options));
  door.AwaitPassing(1);
  build.Cancel();
  EXPECT_EQ(build.Close(20).code(), PQC_DEADLINE_EXCEEDED);
  door.Open();
  const Status status = build.Wait();
  EXPECT_TRUE(status.ok() || status.code() == PQC_CANCELLED) << status.ToString();
  if (status.ok()) return;
  Status again;
  do {  // the sidecar ends the build a little later
    again = Must(Operation::BuildIndex(sequence, {.sink_tokens = kSink})).Wait();
  } while (again.code() == PQC_ABORTED);
  EXPECT_TRUE(again.ok() || again.code() == PQC_ALREADY_EXISTS) << again.ToString();
}

TEST_P(DaemonOperationTest, ASequenceMayBeDroppedDuringItsOperations) {
  for (int round = 0; round < 20; ++round) {
    Sequence sequence = Must(cache_.CreateSequence());
    MustBeOk(Ingest(sequence, layer_, 0, 600).Wait());
    End(sequence, 600);
    Operation flush = Must(Operation::Flush(sequence));
    Operation build = Must(Operation::BuildIndex(sequence, {.sink_tokens = kSink}));
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    static_cast<void>(sequence.Drop());
    static_cast<void>(flush.Wait());
    const Status status = build.Wait();
    // ABORTED: the drop was a change in progress when the build began.
    EXPECT_TRUE(status.ok() || status.code() == PQC_CANCELLED || status.code() == PQC_NOT_FOUND ||
                status.code() == PQC_ABORTED)
        << status.ToString();
  }
}

TEST_P(DaemonOperationTest, AClosedClientEndsItsOperationsAndLeavesNothing) {
  { const Client warm_up = Open(); }
  const size_t descriptors = CountOwn("fd");
  int cancelled = 0;
  for (int round = 0; round < 4; ++round) {
    std::optional<Client> client = Open();
    Cache cache = Must(client->OpenCache(SpecOf("cache", {0, 1})));
    const int fd = Must(Events::Open(*client)).Fd();
    EXPECT_EQ(Must(Events::Open(*client)).Fd(), fd);
    std::vector<Sequence> sequences;
    std::vector<Operation> operations;
    for (int i = 0; i < 4; ++i) sequences.push_back(Must(cache.CreateSequence()));
    for (Sequence& sequence : sequences) operations.push_back(Ingest(sequence, layer_, 0, 600));
    for (Operation& operation : operations) MustBeOk(operation.Wait());
    EXPECT_GT(CountOperationThreads(), 0);
    for (Sequence& sequence : sequences) {
      operations.push_back(Must(Operation::BuildIndex(sequence, {.iterations = 1000})));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2 * round));
    client.reset();
    for (size_t i = 0; i < operations.size(); ++i) {
      ASSERT_TRUE(operations[i].Poll().has_value());
      const Status status = *operations[i].Poll();
      EXPECT_TRUE(status.ok() || status.code() == PQC_CANCELLED) << status.ToString();
      cancelled += status.ok() ? 0 : 1;
    }
    EXPECT_EQ(Operation::Flush(sequences[0]).status().code(), PQC_FAILED_PRECONDITION);
  }
  EXPECT_GT(cancelled, 0);
  EXPECT_EQ(CountOperationThreads(), 0);
  EXPECT_LE(CountOwn("fd"), descriptors);
}

TEST_P(DaemonOperationTest, OperationsOutliveTheWorker) {
  const int fd = Must(Events::Open(client_)).Fd();
  Sequence sequence = Must(cache_.CreateSequence());
  uint64_t position = 0, workers = 0;
  for (int round = 0; round < 3; ++round) {
    Operation ingest = Ingest(sequence, layer_, position, position + 100);
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    KillWorker(daemon_.process().pid());
    const Status status = ingest.Wait();
    EXPECT_TRUE(status.ok() || status.retry_ms() > 0) << status.ToString();
    // What is stored is acknowledged again.
    MustBeOk(Repeat([&] { return Ingest(sequence, layer_, position, position + 100).Wait(); }));
    position += 100;
    End(sequence, position);
    Operation flush = Must(Operation::Flush(sequence));
    KillWorker(daemon_.process().pid());
    MustBeOk(flush.Wait());  // the rows go to the next worker
    ++position;
    for (pqc_event event = TakeEvent(client_); event.kind != PQC_EVENT_NONE;
         event = TakeEvent(client_)) {
      if (event.kind == PQC_EVENT_NEW_WORKER) ++workers;
    }
  }
  MustBeOk(Repeat([&] { return sequence.Describe().status(); }));
  EXPECT_EQ(Must(sequence.Describe()).token_count, position);
  if (!local()) {
    EXPECT_EQ(workers, 0u);
  }
  while (local() && workers == 0) {
    if (AwaitEvent(client_, fd).kind == PQC_EVENT_NEW_WORKER) ++workers;
  }
}

TEST_P(DaemonOperationTest, ABuildEndsWithItsWorker) {
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(Ingest(sequence, layer_, 0, 600).Wait());
  Door door;
  const BuildOptions options = {.iterations = 1000, .progress = [&](const pqc_build_progress&) {
                                  door.Pass();
                                  return true;
                                }};
  Operation build = Must(Operation::BuildIndex(sequence, options));
  door.AwaitPassing(1);
  KillWorker(daemon_.process().pid());
  door.Open();
  // The sidecar may have finished it before.
  const Status status = build.Wait();
  EXPECT_TRUE(status.ok() || status.code() == PQC_UNAVAILABLE) << status.ToString();
  const Status again =
      Repeat([&] { return Must(Operation::BuildIndex(sequence, {.sink_tokens = kSink})).Wait(); });
  EXPECT_TRUE(again.ok() || again.code() == PQC_ALREADY_EXISTS) << again.ToString();
}

TEST_P(DaemonOperationTest, AnOperatorWhoDropsTheCacheRevokesLeases) {
  if (!local()) return;  // leases are those of the local path
  const int fd = Must(Events::Open(client_)).Fd();
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(Must(Operation::Ingest(sequence, 0, Rows(layer_, 0, 300))).Wait());
  EXPECT_FALSE(IsReadable(fd));  // the event has ended with its operation
  MustBeOk(sequence.BuildIndex({.iterations = 2, .sink_tokens = kSink}));
  const Selection selection = {.sink_tokens = kSink, .window_tokens = 16, .ratio = 0.5};
  const StepItem items[] = {{&sequence, 300}};
  { const Step step = Must(client_.BeginStep(items, &selection)); }  // acquires the lease
  Client operator_client = daemon_.OpenClient("default", PQC_PATH_ADMIN);
  Must(operator_client.AdminJson("DropCache", R"({"cache_id": "1", "force": true})"));
  const pqc_event event = AwaitEvent(client_, fd);
  EXPECT_EQ(event.kind, PQC_EVENT_SEQUENCE_REVOKED);
  EXPECT_EQ(event.sequence_id, sequence.id());
}

TEST_P(DaemonOperationTest, AnotherSidecarEndsTheSession) {
  const int fd = Must(Events::Open(client_)).Fd();
  Sequence sequence = Must(cache_.CreateSequence());
  daemon_.process().Signal(SIGTERM);
  daemon_.process().Wait();
  const Daemon next({"--listen", daemon_.endpoint()});
  if (local()) {
    EXPECT_EQ(AwaitEvent(client_, fd).kind, PQC_EVENT_SESSION_LOST);
  }
  Status status;
  do {
    status = Must(Operation::Ingest(sequence, 0, Rows(layer_, 0, 100))).Wait();
    EXPECT_EQ(status.code(), PQC_UNAVAILABLE) << status.ToString();
  } while (status.retry_ms() > 0);
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonOperationTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
