// The connection to the broker: what a sidecar may answer, or not.
#include "client/local/broker.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace pqcached::client {
namespace {

using kvstore::BrokerCall;
using kvstore::BrokerReply;
using kvstore::BrokerRequest;

// Listens in a folder of its own and serves one connection on a thread.
class FakeBroker {
 public:
  explicit FakeBroker(std::function<void(int)> serve) {
    char folder[] = "/tmp/pqcached-broker-XXXXXX";
    if (!mkdtemp(folder)) throw std::runtime_error("mkdtemp");
    folder_ = folder;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, (path() + kvstore::kBrokerSuffix).c_str());
    listener_ = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
        listen(listener_, 1) != 0) {
      throw std::runtime_error("bind");
    }
    thread_ = std::thread([this, serve = std::move(serve)] {
      const int connection = accept(listener_, nullptr, nullptr);
      serve(connection);
      close(connection);
    });
  }
  ~FakeBroker() {
    thread_.join();
    close(listener_);
    unlink((path() + kvstore::kBrokerSuffix).c_str());
    rmdir(folder_.c_str());
  }

  std::string path() const { return folder_ + "/s"; }

 private:
  std::string folder_;
  int listener_ = -1;
  std::thread thread_;
};

BrokerRequest Receive(int connection) {
  BrokerRequest request;
  EXPECT_EQ(recv(connection, &request, sizeof(request), MSG_WAITALL),
            static_cast<ssize_t>(sizeof(request)));
  return request;
}

void Send(int connection, const BrokerReply& reply, std::vector<int> descriptors) {
  iovec part{.iov_base = const_cast<BrokerReply*>(&reply), .iov_len = sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  }
  EXPECT_EQ(sendmsg(connection, &message, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(reply)));
}

int Memory(size_t bytes) {
  const int descriptor = memfd_create("test", MFD_CLOEXEC);
  EXPECT_EQ(ftruncate(descriptor, static_cast<off_t>(bytes)), 0);
  return descriptor;
}

BrokerReply Hello(size_t bytes) {
  BrokerReply reply;
  std::strcpy(reply.session_token, "token");
  std::strcpy(reply.boot_id, "boot");
  reply.boot_word = 7;
  reply.size_bytes = bytes;
  return reply;
}

pqc_status Open(const std::string& path, std::unique_ptr<Broker>* broker,
                uint32_t timeout_ms = 10000) {
  std::shared_ptr<Mapping> control;
  return Broker::Open(
      {.socket_path = path, .tenant = "tenant", .client_name = "test", .timeout_ms = timeout_ms},
      broker, &control);
}

// What Open makes of one reply to kHello.
pqc_status OpenWith(const BrokerReply& reply, size_t memory_bytes) {
  FakeBroker fake([&](int connection) {
    Receive(connection);
    const int memory = Memory(memory_bytes);
    Send(connection, reply, {memory});
    close(memory);
  });
  std::unique_ptr<Broker> broker;
  return Open(fake.path(), &broker);
}

TEST(BrokerTest, OpensASessionMapsPoolsAndSeesTheEnd) {
  int done[2];
  ASSERT_EQ(pipe(done), 0);
  FakeBroker fake([&](int connection) {
    const BrokerRequest hello = Receive(connection);
    EXPECT_EQ(hello.call, BrokerCall::kHello);
    EXPECT_STREQ(hello.tenant, "tenant");
    EXPECT_STREQ(hello.client_name, "test");
    const int control = Memory(4096);
    Send(connection, Hello(4096), {control});
    close(control);
    EXPECT_EQ(Receive(connection).cache_id, 11u);
    const int pool = Memory(1 << 20), more = Memory(1);
    EXPECT_EQ(pwrite(pool, "rows", 4, 4096), 4);
    BrokerReply reply;
    reply.call = BrokerCall::kOpenPool;
    reply.size_bytes = 1 << 20;
    Send(connection, reply, {pool, more});  // one too many is closed
    close(pool);
    close(more);
    char byte;
    EXPECT_EQ(read(done[0], &byte, 1), 1);
    close(done[0]);
  });
  std::unique_ptr<Broker> broker;
  ASSERT_EQ(Open(fake.path(), &broker), PQC_OK) << pqc_last_error();
  EXPECT_STREQ(broker->hello().session_token, "token");
  std::shared_ptr<Mapping> pool;
  ASSERT_EQ(broker->OpenPool(11, &pool), PQC_OK) << pqc_last_error();
  EXPECT_EQ(pool->size_bytes(), size_t{1} << 20);
  EXPECT_EQ(std::memcmp(pool->data() + 4096, "rows", 4), 0);
  EXPECT_FALSE(broker->WaitEnded(0));
  EXPECT_EQ(write(done[1], "x", 1), 1);
  EXPECT_TRUE(broker->WaitEnded(10000));
  EXPECT_EQ(broker->OpenPool(11, &pool), PQC_UNAVAILABLE);
  close(done[1]);
}

