// The index types of plug-ins by number: the name is a part of the descriptor, so that a process
// without the plug-in can say which one is missing.
//
// IndexDescriptor has room for a name of 12 characters of [a-z0-9_], 63 bits of `kind` and
// `subspace_count`, and for four parameters of 16 bits in `bits` and `layout`.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_PLUGIN_NAMES_H_
#define PQCACHED_KVSTORE_READ_INDEXES_PLUGIN_NAMES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

inline constexpr uint32_t kPluginKind = 0x80000000u;  // the bit in the kinds of plug-ins
inline constexpr size_t kMaxPluginName = 12;
inline constexpr size_t kMaxPluginParameters = 4;
inline constexpr uint32_t kMaxPluginValue = 0xffff;

constexpr bool IsPlugin(const IndexDescriptor& index) {
  return (static_cast<uint32_t>(index.kind) & kPluginKind) != 0;
}

bool IsPluginName(std::string_view name);
// Returns the index of a plug-in with all parameters 0. REQUIRES: IsPluginName.
IndexDescriptor PluginIndexOf(std::string_view name);
// Returns whether two indexes are of the same plug-in.
bool IsSamePlugin(const IndexDescriptor& a, const IndexDescriptor& b);
// Returns the name; that of bytes which PluginIndexOf did not make has no meaning.
std::string PluginNameOf(const IndexDescriptor& index);

// Return and change one of the kMaxPluginParameters values; a larger one than kMaxPluginValue is
// stored as that.
uint32_t PluginValueOf(const IndexDescriptor& index, size_t parameter);
void SetPluginValue(IndexDescriptor* index, size_t parameter, uint32_t value);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_PLUGIN_NAMES_H_
