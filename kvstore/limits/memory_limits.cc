#include "kvstore/limits/memory_limits.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace pqcached::kvstore {
namespace {

namespace fs = std::filesystem;

// Version 1 writes the largest multiple of a page for "no limit".
constexpr size_t kNoLimitFrom = size_t{1} << 62;

// File names of one cgroup version.
struct CgroupFiles {
  const char* max;
  const char* high;  // empty if the version has none
  const char* current;
  const char* reclaimable;  // key in memory.stat
  const char* hugetlb_max;  // suffix of "hugetlb.<size>"
  const char* hugetlb_current;
};
constexpr CgroupFiles kVersion1 = {"memory.limit_in_bytes", "",
                                   "memory.usage_in_bytes", "total_inactive_file",
                                   ".limit_in_bytes",       ".usage_in_bytes"};
constexpr CgroupFiles kVersion2 = {"memory.max",    "memory.high", "memory.current",
                                   "inactive_file", ".max",        ".current"};

// Returns the number in the file, or nothing if the file is missing or holds no number ("max").
std::optional<size_t> ReadNumber(const fs::path& path) {
  std::ifstream file(path);
  size_t value = 0;
  if (!(file >> value) || value >= kNoLimitFrom) return std::nullopt;
  return value;
}

// Returns the value of `wanted` in a file of "key value" lines, or 0 if the key is missing.
size_t ReadKey(const fs::path& path, const std::string& wanted) {
  std::ifstream file(path);
  std::string key;
  for (size_t value = 0; file >> key >> value;) {
    if (key == wanted) return value;
  }
  return 0;
}

// Returns the bytes of a line of /proc/meminfo, such as "MemTotal:".
std::optional<size_t> MachineBytes(const fs::path& meminfo, std::string_view line) {
  std::ifstream file(meminfo);
  for (std::string word; file >> word;) {
    size_t kilobytes = 0;
    if (word == line && file >> kilobytes) return kilobytes << 10;
  }
  return std::nullopt;
}

// Returns the path of a controller ("memory"; empty = version 2) from /proc/self/cgroup, or nothing
// if the process is not in such a group.
std::optional<std::string> OwnPath(const fs::path& self, const std::string& controller) {
  std::ifstream file(self);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    if (std::find(controllers.begin(), controllers.end(), controller) != controllers.end()) {
      return fields[2];
    }
  }
  return std::nullopt;
}

// Returns the group and its ancestors, as far as they are visible under `mount`. Inside a container
// the path may be the host's; the mount then shows the container's own group at its root.
std::vector<fs::path> Groups(const fs::path& mount, const std::string& path) {
  std::vector<fs::path> groups;
  fs::path relative(std::string(absl::StripPrefix(path, "/")));
  std::error_code ignored;
  if (absl::StrContains(path, "..") || !fs::is_directory(mount / relative, ignored))
    relative.clear();
  for (; !relative.empty(); relative = relative.parent_path()) groups.push_back(mount / relative);
  groups.push_back(mount);
  return groups;
}

void LimitTo(size_t limit_bytes, size_t used_bytes, const fs::path& source, MemoryLimits& limits) {
  const size_t left_bytes = limit_bytes - std::min(limit_bytes, used_bytes);
  if (left_bytes >= limits.available_bytes) return;
  limits.available_bytes = left_bytes;
  limits.source = source.string();
}

void LimitTotalTo(size_t limit_bytes, const fs::path& source, MemoryLimits& limits) {
  if (limit_bytes >= limits.total_bytes) return;
  limits.total_bytes = limit_bytes;
  limits.total_source = source.string();
}

