// Fuzz target: the broker's protocol. An input opens connections to a broker on a unix socket and sends
// requests on them: whole ones, changed ones, bytes that are none, in pieces, with descriptors, one after
// the other or without waiting for answers, and ends connections at any point.
//
// Every request that came whole must be answered, or its connection closed; an answer must fit the
// protocol, and what it brings must be as large as it says. Sessions outlive a worker in a keeper,
// which may be full; the next worker gives each to its own client only. Afterwards no session may
// be left, and nothing of one with the keeper.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <thread>

#include "service/base/executor.h"
#include "service/base/log.h"
#include "service/session/broker.h"
#include "service/session/sessions.h"
#include "service/supervise/kept_sessions.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/target.h"
#include "tests/kvstore/memory_keeper.h"
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

enum class Action : uint8_t { kRequest, kRawBytes, kReceive, kClose, kShutdown, kRestart, kCount };

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

// The parts of a worker that open sessions of local clients.
struct Worker {
  Worker(const service::Config& with, const std::string& boot_id, kvstore::Store& store,
         service::Log& log, kvstore::DescriptorKeeper& keeper)
      : sessions(with.max_sessions),
        cleanups({.threads = 1, .queue = {.max_waiting = 16}}),
        detached({with, store, sessions, cleanups, log, {&keeper, &keeper}}) {
    detached.Start();
    broker = *service::Broker::Start(
        {with, boot_id, store, sessions, cleanups, log, detached, {&keeper, &keeper}},
        SocketPath(with));
  }

  service::Sessions sessions;
  service::Executor cleanups;
  service::DetachedSessions detached;
  std::unique_ptr<service::Broker> broker;
};

class Sidecar {
 public:
  Sidecar() {
    std::string path = (std::filesystem::temp_directory_path() / "pqcached-fuzz-XXXXXX").string();
    folder_ = mkdtemp(path.data());
    config_.listen = "unix://" + (folder_ / "s").string();
    config_.max_pool_bytes = size_t{64} << 20;
    config_.max_sessions = 8;
    config_.threads = 1;
    config_.resume_timeout = absl::Milliseconds(5);
    config_.log_level = "off";
    path_ = service::BrokerPath(SocketPath(config_));
    log_ = *service::Log::Open(config_.log_level, config_.log_file);
    MakeWorker();
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
  }

  ~Sidecar() {
    worker_.reset();
    store_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Run(Bytes bytes) {
    ++inputs_;
    // Some inputs have a keeper that is soon full.
    const uint8_t room = bytes.Byte();
    keeper_.max_kept = room >= 240 ? keeper_.Names().size() + room % 4 : 1000;
    std::array<std::unique_ptr<Peer>, kConnections> peers;
    for (size_t i = 0; i < kMaxActions && !bytes.empty(); ++i) {
      Act(peers[bytes.Below(kConnections)], bytes);
    }
    for (auto& peer : peers) {
      if (peer != nullptr) Settle(*peer);
      peer.reset();
    }
    tenants_.clear();
    ExpectNothingIsLeft();
  }

  bool worn() const { return inputs_ >= kInputsPerSidecar; }

 private:
  void MakeWorker() {
    kvstore::StoreOptions options = StoreOptionsOf(config_);
    options.keeper = &keeper_;
    options.memory_root = "/proc/self/no-folder";  // the machine's memory is not read
    store_ = *kvstore::Store::Create(options);
    worker_ = std::make_unique<Worker>(config_, "boot" + std::to_string(++boots_), *store_, *log_,
                                       keeper_);
  }

  // The worker ends, and leaves its sessions to the next one.
  void Restart() {
    worker_->sessions.LeaveToNextWorker();
    worker_.reset();
    store_.reset();
    keeper_.max_kept = 1000;
    MakeWorker();
  }

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
      case Action::kRestart:
        if (bytes.Byte() % 4 == 0) Restart();  // slow
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
      case 6:  // resumes a session that there is or was
        request.call = BrokerCall::kResume;
        bytes.Fill(request.resume_token, bytes.Below(4));
        if (!tenants_.empty()) {
          auto known = tenants_.begin();
          std::advance(known, static_cast<ptrdiff_t>(bytes.Below(tenants_.size())));
          known->first.copy(request.resume_token, sizeof(request.resume_token) - 1);
        }
        break;
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
    CheckSession(reply);
    ++peer.received;
    return true;
  }

