#include "kvstore/rows/tensor.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

// Wide enough for any product of a 64-bit extent, a 64-bit stride and an element size.
__extension__ using Wide = __int128;

// Refuses the part `part` ("shape", "strides", ...) of the tensor at `field`.
absl::Status Bad(absl::string_view field, absl::string_view part, absl::string_view text) {
  return InvalidArgument(absl::StrCat(field, ".", part), text);
}

absl::Status CheckShape(const TensorView& view, uint32_t dim1, uint32_t dim2,
                        absl::string_view field) {
  const auto shape_text = [&] { return absl::StrCat("[", absl::StrJoin(view.shape, ", "), "]"); };
  if (view.shape.size() != 3 || view.shape[1] != dim1 || view.shape[2] != dim2) {
    return Bad(field, "shape",
               absl::StrCat(shape_text(), ", must be [tokens, ", dim1, ", ", dim2, "]"));
  }
  if (view.shape[0] == 0) return Bad(field, "shape", "no tokens");
  if (view.shape[0] > kMaxSequenceTokens) {
    return Bad(field, "shape",
               absl::StrCat(view.shape[0], " tokens, must be at most ", kMaxSequenceTokens));
  }
  if (!view.strides.empty() && view.strides.size() != view.shape.size()) {
    return Bad(field, "strides", absl::StrCat(view.strides.size(), " of them, must be 3"));
  }
  return absl::OkStatus();
}

}  // namespace

kernels::StridedTensor CheckedTensor::Head(uint64_t first, uint32_t head) const {
  return kernels::StridedTensor{
      .data = data + static_cast<ptrdiff_t>(first) * strides_bytes[0] +
              static_cast<ptrdiff_t>(head) * strides_bytes[1],
      .dtype = dtype,
      .token_stride_bytes = strides_bytes[0],
      .element_stride_bytes = strides_bytes[2],
  };
}

absl::StatusOr<CheckedTensor> CheckTensor(const TensorView& view, uint32_t dim1, uint32_t dim2,
                                          absl::string_view field) {
  if (!kernels::IsDType(static_cast<uint8_t>(view.dtype))) {
    return Bad(field, "dtype", "unknown, must be fp16, bf16 or fp32");
  }
  RETURN_IF_ERROR(CheckShape(view, dim1, dim2, field));
  const auto element_bytes = static_cast<Wide>(kernels::DTypeBytes(view.dtype));
  CheckedTensor tensor{.data = view.data, .dtype = view.dtype};
  Wide lowest = 0;
  Wide highest = 0;
  Wide contiguous = 1;
  for (size_t i = 3; i-- > 0;) {
    const Wide stride = view.strides.empty() ? contiguous : Wide{view.strides[i]};
    const Wide span = (Wide{view.shape[i]} - 1) * stride * element_bytes;
    (span < 0 ? lowest : highest) += span;
    contiguous *= Wide{view.shape[i]};
    tensor.shape[i] = view.shape[i];
    // The narrowing is exact for every accepted tensor, because the bounds are checked next.
    tensor.strides_bytes[i] =
        view.shape[i] == 1 ? 0 : static_cast<ptrdiff_t>(stride * element_bytes);
  }
  if (lowest < 0) return Bad(field, "strides", "reach before the data");
  if (highest + element_bytes > Wide{view.data_bytes}) {
    return Bad(field, view.strides.empty() ? "shape" : "strides",
               absl::StrCat("reaches beyond the ", view.data_bytes, " bytes of data"));
  }
  if (view.data == nullptr) return Bad(field, "data", "missing");
  return tensor;
}

absl::StatusOr<CheckedTensor> CheckQueries(const TensorView& view, const LayerShape& shape,
                                           absl::string_view field) {
  return CheckLogits(view, shape, shape.key_dim, field);
}

absl::StatusOr<CheckedTensor> CheckLogits(const TensorView& view, const LayerShape& shape,
                                          uint32_t count, absl::string_view field) {
  ASSIGN_OR_RETURN(const CheckedTensor tensor, CheckTensor(view, shape.query_heads, count, field));
  const uint64_t length = tensor.shape[0];
  if (length > kMaxQueryLength) {
    return Bad(field, "shape",
               absl::StrCat("query length is ", length, ", must be at most ", kMaxQueryLength));
  }
  const uint32_t group = shape.group_size();
  if (length * group > kMaxGroupSize) {
    return Bad(field, "shape",
               absl::StrCat("query length is ", length, " with ", group,
                            " query heads per kv head: ", length * group,
                            " queries per kv head; at most ", kMaxGroupSize));
  }
  return tensor;
}

absl::StatusOr<CheckedTensor> CheckRangeQueries(const TensorView& view, const LayerShape& shape,
                                                absl::string_view field) {
  ASSIGN_OR_RETURN(const CheckedTensor tensor,
                   CheckTensor(view, shape.query_heads, shape.key_dim, field));
  if (tensor.shape[0] <= kMaxRangeQueryLength) return tensor;
  return Bad(field, "shape",
             absl::StrCat("query length is ", tensor.shape[0], ", must be at most ",
                          kMaxRangeQueryLength));
}

}  // namespace pqcached::kvstore
