// The whole daemon when its worker ends in one way or another: what its clients see, and what goes on.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/read/layout.h"
#include "kvstore/records/record_table.h"
#include "tests/service/daemon_process.h"
#include "tests/service/rpc/rpc_fixture.h"
#include "tests/service/session/broker_fixture.h"

namespace pqcached::service {
namespace {

using kvstore::BrokerCall;
using kvstore::BrokerReply;
using kvstore::BrokerRequest;
using kvstore::ControlPage;
using testing::HasSubstr;
using testing::Not;

constexpr char kReady[] = "event=ready ";

class RestartTest : public RpcTest {
 protected:
  std::vector<std::string> Arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"--listen", endpoint(), "--max-pool-bytes", "64mib"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  std::string broker_path() const { return endpoint().substr(7) + kvstore::kBrokerSuffix; }

  static BrokerRequest Resume(const std::string& token) {
    BrokerRequest request = BrokerConnection::Request(BrokerCall::kResume);
    token.copy(request.resume_token, sizeof(request.resume_token) - 1);
    return request;
  }
  // An rpc of the session with this token, to whichever worker serves now, or, with a boot id, to
  // that worker alone.
  template <typename Request, typename Response>
  grpc::Status Rpc(const std::string& token,
                   grpc::Status (v1::KvCache::Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                   const Request& request, Response* response,
                   const std::string& boot_id = "") const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto kv = v1::KvCache::NewStub(
        grpc::CreateCustomChannel(endpoint(), grpc::InsecureChannelCredentials(), arguments));
    grpc::ClientContext context;
    context.AddMetadata("pqcached-session", token);
    if (!boot_id.empty()) context.AddMetadata("pqcached-boot", boot_id);
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return (kv.get()->*method)(&context, request, response);
  }
  // Whether the session's token is good.
  grpc::Status Use(const std::string& token) const {
    v1::OpenCacheResponse response;
    return Rpc(token, &v1::KvCache::Stub::OpenCache, CacheRequest(), &response);
  }
  // All rows of a sequence; what went wrong, when something did.
  std::string Rows(const std::string& token, uint64_t sequence_id, uint64_t tokens) const {
    std::string all;
    for (const uint32_t layer : kLayers) {
      v1::FetchBlocksRequest request;
      request.set_sequence_id(sequence_id);
      request.set_layer(layer);
      request.add_ranges()->set_end(tokens);
      v1::FetchBlocksResponse rows;
      const grpc::Status status = Rpc(token, &v1::KvCache::Stub::FetchBlocks, request, &rows);
      rows.clear_rows_epoch();  // of the worker
      all += status.ok() ? rows.SerializeAsString() : status.error_message();
    }
    return all;
  }
  static void KillWorker(Daemon& daemon, int signal = SIGKILL) {
    const pid_t worker = daemon.WorkerPid();
    ASSERT_GT(worker, 0);
    ASSERT_NE(worker, daemon.pid());
    ASSERT_EQ(kill(worker, signal), 0);
  }
  // Until the words of the word change; a futex in the client waits for that.
  static void AwaitEnd(const ControlPage& page) {
    const auto until = std::chrono::steady_clock::now() + Daemon::kPatience;
    while (page.boot_word != 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), until);
      poll(nullptr, 0, 1);
    }
  }
};

// A reader that has mapped a pool and makes no calls, and an owner of two sequences there.
class QuarantineTest : public RestartTest {
 protected:
  static constexpr uint64_t kTokens = 200;

