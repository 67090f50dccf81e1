// Fuzz target: messages between a supervisor, its worker and its successor. An input sends datagrams
// to a notify socket, with descriptors, and answers a take-over. What comes out is what was sent,
// and no descriptor is left open.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <bitset>
#include <filesystem>
#include <memory>
#include <set>

#include "absl/strings/str_split.h"
#include "service/supervise/kept_sessions.h"
#include "service/supervise/notify.h"
#include "service/supervise/notify_socket.h"
#include "service/supervise/take_over.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/supervise_peer.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using service::Notification;
using service::Notifier;
using service::NotifySocket;

constexpr size_t kMaxActions = 6;
constexpr size_t kMaxDatagramBytes = 4096;  // of NotifySocket
constexpr size_t kMaxDescriptors = 16;      // of NotifySocket
constexpr size_t kFirstDescriptors = 64;
constexpr absl::Duration kPatience = absl::Seconds(20);

// Returns which of the first descriptors of this process are open.
std::bitset<kFirstDescriptors> OpenDescriptors() {
  std::bitset<kFirstDescriptors> open;
  for (size_t i = 0; i < kFirstDescriptors; ++i) {
    open[i] = fcntl(static_cast<int>(i), F_GETFD) >= 0;
  }
  return open;
}

class Supervision {
 public:
  Supervision() {
    std::string path = (std::filesystem::temp_directory_path() / "pqcached-fuzz-XXXXXX").string();
    folder_ = mkdtemp(path.data());
    socket_ = *NotifySocket::Bind(folder_ / "notify");
    notifier_ = std::make_unique<Notifier>(Notifier::Options{.socket = socket_->path()});
    peer_ = std::make_unique<SupervisePeer>(folder_ / "take-over");
  }
  ~Supervision() {
    peer_.reset();
    socket_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Run(Bytes bytes) {
    const std::bitset<kFirstDescriptors> open = OpenDescriptors();
    for (size_t i = 0; i < kMaxActions && !bytes.empty(); ++i) Act(bytes);
    if (OpenDescriptors() != open) Found("a descriptor is left open");
  }
  bool worn() const { return false; }

 private:
  void Act(Bytes& bytes) {
    switch (bytes.Below(4)) {
      case 0:
        return SendDatagram(bytes);
      case 1:
        return Forward(bytes);
      case 2:
        return TakeOver(bytes);
      default:
        return ReadNames(bytes);
    }
  }

  // A datagram of the input, with descriptors.
  void SendDatagram(Bytes& bytes) {
    const size_t count = bytes.Below(kMaxDescriptors + 3);
    std::string text = bytes.Text(bytes.Byte());
    if (bytes.Byte() == 255) text.resize(kMaxDatagramBytes + 1, '=');
    SupervisePeer::Send(peer_->sender(), socket_->path(), text, count);
    std::optional<Notification> message = socket_->Receive();
    const bool is_whole = text.size() <= kMaxDatagramBytes && count <= kMaxDescriptors;
    if (message.has_value() != is_whole)
      Found("a datagram that is whole is skipped, or another one");
    if (!is_whole) return;
    if (message->descriptors.size() != count || message->pid != getpid()) {
      Found("a datagram with other descriptors, or of another process");
    }
    std::map<std::string, std::string> fields;
    for (const std::string& line : std::vector<std::string>(absl::StrSplit(text, '\n'))) {
      const size_t equals = line.find('=');
      fields[line.substr(0, equals)] = equals == line.npos ? "" : line.substr(equals + 1);
    }
    if (message->fields != fields) Found("a datagram with other fields");
  }

  // A name that may be kept arrives as it is, and adds no line.
  void Forward(Bytes& bytes) {
    const std::string name = bytes.Text(bytes.Byte());
    const absl::Status sent = notifier_->Forward(name, STDIN_FILENO);
    if (sent.ok() != kvstore::IsKeeperName(name)) Found("a name is kept wrongly: " + name);
    if (!sent.ok()) return;
    std::optional<Notification> message = socket_->Receive();
    if (!message || !message->Has("FDSTORE", "1") || !message->Has("FDNAME", name) ||
        message->fields.size() != 3 || message->descriptors.size() != 1) {
      Found("a kept descriptor does not arrive");
    }
    if (!notifier_->Take(name).valid() || !notifier_->Release(name).ok()) Found("it is not kept");
    message = socket_->Receive();
    if (!message || !message->Has("FDSTOREREMOVE", "1") || !message->Has("FDNAME", name)) {
      Found("a release does not arrive");
    }
    uint64_t number = 0;
    service::SessionNumberOf(name, number);
  }

  // The predecessor sends what the input says, and may end without saying that it is done.
  void TakeOver(Bytes& bytes) {
    std::vector<SupervisePeer::Message> answer;
    std::set<std::string> expected;
    bool is_done = false;
    for (size_t count = bytes.Below(5); count > 0; --count) {
      const uint8_t kind = bytes.Byte();
      SupervisePeer::Message message = {.text = bytes.Text(1 + bytes.Byte()),
                                        .descriptors = size_t{kind} / 4 % 4};
      if (kind % 4 == 0) message.text = "=done";
      if (kind % 4 == 1) message.text = service::SocketName("boot", kind);
      if (message.text.empty()) break;  // an empty message is the end
      if (message.text == "=done") is_done = true;
      const bool is_kept = kvstore::IsKeeperName(message.text) && message.descriptors > 0;
      if (is_kept) expected.insert(message.text);
      answer.push_back(std::move(message));
    }
    peer_->Answer(std::move(answer));
    const auto kept = service::TakeOver(peer_->path(), kPatience);
    peer_->AwaitEnd();
    if (kept.ok() != is_done) Found("a take-over that was " + kept.status().ToString());
    if (!kept.ok()) return;
    std::set<std::string> names;
    for (const auto& [name, descriptor] : *kept) {
      if (fcntl(descriptor.get(), F_GETFD) != FD_CLOEXEC) Found("a descriptor that is inherited");
      names.insert(name);
    }
    if (names != expected) Found("other descriptors were taken over");
  }

  // The variables that a supervisor sets for its worker.
  void ReadNames(Bytes& bytes) {
    const std::string count = bytes.Text(bytes.Below(12));
    const std::string watchdog = bytes.Text(bytes.Below(24));
    const std::string socket = bytes.Byte() % 2 == 0 ? socket_->path() : bytes.Text(120);
    const auto environment = [&](const char* name) -> const char* {
      const std::string_view wanted(name);
      if (wanted == "NOTIFY_SOCKET") return socket.c_str();
      if (wanted == "LISTEN_FDS") return count.c_str();
      if (wanted == "LISTEN_PID") return "1";  // the descriptors of this process are its own
      if (wanted == "WATCHDOG_USEC") return watchdog.c_str();
      return nullptr;
    };
    const auto notifier = Notifier::FromEnvironment(environment);
    if (notifier.ok() && *notifier != nullptr && !(*notifier)->Names().empty()) {
      Found("descriptors of another process are taken");
    }
    if (service::WatchdogTimeout(environment) < absl::ZeroDuration()) Found("a negative time");
  }

  std::filesystem::path folder_;
  std::unique_ptr<NotifySocket> socket_;
  std::unique_ptr<Notifier> notifier_;
  std::unique_ptr<SupervisePeer> peer_;
};

}  // namespace

std::vector<std::string> Seeds() {
  const std::string datagram =
      std::string("\0\1\x10", 3) + "FDSTORE=1\nFDNAME" + std::string(1, '\0');
  const std::string keep = std::string("\1\6", 2) + "pool-1";
  return {datagram,
          keep,
          std::string("\2\3\5\0\5\0\0\0", 8),
          std::string("\2\2\6\4", 4) + "recor" + std::string("\0\0", 2),
          std::string("\2\1\11\0", 4) + "s",
          std::string("\3\2", 2) + "12" + std::string("\4", 1) + "1000" + std::string(1, '\0'),
          datagram + keep + datagram};
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return pqcached::fuzz::RunOn<pqcached::fuzz::Supervision>(data, size);
}
