// BuildIndex: from rows to codebooks and codes.
#ifndef PQCACHED_KVSTORE_BUILDER_H_
#define PQCACHED_KVSTORE_BUILDER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kvstore/cache.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

// A range of segments that share codebooks.
struct Epoch {
  size_t segment_begin = 0;
  size_t segment_end = 0;
  PositionRange tokens;
};

// Cuts segments into epochs of at least `epoch_tokens`; what is left at the end joins the last
// epoch. `segment_ends`: the position behind each segment's last token.
std::vector<Epoch> CutEpochs(const std::vector<uint32_t>& segment_ends, uint32_t epoch_tokens);

// The contract is that of Store::BuildIndex.
absl::Status BuildSequenceIndex(const Cache& cache, WriteLease lease, const BuildSpec& spec,
                                const std::function<bool(const BuildProgress&)>& progress);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_BUILDER_H_
