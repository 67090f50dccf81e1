// Compares rows that a call repeats with the stored ones (StoreOptions::compare_repeats).
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kvstore/refusal.h"
#include "kvstore/rows/writer.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kTokensAtOnce = 64;

float NumberAt(kernels::DType dtype, const std::byte* element) {
  float number = 0;
  kernels::ConvertElements(dtype, element, kernels::DType::kF32,
                           reinterpret_cast<std::byte*>(&number), 1);
  return number;
}

// The place of a row.
struct Place {
  uint32_t layer = 0;
  uint32_t position = 0;
  uint32_t kv_head = 0;
};

absl::Status CompareRow(const LayerShape& shape, const Place& place, const std::byte* ours,
                        const std::byte* theirs) {
  const uint32_t element_count = shape.key_dim + shape.value_dim;
  const size_t element_bytes = kernels::DTypeBytes(shape.dtype);
  for (uint32_t i = 0; i < element_count; ++i) {
    const size_t at = i * element_bytes;
    if (std::memcmp(ours + at, theirs + at, element_bytes) == 0) continue;
    const bool is_key = i < shape.key_dim;
    return InvalidArgument(
        is_key ? "keys" : "values",
        absl::StrCat(NumberAt(shape.dtype, theirs + at), "; ", NumberAt(shape.dtype, ours + at),
                     " is stored in layer ", place.layer, " at position ", place.position,
                     ", kv head ", place.kv_head, ", element ", is_key ? i : i - shape.key_dim,
                     " of the ", is_key ? "key" : "value"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SegmentWriter::Compare(uint32_t first_position, const CheckedRows& rows) const {
  const StoredLayers::Layer& layer = cache_->layers.layers[rows.layer_slot];
  const LayerShape& shape = layer.shape;
  std::vector<std::byte> scratch(size_t{shape.kv_heads} * kTokensAtOnce * shape.row_bytes);
  std::array<std::byte*, kMaxKvHeads> theirs;
  for (uint32_t head = 0; head < shape.kv_heads; ++head) {
    theirs[head] = scratch.data() + size_t{head} * kTokensAtOnce * shape.row_bytes;
  }
  for (uint32_t token = 0; token < rows.token_count;) {
    const uint32_t position = first_position + token;
    const SegmentRows& segment = *entry(SegmentAt(position)).rows;
    const uint32_t slot = position - segment.first_position();
    const uint32_t count =
        std::min({kTokensAtOnce, rows.token_count - token, segment.end_capacity() - position});
    const kernels::IngestResult result =
        WriteTo(rows, token, count, {theirs.data(), shape.kv_heads});
    if (!result.ok()) {
      return InvalidArgument(
          result.bad_part == kernels::IngestPart::kKey ? "keys" : "values",
          absl::StrCat("layer ", layer.layer, ": token ", position + result.bad_token,
                       " has NaN or infinity as ", kernels::DTypeName(shape.dtype)));
    }
    for (uint32_t i = 0; i < count; ++i) {
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        const std::byte* ours =
            segment.rows(layer.first_head + head) + size_t{slot + i} * shape.row_bytes;
        RETURN_IF_ERROR(CompareRow(shape, {layer.layer, position + i, head}, ours,
                                   theirs[head] + size_t{i} * shape.row_bytes));
      }
    }
    token += count;
  }
  return absl::OkStatus();
}

}  // namespace pqcached::kvstore
