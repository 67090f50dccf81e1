// Sequences that share, wait, grow an index by themselves, and ranks, as rpcs.
#include <gmock/gmock.h>

#include <thread>

#include "service/base/refusal.h"
#include "tests/service/rpc/rpc_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;
using Kv = v1::KvCache::Stub;

class SharingRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    Start();
    client_ = Connect();
  }
  void TearDown() override { client_.reset(); }

  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (Kv::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
    return (client_->kv().*method)(client_->Context().get(), request, response);
  }
  grpc::Status Append(uint64_t sequence_id, uint64_t first, uint64_t tokens,
                      const std::vector<uint32_t>& ids = {}) {
    v1::AppendRequest request;
    v1::SequenceAppend* item = request.add_items();
    item->set_sequence_id(sequence_id);
    item->set_first_position(first);
    for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, first, tokens);
    item->mutable_token_ids()->Add(ids.begin(), ids.end());
    v1::AppendResponse response;
    return Call(&Kv::Append, request, &response);
  }
  static std::vector<uint32_t> Ids(uint32_t count) {
    std::vector<uint32_t> ids(count);
    for (uint32_t i = 0; i < count; ++i) ids[i] = i * 7 + 1;
    return ids;
  }
  v1::CreateSequenceResponse Create(uint64_t cache_id, const std::vector<uint32_t>& ids) {
    v1::CreateSequenceRequest request;
    request.set_cache_id(cache_id);
    request.mutable_token_ids()->Add(ids.begin(), ids.end());
    v1::CreateSequenceResponse response;
    const grpc::Status status = Call(&Kv::CreateSequence, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  uint64_t Match(uint64_t cache_id, const std::vector<uint32_t>& ids, const std::string& key = "") {
    v1::MatchPrefixRequest request;
    request.set_cache_id(cache_id);
    request.mutable_token_ids()->Add(ids.begin(), ids.end());
    request.set_extra_key(key);
    v1::MatchPrefixResponse response;
    const grpc::Status status = Call(&Kv::MatchPrefix, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.token_count();
  }

  std::unique_ptr<TestClient> client_;
};

TEST_F(SharingRpcTest, AForkSharesTokensAndGoesItsOwnWay) {
  const uint64_t sequence_id = client_->Filled(300);
  const std::string before = Dump(*client_, sequence_id);
  v1::ForkSequenceRequest request;
  request.set_sequence_id(sequence_id);
  request.set_token_count(200);
  v1::ForkSequenceResponse fork;
  ASSERT_TRUE(Call(&Kv::ForkSequence, request, &fork).ok());
  EXPECT_EQ(fork.token_count(), 200u);
  v1::StatsResponse stats;
  ASSERT_TRUE(client_->admin().Stats(client_->Context().get(), {}, &stats).ok());
  EXPECT_GT(stats.shared_bytes(), 0u);
  ASSERT_TRUE(Append(fork.sequence_id(), 200, 5).ok());
  v1::DropSequenceRequest drop;
  drop.set_sequence_id(fork.sequence_id());
  v1::DropSequenceResponse dropped;
  ASSERT_TRUE(Call(&Kv::DropSequence, drop, &dropped).ok());
  EXPECT_TRUE(Dump(*client_, sequence_id) == before);
  request.set_token_count(301);
  EXPECT_TRUE(
      Failed(Call(&Kv::ForkSequence, request, &fork), StatusCode::OUT_OF_RANGE, "token_count"));
  request.set_sequence_id(999);
  EXPECT_TRUE(
      Failed(Call(&Kv::ForkSequence, request, &fork), StatusCode::NOT_FOUND, "sequence_id"));
}

TEST_F(SharingRpcTest, SeveralForksAreMadeTogetherOrNotAtAll) {
  const uint64_t one = client_->Filled(300), other = client_->Filled(200);
  v1::ForkSequencesRequest request;
  request.add_items()->set_sequence_id(one);
  request.add_items()->set_sequence_id(other);
  request.mutable_items(1)->set_token_count(100);
  request.add_dropped_sequence_ids(other);
  request.add_dropped_sequence_ids(999);  // not there: no error
  v1::ForkSequencesResponse forks;
  ASSERT_TRUE(Call(&Kv::ForkSequences, request, &forks).ok());
  ASSERT_EQ(forks.items_size(), 2);
  EXPECT_EQ(forks.items(0).token_count(), 300u);
  EXPECT_EQ(forks.items(1).token_count(), 100u);
  EXPECT_TRUE(Failed(Append(other, 200, 5), StatusCode::NOT_FOUND, "items[0].sequence_id"));
  ASSERT_TRUE(Append(forks.items(1).sequence_id(), 100, 5).ok());

  const auto count = [&] {
    v1::StatsResponse stats;
    EXPECT_TRUE(client_->admin().Stats(client_->Context().get(), {}, &stats).ok());
    return stats.sequence_count();
  };
  const auto before = count();
  request.mutable_items(1)->set_sequence_id(998);
  request.set_dropped_sequence_ids(0, one);
  EXPECT_TRUE(Failed(Call(&Kv::ForkSequences, request, &forks), StatusCode::NOT_FOUND,
                     "items[1].sequence_id"));
  EXPECT_EQ(count(), before);
  EXPECT_TRUE(Append(one, 300, 5).ok());
  while (request.items_size() <= 256) request.add_items()->set_sequence_id(one);
  EXPECT_TRUE(
      Failed(Call(&Kv::ForkSequences, request, &forks), StatusCode::INVALID_ARGUMENT, "items"));
}

TEST_F(SharingRpcTest, PrefixesAreFoundByTheirTokenIds) {
  const uint64_t cache_id = client_->OpenCache();
  const std::vector<uint32_t> ids = Ids(300);
  const v1::CreateSequenceResponse first = Create(cache_id, ids);
  EXPECT_EQ(first.token_count(), 0u);
  client_->Ingest(first.sequence_id(), 0, 300);
  EXPECT_EQ(Match(cache_id, ids), 256u);
  EXPECT_EQ(Match(cache_id, ids, "image"), 0u);
  EXPECT_EQ(Create(cache_id, ids).token_count(), 256u);
  std::vector<uint32_t> other = ids;
  other[130] = 0;
  EXPECT_EQ(Match(cache_id, other), 128u);
  const auto stranger = Connect("stranger");
  v1::MatchPrefixRequest request;
  request.set_cache_id(cache_id);
  v1::MatchPrefixResponse response;
  EXPECT_TRUE(Failed(stranger->kv().MatchPrefix(stranger->Context().get(), request, &response),
                     StatusCode::NOT_FOUND, "cache_id"));
  request.set_extra_key(std::string(257, 'x'));
  EXPECT_TRUE(Failed(Call(&Kv::MatchPrefix, request, &response), StatusCode::INVALID_ARGUMENT,
                     "extra_key"));
}

TEST_F(SharingRpcTest, IngestAndAppendNameTokensToo) {
  const uint64_t cache_id = client_->OpenCache();
  const std::vector<uint32_t> ids = Ids(256);
  const uint64_t sequence_id = client_->CreateSequence(cache_id);
  const auto context = client_->Context();
  v1::IngestResponse response;
  const auto writer = client_->kv().Ingest(context.get(), &response);
  v1::IngestRequest request;
  request.mutable_header()->set_sequence_id(sequence_id);
  request.mutable_header()->mutable_token_ids()->Add(ids.begin(), ids.begin() + 130);
  writer->Write(request);
  for (const uint32_t layer : kLayers) {
    *request.mutable_chunk()->mutable_rows() = RowsOf(layer, 0, 130);
    writer->Write(request);
  }
  writer->WritesDone();
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_EQ(Match(cache_id, ids), 128u);
  EXPECT_TRUE(Failed(Append(sequence_id, 130, 126, Ids(5)), StatusCode::INVALID_ARGUMENT,
                     "items[0].token_ids"));
  ASSERT_TRUE(Append(sequence_id, 130, 126, {ids.begin() + 130, ids.end()}).ok());
  EXPECT_EQ(Match(cache_id, ids), 256u);
}

TEST_F(SharingRpcTest, AnAppendThatFailsNamesNothing) {
  const uint64_t cache_id = client_->OpenCache();
  const uint64_t sequence_id = client_->CreateSequence(cache_id);
  const std::vector<uint32_t> ids = Ids(128);
  v1::AppendRequest request;
  v1::SequenceAppend* item = request.add_items();
  item->set_sequence_id(sequence_id);
  *item->add_rows() = RowsOf(kLayers[0], 0, 128);  // a layer is missing
  for (uint32_t id = 0; id < 128; ++id) item->add_token_ids(id);
  v1::AppendResponse response;
  EXPECT_TRUE(
      Failed(Call(&Kv::Append, request, &response), StatusCode::INVALID_ARGUMENT, "items[0].rows"));
  ASSERT_TRUE(Append(sequence_id, 0, 128, ids).ok()) << "the tokens may be others now";
  EXPECT_EQ(Match(cache_id, ids), 128u);
}

TEST_F(SharingRpcTest, ASuspendedSequenceWaits) {
  const uint64_t sequence_id = client_->Filled(100);
  v1::SuspendSequenceRequest suspend;
  suspend.set_sequence_id(sequence_id);
  v1::SuspendSequenceResponse suspended;
  ASSERT_TRUE(Call(&Kv::SuspendSequence, suspend, &suspended).ok());
  EXPECT_TRUE(Failed(Append(sequence_id, 100, 1), StatusCode::FAILED_PRECONDITION,
                     "items[0].sequence_id", "suspended"));
  v1::TopKRequest top;
  *top.add_items()->mutable_query() = QueryAt(sequence_id, 1, 99);
  *top.mutable_items(0)->mutable_selection() = TokenCountSelection(Flat(), 1, 1, 4);
  v1::TopKResponse selected;
  EXPECT_TRUE(Failed(Call(&Kv::TopK, top, &selected), StatusCode::FAILED_PRECONDITION,
                     "items[0].query.sequence_id", "suspended"));
  v1::ResumeSequenceRequest resume;
  resume.set_sequence_id(sequence_id);
  v1::ResumeSequenceResponse resumed;
  ASSERT_TRUE(Call(&Kv::ResumeSequence, resume, &resumed).ok());
  EXPECT_EQ(resumed.token_count(), 100u);
  EXPECT_TRUE(Call(&Kv::TopK, top, &selected).ok());
  EXPECT_TRUE(Append(sequence_id, 100, 1).ok());
}

TEST_F(SharingRpcTest, ALiveIndexComesByItself) {
  v1::CreateSequenceRequest request;
  request.set_cache_id(client_->OpenCache());
  *request.mutable_live_index()->mutable_index() = Pq(2, 4);
  v1::CreateSequenceResponse created;
  const grpc::Status made = Call(&Kv::CreateSequence, request, &created);
  ASSERT_TRUE(made.ok()) << made.error_message();
  client_->Ingest(created.sequence_id(), 0, 300);
  client_->Build(created.sequence_id(), Pq(2, 4));  // finishes what is left
  v1::TopKRequest top;
  *top.add_items()->mutable_query() = QueryAt(created.sequence_id(), 1, 299);
  *top.mutable_items(0)->mutable_selection() = TokenCountSelection(Pq(2, 4), 1, 1, 4);
  v1::TopKResponse selected;
  const grpc::Status status = Call(&Kv::TopK, top, &selected);
  EXPECT_TRUE(status.ok()) << status.error_message();

  const auto refused = [&](const std::function<void(v1::LiveIndex&)>& change,
                           const std::string& field) {
    v1::CreateSequenceRequest wrong = request;
    change(*wrong.mutable_live_index());
    EXPECT_TRUE(
        Failed(Call(&Kv::CreateSequence, wrong, &created), StatusCode::INVALID_ARGUMENT, field));
  };
  refused([](v1::LiveIndex& live) { live.clear_index(); }, "live_index.index.kind");
  refused([](v1::LiveIndex& live) { *live.mutable_index() = Flat(); }, "live_index.index");
  refused([](v1::LiveIndex& live) { live.mutable_index()->mutable_pq()->set_bits(9); },
          "live_index.index.pq.bits");
  refused([](v1::LiveIndex& live) { live.set_iterations(1001); }, "live_index.iterations");
  refused([](v1::LiveIndex& live) { live.set_sink_tokens(uint64_t{1} << 40); },
          "live_index.sink_tokens");
}

TEST_F(SharingRpcTest, ClosePrefillMakesTheLiveIndexCodeTheLastRows) {
  v1::CreateSequenceRequest request;
  request.set_cache_id(client_->OpenCache());
  *request.mutable_live_index()->mutable_index() = Pq(2, 4);
  v1::CreateSequenceResponse created;
  ASSERT_TRUE(Call(&Kv::CreateSequence, request, &created).ok());
  client_->Ingest(created.sequence_id(), 0, 300);
  v1::ClosePrefillRequest close;
  close.set_sequence_id(created.sequence_id());
  v1::ClosePrefillResponse closed;
  const auto stranger = Connect("stranger");
  EXPECT_TRUE(Failed(stranger->kv().ClosePrefill(stranger->Context().get(), close, &closed),
                     StatusCode::NOT_FOUND, "sequence_id"));
  {
    const auto writer = store_->BeginIngest("default", created.sequence_id());
    ASSERT_TRUE(writer.ok()) << writer.status();
    const grpc::Status status = Call(&Kv::ClosePrefill, close, &closed);
    EXPECT_TRUE(Failed(status, StatusCode::ABORTED, "sequence_id", "another writer"));
    EXPECT_EQ(RefusedBy(status).retry_ms, kRetryConflict);
  }
  for (int repeat = 0; repeat < 2; ++repeat) {
    const grpc::Status status = Call(&Kv::ClosePrefill, close, &closed);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  ASSERT_TRUE(store_->WaitIdle(kvstore::SteadyTime::Now() + absl::Minutes(2)));
  v1::TopKRequest top;
  *top.add_items()->mutable_query() = QueryAt(created.sequence_id(), 1, 299);
  *top.mutable_items(0)->mutable_selection() = TokenCountSelection(Pq(2, 4), 1, 1, 4);
  v1::TopKResponse selected;
  const grpc::Status status = Call(&Kv::TopK, top, &selected);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(SharingRpcTest, TokensOfASpeculationAreAttendedTogether) {
  const uint64_t sequence_id = client_->Filled(300);
  v1::AttendRequest request;
  v1::AttendItem* item = request.add_items();
  *item->mutable_query() = QueryAt(sequence_id, 1, 290);
  *item->mutable_query()->mutable_queries() = FloatTensor({3, kQueryHeads, kKeyDim}, 5);
  *item->mutable_selection() = TokenCountSelection(Flat(), 4, 8, 16);
  v1::AttendResponse response;
  const grpc::Status status = Call(&Kv::Attend, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.items(0).output().shape(), testing::ElementsAre(3, kQueryHeads, kValueDim));
  EXPECT_EQ(response.items(0).lse_size(), static_cast<int>(3 * kQueryHeads));
  *item->mutable_query()->mutable_queries() = FloatTensor({9, kQueryHeads, kKeyDim}, 5);
  EXPECT_TRUE(Failed(Call(&Kv::Attend, request, &response), StatusCode::INVALID_ARGUMENT,
                     "items[0].query.queries.shape"));
}

TEST_F(SharingRpcTest, RanksThatDisagreeAreRefused) {
  const auto open = [&](uint32_t rank, const std::function<void(v1::OpenCacheRequest&)>& change) {
    v1::OpenCacheRequest request = CacheRequest("ranked");
    v1::Rank* mine = request.mutable_rank();
    mine->set_group("tp");
    mine->set_rank(rank);
    mine->set_rank_count(2);
    mine->set_kv_head_begin(rank * kKvHeads);
    change(request);
    v1::OpenCacheResponse response;
    return Call(&Kv::OpenCache, request, &response);
  };
  const grpc::Status first = open(0, [](auto&) {});
  ASSERT_TRUE(first.ok()) << first.error_message();
  const auto caches = [&] {
    v1::ListCachesResponse response;
    EXPECT_TRUE(client_->admin().ListCaches(client_->Context().get(), {}, &response).ok());
    return response.ShortDebugString();
  };
  const std::string before = caches();
  EXPECT_FALSE(open(2, [](auto&) {}).ok());
  EXPECT_FALSE(open(1, [](auto& r) { r.mutable_rank()->set_rank_count(3); }).ok());
  EXPECT_FALSE(open(1, [](auto& r) { r.set_model_fingerprint("another"); }).ok());
  EXPECT_TRUE(Failed(open(1, [](auto& r) { r.mutable_rank()->set_numa_node(1); }),
                     StatusCode::UNIMPLEMENTED, "rank.numa_node"));
  EXPECT_EQ(caches(), before);
  const grpc::Status second = open(1, [](auto&) {});
  EXPECT_TRUE(second.ok()) << second.error_message();
}

TEST_F(SharingRpcTest, AGroupKeyTiesASequenceToThoseOfOtherRanks) {
  v1::OpenCacheRequest open = CacheRequest("ranked");
  open.mutable_rank()->set_group("tp");
  open.mutable_rank()->set_rank_count(1);
  v1::OpenCacheResponse opened;
  ASSERT_TRUE(Call(&Kv::OpenCache, open, &opened).ok());
  v1::CreateSequenceRequest request;
  request.set_cache_id(opened.cache_id());
  const auto create = [&](const std::string& key) {
    request.set_group_key(key);
    v1::CreateSequenceResponse response;
    const grpc::Status status = Call(&Kv::CreateSequence, request, &response);
    if (!status.ok()) return status;
    v1::DescribeSequenceRequest describe;
    describe.set_sequence_id(response.sequence_id());
    v1::DescribeSequenceResponse described;
    EXPECT_TRUE(
        client_->admin().DescribeSequence(client_->Context().get(), describe, &described).ok());
    EXPECT_EQ(described.sequence().group_key(), key.empty() ? "" : "a\\377");
    return status;
  };
  EXPECT_TRUE(create("").ok());
  EXPECT_TRUE(create("a\xff").ok());
  EXPECT_TRUE(Failed(create("a\xff"), StatusCode::ALREADY_EXISTS, "group_key"));
  EXPECT_TRUE(Failed(create(std::string(65, 'k')), StatusCode::INVALID_ARGUMENT, "group_key"));
  request.set_cache_id(client_->OpenCache());
  EXPECT_TRUE(Failed(create("key"), StatusCode::INVALID_ARGUMENT, "group_key"));
}

}  // namespace
}  // namespace pqcached::service
