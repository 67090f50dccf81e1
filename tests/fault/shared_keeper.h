// SharedKeeper: keeps memory for one child process after the other, as a supervisor does.
//
// Its memfds are made before the first child is forked; what is kept under which name stands in shared
// memory. One child at a time uses it; between children nobody does.
#ifndef PQCACHED_TESTS_FAULT_SHARED_KEEPER_H_
#define PQCACHED_TESTS_FAULT_SHARED_KEEPER_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "kvstore/memory/keeper.h"
#include "kvstore/memory/memfd.h"

namespace pqcached::kvstore::testing {

// Memory that this process shares with those that it forks.
template <typename T>
T* MakeShared() {
  void* memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return new (memory) T{};
}

class SharedKeeper final : public DescriptorKeeper {
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

  // Of a child that begins: what the last one made and did not keep is free again.
  void Begin() {
    for (Entry& entry : entries_) {
      if (entry.state == State::kMade) entry.state = State::kFree;
    }
  }

  absl::StatusOr<FileDescriptor> CreateMemory(const char*, size_t size_bytes) override {
    if (size_bytes > kMemoryBytes) return absl::ResourceExhaustedError("kMemoryBytes");
    for (size_t i = 0; i < kCount; ++i) {
      if (entries_[i].state != State::kFree) continue;
      entries_[i].state = State::kMade;
      const int memfd = memfds_[i].get();
      if (fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kMemoryBytes) != 0) {
        return absl::ResourceExhaustedError("fallocate");
      }
      made_.push_back({memfd, i});
      return Duplicate(memfd);
    }
    return absl::ResourceExhaustedError("no memfd is left");
  }
  absl::Status Keep(std::string_view name, int descriptor) override {
    if (!IsKeeperName(name) || name.size() >= sizeof(Entry::name)) {
      return absl::InvalidArgumentError("name");
    }
    if (Find(name) != kCount) return absl::AlreadyExistsError("kept already");
    for (const auto& [memfd, i] : made_) {
      if (!SameFile(memfd, descriptor)) continue;
      std::memset(entries_[i].name, 0, sizeof(Entry::name));
      std::copy(name.begin(), name.end(), entries_[i].name);
      entries_[i].state.store(State::kKept);
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError("it was not made here");
  }
  absl::Status Release(std::string_view name) override {
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
  static constexpr size_t kCount = 8;
  enum class State : uint32_t { kFree, kMade, kKept };
  struct Entry {
    std::atomic<State> state = State::kFree;
    char name[64] = {};
  };
  using Entries = std::array<Entry, kCount>;
  struct Made {
    int memfd;
    size_t entry;
  };

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
  std::vector<Made> made_;
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_FAULT_SHARED_KEEPER_H_
