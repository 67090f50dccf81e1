// Keepers whose memory survives the kill of a child process, as a supervisor's does.
//
// SharedKeeper: its memfds are created before the first child is forked, and the names under which they are kept lie in
// shared memory. StrictKeeper keeps mappings, too (strict_memory): its child sends them to the parent.
//
// One child at a time uses a keeper.
#ifndef PQCACHED_TESTS_FAULT_CRASH_KEPT_MEMORY_H_
#define PQCACHED_TESTS_FAULT_CRASH_KEPT_MEMORY_H_

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvstore/memory/durable_store.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/memory/memfd.h"

namespace pqcached::kvstore::testing {

// Returns memory that this process shares with those that it forks.
template <typename T>
T* MakeShared() {
  void* memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return new (memory) T{};
}

class SharedKeeper : public DescriptorKeeper {
 public:
  static constexpr size_t kMemoryBytes = size_t{2} << 30;  // none of it is touched before its use

  SharedKeeper() : entries_(*MakeShared<Entries>()) {
    for (FileDescriptor& memfd : memfds_) {
      auto created = CreateMemfd("kept", kMemoryBytes);
      if (!created.ok()) std::abort();
      memfd = *std::move(created);
    }
  }
  ~SharedKeeper() override { munmap(&entries_, sizeof(entries_)); }

  // Keeps nothing any more.
  virtual void Clear() {
    for (Entry& entry : entries_) entry.state = State::kFree;
  }
  // Called by a child that begins: frees what the last one created and did not keep.
  void Begin() {
    for (Entry& entry : entries_) {
      if (entry.state == State::kMade) entry.state = State::kFree;
    }
  }