TEST(BrokerTest, WhereNobodyListensItIsUnavailable) {
  std::unique_ptr<Broker> broker;
  EXPECT_EQ(Open("/nonexistent/s", &broker), PQC_UNAVAILABLE);
  EXPECT_EQ(Open(std::string(200, 'x'), &broker), PQC_UNAVAILABLE);
}

TEST(BrokerTest, ARefusalBringsItsReason) {
  BrokerReply reply = Hello(4096);
  reply.status = PQC_RESOURCE_EXHAUSTED;
  std::strcpy(reply.message, "3 sessions are open");
  std::strcpy(reply.field, "max_sessions");
  reply.retry_ms = 1000;
  EXPECT_EQ(OpenWith(reply, 4096), PQC_RESOURCE_EXHAUSTED);
  EXPECT_STREQ(pqc_last_error(), "max_sessions: broker: 3 sessions are open");
  EXPECT_STREQ(pqc_last_error_field(), "max_sessions");
  EXPECT_EQ(pqc_last_error_retry_ms(), 1000u);
}

// A session counts as lost after PQC_FAILED_PRECONDITION, and this one can be resumed a moment later.
TEST(BrokerTest, AResumptionBeforeTheFormerConnectionHasEndedMayBeRepeated) {
  const auto resume = [](const BrokerReply& reply) {
    FakeBroker fake([&](int connection) {
      const BrokerRequest request = Receive(connection);
      EXPECT_EQ(request.call, BrokerCall::kResume);
      EXPECT_STREQ(request.resume_token, "token");
      Send(connection, reply, {});
    });
    std::unique_ptr<Broker> broker;
    std::shared_ptr<Mapping> control;
    return Broker::Open({.socket_path = fake.path(),
                         .tenant = "tenant",
                         .client_name = "test",
                         .resume_token = "token"},
                        &broker, &control);
  };
  BrokerReply reply;
  reply.call = BrokerCall::kResume;
  reply.status = PQC_FAILED_PRECONDITION;
  std::strcpy(reply.field, "resume_token");
  std::strcpy(reply.message, "the session's client is still connected");
  EXPECT_EQ(resume(reply), PQC_UNAVAILABLE);
  EXPECT_STREQ(pqc_last_error(), "resume_token: broker: the session's client is still connected");
  EXPECT_GT(pqc_last_error_retry_ms(), 0u);
  reply.version = kvstore::kBrokerVersion - 1;  // whatever the rest of the answer says
  EXPECT_EQ(resume(reply), PQC_FAILED_PRECONDITION);
  EXPECT_EQ(pqc_last_error_retry_ms(), 0u);
}

TEST(BrokerTest, AnswersThatDoNotFitAreRefused) {
  BrokerReply reply = Hello(4096);
  reply.version = kvstore::kBrokerVersion + 1;
  EXPECT_EQ(OpenWith(reply, 4096), PQC_FAILED_PRECONDITION);
  EXPECT_STREQ(pqc_last_error(), "broker: its protocol version is 4, this client's 3");
  reply = Hello(4096);
  reply.call = BrokerCall::kOpenPool;
  EXPECT_EQ(OpenWith(reply, 4096), PQC_INTERNAL);
  reply = Hello(4096);
  std::memset(reply.session_token, 'x', sizeof(reply.session_token));
  EXPECT_EQ(OpenWith(reply, 4096), PQC_INTERNAL);
  reply = Hello(4096);
  std::memset(reply.message, 'x', sizeof(reply.message));
  reply.status = 3;
  EXPECT_EQ(OpenWith(reply, 4096), PQC_INTERNAL);
  reply = Hello(4096);
  std::memset(reply.field, 'x', sizeof(reply.field));
  reply.status = 3;
  EXPECT_EQ(OpenWith(reply, 4096), PQC_INTERNAL);
}

// Its replies are shorter than this client's: a client that waits for the rest gets
// PQC_DEADLINE_EXCEEDED, because the connection stays open.
TEST(BrokerTest, ABrokerOfVersion1IsReportedWithBothVersionsAtOnce) {
  int done[2];
  ASSERT_EQ(pipe(done), 0);
  auto fake = std::make_unique<FakeBroker>([&](int connection) {
    Receive(connection);
    BrokerReply reply;
    reply.version = 1;
    reply.status = PQC_UNIMPLEMENTED;
    EXPECT_EQ(send(connection, &reply, kvstore::kBrokerReplyHeadBytes, MSG_NOSIGNAL),
              static_cast<ssize_t>(kvstore::kBrokerReplyHeadBytes));
    char byte;
    EXPECT_EQ(read(done[0], &byte, 1), 1);  // the connection stays open
  });
  std::unique_ptr<Broker> broker;
  EXPECT_EQ(Open(fake->path(), &broker, 2000), PQC_FAILED_PRECONDITION);
  EXPECT_STREQ(pqc_last_error(), "broker: its protocol version is 1, this client's 3");
  EXPECT_EQ(pqc_last_error_retry_ms(), 0u);
  EXPECT_EQ(write(done[1], "x", 1), 1);
  fake.reset();  // joins the thread that reads from the pipe
  close(done[0]);
  close(done[1]);
}

