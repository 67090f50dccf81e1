#include "kvstore/share/staging.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/limits/granted_memory.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

absl::Status MakePresent(const FileDescriptor& memfd, const Mapping& mapping,
                         const std::shared_ptr<MemoryPromise>& promise) {
  const size_t size_bytes = mapping.size_bytes();
  GrantedMemory granted(memfd.get(), {mapping.data(), size_bytes}, size_bytes, promise);
  return ReplaceField("slot_bytes", granted.Ensure(0, size_bytes));
}

// Frees the memory of a ring, and keeps its size.
void FreeStaging(int descriptor) {
  struct stat info = {};
  if (fstat(descriptor, &info) != 0) return;
  fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, info.st_size);
}

}  // namespace

absl::StatusOr<std::shared_ptr<StagingRing>> StagingRing::Create(
    uint64_t slot_bytes, uint32_t slot_count, size_t max_bytes,
    std::shared_ptr<const ControlMemory> control, MemoryLedger* ledger, std::string_view tenant) {
  if (slot_bytes == 0 || slot_bytes % kStagingSlotMultiple != 0) {
    return InvalidArgument(
        "slot_bytes", absl::StrCat(slot_bytes, ", must be a multiple of ", kStagingSlotMultiple));
  }
  if (slot_count == 0 || slot_count > kMaxStagingSlots) {
    return InvalidArgument("slot_count",
                           absl::StrCat(slot_count, ", must lie in [1, ", kMaxStagingSlots, "]"));
  }
  if (slot_bytes > max_bytes / slot_count) {
    return ResourceExhausted("slot_bytes",
                             absl::StrCat(slot_count, " slots of ", slot_bytes,
                                          " bytes; max_staging_bytes is ", max_bytes),
                             kNoRetry);
  }
  const size_t size_bytes = slot_bytes * slot_count;
  std::shared_ptr<MemoryPromise> promise;
  if (ledger != nullptr) {
    ASSIGN_OR_RETURN(promise,
                     ledger->Promise(tenant, MemoryUse::kStaging, size_bytes, "slot_bytes"));
  }
  ASSIGN_OR_RETURN(auto memfd, CreateMemfd("pqcached-staging", size_bytes));
  ASSIGN_OR_RETURN(auto mapping, Mapping::Map(memfd, size_bytes, Mapping::Access::kReadWrite));
  RETURN_IF_ERROR(SealMemfd(memfd, WriteSeal::kNone));
  RETURN_IF_ERROR(MakePresent(memfd, mapping, promise));
  return std::shared_ptr<StagingRing>(new StagingRing(std::move(memfd), std::move(mapping),
                                                      std::move(promise), slot_bytes, slot_count,
                                                      std::move(control)));
}

StagingRing::~StagingRing() {
  if (free_at_end_.load(std::memory_order_relaxed)) FreeStaging(memfd_.get());
}

std::shared_ptr<const void> AdoptStagingRing(MemoryLedger& ledger, std::string_view tenant,
                                             FileDescriptor ring) {
  struct Adopted {
    FileDescriptor memory;
    std::shared_ptr<MemoryPromise> promise;

    Adopted(FileDescriptor memory_, std::shared_ptr<MemoryPromise> promise_)
        : memory(std::move(memory_)), promise(std::move(promise_)) {}
    ~Adopted() { FreeStaging(memory.get()); }
  };
  const size_t size_bytes = SizeOf(ring);
  auto promise = ledger.Restore(tenant, MemoryUse::kStaging, size_bytes);
  promise->SetAllocated(size_bytes);
  return std::make_shared<const Adopted>(std::move(ring), std::move(promise));
}

absl::StatusOr<SharedMemory> StagingRing::Share() const {
  ASSIGN_OR_RETURN(auto descriptor, Duplicate(memfd_.get()));
  return SharedMemory{.descriptor = std::move(descriptor), .size_bytes = mapping_.size_bytes()};
}

absl::Status StagingRing::MarkClaimed(const StagingReference& reference) {
  const MutexLock lock(&mutex_);
  if (reference.slot >= slots_.size()) {
    return InvalidArgument(
        "slot", absl::StrCat(reference.slot, "; the ring has ", slots_.size(), " slots"));
  }
  if (reference.offset_bytes > slot_bytes_ ||
      reference.size_bytes > slot_bytes_ - reference.offset_bytes) {
    return InvalidArgument("offset_bytes",
                           absl::StrCat(reference.offset_bytes, " with ", reference.size_bytes,
                                        " bytes; a slot has ", slot_bytes_));
  }
  Slot& slot = slots_[reference.slot];
  if (slot.claimed) {
    return FailedPrecondition("slot", absl::StrCat(reference.slot, " is in use by another call"));
  }
  if (reference.generation < slot.next_generation) {
    return FailedPrecondition("generation",
                              absl::StrCat(reference.generation, ", stale; slot ", reference.slot,
                                           " is at ", slot.next_generation));
  }
  slot.claimed = true;
  slot.next_generation = reference.generation + 1;
  return absl::OkStatus();
}

absl::StatusOr<StagedBytes> StagingRing::Claim(const StagingReference& reference) {
  RETURN_IF_ERROR(MarkClaimed(reference));
  // Runs without the lock: if allocating the claim fails, its deleter calls Release at once.
  const std::span<std::byte> whole(mapping_.data() + reference.slot * slot_bytes_, slot_bytes_);
  std::shared_ptr<const void> claim(this, [ring = shared_from_this(), index = reference.slot](
                                              const void*) { ring->Release(index); });
  return StagedBytes{.bytes = whole.subspan(reference.offset_bytes, reference.size_bytes),
                     .slot = whole,
                     .claim = std::move(claim)};
}

void StagingRing::Release(uint32_t slot) {
  {
    const MutexLock lock(&mutex_);
    slots_[slot].claimed = false;
    if (control_ == nullptr) return;
    control_->slot_word(slot).store(slots_[slot].next_generation, std::memory_order_release);
  }
  control_->Wake();
}

}  // namespace pqcached::kvstore
