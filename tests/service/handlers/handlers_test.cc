// The handlers of all rpcs, from many threads, with deadlines and cancellations, without a server.
// ThreadSanitizer makes the tests with threads sharp.
#include "service/handlers/handlers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/service/handlers/direct_sidecar.h"

namespace pqcached::service {
namespace {

using google::protobuf::Message;
using kvstore::SteadyTime;

constexpr uint64_t kTokens = 150;  // more than one segment

class HandlersTest : public testing::Test {
 protected:
  uint64_t OpenCache(const Client& client, bool* created = nullptr) {
    v1::OpenCacheResponse response;
    const absl::Status status = sidecar_.Call(client, CacheRequest(), &response);
    EXPECT_TRUE(status.ok()) << status;
    if (created != nullptr) *created = response.created();
    return response.cache_id();
  }

  uint64_t CreateSequence(const Client& client, uint64_t cache_id) {
    v1::CreateSequenceRequest request;
    request.set_cache_id(cache_id);
    v1::CreateSequenceResponse response;
    const absl::Status status = sidecar_.Call(client, request, &response);
    EXPECT_TRUE(status.ok()) << status;
    return response.sequence_id();
  }

  static v1::AppendRequest AppendOf(uint64_t sequence_id, uint64_t first, uint64_t tokens) {
    v1::AppendRequest request;
    v1::SequenceAppend* item = request.add_items();
    item->set_sequence_id(sequence_id);
    item->set_first_position(first);
    for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, first, tokens);
    return request;
  }

  static std::vector<std::string> IngestOf(uint64_t sequence_id, uint64_t tokens) {
    v1::IngestRequest message;
    message.mutable_header()->set_sequence_id(sequence_id);
    std::vector<std::string> messages = {message.SerializeAsString()};
    for (const uint32_t layer : kLayers) {
      *message.mutable_chunk()->mutable_rows() = RowsOf(layer, 0, tokens);
      messages.push_back(message.SerializeAsString());
    }
    return messages;
  }

  // Without an index: the handler looks up the default of the sequence's cache.
  static v1::TopKRequest TopKOf(uint64_t sequence_id, uint64_t position) {
    v1::TopKRequest request;
    v1::TopKItem* item = request.add_items();
    *item->mutable_query() = QueryAt(sequence_id, kLayers[0], position);
    *item->mutable_selection() = TokenCountSelection(Flat(), 1, 2, 8);
    item->mutable_selection()->clear_index();
    return request;
  }

  static v1::FetchBlocksRequest FetchOf(uint64_t sequence_id, uint64_t end) {
    v1::FetchBlocksRequest request;
    request.set_sequence_id(sequence_id);
    request.set_layer(kLayers[1]);
    request.set_part(v1::ROW_PART_KEY);
    request.add_ranges()->set_end(end);
    return request;
  }

  // The keys of tokens [0, tokens) as FetchBlocks gives them: by kv head first.
  static std::string KeysOf(uint64_t tokens) {
    const std::string rows = RowsOf(kLayers[1], 0, tokens).keys().inline_data();
    constexpr size_t kRowBytes = kKeyDim * sizeof(float);
    std::string keys;
    for (size_t head = 0; head < kKvHeads; ++head) {
      for (size_t token = 0; token < tokens; ++token) {
        keys += rows.substr((token * kKvHeads + head) * kRowBytes, kRowBytes);
      }
    }
    return keys;
  }

  void ExpectNothingIsLeft() {
    for (const kvstore::CacheInfo& cache : sidecar_.store->ListCaches("")) {
      EXPECT_EQ(cache.sequence_count, 0u);
      EXPECT_EQ(cache.used_bytes, 0u);
    }
    EXPECT_EQ(sidecar_.store->Stats(kvstore::kAllTenants).lease_count, 0u);
    EXPECT_EQ(sidecar_.gate.in_flight_count(), 0u);
    EXPECT_EQ(sidecar_.gate.builds_in_flight(), 0u);
  }