  absl::StatusOr<FileDescriptor> CreateMemory(const char*, size_t size_bytes) override {
    if (size_bytes > kMemoryBytes) return absl::ResourceExhaustedError("kMemoryBytes");
    for (size_t i = 0; i < kCount; ++i) {
      State free = State::kFree;  // several engines may plan moves
      if (!entries_[i].state.compare_exchange_strong(free, State::kMade)) continue;
      const int memfd = memfds_[i].get();
      if (fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kMemoryBytes) != 0) {
        return absl::ResourceExhaustedError("fallocate");
      }
      return Duplicate(memfd);
    }
    return absl::ResourceExhaustedError("no memfd is left");
  }
  absl::Status Keep(std::string_view name, int descriptor) override {
    PQC_CRASH_POINT();
    if (!IsKeeperName(name) || name.size() >= sizeof(Entry::name)) {
      return absl::InvalidArgumentError("name");
    }
    if (Find(name) != kCount) return absl::AlreadyExistsError("kept already");
    for (size_t i = 0; i < kCount; ++i) {  // memory that has a name already gets another one
      if (entries_[i].state == State::kFree || !SameFile(memfds_[i].get(), descriptor)) continue;
      std::memset(entries_[i].name, 0, sizeof(Entry::name));
      std::copy(name.begin(), name.end(), entries_[i].name);
      entries_[i].state.store(State::kKept);
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError("it was not made here");
  }
  absl::Status Release(std::string_view name) override {
    PQC_CRASH_POINT();
    const size_t i = Find(name);
    if (i != kCount) entries_[i].state = State::kFree;
    return absl::OkStatus();
  }
  FileDescriptor Take(std::string_view name) const override {
    const size_t i = Find(name);
    if (i == kCount) return {};
    auto copy = Duplicate(memfds_[i].get());
    return copy.ok() ? *std::move(copy) : FileDescriptor();
  }
  std::vector<std::string> Names() const override {
    std::vector<std::string> names;
    for (const Entry& entry : entries_) {
      if (entry.state == State::kKept) names.emplace_back(entry.name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  static constexpr size_t kCount = 16;
  enum class State : uint32_t { kFree, kMade, kKept };
  struct Entry {
    std::atomic<State> state = State::kFree;
    char name[64] = {};
  };
  using Entries = std::array<Entry, kCount>;

  static bool SameFile(int a, int b) {
    struct stat of_a = {};
    struct stat of_b = {};
    return fstat(a, &of_a) == 0 && fstat(b, &of_b) == 0 && of_a.st_ino == of_b.st_ino &&
           of_a.st_dev == of_b.st_dev;
  }
  size_t Find(std::string_view name) const {
    for (size_t i = 0; i < kCount; ++i) {
      if (entries_[i].state == State::kKept && name == entries_[i].name) return i;
    }
    return kCount;
  }

  std::array<FileDescriptor, kCount> memfds_;
  Entries& entries_;
};

// A SharedKeeper that keeps mappings. The parent serves it while the child runs: it maps what the child sends before
// the child seals it.
class StrictKeeper final : public SharedKeeper {
 public:
  StrictKeeper() {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets_) != 0) std::abort();
  }
  ~StrictKeeper() override {
    close(sockets_[0]);
    close(sockets_[1]);
  }

  void Clear() override {
    SharedKeeper::Clear();
    kept_.clear();
  }
  // Called by the parent until its child has ended: serves one request, or returns after a millisecond.
  void Serve() {
    pollfd ready = {.fd = sockets_[0], .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, 1) <= 0) return;
    Request request;
    const FileDescriptor memory = Receive(request);
    if (memory.valid()) {
      auto mapping = Mapping::Map(memory, SizeOf(memory), Mapping::Access::kReadWrite);
      auto copy = Duplicate(memory.get());
      if (!mapping.ok() || !copy.ok()) std::abort();
      kept_[request.name] = {*std::move(copy), *std::move(mapping)};
    } else {
      kept_.erase(request.name);
    }
    const char done = 1;
    if (send(sockets_[0], &done, 1, MSG_DONTWAIT) != 1) std::abort();
  }
  // Called between children: drops the requests and answers that the last child left.
  void Drain() {
    char bytes[sizeof(Request)];
    while (recv(sockets_[1], bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
    }
  }

  bool supports_mappings() const override { return true; }
  absl::Status KeepMapped(std::string_view name, int descriptor) override {
    PQC_CRASH_POINT();
    Send(name, descriptor);
    return absl::OkStatus();
  }
  Mapping TakeMapping(std::string_view name) override {
    const auto it = kept_.find(std::string(name));
    return it == kept_.end() ? Mapping() : std::move(it->second.mapping);
  }
  absl::Status Release(std::string_view name) override {
    if (kept_.contains(std::string(name))) {
      PQC_CRASH_POINT();
      Send(name, -1);
      kept_.erase(std::string(name));
      return absl::OkStatus();
    }
    return SharedKeeper::Release(name);
  }
  FileDescriptor Take(std::string_view name) const override {
    const auto it = kept_.find(std::string(name));
    if (it == kept_.end()) return SharedKeeper::Take(name);
    auto copy = Duplicate(it->second.memory.get());
    return copy.ok() ? *std::move(copy) : FileDescriptor();
  }
  std::vector<std::string> Names() const override {
    std::vector<std::string> names = SharedKeeper::Names();
    for (const auto& [name, kept] : kept_) names.push_back(name);
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  struct Request {
    char name[64] = {};
  };
  struct Kept {
    FileDescriptor memory;
    Mapping mapping;
  };

  // Sends a request of the child, and waits for the parent's answer. A descriptor of -1 asks for the release.
  void Send(std::string_view name, int descriptor) {
    Request request;
    std::copy(name.begin(), name.end(), request.name);
    iovec data = {.iov_base = &request, .iov_len = sizeof(request)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (descriptor >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    }
    char done = 0;
    if (sendmsg(sockets_[1], &message, 0) < 0 || recv(sockets_[1], &done, 1, 0) != 1) std::abort();
  }
  FileDescriptor Receive(Request& request) {
    iovec data = {.iov_base = &request, .iov_len = sizeof(request)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    if (recvmsg(sockets_[0], &message, 0) != sizeof(request)) std::abort();
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header == nullptr) return {};
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
    return FileDescriptor(descriptor);
  }

  int sockets_[2] = {-1, -1};  // the parent's, the child's
  std::map<std::string, Kept> kept_;
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_FAULT_CRASH_KEPT_MEMORY_H_
