// Store::DropCache and Store::EraseTenant.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/plugins/plugin_crashes.h"
#include "kvstore/records/root_records.h"
#include "kvstore/refusal.h"
#include "kvstore/store/store_impl.h"

namespace pqcached::kvstore {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(5);
// Longest wait of DropCache for calls that create a sequence.
constexpr absl::Duration kCreationPatience = absl::Seconds(5);

// Keeps a copy of the root records of a folder, so that RootRecords can read them there: it repairs
// what it reads.
class CopiedRecords final : public DescriptorKeeper {
 public:
  explicit CopiedRecords(const FileDescriptor& records) {
    if (!records.valid()) return;
    auto copy = CreateMemfd("records", SizeOf(records));
    if (copy.ok() && Copy(records.get(), copy->get())) copy_ = *std::move(copy);
  }

  absl::Status Keep(std::string_view, int) override { return absl::OkStatus(); }
  absl::Status Release(std::string_view) override { return absl::OkStatus(); }
  FileDescriptor Take(std::string_view) const override {
    auto duplicate = Duplicate(copy_.get());
    return duplicate.ok() ? *std::move(duplicate) : FileDescriptor();
  }
  std::vector<std::string> Names() const override { return {}; }

 private:
  static bool Copy(int from, int to) {
    std::array<char, 1 << 16> buffer;
    off_t offset = 0;
    while (true) {
      const ssize_t got = pread(from, buffer.data(), buffer.size(), offset);
      if (got <= 0) return got == 0;
      if (pwrite(to, buffer.data(), static_cast<size_t>(got), offset) != got) return false;
      offset += got;
    }
  }

  FileDescriptor copy_;
};

// Returns the caches whose files are in a folder; nothing when its records cannot be read.
std::optional<std::vector<CacheRecord>> CachesIn(const SetAsideFolder& folder,
                                                 const kernels::Exec& exec) {
  CopiedRecords records(folder.Open(std::string(RootRecords::kMemoryName)));
  const auto root = RootRecords::Open(exec, records);
  if (!root.ok() || !(*root)->recovered() || (*root)->dropped_records() > 0) return std::nullopt;
  return (*root)->caches();
}

// Removes the files of the tenant from a folder. The folder's records, which name the tenant's
// sessions, stay as long as another tenant's files need them.
absl::Status EraseFolder(const SetAsideFolder& folder, const kernels::Exec& exec,
                         std::string_view tenant, ErasedTenant& erased) {
  const auto caches = CachesIn(folder, exec);
  if (!caches.has_value()) {
    erased.unreadable_folders.push_back(folder.name());
    return absl::OkStatus();
  }
  const auto remove = [&](const std::string& file) {
    const size_t bytes = folder.BytesOf(file);
    RETURN_IF_ERROR(folder.Remove(file));
    ++erased.set_aside_files;
    erased.set_aside_bytes += bytes;
    return absl::OkStatus();
  };
  const std::vector<std::string> names = folder.Names();
  size_t left = names.size() - static_cast<size_t>(std::count(names.begin(), names.end(),
                                                              PluginCrashes::kMemoryName));
  for (const CacheRecord& cache : *caches) {
    if (cache.tenant != tenant) continue;
    for (const std::string& file : cache.names()) {
      if (std::find(names.begin(), names.end(), file) == names.end()) continue;
      RETURN_IF_ERROR(remove(file));
      --left;
    }
  }
  const bool only_records =
      left == 1 && std::find(names.begin(), names.end(), RootRecords::kMemoryName) != names.end();
  if (!only_records) return absl::OkStatus();
  if (std::find(names.begin(), names.end(), PluginCrashes::kMemoryName) != names.end()) {
    RETURN_IF_ERROR(folder.Remove(PluginCrashes::kMemoryName));
  }
  return remove(std::string(RootRecords::kMemoryName));
}

size_t BytesInUse(const Cache& cache) {
  const PoolUsage usage = cache.pool->usage();
  return usage.used_bytes - std::min(usage.used_bytes, usage.quarantined_bytes);
}

}  // namespace

absl::StatusOr<DroppedCache> StoreImpl::DropCache(std::string_view tenant, uint64_t cache_id,
                                                  bool force) {
  ASSIGN_OR_RETURN(const auto found, FindCacheForAdmin(tenant, cache_id));
  if (found->pages != nullptr) RETURN_IF_ERROR(found->pages->Close(force));
  RETURN_IF_ERROR(sequences_.CloseCache(cache_id, force));
  DroppedCache dropped;
  const SteadyTime until = SteadyTime::Now() + kCreationPatience;
  while (true) {
    for (const StoredSequence& stored : sequences_.OfCache(cache_id)) {
      lifecycle_.Drop(stored);
      ++dropped.sequences;
    }
    if (sequences_.CountOfCache(cache_id) == 0) break;
    if (SteadyTime::Now() >= until) {
      return Unavailable("cache_id",
                         absl::StrCat("a call is creating a sequence in cache ", cache_id),
                         kRetryMemory);
    }
    absl::SleepFor(kPoll);
  }
  const Caches::CachePointer cache = caches_.Remove(cache_id);
  if (cache == nullptr) return dropped;  // another caller has removed it
  Pool& pool = *cache->pool;
  pool.SetReclaimer({});
  if (cache->records != nullptr) {
    root_->RemoveCache(cache_id);  // first, so that the next process does not look for its memory
    CacheRecord record;
    record.cache_id = cache_id;
    for (const std::string& name : record.names()) {
      RETURN_IF_ERROR(options_.keeper->Release(name));
    }
  }
  dropped.bytes = pool.usage().capacity_bytes - pool.absent_bytes();
  pool.PauseTouching(true);
  pool.EraseFree();  // also what clients still map
  pool.EndHolds();
  pool.ReturnFreePages(dropped.bytes);  // those that were held when they were erased
  return dropped;
}

absl::StatusOr<ErasedTenant> StoreImpl::EraseTenant(std::string_view tenant,
                                                    absl::Duration patience) {
  ErasedTenant erased;
  const auto caches = caches_.OfTenant(tenant);
  size_t before_bytes = 0;
  for (const auto& cache : caches) before_bytes += BytesInUse(*cache);
  for (const StoredSequence& stored : sequences_.All()) {
    if (stored.cache->tenant != tenant) continue;
    stored.retained() ? ++erased.cached_prefixes : ++erased.sequences;
    lifecycle_.Drop(stored);
  }
  for (const auto& cache : caches) {
    if (cache->pages != nullptr) cache->pages->Clear();
  }
  const auto in_use = [&] {
    size_t bytes = 0;
    for (const auto& cache : caches) bytes += BytesInUse(*cache);
    return bytes;
  };
  const SteadyTime until = SteadyTime::Now() + patience;
  while ((erased.remaining_bytes = in_use()) > 0 && SteadyTime::Now() < until) {
    absl::SleepFor(kPoll);
  }
  erased.bytes = before_bytes - std::min(before_bytes, erased.remaining_bytes);
  for (const auto& cache : caches) cache->pool->EraseFree();
  if (options_.keeper == nullptr) return erased;
  for (const SetAsideFolder& folder : options_.keeper->SetAsideFolders()) {
    RETURN_IF_ERROR(EraseFolder(folder, options_.exec, tenant, erased));
  }
  return erased;
}

}  // namespace pqcached::kvstore
