// A client in a container: other namespaces, another user, no /proc and no file in common but the
// directory of the sockets.
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>

#include "tests/service/session/broker_fixture.h"
#include "tests/skip.h"

namespace pqcached::service {
namespace {

constexpr uid_t kInBackground = 65534;
constexpr char kNotPermitted[] = "not permitted: ";

// Both sides' ends of two pipes that carry texts with their length before them.
class TextPipe {
 public:
  TextPipe() { opened_ = pipe2(sink_and_window_, O_CLOEXEC) == 0; }
  ~TextPipe() {
    if (!opened_) return;
    close(sink_and_window_[0]);
    close(sink_and_window_[1]);
  }
  TextPipe(const TextPipe&) = delete;
  TextPipe& operator=(const TextPipe&) = delete;
  bool Write(const std::string& text) {
    const uint64_t size = text.size();
    if (write(sink_and_window_[1], &size, sizeof(size)) != sizeof(size)) return false;
    for (size_t sent = 0; sent < text.size();) {
      const ssize_t wrote = write(sink_and_window_[1], text.data() + sent, text.size() - sent);
      if (wrote <= 0) return false;
      sent += static_cast<size_t>(wrote);
    }
    return true;
  }
  std::string Read() {
    uint64_t size = 0;
    if (read(sink_and_window_[0], &size, sizeof(size)) != sizeof(size))
      return "the other side died";
    std::string text(size, '\0');
    for (size_t got = 0; got < size;) {
      const ssize_t received = read(sink_and_window_[0], text.data() + got, size - got);
      if (received <= 0) return "the other side died";
      got += static_cast<size_t>(received);
    }
    return text;
  }

 private:
  int sink_and_window_[2] = {};
  bool opened_ = false;
};

// Leaves everything but the directory of the sockets behind. Returns "" or what failed.
std::string EnterContainer(const std::string& sockets, const std::string& root) {
  const auto failed = [](const char* what) {
    return std::string(kNotPermitted) + what + ": " + std::strerror(errno);
  };
  if (unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET) != 0) {
    return failed("unshare");
  }
  if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return failed("private /");
  if (mount("tmpfs", root.c_str(), "tmpfs", 0, "size=64k") != 0) return failed("tmpfs");
  const std::string inside = root + "/run";
  if (mkdir(inside.c_str(), 0755) != 0) return failed("mkdir");
  if (mount(sockets.c_str(), inside.c_str(), nullptr, MS_BIND, nullptr) != 0) return failed("bind");
  // Not chroot: who is in one may make no user namespace.
  if (chdir(root.c_str()) != 0 || syscall(SYS_pivot_root, ".", ".") != 0 ||
      umount2(".", MNT_DETACH) != 0 || chdir("/") != 0) {
    return failed("pivot_root");
  }
  if (setgroups(0, nullptr) != 0 || setgid(kInBackground) != 0 || setuid(kInBackground) != 0) {
    return failed("setuid");
  }
  if (unshare(CLONE_NEWUSER) != 0) return failed("user namespace");
  return {};
}

// The client's side: a session, its words and a pool mapped, and rows read there. The image comes from
// outside, where gRPC runs.
std::string RunClient(uint64_t cache_id, TextPipe& to_parent, TextPipe& to_child) {
  BrokerConnection connection("/run/pqcached.sock.broker");
  if (!connection.connected()) return std::string("connect: ") + std::strerror(errno);
  kvstore::BrokerReply hello;
  const SharedMapping control = connection.Open(BrokerConnection::Hello(), PROT_READ, &hello);
  if (control.data() == nullptr) return std::string("hello: ") + hello.message;
  const SharedMapping pool = connection.OpenPool(cache_id);
  if (pool.data() == nullptr) return "no pool";
  const SharedMapping staging = connection.OpenStaging(1 << 20, 1);
  if (staging.data() == nullptr) return "no staging";
  staging.data()[0] = std::byte{1};
  if (mprotect(pool.data(), pool.size_bytes(), PROT_READ | PROT_WRITE) == 0) return "writable pool";
  if (access("/proc", F_OK) == 0 || access("/dev/shm", F_OK) == 0) return "shares more than wanted";
  if (!to_parent.Write(hello.session_token)) return "pipe";
  const std::string image = to_child.Read();
  const auto& page = *reinterpret_cast<const kvstore::ControlPage*>(control.data());
  if (page.boot_word.load() != hello.boot_word) return "boot word";
  return MappedRows(image, pool, 1, 200);
}

class NamespaceTest : public RpcTest {};

TEST_F(NamespaceTest, AClientThatSharesOnlyTheSocketsDirectoryMapsAndReads) {
  if (getuid() != 0) PQC_SKIP("root") << "needs root, to make namespaces and become another user";
  Start([](Config& config) { config.socket_mode = 0660; });
  ASSERT_EQ(chmod(directory_.c_str(), 0750), 0);
  ASSERT_EQ(chown(directory_.c_str(), 0, kInBackground), 0);
  for (const char* name : {"pqcached.sock", "pqcached.sock.broker"}) {
    ASSERT_EQ(chown((directory_ / name).c_str(), 0, kInBackground), 0);
  }
  std::string root = testing::TempDir() + "pqcached-root-XXXXXX";
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  const auto owner = Connect();
  const uint64_t cache_id = owner->OpenCache();
  const uint64_t sequence_id = owner->CreateSequence(cache_id);
  owner->Ingest(sequence_id, 0, 200);

  TextPipe to_parent;
  TextPipe to_child;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const std::string failed = EnterContainer(directory_.string(), root);
    to_parent.Write(failed.empty() ? RunClient(cache_id, to_parent, to_child) : failed);
    _exit(0);
  }
  const std::string token = to_parent.Read();
  std::string answer = token;
  if (token.size() == 32) {  // else it says what went wrong
    grpc::ClientContext context;
    context.AddMetadata("pqcached-session", token);
    v1::AttachRequest request;
    request.set_sequence_id(sequence_id);
    v1::AttachResponse response;
    const grpc::Status status = owner->kv().Attach(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    to_child.Write(response.attachment().image());
    answer = to_parent.Read();
  }
  waitpid(child, nullptr, 0);
  std::filesystem::remove_all(root);
  if (answer.rfind(kNotPermitted, 0) == 0) PQC_SKIP("namespaces") << answer;

  v1::FetchBlocksRequest fetch;
  fetch.set_sequence_id(sequence_id);
  fetch.set_layer(1);
  fetch.add_ranges()->set_end(200);
  v1::FetchBlocksResponse rows;
  ASSERT_TRUE(owner->kv().FetchBlocks(owner->Context().get(), fetch, &rows).ok());
  const bool equal = answer == rows.blocks(0).inline_data();
  EXPECT_TRUE(equal) << (answer.size() < 200 ? answer : "other rows");
}

}  // namespace
}  // namespace pqcached::service
