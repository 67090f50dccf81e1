#include "kvstore/plugins/plugin_crashes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::kvstore {
namespace {

constexpr uint64_t kMagic = 0x314e'4947'554c'5051;  // "PQLUGIN1"
constexpr int64_t kNever = 0;

int64_t MillisecondsOf(SteadyTime time) { return absl::ToInt64Milliseconds(time - SteadyTime()); }

}  // namespace

struct PluginCrashes::Record {
  char name[kMaxPluginName + 4];
  uint64_t file;
  std::atomic<uint32_t> calls;
  uint32_t is_off;
  int64_t crashed_at[kMaxPluginCrashes];  // milliseconds of SteadyTime, oldest first
};

struct PluginCrashes::Page {
  uint64_t magic;
  uint64_t next;  // number of records ever made
  Record records[kMaxPlugins];
};

absl::StatusOr<std::unique_ptr<PluginCrashes>> PluginCrashes::Open(DescriptorKeeper* keeper) {
  const auto map = [](const FileDescriptor& memory) {
    return Mapping::Map(memory, sizeof(Page), Mapping::Access::kReadWrite);
  };
  FileDescriptor kept = keeper != nullptr ? keeper->Take(kMemoryName) : FileDescriptor();
  if (kept.valid() && SizeOf(kept) >= sizeof(Page)) {
    ASSIGN_OR_RETURN(Mapping memory, map(kept));
    RETURN_IF_ERROR(AllocatePages({memory.data(), sizeof(Page)}, kMemoryName));
    if (reinterpret_cast<const Page*>(memory.data())->magic == kMagic) {
      return std::unique_ptr<PluginCrashes>(new PluginCrashes(std::move(memory)));
    }
  }
  if (kept.valid()) RETURN_IF_ERROR(keeper->Release(kMemoryName));
  auto created = keeper != nullptr ? keeper->CreateMemory(kMemoryName, sizeof(Page))
                                   : CreateMemfd(kMemoryName, sizeof(Page));
  if (!created.ok()) return created.status();
  ASSIGN_OR_RETURN(Mapping memory, map(*created));
  RETURN_IF_ERROR(AllocatePages({memory.data(), sizeof(Page)}, kMemoryName));
  reinterpret_cast<Page*>(memory.data())->magic = kMagic;
  if (keeper != nullptr) RETURN_IF_ERROR(keeper->Keep(kMemoryName, created->get()));
  return std::unique_ptr<PluginCrashes>(new PluginCrashes(std::move(memory)));
}

PluginCrashes::PluginCrashes(Mapping memory)
    : memory_(std::move(memory)), page_(*reinterpret_cast<Page*>(memory_.data())) {}

PluginCrashes::Record& PluginCrashes::RecordOf(std::string_view name, uint64_t file) {
  Record* record = nullptr;
  for (Record& each : page_.records) {
    if (std::string_view(each.name, strnlen(each.name, kMaxPluginName)) == name) record = &each;
  }
  if (record != nullptr && record->file == file) return *record;
  if (record == nullptr) record = &page_.records[page_.next++ % kMaxPlugins];
  record->calls.store(0);
  record->is_off = 0;
  std::fill(std::begin(record->crashed_at), std::end(record->crashed_at), kNever);
  std::memset(record->name, 0, sizeof(record->name));
  std::copy_n(name.data(), std::min(name.size(), kMaxPluginName), record->name);
  record->file = file;
  return *record;
}

PluginCrashes::Found PluginCrashes::Find(std::string_view name, uint64_t file, SteadyTime now) {
  Record& record = RecordOf(name, file);
  const int64_t now_ms = MillisecondsOf(now);
  const int64_t begin_ms = MillisecondsOf(now - kPluginCrashTime);
  Found found{.calls = &record.calls};
  found.has_crashed = record.calls.exchange(0) > 0;
  if (found.has_crashed) {
    std::rotate(std::begin(record.crashed_at), std::begin(record.crashed_at) + 1,
                std::end(record.crashed_at));
    record.crashed_at[kMaxPluginCrashes - 1] = now_ms;
  }
  for (const int64_t at : record.crashed_at) {
    // A time after now is one before a reboot.
    if (at != kNever && at >= begin_ms && at <= now_ms) ++found.crashes;
  }
  if (found.crashes == kMaxPluginCrashes) record.is_off = 1;
  found.is_off = record.is_off != 0;
  return found;
}

}  // namespace pqcached::kvstore
