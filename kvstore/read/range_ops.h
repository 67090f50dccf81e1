// Attention of many queries over ranges of rows of one layer, over all its kv heads.
//
// A task is a kv head, a tile of query tokens and, where there are fewer of those than threads, a
// piece of the rows; the partial results of the pieces are merged. Queries are read from and
// results are written to the caller's tensors tile by tile.
//
// Thread-safe as long as outputs and scratch are not shared.
#ifndef PQCACHED_KVSTORE_READ_RANGE_OPS_H_
#define PQCACHED_KVSTORE_READ_RANGE_OPS_H_

#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kvstore/read/attention.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/scratch.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

inline constexpr uint32_t kNoQueryHead = ~0u;

struct RangeLayerArgs {
  const LayerQuery& query;
  std::span<const PositionRange> rows;  // ascending, disjoint, non-empty, stored; may be none
  const AttentionOut& out;
};

// Attends exactly to the rows that each query token sees: those up to its own position. Returns a
// query head with NaN or infinity, after which all outputs are unspecified, or kNoQueryHead.
uint32_t AttendRangeLayer(const kernels::Exec& exec, const LayerView& view,
                          const RangeLayerArgs& args, const ParallelFor& parallel,
                          ReadScratch& scratch);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_RANGE_OPS_H_
