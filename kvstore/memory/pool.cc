#include "kvstore/memory/pool.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/read/pages.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

// Pages of extents are allocated in steps of this size.
constexpr size_t kChunkBytes = kHugePageBytes;
// Bytes per step of a touching thread: 5 ms at 0.4 GB/s. During a step the kernel holds a lock of
// the process's memory, for which calls of all tenants may wait.
constexpr size_t kTouchBytes = kChunkBytes;

// Bounds the retries: memory that the reclaimer frees may be allocated by other threads first.
constexpr int kMaxReclaims = 4;
// Largest piece of free memory that allocations cannot use while it is erased.
constexpr size_t kEraseBytes = size_t{64} << 20;
// Largest piece whose pages are returned to the machine in one step, during which allocations wait.
constexpr size_t kReturnBytes = kChunkBytes;
// The toucher runs when allocations have used this part of the idle reserve.
constexpr size_t kReserveParts = 8;
// The pages of this part of the bytes in use may stay in addition to the idle reserve.
constexpr size_t kSpareParts = 5;

// The kernel reserves all pages of a mapping of hugetlbfs for it, so that none of them returns.
bool IsOnHugetlbfs(int descriptor) {
  struct statfs system = {};
  return fstatfs(descriptor, &system) == 0 &&
         static_cast<uint64_t>(system.f_type) == HUGETLBFS_MAGIC;
}

absl::Status PoolError(const absl::Status& status) {
  return ReplaceText(absl::StrCat("pool: ", TextOf(status)), status);
}

}  // namespace

absl::StatusOr<std::shared_ptr<Pool>> Pool::Create(Options options) {
  constexpr size_t kMaxCapacityBytes = kMinExtentBytes << kMaxExtentOrder;
  if (options.capacity_bytes == 0 || options.capacity_bytes > kMaxCapacityBytes) {
    return InvalidArgument(
        "capacity_bytes",
        absl::StrCat(options.capacity_bytes, ", must lie in [1, ", kMaxCapacityBytes, "]"));
  }
  const size_t capacity_bytes =
      (options.capacity_bytes + kMinExtentBytes - 1) / kMinExtentBytes * kMinExtentBytes;
  ASSIGN_OR_RETURN(FileDescriptor memfd, options.memory >= 0
                                             ? Duplicate(options.memory)
                                             : CreateMemfd("pqcached-pool", capacity_bytes));
  if (options.mapping.data() == nullptr) {
    auto mapping = Mapping::Map(memfd, capacity_bytes, Mapping::Access::kReadWrite);
    if (!mapping.ok()) return PoolError(mapping.status());
    options.mapping = *std::move(mapping);
  }
  if (options.memory < 0) {
    absl::Status sealed =
        SealMemfd(memfd, options.strict ? WriteSeal::kFutureWrite : WriteSeal::kNone);
    if (!sealed.ok()) return PoolError(sealed);
  }
  const std::span<std::byte> memory(options.mapping.data(), capacity_bytes);
  size_t page_bytes = AdviseHugePages(memfd.get(), memory);
  auto granted =
      std::make_unique<GrantedMemory>(memfd.get(), memory, kChunkBytes, std::move(options.promise));
  // The page size of the first pages predicts that of the others. When they are refused, so will be
  // the first extents, unless there is more memory by then.
  if (options.idle_reserve_bytes > 0 &&
      granted->Ensure(0, std::min(memory.size(), kChunkBytes)).ok() && granted->huge()) {
    page_bytes = std::max(page_bytes, kHugePageBytes);
  }
  options.capacity_bytes = capacity_bytes;
  options.quota_bytes =
      options.quota_bytes == 0 ? capacity_bytes : std::min(options.quota_bytes, capacity_bytes);
  options.idle_reserve_bytes = std::min(options.idle_reserve_bytes, capacity_bytes);
  std::shared_ptr<Pool> pool(
      new Pool(std::move(memfd), std::move(options), page_bytes, std::move(granted)));
  pool->StartTouching();
  return pool;
}

