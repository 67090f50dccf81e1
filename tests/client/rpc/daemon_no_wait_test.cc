// Steps that do not wait, against a real pqcached on both paths. The timeout of the clients is so
// long that a call which waits runs into the time limit of the test.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "pqcached/attach.h"
#include "pqcached/client.hpp"
#include "tests/client/daemon.h"
#include "tests/rewritten_texts.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::Range;
using testing::SpecOf;

constexpr uint64_t kSink = 4, kWindow = 16;
constexpr uint32_t kLayers = 2;
constexpr uint32_t kTenMinutesMs = 600000;

// Stands for a worker that is slow to start: while it lives, the supervisor starts none.
class StoppedSupervisor {
 public:
  explicit StoppedSupervisor(pid_t pid) : pid_(pid) { kill(pid_, SIGSTOP); }
  ~StoppedSupervisor() { kill(pid_, SIGCONT); }

 private:
  const pid_t pid_;
};

pid_t WorkerOf(pid_t supervisor) {
  const std::string pid = std::to_string(supervisor);
  std::ifstream workers("/proc/" + pid + "/task/" + pid + "/children");
  pid_t worker = 0;
  workers >> worker;
  return worker;
}

class DaemonNoWaitTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  Client Open() {
    return Must(Client::Open(
        {.endpoint = daemon_.endpoint(), .timeout_ms = kTenMinutesMs, .path = GetParam()}));
  }

  Result<Step> Begin(Sequence& sequence, uint64_t position, uint64_t flags = PQC_STEP_NO_WAIT) {
    const StepItem items[] = {{&sequence, position}};
    return client_.BeginStep(items, &selection_, 0, flags);
  }

  // Repeats a call as its retry time says, within the test's own time limit.
  template <class Call>
  void Poll(const Call& call) {
    for (;;) {
      const Status status = call();
      if (status.ok()) return;
      if (status.retry_ms() == 0) MustBeOk(status);
      std::this_thread::yield();
    }
  }

  Step BeginWhenReady(Sequence& sequence, uint64_t position, uint64_t flags = PQC_STEP_NO_WAIT) {
    Result<Step> step = Begin(sequence, position, flags);
    while (!step.ok()) {
      if (step.status().retry_ms() == 0) MustBeOk(step.status());
      std::this_thread::yield();
      step = Begin(sequence, position, flags);
    }
    return std::move(*step);
  }

  // Attends in all layers, and compares with the attention over all tokens.
  void AttendAndEnd(Step step, uint64_t position) {
    for (uint32_t number = 0; number < kLayers; ++number) {
      Attention attention{.output = std::vector<float>(Layer::kQueryHeads * Layer::kValueDim),
                          .lse = std::vector<float>(Layer::kQueryHeads)};
      Poll([&] { return step.Attend(number, layer_.queries(), attention.output, attention.lse); });
      std::vector<uint32_t> own = Range(0, kSink);
      for (const uint32_t token : Range(position + 1 - kWindow, position + 1)) own.push_back(token);
      attention.Merge(layer_.Attend({Layer::kKvHeads, own}));
      const Attention full = layer_.Attend({Layer::kKvHeads, Range(0, position + 1)});
      for (size_t i = 0; i < full.output.size(); ++i) {
        ASSERT_NEAR(attention.output[i], full.output[i], 1e-4f) << position;
      }
    }
    MustBeOk(step.End(testing::RowsOf(layer_, position, position + 1, kLayers)));
  }

  uint64_t WaitedCalls() { return Must(client_.Count()).rpcs; }

  const Layer layer_{700, 1};
  Daemon daemon_;
  Client client_ = (daemon_.AwaitServing(), Open());
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0, 1})));
  const Selection selection_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0};
};

