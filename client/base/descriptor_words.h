// The words of pqc_index that have an index of a plug-in, of graphs or of clusters: those of its
// descriptor, in order.
#ifndef PQCACHED_CLIENT_BASE_DESCRIPTOR_WORDS_H_
#define PQCACHED_CLIENT_BASE_DESCRIPTOR_WORDS_H_

#include <cstdint>

#include "kvstore/read/indexes/plugin_names.h"
#include "pqcached/client.h"

namespace pqcached::client {

// The first word of pqc_index.reserved behind that of the layout.
inline constexpr uint32_t kDescriptorWords = PQC_INDEX_LAYOUT + 1;

// Returns whether the reserved words of an index are its descriptor.
inline bool HasDescriptorWords(const pqc_index& index) {
  return index.kind == PQC_INDEX_PLUGIN || index.kind == PQC_INDEX_GRAPH ||
         index.kind == PQC_INDEX_CLUSTERS;
}
inline bool HasDescriptorWords(const kvstore::IndexDescriptor& index) {
  return kvstore::IsPlugin(index) || index.kind == kvstore::IndexKind::kGraph ||
         index.kind == kvstore::IndexKind::kClusters;
}

// REQUIRES: HasDescriptorWords(index).
inline kvstore::IndexDescriptor WordsDescriptorOf(const pqc_index& index) {
  const uint32_t* const words = &index.reserved[kDescriptorWords];
  return {.kind = static_cast<kvstore::IndexKind>(words[0]),
          .subspace_count = words[1],
          .bits = words[2],
          .layout = static_cast<kvstore::SubspaceLayout>(words[3])};
}

// REQUIRES: HasDescriptorWords(descriptor).
inline void SetDescriptorWords(const kvstore::IndexDescriptor& descriptor, pqc_index* index) {
  uint32_t* const words = &index->reserved[kDescriptorWords];
  index->kind = kvstore::IsPlugin(descriptor)                   ? PQC_INDEX_PLUGIN
                : descriptor.kind == kvstore::IndexKind::kGraph ? PQC_INDEX_GRAPH
                                                                : PQC_INDEX_CLUSTERS;
  words[0] = static_cast<uint32_t>(descriptor.kind);
  words[1] = descriptor.subspace_count;
  words[2] = descriptor.bits;
  words[3] = static_cast<uint32_t>(descriptor.layout);
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_DESCRIPTOR_WORDS_H_