Pool::Pool(FileDescriptor memfd, Options options, size_t page_bytes,
           std::unique_ptr<GrantedMemory> granted)
    : memfd_(std::move(memfd)),
      mapping_(std::move(options.mapping)),
      base_(mapping_.data()),
      capacity_bytes_(options.capacity_bytes),
      page_bytes_(page_bytes),
      granted_(std::move(granted)),
      ledger_(std::move(options.ledger)),
      quota_bytes_(options.quota_bytes),
      idle_reserve_bytes_(options.idle_reserve_bytes),
      strict_(options.strict),
      buddy_(static_cast<uint32_t>(options.capacity_bytes >> kExtentUnitShift)),
      limit_bytes_(options.quota_bytes) {}

Pool::~Pool() {
  if (!toucher_.joinable()) return;
  {
    const MutexLock lock(&mutex_);
    stop_touching_.store(true, std::memory_order_relaxed);
  }
  touch_.SignalAll();
  toucher_.join();
}

absl::StatusOr<SharedMemory> Pool::Share() const {
  ASSIGN_OR_RETURN(auto descriptor, OpenReadOnly(memfd_.get()));
  return SharedMemory{.descriptor = std::move(descriptor), .size_bytes = capacity_bytes_};
}

void Pool::StartTouching() {
  if (idle_reserve_bytes_ > 0) toucher_ = std::thread([this] { TouchInBackground(); });
}

void Pool::TouchInBackground() {
  for (;;) {
    {
      const MutexLock lock(&mutex_);
      while (!stop_touching_.load(std::memory_order_relaxed) &&
             (!touch_wanted_ || touching_paused_.load(std::memory_order_relaxed))) {
        touch_.Wait(&mutex_);
      }
      if (stop_touching_.load(std::memory_order_relaxed)) return;
    }
    TouchReserve();
  }
}

std::vector<ExtentRef> Pool::NextFree(size_t size_bytes) const {
  std::vector<ExtentRef> extents;
  size_t found_bytes = 0;
  for (uint32_t order = 0; order < buddy_.free().size(); ++order) {
    for (const uint32_t unit : buddy_.free()[order]) {
      if (found_bytes >= size_bytes) return extents;
      extents.push_back({.unit = unit, .order = order});
      found_bytes += extents.back().size_bytes();
    }
  }
  return extents;
}

void Pool::TouchReserve() {
  std::vector<ExtentRef> extents;
  size_t wanted_bytes = 0;
  {
    const MutexLock lock(&mutex_);
    const size_t used_bytes = static_cast<size_t>(buddy_.used_units()) << kExtentUnitShift;
    wanted_bytes = std::min(idle_reserve_bytes_, limit_bytes_ - std::min(limit_bytes_, used_bytes));
    extents = NextFree(wanted_bytes);
    touch_wanted_ = false;
    allocated_since_touch_bytes_ = 0;
  }
  const bool touched = TouchExtents(extents, wanted_bytes);
  const MutexLock lock(&mutex_);
  reserve_touched_ = touched;
}

bool Pool::TouchExtents(std::span<const ExtentRef> extents, size_t wanted_bytes) {
  for (const ExtentRef extent : extents) {
    const size_t end = std::min(extent.size_bytes(), wanted_bytes);
    wanted_bytes -= end;
    for (size_t begin = 0; begin < end; begin += kTouchBytes) {
      const size_t size_bytes = std::min(kTouchBytes, extent.size_bytes() - begin);
      if (size_bytes > end - begin) break;  // a whole piece would exceed the reserve
      if (stop_touching_.load(std::memory_order_relaxed) ||
          touching_paused_.load(std::memory_order_relaxed) ||
          !granted_->Ensure(extent.offset_bytes() + begin, size_bytes).ok()) {
        return false;
      }
    }
  }
  return true;
}

void Pool::PauseTouching(bool paused) {
  {
    const MutexLock lock(&mutex_);
    const bool was_paused = touching_paused_.exchange(paused, std::memory_order_relaxed);
    if (!paused && (was_paused || !reserve_touched_)) touch_wanted_ = true;
  }
  touch_.SignalAll();
}

absl::StatusOr<std::vector<Extent>> Pool::Allocate(std::span<const size_t> sizes_bytes) {
  absl::StatusOr<std::vector<Extent>> extents = TryAllocate(sizes_bytes);
  for (int i = 0; i < kMaxReclaims && !extents.ok() && Reclaim(sizes_bytes); ++i) {
    extents = TryAllocate(sizes_bytes);
  }
  return extents;
}

