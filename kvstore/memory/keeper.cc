#include "kvstore/memory/keeper.h"

#include <algorithm>
#include "kernels/base/status_macros.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {

absl::StatusOr<FileDescriptor> DescriptorKeeper::CreateMemory(const char* name, size_t size_bytes) {
  auto memfd = CreateMemfd(name, size_bytes);
  if (!memfd.ok()) return memfd.status();
  RETURN_IF_ERROR(SealMemfd(*memfd, WriteSeal::kNone));
  return memfd;
}

absl::Status DescriptorKeeper::KeepMapped(std::string_view, int) {
  return Unimplemented("", "mappings are not kept here");
}

Mapping DescriptorKeeper::TakeMapping(std::string_view) { return {}; }

bool IsKeeperName(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= DescriptorKeeper::kMaxNameBytes && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), allowed);
}

size_t DescriptorKeeper::SetAsideBytes() const {
  size_t bytes = 0;
  for (const SetAsideFolder& folder : SetAsideFolders()) bytes += folder.bytes();
  return bytes;
}

}  // namespace pqcached::kvstore
