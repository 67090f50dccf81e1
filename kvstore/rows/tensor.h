// Validates tensors of clients.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_KVSTORE_ROWS_TENSOR_H_
#define PQCACHED_KVSTORE_ROWS_TENSOR_H_

#include <array>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/rows/ingest.h"
#include "kvstore/model.h"
#include "kvstore/read/layer_view.h"

namespace pqcached::kvstore {

// A tensor [dim0, dim1, dim2] whose every element lies inside its data.
struct CheckedTensor {
  const std::byte* data = nullptr;
  kernels::DType dtype = kernels::DType::kF32;
  std::array<uint64_t, 3> shape = {};
  std::array<ptrdiff_t, 3> strides_bytes = {};  // 0 where the dimension is 1

  // Returns the slice [dim0, dim2] at `head` of dim1, starting at `first` of dim0.
  kernels::StridedTensor Head(uint64_t first, uint32_t head) const;
};

// Checks that the rank is 3, dim1 and dim2, dim0 >= 1, the dtype, and that strides keep every
// element inside the data.
//
// Errors: kInvalidArgument naming `field` and the problem.
absl::StatusOr<CheckedTensor> CheckTensor(const TensorView& view, uint32_t dim1, uint32_t dim2,
                                          absl::string_view field);

// Checks queries [query_length, query_heads, key_dim] of one or several tokens.
//
// Errors: as CheckTensor; kInvalidArgument for a query_length above kMaxQueryLength, and for more
// than kMaxGroupSize queries per kv head.
absl::StatusOr<CheckedTensor> CheckQueries(const TensorView& view, const LayerShape& shape,
                                           absl::string_view field);
// Checks logits [query_length, query_heads, count] as CheckQueries does queries.
absl::StatusOr<CheckedTensor> CheckLogits(const TensorView& view, const LayerShape& shape,
                                          uint32_t count, absl::string_view field);
// Checks queries of an attention over a range, which may have kMaxRangeQueryLength tokens.
absl::StatusOr<CheckedTensor> CheckRangeQueries(const TensorView& view, const LayerShape& shape,
                                                absl::string_view field);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_ROWS_TENSOR_H_
