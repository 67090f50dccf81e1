#include "kvstore/memory/run_allocator.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "kernels/base/check.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kLongUnits = 8;       // 512 KiB
constexpr uint32_t kWindowUnits = 1024;  // 64 MiB

}  // namespace

RunAllocator::RunAllocator(uint32_t unit_count) : unit_count_(unit_count) {
  if (unit_count > 0) Add({.begin = 0, .count = unit_count});
}

void RunAllocator::Add(UnitRange run) {
  lengths_.emplace(run.begin, run.count);
  runs_.emplace(run.count, run.begin);
  free_units_ += run.count;
}

void RunAllocator::Remove(std::map<uint32_t, uint32_t>::iterator run) {
  free_units_ -= run->second;
  runs_.erase({run->second, run->first});
  lengths_.erase(run);
}

void RunAllocator::Take(std::map<uint32_t, uint32_t>::iterator run, UnitRange units) {
  const UnitRange whole{.begin = run->first, .count = run->second};
  const uint32_t before = units.begin - whole.begin;
  const uint32_t behind = whole.count - before - units.count;
  Remove(run);
  if (before > 0) Add({.begin = whole.begin, .count = before});
  if (behind > 0) Add({.begin = units.begin + units.count, .count = behind});
}

std::optional<uint32_t> RunAllocator::Place(UnitRange run, uint32_t count) const {
  const uint64_t block = std::bit_ceil(uint64_t{count});
  if (block > unit_count_) return std::nullopt;
  const uint32_t window = std::min(run.count, std::max(count, kWindowUnits));
  const uint64_t last =
      std::min<uint64_t>(uint64_t{run.begin} + window - count, unit_count_ - block);
  if (last < run.begin) return std::nullopt;
  return count < kLongUnits ? static_cast<uint32_t>(last) : run.begin;
}

std::optional<uint32_t> RunAllocator::Allocate(uint32_t count) {
  for (auto run = runs_.lower_bound({count, 0}); run != runs_.end(); ++run) {
    const std::optional<uint32_t> place = Place({.begin = run->second, .count = run->first}, count);
    if (!place.has_value()) continue;
    Take(lengths_.find(run->second), {.begin = *place, .count = count});
    return place;
  }
  return std::nullopt;
}

uint64_t RunAllocator::AllocateMany(uint32_t count, uint64_t wanted) {
  const uint64_t block = std::bit_ceil(uint64_t{count});
  uint64_t done = 0;
  while (done < wanted) {
    const auto run = runs_.lower_bound({count, 0});
    if (run == runs_.end()) break;
    const UnitRange whole{.begin = run->second, .count = run->first};
    // What is left of the shortest run is again the shortest one, as long as it is not cut in two.
    const bool is_cut = count < kLongUnits && whole.count > kWindowUnits;
    if (is_cut || uint64_t{whole.begin} + whole.count + block > unit_count_) {
      if (!Allocate(count).has_value()) break;
      ++done;
      continue;
    }
    const auto here = static_cast<uint32_t>(std::min<uint64_t>(wanted - done, whole.count / count));
    const uint32_t units = here * count;
    const uint32_t begin = count < kLongUnits ? whole.begin + whole.count - units : whole.begin;
    Take(lengths_.find(whole.begin), {.begin = begin, .count = units});
    done += here;
  }
  return done;
}

bool RunAllocator::IsUsed(UnitRange units) const {
  const uint64_t end = uint64_t{units.begin} + units.count;
  const auto next = lengths_.lower_bound(units.begin);
  if (next != lengths_.end() && next->first < end) return false;
  if (next == lengths_.begin()) return end <= unit_count_;
  const auto& [begin, count] = *std::prev(next);
  return end <= unit_count_ && uint64_t{begin} + count <= units.begin;
}

bool RunAllocator::IsFree(UnitRange units) const {
  const auto next = lengths_.upper_bound(units.begin);
  if (next == lengths_.begin()) return false;
  const auto& [begin, count] = *std::prev(next);
  return uint64_t{units.begin} + units.count <= uint64_t{begin} + count;
}

bool RunAllocator::Claim(UnitRange units) {
  if (units.count == 0 || !IsFree(units)) return false;
  Take(std::prev(lengths_.upper_bound(units.begin)), units);
  return true;
}

void RunAllocator::Free(UnitRange units) {
  auto next = lengths_.lower_bound(units.begin);
  UnitRange run = units;
  if (next != lengths_.begin()) {
    const auto before = std::prev(next);
    PQC_CHECK(before->first + before->second <= units.begin);
    if (before->first + before->second == units.begin) {
      run = {.begin = before->first, .count = before->second + run.count};
      Remove(before);
    }
  }
  if (next != lengths_.end()) {
    PQC_CHECK(units.begin + units.count <= next->first);
    if (units.begin + units.count == next->first) {
      run.count += next->second;
      Remove(next);
    }
  }
  Add(run);
}

}  // namespace pqcached::kvstore