  // Kills the worker, then drops one of the sequences: its memory is in quarantine.
  void DropWhatTheReaderMaps(Daemon& daemon) {
    owner_ = std::make_unique<LocalClient>(endpoint(), "", "owner");
    reader_ = std::make_unique<LocalClient>(endpoint(), "", "reader");
    cache_id_ = owner_->OpenCache();
    stays_ = owner_->CreateSequence(cache_id_);
    const uint64_t goes = owner_->CreateSequence(cache_id_);
    ASSERT_TRUE(Append(*owner_, stays_, 0, kTokens).ok());
    ASSERT_TRUE(Append(*owner_, goes, 0, kTokens).ok());
    pool_ = reader_->connection().OpenPool(cache_id_);
    ASSERT_NE(pool_.data(), nullptr);
    mapped_.assign(reinterpret_cast<const char*>(pool_.data()), pool_.size_bytes());
    KillWorker(daemon);
    ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
    v1::DropSequenceRequest request;
    request.set_sequence_id(goes);
    v1::DropSequenceResponse response;
    const grpc::Status dropped =
        Rpc(owner_->hello().session_token, &v1::KvCache::Stub::DropSequence, request, &response);
    ASSERT_TRUE(dropped.ok()) << dropped.error_message();
  }
  std::unique_ptr<v1::Admin::Stub> Admin() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::Admin::NewStub(grpc::CreateCustomChannel(
        endpoint() + ".admin", grpc::InsecureChannelCredentials(), arguments));
  }
  static grpc::Status Call(v1::Admin::Stub& admin, const v1::EndQuarantineRequest& request,
                           v1::EndQuarantineResponse* response) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return admin.EndQuarantine(&context, request, response);
  }

  std::unique_ptr<LocalClient> owner_, reader_;
  uint64_t cache_id_ = 0, stays_ = 0;
  SharedMapping pool_;
  std::string mapped_;
};

TEST_F(RestartTest, AKilledWorkerComesBackAndItsClientsKnow) {
  Daemon daemon(Arguments());
  ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
  LocalClient client(endpoint());
  ASSERT_EQ(client.hello().status, 0u) << client.hello().message;
  EXPECT_EQ(client.page().boot_word, client.hello().boot_word);

  KillWorker(daemon);
  AwaitEnd(client.page());
  EXPECT_GT(client.page().wake_word, 0u);
  EXPECT_EQ(client.worker_end().boot_word, client.hello().boot_word);
  BrokerReply nothing;
  EXPECT_FALSE(client.connection().Receive(nothing)) << "the old connection is at its end";
  ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();

  BrokerConnection next(broker_path());
  BrokerReply resumed;
  const SharedMapping control =
      next.Open(Resume(client.hello().session_token), PROT_READ, &resumed);
  ASSERT_EQ(resumed.status, 0u) << resumed.message;
  EXPECT_STREQ(resumed.session_token, client.hello().session_token);
  EXPECT_STREQ(resumed.tenant, client.hello().tenant);
  EXPECT_STRNE(resumed.boot_id, client.hello().boot_id);
  EXPECT_NE(resumed.boot_word, client.hello().boot_word);
  EXPECT_EQ(reinterpret_cast<const ControlPage*>(control.data())->boot_word, resumed.boot_word);
  EXPECT_EQ(client.page().boot_word, 0u);
  EXPECT_EQ(client.worker_end().has_successor, 1u);
  EXPECT_TRUE(Use(client.hello().session_token).ok());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.output();
  EXPECT_TRUE(std::filesystem::is_empty(directory_)) << "nothing is left behind";
}

TEST_F(RestartTest, WhatWasAcknowledgedIsThereAfterEachEndOfAWorker) {
  constexpr uint64_t kTokens = 300;
  auto daemon = std::make_unique<Daemon>(Arguments({"--segment-tokens", "128"}));
  ASSERT_TRUE(daemon->AwaitOutput(kReady));
  TestClient client(endpoint());
  const std::string token = client.token();
  const uint64_t sequence_id = client.Filled(kTokens);
  const std::string rows = Rows(token, sequence_id, kTokens);
  ASSERT_GT(rows.size(), kTokens * sizeof(kLayers) / sizeof(kLayers[0]) * kKvHeads *
                             (kKeyDim + kValueDim) * sizeof(float));

  KillWorker(*daemon);
  ASSERT_TRUE(daemon->AwaitMore(kReady)) << daemon->output();
  EXPECT_TRUE(Rows(token, sequence_id, kTokens) == rows) << "after SIGKILL";
  daemon->Signal(SIGHUP);
  ASSERT_TRUE(daemon->AwaitMore(kReady)) << daemon->output();
  EXPECT_TRUE(Rows(token, sequence_id, kTokens) == rows) << "after SIGHUP";
  auto next = std::make_unique<Daemon>(Arguments({"--take-over"}));
  ASSERT_TRUE(next->AwaitOutput(kReady)) << next->output();
  EXPECT_TRUE(Rows(token, sequence_id, kTokens) == rows) << "after a take-over";
}

