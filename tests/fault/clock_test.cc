// Jumps of the wall clock: what is under way goes on, and ends when its own time has come.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "clock_shim.h"
#include "preload.h"
#include "tests/sanitizers.h"
#include "tests/service/daemon_process.h"
#include "tests/service/rpc/rpc_fixture.h"
#include "tests/service/session/broker_fixture.h"
#include "tests/stopwatch.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;
using pqcached::testing::PreloadOf;
using pqcached::testing::SharedFile;
using pqcached::testing::ShimmedClock;
using pqcached::testing::Stopwatch;
using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kSlotBytes = 1 << 20;
constexpr auto kTimeout = seconds(2);  // of calls that come without a deadline
constexpr auto kLate = seconds(1);

// The wall clock of the daemons that this test starts.
class WallClock {
 public:
  explicit WallClock(const std::filesystem::path& path) : clock_(path) {}

  void Jump(std::chrono::nanoseconds by) { clock_->offset_ns.fetch_add(by.count()); }
  bool IsThatOf(pid_t process) const {
    return std::count(clock_->processes.begin(), clock_->processes.end(), process) > 0;
  }
  std::vector<std::string> Environment() const {
    return {"LD_PRELOAD=" + PreloadOf(PQCACHED_CLOCK_SHIM),
            std::string(testing::kClockShimVariable) + "=" + clock_.path().string()};
  }

 private:
  const SharedFile<ShimmedClock> clock_;
};

