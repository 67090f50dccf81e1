#include "kvstore/memory/pool.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
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
  if (!options.idle_reserve) {
    options.idle_reserve = std::make_shared<IdleReserve>(options.idle_reserve_bytes);
  }
  // The page size of the first pages predicts that of the others. When they are refused, so will be
  // the first extents, unless there is more memory by then.
  if (options.idle_reserve->size_bytes() > 0 &&
      granted->Ensure(0, std::min(memory.size(), kChunkBytes)).ok() && granted->huge()) {
    page_bytes = std::max(page_bytes, kHugePageBytes);
  }
  options.capacity_bytes = capacity_bytes;
  options.quota_bytes =
      options.quota_bytes == 0 ? capacity_bytes : std::min(options.quota_bytes, capacity_bytes);
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
      strict_(options.strict),
      grows_(options.grows),
      idle_reserve_(std::move(options.idle_reserve), options.capacity_bytes),
      units_(static_cast<uint32_t>(options.capacity_bytes >> kExtentUnitShift)),
      limit_bytes_(options.quota_bytes),
      granted_bytes_(options.grows ? 0 : options.capacity_bytes) {}

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
  if (idle_reserve_.exists()) toucher_ = std::thread([this] { TouchInBackground(); });
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

std::vector<UnitRange> Pool::NextFree(size_t size_bytes) const {
  std::vector<UnitRange> runs;
  size_t found_bytes = 0;
  for (const auto& [count, begin] : units_.runs()) {
    if (found_bytes >= size_bytes) break;
    runs.push_back({.begin = begin, .count = count});
    found_bytes += runs.back().size_bytes();
  }
  return runs;
}

void Pool::TouchReserve() {
  std::vector<UnitRange> runs;
  size_t wanted_bytes = 0;
  {
    const MutexLock lock(&mutex_);
    const size_t used_bytes = UsedBytes();
    const size_t limit_bytes = UseLimit();
    wanted_bytes =
        std::min(idle_reserve_.size_bytes(), limit_bytes - std::min(limit_bytes, used_bytes));
    runs = NextFree(wanted_bytes);
    touch_wanted_ = false;
    allocated_since_touch_bytes_ = 0;
  }
  const bool touched = TouchRuns(runs, wanted_bytes);
  const MutexLock lock(&mutex_);
  reserve_touched_ = touched;
}

