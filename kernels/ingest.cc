#include "kernels/ingest.h"

#include <cmath>

#include "kernels/check.h"
#include "kernels/crc32c.h"

namespace pqcached::kernels {
namespace {

// Writes one token's key or value; false when an element is not finite in the row's dtype.
bool IngestPartOfRow(const StridedTensor& tensor, uint32_t token, uint32_t dim, DType row_dtype,
                     std::byte* target) {
  const std::byte* source = tensor.data + ptrdiff_t{token} * tensor.token_stride_bytes;
  bool finite = true;
  for (uint32_t i = 0; i < dim; ++i) {
    const float value =
        LoadElement(tensor.dtype, source + ptrdiff_t{i} * tensor.element_stride_bytes, 0);
    StoreElement(row_dtype, target, i, value);
    finite = finite && std::isfinite(LoadElement(row_dtype, target, i));
  }
  return finite;
}

// The specification.
IngestResult IngestReference(const Exec& exec, const IngestArgs& args) {
  const size_t key_bytes = args.key_dim * DTypeBytes(args.row_dtype);
  const size_t part_bytes = (args.key_dim + args.value_dim) * DTypeBytes(args.row_dtype);
  IngestResult result;
  result.crc = args.crc_seed;
  for (uint32_t token = 0; token < args.token_count; ++token) {
    std::byte* row = args.rows.data() + token * args.row_stride_bytes;
    if (!IngestPartOfRow(args.key, token, args.key_dim, args.row_dtype, row)) {
      return {IngestPart::kKey, token, 0};
    }
    if (args.value_dim > 0 &&
        !IngestPartOfRow(args.value, token, args.value_dim, args.row_dtype, row + key_bytes)) {
      return {IngestPart::kValue, token, 0};
    }
    result.crc = Crc32c(exec, {row, part_bytes}, result.crc);
  }
  return result;
}

}  // namespace

IngestResult IngestRows(const Exec& exec, const IngestArgs& args) {
  const size_t part_bytes = (args.key_dim + args.value_dim) * DTypeBytes(args.row_dtype);
  PQC_CHECK(args.key_dim % 8 == 0 && args.key_dim > 0 && args.key_dim <= 256);
  PQC_CHECK(args.value_dim % 8 == 0 && args.value_dim <= 256);
  PQC_CHECK(args.row_stride_bytes >= part_bytes);
  PQC_CHECK(args.token_count == 0 ||
            args.rows.size() >= (args.token_count - 1) * args.row_stride_bytes + part_bytes);
  return IngestReference(exec, args);
}

}  // namespace pqcached::kernels
