#include "tests/service/rpc/rpc_fixture.h"

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "pqcached/v1/status_details.pb.h"
#include "tests/rewritten_texts.h"

namespace pqcached::service {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);
constexpr auto kSessionPatience = std::chrono::seconds(240);  // less than the limit of a program

}  // namespace

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& endpoint) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments);
}

TestClient::TestClient(const std::string& endpoint, const std::string& tenant,
                       const std::string& name)
    : channel_(ChannelTo(endpoint)) {
  const bool has_admin_socket = endpoint.starts_with("unix:");
  kv_ = v1::KvCache::NewStub(channel_);
  tenant_admin_ = v1::Admin::NewStub(channel_);
  admin_ = v1::Admin::NewStub(has_admin_socket ? ChannelTo(endpoint + ".admin") : channel_);
  session_context_.set_deadline(std::chrono::system_clock::now() + kSessionPatience);
  session_ = kv_->Session(&session_context_);
  v1::SessionRequest request;
  request.mutable_open()->set_client_name(name);
  request.mutable_open()->set_tenant(tenant);
  request.mutable_open()->set_protocol_version(1);
  session_->Write(request);
  v1::SessionEvent event;
  if (session_->Read(&event)) opened_ = event.opened();
}

TestClient::~TestClient() { EndSession(); }

grpc::Status TestClient::EndSession() {
  if (ended_) return grpc::Status::OK;
  ended_ = true;
  session_->WritesDone();
  v1::SessionEvent event;
  while (session_->Read(&event)) {
  }
  return session_->Finish();
}

std::unique_ptr<grpc::ClientContext> TestClient::Context() const {
  auto context = std::make_unique<grpc::ClientContext>();
  context->AddMetadata("pqcached-session", token());
  context->set_deadline(std::chrono::system_clock::now() + kPatience);
  return context;
}

