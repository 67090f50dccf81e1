// Every limit on what comes from outside: one more is refused by its name, and nothing has changed.
//
// Of sessions and streams: session_test, broker_test; of leases and staging: tests/kvstore/lease_test;
// of names, shapes, positions: bad_query_test, bad_rows_test; of pools, quotas, what a group leaves:
// pressure_test; of waiting calls: lifecycle_test.
#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include <grpcpp/generic/generic_stub.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kvstore/read/refusal.h"
#include "tests/service/rpc/lifecycle_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;

class LimitsTest : public LifecycleTest {
 protected:
  // All that there is.
  static std::string State(TestClient& client) {
    v1::ListCachesResponse caches;
    EXPECT_TRUE(client.admin().ListCaches(client.Context().get(), {}, &caches).ok());
    v1::StatsResponse stats = Stats(client);
    return caches.ShortDebugString() + " sequences " + std::to_string(stats.sequence_count()) +
           " used " + std::to_string(stats.pool_used_bytes());
  }
};

TEST_F(LimitsTest, CachesSequencesAndPools) {
  Start([](Config& config) {
    config.max_caches = 1;
    config.max_sequences = 2;
  });
  const auto client = Connect();
  v1::OpenCacheResponse opened;
  v1::OpenCacheRequest large = CacheRequest();
  large.set_capacity_bytes(config_.max_pool_bytes + (1 << 20));
  const std::string nothing = State(*client);
  EXPECT_TRUE(Failed(client->kv().OpenCache(client->Context().get(), large, &opened),
                     StatusCode::RESOURCE_EXHAUSTED, "capacity_bytes"));
  EXPECT_EQ(State(*client), nothing);
  const uint64_t cache_id = client->OpenCache("first");
  client->CreateSequence(cache_id);
  client->CreateSequence(cache_id);
  const std::string before = State(*client);
  EXPECT_TRUE(
      Failed(client->kv().OpenCache(client->Context().get(), CacheRequest("second"), &opened),
             StatusCode::RESOURCE_EXHAUSTED, "max_caches"));
  v1::CreateSequenceRequest create;
  create.set_cache_id(cache_id);
  v1::CreateSequenceResponse created;
  EXPECT_TRUE(Failed(client->kv().CreateSequence(client->Context().get(), create, &created),
                     StatusCode::RESOURCE_EXHAUSTED, "max_sequences"));
  EXPECT_EQ(State(*client), before);
}

TEST_F(LimitsTest, BuildsInFlightAndWaiting) {
  absl::Notification begun;
  absl::Notification keep_going;
  std::atomic<int> builds = 0;
  hooks_.before_build = [&](const auto&) {
    if (builds++ > 0) return;
    begun.Notify();
    keep_going.WaitForNotification();
  };
  StartHooked([](Config& config) {
    config.max_builds = 1;
    config.max_pending_calls = 1;
  });
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(100);
  const std::string before = State(*client);
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = Pq(2, 4);
  const auto build = [&] {
    const auto context = client->Context();
    const auto reader = client->kv().BuildIndex(context.get(), request);
    for (v1::BuildProgress progress; reader->Read(&progress);) {
    }
    return reader->Finish();
  };
  std::thread first([&] { EXPECT_TRUE(build().ok()); });
  begun.WaitForNotification();
  // One of two finds the only waiting place taken; it lets the others go on.
  std::atomic<int> refused = 0;
  std::vector<std::thread> others;
  for (int i = 0; i < 2; ++i) {
    others.emplace_back([&] {
      const grpc::Status status = build();
      if (status.error_code() != StatusCode::RESOURCE_EXHAUSTED) return;
      EXPECT_TRUE(Failed(status, StatusCode::RESOURCE_EXHAUSTED, "max_pending_calls"));
      EXPECT_EQ(RefusedBy(status).retry_ms, kvstore::kRetryQueue);
      EXPECT_EQ(State(*client), before);
      if (refused++ == 0) keep_going.Notify();
    });
  }
  first.join();
  for (std::thread& other : others) other.join();
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(Stats(*client).builds_in_flight(), 0u);
}

