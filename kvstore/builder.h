// BuildIndex: from rows to codebooks and codes.
#ifndef PQCACHED_KVSTORE_BUILDER_H_
#define PQCACHED_KVSTORE_BUILDER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kvstore/cache.h"
#include "kvstore/clock.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

// A range of segments that share codebooks.
struct Epoch {
  size_t segment_begin = 0;
  size_t segment_end = 0;
  PositionRange tokens;
};

// Tokens of an epoch, at least, when a build covers `token_count`: the fourth part of a long context. A
// selection settles values and threshold for each codebook, so epochs of one length would make it the
// slower the longer the context is, and shorter ones were not the better ones (README.md).
uint32_t EpochTokens(uint32_t token_count, uint32_t least);

// Cuts segments into epochs of at least `epoch_tokens`; what is left at the end joins the last
// epoch. `segment_ends`: the position behind each segment's last token.
std::vector<Epoch> CutEpochs(const std::vector<uint32_t>& segment_ends, uint32_t epoch_tokens);

using BuildClock = std::function<SteadyTime()>;

// The contract is that of Store::BuildIndex. The lease is held only while the tail is closed; writers
// go on while the build runs, and what they add meanwhile is coded at its end. Layers become ready
// one by one, in ascending order as far as the workers allow.
absl::Status BuildSequenceIndex(const Cache& cache, WriteLease lease, const BuildSpec& spec,
                                const std::function<bool(const BuildProgress&)>& progress,
                                const BuildClock& clock = SteadyTime::Now);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_BUILDER_H_