uint64_t TestClient::OpenCache(const std::string& name) {
  v1::OpenCacheResponse response;
  const grpc::Status status = kv_->OpenCache(Context().get(), CacheRequest(name), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.cache_id();
}

uint64_t TestClient::CreateSequence(uint64_t cache_id) {
  v1::CreateSequenceRequest request;
  request.set_cache_id(cache_id);
  v1::CreateSequenceResponse response;
  const grpc::Status status = kv_->CreateSequence(Context().get(), request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.sequence_id();
}

void TestClient::Ingest(uint64_t sequence_id, uint64_t first, uint64_t tokens) {
  const auto context = Context();
  v1::IngestResponse response;
  const auto writer = kv_->Ingest(context.get(), &response);
  v1::IngestRequest request;
  request.mutable_header()->set_sequence_id(sequence_id);
  writer->Write(request);
  for (const uint32_t layer : kLayers) {
    request.mutable_chunk()->set_first_position(first);
    *request.mutable_chunk()->mutable_rows() = RowsOf(layer, first, tokens);
    writer->Write(request);
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.token_count(), first + tokens);
}

std::vector<v1::BuildProgress> TestClient::Build(uint64_t sequence_id, const v1::IndexSpec& index) {
  v1::BuildIndexRequest request;
  request.set_sequence_id(sequence_id);
  *request.mutable_index() = index;
  request.set_iterations(3);
  request.set_sink_tokens(4);
  const auto context = Context();
  const auto reader = kv_->BuildIndex(context.get(), request);
  std::vector<v1::BuildProgress> all;
  for (v1::BuildProgress progress; reader->Read(&progress);) all.push_back(progress);
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  return all;
}

uint64_t TestClient::Filled(uint64_t tokens) {
  const uint64_t sequence_id = NewSequence();
  Ingest(sequence_id, 0, tokens);
  return sequence_id;
}

std::string Dump(TestClient& client, uint64_t sequence_id) {
  std::string dump;
  v1::DescribeSequenceRequest describe;
  describe.set_sequence_id(sequence_id);
  v1::DescribeSequenceResponse description;
  const grpc::Status status =
      client.tenant_admin().DescribeSequence(client.Context().get(), describe, &description);
  description.mutable_sequence()->clear_idle_seconds();  // time goes on
  description.mutable_sequence()->clear_pin_left_seconds();
  dump += status.error_message() + description.ShortDebugString();
  v1::ListCachesResponse caches;
  client.tenant_admin().ListCaches(client.Context().get(), {}, &caches);
  dump += caches.ShortDebugString();
  for (const v1::LayerDescription& layer : description.sequence().layers()) {
    if (layer.row_count() == 0) continue;
    v1::FetchBlocksRequest fetch;
    fetch.set_sequence_id(sequence_id);
    fetch.set_layer(layer.layer());
    fetch.add_ranges()->set_end(layer.row_count());
    v1::FetchBlocksResponse rows;
    const grpc::Status fetched = client.kv().FetchBlocks(client.Context().get(), fetch, &rows);
    EXPECT_TRUE(fetched.ok()) << fetched.error_message();
    dump += rows.SerializeAsString();
  }
  return dump;
}

RpcTest::RpcTest() {
  std::string path = testing::TempDir() + "pqcached-rpc-XXXXXX";
  directory_ = mkdtemp(path.data());
  config_ = SmallConfig();
  config_.listen = "unix://" + (directory_ / "pqcached.sock").string();
}

RpcTest::~RpcTest() {
  server_.reset();
  store_.reset();
  std::filesystem::remove_all(directory_);
}

void RpcTest::Start(const std::function<void(Config&)>& change, const Wrap& wrap) {
  if (change) change(config_);
  log_ = *Log::Open(config_.log_level, config_.log_file);
  kvstore::StoreOptions options = StoreOptionsOf(config_);
  options.memory_root = memory_root_;
  auto store = kvstore::Store::Create(options);
  ASSERT_TRUE(store.ok()) << store.status();
  store_ = wrap ? wrap(*std::move(store)) : *std::move(store);
  auto server = Server::Start(config_, *store_, *log_);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
}

Refused RefusedBy(const grpc::Status& status) {
  Refused refused;
  v1::StatusDetails details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  for (const google::protobuf::Any& detail : details.details()) {
    v1::BadRequestDetail bad_request;
    v1::RetryInfoDetail retry_info;
    if (detail.type_url() == "type.googleapis.com/google.rpc.BadRequest") {
      EXPECT_TRUE(bad_request.ParseFromString(detail.value()));
      EXPECT_EQ(bad_request.field_violations_size(), 1);
      refused.field = bad_request.field_violations(0).field();
      refused.text = bad_request.field_violations(0).description();
    } else if (detail.type_url() == "type.googleapis.com/google.rpc.RetryInfo") {
      EXPECT_TRUE(retry_info.ParseFromString(detail.value()));
      refused.retry_ms = static_cast<uint32_t>(retry_info.retry_delay().seconds() * 1000 +
                                               retry_info.retry_delay().nanos() / 1'000'000);
    } else {
      ADD_FAILURE() << "a detail of type " << detail.type_url();
    }
  }
  return refused;
}

testing::AssertionResult Failed(const grpc::Status& status, grpc::StatusCode code,
                                const std::string& field, const std::string& words) {
  const std::string refused = status.error_details().empty() ? "" : RefusedBy(status).field;
  // What gRPC refuses itself has no details, and the same message in both runs.
  const bool has_words = status.error_details().empty()
                             ? status.error_message().find(words) != std::string::npos
                             : words.empty() || HasText(status.error_message(), words);
  if (status.error_code() == code && refused == field && has_words) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "code " << status.error_code() << " field '" << refused
                                     << "' '" << status.error_message() << "', expected code "
                                     << code << " field '" << field << "' with '" << words << "'";
}

}  // namespace pqcached::service
