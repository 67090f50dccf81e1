// MemoryKeeper: keeps descriptors for the next store of the same test.
#ifndef PQCACHED_TESTS_KVSTORE_MEMORY_KEEPER_H_
#define PQCACHED_TESTS_KVSTORE_MEMORY_KEEPER_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/memory/keeper.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/mutex.h"

namespace pqcached::kvstore::testing {

class MemoryKeeper final : public DescriptorKeeper {
 public:
  absl::Status Keep(std::string_view name, int descriptor) override {
    if (!IsKeeperName(name)) return absl::InvalidArgumentError("name");
    auto copy = Duplicate(descriptor);
    if (!copy.ok()) return copy.status();
    const MutexLock lock(&mutex_);
    if (kept_.size() >= max_kept) return absl::ResourceExhaustedError("max_kept");
    const bool is_new = kept_.emplace(name, *std::move(copy)).second;
    return is_new ? absl::OkStatus() : absl::AlreadyExistsError("kept already");
  }
  absl::Status Release(std::string_view name) override {
    const MutexLock lock(&mutex_);
    kept_.erase(std::string(name));
    return absl::OkStatus();
  }
  FileDescriptor Take(std::string_view name) const override {
    const MutexLock lock(&mutex_);
    const auto it = kept_.find(std::string(name));
    if (it == kept_.end()) return {};
    auto copy = Duplicate(it->second.get());
    return copy.ok() ? *std::move(copy) : FileDescriptor();
  }
  std::vector<std::string> Names() const override {
    std::vector<std::string> names;
    const MutexLock lock(&mutex_);
    for (const auto& [name, descriptor] : kept_) names.push_back(name);
    return names;
  }

  size_t max_kept = 1000;

 private:
  mutable Mutex mutex_;
  std::map<std::string, FileDescriptor> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_MEMORY_KEEPER_H_
