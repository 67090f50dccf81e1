#include "kvstore/limits/memory_ledger.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/limits/memory_limits.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {

absl::StatusOr<std::shared_ptr<MemoryPromise>> MemoryLedger::Promise(std::string_view tenant,
                                                                     MemoryUse use, size_t bytes,
                                                                     const char* field) {
  const MemoryLimits limits = ReadMemoryLimits(memory_root_);
  if (bytes > limits.total_bytes) {
    return ShortOf(
        Shortage::kMemory, field,
        absl::StrCat(bytes, "; the machine has ", limits.total_bytes, " in all (",
                     limits.total_source, "), ", bytes - limits.total_bytes, " bytes short"),
        kNoRetry);
  }
  std::shared_ptr<MemoryPromise> promise(new MemoryPromise(shared_from_this(), tenant, use, bytes));
  size_t available_bytes = limits.available_bytes;
  {
    const MutexLock lock(&mutex_);
    available_bytes -= std::min(available_bytes, UnallocatedBytes());
    if (bytes <= available_bytes) promises_.insert(promise.get());
  }
  if (bytes <= available_bytes) return promise;
  return ShortOf(Shortage::kMemory, field,
                 absl::StrCat(bytes, "; the machine has ", available_bytes,
                              " that are not promised, ", bytes - available_bytes, " bytes short"),
                 kRetryMemory);
}

std::shared_ptr<MemoryPromise> MemoryLedger::Restore(std::string_view tenant, MemoryUse use,
                                                     size_t bytes) {
  std::shared_ptr<MemoryPromise> promise(new MemoryPromise(shared_from_this(), tenant, use, bytes));
  const MutexLock lock(&mutex_);
  promises_.insert(promise.get());
  return promise;
}

void MemoryLedger::Remove(MemoryPromise* promise) {
  const MutexLock lock(&mutex_);
  promises_.erase(promise);
}

size_t MemoryLedger::UnpromisedBytes() const {
  const size_t available_bytes = ReadMemoryLimits(memory_root_).available_bytes;
  const MutexLock lock(&mutex_);
  return available_bytes - std::min(available_bytes, UnallocatedBytes());
}

size_t MemoryLedger::UnallocatedBytes() const {
  size_t bytes = 0;
  for (const MemoryPromise* promise : promises_) {
    bytes += promise->bytes_ - std::min(promise->bytes_, promise->allocated_bytes_.load());
  }
  return bytes;
}

absl::Status MemoryLedger::BeginAllocation(size_t bytes, bool promised) {
  const MemoryLimits limits = ReadMemoryLimits(memory_root_);
  const MutexLock lock(&mutex_);
  const size_t kept_bytes = kMarginBytes + (promised ? 0 : UnallocatedBytes());
  const size_t wanted_bytes = bytes + in_progress_bytes_ + kept_bytes;
  if (wanted_bytes > limits.available_bytes) {
    return ShortOf(Shortage::kMemory, "",
                   absl::StrCat(bytes, " bytes; ", limits.source, " leaves ",
                                limits.available_bytes, ", of which ", kept_bytes, " stay free, ",
                                wanted_bytes - limits.available_bytes, " bytes short"),
                   kRetryMemory);
  }
  in_progress_bytes_ += bytes;
  return absl::OkStatus();
}

void MemoryLedger::EndAllocation(size_t bytes) {
  const MutexLock lock(&mutex_);
  in_progress_bytes_ -= bytes;
}

std::vector<MemoryAccount> MemoryLedger::Accounts() const {
  std::map<std::pair<std::string, MemoryUse>, MemoryAccount> accounts;
  const MutexLock lock(&mutex_);
  for (const MemoryPromise* promise : promises_) {
    MemoryAccount& account = accounts[{promise->tenant_, promise->use_}];
    account.tenant = promise->tenant_;
    account.use = promise->use_;
    const size_t allocated_bytes = promise->allocated_bytes_.load();
    account.promised_bytes += std::max(promise->bytes_, allocated_bytes);
    account.allocated_bytes += allocated_bytes;
  }
  std::vector<MemoryAccount> all;
  all.reserve(accounts.size());
  for (auto& [key, account] : accounts) all.push_back(std::move(account));
  return all;
}

absl::Status MemoryPromise::Allocate(size_t bytes, absl::FunctionRef<bool()> make_present) {
  // The bytes that tables and rings need beyond their promises are few.
  const bool promised = use_ != MemoryUse::kPool || bytes_ > 0;
  RETURN_IF_ERROR(ledger_->BeginAllocation(bytes, promised));
  const bool granted = make_present();
  ledger_->EndAllocation(bytes);
  if (granted) return absl::OkStatus();
  return ShortOf(
      Shortage::kMemory, "",
      absl::StrCat(bytes, " bytes; the kernel refuses them: the file system may be full"),
      kRetryMemory);
}

}  // namespace pqcached::kvstore
