// What the client does when the sidecar fails: repeats what is harmless, ends every call in time,
// never takes a wrong answer. The other side is fake_sidecar.cc.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "pqcached/cache_events.hpp"
#include "pqcached/client.hpp"
#include "tests/client/process.h"

namespace pqcached {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::Process;
using testing::TempFolder;

constexpr uint32_t kKvHeads = 2, kQueryHeads = 4, kDim = 32;

// Of calls that are to run into it; long enough to open a session on a busy machine.
constexpr uint32_t kShortTimeoutMs = 1500;
// Much less than the timeouts that a call must not wait for, much more than a busy machine needs.
constexpr milliseconds kSoon(15000);

LayerGroup Layers() {
  return {.layers = {0, 1},
          .kv_heads = kKvHeads,
          .query_heads = kQueryHeads,
          .key_dim = kDim,
          .value_dim = kDim,
          .dtype = PQC_F32};
}

// A fake sidecar, with a client, a cache and a sequence on it.
class Fixture {
 public:
  explicit Fixture(const std::string& behaviour, uint32_t timeout_ms = 20000)
      : sidecar_({PQCACHED_FAKE_SIDECAR, folder_.File("s"), behaviour}) {
    if (!sidecar_.WaitForLine("ready")) throw std::runtime_error("the fake sidecar did not start");
    Result<Client> client = Client::Open(
        {.endpoint = "unix:" + folder_.File("s"), .client_name = "test", .timeout_ms = timeout_ms});
    if (!client.ok()) {
      status_ = client.status();
      return;
    }
    client_ = std::make_unique<Client>(std::move(*client));
    Result<Cache> cache = client_->OpenCache({.name = "cache",
                                              .model_fingerprint = "model",
                                              .groups = {Layers()},
                                              .capacity_bytes = 1 << 20});
    if (!cache.ok()) {
      status_ = cache.status();
      return;
    }
    cache_ = std::make_unique<Cache>(std::move(*cache));
    Result<Sequence> sequence = cache_->CreateSequence();
    if (!sequence.ok()) {
      status_ = sequence.status();
      return;
    }
    sequence_ = std::make_unique<Sequence>(std::move(*sequence));
  }

  Process& sidecar() { return sidecar_; }
  const Status& status() const { return status_; }
  Client& client() { return *client_; }
  Cache& cache() { return *cache_; }
  Sequence& sequence() { return *sequence_; }
  void CloseClient() { client_.reset(); }
  Client* ReleaseClient() { return client_.release(); }

  Result<Selected> TopK() {
    return sequence_->TopK({.layer = 0, .query_position = 99, .queries = {q_, {kQueryHeads, kDim}}},
                           {.ratio = 0.5});
  }
  Result<Attention> Attend(const Selection& selection = {.ratio = 0.5}) {
    return sequence_->Attend(
        {.layer = 0, .query_position = 99, .queries = {q_, {kQueryHeads, kDim}}}, selection);
  }
  Status Ingest(uint64_t tokens) {
    std::vector<float> rows(tokens * kKvHeads * kDim);
    for (uint64_t token = 0; token < tokens; ++token) {
      rows[token * kKvHeads * kDim] = static_cast<float>(token);
    }
    return sequence_->Ingest(0, 0, {rows, {tokens, kKvHeads, kDim}},
                             {rows, {tokens, kKvHeads, kDim}});
  }

 private:
  const std::vector<float> q_ = std::vector<float>(kQueryHeads * kDim, 0.5f);
  const TempFolder folder_;
  Process sidecar_;
  Status status_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<Sequence> sequence_;
};

TEST(FailureTest, AGoodSidecarIsUnderstood) {
  Fixture fixture("good");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  EXPECT_EQ(fixture.sequence().id(), 12u);
  const Result<Selected> selected = fixture.TopK();
  ASSERT_TRUE(selected.ok()) << selected.status().ToString();
  EXPECT_EQ(selected->positions, (std::vector<uint32_t>{100, 101, 102, 103, 104, 105}));
  EXPECT_EQ(selected->sink_tokens, 4u);
  const Result<Attention> attention = fixture.Attend();
  ASSERT_TRUE(attention.ok()) << attention.status().ToString();
  EXPECT_EQ(attention->lse, std::vector<float>(kQueryHeads, 1.5f));
  EXPECT_EQ(attention->selected.count, 3u);
  const Result<pqc_sequence_info> info = fixture.sequence().Describe();
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->token_count, 77u);
}

