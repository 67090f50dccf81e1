#include "kvstore/memory/run_allocator.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "kernels/base/check.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kLongUnits = 8;  // 512 KiB

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
  const uint64_t last =
      std::min<uint64_t>(uint64_t{run.begin} + run.count - count, unit_count_ - block);
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