absl::StatusOr<std::vector<Extent>> Pool::TryAllocate(std::span<const size_t> sizes_bytes) {
  std::vector<ExtentRef> refs;
  refs.reserve(sizes_bytes.size());
  size_t wanted_bytes = 0;
  for (const size_t size_bytes : sizes_bytes) {
    refs.push_back(ExtentRef{.unit = 0, .order = OrderFor(size_bytes)});
    wanted_bytes += refs.back().size_bytes();
  }
  size_t shortfall_bytes = 0;
  std::string why;
  {
    const MutexLock lock(&mutex_);
    const size_t free_bytes = static_cast<size_t>(buddy_.free_units()) << kExtentUnitShift;
    const size_t used_bytes = static_cast<size_t>(buddy_.used_units()) << kExtentUnitShift;
    if (used_bytes + wanted_bytes > limit_bytes_) {
      shortfall_bytes = used_bytes + wanted_bytes - limit_bytes_;
      why = limit_reason_;
      if (why.empty() && quota_bytes_ < capacity_bytes_) {
        why = absl::StrCat("; quota_bytes is ", quota_bytes_);
      }
    }
    if (wanted_bytes > free_bytes) {
      shortfall_bytes = std::max(shortfall_bytes, wanted_bytes - free_bytes);
    }
    for (size_t i = 0; shortfall_bytes == 0 && i < refs.size(); ++i) {
      const auto unit = buddy_.Allocate(refs[i].order);
      if (unit.has_value()) {
        refs[i].unit = *unit;
        continue;
      }
      shortfall_bytes = refs[i].size_bytes() -
                        (static_cast<size_t>(buddy_.largest_free_units()) << kExtentUnitShift);
      for (size_t j = 0; j < i; ++j) buddy_.Free(refs[j].unit, refs[j].order);
    }
    for (size_t i = 0; shortfall_bytes == 0 && ledger_ != nullptr && i < refs.size(); ++i) {
      ledger_->MarkUsed(refs[i]);
    }
    if (shortfall_bytes == 0) CountAllocated(wanted_bytes);
  }
  if (shortfall_bytes > 0) {
    return ResourceExhausted("",
                             absl::StrCat("pool of ", capacity_bytes_, " bytes: ", wanted_bytes,
                                          " bytes wanted, ", shortfall_bytes, " bytes short", why),
                             kRetryMemory);
  }
  std::vector<Extent> extents;
  extents.reserve(refs.size());
  for (const ExtentRef ref : refs) extents.emplace_back(shared_from_this(), ref);
  RETURN_IF_ERROR(MakePresent(extents));
  return extents;
}

void Pool::CountAllocated(size_t size_bytes) {
  const size_t used_bytes = static_cast<size_t>(buddy_.used_units()) << kExtentUnitShift;
  peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes);
  allocated_since_touch_bytes_ += size_bytes;
  if (touch_wanted_ || allocated_since_touch_bytes_ < idle_reserve_bytes_ / kReserveParts) return;
  touch_wanted_ = true;
  touch_.SignalOne();
}

absl::Status Pool::MakePresent(std::span<const Extent> extents) {
  for (const Extent& extent : extents) {
    const ExtentRef ref = extent.ref();
    if (absl::Status status = granted_->Ensure(ref.offset_bytes(), ref.size_bytes());
        !status.ok()) {
      return PoolError(status);
    }
  }
  return absl::OkStatus();
}

bool Pool::Reclaim(std::span<const size_t> sizes_bytes) {
  const MutexLock lock(&reclaim_mutex_);
  return reclaimer_ && reclaimer_(sizes_bytes);
}

void Pool::SetReclaimer(Reclaimer reclaimer) {
  const MutexLock lock(&reclaim_mutex_);
  reclaimer_ = std::move(reclaimer);
}

FreeMap Pool::free_map() const {
  const MutexLock lock(&mutex_);
  std::unordered_set<uint32_t> pinned_units;
  for (const auto& [unit, order] : claimed_) pinned_units.insert(unit);
  return {buddy_.free(), static_cast<size_t>(buddy_.used_units()) << kExtentUnitShift, limit_bytes_,
          std::move(pinned_units)};
}

void Pool::SetUseLimit(size_t bytes, std::string why) {
  {
    const MutexLock lock(&mutex_);
    const size_t before_bytes = std::exchange(limit_bytes_, std::min(bytes, quota_bytes_));
    limit_reason_ = std::move(why);
    if (limit_bytes_ <= before_bytes) return;
    touch_wanted_ = true;
  }
  touch_.SignalAll();
}

