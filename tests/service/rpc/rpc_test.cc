// Every rpc does what the proto says, over a real socket and a real store.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>

#include <cmath>
#include <cstring>
#include <set>
#include <thread>

#include "tests/service/rpc/rpc_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

std::vector<float> Floats(const v1::Tensor& tensor) {
  std::vector<float> values(tensor.inline_data().size() / sizeof(float));
  std::memcpy(values.data(), tensor.inline_data().data(), tensor.inline_data().size());
  return values;
}

std::vector<uint64_t> Shape(const v1::Tensor& tensor) {
  return {tensor.shape().begin(), tensor.shape().end()};
}

TEST_F(RpcTest, SessionTellsTheTokenTheBootIdAndTheLimit) {
  Start();
  const auto client = Connect();
  EXPECT_EQ(client->token().size(), 32u);
  EXPECT_EQ(client->opened().boot_id().size(), 16u);
  EXPECT_EQ(client->opened().max_message_bytes(), config_.max_message_bytes);
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(client->admin().GetServerInfo(client->Context().get(), {}, &info).ok());
  EXPECT_EQ(info.boot_id(), client->opened().boot_id());
}

TEST_F(RpcTest, SessionSendsHeartbeats) {
  Start([](Config& config) { config.heartbeat_interval = absl::Milliseconds(10); });
  const auto client = Connect();
  for (int i = 0; i < 3; ++i) {
    v1::SessionEvent event;
    ASSERT_TRUE(client->ReadEvent(&event));
    EXPECT_TRUE(event.has_heartbeat());
  }
}

TEST_F(RpcTest, OpenCacheCreatesThenJoins) {
  Start();
  const auto client = Connect();
  v1::OpenCacheResponse first;
  v1::OpenCacheResponse second;
  ASSERT_TRUE(client->kv().OpenCache(client->Context().get(), CacheRequest(), &first).ok());
  ASSERT_TRUE(client->kv().OpenCache(client->Context().get(), CacheRequest(), &second).ok());
  EXPECT_TRUE(first.created());
  EXPECT_FALSE(second.created());
  EXPECT_EQ(first.cache_id(), second.cache_id());
  EXPECT_EQ(first.capacity_bytes(), size_t{32} << 20);
}

TEST_F(RpcTest, ACacheWithoutCapacityGrowsAndSaysSo) {
  Start();
  const auto client = Connect();
  v1::OpenCacheRequest request = CacheRequest();
  request.set_capacity_bytes(0);
  v1::OpenCacheResponse response;
  ASSERT_TRUE(client->kv().OpenCache(client->Context().get(), request, &response).ok());
  EXPECT_EQ(response.capacity_bytes(), size_t{64} << 20) << "the first step";
  v1::ListCachesResponse caches;
  ASSERT_TRUE(client->admin().ListCaches(client->Context().get(), {}, &caches).ok());
  ASSERT_EQ(caches.caches_size(), 1);
  EXPECT_TRUE(caches.caches(0).grows());
  EXPECT_EQ(caches.caches(0).used_bytes() + caches.caches(0).free_bytes(), size_t{64} << 20);
}

TEST_F(RpcTest, CachesKeepTheirRope) {
  Start();
  const auto client = Connect();
  v1::OpenCacheRequest request = CacheRequest();
  v1::RopeDescription* rope = request.mutable_layer_groups(0)->mutable_rope();
  rope->set_layout(v1::RopeDescription::LAYOUT_HALF);
  rope->set_theta(500000);
  rope->set_rotary_dim(16);
  v1::OpenCacheResponse response;
  ASSERT_TRUE(client->kv().OpenCache(client->Context().get(), request, &response).ok());
  v1::ListCachesResponse caches;
  ASSERT_TRUE(client->admin().ListCaches(client->Context().get(), {}, &caches).ok());
  const v1::RopeDescription& kept = caches.caches(0).layer_groups(0).rope();
  EXPECT_EQ(kept.layout(), rope->layout());
  EXPECT_EQ(kept.theta(), rope->theta());
  EXPECT_EQ(kept.rotary_dim(), rope->rotary_dim());
  EXPECT_FALSE(caches.caches(0).layer_groups(1).has_rope());
}