TEST(FailureTest, AnOlderSidecarDoesNotReportTheLiveIndexThatAnAttachmentNeeds) {
  Fixture fixture("good");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  const Result<Sequence> attached = fixture.cache().Attach(12);
  EXPECT_EQ(attached.status().code(), PQC_UNIMPLEMENTED) << attached.status().ToString();
}

TEST(FailureTest, AnOlderSidecarDoesNotSelectPages) {
  Fixture fixture("good");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  const StepItem items[] = {{&fixture.sequence(), 76}};
  const Selection selection{.index = Index::Flat(), .window_tokens = 1, .ratio = 0.5};
  Result<Step> step = fixture.client().BeginStep(items, &selection);
  ASSERT_TRUE(step.ok()) << step.status().ToString();
  const std::vector<float> queries(kQueryHeads * kDim, 0.5f);
  const Result<Step::Pages> pages =
      step->TopKPages(0, {queries, {1, kQueryHeads, kDim}}, {.page_tokens = 16});
  EXPECT_EQ(pages.status().code(), PQC_UNIMPLEMENTED) << pages.status().ToString();
}

TEST(FailureTest, AnOlderSidecarDoesNotAttendByLogits) {
  Fixture fixture("good");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  const StepItem items[] = {{&fixture.sequence(), 76}};
  Result<Step> step = fixture.client().BeginStep(items, nullptr);
  ASSERT_TRUE(step.ok()) << step.status().ToString();
  const std::vector<int32_t> positions = {3, 7};
  const std::vector<float> numbers(kQueryHeads * 2, 0.5f);
  const Tensor logits(numbers, {kQueryHeads, 2});
  std::vector<float> output(kQueryHeads * kDim), lse(kQueryHeads);
  const Status status =
      step->AttendPositions(0, {}, {.positions = positions, .logits = &logits}, output, lse);
  EXPECT_EQ(status.code(), PQC_UNIMPLEMENTED) << status.ToString();
  EXPECT_EQ(status.field(), "items[0].logits");
}

TEST(FailureTest, AnOlderSidecarDoesNotAttendToListsPerQueryHead) {
  Fixture fixture("good");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  const StepItem items[] = {{&fixture.sequence(), 76}};
  Result<Step> step = fixture.client().BeginStep(items, nullptr);
  ASSERT_TRUE(step.ok()) << step.status().ToString();
  const std::vector<float> queries(kQueryHeads * kDim, 0.5f);
  std::vector<float> output(kQueryHeads * kDim), lse(kQueryHeads);
  const auto attend = [&](uint32_t list_count) {
    const std::vector<int32_t> positions(list_count, 7);
    return step->AttendPositions(0, {queries, {1, kQueryHeads, kDim}},
                                 {.positions = positions, .list_count = list_count}, output, lse);
  };
  const Status status = attend(kQueryHeads);
  EXPECT_EQ(status.code(), PQC_UNIMPLEMENTED) << status.ToString();
  EXPECT_EQ(status.field(), "lists.list_count");
  EXPECT_TRUE(attend(kKvHeads).ok());
}

TEST(FailureTest, AnOlderSidecarDoesNotLeaveATailEstimateOut) {
  Fixture fixture("good");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  const Status status = fixture.Attend({.ratio = 0.5, .tail_estimate = true}).status();
  EXPECT_EQ(status.code(), PQC_UNIMPLEMENTED) << status.ToString();
  EXPECT_EQ(status.field(), "selection.tail_estimate");
  EXPECT_TRUE(fixture.Attend().ok());
}

TEST(FailureTest, HeartbeatsAreAnsweredAndClosingEndsTheSession) {
  Fixture fixture("good");
  EXPECT_TRUE(fixture.sidecar().WaitForLine("heartbeat"));
  fixture.CloseClient();
  EXPECT_TRUE(fixture.sidecar().WaitForLine("session over"));
}

TEST(FailureTest, HandlesOutliveTheirClient) {
  Fixture fixture("good");
  fixture.CloseClient();
  const Result<Selected> selected = fixture.TopK();
  EXPECT_EQ(selected.status().code(), PQC_FAILED_PRECONDITION);
  EXPECT_EQ(selected.status().message(), "client: it is closed");
  EXPECT_EQ(fixture.sequence().Drop().code(), PQC_FAILED_PRECONDITION);
}