// On the local path the supervisor itself reports the end (NoWaitTest has a sidecar that does).
TEST_P(DaemonNoWaitTest, WithoutAWorkerRemoteCallsAreUnavailableAtOnce) {
  if (GetParam() == PQC_PATH_ONLY_LOCAL) return;
  Sequence sequence = testing::FillIndexed(cache_, layer_, 300, kLayers, kSink);
  Sequence other = testing::FillIndexed(cache_, layer_, 300, kLayers, kSink);
  AttendAndEnd(BeginWhenReady(sequence, 300), 300);
  MustBeOk(sequence.Flush());
  Step begun = BeginWhenReady(other, 300);
  const pid_t worker = WorkerOf(daemon_.process().pid());
  ASSERT_GT(worker, 0);
  {
    const StoppedSupervisor stopped(daemon_.process().pid());
    kill(worker, SIGKILL);
    while (Begin(sequence, 301).status().code() != PQC_UNAVAILABLE) std::this_thread::yield();
    for (int i = 0; i < 10; ++i) {
      const Status refused = Begin(sequence, 301).status();
      EXPECT_EQ(refused.code(), PQC_UNAVAILABLE) << refused.ToString();
      EXPECT_TRUE(HasText(refused.message(), "no new worker has started yet"));
      EXPECT_EQ(refused.retry_ms(), 10u);  // a call that has waited in vain says 1 s
    }
    std::vector<float> output(Layer::kQueryHeads * Layer::kValueDim), lse(Layer::kQueryHeads);
    const Status attended = begun.Attend(0, layer_.queries(), output, lse);
    EXPECT_EQ(attended.code(), PQC_UNAVAILABLE) << attended.ToString();
    EXPECT_GT(attended.retry_ms(), 0u);
  }
  for (uint64_t position = 301; position < 305; ++position) {
    AttendAndEnd(BeginWhenReady(sequence, position), position);
  }
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 305u);
}

TEST_P(DaemonNoWaitTest, BeginningAStepWaitsForNoRpc) {
  Sequence sequence = testing::FillIndexed(cache_, layer_, 300, kLayers, kSink);
  for (uint64_t position = 300; position < 310; ++position) {
    const uint64_t before = WaitedCalls();
    Step step = BeginWhenReady(sequence, position);
    EXPECT_EQ(WaitedCalls(), before);
    AttendAndEnd(std::move(step), position);
    const bool is_remote = GetParam() == PQC_PATH_ONLY_REMOTE;
    EXPECT_EQ(WaitedCalls(), before + (is_remote ? kLayers : 0));
  }
}

TEST_P(DaemonNoWaitTest, TokensThatAnotherClientStoresAreFoundByPolling) {
  Client writer = Open();
  Cache written = Must(writer.OpenCache(SpecOf("cache", {0, 1})));
  Sequence sequence = testing::FillIndexed(written, layer_, 300, kLayers, kSink);
  Sequence attached = Must(cache_.Attach(sequence.id()));
  const auto append = [&](uint64_t begin, uint64_t end) {
    EXPECT_EQ(Must(sequence.Append(begin, testing::RowsOf(layer_, begin, end, kLayers))), end);
  };
  append(300, 310);
  const uint64_t before = WaitedCalls();
  const Status first = Begin(attached, 310).status();
  EXPECT_EQ(first.code(), PQC_DEADLINE_EXCEEDED) << first.ToString();
  EXPECT_EQ(first.field(), "items[0].sequence");
  BeginWhenReady(attached, 310);
  // Beyond the end is an error once the sidecar has been asked, and may be right a moment later.
  Status beyond = Begin(attached, 320).status();
  while (beyond.code() == PQC_DEADLINE_EXCEEDED) beyond = Begin(attached, 320).status();
  EXPECT_EQ(beyond.code(), PQC_INVALID_ARGUMENT) << beyond.ToString();
  EXPECT_EQ(beyond.field(), "items[0].query_position");
  append(310, 320);
  Status status = Begin(attached, 320).status();
  while (!status.ok()) status = Begin(attached, 320).status();
  EXPECT_EQ(WaitedCalls(), before);
}

TEST_P(DaemonNoWaitTest, ALiveIndexEndsItsPrefillInTheBackground) {
  for (const uint64_t flags :
       {uint64_t{PQC_STEP_NO_WAIT}, uint64_t{PQC_STEP_NO_WAIT | PQC_STEP_EXACT_UNTIL_INDEXED}}) {
    SequenceOptions options;
    options.live_index = LiveIndex{.iterations = 2, .sink_tokens = kSink};
    Sequence sequence = Must(cache_.CreateSequence(options));
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, 0, layer_.keys(0, 600), layer_.values(0, 600)));
    }
    for (uint64_t position = 600; position < 605; ++position) {
      const uint64_t before = WaitedCalls();
      Step step = BeginWhenReady(sequence, position, flags);
      EXPECT_EQ(WaitedCalls(), before);
      AttendAndEnd(std::move(step), position);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonNoWaitTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