  // A token belongs to one session; who resumes it gets the tenant of the session.
  void CheckSession(const BrokerReply& reply) {
    const std::string token = reply.session_token;
    if (reply.status != 0 || token.empty()) return;
    const auto [known, is_new] = tenants_.emplace(token, reply.tenant);
    if (reply.call == BrokerCall::kHello && !is_new) Found("a token is given twice");
    if (reply.call == BrokerCall::kResume && (is_new || known->second != reply.tenant)) {
      Found("a session is resumed as another one");
    }
  }

  void Settle(Peer& peer) {
    while (peer.sent_bytes / sizeof(BrokerRequest) > peer.received && Receive(peer)) {
    }
  }

  std::string Left() const {
    for (const std::string& name : keeper_.Names()) {
      if (service::IsControlName(name) || service::IsSocketName(name)) return name;
    }
    if (worker_->sessions.count() != 0) return "a session";
    return store_->Stats(kvstore::kAllTenants).staging_bytes != 0 ? "staging" : "";
  }

  void ExpectNothingIsLeft() {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    for (std::string left = Left(); !left.empty(); left = Left()) {
      if (std::chrono::steady_clock::now() > until) Found("left: " + left);
      std::this_thread::yield();
    }
  }

  std::filesystem::path folder_;
  std::string path_;
  service::Config config_;
  kvstore::testing::MemoryKeeper keeper_;
  std::unique_ptr<service::Log> log_;
  std::unique_ptr<kvstore::Store> store_;
  std::unique_ptr<Worker> worker_;
  std::map<std::string, std::string> tenants_;  // by the tokens of an input's sessions
  uint64_t cache_id_ = 0;
  int boots_ = 0;
  int inputs_ = 0;
};

}  // namespace

std::vector<std::string> Seeds() {
  const auto bytes = [](std::initializer_list<int> numbers) {
    std::string text;
    for (const int number : numbers) text += static_cast<char>(number);
    return text;
  };
  // Room of the keeper; then connection, action, call - 1, change, cut, descriptors, whole.
  const std::string hello = bytes({0, 0, 0, 0, 0, 0, 0});
  const std::string pool = bytes({0, 0, 1, 0, 0, 0, 0});
  const std::string staging = bytes({0, 0, 2, 0, 0, 0, 0});
  const std::string receive = bytes({0, 2});
  const std::string restart = bytes({2, 5, 0});
  const std::string resume = bytes({1, 0, 3, 6, 0, 0, 0, 0, 0});
  std::vector<std::string> seeds = {
      hello + receive + pool + receive + staging + receive,
      hello + pool + staging + staging,
      bytes({0, 0, 0, 0, 100, 3, 0}) + bytes({1, 0, 0, 0, 17, 0, 7}) + bytes({1, 3}) + receive,
      hello + bytes({0, 4}) + receive,
      hello + bytes({1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0}) + pool + receive,
      bytes({0, 1, 20}) + std::string(20, 'x') + bytes({1}) + receive,
      hello + bytes({0, 0, 2, 2, 25, 3, 0, 0, 0}) + receive,
      pool + receive + hello + receive,
      bytes({0, 0, 0, 3}) + std::string(72, 'a') + bytes({0, 0, 0}) + receive,
      hello + receive + restart + resume + bytes({1, 2}) + receive,
      hello + receive + restart + bytes({0, 3}) + resume + bytes({1, 2}),
      hello + receive + resume + bytes({1, 2})};
  for (std::string& seed : seeds) seed.insert(seed.begin(), '\0');
  seeds.push_back('\xf0' + hello + receive);
  seeds.push_back('\xf1' + hello + receive + pool + receive);
  return seeds;
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return pqcached::fuzz::RunOn<pqcached::fuzz::Sidecar>(data, size);
}
