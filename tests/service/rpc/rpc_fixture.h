// A server over a real store in this process, and clients of it over its unix socket.
//
// The store is small on purpose: segments of 128 tokens, so that every sequence has several.
#ifndef PQCACHED_TESTS_SERVICE_RPC_RPC_FIXTURE_H_
#define PQCACHED_TESTS_SERVICE_RPC_RPC_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pqcached/v1/admin.grpc.pb.h"
#include "pqcached/v1/kv_cache.grpc.pb.h"
#include "service/base/log.h"
#include "service/config/config.h"
#include "service/rpc/server.h"
#include "tests/service/handlers/requests.h"

namespace pqcached::service {

// A connection of its own to an endpoint.
std::shared_ptr<grpc::Channel> ChannelTo(const std::string& endpoint);

// One client with an open session. Ends it when destroyed.
class TestClient {
 public:
  explicit TestClient(const std::string& endpoint, const std::string& tenant = "",
                      const std::string& name = "test");
  ~TestClient();

  v1::KvCache::Stub& kv() { return *kv_; }
  // On the admin socket, next to a unix endpoint: calls of an operator.
  v1::Admin::Stub& admin() { return *admin_; }
  // On the client's own connection: calls of its tenant.
  v1::Admin::Stub& tenant_admin() { return *tenant_admin_; }
  const std::string& token() const { return opened_.session_token(); }
  const v1::SessionOpened& opened() const { return opened_; }

  // With the session's token and a deadline far away.
  std::unique_ptr<grpc::ClientContext> Context() const;

  // Ends the session stream and waits until the server has answered.
  grpc::Status EndSession();
  // Reads the next event of the session.
  bool ReadEvent(v1::SessionEvent* event) { return session_->Read(event); }

  // The following fail the test when the call does.
  uint64_t OpenCache(const std::string& name = "cache");
  uint64_t CreateSequence(uint64_t cache_id);
  uint64_t NewSequence() { return CreateSequence(OpenCache()); }
  // Rows of [first, first + tokens), the same for the same positions.
  void Ingest(uint64_t sequence_id, uint64_t first, uint64_t tokens);
  std::vector<v1::BuildProgress> Build(uint64_t sequence_id, const v1::IndexSpec& index);
  // A sequence with `tokens` rows in both layers.
  uint64_t Filled(uint64_t tokens);

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::KvCache::Stub> kv_;
  std::unique_ptr<v1::Admin::Stub> admin_;
  std::unique_ptr<v1::Admin::Stub> tenant_admin_;
  grpc::ClientContext session_context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>> session_;
  v1::SessionOpened opened_;
  bool ended_ = false;
};

// Everything that can be seen of a sequence and of its pool, as bytes: equal before and after a
// refused call.
std::string Dump(TestClient& client, uint64_t sequence_id);

class RpcTest : public ::testing::Test {
 protected:
  RpcTest();
  ~RpcTest() override;

  // Starts with `change` applied to the configuration; `wrap` may put something around the store.
  using Wrap = std::function<std::unique_ptr<kvstore::Store>(std::unique_ptr<kvstore::Store>)>;
  void Start(const std::function<void(Config&)>& change = {}, const Wrap& wrap = {});
  void Stop() { server_.reset(); }

  std::string endpoint() const { return config_.listen; }
  std::unique_ptr<TestClient> Connect(const std::string& tenant = "",
                                      const std::string& name = "test") {
    return std::make_unique<TestClient>(endpoint(), tenant, name);
  }

  std::filesystem::path directory_;
  std::string
      memory_root_;  // what the store sees of the machine's limits; empty = the machine's own
  Config config_;
  std::unique_ptr<Log> log_;
  std::unique_ptr<kvstore::Store> store_;
  std::unique_ptr<Server> server_;
};

// Returns the details of `status`: what a tool that knows google.rpc.Status reads.
struct Refused {
  std::string field;
  std::string text;
  uint32_t retry_ms = 0;
};
Refused RefusedBy(const grpc::Status& status);

// `status` is `code` about `field` ("" = about none), and its message has `words`.
::testing::AssertionResult Failed(const grpc::Status& status, grpc::StatusCode code,
                                  const std::string& field, const std::string& words = "");

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_RPC_RPC_FIXTURE_H_
