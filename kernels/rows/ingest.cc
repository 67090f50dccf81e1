#include "kernels/rows/ingest.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/stream_internal.h"
#include "kernels/rows/ingest_internal.h"
#include "kernels/rows/int8_row.h"
#include "kernels/rows/int8_row_internal.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kMaxDim = 256;

// Layout of a row.
struct RowForm {
  bool int8 = false;
  DType dtype = DType::kF32;  // dtype of the elements; unused for int8
  size_t key_bytes = 0;
  size_t row_bytes = 0;
};

RowForm FormOf(const IngestArgs& args, bool int8) {
  if (int8) return {true, DType::kF32, args.key_dim, Int8RowBytes(args.key_dim, args.value_dim)};
  const size_t element_bytes = DTypeBytes(args.row_dtype);
  return {false, args.row_dtype, args.key_dim * element_bytes,
          (args.key_dim + args.value_dim) * element_bytes};
}

// Writes one token's key or value. Returns false when an element is not finite in the row's dtype.
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

// Writes one token's key or value as int8. Returns false when an element is not finite.
bool QuantizePartOfRow(const StridedTensor& tensor, uint32_t token, uint32_t dim, std::byte* target,
                       std::byte* scale_target) {
  float elements[kMaxDim];
  if (!IngestPartOfRow(tensor, token, dim, DType::kF32, reinterpret_cast<std::byte*>(elements))) {
    return false;
  }
  const float scale = QuantizeInt8({elements, dim}, {reinterpret_cast<int8_t*>(target), dim});
  std::memcpy(scale_target, &scale, sizeof(scale));
  return true;
}

// Writes one row. Returns the part that is not finite, if any.
IngestPart IngestToken(const IngestArgs& args, const RowForm& form, uint32_t token,
                       std::byte* row) {
  std::byte* scales = row + args.key_dim + args.value_dim;  // int8 rows only
  const bool key_good = form.int8 ? QuantizePartOfRow(args.key, token, args.key_dim, row, scales)
                                  : IngestPartOfRow(args.key, token, args.key_dim, form.dtype, row);
  if (!key_good) return IngestPart::kKey;
  if (args.value_dim == 0) return IngestPart::kNone;
  std::byte* value = row + form.key_bytes;
  const bool value_good =
      form.int8
          ? QuantizePartOfRow(args.value, token, args.value_dim, value, scales + sizeof(float))
          : IngestPartOfRow(args.value, token, args.value_dim, form.dtype, value);
  return value_good ? IngestPart::kNone : IngestPart::kValue;
}

uint32_t SumUp(const Exec& exec, const IngestArgs& args, std::span<const std::byte> rows,
               uint32_t crc) {
  return args.with_crc ? Crc32c(exec, rows, crc) : 0;
}

// The specification, applied to a range of tokens.
IngestResult IngestReference(const Exec& exec, const IngestArgs& args, const RowForm& form,
                             uint32_t first_token, uint32_t token_count, uint32_t crc) {
  for (uint32_t token = first_token; token < first_token + token_count; ++token) {
    std::byte* row = args.rows.data() + token * args.row_stride_bytes;
    const IngestPart bad_part = IngestToken(args, form, token, row);
    if (bad_part != IngestPart::kNone) return {bad_part, token, 0};
    crc = SumUp(exec, args, {row, form.row_bytes}, crc);
  }
  return {IngestPart::kNone, 0, crc};
}

#ifdef PQCACHED_X86
bool IsScattered(const StridedTensor& tensor, uint32_t dim) {
  const ptrdiff_t in_order = 2 * static_cast<ptrdiff_t>(dim * DTypeBytes(tensor.dtype));
  return tensor.token_stride_bytes > in_order || tensor.token_stride_bytes < -in_order;
}

bool StagePart(Level level, const StridedTensor& tensor, uint32_t first_token, uint32_t dim,
               const IngestArgs& args, DType dtype, uint32_t token_count, std::byte* staging,
               size_t row_bytes) {
  const bool scattered = IsScattered(tensor, dim);
  const uint32_t column_elements =
      internal::kScatteredColumnBytes / static_cast<uint32_t>(DTypeBytes(tensor.dtype));
  const internal::StageCall call{
      .from = tensor.dtype,
      .to = dtype,
      .dim = dim,
      .token_count = token_count,
      .tokens_after = args.token_count - first_token - token_count,
      .source = tensor.data + ptrdiff_t{first_token} * tensor.token_stride_bytes,
      .token_stride_bytes = tensor.token_stride_bytes,
      .prefetch_tokens = scattered ? internal::kScatteredPrefetchTokens : internal::kPrefetchTokens,
      .column_elements = scattered ? column_elements : dim,
      .staging = staging,
      .staging_stride_bytes = row_bytes};
  return level >= Level::kAvx512 ? internal::StagePartAvx512(call) : internal::StagePartAvx2(call);
}

// Layout of rows in staging. Rows that become int8 keep the dtypes of their tensors there.
struct Staged {
  DType key_dtype;
  DType value_dtype;
  size_t key_bytes;
  size_t row_bytes;
};