// The lease is the proof: each worker counts its leases from the beginning, so that the late call
// names a lease that the next worker has granted.
TEST_F(RestartTest, ALateCallForADeadWorkerIsRefusedByTheNextOne) {
  using Kv = v1::KvCache::Stub;
  Daemon daemon(Arguments());
  ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
  LocalClient client(endpoint());
  const std::string token = client.hello().session_token, dead = client.hello().boot_id;
  v1::AttachRequest attach;
  attach.set_sequence_id(client.CreateSequence(client.OpenCache()));
  v1::AttachResponse first;
  ASSERT_TRUE(Rpc(token, &Kv::Attach, attach, &first, dead).ok()) << "it is alive";
  KillWorker(daemon);
  ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
  BrokerConnection next(broker_path());
  const BrokerReply resumed = next.Call(Resume(token));
  ASSERT_EQ(resumed.status, 0u) << resumed.message;
  v1::AttachResponse second;
  ASSERT_TRUE(Rpc(token, &Kv::Attach, attach, &second, resumed.boot_id).ok());
  ASSERT_EQ(second.lease_id(), first.lease_id()) << "the test needs equal leases";

  const auto expect_refused = [](const grpc::Status& status) {
    EXPECT_TRUE(Failed(status, grpc::StatusCode::ABORTED, "pqcached-boot"));
  };
  v1::AppendRequest append;
  v1::SequenceAppend* item = append.add_items();
  item->set_sequence_id(attach.sequence_id());
  for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, 0, 1);
  item->mutable_lease()->set_lease_id(first.lease_id());
  v1::AppendResponse appended;
  expect_refused(Rpc(token, &Kv::Append, append, &appended, dead));
  v1::DetachRequest detach;
  detach.set_lease_id(first.lease_id());
  v1::DetachResponse detached;
  expect_refused(Rpc(token, &Kv::Detach, detach, &detached, dead));
  // Neither has had an effect: the sequence is empty, and the lease is held.
  ASSERT_TRUE(Rpc(token, &Kv::Append, append, &appended, resumed.boot_id).ok());
  EXPECT_EQ(appended.token_counts(0), 1u);
  EXPECT_TRUE(Rpc(token, &Kv::Detach, detach, &detached, resumed.boot_id).ok());
}

// How many of a process's pools could be mapped for writing by whoever may open its descriptors.
int WritablePools(pid_t process, int* pools) {
  int writable = 0;
  *pools = 0;
  const std::filesystem::path descriptors = "/proc/" + std::to_string(process) + "/fd";
  for (const auto& entry : std::filesystem::directory_iterator(descriptors)) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error);
    if (target.find("memfd:pool-") == std::string::npos) continue;
    ++*pools;
    const kvstore::FileDescriptor opened(open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
    writable +=
        kvstore::Mapping::Map(opened, 4096, kvstore::Mapping::Access::kReadWrite).ok() ? 1 : 0;
  }
  return writable;
}

