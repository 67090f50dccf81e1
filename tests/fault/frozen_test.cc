// Who stands still holds nobody up for longer than the others said they would wait: a worker that is
// stopped, an engine that is, and a build that nobody reads the progress of.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "faults.h"
#include "tests/stopwatch.h"

namespace pqcached::testing {
namespace {

using std::chrono::milliseconds;

constexpr uint32_t kTimeoutMs = 700;
constexpr auto kMost = milliseconds(kTimeoutMs + 1000);

// What the calls of a client in a hurry make, once the machine lets them.
template <typename Make>
auto Soon(const Make& make) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  auto made = make();
  while (!made.ok() && std::chrono::steady_clock::now() < until) made = make();
  return Must(std::move(made));
}

class FrozenTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  void SetUp() override {
    daemon_.AwaitServing();
    client_ = std::make_unique<Client>(Soon([this] {
      return Client::Open(
          {.endpoint = daemon_.endpoint(), .timeout_ms = kTimeoutMs, .path = GetParam()});
    }));
    cache_ =
        std::make_unique<Cache>(Soon([this] { return client_->OpenCache(SpecOf("cache", {0})); }));
  }
  void TearDown() override { Record("calls_in_time", calls_, {.calls_past_deadline = late_}, {}); }

  Sequence Filled() {
    return Soon([this]() -> Result<Sequence> {
      Result<Sequence> sequence = cache_->CreateSequence();
      if (!sequence.ok()) return sequence;
      Status status = sequence->Ingest(0, 0, layer_.keys(0, 300), layer_.values(0, 300));
      if (status.ok()) status = sequence->BuildIndex({.iterations = 2, .seed = 1});
      if (!status.ok()) return status;
      return sequence;
    });
  }
  // Every call has to end in time; whether it succeeds is its own affair.
  void Bounded(const char* name, const std::function<void()>& call) {
    const auto begin = stopwatch_.Now();
    call();
    const auto took = stopwatch_.Now() - begin;
    ++calls_;
    if (took > kMost) ++late_;
    EXPECT_LE(took, kMost) << name;
  }
  void CallEverything(Sequence& sequence, Sequence& dropped) {
    const Query query = {.layer = 0, .query_position = 299, .queries = layer_.queries()};
    const Selection selection = {.sink_tokens = 4, .window_tokens = 16, .ratio = 0.5};
    std::vector<float> rows(Layer::kKvHeads * 10 * Layer::kKeyDim);
    const LayerRows more[] = {{0, layer_.keys(300, 301), layer_.values(300, 301)}};
    Bounded("select", [&] { (void)sequence.TopK(query, selection); });
    Bounded("attend", [&] { (void)sequence.Attend(query, selection); });
    Bounded("fetch", [&] {
      (void)sequence.FetchBlocks(0, {0, 10}, PQC_KEY, std::as_writable_bytes(std::span(rows)));
    });
    Bounded("append", [&] { (void)sequence.Append(300, more); });
    Bounded("ingest",
            [&] { (void)sequence.Ingest(0, 300, layer_.keys(300, 310), layer_.values(300, 310)); });
    Bounded("build",
            [&] { (void)sequence.BuildIndex({.iterations = 2, .timeout_ms = kTimeoutMs}); });
    Bounded("create", [&] { (void)cache_->CreateSequence(); });
    Bounded("fork", [&] { (void)sequence.Fork(); });
    Bounded("describe", [&] { (void)sequence.Describe(); });
    Bounded("cache", [&] { (void)client_->OpenCache(SpecOf("other", {0})); });
    Bounded("step", [&] {
      const StepItem items[] = {{&sequence, 300}};
      Result<Step> step = client_->BeginStep(items, &selection);
      if (!step.ok()) return;
      std::vector<float> output(Layer::kQueryHeads * Layer::kValueDim), lse(Layer::kQueryHeads);
      (void)step->Attend(0, layer_.queries(), output, lse);
      (void)step->End(more);
    });
    Bounded("flush", [&] { (void)sequence.Flush(); });
    Bounded("truncate", [&] { (void)sequence.Truncate(200); });
    Bounded("drop", [&] { (void)dropped.Drop(); });
    Bounded("open", [&] {
      (void)Client::Open(
          {.endpoint = daemon_.endpoint(), .timeout_ms = kTimeoutMs, .path = GetParam()});
    });
  }

  Daemon daemon_;
  const Layer layer_{400, 3};
  std::unique_ptr<Client> client_;
  std::unique_ptr<Cache> cache_;
  const Stopwatch stopwatch_;
  uint64_t calls_ = 0, late_ = 0;
};

TEST_P(FrozenTest, AStoppedWorkerHoldsNoCallUp) {
  Sequence sequence = Filled(), dropped = Filled();
  {
    const Stopped worker(AwaitWorker(daemon_.process().pid()));
    CallEverything(sequence, dropped);
  }
  // It goes on where it stood.
  Engine engine({.endpoint = daemon_.endpoint(), .path = GetParam(), .cache_name = "later"});
  for (int i = 0; i < 20; ++i) engine.Act();
  engine.Verify();
  EXPECT_EQ(engine.counts().acknowledged_bytes_lost, 0u);
}