void Pool::VisitFree(size_t piece_bytes, absl::FunctionRef<bool(ExtentRef piece)> visit) const {
  std::vector<std::set<uint32_t>> free;
  {
    const MutexLock lock(&mutex_);
    free = buddy_.free();
  }
  for (uint32_t order = static_cast<uint32_t>(free.size()); order-- > 0;) {
    const uint32_t piece = std::min(order, OrderFor(piece_bytes));
    for (auto first = free[order].rbegin(); first != free[order].rend(); ++first) {
      for (uint64_t count = uint64_t{1} << (order - piece); count-- > 0;) {
        const auto unit = static_cast<uint32_t>(*first + (count << piece));
        if (!visit({.unit = unit, .order = piece})) return;
      }
    }
  }
}

size_t Pool::ReturnFreePages(size_t wanted_bytes) {
  if (strict_) return 0;
  size_t returned_bytes = 0;
  VisitFree(kReturnBytes, [&](ExtentRef piece) {
    if (returned_bytes >= wanted_bytes) return false;
    returned_bytes += ReturnPages(piece);
    return true;
  });
  return returned_bytes;
}

size_t Pool::ReturnUnusedPages() {
  if (strict_ || IsOnHugetlbfs(memfd_.get())) return 0;
  size_t allowed_bytes = idle_reserve_bytes_;
  {
    const MutexLock lock(&mutex_);
    const size_t used_bytes = static_cast<size_t>(buddy_.used_units()) << kExtentUnitShift;
    const size_t most_bytes = std::max({used_bytes, peak_used_bytes_, previous_peak_bytes_});
    previous_peak_bytes_ = std::max(used_bytes, peak_used_bytes_);
    peak_used_bytes_ = used_bytes;
    allowed_bytes += most_bytes + most_bytes / kSpareParts;
  }
  const size_t resident_bytes = capacity_bytes_ - absent_bytes();
  return resident_bytes > allowed_bytes ? ReturnFreePages(resident_bytes - allowed_bytes) : 0;
}

// A piece that is allocated concurrently is overwritten by its owner.
void Pool::EraseFree() {
  VisitFree(kEraseBytes, [&](ExtentRef piece) {
    if (!HasPages(piece)) return true;
    {
      const MutexLock lock(&mutex_);
      if (!buddy_.Claim(piece.unit, piece.order)) return true;
    }
    if (!RemovePages(piece)) std::memset(data(piece), 0, piece.size_bytes());
    Free(piece);
    return true;
  });
  EraseQuarantined();
  {
    const MutexLock lock(&mutex_);
    touch_wanted_ = true;
  }
  touch_.SignalAll();
}

// Takes the extents out of the quarantine meanwhile, so that its end does not free them.
void Pool::EraseQuarantined() {
  std::vector<ExtentRef> taken;
  uint64_t ends = 0;
  {
    const MutexLock lock(&mutex_);
    taken.swap(quarantine_);
    ends = quarantine_ends_;
  }
  for (const ExtentRef extent : taken) {
    if (HasPages(extent) && !RemovePages(extent)) {
      std::memset(data(extent), 0, extent.size_bytes());
    }
  }
  const MutexLock lock(&mutex_);
  quarantine_.insert(quarantine_.end(), taken.begin(), taken.end());
  if (ends != quarantine_ends_) FreeQuarantined();
}

bool Pool::HasPages(ExtentRef extent) const {
  const auto begin = static_cast<off_t>(extent.offset_bytes());
  const off_t present = lseek(memfd_.get(), begin, SEEK_DATA);
  const off_t end = begin + static_cast<off_t>(extent.size_bytes());
  // If the file system does not support SEEK_DATA, assumes that there are pages.
  return present < 0 ? errno != ENXIO : present < end;
}

// Holds the lock while the pages are removed, so that the extent is not allocated concurrently. The
// chunks count as absent before that, so that the next owner allocates their pages again.
size_t Pool::ReturnPages(ExtentRef extent) {
  if (!HasPages(extent)) return 0;
  size_t returned_bytes = 0;
  granted_->Remove(extent.offset_bytes(), extent.size_bytes(), [&] {
    const MutexLock lock(&mutex_);
    if (!buddy_.IsFree(extent.unit, extent.order)) return;
    const size_t before_bytes = absent_bytes();
    PQC_CRASH_POINT();
    if (madvise(data(extent), extent.size_bytes(), MADV_REMOVE) != 0) return;
    returned_bytes = absent_bytes() - before_bytes;
  });
  return returned_bytes;
}

