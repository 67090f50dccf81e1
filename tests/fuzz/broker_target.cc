// Fuzz target: the broker's protocol. An input opens connections to a broker on a unix socket and sends
// requests on them: whole ones, changed ones, bytes that are none, in pieces, with descriptors, one after
// the other or without waiting for answers, and ends connections at any point.
//
// Every request that came whole must be answered, or its connection closed; an answer must fit the
// protocol, and what it brings must be as large as it says. Afterwards no session may be left.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <thread>

#include "service/base/log.h"
#include "service/handlers/rpc_stats.h"
#include "service/session/broker.h"
#include "service/session/sessions.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/target.h"
#include "tests/service/session/broker_fixture.h"

namespace pqcached::fuzz {
namespace {

using kvstore::BrokerCall;
using kvstore::BrokerReply;
using kvstore::BrokerRequest;
using service::BrokerConnection;

constexpr size_t kMaxActions = 16;
constexpr size_t kConnections = 3;
constexpr size_t kMaxDescriptors = 8;
constexpr int kInputsPerSidecar = 2000;
constexpr auto kPatience = std::chrono::seconds(20);

enum class Action : uint8_t { kRequest, kRawBytes, kReceive, kClose, kShutdown, kCount };

// One connection, and how much of its requests has been sent.
struct Peer {
  explicit Peer(const std::string& path) : connection(path) {
    const timeval patience = {.tv_sec = kPatience.count(), .tv_usec = 0};
    setsockopt(connection.socket_descriptor(), SOL_SOCKET, SO_RCVTIMEO, &patience,
               sizeof(patience));
    setsockopt(connection.socket_descriptor(), SOL_SOCKET, SO_SNDTIMEO, &patience,
               sizeof(patience));
  }

  BrokerConnection connection;
  size_t sent_bytes = 0;
  size_t received = 0;  // answers
};

template <size_t kSize>
bool Terminated(const char (&text)[kSize]) {
  return memchr(text, '\0', kSize) != nullptr;
}

void CheckReply(const BrokerReply& reply, const kvstore::FileDescriptor& descriptor) {
  if (reply.magic != BrokerReply::kMagic || reply.version != kvstore::kBrokerVersion) {
    Found("an answer of another kind");
  }
  if (!Terminated(reply.message) || !Terminated(reply.session_token) ||
      !Terminated(reply.boot_id) || !Terminated(reply.tenant)) {
    Found("a text without an end");
  }
  if ((reply.status == 0) != descriptor.valid()) Found("a descriptor with a failure, or none");
  if (reply.status == 0) {
    struct stat status = {};
    if (fstat(descriptor.get(), &status) != 0 ||
        static_cast<uint64_t>(status.st_size) < reply.size_bytes || reply.size_bytes == 0) {
      Found("memory of another size than it says");
    }
  }
  if (reply.status == static_cast<uint32_t>(absl::StatusCode::kInternal)) Found(reply.message);
}

class Sidecar {
 public:
  Sidecar() {
    std::string path = (std::filesystem::temp_directory_path() / "pqcached-fuzz-XXXXXX").string();
    folder_ = mkdtemp(path.data());
    service::Config config;
    config.listen = "unix://" + (folder_ / "s").string();
    config.max_pool_bytes = size_t{64} << 20;
    config.max_sessions = 8;
    config.call_threads = 1;
    config.threads = 1;
    config.shutdown_timeout = absl::Seconds(5);
    config.log_level = "off";
    path_ = (folder_ / "s").string() + kvstore::kBrokerSuffix;
    log_ = *service::Log::Open(config.log_level, config.log_file);
    store_ = *kvstore::Store::Create(StoreOptionsOf(config));
    kvstore::CacheSpec spec;
    spec.name = "cache";
    spec.model_fingerprint = "model";
    spec.capacity_bytes = size_t{1} << 20;
    kvstore::LayerGroup group;
    group.layers = {0};
    group.kv_heads = group.query_heads = 1;
    group.key_dim = group.value_dim = 32;
    spec.groups.push_back(group);
    const auto cache = store_->OpenCache("default", spec);
    if (!cache.ok()) Found(std::string(cache.status().message()));
    cache_id_ = cache->cache_id;
    server_ = *service::Server::Start(config, *store_, *log_);
  }

