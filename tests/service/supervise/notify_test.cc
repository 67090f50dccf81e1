// The worker's line to its supervisor, against a socket that stands for systemd's and speaks the
// protocol by hand.
#include "service/supervise/notify.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "service/base/refusal.h"
#include "service/supervise/notify_socket.h"

namespace pqcached::service {
namespace {

using kvstore::FileDescriptor;
using testing::ElementsAre;
using testing::IsEmpty;

FileDescriptor Memory(const std::string& content) {
  FileDescriptor memory(memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(write(memory.get(), content.data(), content.size()),
            static_cast<ssize_t>(content.size()));
  return memory;
}

std::string ContentOf(const FileDescriptor& memory) {
  char content[64] = {};
  const ssize_t got = pread(memory.get(), content, sizeof(content), 0);
  return got < 0 ? "cannot be read" : std::string(content, static_cast<size_t>(got));
}

bool SameFile(int a, int b) {
  struct stat first = {};
  struct stat second = {};
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_ino == second.st_ino;
}

// Stands for systemd: takes what comes, and answers barriers when it is told to.
class FakeManager {
 public:
  explicit FakeManager(const std::string& path)
      : path_(path), socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  ~FakeManager() { StopServing(); }

  struct Message {
    std::string text;
    FileDescriptor descriptor;
  };

  Message Read() {
    char text[4096];
    iovec part = {text, sizeof(text)};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
    msghdr header = {};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
    if (got < 0) return {};
    Message message{std::string(text, static_cast<size_t>(got)), {}};
    const cmsghdr* rights = CMSG_FIRSTHDR(&header);
    if (rights != nullptr && rights->cmsg_type == SCM_RIGHTS) {
      EXPECT_EQ(rights->cmsg_len, CMSG_LEN(sizeof(int))) << "one descriptor at a time";
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(rights), sizeof(int));
      message.descriptor = FileDescriptor(descriptor);
    }
    return message;
  }

  // Reads messages on a thread of its own until StopServing; barriers are answered by being dropped.
  void Serve() {
    thread_ = std::thread([this] {
      while (true) {
        Message message = Read();
        if (message.text == "END") return;
        if (message.text != "BARRIER=1") messages_.push_back(std::move(message));
      }
    });
  }
  std::vector<Message>& StopServing() {
    if (thread_.joinable()) {
      Notifier({.socket = path_}).Send("END").IgnoreError();
      thread_.join();
    }
    return messages_;
  }

 private:
  const std::string path_;
  const FileDescriptor socket_;
  std::thread thread_;
  std::vector<Message> messages_;
};

class NotifyTest : public testing::Test {
 protected:
  NotifyTest() {
    std::string name = "/tmp/pqn.XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  ~NotifyTest() override { std::filesystem::remove_all(directory_); }
  std::string path() const { return directory_ / "notify"; }
  Notifier::Options Options() const {
    Notifier::Options options;
    options.socket = path();
    return options;
  }

  // What stands in the environment of one test.
  std::unique_ptr<Notifier> FromEnvironment() {
    auto notifier = Notifier::FromEnvironment(environment());
    EXPECT_TRUE(notifier.ok()) << notifier.status();
    return notifier.ok() ? *std::move(notifier) : nullptr;
  }
  Environment environment() {
    return [this](const char* name) -> const char* {
      const auto found = variables_.find(name);
      return found == variables_.end() ? nullptr : found->second.c_str();
    };
  }

  std::filesystem::path directory_;
  std::map<std::string, std::string> variables_;
};

TEST_F(NotifyTest, ThereIsNoneWithoutASocket) { EXPECT_EQ(FromEnvironment(), nullptr); }

TEST_F(NotifyTest, RefusesASocketThatIsNone) {
  for (const char* socket : {"x", "relative/path", "vsock:2:1"}) {
    variables_["NOTIFY_SOCKET"] = socket;
    EXPECT_EQ(Notifier::FromEnvironment(environment()).status().code(),
              absl::StatusCode::kInvalidArgument)
        << socket;
  }
}

TEST_F(NotifyTest, SaysHowTheServiceIs) {
  FakeManager manager(path());
  variables_["NOTIFY_SOCKET"] = path();
  const std::unique_ptr<Notifier> notifier = FromEnvironment();
  ASSERT_NE(notifier, nullptr);
  for (const char* words : {"READY=1\nSTATUS=serving", "WATCHDOG=1", "STOPPING=1"}) {
    ASSERT_TRUE(notifier->Send(words).ok());
    EXPECT_EQ(manager.Read().text, words);
  }
}

TEST_F(NotifyTest, NobodyThereIsUnavailable) {
  const Notifier notifier(Options());
  EXPECT_EQ(notifier.Send("READY=1").code(), absl::StatusCode::kUnavailable);
}

TEST_F(NotifyTest, KeepsADescriptorUnderItsName) {
  FakeManager manager(path());
  manager.Serve();
  Notifier notifier(Options());
  const FileDescriptor memory = Memory("rows");
  ASSERT_TRUE(notifier.Keep("pool-1", memory.get()).ok());
  EXPECT_THAT(notifier.Names(), ElementsAre("pool-1"));
  const FileDescriptor copy = notifier.Take("pool-1");
  EXPECT_NE(copy.get(), memory.get());
  EXPECT_TRUE(SameFile(copy.get(), memory.get()));
  ASSERT_TRUE(notifier.Release("pool-1").ok());
  EXPECT_FALSE(notifier.Take("pool-1").valid());

  std::vector<FakeManager::Message>& messages = manager.StopServing();
  ASSERT_EQ(messages.size(), 2u);
  EXPECT_EQ(messages[0].text, "FDSTORE=1\nFDNAME=pool-1\nFDPOLL=0");
  EXPECT_EQ(ContentOf(messages[0].descriptor), "rows");
  EXPECT_EQ(messages[1].text, "FDSTOREREMOVE=1\nFDNAME=pool-1");
  EXPECT_FALSE(messages[1].descriptor.valid());
}

TEST_F(NotifyTest, KeepReturnsWhenTheDescriptorIsHeld) {
  FakeManager manager(path());
  Notifier notifier(Options());
  const FileDescriptor memory = Memory("rows");
  absl::Status kept = absl::UnknownError("");
  std::thread keeping([&] { kept = notifier.Keep("pool-1", memory.get()); });
  const FakeManager::Message store = manager.Read();
  {
    const FakeManager::Message barrier = manager.Read();
    EXPECT_EQ(barrier.text, "BARRIER=1");
    ASSERT_TRUE(barrier.descriptor.valid());
    // Nothing can come through the pipe; the other side waits for its end.
    EXPECT_EQ(fcntl(barrier.descriptor.get(), F_GETFL) & O_ACCMODE, O_WRONLY);
  }
  keeping.join();
  EXPECT_TRUE(kept.ok()) << kept;
}

TEST_F(NotifyTest, AManagerThatDoesNotAnswerHoldsNothing) {
  const FakeManager manager(path());
  Notifier::Options options = Options();
  options.timeout = absl::Milliseconds(20);
  Notifier notifier(std::move(options));
  const FileDescriptor memory = Memory("rows");
  EXPECT_EQ(notifier.Keep("pool-1", memory.get()).code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(notifier.Names(), IsEmpty());
}

// The kernel ends the barrier, too, when the receiver has no descriptor for it.
TEST_F(NotifyTest, AReceiverThatConfirmsHoldsOnlyWhatItConfirms) {
  FakeManager manager(path());
  Notifier::Options options = Options();
  options.confirms = true;
  Notifier notifier(std::move(options));
  const FileDescriptor memory = Memory("rows");
  for (const bool confirms : {false, true}) {
    absl::Status kept;
    std::thread keeping([&] { kept = notifier.Keep("pool-1", memory.get()); });
    manager.Read();
    {
      const FakeManager::Message barrier = manager.Read();
      EXPECT_EQ(barrier.text, "BARRIER=1\nFDNAME=pool-1");
      if (confirms) {
        EXPECT_EQ(send(barrier.descriptor.get(), "1", 1, MSG_NOSIGNAL), 1);
      }
    }
    keeping.join();
    EXPECT_EQ(kept.ok(), confirms) << kept;
    EXPECT_EQ(notifier.Names().size(), confirms ? 1u : 0u);
    if (confirms) continue;
    EXPECT_EQ(kept.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(ShortageOf(kept), Shortage::kDescriptors);
    EXPECT_EQ(manager.Read().text, "FDSTOREREMOVE=1\nFDNAME=pool-1");
  }
}

TEST_F(NotifyTest, NamesAShortageOfDescriptors) {
  const FakeManager manager(path());
  Notifier notifier(Options());
  const FileDescriptor memory = Memory("rows");
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const FileDescriptor first_free(fcntl(memory.get(), F_DUPFD_CLOEXEC, 0));
  // The copy of the descriptor has a number, the barrier has not.
  const rlimit limit = {.rlim_cur = static_cast<rlim_t>(first_free.get()) + 2,
                        .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  const absl::Status kept = notifier.Keep("pool-1", memory.get());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(ShortageOf(kept), Shortage::kDescriptors) << kept;
  EXPECT_THAT(notifier.Names(), IsEmpty());
}

TEST_F(NotifyTest, RefusesNamesDoublesAndWhatIsTooMuch) {
  FakeManager manager(path());
  manager.Serve();
  Notifier::Options options = Options();
  options.max_kept = 2;
  Notifier notifier(std::move(options));
  const FileDescriptor memory = Memory("rows");
  for (const std::string& name :
       {std::string(), std::string("a:b"), std::string("a\nREADY=1"), std::string(201, 'x')}) {
    EXPECT_EQ(notifier.Keep(name, memory.get()).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(notifier.Keep(std::string(200, 'x'), memory.get()).ok());
  EXPECT_EQ(notifier.Keep(std::string(200, 'x'), memory.get()).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(notifier.Keep("b", memory.get()).ok());
  EXPECT_EQ(notifier.Keep("c", memory.get()).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(notifier.Release("b").ok());
  EXPECT_TRUE(notifier.Release("b").ok()) << "no error when there is none";
  EXPECT_TRUE(notifier.Keep("c", memory.get()).ok()) << "what was released counts no more";
  EXPECT_EQ(manager.StopServing().size(), 4u) << "what was refused was not sent";
}

TEST_F(NotifyTest, BoundsTheBytesOfAllNames) {
  FakeManager manager(path());
  manager.Serve();
  Notifier::Options options = Options();
  options.max_name_bytes = 8;
  Notifier notifier(std::move(options));
  const FileDescriptor memory = Memory("");
  EXPECT_TRUE(notifier.Keep("abc", memory.get()).ok());
  EXPECT_EQ(notifier.Keep("abcd", memory.get()).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(notifier.Keep("abd", memory.get()).ok());
  EXPECT_TRUE(notifier.Release("abc").ok());
  EXPECT_TRUE(notifier.Keep("abe", memory.get()).ok());
}

TEST_F(NotifyTest, FindsWhatAnEarlierProcessLeft) {
  FakeManager manager(path());
  manager.Serve();
  // In a child, whose descriptors from 3 on are the test's to say.
  const pid_t child = fork();
  if (child == 0) {
    const FileDescriptor first = Memory("one");
    const FileDescriptor second = Memory("two");
    const int high_first = fcntl(first.get(), F_DUPFD, 100);
    const int high_second = fcntl(second.get(), F_DUPFD, 100);
    dup2(high_first, 3);
    dup2(high_second, 4);
    dup2(high_second, 5);
    variables_ = {{"NOTIFY_SOCKET", path()},
                  {"LISTEN_PID", std::to_string(getpid())},
                  {"LISTEN_FDS", "3"},
                  {"LISTEN_FDNAMES", "records:pool-1:not a name"},
                  {"FDSTORE", "3"}};
    auto notifier = Notifier::FromEnvironment(environment());
    bool right = notifier.ok() && *notifier != nullptr;
    right = right && (*notifier)->Names() == std::vector<std::string>{"pool-1", "records"};
    right = right && ContentOf((*notifier)->Take("records")) == "one";
    right = right && ContentOf((*notifier)->Take("pool-1")) == "two";
    right = right && (fcntl(3, F_GETFD) & FD_CLOEXEC) != 0 && !SameFile(5, high_second);
    right = right && absl::IsAlreadyExists((*notifier)->Keep("records", high_first));
    right = right && (*notifier)->Keep("third", high_first).ok();
    right = right && absl::IsResourceExhausted((*notifier)->Keep("fourth", high_first));
    _exit(right ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(NotifyTest, LeavesWhatIsForAnotherProcess) {
  variables_ = {{"NOTIFY_SOCKET", path()},   {"LISTEN_PID", "1"},   {"LISTEN_FDS", "3"},
                {"LISTEN_FDNAMES", "a:b:c"}, {"WATCHDOG_PID", "1"}, {"WATCHDOG_USEC", "1000"}};
  const std::unique_ptr<Notifier> notifier = FromEnvironment();
  ASSERT_NE(notifier, nullptr);
  EXPECT_THAT(notifier->Names(), IsEmpty());
  EXPECT_EQ(WatchdogTimeout(environment()), absl::ZeroDuration());
}

TEST_F(NotifyTest, RefusesACountThatIsNone) {
  for (const char* count : {"-1", "x", "999999999999"}) {
    variables_ = {
        {"NOTIFY_SOCKET", path()}, {"LISTEN_PID", std::to_string(getpid())}, {"LISTEN_FDS", count}};
    EXPECT_FALSE(Notifier::FromEnvironment(environment()).ok()) << count;
  }
}

TEST_F(NotifyTest, KnowsHowOftenItIsToBeHeard) {
  variables_ = {{"WATCHDOG_USEC", "2500000"}, {"WATCHDOG_PID", std::to_string(getpid())}};
  EXPECT_EQ(WatchdogTimeout(environment()), absl::Milliseconds(2500));
  variables_["WATCHDOG_USEC"] = "nonsense";
  EXPECT_EQ(WatchdogTimeout(environment()), absl::ZeroDuration());
}

// The two sides of ours against each other.
TEST_F(NotifyTest, TheSocketHearsWhatTheNotifierSays) {
  const auto socket = NotifySocket::Bind(path());
  ASSERT_TRUE(socket.ok()) << socket.status();
  struct stat status = {};
  ASSERT_EQ(stat(path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_FALSE((*socket)->Receive()) << "does not wait";
  Notifier notifier(Options());
  const FileDescriptor memory = Memory("rows");
  ASSERT_TRUE(notifier.Forward("pool-1", memory.get()).ok());
  ASSERT_TRUE(notifier.Send("READY=1\nSTATUS=a=b").ok());
  const auto stored = (*socket)->Receive();
  ASSERT_TRUE(stored);
  EXPECT_EQ(stored->pid, getpid());
  EXPECT_EQ(stored->uid, getuid());
  EXPECT_TRUE(stored->Has("FDSTORE", "1"));
  EXPECT_EQ(stored->Get("FDNAME"), "pool-1");
  ASSERT_EQ(stored->descriptors.size(), 1u);
  EXPECT_EQ(ContentOf(stored->descriptors[0]), "rows");
  const auto ready = (*socket)->Receive();
  ASSERT_TRUE(ready);
  EXPECT_TRUE(ready->Has("READY", "1"));
  EXPECT_EQ(ready->Get("STATUS"), "a=b");
  EXPECT_FALSE((*socket)->Receive());
}

TEST_F(NotifyTest, TheSocketSkipsWhatIsTooLong) {
  const auto socket = NotifySocket::Bind(path());
  ASSERT_TRUE(socket.ok());
  const Notifier notifier(Options());
  ASSERT_TRUE(notifier.Send(std::string(5000, 'x')).ok());
  ASSERT_TRUE(notifier.Send("").ok());
  ASSERT_TRUE(notifier.Send("WATCHDOG=1").ok());
  const auto empty = (*socket)->Receive();
  ASSERT_TRUE(empty);
  EXPECT_FALSE(empty->Has("WATCHDOG", "1"));
  EXPECT_TRUE((*socket)->Receive()->Has("WATCHDOG", "1"));
}

TEST_F(NotifyTest, TheSocketGoesWithItsObject) {
  ASSERT_TRUE(NotifySocket::Bind(path()).ok());
  EXPECT_FALSE(std::filesystem::exists(path()));
}

}  // namespace
}  // namespace pqcached::service
