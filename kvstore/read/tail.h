// AddTail: the tail estimate, one more partial attention for the tokens that a selection has left
// out (RetroInfer, arXiv 2505.02922, section 4.1).
//
// Each cluster of keys counts as its tokens that are left, all with the cluster's mean key and mean
// value: its logit is that of the mean key plus the logarithm of their number.
#ifndef PQCACHED_KVSTORE_READ_TAIL_H_
#define PQCACHED_KVSTORE_READ_TAIL_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

struct TailArgs {
  IndexDescriptor index;                      // of kind kClusters, which the view has
  size_t most_clusters = 0;                   // MostClusters(view, index)
  std::span<const PositionRange> candidates;  // ascending, disjoint; no other token is estimated
  std::span<const uint32_t> positions;        // [kv_heads, k], ascending per kv head: selected
  std::span<const float> queries;             // [query_heads, key_dim]
  std::span<float> output;                    // [query_heads, value_dim]: of the selected tokens
  std::span<float> lse;                       // [query_heads]
};

// Returns the most clusters of a kv head that the view can have.
size_t MostClusters(const LayerView& view, const IndexDescriptor& index);
// Returns the scratch size of one worker for AddTail. Index data can change at any time: it is read
// once, by MostClusters.
size_t TailScratchBytes(const LayerView& view, size_t most_clusters);

// Merges the estimate for the candidates that are not selected with the attention over the selected
// ones. Candidates in segments without clusters stay left out.
void AddTail(const kernels::Exec& exec, const LayerView& view, const TailArgs& args,
             const ParallelFor& parallel, std::span<std::byte> scratch);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_TAIL_H_