TEST_F(RpcTest, ACacheWithoutADefaultIndexHasPqM4B8) {
  Start();
  const auto client = Connect();
  v1::OpenCacheRequest request = CacheRequest();
  request.clear_default_index();
  v1::OpenCacheResponse response;
  ASSERT_TRUE(client->kv().OpenCache(client->Context().get(), request, &response).ok());
  v1::ListCachesResponse caches;
  ASSERT_TRUE(client->admin().ListCaches(client->Context().get(), {}, &caches).ok());
  const v1::PqIndex& index = caches.caches(0).default_index().pq();
  EXPECT_EQ(index.subspaces(), 4u);
  EXPECT_EQ(index.bits(), 8u);
  EXPECT_EQ(index.layout(), v1::PqIndex::LAYOUT_PAIRS);
}

TEST_F(RpcTest, IngestedRowsComeBackAsTheyWere) {
  Start();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(300);
  v1::FetchBlocksRequest request;
  request.set_sequence_id(sequence_id);
  request.set_layer(4);
  request.add_ranges()->set_end(5);
  request.add_ranges()->set_begin(120);
  request.mutable_ranges(1)->set_end(270);  // over two borders of segments
  request.set_part(v1::ROW_PART_KEY);
  v1::FetchBlocksResponse response;
  const grpc::Status status = client->kv().FetchBlocks(client->Context().get(), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.blocks_size(), 2);
  EXPECT_THAT(Shape(response.blocks(0)), ElementsAre(kKvHeads, 5, kKeyDim));
  EXPECT_THAT(Shape(response.blocks(1)), ElementsAre(kKvHeads, 150, kKeyDim));
  const std::vector<float> sent = Floats(RowsOf(4, 120, 150).keys());  // [tokens, kv_heads, dim]
  const std::vector<float> got = Floats(response.blocks(1));           // [kv_heads, tokens, dim]
  for (uint32_t head = 0; head < kKvHeads; ++head) {
    for (uint32_t token = 0; token < 150; ++token) {
      for (uint32_t d = 0; d < kKeyDim; ++d) {
        ASSERT_EQ(got[(head * 150 + token) * kKeyDim + d],
                  sent[(token * kKvHeads + head) * kKeyDim + d]);
      }
    }
  }
}