bool Pool::RemovePages(ExtentRef extent) {
  bool removed = false;
  granted_->Remove(extent.offset_bytes(), extent.size_bytes(), [&] {
    PQC_CRASH_POINT();
    removed = madvise(data(extent), extent.size_bytes(), MADV_REMOVE) == 0;
  });
  return removed;
}

void Pool::Free(ExtentRef extent) {
  const MutexLock lock(&mutex_);
  if (ledger_ != nullptr && ledger_->detached()) return;  // stays in use for the next process
  if (claimed_.erase(extent.unit) > 0) {
    quarantine_.push_back(extent);
    return;
  }
  if (ledger_ != nullptr) ledger_->MarkFree(extent);
  buddy_.Free(extent.unit, extent.order);
}

std::optional<Extent> Pool::Claim(ExtentRef extent) {
  const uint64_t end = uint64_t{extent.unit} + (uint64_t{1} << std::min(extent.order, 32u));
  if (end > capacity_bytes_ >> kExtentUnitShift) return std::nullopt;
  const MutexLock lock(&mutex_);
  if (!buddy_.Claim(extent.unit, extent.order)) return std::nullopt;
  claimed_.emplace(extent.unit, extent.order);
  if (ledger_ != nullptr) ledger_->MarkUsed(extent);
  return Extent(shared_from_this(), extent);
}

void Pool::BeginQuarantine() {
  const MutexLock lock(&mutex_);
  const auto unit_count = static_cast<uint32_t>(capacity_bytes_ >> kExtentUnitShift);
  std::vector<bool> known(unit_count);
  for (const auto& [unit, order] : claimed_) {
    std::fill_n(known.begin() + unit, uint32_t{1} << order, true);
  }
  for (const ExtentRef& extent : quarantine_) {
    std::fill_n(known.begin() + extent.unit, uint32_t{1} << extent.order, true);
  }
  const auto is_orphan = [&](uint32_t unit) { return ledger_->is_used(unit) && !known[unit]; };
  for (uint32_t begin = 0; begin < unit_count; ++begin) {
    uint32_t end = begin;
    while (end < unit_count && is_orphan(end)) ++end;
    if (end == begin) continue;
    Quarantine(begin, end);
    begin = end;
  }
}

// Covers the units with the longest aligned extents.
void Pool::Quarantine(uint32_t begin, uint32_t end) {
  while (begin < end) {
    const uint32_t fits = static_cast<uint32_t>(std::bit_width(end - begin)) - 1;
    const uint32_t aligned = begin == 0 ? fits : static_cast<uint32_t>(std::countr_zero(begin));
    const ExtentRef extent{.unit = begin, .order = std::min({fits, aligned, kMaxExtentOrder})};
    if (buddy_.Claim(extent.unit, extent.order)) quarantine_.push_back(extent);
    begin += uint32_t{1} << extent.order;
  }
}

bool Pool::EndQuarantine() {
  if (ledger_ == nullptr) return false;  // without a ledger there is no earlier process
  const MutexLock lock(&mutex_);
  const bool any = !claimed_.empty() || !quarantine_.empty();
  ++quarantine_ends_;
  claimed_.clear();
  FreeQuarantined();
  return any;
}

void Pool::FreeQuarantined() {
  for (const ExtentRef& extent : quarantine_) {
    ledger_->MarkFree(extent);
    buddy_.Free(extent.unit, extent.order);
  }
  quarantine_.clear();
}

PoolUsage Pool::usage() const {
  const MutexLock lock(&mutex_);
  size_t quarantined_bytes = 0;
  for (const ExtentRef& extent : quarantine_) quarantined_bytes += extent.size_bytes();
  return PoolUsage{
      .capacity_bytes = capacity_bytes_,
      .used_bytes = static_cast<size_t>(buddy_.used_units()) << kExtentUnitShift,
      .free_bytes = static_cast<size_t>(buddy_.free_units()) << kExtentUnitShift,
      .largest_free_bytes = static_cast<size_t>(buddy_.largest_free_units()) << kExtentUnitShift,
      .quarantined_bytes = quarantined_bytes,
      .limit_bytes = limit_bytes_,
  };
}

}  // namespace pqcached::kvstore