TEST_P(FrozenTest, AStoppedWorkerHoldsALongPromptUpNoLongerAndTheNextOnesGoThrough) {
  constexpr uint64_t kTokens = 24000;  // 17 MiB: more parts than there are slots of staging
  const Layer prompt(kTokens, 5);
  const auto ingest = [&](Sequence& sequence) {
    return sequence.Ingest(0, 0, prompt.keys(0, kTokens), prompt.values(0, kTokens));
  };
  CacheSpec spec = SpecOf("long", {0});
  spec.capacity_bytes = 128 << 20;
  Cache cache = Soon([&] { return client_->OpenCache(spec); });
  const auto create = [&] { return Soon([&] { return cache.CreateSequence(); }); };
  for (int i = 0; i < 3; ++i) {  // the first time, there is no ring of staging yet
    Sequence held_up = create();
    {
      const Stopped worker(AwaitWorker(daemon_.process().pid()));
      Bounded("ingest", [&] { EXPECT_FALSE(ingest(held_up).ok()); });
    }
    Sequence next = create();  // needs all slots
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    Status status = ingest(next);
    while (!status.ok() && std::chrono::steady_clock::now() < until) status = ingest(next);
    ASSERT_TRUE(status.ok()) << status.message();
    std::vector<float> rows(Layer::kKvHeads * kTokens * Layer::kKeyDim);
    const auto bytes = std::as_writable_bytes(std::span(rows));
    ASSERT_TRUE(next.FetchBlocks(0, {0, kTokens}, PQC_KEY, bytes).ok());
    for (uint64_t token = 0; token < kTokens; token += 479) {
      for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
        const float* stored = rows.data() + (head * kTokens + token) * Layer::kKeyDim;
        ASSERT_TRUE(std::equal(stored, stored + Layer::kKeyDim, prompt.key(token, head)))
            << i << ", token " << token;
      }
    }
    // All of the first one's rows, or none.
    const uint64_t held = Soon([&] { return held_up.Describe(); }).token_count;
    EXPECT_TRUE(held == 0 || held == kTokens) << held;
    Soon([&]() -> Result<bool> {
      const Status dropped = held_up.Drop();
      return dropped.ok() ? Result<bool>(true) : Result<bool>(dropped);
    });
  }
}

TEST_P(FrozenTest, AClientClosesInTimeWhileItsWorkerIsStopped) {
  Sequence sequence = Filled();
  const LayerRows more[] = {{0, layer_.keys(300, 301), layer_.values(300, 301)}};
  const Stopped worker(AwaitWorker(daemon_.process().pid()));
  const StepItem items[] = {{&sequence, 300}};
  Result<Step> step = client_->BeginStep(items, nullptr);
  if (step.ok()) (void)step->End(more);  // rows that are on their way then
  Bounded("close", [&] { client_.reset(); });
}

// A step of a local client needs no answer, not even to its rows.
TEST_P(FrozenTest, StepsGoOnWithAStoppedWorkerOnTheLocalPathAlone) {
  constexpr uint64_t kSteps = 12;  // rows that are not stored must lie in the window
  Sequence sequence = Filled();
  const Selection selection = {.sink_tokens = 4, .window_tokens = 16, .ratio = 0.5};
  const auto step = [&](uint64_t position) -> Status {
    const StepItem items[] = {{&sequence, position}};
    Result<Step> begun = client_->BeginStep(items, &selection);
    if (!begun.ok()) return begun.status();
    std::vector<float> output(Layer::kQueryHeads * Layer::kValueDim), lse(Layer::kQueryHeads);
    const Status attended = begun->Attend(0, layer_.queries(), output, lse);
    if (!attended.ok()) return attended;
    const LayerRows rows[] = {
        {0, layer_.keys(position, position + 1), layer_.values(position, position + 1)}};
    return begun->End(rows);
  };
  MustBeOk(step(300));  // attaches
  MustBeOk(sequence.Flush());
  {
    const Stopped worker(AwaitWorker(daemon_.process().pid()));
    for (uint64_t position = 301; position < 301 + kSteps; ++position) {
      const Status status = step(position);
      EXPECT_EQ(status.ok(), GetParam() == PQC_PATH_ONLY_LOCAL) << status.ToString();
      if (!status.ok()) return;
    }
  }
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 301 + kSteps);
}

TEST_P(FrozenTest, AStoppedEngineHoldsNobodyUpAndLeavesNothing) {
  Process engine({PQCACHED_ENGINE_PROCESS, daemon_.endpoint(), std::to_string(GetParam()), "7"});
  ASSERT_EQ(engine.ReadLine(), "working");
  engine.Signal(SIGSTOP);
  Sequence sequence = Filled(), dropped = Filled();
  CallEverything(sequence, dropped);
  engine.Kill();
  client_.reset();
  Client admin = daemon_.OpenClient("default", PQC_PATH_ONLY_REMOTE);
  const Left left = AwaitNothingLeft(admin, 1);
  EXPECT_TRUE(left.nothing_but(1)) << left.ToString();
}

INSTANTIATE_TEST_SUITE_P(Paths, FrozenTest,
                         ::testing::Values(PQC_PATH_ONLY_LOCAL, PQC_PATH_ONLY_REMOTE),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached::testing