TEST(FailureTest, AClientThatIsNeverClosedDoesNotDisturbTheExit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process: gRPC does not survive a fork
  static Client* never_closed = nullptr;
  EXPECT_EXIT(
      {
        bool selected;
        {
          Fixture fixture("good");
          selected = fixture.TopK().ok();
          never_closed = fixture.ReleaseClient();
        }
        std::exit(selected && never_closed ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(FailureTest, ReadsAndRowsAreRepeatedAfterUnavailable) {
  Fixture fixture("flaky");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  const Result<Selected> selected = fixture.TopK();
  EXPECT_TRUE(selected.ok()) << selected.status().ToString();
  const Status ingested = fixture.Ingest(3);
  EXPECT_TRUE(ingested.ok()) << ingested.ToString();
}

TEST(FailureTest, ChangesThatARepeatWouldDoTwiceAreNotRepeated) {
  Fixture fixture("flaky");
  const Status truncated = fixture.sequence().Truncate(0);
  EXPECT_EQ(truncated.code(), PQC_UNAVAILABLE);
  EXPECT_EQ(truncated.message(), "not now");
}

TEST(FailureTest, RepeatsEndWithTheDeadline) {
  Fixture fixture("unavailable", kShortTimeoutMs);
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  const auto begin = steady_clock::now();
  const Result<Selected> selected = fixture.TopK();
  // The last attempt is refused, or overtaken by the deadline.
  EXPECT_TRUE(selected.status().code() == PQC_UNAVAILABLE ||
              selected.status().code() == PQC_DEADLINE_EXCEEDED)
      << selected.status().ToString();
  EXPECT_LT(steady_clock::now() - begin, kSoon);
}

TEST(FailureTest, ALostSessionIsUnavailableForEver) {
  Fixture fixture("end-session");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  for (int i = 0; i < 2; ++i) {
    const auto begin = steady_clock::now();
    const Result<Selected> selected = fixture.TopK();
    EXPECT_EQ(selected.status().code(), PQC_UNAVAILABLE);
    EXPECT_NE(selected.status().message().find("the session is lost"), std::string::npos)
        << selected.status().message();
    EXPECT_NE(selected.status().message().find("the-boot"), std::string::npos);
    EXPECT_NE(selected.status().message().find("the fake ended it"), std::string::npos);
    EXPECT_LT(steady_clock::now() - begin, kSoon);
  }
}

// A worker that ends cancels the streams in its queue. The next worker still has the session.
TEST(FailureTest, ABrokenSessionIsResumedAfterACancelledAttempt) {
  Fixture fixture("break-session");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  EXPECT_EQ(fixture.TopK().status().code(), PQC_UNAVAILABLE);  // its connection broke
  const Status status = fixture.TopK().status();
  EXPECT_TRUE(status.ok()) << status.ToString();
}

// The caller's names are those of the worker before, so the call may succeed with the next one's.
TEST(FailureTest, ACallToAWorkerThatWasReplacedIsUnavailableAndWorthRepeating) {
  Fixture fixture("new-worker");
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  const Status refused = fixture.TopK().status();
  EXPECT_EQ(refused.code(), PQC_UNAVAILABLE) << refused.ToString();
  EXPECT_EQ(refused.field(), "");
  EXPECT_GT(refused.retry_ms(), 0u);
  const Status repeated = fixture.TopK().status();
  EXPECT_TRUE(repeated.ok()) << repeated.ToString();
}

TEST(FailureTest, AnUnknownTokenIsUnauthenticatedWhileTheSessionLives) {
  Fixture fixture("forget-session");
  EXPECT_EQ(fixture.TopK().status().code(), PQC_UNAUTHENTICATED);
}

TEST(FailureTest, ASidecarKilledInACallIsUnavailableAtOnce) {
  for (const char* call : {"TopK", "Ingest", "BuildIndex"}) {
    Fixture fixture("hang", /*timeout_ms=*/60000);
    ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
    std::future<Status> status = std::async(std::launch::async, [&]() -> Status {
      if (call == std::string("TopK")) return fixture.TopK().status();
      if (call == std::string("Ingest")) return fixture.Ingest(100000);
      return fixture.sequence().BuildIndex();
    });
    ASSERT_TRUE(fixture.sidecar().WaitForLine(call));
    const auto killed = steady_clock::now();
    fixture.sidecar().Kill();
    EXPECT_EQ(status.get().code(), PQC_UNAVAILABLE) << call;
    EXPECT_LT(steady_clock::now() - killed, kSoon) << call;
  }
}

// There may be another worker in time; when there is none, the call has waited for it in vain.
TEST(FailureTest, CallsWaitForTheNextWorkerAsLongAsTheyMay) {
  Fixture fixture("good", kShortTimeoutMs);
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  fixture.sidecar().Kill();
  for (int i = 0; i < 2; ++i) {
    const auto begin = steady_clock::now();
    EXPECT_EQ(fixture.TopK().status().code(), PQC_UNAVAILABLE);
    EXPECT_LT(steady_clock::now() - begin, kSoon);
  }
}

TEST(FailureTest, ACallThatIsNotAnsweredEndsWithItsDeadline) {
  Fixture fixture("hang", kShortTimeoutMs);
  ASSERT_TRUE(fixture.status().ok()) << fixture.status().ToString();
  const auto begin = steady_clock::now();
  const Result<Selected> selected = fixture.TopK();
  EXPECT_EQ(selected.status().code(), PQC_DEADLINE_EXCEEDED);
  EXPECT_NE(selected.status().message().find("TopK: no answer"), std::string::npos);
  EXPECT_EQ(fixture.Ingest(10).code(), PQC_DEADLINE_EXCEEDED);
  EXPECT_EQ(fixture.sequence().BuildIndex({.timeout_ms = 300}).code(), PQC_DEADLINE_EXCEEDED);
  EXPECT_LT(steady_clock::now() - begin, kSoon);
}

TEST(FailureTest, ASocketThatNobodyAnswersEndsWithTheDeadline) {
  const TempFolder folder;
  const std::string path = folder.File("s");
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  const auto begin = steady_clock::now();
  const Result<Client> client = Client::Open({.endpoint = "unix:" + path, .timeout_ms = 300});
  EXPECT_EQ(client.status().code(), PQC_DEADLINE_EXCEEDED) << client.status().ToString();
  EXPECT_LT(steady_clock::now() - begin, kSoon);
  close(listener);
}

TEST(FailureTest, ASocketThatIsNotThereIsUnavailableAtOnce) {
  const TempFolder folder;
  const auto begin = steady_clock::now();
  const Result<Client> client =
      Client::Open({.endpoint = "unix:" + folder.File("s"), .timeout_ms = 60000});
  EXPECT_EQ(client.status().code(), PQC_UNAVAILABLE) << client.status().ToString();
  EXPECT_NE(client.status().message().find(folder.path()), std::string::npos);
  EXPECT_LT(steady_clock::now() - begin, kSoon);
}

TEST(FailureTest, ASessionThatDoesNotOpenIsInternal) {
  Fixture fixture("no-open");
  EXPECT_EQ(fixture.status().code(), PQC_INTERNAL) << fixture.status().ToString();
}

TEST(FailureTest, AnswersOfAnotherShapeAreRefused) {
  Fixture fixture("wrong-shape");
  EXPECT_EQ(fixture.TopK().status().code(), PQC_INTERNAL);
  const Result<Attention> attention = fixture.Attend();
  EXPECT_EQ(attention.status().code(), PQC_INTERNAL);
  EXPECT_NE(attention.status().message().find("items[0].output"), std::string::npos);
  std::vector<std::byte> rows(kKvHeads * 5 * 2 * kDim * sizeof(float));
  EXPECT_EQ(fixture.sequence().FetchBlocks(0, {0, 5}, PQC_ROW, rows).code(), PQC_INTERNAL);
}

TEST(FailureTest, RowsAreCutIntoMessagesOfAMebibyte) {
  Fixture fixture("good");
  // 512 bytes per token, keys and values: 2048 tokens per message.
  ASSERT_TRUE(fixture.Ingest(5000).ok());
  EXPECT_TRUE(fixture.sidecar().WaitForLine("header 12"));
  const auto next = [&] {  // heartbeats come in between
    std::string line = fixture.sidecar().ReadLine();
    while (line == "heartbeat") line = fixture.sidecar().ReadLine();
    return line;
  };
  EXPECT_EQ(next(), "chunk at 0 tokens 2048");
  EXPECT_EQ(next(), "first key 0");
  EXPECT_EQ(next(), "chunk at 2048 tokens 2048");
  EXPECT_EQ(next(), "first key 2048");
  EXPECT_EQ(next(), "chunk at 4096 tokens 904");
  EXPECT_EQ(next(), "first key 4096");
}

TEST(FailureTest, LargeReadsAreJoinedFromSeveralCalls) {
  Fixture fixture("good");
  constexpr uint64_t kTokens = 20000;  // 512 bytes each
  std::vector<float> rows(kKvHeads * kTokens * 2 * kDim);
  const Status status = fixture.sequence().FetchBlocks(0, {7, 7 + kTokens}, PQC_ROW,
                                                       std::as_writable_bytes(std::span(rows)));
  ASSERT_TRUE(status.ok()) << status.ToString();
  for (uint64_t head = 0; head < kKvHeads; ++head) {
    for (uint64_t token = 0; token < kTokens; ++token) {
      ASSERT_EQ(rows[(head * kTokens + token) * 2 * kDim],
                static_cast<float>(token + 7 + 1000000 * head));
    }
  }
}

TEST(FailureTest, BuildReportsProgressOnTheCallingThread) {
  Fixture fixture("good");
  std::vector<uint32_t> layers;
  const std::thread::id self = std::this_thread::get_id();
  const Status status =
      fixture.sequence().BuildIndex({.progress = [&](const pqc_build_progress& progress) {
        EXPECT_EQ(std::this_thread::get_id(), self);
        EXPECT_EQ(progress.inertia, 0.5);
        layers.push_back(progress.layer);
        return true;
      }});
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(layers, (std::vector<uint32_t>{0, 1, 2, 3}));
}

// The fake sidecar does not know the field, as one of an earlier release.
TEST(FailureTest, ARebuildThatTheSidecarDoesNotKnowIsRefused) {
  Fixture fixture("good");
  const Status status = fixture.sequence().BuildIndex({.rebuild = true});
  EXPECT_EQ(status.code(), PQC_UNIMPLEMENTED) << status.ToString();
  EXPECT_EQ(status.field(), "options.rebuild");
}

TEST(FailureTest, BuildIsCancelledByItsCallback) {
  Fixture fixture("hang", /*timeout_ms=*/60000);
  int calls = 0;
  const Status status = fixture.sequence().BuildIndex(
      {.progress = [&](const pqc_build_progress&) { return ++calls < 2; }});
  EXPECT_EQ(status.code(), PQC_CANCELLED);
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(fixture.sidecar().WaitForLine("cancelled"));
}

TEST(FailureTest, ASequenceIsChangedByOneThreadAtATime) {
  Fixture fixture("hang", /*timeout_ms=*/60000);
  std::future<Status> first = std::async(std::launch::async, [&] { return fixture.Ingest(10); });
  ASSERT_TRUE(fixture.sidecar().WaitForLine("Ingest"));
  EXPECT_EQ(fixture.Ingest(10).code(), PQC_ABORTED);
  EXPECT_EQ(fixture.sequence().Truncate(0).code(), PQC_ABORTED);
  fixture.sidecar().Kill();
  EXPECT_EQ(first.get().code(), PQC_UNAVAILABLE);
}

// A stream of events lasts an hour. The sidecar may count the old one for a moment when the next one begins.
TEST(FailureTest, EventsGoOnWhenTheirStreamIsRenewedAtTheLimit) {
  Fixture fixture("full-streams");
  auto events = CacheEvents::Open(fixture.cache());
  ASSERT_TRUE(events.ok()) << events.status().ToString();
  const auto next = events->Next(/*timeout_ms=*/20000, 8);
  ASSERT_TRUE(next.ok()) << next.status().ToString();
  ASSERT_EQ(next->size(), 1u);
  EXPECT_EQ(next->front().kind, PQC_CACHE_CLEARED);
}

TEST(FailureTest, EventsAboveTheLimitAreRefused) {
  Fixture fixture("good");
  auto events = CacheEvents::Open(fixture.cache());
  ASSERT_TRUE(events.ok()) << events.status().ToString();
  EXPECT_EQ(events->Next(/*timeout_ms=*/20000, 8).status().code(), PQC_RESOURCE_EXHAUSTED);
}

TEST(FailureTest, AdminSpeaksJsonWithTheNamesOfTheProto) {
  Fixture fixture("good");
  const Result<std::string> info = fixture.client().AdminJson("GetServerInfo");
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_NE(info->find("\"uptime_seconds\":\"61\""), std::string::npos) << *info;
  const Result<std::string> unknown = fixture.client().AdminJson("Nonsense");
  EXPECT_EQ(unknown.status().code(), PQC_INVALID_ARGUMENT);
  EXPECT_NE(unknown.status().message().find("Nonsense"), std::string::npos);
  const Result<std::string> bad =
      fixture.client().AdminJson("DescribeSequence", "{\"no_such\": 1}");
  EXPECT_EQ(bad.status().code(), PQC_INVALID_ARGUMENT);
  EXPECT_NE(bad.status().message().find("no_such"), std::string::npos) << bad.status().message();
}

}  // namespace
}  // namespace pqcached