// Calls whose clients never read the answer.
class UnreadCalls {
 public:
  explicit UnreadCalls(const std::string& endpoint)
      : stub_(grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(),
                                        SmallWindows())) {}
  ~UnreadCalls() {
    for (const std::unique_ptr<Unread>& call : calls_) call->context->TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) continue;
  }

  void Start(std::unique_ptr<grpc::ClientContext> context, const v1::FetchBlocksRequest& request) {
    calls_.push_back(std::make_unique<Unread>());
    Unread& call = *calls_.back();
    call.context = std::move(context);
    call.stream =
        stub_.PrepareCall(call.context.get(), "/pqcached.v1.KvCache/FetchBlocks", &queue_);
    call.stream->StartCall(&call);
    Await();
    const grpc::Slice slice(request.SerializeAsString());
    call.stream->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), &call);
    Await();
  }

 private:
  struct Unread {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
  };

  // Of a connection of its own, which takes 4 KiB of an answer that is not read.
  static grpc::ChannelArguments SmallWindows() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4096);
    return arguments;
  }

  void Await() {
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue_.Next(&tag, &ok) && ok);
  }

  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Unread>> calls_;
};

// Of large answers, and of small ones, which have a time limit only when there are many.
class UnreadAnswersTest : public LimitsTest,
                          public ::testing::WithParamInterface<std::pair<size_t, uint32_t>> {};

TEST_P(UnreadAnswersTest, AreBoundedAndEnd) {
  const auto [max_message_bytes, tokens] = GetParam();
  Start([limit = max_message_bytes](Config& config) {
    config.max_message_bytes = limit;
    config.stream_timeout = absl::Seconds(2);
  });
  const auto client = Connect("idle");
  const auto other = Connect("other");
  const auto request_of = [count = tokens](TestClient& of) {
    v1::FetchBlocksRequest request;
    request.set_sequence_id(of.NewSequence());
    for (uint32_t begin = 0; begin < count; begin += 50) {
      of.Ingest(request.sequence_id(), begin, 50);
    }
    request.set_layer(1);
    request.add_ranges()->set_end(count);
    return request;
  };
  const v1::FetchBlocksRequest request = request_of(*client), of_other = request_of(*other);
  v1::FetchBlocksResponse response;
  ASSERT_TRUE(client->kv().FetchBlocks(client->Context().get(), request, &response).ok());
  ASSERT_GT(response.ByteSizeLong(), max_message_bytes / 4);
  UnreadCalls unread(endpoint());
  const auto fetch = [&] {
    return client->kv().FetchBlocks(client->Context().get(), request, &response);
  };
  grpc::Status status;
  for (int i = 0; i < 40 && status.ok(); ++i) {
    unread.Start(client->Context(), request);
    status = fetch();
  }
  EXPECT_TRUE(Failed(status, StatusCode::RESOURCE_EXHAUSTED, "max_message_bytes", "tenant idle"));
  EXPECT_EQ(RefusedBy(status).retry_ms, kvstore::kRetryQueue);
  EXPECT_TRUE(other->kv().FetchBlocks(other->Context().get(), of_other, &response).ok());
  // Those calls are cancelled when their time is over.
  for (int i = 0; i < 200 && !status.ok(); ++i) {
    absl::SleepFor(absl::Milliseconds(50));
    status = fetch();
  }
  EXPECT_TRUE(status.ok()) << status.error_message();
}

INSTANTIATE_TEST_SUITE_P(Sizes, UnreadAnswersTest,
                         ::testing::Values(std::pair(size_t{4} << 20, 6000u),
                                           std::pair(size_t{64} << 10, 100u)));