TEST_F(RestartTest, AStrictPoolOutlivesItsWorkersAndStaysStrict) {
  constexpr uint64_t kTokens = 300;
  Daemon daemon(Arguments({"--segment-tokens", "128", "--strict-memory", "true"}));
  ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
  TestClient client(endpoint());
  const std::string token = client.token();
  const uint64_t sequence_id = client.Filled(kTokens);
  const std::string rows = Rows(token, sequence_id, kTokens);
  for (int round = 0; round < 2; ++round) {
    KillWorker(daemon);
    ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
    EXPECT_TRUE(Rows(token, sequence_id, kTokens) == rows) << "after kill " << round;
    int pools = 0;
    EXPECT_EQ(WritablePools(daemon.WorkerPid(), &pools), 0);
    EXPECT_GT(pools, 0) << "the worker has none";
  }
  TestClient second(endpoint());
  second.Filled(kTokens);  // the memory can still be written by its worker

  daemon.Signal(SIGHUP);
  ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
  EXPECT_EQ(Use(token).error_code(), grpc::StatusCode::UNAUTHENTICATED) << "it starts empty";
  TestClient fresh(endpoint());
  fresh.Filled(kTokens);
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.output();
  EXPECT_TRUE(std::filesystem::is_empty(directory_)) << "nothing is left behind";
}

TEST_F(RestartTest, ATakeOverLeavesStrictPoolsBehind) {
  Daemon old_daemon(Arguments({"--strict-memory", "true"}));
  ASSERT_TRUE(old_daemon.AwaitOutput(kReady));
  TestClient client(endpoint());
  const std::string token = client.token();
  const uint64_t sequence_id = client.Filled(100);
  Daemon new_daemon(Arguments({"--strict-memory", "true", "--take-over"}));
  ASSERT_TRUE(new_daemon.AwaitOutput(kReady)) << new_daemon.output();
  EXPECT_EQ(old_daemon.Wait(), 0) << old_daemon.output();
  EXPECT_THAT(Rows(token, sequence_id, 100), HasSubstr("sequence_id")) << "it is not found";
  TestClient fresh(endpoint());
  fresh.Filled(100);
}

TEST_F(RestartTest, ATokenIsGoodBeforeItsSessionIsResumed) {
  Daemon daemon(Arguments());
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  LocalClient client(endpoint());
  KillWorker(daemon);
  ASSERT_TRUE(daemon.AwaitMore(kReady));
  EXPECT_TRUE(Use(client.hello().session_token).ok());
}

