// TLS: who is let in, as what, and what is refused. Each refusal is in the log.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <atomic>
#include <fstream>
#include <map>
#include <thread>
#include <vector>

#include "service/session/identity.h"
#include "service/session/token_file.h"
#include "tests/service/tls/tls_fixture.h"
#include "tests/skip.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;
using testing::HasSubstr;

constexpr char kTokenOfA[] = "3f9a61c0b7d84e25-a";
constexpr char kTokenOfB[] = "3f9a61c0b7d84e25-b";

TEST_F(TlsTest, AClientHasTheTenantOfItsCertificate) {
  StartTls();
  const auto channel = TlsChannel(tenant_a_);
  TlsSession session = OpenTlsSession(channel);
  ASSERT_TRUE(session.is_open());
  v1::OpenCacheResponse cache;
  EXPECT_TRUE(
      session.stub
          ->OpenCache(ContextOf(session.opened.session_token()).get(), CacheRequest("c"), &cache)
          .ok());
  v1::ListCachesResponse caches;
  const auto operator_stub = v1::Admin::NewStub(ChannelTo(endpoint() + ".admin"));
  ASSERT_TRUE(operator_stub->ListCaches(ContextOf("").get(), {}, &caches).ok());
  ASSERT_EQ(caches.caches_size(), 1);
  EXPECT_EQ(caches.caches(0).tenant(), "a");
  session.stream->WritesDone();
  EXPECT_TRUE(session.End().ok());
}