void ApplyMemory(const fs::path& group, const CgroupFiles& files, MemoryLimits& limits) {
  const std::optional<size_t> current = ReadNumber(group / files.current);
  if (!current.has_value()) return;
  const size_t reclaimable = ReadKey(group / "memory.stat", files.reclaimable);
  const size_t used_bytes = *current - std::min(*current, reclaimable);
  size_t lowest = kUnlimitedBytes;
  for (const std::string name : {files.max, files.high}) {
    if (name.empty()) continue;
    const std::optional<size_t> limit = ReadNumber(group / name);
    if (!limit.has_value()) continue;
    lowest = std::min(lowest, *limit);
    LimitTo(*limit, used_bytes, group / name, limits);
    LimitTotalTo(*limit, group / name, limits);
  }
  if (used_bytes > lowest) limits.excess_bytes = std::max(limits.excess_bytes, used_bytes - lowest);
}

void ApplyHugetlb(const fs::path& group, const CgroupFiles& files, MemoryLimits& limits) {
  std::error_code error;
  for (fs::directory_iterator entry(group, error), end; entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!absl::StartsWith(name, "hugetlb.") || !absl::EndsWith(name, files.hugetlb_max)) continue;
    absl::string_view size = absl::StripSuffix(name, files.hugetlb_max);
    size = absl::StripPrefix(size, "hugetlb.");
    if (size.empty() || absl::StrContains(size, ".")) continue;  // hugetlb.<size>.rsvd.max
    const std::optional<size_t> limit = ReadNumber(entry->path());
    if (!limit.has_value()) continue;
    const std::string stem = "hugetlb." + std::string(size);
    const size_t used = ReadNumber(group / (stem + files.hugetlb_current)).value_or(0);
    const size_t left = *limit - std::min(*limit, used);
    const auto [place, added] = limits.hugetlb_available_bytes.try_emplace(std::string(size), left);
    if (!added) place->second = std::min(place->second, left);
  }
}

}  // namespace

size_t MemoryLimits::HugetlbAvailableBytes(size_t page_bytes) const {
  const std::string size = page_bytes >= size_t{1} << 30   ? absl::StrCat(page_bytes >> 30, "GB")
                           : page_bytes >= size_t{1} << 20 ? absl::StrCat(page_bytes >> 20, "MB")
                                                           : absl::StrCat(page_bytes >> 10, "KB");
  const auto found = hugetlb_available_bytes.find(size);
  return found == hugetlb_available_bytes.end() ? kUnlimitedBytes : found->second;
}

MemoryLimits ReadMemoryLimits(const std::string& root) {
  MemoryLimits limits;
  const fs::path meminfo(root + "/proc/meminfo");
  if (const auto machine = MachineBytes(meminfo, "MemAvailable:"); machine.has_value()) {
    LimitTo(*machine, 0, meminfo, limits);
  }
  if (const auto machine = MachineBytes(meminfo, "MemTotal:"); machine.has_value()) {
    LimitTotalTo(*machine, meminfo, limits);
  }
  const fs::path self(root + "/proc/self/cgroup");
  const fs::path mounts(root + "/sys/fs/cgroup");
  if (const auto path = OwnPath(self, ""); path.has_value()) {
    std::error_code error;
    const bool hybrid = !fs::exists(mounts / "cgroup.controllers", error);
    for (const fs::path& group : Groups(hybrid ? mounts / "unified" : mounts, *path)) {
      ApplyMemory(group, kVersion2, limits);
      ApplyHugetlb(group, kVersion2, limits);
    }
  }
  if (const auto path = OwnPath(self, "memory"); path.has_value()) {
    for (const fs::path& group : Groups(mounts / "memory", *path)) {
      ApplyMemory(group, kVersion1, limits);
    }
  }
  if (const auto path = OwnPath(self, "hugetlb"); path.has_value()) {
    for (const fs::path& group : Groups(mounts / "hugetlb", *path)) {
      ApplyHugetlb(group, kVersion1, limits);
    }
  }
  return limits;
}

size_t AvailableMemoryBytes() { return ReadMemoryLimits().available_bytes; }

}  // namespace pqcached::kvstore
