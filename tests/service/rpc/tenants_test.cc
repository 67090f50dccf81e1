// Limits of tenants and of connections, and what operators do about them while the sidecar serves.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/service/rpc/lifecycle_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;

class TenantsTest : public LifecycleTest {
 protected:
  static v1::SetTenantLimitsResponse Set(TestClient& client, const std::string& tenant,
                                         const v1::TenantLimits& limits) {
    v1::SetTenantLimitsRequest request;
    request.set_tenant(tenant);
    *request.mutable_limits() = limits;
    v1::SetTenantLimitsResponse response;
    const grpc::Status status =
        client.admin().SetTenantLimits(client.Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  static std::vector<v1::TenantLimitsDescription> Limits(v1::Admin::Stub& stub,
                                                         TestClient& client) {
    v1::ListTenantLimitsResponse response;
    EXPECT_TRUE(stub.ListTenantLimits(client.Context().get(), {}, &response).ok());
    return {response.tenants().begin(), response.tenants().end()};
  }

  static std::vector<v1::SessionDescription> Sessions(v1::Admin::Stub& stub, TestClient& client) {
    v1::ListSessionsResponse response;
    EXPECT_TRUE(stub.ListSessions(client.Context().get(), {}, &response).ok());
    return {response.sessions().begin(), response.sessions().end()};
  }

  // Asks for a session, and returns the answer; the session has ended on return.
  grpc::Status OpenSession(const std::string& tenant) { return OpenSession(tenant, endpoint()); }
  static grpc::Status OpenSession(const std::string& tenant, const std::string& address) {
    const auto stub =
        v1::KvCache::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    const auto stream = stub->Session(&context);
    v1::SessionRequest request;
    request.mutable_open()->set_tenant(tenant);
    request.mutable_open()->set_client_name("test");
    request.mutable_open()->set_protocol_version(1);
    v1::SessionEvent event;
    const bool opened = stream->Write(request) && stream->Read(&event);
    stream->WritesDone();
    while (stream->Read(&event)) {
    }
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(opened, status.ok());
    return status;
  }

  grpc::Status OpenCache(TestClient& client, const std::string& name) {
    v1::OpenCacheRequest request = CacheRequest(name);
    v1::OpenCacheResponse response;
    return client.kv().OpenCache(client.Context().get(), request, &response);
  }
};

TEST_F(TenantsTest, OneTenantLeavesSessionsToOthers) {
  Start([](Config& config) { config.max_sessions = 8; });
  std::vector<std::unique_ptr<TestClient>> greedy;
  for (int i = 0; i < 6; ++i) greedy.push_back(Connect("greedy"));
  EXPECT_TRUE(Failed(OpenSession("greedy"), StatusCode::RESOURCE_EXHAUSTED,
                     "tenant_limits.sessions", "has 6 open sessions, and may have 6"));
  EXPECT_TRUE(OpenSession("quiet").ok());
}

TEST_F(TenantsTest, OneTenantLeavesCachesToOthers) {
  Start([](Config& config) { config.max_caches = 4; });
  const auto greedy = Connect("greedy");
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(OpenCache(*greedy, std::to_string(i)).ok());
  EXPECT_TRUE(Failed(OpenCache(*greedy, "beyond"), StatusCode::RESOURCE_EXHAUSTED,
                     "tenant_limits.caches", "has 3 open caches, and may have 3"));
  const auto quiet = Connect("quiet");
  EXPECT_TRUE(OpenCache(*quiet, "its own").ok());
}

TEST_F(TenantsTest, LimitsChangeWhileServingAndCutNothing) {
  Start([](Config& config) {
    config.tenant_limits = *ParseTenantLimits("a=caches:2,*=sessions:5;weight:3");
  });
  const auto a = Connect("a");
  ASSERT_TRUE(OpenCache(*a, "first").ok());
  ASSERT_TRUE(OpenCache(*a, "second").ok());
  ASSERT_FALSE(OpenCache(*a, "third").ok());

  v1::TenantLimits change;
  change.set_caches(3);
  const v1::TenantLimitsDescription raised = Set(*a, "a", change).tenant();
  EXPECT_EQ(raised.limits().caches(), 3u);
  EXPECT_EQ(raised.limits().sessions(), 5u) << "of *";
  EXPECT_EQ(raised.limits().weight(), 3u) << "of *";
  EXPECT_EQ(raised.used().caches(), 2u);
  EXPECT_EQ(raised.used().sessions(), 1u);
  EXPECT_TRUE(OpenCache(*a, "third").ok());

  change.set_caches(1);
  EXPECT_EQ(Set(*a, "a", change).tenant().used().caches(), 3u) << "what it has, it keeps";
  EXPECT_TRUE(OpenCache(*a, "third").ok()) << "is open";
  EXPECT_TRUE(Failed(OpenCache(*a, "fourth"), StatusCode::RESOURCE_EXHAUSTED,
                     "tenant_limits.caches", "has 3 open caches, and may have 1"));
}

TEST_F(TenantsTest, LimitsFromOutsideAreChecked) {
  Start();
  const auto a = Connect("a");
  v1::SetTenantLimitsResponse response;
  v1::SetTenantLimitsRequest request;
  const auto set = [&] {
    return a->admin().SetTenantLimits(a->Context().get(), request, &response);
  };
  request.set_tenant("no/tenant");
  EXPECT_TRUE(Failed(set(), StatusCode::INVALID_ARGUMENT, "tenant"));
  request.set_tenant("a");
  request.mutable_limits()->set_weight(1001);
  EXPECT_TRUE(Failed(set(), StatusCode::INVALID_ARGUMENT, "limits.weight", "at most 1000"));
  request.mutable_limits()->set_weight(0);
  request.mutable_limits()->set_pool_bytes(1000);
  request.mutable_limits()->set_guaranteed_bytes(1001);
  EXPECT_TRUE(Failed(set(), StatusCode::INVALID_ARGUMENT, "limits.guaranteed"));
}

TEST_F(TenantsTest, ATenantSeesAndEndsOnlyItsOwnSessions) {
  Start();
  const auto a = Connect("a", "engine-a");
  const auto b = Connect("b", "engine-b");
  const uint64_t sequence_id = b->NewSequence();
  const auto own = Sessions(a->tenant_admin(), *a);
  ASSERT_EQ(own.size(), 1u);
  EXPECT_EQ(own.front().client_name(), "engine-a");
  const auto all = Sessions(a->admin(), *a);
  ASSERT_EQ(all.size(), 2u);
  const auto its =
      std::find_if(all.begin(), all.end(), [](const auto& each) { return each.tenant() == "b"; });
  ASSERT_NE(its, all.end());
  EXPECT_EQ(its->sequence_count(), 1u);
  const auto limits = Limits(a->tenant_admin(), *a);
  ASSERT_EQ(limits.size(), 1u);
  EXPECT_EQ(limits.front().tenant(), "a");
  EXPECT_EQ(Limits(a->admin(), *a).size(), 3u) << "*, a and b";

  v1::EndSessionRequest request;
  request.set_session_number(its->session_number());
  v1::EndSessionResponse response;
  EXPECT_TRUE(Failed(a->tenant_admin().EndSession(a->Context().get(), request, &response),
                     StatusCode::NOT_FOUND, "session_number"));
  EXPECT_TRUE(a->admin().EndSession(a->Context().get(), request, &response).ok());
  EXPECT_EQ(response.dropped_sequences(), 1u);
  v1::DescribeSequenceRequest describe;
  describe.set_sequence_id(sequence_id);
  v1::DescribeSequenceResponse described;
  EXPECT_EQ(a->admin().DescribeSequence(a->Context().get(), describe, &described).error_code(),
            StatusCode::NOT_FOUND);
  v1::StatsResponse stats;
  EXPECT_EQ(b->tenant_admin().Stats(b->Context().get(), {}, &stats).error_code(),
            StatusCode::UNAUTHENTICATED);
}

// Calls of one tenant which hold every thread that it may occupy.
TEST_F(TenantsTest, OneTenantLeavesThreadsToOthers) {
  absl::Notification keep_going;
  std::atomic<int> held = 0;
  hooks_.before_top_k = [&] {
    if (held.fetch_add(1) < 3) keep_going.WaitForNotification();
  };
  StartHooked([](Config& config) { config.call_threads = 4; });
  const auto greedy = Connect("greedy");
  const auto quiet = Connect("quiet");
  const uint64_t its = greedy->Filled(10);
  const uint64_t other = quiet->Filled(10);
  std::vector<std::thread> calls;
  for (int i = 0; i < 8; ++i) {
    calls.emplace_back([&] { EXPECT_TRUE(TopK(*greedy, its, kLong).ok()); });
  }
  while (held < 3) std::this_thread::yield();
  const grpc::Status status = TopK(*quiet, other, kLong);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(held, 4) << "the others of the greedy tenant wait";
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (Limits(quiet->admin(), *quiet).at(1).used().calls() != 5) {
    ASSERT_LT(std::chrono::steady_clock::now(), until);
  }
  keep_going.Notify();
  for (std::thread& call : calls) call.join();
}

TEST_F(TenantsTest, TheWatchdogSeesThatNoThreadAnswers) {
  absl::Notification begun;
  absl::Notification keep_going;
  hooks_.before_top_k = [&] {
    begun.Notify();
    keep_going.WaitForNotification();
  };
  StartHooked([](Config& config) { config.call_threads = 1; });
  EXPECT_TRUE(server_->IsResponsive(absl::Minutes(1)));
  const auto client = Connect();
  const uint64_t sequence_id = client->Filled(10);
  std::thread call([&] { EXPECT_TRUE(TopK(*client, sequence_id, kLong).ok()); });
  begun.WaitForNotification();
  EXPECT_FALSE(server_->IsResponsive(absl::Milliseconds(100)));
  keep_going.Notify();
  call.join();
  EXPECT_TRUE(server_->IsResponsive(absl::Minutes(1)));
}

// A connection that sends nothing.
class Silent {
 public:
  // To a unix socket.
  explicit Silent(const std::string& path) : socket_(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    Connect(&address, sizeof(address));
  }
  // To a port of 127.0.0.1.
  explicit Silent(uint16_t port) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Connect(&address, sizeof(address));
  }
  ~Silent() { close(socket_); }
  Silent(const Silent&) = delete;
  Silent& operator=(const Silent&) = delete;

  bool connected() const { return connected_; }
  // Waits until the server has closed the connection, or sends something.
  bool IsClosed() const {
    char byte = 0;
    return recv(socket_, &byte, 1, 0) <= 0;
  }

 private:
  void Connect(const void* address, socklen_t size) {
    connected_ = connect(socket_, static_cast<const sockaddr*>(address), size) == 0;
  }

  const int socket_;
  bool connected_ = false;
};

TEST_F(TenantsTest, OneUserLeavesConnectionsToOthers) {
  Start([](Config& config) { config.max_connections = 8; });
  std::vector<std::unique_ptr<Silent>> held;
  for (int i = 0; i < 6; ++i) held.push_back(std::make_unique<Silent>(SocketPath(config_)));
  EXPECT_TRUE(Silent(SocketPath(config_)).IsClosed()) << "three quarters of 8 are held";
  held.clear();
  // A connection that has ended makes room, soon: the sidecar notices it by itself.
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!OpenSession("a").ok()) ASSERT_LT(std::chrono::steady_clock::now(), until);
  EXPECT_TRUE(OpenSession("a").ok());
}

