#include "kvstore/read/indexes/plugin_names.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace pqcached::kvstore {
namespace {

// The number of a character is its place, and 0 the end of the name.
constexpr std::string_view kLetters = " abcdefghijklmnopqrstuvwxyz0123456789_";

}  // namespace

bool IsPluginName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxPluginName &&
         name.find_first_not_of(kLetters.substr(1)) == std::string_view::npos;
}

IndexDescriptor PluginIndexOf(std::string_view name) {
  PQC_CHECK(IsPluginName(name));
  uint64_t number = 0;
  for (size_t i = 0; i < kMaxPluginName; ++i) {
    number *= kLetters.size();
    if (i < name.size()) number += kLetters.find(name[i]);
  }
  return {.kind = static_cast<IndexKind>(kPluginKind | static_cast<uint32_t>(number >> 32)),
          .subspace_count = static_cast<uint32_t>(number)};
}

bool IsSamePlugin(const IndexDescriptor& a, const IndexDescriptor& b) {
  return IsPlugin(a) && a.kind == b.kind && a.subspace_count == b.subspace_count;
}

std::string PluginNameOf(const IndexDescriptor& index) {
  uint64_t number = uint64_t{static_cast<uint32_t>(index.kind) & ~kPluginKind} << 32;
  number += index.subspace_count;
  std::string name;
  for (size_t i = 0; i < kMaxPluginName; ++i, number /= kLetters.size()) {
    if (const size_t letter = number % kLetters.size(); letter != 0) name += kLetters[letter];
  }
  std::reverse(name.begin(), name.end());
  return name;
}

uint32_t PluginValueOf(const IndexDescriptor& index, size_t parameter) {
  const uint32_t word = parameter < 2 ? index.bits : static_cast<uint32_t>(index.layout);
  return parameter % 2 == 0 ? word & kMaxPluginValue : word >> 16;
}

void SetPluginValue(IndexDescriptor* index, size_t parameter, uint32_t value) {
  value = std::min(value, kMaxPluginValue);
  uint32_t word = parameter < 2 ? index->bits : static_cast<uint32_t>(index->layout);
  word = parameter % 2 == 0 ? (word & ~kMaxPluginValue) | value
                            : (word & kMaxPluginValue) | value << 16;
  if (parameter < 2) {
    index->bits = word;
  } else {
    index->layout = static_cast<SubspaceLayout>(word);
  }
}

}  // namespace pqcached::kvstore