TEST(BrokerTest, MemoryThatIsShorterThanItsSizeIsNotMapped) {
  EXPECT_EQ(OpenWith(Hello(8192), 4096), PQC_INTERNAL);
  EXPECT_EQ(OpenWith(Hello(0), 4096), PQC_INTERNAL);
}

TEST(BrokerTest, AnAnswerWithoutDescriptorIsRefused) {
  FakeBroker fake([](int connection) {
    Receive(connection);
    Send(connection, Hello(4096), {});
  });
  std::unique_ptr<Broker> broker;
  EXPECT_EQ(Open(fake.path(), &broker), PQC_INTERNAL);
}

TEST(BrokerTest, ASilentBrokerEndsWithTheDeadline) {
  int done[2];
  ASSERT_EQ(pipe(done), 0);
  FakeBroker fake([&](int connection) {
    Receive(connection);
    char byte;
    EXPECT_EQ(read(done[0], &byte, 1), 1);
  });
  std::unique_ptr<Broker> broker;
  EXPECT_EQ(Open(fake.path(), &broker, 30), PQC_DEADLINE_EXCEEDED);
  EXPECT_EQ(write(done[1], "x", 1), 1);
}

// A worker that stood still answers late.
TEST(BrokerTest, ALateAnswerIsOfTheRequestThatAskedForIt) {
  int keep_going[2];
  ASSERT_EQ(pipe(keep_going), 0);
  const auto pool_reply = [](size_t bytes) {
    BrokerReply reply;
    reply.call = BrokerCall::kOpenPool;
    reply.size_bytes = bytes;
    return reply;
  };
  FakeBroker fake([&](int connection) {
    const auto answer = [&](const BrokerReply& reply) {
      const int memory = Memory(reply.size_bytes);
      Send(connection, reply, {memory});
      close(memory);
    };
    char byte;
    Receive(connection);
    answer(Hello(4096));
    EXPECT_EQ(Receive(connection).cache_id, 1u);
    EXPECT_EQ(read(keep_going[0], &byte, 1), 1);
    answer(pool_reply(8192));
    EXPECT_EQ(Receive(connection).cache_id, 2u);  // the first one was not sent again
    EXPECT_EQ(read(keep_going[0], &byte, 1), 1);
    answer(pool_reply(12288));
    EXPECT_EQ(Receive(connection).cache_id, 3u);
    answer(pool_reply(16384));
  });
  std::unique_ptr<Broker> broker;
  ASSERT_EQ(Open(fake.path(), &broker, 100), PQC_OK) << pqc_last_error();
  const auto open = [&](uint64_t cache_id, std::shared_ptr<Mapping>* pool) {
    pqc_status status = PQC_DEADLINE_EXCEEDED;
    for (int i = 0; i < 100 && status == PQC_DEADLINE_EXCEEDED; ++i) {
      status = broker->OpenPool(cache_id, pool);
    }
    return status;
  };
  std::shared_ptr<Mapping> pool;
  EXPECT_EQ(broker->OpenPool(1, &pool), PQC_DEADLINE_EXCEEDED);
  EXPECT_EQ(write(keep_going[1], "x", 1), 1);
  ASSERT_EQ(open(1, &pool), PQC_OK) << pqc_last_error();
  EXPECT_EQ(pool->size_bytes(), 8192u);
  // Another request comes first: then the late answer is nobody's.
  EXPECT_EQ(broker->OpenPool(2, &pool), PQC_DEADLINE_EXCEEDED);
  EXPECT_EQ(broker->OpenPool(3, &pool), PQC_DEADLINE_EXCEEDED);
  EXPECT_EQ(write(keep_going[1], "x", 1), 1);
  ASSERT_EQ(open(3, &pool), PQC_OK) << pqc_last_error();
  EXPECT_EQ(pool->size_bytes(), 16384u);
  close(keep_going[0]);
  close(keep_going[1]);
}

TEST(BrokerTest, ABrokerThatHangsUpInAnAnswerIsUnavailable) {
  FakeBroker fake([](int connection) {
    Receive(connection);
    EXPECT_EQ(send(connection, "PBRP", 4, MSG_NOSIGNAL), 4);
  });
  std::unique_ptr<Broker> broker;
  EXPECT_EQ(Open(fake.path(), &broker), PQC_UNAVAILABLE);
}

}  // namespace
}  // namespace pqcached::client