  ~Sidecar() {
    server_.reset();
    store_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Run(Bytes bytes) {
    ++inputs_;
    std::array<std::unique_ptr<Peer>, kConnections> peers;
    for (size_t i = 0; i < kMaxActions && !bytes.empty(); ++i) {
      Act(peers[bytes.Below(kConnections)], bytes);
    }
    for (auto& peer : peers) {
      if (peer != nullptr) Settle(*peer);
      peer.reset();
    }
    ExpectNothingIsLeft();
  }

  bool worn() const { return inputs_ >= kInputsPerSidecar; }

 private:
  void Act(std::unique_ptr<Peer>& peer, Bytes& bytes) {
    if (peer == nullptr) {
      peer = std::make_unique<Peer>(path_);
      if (!peer->connection.connected()) Found("no connection");
    }
    switch (static_cast<Action>(bytes.Below(static_cast<size_t>(Action::kCount)))) {
      case Action::kRequest: {
        const BrokerRequest request = Request(bytes);
        const size_t cut = bytes.Byte();  // in two pieces
        const size_t first = std::min(cut == 0 ? sizeof(request) : cut, sizeof(request));
        const auto* data = reinterpret_cast<const char*>(&request);
        Send(*peer, {data, first}, bytes.Below(kMaxDescriptors));
        if (bytes.Byte() % 8 != 7) Send(*peer, {data + first, sizeof(request) - first}, 0);
        return;
      }
      case Action::kRawBytes:
        Send(*peer, bytes.Text(bytes.Byte()), bytes.Below(kMaxDescriptors));
        return;
      case Action::kReceive:
        if (peer->sent_bytes / sizeof(BrokerRequest) > peer->received) Receive(*peer);
        return;
      case Action::kClose:
        peer.reset();
        return;
      case Action::kShutdown:
        shutdown(peer->connection.socket_descriptor(), SHUT_WR);
        return;
      case Action::kCount:
        return;
    }
  }

  BrokerRequest Request(Bytes& bytes) {
    BrokerRequest request = BrokerConnection::Hello("", "fuzz");
    request.call = static_cast<BrokerCall>(1 + bytes.Below(4));
    request.cache_id = cache_id_;
    request.slot_bytes = uint64_t{1} << 20;
    request.slot_count = 1;
    switch (bytes.Below(8)) {
      case 1:
        request.cache_id = bytes.Number();
        break;
      case 2:
        request.slot_bytes = bytes.Number();
        request.slot_count = static_cast<uint32_t>(bytes.Number());
        break;
      case 3:
        bytes.Fill(request.tenant, sizeof(request.tenant));
        break;
      case 4:
        bytes.Fill(request.client_name, sizeof(request.client_name));
        break;
      case 5: {
        const size_t begin = bytes.Below(sizeof(request));
        bytes.Fill(reinterpret_cast<char*>(&request) + begin,
                   std::min<size_t>(sizeof(request) - begin, 1 + bytes.Below(8)));
        break;
      }
      default:
        break;
    }
    return request;
  }

  // A connection that the broker has closed takes nothing more, which is no finding.
  void Send(Peer& peer, std::string_view data, size_t descriptor_count) {
    if (data.empty()) return;
    std::vector<int> descriptors(descriptor_count, peer.connection.socket_descriptor());
    std::vector<char> control(CMSG_SPACE(descriptor_count * sizeof(int)));
    iovec part = {const_cast<char*>(data.data()), data.size()};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (descriptor_count > 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(descriptor_count * sizeof(int));
      std::memcpy(CMSG_DATA(header), descriptors.data(), descriptor_count * sizeof(int));
    }
    const ssize_t sent = sendmsg(peer.connection.socket_descriptor(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EAGAIN) Found("the broker does not read");
    if (sent > 0) peer.sent_bytes += static_cast<size_t>(sent);
  }

  // False: the broker has closed the connection.
  bool Receive(Peer& peer) {
    BrokerReply reply;
    kvstore::FileDescriptor descriptor;
    errno = 0;
    if (!peer.connection.Receive(reply, &descriptor)) {
      if (errno == EAGAIN) Found("a request without an answer");
      return false;
    }
    CheckReply(reply, descriptor);
    ++peer.received;
    return true;
  }

  void Settle(Peer& peer) {
    while (peer.sent_bytes / sizeof(BrokerRequest) > peer.received && Receive(peer)) {
    }
  }

  void ExpectNothingIsLeft() {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (store_->Stats().staging_bytes != 0) {
      if (std::chrono::steady_clock::now() > until) Found("staging of a session that has ended");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    // Were a session left, the sidecar would soon take no more of them.
    for (;;) {
      BrokerConnection connection(path_);
      const BrokerReply reply = connection.Call(BrokerConnection::Hello("", "last"));
      if (reply.status == 0) return;
      if (std::chrono::steady_clock::now() > until) Found(std::string("left: ") + reply.message);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::filesystem::path folder_;
  std::string path_;
  std::unique_ptr<service::Log> log_;
  std::unique_ptr<kvstore::Store> store_;
  std::unique_ptr<service::Server> server_;
  uint64_t cache_id_ = 0;
  int inputs_ = 0;
};

}  // namespace

std::vector<std::string> Seeds() {
  const auto bytes = [](std::initializer_list<int> numbers) {
    std::string text;
    for (const int number : numbers) text += static_cast<char>(number);
    return text;
  };
  // connection, action, call - 1, change, cut, descriptors, whole
  const std::string hello = bytes({0, 0, 0, 0, 0, 0, 0});
  const std::string pool = bytes({0, 0, 1, 0, 0, 0, 0});
  const std::string staging = bytes({0, 0, 2, 0, 0, 0, 0});
  const std::string receive = bytes({0, 2});
  return {hello + receive + pool + receive + staging + receive,
          hello + pool + staging + staging,
          bytes({0, 0, 0, 0, 100, 3, 0}) + bytes({1, 0, 0, 0, 17, 0, 7}) + bytes({1, 3}) + receive,
          hello + bytes({0, 4}) + receive,
          hello + bytes({1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0}) + pool + receive,
          bytes({0, 1, 20}) + std::string(20, 'x') + bytes({1}) + receive,
          hello + bytes({0, 0, 2, 2, 25, 3, 0, 0, 0}) + receive,
          pool + receive + hello + receive,
          bytes({0, 0, 0, 3}) + std::string(72, 'a') + bytes({0, 0, 0}) + receive};
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return pqcached::fuzz::RunOn<pqcached::fuzz::Sidecar>(data, size);
}