TEST_F(TlsTest, AnOperatorNeedsNoSession) {
  StartTls();
  const auto channel = TlsChannel(ca_.Issue("operator", "URI:pqcached://operator"));
  v1::DrainResponse response;
  v1::DrainRequest request;
  request.set_resume(true);
  const grpc::Status status =
      v1::Admin::NewStub(channel)->Drain(ContextOf("").get(), request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(IsLogged("event=Drain role=operator peer=127.0.0.1:"));
}

TEST_F(TlsTest, RefusesAClientWithoutACertificate) {
  StartTls();
  EXPECT_EQ(GetInfo(TlsChannel(std::nullopt)).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(IsLogged("event=tls_refused reason=no_certificate peer=127.0.0.1:"));
}

TEST_F(TlsTest, RefusesAnExpiredCertificate) {
  StartTls();
  const auto expired = ca_.Issue("old", "URI:pqcached://tenant/a", {-2, -1});
  EXPECT_EQ(GetInfo(TlsChannel(expired)).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(IsLogged("event=tls_refused reason=certificate_expired"));
}

TEST_F(TlsTest, RefusesACertificateOfAnotherCa) {
  StartTls();
  const TestCa other(directory_, "other");
  const auto foreign = other.Issue("foreign", "URI:pqcached://tenant/a");
  EXPECT_EQ(GetInfo(TlsChannel(foreign)).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(IsLogged("event=tls_refused reason=unknown_ca"));
}

TEST_F(TlsTest, RefusesACertificateWithoutOneIdentity) {
  StartTls();
  int number = 0;
  for (const char* names : {"", "URI:https://example.org/a", "URI:pqcached://tenant/A",
                            "URI:pqcached://tenant/a,URI:pqcached://tenant/b"}) {
    const auto files = ca_.Issue("strange" + std::to_string(++number), names);
    EXPECT_EQ(GetInfo(TlsChannel(files)).error_code(), StatusCode::UNAVAILABLE) << names;
  }
  EXPECT_TRUE(IsLogged("event=tls_refused reason=no_identity"));
}

TEST_F(TlsTest, RefusesAnotherTenantThanThatOfTheCertificate) {
  StartTls();
  const auto channel = TlsChannel(tenant_a_);
  TlsSession wrong = OpenTlsSession(channel, "b");
  EXPECT_TRUE(Failed(wrong.End(), StatusCode::PERMISSION_DENIED, "open.tenant"));
  EXPECT_TRUE(IsLogged("event=call_denied reason=wrong_tenant peer=127.0.0.1:"));
  // The session of another tenant, whose token it has learnt.
  TlsSession theirs = OpenTlsSession(TlsChannel(ca_.Issue("b", "URI:pqcached://tenant/b")));
  ASSERT_TRUE(theirs.is_open());
  EXPECT_TRUE(Failed(ListCaches(channel, theirs.opened.session_token()),
                     StatusCode::PERMISSION_DENIED, "pqcached-session"));
  theirs.context->TryCancel();
  theirs.End();
}

TEST_F(TlsTest, RefusesPlainTextOnATlsPort) {
  StartTls();
  EXPECT_EQ(GetInfo(ChannelTo(address())).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(IsLogged("event=tls_refused reason=plain_text"));
}

TEST_F(TlsTest, ClosesAHandshakeThatDrips) {
  StartTls([](Config& config) { config.handshake_timeout = absl::Milliseconds(100); });
  const RawConnection slow(port());
  // The head of a record, and then its bytes one by one.
  ASSERT_TRUE(slow.Send(std::string("\x16\x03\x01\x02\x00", 5)));
  bool closed = false;
  for (int i = 0; i < 500 && !closed; ++i) {
    slow.Send(std::string(1, '\x01'));
    closed = slow.IsClosedWithin(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(closed);
  EXPECT_TRUE(IsLogged("event=tls_refused reason=timeout"));
}

TEST_F(TlsTest, NamesAClientThatEndsItsHandshake) {
  StartTls();
  EXPECT_TRUE(RawConnection(port()).Send(std::string("\x16\x03\x01\x02\x00\x01", 6)));
  EXPECT_TRUE(IsLogged("event=tls_refused reason=closed_by_client"));
}

TEST_F(TlsTest, ManyAddressesWithOneHandshakeEachShutNoClientOut) {
  StartTls([](Config& config) { config.max_handshakes = 8; });
  std::vector<RawConnection> half_open;
  for (uint8_t host = 2; host < 10; ++host) {
    half_open.emplace_back(port(), host);
    ASSERT_TRUE(half_open.back().connected());
  }
  EXPECT_TRUE(GetInfo(TlsChannel(tenant_a_)).ok()) << "its address is the lowest one";
  EXPECT_TRUE(half_open.front().IsClosedWithin(kTlsPatience)) << "the oldest one";
}

// Calls of a connected client, again and again, while something else happens.
class Calling {
 public:
  explicit Calling(std::function<grpc::Status()> call)
      : thread_([this, call = std::move(call)] {
          while (!stopped_) {
            if (!call().ok()) ++failed_;
            ++made_;
          }
        }) {}
  ~Calling() { Stop(); }
  void Stop() {
    stopped_ = true;
    if (thread_.joinable()) thread_.join();
  }
  // Waits for further calls; false when they do not come.
  bool AwaitMore(int calls) const {
    const int before = made_;
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (made_ < before + calls) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  int failed() const { return failed_; }

 private:
  std::atomic<bool> stopped_ = false;
  std::atomic<int> made_ = 0;
  std::atomic<int> failed_ = 0;
  std::thread thread_;
};

TEST_F(TlsTest, AStormOfHandshakesHarmsNoConnectedClient) {
  StartTls([](Config& config) { config.max_handshakes = 8; });
  const auto connected = TlsChannel(tenant_a_);
  ASSERT_TRUE(GetInfo(connected).ok());
  Calling calling([&] { return GetInfo(connected); });
  std::vector<std::thread> storm;
  std::atomic<bool> over = false;
  for (int i = 0; i < 4; ++i) {
    storm.emplace_back([&] {
      while (!over) {
        std::vector<RawConnection> wave;
        for (int each = 0; each < 16; ++each) {
          wave.emplace_back(port());
          wave.back().Send(std::string("\x16\x03\x01\x02\x00\x01", 6));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
  EXPECT_TRUE(IsLogged("event=tls_refused reason=too_many_handshakes"));
  EXPECT_TRUE(calling.AwaitMore(20));
  over = true;
  for (std::thread& each : storm) each.join();
  calling.Stop();
  EXPECT_EQ(calling.failed(), 0);
  EXPECT_TRUE(GetInfo(TlsChannel(tenant_a_)).ok()) << "a client that comes afterwards";
}

TEST_F(TlsTest, TenThousandHalfOpenConnectionsHarmNoClient) {
  constexpr rlim_t kHalfOpen = 10'000;
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max < kHalfOpen + 2000) PQC_SKIP("descriptors") << "the limit is too low";
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  StartTls([](Config& config) { config.handshake_timeout = absl::Minutes(5); });
  const auto connected = TlsChannel(tenant_a_);
  ASSERT_TRUE(GetInfo(connected).ok());
  Calling calling([&] { return GetInfo(connected); });
  std::vector<RawConnection> half_open;
  for (rlim_t i = 0; i < kHalfOpen; ++i) {
    half_open.emplace_back(port());
    ASSERT_TRUE(half_open.back().connected()) << i;
  }
  EXPECT_TRUE(IsLogged("event=tls_refused reason=too_many_handshakes"));
  EXPECT_TRUE(half_open.front().IsClosedWithin(kTlsPatience)) << "the oldest ones make room";
  EXPECT_TRUE(GetInfo(TlsChannel(tenant_a_)).ok()) << "a new client, while all are open";
  EXPECT_TRUE(calling.AwaitMore(20));
  calling.Stop();
  EXPECT_EQ(calling.failed(), 0);
}

TEST_F(TlsTest, OneIdentityLeavesConnectionsToOthers) {
  StartTls([](Config& config) { config.max_connections = 16; });  // 4 of TCP
  std::vector<std::shared_ptr<grpc::Channel>> held;
  for (int i = 0; i < 3; ++i) {
    held.push_back(TlsChannel(tenant_a_));
    ASSERT_TRUE(GetInfo(held.back()).ok());
  }
  EXPECT_EQ(GetInfo(TlsChannel(tenant_a_)).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(IsLogged("event=tls_refused reason=too_many_connections"));
  EXPECT_TRUE(GetInfo(TlsChannel(ca_.Issue("b", "URI:pqcached://tenant/b"))).ok());
}

TEST_F(TlsTest, ClientsWithoutACertificateLeaveConnectionsToOthers) {
  ReplaceFile(token_file(), std::string(kTokenOfB) + " pqcached://tenant/b\n");
  StartTls([&](Config& config) {
    config.token_file = token_file();
    config.max_connections = 16;  // 4 of TCP
  });
  const auto held = TlsChannel(std::nullopt);
  ASSERT_TRUE(GetInfo(held, kTokenOfB).ok());
  EXPECT_EQ(GetInfo(TlsChannel(std::nullopt), kTokenOfB).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(IsLogged("event=tls_refused reason=too_many_connections"));
  EXPECT_TRUE(GetInfo(TlsChannel(tenant_a_)).ok());
}

TEST_F(TlsTest, ReadsCertificatesAgainWithoutARestart) {
  StartTls();
  const auto before = TlsChannel(tenant_a_);
  ASSERT_TRUE(GetInfo(before).ok());
  const TestCa next(directory_, "next");
  const auto next_server = next.Issue("next_server", "IP:127.0.0.1");
  const auto next_client = next.Issue("next_client", "URI:pqcached://tenant/a");
  EXPECT_FALSE(GetInfo(TlsChannel(next_client, next.certificate())).ok());
  ReplaceFile(server_files_.certificate, "no certificate");
  EXPECT_TRUE(GetInfo(TlsChannel(tenant_a_)).ok()) << "the last valid one stays";
  EXPECT_THAT(LogText(), HasSubstr("event=tls_not_reloaded"));
  ReplaceFile(server_files_.key, TextOfFile(next_server.key));
  ReplaceFile(server_files_.certificate, TextOfFile(next_server.certificate));
  ReplaceFile(ca_.certificate(), TextOfFile(next.certificate()));
  EXPECT_TRUE(GetInfo(TlsChannel(next_client, next.certificate())).ok());
  EXPECT_THAT(LogText(), HasSubstr("event=tls_reloaded"));
  EXPECT_FALSE(GetInfo(TlsChannel(tenant_a_, next.certificate())).ok()) << "its CA was replaced";
  EXPECT_TRUE(GetInfo(before).ok()) << "a connection that exists continues";
}

TEST_F(TlsTest, AWithdrawnTokenIsRefusedFromTheNextCallOn) {
  StartWithTokens(std::string("# two tenants\n") + kTokenOfA + " pqcached://tenant/a\n" +
                  kTokenOfB + " pqcached://tenant/b\n");
  const auto channel = TlsChannel(std::nullopt);
  EXPECT_TRUE(Failed(GetInfo(channel), StatusCode::UNAUTHENTICATED, "authorization"));
  TlsSession a = OpenTlsSession(channel, "", kTokenOfA);
  TlsSession b = OpenTlsSession(channel, "", kTokenOfB);
  ASSERT_TRUE(a.is_open() && b.is_open());
  EXPECT_TRUE(ListCaches(channel, a.opened.session_token(), kTokenOfA).ok());
  EXPECT_TRUE(Failed(ListCaches(channel, a.opened.session_token(), kTokenOfB),
                     StatusCode::PERMISSION_DENIED, "pqcached-session"));
  ReplaceFile(token_file(), std::string(kTokenOfB) + " pqcached://tenant/b\n");
  EXPECT_TRUE(Failed(ListCaches(channel, a.opened.session_token(), kTokenOfA),
                     StatusCode::UNAUTHENTICATED, "authorization", "withdrawn"));
  EXPECT_TRUE(Failed(a.End(), StatusCode::UNAUTHENTICATED, "authorization"))
      << "its session ends with the next heartbeat";
  EXPECT_TRUE(ListCaches(channel, b.opened.session_token(), kTokenOfB).ok());
  EXPECT_TRUE(IsLogged("event=call_denied reason=no_identity peer=127.0.0.1:"));
  EXPECT_THAT(LogText(), testing::Not(HasSubstr(kTokenOfA)));
  std::filesystem::remove(token_file());
  EXPECT_TRUE(Failed(ListCaches(channel, b.opened.session_token(), kTokenOfB),
                     StatusCode::UNAUTHENTICATED, "authorization"));
  EXPECT_THAT(LogText(), HasSubstr("event=tokens_refused"));
  b.End();
}

TEST_F(TlsTest, ATokenAndACertificateMustAgree) {
  ReplaceFile(token_file(), std::string(kTokenOfB) + " pqcached://tenant/b\n");
  StartTls([&](Config& config) { config.token_file = token_file(); });
  EXPECT_TRUE(GetInfo(TlsChannel(tenant_a_)).ok());
  EXPECT_TRUE(GetInfo(TlsChannel(std::nullopt), kTokenOfB).ok());
  EXPECT_TRUE(Failed(GetInfo(TlsChannel(tenant_a_), kTokenOfB), StatusCode::PERMISSION_DENIED,
                     "authorization"));
}

TEST_F(TlsTest, DoesNotStartWithFilesThatAreNotValid) {
  const auto refusal = [&](const std::function<void(Config&)>& change) {
    Config config = config_;
    config.tcp_listen = "127.0.0.1:0";
    config.tls_certificate = server_files_.certificate;
    config.tls_key = server_files_.key;
    config.tls_client_ca = ca_.certificate();
    change(config);
    log_ = *Log::Open("info", directory_ / "log");
    store_ = *kvstore::Store::Create(StoreOptionsOf(config));
    const absl::Status status = Server::Start(config, *store_, *log_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    return std::string(status.message());
  };
  const std::string none = directory_ / "none";
  EXPECT_THAT(refusal([&](Config& c) { c.tls_certificate = none; }), HasSubstr("tls_certificate"));
  EXPECT_THAT(refusal([&](Config& c) { c.tls_key = tenant_a_.key; }), HasSubstr("tls_key"));
  EXPECT_THAT(refusal([&](Config& c) { c.tls_client_ca = c.tls_key; }), HasSubstr("tls_client_ca"));
  EXPECT_THAT(refusal([&](Config& c) { c.token_file = none; }), HasSubstr("token_file"));
}

TEST(IdentityTest, IsOneOfThreeForms) {
  for (const char* text :
       {"pqcached://tenant/team-a", "pqcached://operator", "pqcached://peer/node.7"}) {
    const absl::StatusOr<Identity> identity = ParseIdentity(text);
    ASSERT_TRUE(identity.ok()) << text;
    EXPECT_EQ(IdentityText(*identity), text);
  }
  for (const char* text :
       {"", "operator", "pqcached://", "pqcached://operator/", "pqcached://tenant/",
        "pqcached://tenant", "pqcached://tenant/a/b", "pqcached://tenant/A", "PQCACHED://operator",
        "pqcached://root", "pqcached://peer/"}) {
    EXPECT_FALSE(ParseIdentity(text).ok()) << text;
  }
}

TEST(TokenFileTest, NamesTheLineThatIsMalformed) {
  EXPECT_TRUE(ParseTokens("").ok());
  EXPECT_EQ(ParseTokens("# c\n\n0123456789abcdef pqcached://operator\r\n")->size(), 1);
  for (const auto& [line, words] : std::map<std::string, std::string>{
           {"short pqcached://operator", "16..512 bytes"},
           {"0123456789abcde\xff pqcached://operator", "16..512 bytes"},
           {"0123456789abcdef", "a token and an identity"},
           {"0123456789abcdef pqcached://operator more", "a token and an identity"},
           {"0123456789abcdef pqcached://nothing", "the identity must be"}}) {
    const absl::Status status = ParseTokens("# first\n" + line).status();
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(HasSubstr("line 2"), HasSubstr(words)));
    EXPECT_THAT(std::string(status.message()), testing::Not(HasSubstr("0123456789abcdef")));
  }
  EXPECT_FALSE(ParseTokens("0123456789abcdef pqcached://operator\n"
                           "0123456789abcdef pqcached://peer/a\n")
                   .ok());
}

}  // namespace
}  // namespace pqcached::service