TEST_F(LimitsTest, PositionsThatDoNotFitAreNotSelected) {
  std::atomic<int> selections = 0;
  hooks_.before_top_k = [&] { ++selections; };
  StartHooked([](Config& config) { config.max_message_bytes = 64 << 10; });
  const auto client = Connect();
  constexpr uint64_t kTokens = 9000;
  const uint64_t sequence_id = client->NewSequence();
  for (uint64_t begin = 0; begin < kTokens; begin += 50) client->Ingest(sequence_id, begin, 50);
  v1::TopKRequest request;
  v1::TopKItem* const item = request.add_items();
  *item->mutable_query() = QueryAt(sequence_id, 1, kTokens - 1);
  item->mutable_selection()->mutable_index()->mutable_flat();
  item->mutable_selection()->set_token_ratio(1.0);
  v1::TopKResponse response;
  const auto top_k = [&] { return client->kv().TopK(client->Context().get(), request, &response); };
  EXPECT_TRUE(Failed(top_k(), StatusCode::RESOURCE_EXHAUSTED, "response"));
  EXPECT_EQ(selections, 0);
  // Of all tokens, the sink is not selected.
  item->mutable_selection()->set_sink_tokens(kTokens - 1000);
  EXPECT_TRUE(top_k().ok());
  EXPECT_EQ(response.items(0).count(), 1000u);
}

TEST_F(LimitsTest, ItemsOfABatch) {
  Start();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  const std::string before = Dump(*client, sequence_id);
  const auto expect = [&](const grpc::Status& status, const std::string& field) {
    EXPECT_TRUE(Failed(status, StatusCode::INVALID_ARGUMENT, field));
  };
  v1::TopKRequest top_k;
  v1::ScoreRequest score;
  v1::AttendRequest attend;
  for (int i = 0; i < 257; ++i) {
    top_k.add_items();
    score.add_items();
    attend.add_items();
  }
  v1::TopKResponse selected;
  expect(client->kv().TopK(client->Context().get(), top_k, &selected), "items");
  v1::ScoreResponse scores;
  expect(client->kv().Score(client->Context().get(), score, &scores), "items");
  v1::AttendResponse attended;
  expect(client->kv().Attend(client->Context().get(), attend, &attended), "items");
  v1::FetchBlocksRequest fetch;
  for (int i = 0; i < 1025; ++i) fetch.add_ranges()->set_end(1);
  v1::FetchBlocksResponse rows;
  expect(client->kv().FetchBlocks(client->Context().get(), fetch, &rows), "ranges");
  EXPECT_EQ(Dump(*client, sequence_id), before);
}

TEST_F(LimitsTest, BytesOfAMessage) {
  Start();  // 1 MiB
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  const std::string before = Dump(*client, sequence_id);
  v1::AppendRequest request;
  v1::SequenceAppend* item = request.add_items();
  item->set_sequence_id(sequence_id);
  for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, 10, 2048);
  v1::AppendResponse response;
  EXPECT_TRUE(Failed(client->kv().Append(client->Context().get(), request, &response),
                     StatusCode::RESOURCE_EXHAUSTED, "", "larger than max"));
  EXPECT_EQ(Dump(*client, sequence_id), before);
  // A small message that claims much: by strides of zero.
  item->clear_rows();
  *item->add_rows() = RowsOf(kLayers[0], 10, 1);
  v1::Tensor& keys = *item->mutable_rows(0)->mutable_keys();
  keys.set_shape(0, 1 << 20);
  for (const int64_t stride : {0, static_cast<int>(kKeyDim * sizeof(float)), 4}) {
    keys.add_strides(stride);
  }
  EXPECT_TRUE(Failed(client->kv().Append(client->Context().get(), request, &response),
                     StatusCode::INVALID_ARGUMENT, "items[0].rows[0].keys.shape",
                     "max_message_bytes"));
  EXPECT_EQ(Dump(*client, sequence_id), before);
}

}  // namespace
}  // namespace pqcached::service