TEST_F(RpcTest, FetchTokensTakesPositionsPerHeadInAnyOrder) {
  Start();
  const auto client = Connect();
  v1::FetchTokensRequest request;
  request.set_sequence_id(client->Filled(200));
  request.set_layer(1);
  request.set_count(3);
  for (const uint32_t position : {199, 0, 130, 5, 5, 128}) request.add_positions(position);
  request.set_part(v1::ROW_PART_VALUE);
  v1::FetchTokensResponse response;
  const grpc::Status status = client->kv().FetchTokens(client->Context().get(), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(Shape(response.rows()), ElementsAre(kKvHeads, 3, kValueDim));
  const std::vector<float> got = Floats(response.rows());
  for (uint32_t head = 0; head < kKvHeads; ++head) {
    for (uint32_t i = 0; i < 3; ++i) {
      const std::vector<float> row =
          Floats(RowsOf(1, request.positions(static_cast<int>(head * 3 + i)), 1).values());
      for (uint32_t d = 0; d < kValueDim; ++d) {
        ASSERT_EQ(got[(head * 3 + i) * kValueDim + d], row[head * kValueDim + d]);
      }
    }
  }
}

TEST_F(RpcTest, AppendAddsAcknowledgesRepeatsAndTruncateTakesBack) {
  Start();
  const auto client = Connect();
  v1::AppendRequest request;
  std::vector<uint64_t> ids = {client->Filled(100), client->Filled(50)};
  for (size_t i = 0; i < ids.size(); ++i) {
    v1::SequenceAppend* item = request.add_items();
    item->set_sequence_id(ids[i]);
    item->set_first_position(i == 0 ? 100 : 50);
    for (const uint32_t layer : kLayers)
      *item->add_rows() = RowsOf(layer, item->first_position(), 2);
  }
  for (int repeat = 0; repeat < 2; ++repeat) {
    v1::AppendResponse response;
    const grpc::Status status = client->kv().Append(client->Context().get(), request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_THAT(response.token_counts(), ElementsAre(102, 52));
  }
  v1::TruncateSequenceRequest truncate;
  truncate.set_sequence_id(ids[0]);
  truncate.set_token_count(101);
  v1::TruncateSequenceResponse truncated;
  const grpc::Status status =
      client->kv().TruncateSequence(client->Context().get(), truncate, &truncated);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(truncated.token_count(), 101u);
}

TEST_F(RpcTest, BuildReportsEveryLayerAndGenerationAndIsDeterministic) {
  Start();
  const auto client = Connect();
  std::vector<std::string> answers;
  for (int run = 0; run < 2; ++run) {
    const uint64_t sequence_id = client->Filled(600);
    const std::vector<v1::BuildProgress> progress = client->Build(sequence_id, Pq(4, 5));
    std::set<std::pair<uint32_t, uint32_t>> units;
    for (const v1::BuildProgress& each : progress) {
      units.insert({each.layer(), each.codebook_generation()});
      EXPECT_EQ(each.layer_count(), 2u);
      EXPECT_GT(each.inertia(), 0);
      EXPECT_GT(each.index_bytes(), 0u);
      EXPECT_GT(each.codebook_bytes(), 0u);
    }
    ASSERT_FALSE(progress.empty());
    EXPECT_EQ(units.size(), progress.size());
    EXPECT_EQ(progress.size(), 2 * progress[0].codebook_generation_count());
    EXPECT_GT(progress[0].codebook_generation_count(), 1u);
    EXPECT_EQ(progress.back().layers_done(), 2u);

    v1::TopKRequest request;
    v1::TopKItem* item = request.add_items();
    *item->mutable_query() = QueryAt(sequence_id, 4, 599);
    *item->mutable_selection() = TokenCountSelection(Pq(4, 5), 4, 16, 40);
    v1::TopKResponse response;
    const grpc::Status status = client->kv().TopK(client->Context().get(), request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(response.items_size(), 1);
    EXPECT_EQ(response.items(0).kv_heads(), kKvHeads);
    EXPECT_EQ(response.items(0).count(), 40u);
    EXPECT_EQ(response.items(0).positions_size(), static_cast<int>(kKvHeads * 40));
    EXPECT_EQ(response.items(0).sink_tokens(), 4u);
    EXPECT_EQ(response.items(0).window_tokens(), 16u);
    answers.push_back(response.items(0).SerializeAsString());
  }
  EXPECT_EQ(answers[0], answers[1]);
}

TEST_F(RpcTest, AnIndexByTheNameOfItsTypeIsTheSameIndex) {
  Start();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(600);
  v1::IndexSpec index;
  index.mutable_typed()->set_type("pq");
  auto& parameters = *index.mutable_typed()->mutable_parameters();
  parameters["bits"].set_number(5);
  parameters["layout"].set_name("pairs");  // subspaces: the default, 4
  EXPECT_FALSE(client->Build(sequence_id, index).empty());
  v1::TopKRequest request;
  for (const v1::IndexSpec& spec : {index, Pq(4, 5)}) {
    v1::TopKItem* item = request.add_items();
    *item->mutable_query() = QueryAt(sequence_id, 4, 599);
    *item->mutable_selection() = TokenCountSelection(spec, 4, 16, 40);
  }
  v1::TopKResponse response;
  const grpc::Status status = client->kv().TopK(client->Context().get(), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.items(0).SerializeAsString(), response.items(1).SerializeAsString());
}

TEST_F(RpcTest, TopKWithoutAnIndexUsesTheCachesDefault) {
  Start();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(200);
  v1::TopKRequest request;
  for (int i = 0; i < 2; ++i) {
    v1::TopKItem* item = request.add_items();
    *item->mutable_query() = QueryAt(sequence_id, 1, 199);
    *item->mutable_selection() = TokenCountSelection(Flat(), 2, 8, 10);
  }
  request.mutable_items(1)->mutable_selection()->clear_index();
  v1::TopKResponse response;
  const grpc::Status status = client->kv().TopK(client->Context().get(), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.items(0).SerializeAsString(), response.items(1).SerializeAsString());
}

TEST_F(RpcTest, ScoresAreTheScaledLogitsWithTheirNormalisers) {
  Start();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(200);
  v1::ScoreRequest request;
  v1::ScoreItem* item = request.add_items();
  *item->mutable_query() = QueryAt(sequence_id, 1, 199);
  item->mutable_tokens()->set_begin(100);
  item->mutable_tokens()->set_end(150);
  v1::ScoreResponse response;
  const grpc::Status status = client->kv().Score(client->Context().get(), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const v1::Scores& scores = response.items(0);
  EXPECT_THAT(Shape(scores.logits()), ElementsAre(kQueryHeads, 50));
  const std::vector<float> logits = Floats(scores.logits());
  const std::vector<float> queries = Floats(item->query().queries());
  const std::vector<float> keys = Floats(RowsOf(1, 100, 50).keys());
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    double sum_exp = 0;
    for (uint32_t token = 0; token < 50; ++token) {
      double dot = 0;
      for (uint32_t d = 0; d < kKeyDim; ++d) {
        const uint32_t kv_head = head / (kQueryHeads / kKvHeads);
        dot +=
            double{queries[head * kKeyDim + d]} * keys[(token * kKvHeads + kv_head) * kKeyDim + d];
      }
      EXPECT_NEAR(logits[head * 50 + token], dot / std::sqrt(double{kKeyDim}), 1e-5);
      sum_exp += std::exp(double{logits[head * 50 + token]} - scores.max(static_cast<int>(head)));
    }
    EXPECT_NEAR(scores.sum_exp(static_cast<int>(head)), sum_exp, 1e-3);
  }
}

TEST_F(RpcTest, AttendOverASelectionEqualsAttendOverItsPositions) {
  Start();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(300);
  v1::AttendRequest request;
  v1::AttendItem* item = request.add_items();
  *item->mutable_query() = QueryAt(sequence_id, 4, 299);
  *item->mutable_selection() = TokenCountSelection(Flat(), 4, 16, 30);
  item->set_want_positions(true);
  v1::AttendResponse selected;
  grpc::Status status = client->kv().Attend(client->Context().get(), request, &selected);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(Shape(selected.items(0).output()), ElementsAre(1, kQueryHeads, kValueDim));
  EXPECT_EQ(selected.items(0).lse_size(), static_cast<int>(kQueryHeads));
  EXPECT_EQ(selected.items(0).selected().positions_size(), static_cast<int>(30 * kKvHeads));

  item->mutable_positions()->set_count(30);
  *item->mutable_positions()->mutable_positions() = selected.items(0).selected().positions();
  item->set_want_positions(false);
  v1::AttendResponse given;
  status = client->kv().Attend(client->Context().get(), request, &given);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(given.items(0).output().inline_data(), selected.items(0).output().inline_data());
  EXPECT_EQ(given.items(0).selected().positions_size(), 0);
}

TEST_F(RpcTest, ReRankedAnswersAreThoseOfTheStore) {
  Start();
  const auto client = Connect("tenant-a");
  const uint64_t sequence_id = client->Filled(300);
  client->Build(sequence_id, Pq(2, 4));
  std::vector<std::vector<uint32_t>> answers;
  for (const float factor : {1.0f, 2.5f, 8.0f}) {
    v1::TopKRequest request;
    v1::TopKItem* item = request.add_items();
    *item->mutable_query() = QueryAt(sequence_id, 4, 299);
    *item->mutable_selection() = TokenCountSelection(Pq(2, 4), 4, 16, 40);
    if (factor > 1) item->mutable_selection()->set_rerank_factor(factor);
    v1::TopKResponse top_k;
    grpc::Status status = client->kv().TopK(client->Context().get(), request, &top_k);
    ASSERT_TRUE(status.ok()) << status.error_message();
    const std::vector<float> queries = Floats(item->query().queries());
    const auto stored =
        store_->TopK("tenant-a", sequence_id,
                     {.layer = 4,
                      .query_position = 299,
                      .queries = {.data = reinterpret_cast<const std::byte*>(queries.data()),
                                  .data_bytes = queries.size() * sizeof(float),
                                  .dtype = kernels::DType::kF32,
                                  .shape = {1, kQueryHeads, kKeyDim},
                                  .strides = {}}},
                     {.index = {kvstore::IndexKind::kPq, 2, 4},
                      .sink_tokens = 4,
                      .window_tokens = 16,
                      .budget_kind = kvstore::BudgetKind::kCount,
                      .rerank_factor = factor,
                      .budget_count = 60});
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_THAT(top_k.items(0).positions(), ElementsAreArray(stored->positions));
    answers.push_back(stored->positions);

    v1::AttendRequest attend;
    v1::AttendItem* attended = attend.add_items();
    *attended->mutable_query() = item->query();
    *attended->mutable_selection() = item->selection();
    attended->set_want_positions(true);
    v1::AttendResponse response;
    status = client->kv().Attend(client->Context().get(), attend, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_THAT(response.items(0).selected().positions(), ElementsAreArray(stored->positions));
  }
  EXPECT_NE(answers[0], answers[1]) << "a factor has an effect";
  EXPECT_NE(answers[1], answers[2]);
}

TEST_F(RpcTest, AdminListsWhatThereIs) {
  Start();
  const auto client = Connect("tenant-a", "engine 1");
  const uint64_t sequence_id = client->Filled(300);
  client->Build(sequence_id, Pq(2, 4));
  v1::ListCachesResponse caches;
  ASSERT_TRUE(client->admin().ListCaches(client->Context().get(), {}, &caches).ok());
  ASSERT_EQ(caches.caches_size(), 1);
  const v1::CacheDescription& cache = caches.caches(0);
  EXPECT_EQ(cache.tenant(), "tenant-a");
  EXPECT_EQ(cache.model_fingerprint(), "model-1");
  EXPECT_EQ(cache.layer_groups_size(), 2);
  EXPECT_EQ(cache.used_bytes() + cache.free_bytes(), cache.capacity_bytes());
  EXPECT_EQ(cache.sequence_count(), 1u);
  v1::ListCachesRequest of_nobody;
  of_nobody.set_tenant("nobody");
  v1::ListCachesResponse none;
  ASSERT_TRUE(client->admin().ListCaches(client->Context().get(), of_nobody, &none).ok());
  EXPECT_EQ(none.caches_size(), 0);

  v1::ListSequencesResponse sequences;
  ASSERT_TRUE(client->admin().ListSequences(client->Context().get(), {}, &sequences).ok());
  ASSERT_EQ(sequences.sequences_size(), 1);
  EXPECT_EQ(sequences.sequences(0).client_name(), "engine 1");
  EXPECT_EQ(sequences.sequences(0).layers_size(), 0) << "brief";

  v1::DescribeSequenceRequest describe;
  describe.set_sequence_id(sequence_id);
  v1::DescribeSequenceResponse described;
  ASSERT_TRUE(client->admin().DescribeSequence(client->Context().get(), describe, &described).ok());
  EXPECT_EQ(described.sequence().token_count(), 300u);
  EXPECT_EQ(described.sequence().row_bytes(),
            300u * 2 * kKvHeads * (kKeyDim + kValueDim) * sizeof(float));
  EXPECT_EQ(described.sequence().layers_size(), 2);
  EXPECT_GE(described.sequence().segments_size(), 3);
  EXPECT_EQ(described.sequence().layers(0).index_states(0), v1::LAYER_STATE_READY);
}

TEST_F(RpcTest, StatsCountCallsByStatus) {
  Start();
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  v1::DropSequenceRequest drop;
  drop.set_sequence_id(sequence_id);
  v1::DropSequenceResponse dropped;
  EXPECT_TRUE(client->kv().DropSequence(client->Context().get(), drop, &dropped).ok());
  EXPECT_TRUE(Failed(client->kv().DropSequence(client->Context().get(), drop, &dropped),
                     StatusCode::NOT_FOUND, "sequence_id"));
  v1::StatsResponse stats;
  ASSERT_TRUE(client->admin().Stats(client->Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.session_count(), 1u);
  EXPECT_EQ(stats.cache_count(), 1u);
  EXPECT_EQ(stats.sequence_count(), 0u);
  EXPECT_EQ(stats.pool_used_bytes(), 0u);
  EXPECT_EQ(stats.pool_used_bytes() + stats.pool_free_bytes(), stats.pool_capacity_bytes());
  for (const v1::RpcStats& rpc : stats.rpcs()) {
    if (rpc.method() != "DropSequence") continue;
    EXPECT_EQ(rpc.count_by_status().at("OK"), 1u);
    EXPECT_EQ(rpc.count_by_status().at("NOT_FOUND"), 1u);
    EXPECT_GT(rpc.seconds_total(), 0);
    EXPECT_LE(rpc.seconds_max(), rpc.seconds_total());
    return;
  }
  FAIL() << "DropSequence was not counted";
}

TEST_F(RpcTest, ServerInfoTellsTheConfigurationInForce) {
  Start();
  const auto client = Connect();
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(client->admin().GetServerInfo(client->Context().get(), {}, &info).ok());
  EXPECT_EQ(info.protocol_version(), 1u);
  EXPECT_FALSE(info.version().empty());
  EXPECT_THAT(info.capabilities(), testing::Contains("index.pq"));
  EXPECT_EQ(info.config().at("segment_tokens"), "128");
  EXPECT_EQ(info.config().size(), ConfigKeys().size());
  EXPECT_THAT(info.kernel_levels(), testing::Contains(info.kernel_level()));
}

TEST_F(RpcTest, LogLevelCanBeChanged) {
  Start();
  const auto client = Connect();
  v1::SetLogLevelRequest request;
  v1::SetLogLevelResponse response;
  request.set_level("error");
  ASSERT_TRUE(client->admin().SetLogLevel(client->Context().get(), request, &response).ok());
  EXPECT_EQ(response.previous_level(), "off");
  request.set_level("loud");
  EXPECT_TRUE(Failed(client->admin().SetLogLevel(client->Context().get(), request, &response),
                     StatusCode::INVALID_ARGUMENT, "level"));
}

TEST_F(RpcTest, TwoClientsAndTwoCachesWorkAtOnce) {
  Start();
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([this, t] {
      const auto client = Connect(t == 0 ? "a" : "b");
      const uint64_t cache_id = client->OpenCache("cache-" + std::to_string(t));
      for (int round = 0; round < 3; ++round) {
        const uint64_t sequence_id = client->CreateSequence(cache_id);
        client->Ingest(sequence_id, 0, 300);
        client->Build(sequence_id, Pq(2, 4));
        v1::TopKRequest request;
        for (int i = 0; i < 8; ++i) {
          v1::TopKItem* item = request.add_items();
          *item->mutable_query() = QueryAt(sequence_id, 1, 299);
          *item->mutable_selection() = TokenCountSelection(Pq(2, 4), 4, 16, 20);
        }
        v1::TopKResponse response;
        const grpc::Status status = client->kv().TopK(client->Context().get(), request, &response);
        EXPECT_TRUE(status.ok()) << status.error_message();
        EXPECT_EQ(response.items_size(), 8);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(RpcTest, ServesLoopbackTcpWhenAsked) {
  Start([](Config& config) {
    config.tcp_listen = "127.0.0.1:0";
    config.plain_tcp = true;
  });
  ASSERT_EQ(server_->endpoints().size(), 2u);
  const std::string& tcp = server_->endpoints()[1];
  EXPECT_THAT(tcp, testing::StartsWith("127.0.0.1:"));
  EXPECT_THAT(tcp, testing::Not(testing::EndsWith(":0")));
  TestClient client(tcp);
  EXPECT_EQ(client.token().size(), 32u);
}

// The standard services are not linked as stubs: their messages are simple enough to be written by
// hand.
std::string CallRaw(const std::string& endpoint, const std::string& method,
                    const std::string& request) {
  const auto channel = grpc::CreateChannel(endpoint, grpc::InsecureChannelCredentials());
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  grpc::CompletionQueue queue;
  const grpc::Slice slice(request);
  const auto call = stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&slice, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (!status.ok()) return "status " + std::to_string(status.error_code());
  grpc::Slice whole;
  answer.DumpToSingleSlice(&whole);
  return std::string(reinterpret_cast<const char*>(whole.begin()), whole.size());
}

TEST_F(RpcTest, StandardHealthServiceSaysServing) {
  Start();
  const std::string serving("\x08\x01", 2);  // status = SERVING
  EXPECT_EQ(CallRaw(endpoint(), "/grpc.health.v1.Health/Check", ""), serving);
  EXPECT_EQ(CallRaw(endpoint(), "/grpc.health.v1.Health/Check", "\x0a\x13pqcached.v1.KvCache"),
            serving);
  EXPECT_EQ(CallRaw(endpoint(), "/grpc.health.v1.Health/Check", "\x0a\x01x"), "status 5");
}

TEST_F(RpcTest, ReflectionListsTheServices) {
  Start();
  const auto channel = grpc::CreateChannel(endpoint(), grpc::InsecureChannelCredentials());
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  grpc::CompletionQueue queue;
  const auto await = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  call->StartCall(nullptr);
  ASSERT_TRUE(await());
  const grpc::Slice list_services(std::string("\x3a\x00", 2));
  call->WriteLast(grpc::ByteBuffer(&list_services, 1), grpc::WriteOptions(), nullptr);
  ASSERT_TRUE(await());
  grpc::ByteBuffer answer;
  call->Read(&answer, nullptr);
  ASSERT_TRUE(await());
  grpc::Slice whole;
  answer.DumpToSingleSlice(&whole);
  const std::string text(reinterpret_cast<const char*>(whole.begin()), whole.size());
  for (const char* service :
       {"pqcached.v1.KvCache", "pqcached.v1.Admin", "grpc.health.v1.Health"}) {
    EXPECT_THAT(text, HasSubstr(service));
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  ASSERT_TRUE(await());
}

}  // namespace
}  // namespace pqcached::service