Staged StagedOf(const IngestArgs& args, const RowForm& form) {
  const DType key_dtype = form.int8 ? args.key.dtype : form.dtype;
  const DType value_dtype = form.int8 ? args.value.dtype : form.dtype;
  const size_t key_bytes = args.key_dim * DTypeBytes(key_dtype);
  return {key_dtype, value_dtype, key_bytes, key_bytes + args.value_dim * DTypeBytes(value_dtype)};
}

// Quantises staged rows to contiguous int8 rows.
void QuantizeStaged(Level level, const IngestArgs& args, const Staged& staged, uint32_t row_count,
                    std::byte* staging, std::byte* rows) {
  const auto quantize = level >= Level::kAvx512 ? internal::QuantizeAvx512 : internal::QuantizeAvx2;
  internal::Int8Call call{.dtype = staged.key_dtype,
                          .dim = args.key_dim,
                          .row_count = row_count,
                          .part = rows,
                          .scale_offset = size_t{args.key_dim} + args.value_dim,
                          .row_stride_bytes = Int8RowBytes(args.key_dim, args.value_dim),
                          .other = staging,
                          .other_stride_bytes = staged.row_bytes};
  quantize(call);
  if (args.value_dim == 0) return;
  call.dtype = staged.value_dtype;
  call.dim = args.value_dim;
  call.part += args.key_dim;
  call.scale_offset = args.value_dim + sizeof(float);
  call.other += staged.key_bytes;
  quantize(call);
}

