// Whether codes are those of the nearest centroids, seen from outside: by decoded keys.
#ifndef PQCACHED_TESTS_KVSTORE_INDEX_NEAREST_H_
#define PQCACHED_TESTS_KVSTORE_INDEX_NEAREST_H_

#include <set>
#include <vector>

#include "kvstore/read/layout.h"
#include "kvstore/read/selection.h"
#include "tests/kvstore/brute_force.h"

namespace pqcached::kvstore::testing {

using Centroid = std::vector<float>;

inline Centroid Part(const float* key, uint32_t key_dim, const IndexDescriptor& index,
                     uint32_t subspace) {
  const uint32_t dim = key_dim / index.subspace_count;
  return {key + subspace * dim, key + (subspace + 1) * dim};
}

inline double Distance(const Centroid& a, const Centroid& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return sum;
}

// The centroids that tokens [begin, end) are coded with, as far as they are used.
inline std::set<Centroid> UsedCentroids(const LayerModel& model, const IndexDescriptor& index,
                                        const DecodedKeys& decoded, uint32_t kv_head,
                                        uint32_t subspace, uint32_t begin, uint32_t end) {
  std::set<Centroid> used;
  for (uint32_t token = begin; token < end; ++token) {
    used.insert(Part(decoded.key(token, kv_head), model.group.key_dim, index, subspace));
  }
  return used;
}

// Every token of [begin, end) is coded with the nearest of the centroids that [codebook_begin,
// codebook_end) uses.
inline void ExpectNearest(const LayerModel& model, const IndexDescriptor& index,
                          const DecodedKeys& decoded, PositionRange tokens,
                          PositionRange codebook) {
  for (uint32_t kv_head = 0; kv_head < model.group.kv_heads; ++kv_head) {
    for (uint32_t subspace = 0; subspace < index.subspace_count; ++subspace) {
      const std::set<Centroid> used =
          UsedCentroids(model, index, decoded, kv_head, subspace, codebook.begin, codebook.end);
      ASSERT_LE(used.size(), size_t{1} << index.bits);
      for (uint32_t token = tokens.begin; token < tokens.end; ++token) {
        const Centroid key = Part(model.key(token, kv_head), model.group.key_dim, index, subspace);
        const Centroid coded =
            Part(decoded.key(token, kv_head), model.group.key_dim, index, subspace);
        ASSERT_EQ(used.count(coded), 1u) << "token " << token << " is coded by another codebook";
        for (const Centroid& centroid : used) {
          ASSERT_LE(Distance(key, coded), Distance(key, centroid) + 1e-3) << "token " << token;
        }
      }
    }
  }
}

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_INDEX_NEAREST_H_