TEST_F(RestartTest, ASessionIsResumedByOneAtATime) {
  Daemon daemon(Arguments());
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  LocalClient client(endpoint());
  const std::string token = client.hello().session_token;
  BrokerConnection other(broker_path());
  EXPECT_EQ(other.Call(Resume(token)).status, grpc::StatusCode::FAILED_PRECONDITION)
      << "its client is connected";
  EXPECT_EQ(other.Call(Resume("0123")).status, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(other.Call(BrokerConnection::Hello()).status, 0u) << "hello is still possible";
  KillWorker(daemon);
  ASSERT_TRUE(daemon.AwaitMore(kReady));
  BrokerConnection first(broker_path());
  EXPECT_EQ(first.Call(Resume(token)).status, 0u);
  EXPECT_EQ(first.Call(Resume(token)).status, grpc::StatusCode::FAILED_PRECONDITION);
  BrokerConnection second(broker_path());
  EXPECT_EQ(second.Call(Resume(token)).status, grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(RestartTest, ASessionWithoutAClientIsDroppedInTime) {
  Daemon daemon(Arguments({"--resume-timeout", "50ms"}));
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  std::string token;
  {
    LocalClient client(endpoint());
    token = client.hello().session_token;
    ASSERT_EQ(client.page().boot_word, client.hello().boot_word);
    KillWorker(daemon);
    AwaitEnd(client.page());
    ASSERT_TRUE(daemon.AwaitMore("event=sessions_detached count=1 connections=1"));
  }
  ASSERT_TRUE(daemon.AwaitMore("event=session_not_resumed session=local#1")) << daemon.output();
  BrokerConnection late(broker_path());
  EXPECT_EQ(late.Call(Resume(token)).status, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Use(token).error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(RestartTest, SessionsOfSilentClientsEndWithTheirConnections) {
  Daemon daemon(Arguments({"--resume-timeout", "10ms"}));
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  auto first = std::make_unique<LocalClient>(endpoint(), "", "one");
  auto second = std::make_unique<LocalClient>(endpoint(), "", "two");
  KillWorker(daemon);
  ASSERT_TRUE(daemon.AwaitMore("event=sessions_detached count=2 connections=2"));
  ASSERT_TRUE(daemon.AwaitMore(kReady));
  first.reset();
  ASSERT_TRUE(daemon.AwaitMore("event=session_not_resumed session=one#1"));
  EXPECT_TRUE(Use(second->hello().session_token).ok())
      << "an engine that is silent, but there, keeps its session";
  second.reset();
  ASSERT_TRUE(daemon.AwaitMore("event=session_not_resumed session=two#2"));
}

TEST_F(QuarantineTest, AnOperatorMovesThePoolThatASilentClientHolds) {
  Daemon daemon(Arguments());
  ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
  DropWhatTheReaderMaps(daemon);
  const std::string before = Rows(owner_->hello().session_token, stays_, kTokens);
  v1::EndQuarantineRequest request;
  v1::EndQuarantineResponse response;
  const auto admin = Admin();
  request.set_cache_id(cache_id_ + 100);
  EXPECT_TRUE(Failed(Call(*admin, request, &response), grpc::StatusCode::NOT_FOUND, "cache_id"));
  request.set_cache_id(cache_id_);
  ASSERT_TRUE(Call(*admin, request, &response).ok());
  EXPECT_EQ(response.moving_pools(), 1u);
  ASSERT_TRUE(daemon.AwaitMore("moved_pools=1")) << daemon.output();
  ASSERT_TRUE(daemon.AwaitMore("event=quarantine_ended caches=1")) << daemon.output();
  ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
  EXPECT_EQ(Rows(owner_->hello().session_token, stays_, kTokens), before);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(pool_.data()), pool_.size_bytes()), mapped_)
      << "the reader's mapping stays as it was";
  EXPECT_TRUE(Use(reader_->hello().session_token).ok()) << "and so does its session";
  ASSERT_TRUE(Call(*Admin(), request, &response).ok());
  EXPECT_EQ(response.moving_pools(), 0u) << "nothing is in quarantine";
  EXPECT_THAT(daemon.output(), Not(HasSubstr("level=error event=worker_killed")));
}

TEST_F(QuarantineTest, AfterItsTimeoutThePoolIsMoved) {
  Daemon daemon(Arguments({"--quarantine-timeout", "100ms"}));
  ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
  DropWhatTheReaderMaps(daemon);
  ASSERT_TRUE(daemon.AwaitMore("moved_pools=1")) << daemon.output();
  ASSERT_TRUE(daemon.AwaitMore("event=quarantine_ended caches=1")) << daemon.output();
  ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
  EXPECT_FALSE(Rows(owner_->hello().session_token, stays_, kTokens).empty());
}

TEST_F(RestartTest, ConnectionsOutliveSeveralWorkers) {
  Daemon daemon(Arguments());
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  LocalClient client(endpoint());
  std::vector<std::string> boot_ids = {client.hello().boot_id};
  for (int round = 0; round < 3; ++round) {
    KillWorker(daemon);
    ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
  }
  BrokerConnection next(broker_path());
  const BrokerReply resumed = next.Call(Resume(client.hello().session_token));
  EXPECT_EQ(resumed.status, 0u) << resumed.message;
  LocalClient fresh(endpoint());
  EXPECT_STRNE(fresh.hello().session_token, client.hello().session_token);
}

TEST_F(RestartTest, SessionStreamsAreResumedToo) {
  Daemon daemon(Arguments());
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  TestClient client(endpoint());
  const std::string token = client.token();
  KillWorker(daemon);
  ASSERT_TRUE(daemon.AwaitMore(kReady));
  const auto kv =
      v1::KvCache::NewStub(grpc::CreateChannel(endpoint(), grpc::InsecureChannelCredentials()));
  const auto open = [&](const std::string& resume_token, v1::SessionEvent* event) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + Daemon::kPatience);
    const auto stream = kv->Session(&context);
    v1::SessionRequest request;
    request.mutable_open()->set_protocol_version(1);
    request.mutable_open()->set_resume_token(resume_token);
    stream->Write(request);
    const bool got = stream->Read(event);
    stream->WritesDone();
    v1::SessionEvent more;
    while (stream->Read(&more)) {
    }
    return got ? grpc::Status::OK : stream->Finish();
  };
  v1::SessionEvent event;
  ASSERT_TRUE(open(token, &event).ok());
  EXPECT_EQ(event.opened().session_token(), token);
  EXPECT_NE(event.opened().boot_id(), client.opened().boot_id());
  ASSERT_TRUE(daemon.AwaitOutput("event=session_ended session=test#1"))
      << "the end of the stream is that of the session again";
  EXPECT_TRUE(Failed(open(token, &event), grpc::StatusCode::NOT_FOUND, "open.resume_token"));
}

TEST_F(RestartTest, SighupIsARestartWithoutLoss) {
  Daemon daemon(Arguments());
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  LocalClient client(endpoint());
  const pid_t before = daemon.WorkerPid();
  daemon.Signal(SIGHUP);
  ASSERT_TRUE(daemon.AwaitMore(kReady)) << daemon.output();
  EXPECT_NE(daemon.WorkerPid(), before);
  EXPECT_EQ(client.page().boot_word, 0u);
  BrokerConnection next(broker_path());
  EXPECT_EQ(next.Call(Resume(client.hello().session_token)).status, 0u);
  EXPECT_THAT(daemon.output(), HasSubstr("event=stopped"));
  EXPECT_THAT(daemon.output(), Not(HasSubstr("level=error")));
}

TEST_F(RestartTest, AWorkerThatStandsStillIsReplaced) {
  Daemon daemon(Arguments({"--watchdog-timeout", "2s"}));
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  LocalClient client(endpoint());
  KillWorker(daemon, SIGSTOP);
  ASSERT_TRUE(daemon.AwaitMore("event=worker_killed")) << daemon.output();
  ASSERT_TRUE(daemon.AwaitMore(kReady));
  EXPECT_EQ(client.page().boot_word, 0u);
}

TEST_F(RestartTest, TheWorkerEndsWithAKilledSupervisor) {
  Daemon daemon(Arguments());
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  daemon.Signal(SIGKILL);
  EXPECT_EQ(daemon.Wait(), -SIGKILL) << "its output ends when the worker has ended";
  Daemon next(Arguments());
  EXPECT_TRUE(next.AwaitOutput(kReady)) << next.output();
}

TEST_F(RestartTest, AnotherSupervisorTakesOverOnTheSameSocket) {
  Daemon old_daemon(Arguments());
  ASSERT_TRUE(old_daemon.AwaitOutput(kReady));
  LocalClient client(endpoint());
  Daemon new_daemon(Arguments({"--take-over"}));
  ASSERT_TRUE(new_daemon.AwaitOutput(kReady)) << new_daemon.output();
  EXPECT_EQ(old_daemon.Wait(), 0) << old_daemon.output();
  EXPECT_EQ(client.page().boot_word, 0u);
  BrokerConnection next(broker_path());
  EXPECT_EQ(next.Call(Resume(client.hello().session_token)).status, 0u);
  new_daemon.Signal(SIGTERM);
  EXPECT_EQ(new_daemon.Wait(), 0);
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

TEST_F(RestartTest, WithNobodyThereTakeOverStartsEmpty) {
  Daemon daemon(Arguments({"--take-over"}));
  EXPECT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
}

TEST_F(RestartTest, WithoutASupervisorNothingIsKept) {
  Daemon daemon(Arguments({"--supervise", "false"}));
  ASSERT_TRUE(daemon.AwaitOutput(kReady));
  EXPECT_EQ(daemon.WorkerPid(), daemon.pid());
  LocalClient client(endpoint());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
  EXPECT_EQ(client.page().boot_word, 0u);
  EXPECT_THAT(daemon.output(), HasSubstr("event=session_ended"));
}

TEST_F(RestartTest, MemoryInFilesOutlivesAllProcesses) {
  const std::string pools = "/dev/shm/" + directory_.filename().string();
  std::filesystem::create_directory(pools);
  std::string token;
  {
    Daemon daemon(Arguments({"--pool-directory", pools}));
    ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
    TestClient client(endpoint());
    token = client.token();
    daemon.Signal(SIGKILL);
    daemon.Wait();
  }
  Daemon daemon(Arguments({"--pool-directory", pools}));
  ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
  EXPECT_TRUE(Use(token).ok());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
  std::filesystem::remove_all(pools);
}

// The bytes of the files of a directory, by name.
std::map<std::string, std::string> BytesOf(const std::string& directory) {
  std::map<std::string, std::string> bytes;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    std::ifstream file(entry.path(), std::ios::binary);
    bytes[entry.path().filename()].assign(std::istreambuf_iterator<char>(file), {});
  }
  return bytes;
}

TEST_F(RestartTest, MemoryInFilesOfAnotherLayoutIsRefusedAndStays) {
  const std::string pools = "/dev/shm/" + directory_.filename().string();
  std::filesystem::create_directory(pools);
  std::string token;
  {
    Daemon daemon(Arguments({"--pool-directory", pools}));
    ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
    TestClient client(endpoint());
    token = client.token();
    ASSERT_TRUE(Use(token).ok());
    daemon.Signal(SIGKILL);
    daemon.Wait();
  }
  // As if the worker that wrote them had known the layout before this one.
  constexpr std::streamoff kVersionsOffset =
      56;  // in the header of kvstore/records/root_records.cc
  const auto write_layout = [&pools](uint32_t layout_version) {
    const uint64_t version = uint64_t{kvstore::kRecordVersion} << 32 | layout_version;
    const uint64_t words[2] = {version, ~version};
    std::fstream file(pools + "/records", std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(kVersionsOffset);
    file.write(reinterpret_cast<const char*>(words), sizeof(words));
  };
  write_layout(kvstore::kOldestExtentVersion - 1);
  const auto before = BytesOf(pools);
  EXPECT_GE(before.size(), 3u);  // the records of the store, a pool and its records
  {
    Daemon daemon(Arguments({"--pool-directory", pools, "--max-failed-recoveries", "1"}));
    // A supervisor drops the files after one failed recovery here; a refusal must not count as one.
    ASSERT_TRUE(daemon.AwaitOutput(" start=2 ")) << daemon.output();
    daemon.Signal(SIGTERM);
    daemon.Wait();
    EXPECT_THAT(daemon.output(), HasSubstr("event=configuration_refused"));
    EXPECT_THAT(daemon.output(), Not(HasSubstr("event=recoveries_failed")));
    EXPECT_THAT(daemon.output(), HasSubstr("exit 2"));
    EXPECT_THAT(daemon.output(),
                HasSubstr(absl::StrCat("have layout_version ", kvstore::kOldestExtentVersion - 1)));
    EXPECT_THAT(daemon.output(),
                HasSubstr(absl::StrCat("reads layout_version ", kvstore::kLayoutVersion)));
  }
  EXPECT_TRUE(BytesOf(pools) == before);
  write_layout(kvstore::kLayoutVersion);
  Daemon daemon(Arguments({"--pool-directory", pools}));
  ASSERT_TRUE(daemon.AwaitOutput(kReady)) << daemon.output();
  EXPECT_TRUE(Use(token).ok());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
  std::filesystem::remove_all(pools);
}

}  // namespace
}  // namespace pqcached::service
