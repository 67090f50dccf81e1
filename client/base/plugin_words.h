// The words of pqc_index that have an index of a plug-in: those of its descriptor, in order.
#ifndef PQCACHED_CLIENT_BASE_PLUGIN_WORDS_H_
#define PQCACHED_CLIENT_BASE_PLUGIN_WORDS_H_

#include <cstdint>

#include "kvstore/read/indexes/plugin_names.h"
#include "pqcached/client.h"

namespace pqcached::client {

// The first word of pqc_index.reserved behind that of the layout.
inline constexpr uint32_t kPluginWords = PQC_INDEX_LAYOUT + 1;

// REQUIRES: index.kind is PQC_INDEX_PLUGIN.
inline kvstore::IndexDescriptor PluginDescriptorOf(const pqc_index& index) {
  const uint32_t* const words = &index.reserved[kPluginWords];
  return {.kind = static_cast<kvstore::IndexKind>(words[0]),
          .subspace_count = words[1],
          .bits = words[2],
          .layout = static_cast<kvstore::SubspaceLayout>(words[3])};
}

// REQUIRES: IsPlugin(descriptor).
inline void SetPluginWords(const kvstore::IndexDescriptor& descriptor, pqc_index* index) {
  uint32_t* const words = &index->reserved[kPluginWords];
  index->kind = PQC_INDEX_PLUGIN;
  words[0] = static_cast<uint32_t>(descriptor.kind);
  words[1] = descriptor.subspace_count;
  words[2] = descriptor.bits;
  words[3] = static_cast<uint32_t>(descriptor.layout);
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_PLUGIN_WORDS_H_
