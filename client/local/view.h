// Opens layers of pinned images, with checks for the intended read.
#ifndef PQCACHED_CLIENT_LOCAL_VIEW_H_
#define PQCACHED_CLIENT_LOCAL_VIEW_H_

#include <cstdint>
#include <span>

#include "client/base/remote.h"
#include "client/local/image.h"
#include "client/local/read.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/layout.h"
#include "kvstore/read/selection.h"

namespace pqcached::client {

struct OpenedLayer {
  Image::Loan loan;         // owns the memory that `view` borrows
  kvstore::LayerView view;  // one query token
};

// An index that a call asks for, and the field of its arguments that names it.
struct WantedIndex {
  kvstore::IndexDescriptor index;  // flat = rows alone
  const char* field = "index";
};

kvstore::LayerShape ShapeOf(const LayerShape& shape);

// Opens the visible rows of a layer and an index over them.
//
// Errors: PQC_INVALID_ARGUMENT (index), PQC_FAILED_PRECONDITION (the sequence lacks it)
pqc_status OpenLayer(const Pinned& pinned, uint32_t layer, const LayerShape& shape,
                     const WantedIndex& wanted, OpenedLayer* opened);

// Returns PQC_ABORTED when a segment with candidates has no codes yet.
pqc_status CheckCoded(const kvstore::LayerView& view, const WantedIndex& wanted,
                      std::span<const kvstore::PositionRange> candidates);

// Treats the queries of several tokens as one larger group: makes the view's query heads [kv_heads,
// query_length x group_size].
void WidenGroup(kvstore::LayerView* view, uint64_t query_length);

// Copies [query_length, kv_heads, group_size, dim] to [kv_heads, query_length, group_size, dim], as
// floats.
void GatherQueries(const QueryView& query, std::vector<float>* queries);
// Copies [kv_heads, query_length, group_size, dim] to [query_length, kv_heads, group_size, dim].
void ScatterRows(const LayerShape& shape, uint64_t query_length, uint32_t dim, const float* from,
                 float* to);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_VIEW_H_
