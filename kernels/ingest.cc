#include "kernels/ingest.h"

#include <algorithm>
#include <cmath>

#include "kernels/check.h"
#include "kernels/crc32c.h"
#include "kernels/ingest_internal.h"

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

// The specification, for some of the tokens.
IngestResult IngestReference(const Exec& exec, const IngestArgs& args, uint32_t first_token,
                             uint32_t token_count, uint32_t crc) {
  const size_t key_bytes = args.key_dim * DTypeBytes(args.row_dtype);
  const size_t row_bytes = key_bytes + args.value_dim * DTypeBytes(args.row_dtype);
  IngestResult result;
  result.crc = crc;
  for (uint32_t token = first_token; token < first_token + token_count; ++token) {
    std::byte* row = args.rows.data() + token * args.row_stride_bytes;
    if (!IngestPartOfRow(args.key, token, args.key_dim, args.row_dtype, row)) {
      return {IngestPart::kKey, token, 0};
    }
    if (args.value_dim > 0 &&
        !IngestPartOfRow(args.value, token, args.value_dim, args.row_dtype, row + key_bytes)) {
      return {IngestPart::kValue, token, 0};
    }
    result.crc = Crc32c(exec, {row, row_bytes}, result.crc);
  }
  return result;
}

#ifdef PQCACHED_X86
bool IsScattered(const StridedTensor& tensor, uint32_t dim) {
  const ptrdiff_t in_order = 2 * static_cast<ptrdiff_t>(dim * DTypeBytes(tensor.dtype));
  return tensor.token_stride_bytes > in_order || tensor.token_stride_bytes < -in_order;
}

bool StagePart(Level level, const StridedTensor& tensor, uint32_t first_token, uint32_t dim,
               const IngestArgs& args, uint32_t token_count, std::byte* staging, size_t row_bytes) {
  const bool scattered = IsScattered(tensor, dim);
  const uint32_t column_elements =
      internal::kScatteredColumnBytes / static_cast<uint32_t>(DTypeBytes(tensor.dtype));
  const internal::StageCall call{
      .from = tensor.dtype,
      .to = args.row_dtype,
      .dim = dim,
      .token_count = token_count,
      .tokens_behind = args.token_count - first_token - token_count,
      .source = tensor.data + ptrdiff_t{first_token} * tensor.token_stride_bytes,
      .token_stride_bytes = tensor.token_stride_bytes,
      .prefetch_tokens = scattered ? internal::kScatteredPrefetchTokens : internal::kPrefetchTokens,
      .column_elements = scattered ? column_elements : dim,
      .staging = staging,
      .staging_stride_bytes = row_bytes};
  return level >= Level::kAvx512 ? internal::StagePartAvx512(call) : internal::StagePartAvx2(call);
}

// Builds rows in staging, where one pass looks for what is not finite, and the sum reads them from
// L1, then streams them out. When a part is not finite, the reference looks again for the first
// offender; it writes the rows, too, in case the source has changed.
IngestResult IngestStaged(const Exec& exec, const IngestArgs& args) {
  const size_t key_bytes = args.key_dim * DTypeBytes(args.row_dtype);
  const size_t row_bytes = key_bytes + args.value_dim * DTypeBytes(args.row_dtype);
  alignas(64) std::byte staging[internal::kScatteredStagingBytes];
  const size_t staging_bytes = IsScattered(args.key, args.key_dim)
                                   ? internal::kScatteredStagingBytes
                                   : internal::kStagingBytes;
  const uint32_t step = static_cast<uint32_t>(staging_bytes / row_bytes);
  IngestResult result;
  result.crc = args.crc_seed;
  for (uint32_t token = 0; token < args.token_count;) {
    const uint32_t count = std::min(step, args.token_count - token);
    std::byte* rows = args.rows.data() + token * args.row_stride_bytes;
    if (StagePart(exec.level, args.key, token, args.key_dim, args, count, staging, row_bytes) &&
        (args.value_dim == 0 || StagePart(exec.level, args.value, token, args.value_dim, args,
                                          count, staging + key_bytes, row_bytes))) {
      result.crc = Crc32c(exec, {staging, count * row_bytes}, result.crc);
      const internal::StreamCall call{.staging = staging,
                                      .row_bytes = row_bytes,
                                      .row_count = count,
                                      .target = rows,
                                      .target_stride_bytes = args.row_stride_bytes};
      exec.level >= Level::kAvx512 ? internal::StreamRowsAvx512(call)
                                   : internal::StreamRowsAvx2(call);
    } else {
      result = IngestReference(exec, args, token, count, result.crc);
      if (!result.ok()) return result;
    }
    token += count;
  }
  exec.level >= Level::kAvx512 ? internal::FenceStreamsAvx512() : internal::FenceStreamsAvx2();
  return result;
}

bool IsContiguous(const StridedTensor& tensor) {
  return tensor.element_stride_bytes == static_cast<ptrdiff_t>(DTypeBytes(tensor.dtype));
}
#endif

}  // namespace

IngestResult IngestRows(const Exec& exec, const IngestArgs& args) {
  const size_t row_bytes = (args.key_dim + args.value_dim) * DTypeBytes(args.row_dtype);
  PQC_CHECK(args.key_dim % 8 == 0 && args.key_dim > 0 && args.key_dim <= 256);
  PQC_CHECK(args.value_dim % 8 == 0 && args.value_dim <= 256);
  PQC_CHECK(args.row_stride_bytes >= row_bytes);
  PQC_CHECK(args.token_count == 0 ||
            args.rows.size() >= (args.token_count - 1) * args.row_stride_bytes + row_bytes);
#ifdef PQCACHED_X86
  if (exec.level >= Level::kAvx2 && IsContiguous(args.key) &&
      (args.value_dim == 0 || IsContiguous(args.value))) {
    return IngestStaged(exec, args);
  }
#endif
  return IngestReference(exec, args, 0, args.token_count, args.crc_seed);
}

}  // namespace pqcached::kernels