TEST_F(TenantsTest, TcpHasConnectionsOfItsOwn) {
  Start([](Config& config) {
    config.max_connections = 8;
    config.tcp_listen = "127.0.0.1:0";
    config.plain_tcp = true;
  });
  const std::string& address = server_->endpoints().at(1);
  const auto port = static_cast<uint16_t>(std::stoul(address.substr(address.rfind(':') + 1)));
  std::vector<std::unique_ptr<Silent>> held;
  for (int i = 0; i < 2; ++i) held.push_back(std::make_unique<Silent>(port));
  EXPECT_TRUE(Silent(port).IsClosed()) << "a quarter of 8 are held";
  EXPECT_TRUE(OpenSession("a").ok()) << "the unix socket has all of its own";
  held.clear();
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!OpenSession("b", address).ok()) ASSERT_LT(std::chrono::steady_clock::now(), until);
}

TEST_F(TenantsTest, AConnectionOpensFewStreamsWithoutASession) {
  Start();
  const auto stub =
      v1::KvCache::NewStub(grpc::CreateChannel(endpoint(), grpc::InsecureChannelCredentials()));
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>>>
      streams;
  for (int i = 0; i < 40; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stub->Session(contexts.back().get()));
  }
  // The first ones wait for `open`.
  EXPECT_TRUE(
      Failed(streams.back()->Finish(), StatusCode::RESOURCE_EXHAUSTED, "open", "have no session"));
  for (int i = 0; i < 39; ++i) {
    contexts[i]->TryCancel();
    streams[i]->Finish();
  }
  // The same connection has room again once the sidecar has noticed that.
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!OpenSession("a").ok()) ASSERT_LT(std::chrono::steady_clock::now(), until);
}

}  // namespace
}  // namespace pqcached::service