class ClockTest : public RpcTest, public ::testing::WithParamInterface<hours> {
 protected:
  void SetUp() override {
    clock_ = std::make_unique<WallClock>(directory_ / "clock");
    daemon_ = std::make_unique<Daemon>(
        std::vector<std::string>{"--listen", endpoint(), "--max-pool-bytes", "64mib",
                                 "--segment-tokens", "128", "--lease-timeout", "5m",
                                 "--default-timeout", "2s", "--heartbeat-interval", "100ms",
                                 "--shutdown-timeout", "5s", "--watchdog-timeout", "10s"},
        clock_->Environment());
    ASSERT_TRUE(daemon_->AwaitOutput("event=ready ")) << daemon_->output();
    ASSERT_TRUE(clock_->IsThatOf(daemon_->pid()));
    ASSERT_TRUE(clock_->IsThatOf(daemon_->WorkerPid()));
    remote_ = Connect();
    local_ = std::make_unique<LocalClient>(endpoint());
    staged_id_ = local_->CreateSequence(local_->OpenCache());
    staging_ = local_->connection().OpenStaging(kSlotBytes, 1);
    ASSERT_NE(staging_.data(), nullptr);
    Commit();
    ASSERT_TRUE(local_->Attach(staged_id_, &lease_).ok());
    pinned_id_ = remote_->Filled(300);
    v1::PinRequest pin;
    pin.set_sequence_id(pinned_id_);
    pin.set_ttl_ms(120'000);
    v1::PinResponse pinned;
    ASSERT_TRUE(remote_->admin().Pin(remote_->Context().get(), pin, &pinned).ok());
  }
  void TearDown() override {
    local_.reset();
    remote_.reset();
  }

  // Rows out of staging, behind those that are there.
  void Commit() {
    v1::CommitRequest request;
    request.set_sequence_id(staged_id_);
    request.set_first_position(staged_tokens_);
    uint64_t offset = 0;
    ++generation_;
    for (const uint32_t layer : kLayers) {
      *request.add_rows() = RowsOf(layer, staged_tokens_, 100);
      offset = Stage(staging_, kSlotBytes, 0, generation_, offset,
                     request.mutable_rows(request.rows_size() - 1));
    }
    v1::CommitResponse response;
    const grpc::Status status = local_->Rpc(&v1::KvCache::Stub::Commit, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    staged_tokens_ += 100;
    EXPECT_EQ(response.token_count(), staged_tokens_);
  }

  // The server's own time for calls without a deadline ends an Ingest that says nothing.
  void ExpectIdleIngestEndsInTime(const std::function<void()>& meanwhile) {
    const uint64_t sequence_id = remote_->NewSequence();
    grpc::ClientContext context;
    context.AddMetadata("pqcached-session", remote_->token());
    v1::IngestResponse response;
    const auto begun = std::chrono::steady_clock::now();
    const auto counted = stopwatch_.Now();
    const auto writer = remote_->kv().Ingest(&context, &response);
    v1::IngestRequest request;
    request.mutable_header()->set_sequence_id(sequence_id);
    writer->Write(request);
    meanwhile();
    EXPECT_TRUE(Failed(writer->Finish(), StatusCode::DEADLINE_EXCEEDED, ""));
    EXPECT_GE(std::chrono::steady_clock::now() - begun, kTimeout - milliseconds(100));
    EXPECT_LE(stopwatch_.Now() - counted, kTimeout + kLate);
  }

  void ExpectHeartbeats() {
    const auto begun = stopwatch_.Now();
    v1::SessionEvent event;
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(remote_->ReadEvent(&event)) << "the session has ended";
    EXPECT_LE(stopwatch_.Now() - begun, kLate);
  }

  void ExpectNothingWasLost() {
    v1::StatsResponse stats;
    ASSERT_TRUE(remote_->admin().Stats(remote_->Context().get(), {}, &stats).ok());
    EXPECT_EQ(stats.session_count(), 2u);
    EXPECT_EQ(stats.evicted_sequences(), 0u);
    EXPECT_EQ(stats.revoked_lease_count(), 0u);
    EXPECT_LT(stats.uptime_seconds(), 300u);
    v1::DescribeSequenceRequest request;
    request.set_sequence_id(pinned_id_);
    v1::DescribeSequenceResponse pinned;
    ASSERT_TRUE(remote_->admin().DescribeSequence(remote_->Context().get(), request, &pinned).ok());
    EXPECT_GT(pinned.sequence().pin_left_seconds(), 60);
    EXPECT_LE(pinned.sequence().pin_left_seconds(), 120);
    EXPECT_LT(pinned.sequence().idle_seconds(), 60);
    const kvstore::LeaseWords& words = local_->words(lease_.word_index());
    EXPECT_EQ(words.lease_id, lease_.lease_id());
    EXPECT_EQ(words.flags, 0u);
    EXPECT_EQ(words.token_count, staged_tokens_);
  }

  std::unique_ptr<WallClock> clock_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<TestClient> remote_;
  std::unique_ptr<LocalClient> local_;
  SharedMapping staging_;
  v1::AttachResponse lease_;
  uint64_t staged_id_ = 0, staged_tokens_ = 0, generation_ = 0, pinned_id_ = 0;
  const Stopwatch stopwatch_;
};

// There and back again: a jump each way, whichever comes first.
TEST_P(ClockTest, WhatIsUnderWayGoesOnAndEndsInItsOwnTime) {
  const pid_t worker = daemon_->WorkerPid();
  for (const hours jump : {GetParam(), -GetParam()}) {
    SCOPED_TRACE(jump.count());
    const uint64_t sequence_id = remote_->NewSequence();
    const uint64_t built_id = remote_->Filled(2000);
    const auto context = remote_->Context();
    v1::IngestResponse response;
    const auto writer = remote_->kv().Ingest(context.get(), &response);
    v1::IngestRequest request;
    request.mutable_header()->set_sequence_id(sequence_id);
    ASSERT_TRUE(writer->Write(request));
    const auto send = [&](uint32_t layer) {
      request.mutable_chunk()->set_first_position(0);
      *request.mutable_chunk()->mutable_rows() = RowsOf(layer, 0, 300);
      ASSERT_TRUE(writer->Write(request));
    };
    send(kLayers[0]);
    auto build = std::async(std::launch::async, [&] { remote_->Build(built_id, Pq(4, 8)); });
    ExpectIdleIngestEndsInTime([&] {
      clock_->Jump(jump);
      Commit();
      ExpectHeartbeats();
      send(kLayers[1]);
    });
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.token_count(), 300u);
    build.wait();
    ExpectIdleIngestEndsInTime([&] { Commit(); });  // begun after the jump
    ExpectNothingWasLost();
  }
  EXPECT_EQ(kill(worker, 0), 0) << "the watchdog has taken it for dead";
}

TEST_P(ClockTest, AShutdownTakesNoLongerThanItsTimeout) {
  const uint64_t sequence_id = remote_->NewSequence();
  const auto context = remote_->Context();
  v1::IngestResponse response;
  const auto writer = remote_->kv().Ingest(context.get(), &response);
  v1::IngestRequest request;
  request.mutable_header()->set_sequence_id(sequence_id);
  ASSERT_TRUE(writer->Write(request));
  clock_->Jump(GetParam());
  ExpectHeartbeats();
  const auto begun = stopwatch_.Now();
  daemon_->Signal(SIGTERM);
  poll(nullptr, 0, 300);
  clock_->Jump(-GetParam());
  EXPECT_EQ(daemon_->Wait(), 0) << daemon_->output();
  EXPECT_LE(stopwatch_.Now() - begun, seconds(5) + 2 * kLate);
  EXPECT_EQ(daemon_->output().find("shutdown_forced"), std::string::npos) << daemon_->output();
  EXPECT_FALSE(writer->Finish().ok());
}

INSTANTIATE_TEST_SUITE_P(Jumps, ClockTest, ::testing::Values(hours(1), hours(-1)),
                         [](const auto& test) {
                           return test.param > hours(0) ? "Forward" : "Back";
                         });

}  // namespace
}  // namespace pqcached::service