bool Pool::TouchRuns(std::span<const UnitRange> runs, size_t wanted_bytes) {
  for (const UnitRange run : runs) {
    const size_t end = std::min(run.size_bytes(), wanted_bytes);
    wanted_bytes -= end;
    for (size_t begin = 0; begin < end; begin += kTouchBytes) {
      const size_t size_bytes = std::min(kTouchBytes, run.size_bytes() - begin);
      if (size_bytes > end - begin) break;  // a whole piece would exceed the reserve
      if (stop_touching_.load(std::memory_order_relaxed) ||
          touching_paused_.load(std::memory_order_relaxed) ||
          !granted_->Ensure(run.offset_bytes() + begin, size_bytes).ok()) {
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
  // The error of the first try does not have the reason why the pool cannot grow.
  return grows_ && !extents.ok() ? TryAllocate(sizes_bytes) : std::move(extents);
}

std::string Pool::ReasonOfLimit() const {
  if (granted_bytes_ < limit_bytes_) return grant_refusal_;
  if (limit_reason_.empty() && quota_bytes_ < capacity_bytes_) {
    return absl::StrCat("; quota_bytes is ", quota_bytes_);
  }
  return limit_reason_;
}

absl::StatusOr<std::vector<Extent>> Pool::TryAllocate(std::span<const size_t> sizes_bytes) {
  std::vector<UnitRange> places(sizes_bytes.size());
  std::vector<uint32_t> longest_first(sizes_bytes.size());  // what they leave is for shorter ones
  std::iota(longest_first.begin(), longest_first.end(), 0u);
  std::stable_sort(longest_first.begin(), longest_first.end(),
                   [&](uint32_t a, uint32_t b) { return sizes_bytes[a] > sizes_bytes[b]; });
  size_t wanted_bytes = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    const size_t units = std::min(UnitsFor(sizes_bytes[i]), size_t{1} << kMaxExtentOrder);
    places[i].count = static_cast<uint32_t>(units);
    wanted_bytes += std::max(sizes_bytes[i], places[i].size_bytes());
  }
  size_t shortfall_bytes = 0;
  std::string why;
  {
    const MutexLock lock(&mutex_);
    const size_t free_bytes = static_cast<size_t>(units_.free_units()) << kExtentUnitShift;
    const size_t used_bytes = UsedBytes();
    if (const size_t limit_bytes = UseLimit(); used_bytes + wanted_bytes > limit_bytes) {
      shortfall_bytes = used_bytes + wanted_bytes - limit_bytes;
      why = ReasonOfLimit();
    }
    if (wanted_bytes > free_bytes) {
      shortfall_bytes = std::max(shortfall_bytes, wanted_bytes - free_bytes);
    }
    for (size_t i = 0; shortfall_bytes == 0 && i < places.size(); ++i) {
      UnitRange& place = places[longest_first[i]];
      const auto unit = units_.Allocate(place.count);
      if (unit.has_value()) {
        place.begin = *unit;
        continue;
      }
      const size_t longest_bytes = size_t{units_.longest_run()} << kExtentUnitShift;
      shortfall_bytes = std::max(kMinExtentBytes,
                                 place.size_bytes() - std::min(place.size_bytes(), longest_bytes));
      for (size_t j = 0; j < i; ++j) units_.Free(places[longest_first[j]]);
    }
    for (size_t i = 0; shortfall_bytes == 0 && ledger_ != nullptr && i < places.size(); ++i) {
      ledger_->MarkUsed(places[i]);
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
  extents.reserve(places.size());
  for (const UnitRange place : places) {
    const ExtentRef ref{.unit = place.begin, .order = OrderFor(place.size_bytes())};
    extents.emplace_back(shared_from_this(), ref, place.count);
  }
  RETURN_IF_ERROR(MakePresent(extents));
  return extents;
}

void Pool::CountAllocated(size_t size_bytes) {
  peak_used_bytes_ = std::max(peak_used_bytes_, UsedBytes());
  allocated_since_touch_bytes_ += size_bytes;
  const size_t reserve_bytes = idle_reserve_.Use();
  if (touch_wanted_ || allocated_since_touch_bytes_ < reserve_bytes / kReserveParts) return;
  touch_wanted_ = true;
  touch_.SignalOne();
}

absl::Status Pool::MakePresent(std::span<const Extent> extents) {
  for (const Extent& extent : extents) {
    if (absl::Status status = granted_->Ensure(extent.units().offset_bytes(), extent.size_bytes());
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

FreeMap Pool::free_map(size_t more_bytes) const {
  const MutexLock lock(&mutex_);
  std::unordered_set<uint32_t> pinned_units;
  for (const auto& [unit, count] : claimed_) pinned_units.insert(unit);
  const size_t granted_bytes = granted_bytes_ + std::min(more_bytes, SIZE_MAX - granted_bytes_);
  return {units_, std::min(limit_bytes_, granted_bytes), std::move(pinned_units)};
}

size_t Pool::UseLimit() const { return std::min(limit_bytes_, granted_bytes_); }

size_t Pool::granted_bytes() const {
  const MutexLock lock(&mutex_);
  return granted_bytes_;
}

size_t Pool::MissingGrantBytes(std::span<const size_t> sizes_bytes) const {
  const size_t wanted_bytes = ExtentDemand(sizes_bytes).bytes();
  const MutexLock lock(&mutex_);
  const size_t used_bytes = UsedBytes();
  if (wanted_bytes > limit_bytes_ - std::min(limit_bytes_, used_bytes)) return 0;
  const size_t needed_bytes = used_bytes + wanted_bytes;
  return needed_bytes - std::min(needed_bytes, granted_bytes_);
}

void Pool::GrantUse(size_t bytes) {
  {
    const MutexLock lock(&mutex_);
    granted_bytes_ += std::min(bytes, capacity_bytes_ - granted_bytes_);
    touch_wanted_ = true;
  }
  touch_.SignalAll();
}

void Pool::RefuseUse(std::string why) {
  const MutexLock lock(&mutex_);
  grant_refusal_ = std::move(why);
}

void Pool::ReturnGrant(bool at_once) {
  if (!grows_) return;
  const size_t kept_bytes = KeepsPages() ? capacity_bytes_ - absent_bytes() : 0;
  const MutexLock lock(&mutex_);
  const size_t least_bytes = std::max(UsedBytes(), kept_bytes);
  const size_t peak_bytes = std::max({least_bytes, peak_used_bytes_, previous_peak_bytes_});
  const size_t steps_bytes = (peak_bytes + kGrantBytes - 1) / kGrantBytes * kGrantBytes;
  granted_bytes_ = std::min(granted_bytes_, at_once ? least_bytes : steps_bytes);
}

void Pool::GrantClaimed() {
  if (grows_) granted_bytes_ = std::max(granted_bytes_, UsedBytes());
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

void Pool::VisitFree(size_t piece_bytes, absl::FunctionRef<bool(UnitRange piece)> visit) const {
  std::set<std::pair<uint32_t, uint32_t>> runs;
  {
    const MutexLock lock(&mutex_);
    runs = units_.runs();
  }
  const auto piece = static_cast<uint32_t>(piece_bytes >> kExtentUnitShift);
  for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
    const auto& [count, begin] = *run;
    uint32_t end = begin + count;
    while (end > begin) {  // pieces are aligned, as pages are
      const uint32_t first = std::max(begin, (end - 1) / piece * piece);
      if (!visit({.begin = first, .count = end - first})) return;
      end = first;
    }
  }
}

size_t Pool::ReturnFreePages(size_t wanted_bytes) {
  if (KeepsPages()) return 0;
  size_t returned_bytes = 0;
  VisitFree(kReturnBytes, [&](UnitRange piece) {
    if (returned_bytes >= wanted_bytes) return false;
    returned_bytes += ReturnPages(piece);
    return true;
  });
  return returned_bytes;
}

bool Pool::AlwaysKeepsPages() const { return strict_ || IsOnHugetlbfs(memfd_.get()); }

bool Pool::KeepsPages() const {
  if (AlwaysKeepsPages()) return true;
  const MutexLock lock(&mutex_);
  return page_holds_ > 0;
}

PageHold Pool::HoldPages() {
  {
    const MutexLock lock(&mutex_);
    ++page_holds_;
  }
  return {this, [pool = weak_from_this()](const void*) {
            if (const auto held = pool.lock()) held->ReleaseHold();
          }};
}

void Pool::ReleaseHold() {
  const MutexLock lock(&mutex_);
  if (page_holds_ > 0) --page_holds_;  // EndHolds may have ended it
}

void Pool::EndHolds() {
  const MutexLock lock(&mutex_);
  page_holds_ = 0;
}

size_t Pool::ReturnUnusedPages() {
  size_t allowed_bytes = idle_reserve_.EndInterval();
  {
    const MutexLock lock(&mutex_);
    const size_t used_bytes = UsedBytes();
    const size_t most_bytes = std::max({used_bytes, peak_used_bytes_, previous_peak_bytes_});
    previous_peak_bytes_ = std::max(used_bytes, peak_used_bytes_);
    peak_used_bytes_ = used_bytes;
    allowed_bytes += most_bytes + most_bytes / kSpareParts;
  }
  if (KeepsPages()) return 0;
  const size_t resident_bytes = capacity_bytes_ - absent_bytes();
  return resident_bytes > allowed_bytes ? ReturnFreePages(resident_bytes - allowed_bytes) : 0;
}

// A piece that is allocated concurrently is overwritten by its owner. Where pages stay, writing to
// a chunk would make its absent pages present, so chunks without pages are left out.
void Pool::EraseFree() {
  VisitFree(kReturnBytes, [&](UnitRange units) {
    if (!HasPages(units)) return true;
    {
      const MutexLock lock(&mutex_);
      if (!units_.Claim(units)) return true;
    }
    if (!RemovePages(units)) std::memset(data(units), 0, units.size_bytes());
    Free(units);
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
  std::vector<UnitRange> taken;
  uint64_t ends = 0;
  {
    const MutexLock lock(&mutex_);
    taken.swap(quarantine_);
    ends = quarantine_ends_;
  }
  for (const UnitRange all : taken) {
    UnitRange units = all;
    for (uint32_t left = all.count; left > 0; left -= units.count, units.begin += units.count) {
      units.count = std::min<uint32_t>(left, kReturnBytes >> kExtentUnitShift);
      if (HasPages(units) && !RemovePages(units)) std::memset(data(units), 0, units.size_bytes());
    }
  }
  const MutexLock lock(&mutex_);
  quarantine_.insert(quarantine_.end(), taken.begin(), taken.end());
  if (ends != quarantine_ends_) FreeQuarantined();
}

bool Pool::HasPages(UnitRange units) const {
  const auto begin = static_cast<off_t>(units.offset_bytes());
  const off_t present = lseek(memfd_.get(), begin, SEEK_DATA);
  const off_t end = begin + static_cast<off_t>(units.size_bytes());
  // If the file system does not support SEEK_DATA, assumes that there are pages.
  return present < 0 ? errno != ENXIO : present < end;
}

// Holds the lock while the pages are removed, so that the extent is not allocated concurrently. The
// chunks count as absent before that, so that the next owner allocates their pages again.
size_t Pool::ReturnPages(UnitRange units) {
  if (!HasPages(units)) return 0;
  size_t returned_bytes = 0;
  granted_->Remove(units.offset_bytes(), units.size_bytes(), [&] {
    const MutexLock lock(&mutex_);
    if (!units_.IsFree(units)) return;
    if (page_holds_ > 0) return;
    const size_t before_bytes = absent_bytes();
    PQC_CRASH_POINT();
    if (madvise(data(units), units.size_bytes(), MADV_REMOVE) != 0) return;
    returned_bytes = absent_bytes() - before_bytes;
  });
  return returned_bytes;
}

bool Pool::RemovePages(UnitRange units) {
  bool removed = false;
  granted_->Remove(units.offset_bytes(), units.size_bytes(), [&] {
    const MutexLock lock(&mutex_);
    if (page_holds_ > 0) return;
    PQC_CRASH_POINT();
    removed = madvise(data(units), units.size_bytes(), MADV_REMOVE) == 0;
  });
  return removed;
}

void Pool::Free(UnitRange units) {
  const MutexLock lock(&mutex_);
  if (ledger_ != nullptr && ledger_->detached()) return;  // stays in use for the next process
  if (claimed_.erase(units.begin) > 0) {
    quarantine_.push_back(units);
    return;
  }
  if (ledger_ != nullptr) ledger_->MarkFree(units);
  units_.Free(units);
}

std::optional<Extent> Pool::Claim(ExtentRef extent, size_t size_bytes) {
  const uint64_t unit_count = capacity_bytes_ >> kExtentUnitShift;
  if (extent.order != OrderFor(size_bytes) || extent.order > kMaxExtentOrder ||
      extent.unit + (uint64_t{1} << extent.order) > unit_count) {
    return std::nullopt;
  }
  const UnitRange units{extent.unit, static_cast<uint32_t>(UnitsFor(size_bytes))};
  const MutexLock lock(&mutex_);
  if (!units_.Claim(units)) return std::nullopt;
  claimed_.emplace(units.begin, units.count);
  GrantClaimed();
  if (ledger_ != nullptr) ledger_->MarkUsed(units);
  return Extent(shared_from_this(), extent, units.count);
}

void Pool::BeginQuarantine() {
  const size_t kept_bytes = capacity_bytes_ - absent_bytes();
  const MutexLock lock(&mutex_);
  const auto unit_count = static_cast<uint32_t>(capacity_bytes_ >> kExtentUnitShift);
  std::vector<bool> known(unit_count);
  for (const auto& [unit, count] : claimed_) std::fill_n(known.begin() + unit, count, true);
  for (const UnitRange units : quarantine_) {
    std::fill_n(known.begin() + units.begin, units.count, true);
  }
  const auto is_orphan = [&](uint32_t unit) { return ledger_->is_used(unit) && !known[unit]; };
  for (uint32_t begin = 0; begin < unit_count; ++begin) {
    uint32_t end = begin;
    while (end < unit_count && is_orphan(end)) ++end;
    if (end == begin) continue;
    const UnitRange orphans{.begin = begin, .count = end - begin};
    if (units_.Claim(orphans)) quarantine_.push_back(orphans);
    begin = end;
  }
  GrantClaimed();
  if (grows_ && AlwaysKeepsPages()) granted_bytes_ = std::max(granted_bytes_, kept_bytes);
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
  for (const UnitRange units : quarantine_) {
    ledger_->MarkFree(units);
    units_.Free(units);
  }
  quarantine_.clear();
}

PoolUsage Pool::usage() const {
  const MutexLock lock(&mutex_);
  size_t quarantined_bytes = 0;
  for (const UnitRange units : quarantine_) quarantined_bytes += units.size_bytes();
  return PoolUsage{
      .capacity_bytes = capacity_bytes_,
      .used_bytes = UsedBytes(),
      .free_bytes = static_cast<size_t>(units_.free_units()) << kExtentUnitShift,
      .largest_free_bytes = static_cast<size_t>(units_.longest_run()) << kExtentUnitShift,
      .quarantined_bytes = quarantined_bytes,
      .limit_bytes = UseLimit(),
  };
}

}  // namespace pqcached::kvstore