  static Config ConfigOfTest() {
    Config config = SmallConfig();
    config.retain = false;  // a session that ends leaves nothing
    return config;
  }

  DirectSidecar sidecar_{ConfigOfTest()};
};

TEST_F(HandlersTest, SessionsOfManyThreadsDoNotDisturbEachOther) {
  constexpr int kThreads = 4, kRounds = 3;
  std::atomic<int> created = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        const Client client = sidecar_.Open("engine" + std::to_string(t));
        bool is_new = false;
        const uint64_t cache = OpenCache(client, &is_new);
        created += is_new ? 1 : 0;
        const uint64_t id = CreateSequence(client, cache);
        v1::IngestResponse ingested;
        ASSERT_TRUE(sidecar_.Ingest(client, IngestOf(id, kTokens), &ingested).ok());
        EXPECT_EQ(ingested.token_count(), kTokens);
        v1::AppendResponse appended;
        ASSERT_TRUE(sidecar_.Call(client, AppendOf(id, kTokens, 1), &appended).ok());
        v1::TopKResponse selected;
        const absl::Status status = sidecar_.Call(client, TopKOf(id, kTokens), &selected);
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_EQ(selected.items(0).count(), 8u);
        v1::FetchBlocksResponse fetched;
        ASSERT_TRUE(sidecar_.Call(client, FetchOf(id, kTokens), &fetched).ok());
        EXPECT_EQ(fetched.blocks(0).inline_data(), KeysOf(kTokens));
        v1::DropSequenceRequest drop;
        drop.set_sequence_id(round == 0 ? id : CreateSequence(client, cache));
        v1::DropSequenceResponse dropped;
        ASSERT_TRUE(sidecar_.Call(client, drop, &dropped).ok());
        EXPECT_EQ(sidecar_.Call(client, drop, &dropped).code(), absl::StatusCode::kNotFound);
        sidecar_.Close(client);
        EXPECT_EQ(sidecar_.Call(client, drop, &dropped).code(), absl::StatusCode::kUnauthenticated);
      }
    });
  }
  std::atomic<bool> done = false;
  std::thread operator_thread([&] {  // inspects the sidecar while it works
    const Client operator_client = Operator();
    while (!done) {
      v1::StatsResponse stats;
      EXPECT_TRUE(sidecar_.Call(operator_client, v1::StatsRequest(), &stats).ok());
      v1::ListSequencesResponse sequences;
      EXPECT_TRUE(sidecar_.Call(operator_client, v1::ListSequencesRequest(), &sequences).ok());
      v1::ListLeasesResponse leases;
      EXPECT_TRUE(sidecar_.Call(operator_client, v1::ListLeasesRequest(), &leases).ok());
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  operator_thread.join();
  EXPECT_EQ(created, 1) << "exactly one caller creates a cache";
  ExpectNothingIsLeft();
}

TEST_F(HandlersTest, ASequenceIsReadWhileItGrows) {
  constexpr uint64_t kSteps = 40;
  const Client client = sidecar_.Open("engine");
  const uint64_t id = CreateSequence(client, OpenCache(client));
  v1::AppendResponse appended;
  ASSERT_TRUE(sidecar_.Call(client, AppendOf(id, 0, kTokens), &appended).ok());
  std::atomic<uint64_t> stored = kTokens;
  std::vector<std::thread> readers;
  for (int t = 0; t < 3; ++t) {
    readers.emplace_back([&] {
      for (uint64_t end = kTokens; end < kTokens + kSteps;) {
        end = stored;
        v1::TopKResponse selected;
        const absl::Status status = sidecar_.Call(client, TopKOf(id, end - 1), &selected);
        ASSERT_TRUE(status.ok()) << status;
        v1::FetchBlocksResponse fetched;
        ASSERT_TRUE(sidecar_.Call(client, FetchOf(id, end), &fetched).ok());
        EXPECT_EQ(fetched.blocks(0).inline_data(), KeysOf(end));
      }
    });
  }
  for (uint64_t step = 0; step < kSteps; ++step) {
    v1::AppendResponse response;
    EXPECT_TRUE(sidecar_.Call(client, AppendOf(id, kTokens + step, 1), &response).ok());
    stored = kTokens + step + 1;
  }
  for (std::thread& reader : readers) reader.join();
  sidecar_.Close(client);
  ExpectNothingIsLeft();
}

TEST_F(HandlersTest, ExactlyOneOfManyCallersCreatesACache) {
  constexpr int kThreads = 4, kCaches = 20;
  const Client client = sidecar_.Open("engine");
  std::vector<std::atomic<int>> created(kCaches);
  std::barrier together(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kCaches; ++i) {
        v1::OpenCacheRequest request = CacheRequest("cache" + std::to_string(i));
        request.set_capacity_bytes(size_t{2} << 20);
        v1::OpenCacheResponse response;
        together.arrive_and_wait();
        const absl::Status status = sidecar_.Call(client, request, &response);
        EXPECT_TRUE(status.ok()) << status;
        created[static_cast<size_t>(i)] += response.created() ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::atomic<int>& count : created) EXPECT_EQ(count, 1);
}

TEST_F(HandlersTest, ThreadsLookUpAndForgetTheSpecificationsOfCaches) {
  const Client client = sidecar_.Open("engine");
  const uint64_t cache_id = OpenCache(client);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 8; ++i) ids.push_back(CreateSequence(client, cache_id));
  Caller caller;
  caller.session = client.session;
  Caller stranger = caller;
  stranger.session.tenant = "stranger";
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t round = 0; round < 200; ++round) {
        const uint64_t id = ids[(t + round) % ids.size()];
        const auto spec = sidecar_.handlers.specs.Of(caller, id);
        ASSERT_TRUE(spec.ok()) << spec.status();
        EXPECT_EQ((*spec)->name, "cache");
        EXPECT_EQ(sidecar_.handlers.specs.Of(stranger, id).status().code(),
                  absl::StatusCode::kNotFound);
        if (round % 5 == t) sidecar_.handlers.specs.Forget(id);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The requests of the decode and prefill rpcs that work when their caller waits.
std::vector<std::unique_ptr<Message>> GoodRequests(const v1::AppendRequest& append,
                                                   const v1::TopKRequest& top_k,
                                                   const v1::FetchBlocksRequest& fetch,
                                                   uint64_t cache_id, uint64_t sequence_id) {
  v1::CommitRequest commit;
  commit.set_sequence_id(sequence_id);
  commit.set_first_position(append.items(0).first_position());
  *commit.mutable_rows() = append.items(0).rows();
  v1::CreateSequenceRequest create;
  create.set_cache_id(cache_id);
  v1::ForkSequenceRequest fork;
  fork.set_sequence_id(sequence_id);
  v1::AttachRequest attach;
  attach.set_sequence_id(sequence_id);
  v1::ClosePrefillRequest close;
  close.set_sequence_id(sequence_id);
  v1::BuildIndexRequest build;
  build.set_sequence_id(sequence_id);
  *build.mutable_index() = Pq(2, 4);
  std::vector<std::unique_ptr<Message>> requests;
  for (const Message* each : std::initializer_list<const Message*>{
           &append, &commit, &top_k, &fetch, &create, &fork, &attach, &close, &build}) {
    requests.emplace_back(each->New());
    requests.back()->CopyFrom(*each);
  }
  return requests;
}

// Calls each handler as the gate does, but at a time at which the gate has let the call pass already.
class AbandonedCallTest : public HandlersTest {
 protected:
  AbandonedCallTest() : client_(sidecar_.Open("engine", /*mapped=*/true)) {
    cache_id_ = OpenCache(client_);
    sequence_id_ = CreateSequence(client_, cache_id_);
    v1::AppendResponse appended;
    EXPECT_TRUE(sidecar_.Call(client_, AppendOf(sequence_id_, 0, kTokens), &appended).ok());
  }

  std::string State() {
    v1::DescribeSequenceRequest request;
    request.set_sequence_id(sequence_id_);
    v1::DescribeSequenceResponse sequence;
    EXPECT_TRUE(sidecar_.Call(client_, request, &sequence).ok());
    sequence.mutable_sequence()->clear_idle_seconds();
    v1::ListCachesResponse caches;
    EXPECT_TRUE(sidecar_.Call(client_, v1::ListCachesRequest(), &caches).ok());
    return sequence.ShortDebugString() + caches.ShortDebugString() +
           std::to_string(sidecar_.store->Stats(kvstore::kAllTenants).lease_count);
  }

  // Expects that every good request fails with `code` and changes nothing.
  void ExpectAllFail(const service::Call& call, absl::StatusCode code) {
    const std::string before = State();
    for (const auto& request :
         GoodRequests(AppendOf(sequence_id_, kTokens, 2), TopKOf(sequence_id_, kTokens - 1),
                      FetchOf(sequence_id_, kTokens), cache_id_, sequence_id_)) {
      const RpcEntry& entry = EntryOf(*request->GetDescriptor());
      SCOPED_TRACE(RpcName(entry.rpc));
      const std::unique_ptr<Message> response(entry.response.New());
      EXPECT_EQ(entry.answer(sidecar_.handlers, call, *request, response.get()).code(), code);
      EXPECT_EQ(State(), before);
    }
  }

  service::Call CallOf(SteadyTime deadline, std::function<bool()> is_cancelled) const {
    service::Call call;
    call.token = client_.token;
    call.session = client_.session;
    call.deadline = deadline;
    call.is_cancelled = std::move(is_cancelled);
    return call;
  }

  const Client client_;
  uint64_t cache_id_ = 0;
  uint64_t sequence_id_ = 0;
};

TEST_F(AbandonedCallTest, HandlersEndAtTheDeadline) {
  ExpectAllFail(CallOf(SteadyTime::Now(), {}), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(AbandonedCallTest, HandlersEndWhenTheCallIsCancelled) {
  ExpectAllFail(CallOf(SteadyTime::InfiniteFuture(), [] { return true; }),
                absl::StatusCode::kCancelled);
}

TEST_F(AbandonedCallTest, TheSameRequestsSucceedForACallerThatWaits) {
  const service::Call call = CallOf(SteadyTime::InfiniteFuture(), [] { return false; });
  for (const auto& request :
       GoodRequests(AppendOf(sequence_id_, kTokens, 2), TopKOf(sequence_id_, kTokens - 1),
                    FetchOf(sequence_id_, kTokens), cache_id_, sequence_id_)) {
    const RpcEntry& entry = EntryOf(*request->GetDescriptor());
    const std::unique_ptr<Message> response(entry.response.New());
    const absl::Status status = entry.answer(sidecar_.handlers, call, *request, response.get());
    EXPECT_TRUE(status.ok()) << RpcName(entry.rpc) << ": " << status;
  }
}

TEST_F(AbandonedCallTest, ABuildEndsWhenItIsCancelledInItsMiddle) {
  std::atomic<bool> cancelled = false;
  const service::Call call =
      CallOf(SteadyTime::InfiniteFuture(), [&cancelled] { return cancelled.load(); });
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id_);
  *request.mutable_index() = Pq(2, 4);
  const absl::Status status = sidecar_.handlers.builds.BuildIndex(
      call, request, [&](const kvstore::BuildProgress&) { cancelled = true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  cancelled = false;
  EXPECT_TRUE(
      sidecar_.handlers.builds.BuildIndex(call, request, [](const kvstore::BuildProgress&) {}).ok())
      << "the cancelled build has left no index";
}

TEST_F(AbandonedCallTest, TheGateRefusesWhatComesTooLate) {
  Client late = client_;
  late.deadline = SteadyTime::Now();
  Client gone = client_;
  gone.is_cancelled = [] { return true; };
  for (const RpcEntry& entry : RpcEntries()) {
    SCOPED_TRACE(RpcName(entry.rpc));
    const std::unique_ptr<Message> response(entry.response.New());
    EXPECT_EQ(sidecar_.Call(late, entry.request, response.get()).code(),
              absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(sidecar_.Call(gone, entry.request, response.get()).code(),
              absl::StatusCode::kCancelled);
  }
  v1::IngestResponse response;
  EXPECT_EQ(sidecar_.Ingest(late, IngestOf(sequence_id_, 1), &response).code(),
            absl::StatusCode::kDeadlineExceeded);
}

// The time between the arrival of a call and its turn on a thread.
TEST_F(AbandonedCallTest, AWaitingCallEndsAtItsDeadline) {
  const absl::StatusOr<service::Call> call =
      sidecar_.gate.Begin(Rpc::kTopK, {.session_token = client_.token,
                                       .boot_id = "",
                                       .deadline = SteadyTime::Now() + absl::Milliseconds(20)});
  ASSERT_TRUE(call.ok()) << call.status();
  while (SteadyTime::Now() < call->deadline) std::this_thread::yield();
  bool ran = false;
  const absl::Status status = sidecar_.gate.Run(*call, [&](const service::Call&) {
    ran = true;
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(ran);
  EXPECT_EQ(sidecar_.gate.in_flight_count(), 0u);
}

TEST_F(AbandonedCallTest, AnIngestThatIsNotCommittedStoresNothing) {
  const std::string before = State();
  std::vector<std::string> messages = IngestOf(sequence_id_, 3);
  messages.push_back("no message");
  v1::IngestResponse response;
  EXPECT_EQ(sidecar_.Ingest(client_, messages, &response).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(State(), before);
  v1::AppendResponse appended;
  EXPECT_TRUE(sidecar_.Call(client_, AppendOf(sequence_id_, kTokens, 1), &appended).ok())
      << "the failed call writes no longer";
}

TEST_F(AbandonedCallTest, AnotherWorkersCallsAndDrainedOnesAreRefused) {
  EXPECT_EQ(sidecar_.gate.Begin(Rpc::kTopK, {.session_token = client_.token, .boot_id = "another"})
                .status()
                .code(),
            absl::StatusCode::kAborted);
  v1::DrainResponse drained;
  ASSERT_TRUE(sidecar_.Call(Operator(), v1::DrainRequest(), &drained).ok());
  EXPECT_FALSE(sidecar_.serving);
  EXPECT_EQ(drained.calls_in_flight(), 0u) << "but for itself";
  v1::CreateSequenceRequest create;
  create.set_cache_id(cache_id_);
  v1::CreateSequenceResponse created;
  EXPECT_EQ(sidecar_.Call(client_, create, &created).code(), absl::StatusCode::kUnavailable);
  v1::TopKResponse selected;
  EXPECT_TRUE(sidecar_.Call(client_, TopKOf(sequence_id_, kTokens - 1), &selected).ok());
}

// The end of the gate waits for the calls that have begun, and for no others.
TEST_F(AbandonedCallTest, TheGateDrainsCallsInFlight) {
  const absl::StatusOr<service::Call> call =
      sidecar_.gate.Begin(Rpc::kTopK, {.session_token = client_.token, .boot_id = ""});
  ASSERT_TRUE(call.ok());
  std::thread ending([&] { sidecar_.gate.Drain(SteadyTime::Now() + absl::Minutes(1)); });
  while (!sidecar_.gate.draining()) std::this_thread::yield();
  v1::TopKResponse selected;
  EXPECT_EQ(sidecar_.Call(client_, TopKOf(sequence_id_, kTokens - 1), &selected).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(sidecar_.gate.in_flight_count(), 1u);
  sidecar_.gate.End(*call, absl::OkStatus());
  ending.join();
  EXPECT_EQ(sidecar_.gate.in_flight_count(), 0u);
}

}  // namespace
}  // namespace pqcached::service