// Builds rows in staging, where one pass checks for non-finite elements and the checksum reads the
// rows from L1, then streams them out. When a part is not finite, the reference searches for the
// first such token; it also writes the rows, in case the source has changed.
IngestResult IngestStaged(const Exec& exec, const IngestArgs& args, const RowForm& form) {
  alignas(64) std::byte staging[internal::kScatteredStagingBytes];
  alignas(64) std::byte int8_rows[internal::kInt8StagingBytes];
  const size_t staging_bytes = IsScattered(args.key, args.key_dim)
                                   ? internal::kScatteredStagingBytes
                                   : internal::kStagingBytes;
  const Staged staged = StagedOf(args, form);
  const uint32_t step = static_cast<uint32_t>(staging_bytes / staged.row_bytes);
  IngestResult result;
  result.crc = args.with_crc ? args.crc_seed : 0;
  for (uint32_t token = 0; token < args.token_count;) {
    const uint32_t count = std::min(step, args.token_count - token);
    if (StagePart(exec.level, args.key, token, args.key_dim, args, staged.key_dtype, count, staging,
                  staged.row_bytes) &&
        (args.value_dim == 0 ||
         StagePart(exec.level, args.value, token, args.value_dim, args, staged.value_dtype, count,
                   staging + staged.key_bytes, staged.row_bytes))) {
      if (form.int8) QuantizeStaged(exec.level, args, staged, count, staging, int8_rows);
      const std::byte* rows = form.int8 ? int8_rows : staging;
      result.crc = SumUp(exec, args, {rows, count * form.row_bytes}, result.crc);
      const internal::StreamCall call{.source = rows,
                                      .source_stride_bytes = static_cast<ptrdiff_t>(form.row_bytes),
                                      .row_bytes = form.row_bytes,
                                      .row_count = count,
                                      .target = args.rows.data() + token * args.row_stride_bytes,
                                      .target_stride_bytes = args.row_stride_bytes};
      exec.level >= Level::kAvx512 ? internal::StreamRowsAvx512(call)
                                   : internal::StreamRowsAvx2(call);
    } else {
      result = IngestReference(exec, args, form, token, count, result.crc);
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

void CheckShape(uint32_t key_dim, uint32_t value_dim, size_t row_stride_bytes,
                const RowForm& form) {
  PQC_CHECK(key_dim % 8 == 0 && key_dim > 0 && key_dim <= kMaxDim);
  PQC_CHECK(value_dim % 8 == 0 && value_dim <= kMaxDim);
  PQC_CHECK(row_stride_bytes >= form.row_bytes);
}

IngestResult Ingest(const Exec& exec, const IngestArgs& args, const RowForm& form) {
  CheckShape(args.key_dim, args.value_dim, args.row_stride_bytes, form);
  PQC_CHECK(args.token_count == 0 ||
            args.rows.size() >= (args.token_count - 1) * args.row_stride_bytes + form.row_bytes);
#ifdef PQCACHED_X86
  if (exec.level >= Level::kAvx2 && IsContiguous(args.key) &&
      (args.value_dim == 0 || IsContiguous(args.value))) {
    return IngestStaged(exec, args, form);
  }
#endif
  return IngestReference(exec, args, form, 0, args.token_count, args.with_crc ? args.crc_seed : 0);
}

// Returns the arguments for one of the layer's heads.
IngestArgs OneHead(const IngestHeadsArgs& args, uint32_t head, size_t row_bytes) {
  const auto slice = [head](StridedTensor tensor, ptrdiff_t head_stride_bytes) {
    if (tensor.data != nullptr) tensor.data += ptrdiff_t{head} * head_stride_bytes;
    return tensor;
  };
  const size_t rows_bytes =
      args.token_count == 0 ? 0 : (args.token_count - 1) * args.row_stride_bytes + row_bytes;
  return {.token_count = args.token_count,
          .key_dim = args.key_dim,
          .value_dim = args.value_dim,
          .key = slice(args.key, args.key_head_stride_bytes),
          .value = slice(args.value, args.value_head_stride_bytes),
          .row_dtype = args.row_dtype,
          .row_stride_bytes = args.row_stride_bytes,
          .rows = {args.rows[head], rows_bytes},
          .with_crc = false};
}

// Ingests head by head.
IngestResult IngestEachHead(const Exec& exec, const IngestHeadsArgs& args, size_t row_bytes) {
  IngestResult first_bad;
  for (uint32_t head = 0; head < args.rows.size(); ++head) {
    const IngestResult result = IngestRows(exec, OneHead(args, head, row_bytes));
    if (result.ok()) continue;
    if (first_bad.ok() || result.bad_token < first_bad.bad_token) first_bad = result;
  }
  return first_bad;
}

#ifdef PQCACHED_X86
bool HeadsLieCloser(const StridedTensor& tensor, ptrdiff_t head_stride_bytes) {
  return std::abs(head_stride_bytes) < std::abs(tensor.token_stride_bytes);
}

internal::HeadsPart PartOf(const StridedTensor& tensor, ptrdiff_t head_stride_bytes, uint32_t dim,
                           size_t begin_bytes) {
  return {.from = tensor.dtype,
          .dim = dim,
          .source = tensor.data,
          .token_stride_bytes = tensor.token_stride_bytes,
          .head_stride_bytes = head_stride_bytes,
          .begin_bytes = begin_bytes};
}

// Ingests token by token. When a token is not finite, the reference finds the part and head; it
// also writes the rows, in case the source has changed.
IngestResult IngestByTokens(const Exec& exec, const IngestHeadsArgs& args, const RowForm& form) {
  internal::HeadsCall call{
      .key = PartOf(args.key, args.key_head_stride_bytes, args.key_dim, 0),
      .value = PartOf(args.value, args.value_head_stride_bytes, args.value_dim, form.key_bytes),
      .to = args.row_dtype,
      .token_begin = 0,
      .token_end = args.token_count,
      .rows = args.rows.data(),
      .head_count = static_cast<uint32_t>(args.rows.size()),
      .row_stride_bytes = args.row_stride_bytes};
  IngestResult result;
  while (call.token_begin < call.token_end && result.ok()) {
    const uint32_t token = exec.level >= Level::kAvx512 ? internal::CopyHeadsAvx512(call)
                                                        : internal::CopyHeadsAvx2(call);
    for (uint32_t head = 0; head < args.rows.size() && token < call.token_end && result.ok();
         ++head) {
      result =
          IngestReference(exec, OneHead(args, head, form.row_bytes), form, token, 1, /*crc=*/0);
    }
    call.token_begin = token + 1;
  }
  exec.level >= Level::kAvx512 ? internal::FenceStreamsAvx512() : internal::FenceStreamsAvx2();
  return result;
}
#endif

}  // namespace

IngestResult IngestRows(const Exec& exec, const IngestArgs& args) {
  return Ingest(exec, args, FormOf(args, false));
}

IngestResult IngestInt8Rows(const Exec& exec, const IngestArgs& args) {
  return Ingest(exec, args, FormOf(args, true));
}

IngestResult IngestHeads(const Exec& exec, const IngestHeadsArgs& args) {
  if (args.rows.empty()) return {};
  if (args.key_dim == 0) {  // the one part of these rows is copied as a key
    IngestHeadsArgs values = args;
    values.key = std::exchange(values.value, {});
    values.key_head_stride_bytes = std::exchange(values.value_head_stride_bytes, 0);
    values.key_dim = std::exchange(values.value_dim, 0);
    IngestResult result = IngestHeads(exec, values);
    if (!result.ok()) result.bad_part = IngestPart::kValue;
    return result;
  }
  const size_t element_bytes = DTypeBytes(args.row_dtype);
  const RowForm form{.dtype = args.row_dtype,
                     .key_bytes = args.key_dim * element_bytes,
                     .row_bytes = (args.key_dim + args.value_dim) * element_bytes};
  CheckShape(args.key_dim, args.value_dim, args.row_stride_bytes, form);
#ifdef PQCACHED_X86
  if (exec.level >= Level::kAvx2 && IsContiguous(args.key) &&
      (args.value_dim == 0 || IsContiguous(args.value)) &&
      (args.rows.size() == 1 ||
       (HeadsLieCloser(args.key, args.key_head_stride_bytes) &&
        (args.value_dim == 0 || HeadsLieCloser(args.value, args.value_head_stride_bytes))))) {
    return IngestByTokens(exec, args, form);
  }
#endif
  return IngestEachHead(exec, args, form.row_bytes);
}

}  // namespace pqcached::kernels
