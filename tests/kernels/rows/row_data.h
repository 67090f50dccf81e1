// Random rows, positions and level names for the tests of kernels that read rows.
#ifndef PQCACHED_TESTS_KERNELS_ROWS_ROW_DATA_H_
#define PQCACHED_TESTS_KERNELS_ROWS_ROW_DATA_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"
#include "kernels/base/row_span.h"

namespace pqcached::kernels {

inline constexpr DType kAllDTypes[] = {DType::kF16, DType::kBf16, DType::kF32};

inline std::string LevelTestName(const testing::TestParamInfo<Level>& info) {
  return std::string(LevelName(info.param));
}

inline std::vector<float> RandomFloats(size_t count, uint32_t seed, float deviation = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Rows of normally distributed elements in one buffer, split into spans with a gap of positions
// between them; the same elements, as they were stored, as doubles.
struct RowData {
  DType dtype = DType::kF16;
  uint32_t row_dim = 0;
  size_t stride_bytes = 0;
  std::vector<std::byte> bytes;
  std::vector<double> values;  // [token, row_dim]
  std::vector<RowSpan> spans;
  std::vector<uint32_t> positions;  // of all tokens

  std::byte* Row(size_t token) { return bytes.data() + offset + token * stride_bytes; }
  const double* Values(size_t token) const { return values.data() + token * row_dim; }

  // Stores `value` as element `index` of a row.
  void Set(size_t token, uint32_t index, float value) {
    StoreElement(dtype, Row(token), index, value);
    values[token * row_dim + index] = static_cast<double>(LoadElement(dtype, Row(token), index));
  }

  size_t offset = 0;  // of the first row in `bytes`
};

// `padding_bytes` lie between rows and `offset` before them: odd ones give unaligned rows. The
// buffer ends with the last element, so that a read behind it shows under ASan.
inline RowData MakeRows(DType dtype, uint32_t row_dim, uint32_t token_count, uint32_t span_count,
                        uint32_t seed, size_t padding_bytes = 0, size_t offset = 0) {
  RowData data;
  data.dtype = dtype;
  data.row_dim = row_dim;
  data.offset = offset;
  const size_t row_bytes = row_dim * DTypeBytes(dtype);
  data.stride_bytes = row_bytes + padding_bytes;
  data.bytes.resize(token_count == 0 ? 0
                                     : offset + (token_count - 1) * data.stride_bytes + row_bytes);
  data.values.resize(size_t{token_count} * row_dim);
  const std::vector<float> random = RandomFloats(data.values.size(), seed);
  for (uint32_t token = 0; token < token_count; ++token) {
    for (uint32_t i = 0; i < row_dim; ++i) data.Set(token, i, random[size_t{token} * row_dim + i]);
  }
  uint32_t begin = 0;
  uint32_t first_position = 7;
  for (uint32_t span = 0; span < span_count; ++span) {
    const uint32_t end = token_count * (span + 1) / span_count;
    data.spans.push_back(
        {data.bytes.data() + offset + begin * data.stride_bytes, end - begin, first_position});
    for (uint32_t i = begin; i < end; ++i) data.positions.push_back(first_position + i - begin);
    first_position += end - begin + 5 * span;
    begin = end;
  }
  return data;
}

// Indices of about `share` of the tokens, ascending.
inline std::vector<uint32_t> RandomTokens(uint32_t token_count, double share, uint32_t seed) {
  std::mt19937 generator(seed);
  std::bernoulli_distribution chosen(share);
  std::vector<uint32_t> tokens;
  for (uint32_t token = 0; token < token_count; ++token) {
    if (chosen(generator)) tokens.push_back(token);
  }
  return tokens;
}

inline std::vector<uint32_t> AllTokens(uint32_t token_count) {
  std::vector<uint32_t> tokens(token_count);
  for (uint32_t token = 0; token < token_count; ++token) tokens[token] = token;
  return tokens;
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_TESTS_KERNELS_ROWS_ROW_DATA_H_
