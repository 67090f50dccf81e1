// Attention over keys and values that lie in two arrays: every level against double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "tests/kernels/attend/attend_problem.h"

namespace pqcached::kernels {
namespace {

class AttendArraysTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, AttendArraysTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

// Keys and values in two arrays of the same stride, the values first or last; bytes between are NaN.
TEST_P(AttendArraysTest, KeysAndValuesInTwoArraysMatch) {
  for (const DType dtype : kAllDTypes) {
    for (const auto& [key_dim, value_dim] : {std::pair{128u, 128u}, {96u, 40u}, {40u, 256u}}) {
      for (const uint32_t tokens : {1u, 31u, 32u, 33u, 100u}) {
        const Problem problem = MakeProblem(dtype, key_dim, value_dim, 4, 2, tokens, 61, 2);
        const size_t element = DTypeBytes(dtype);
        const size_t stride = std::max(key_dim, value_dim) * element + 64;
        const size_t half = tokens * stride;
        for (const ptrdiff_t distance :
             {static_cast<ptrdiff_t>(half), -static_cast<ptrdiff_t>(half)}) {
          Problem split = problem;
          split.rows.bytes.assign(2 * half, std::byte{0xff});
          std::byte* const keys = split.rows.bytes.data() + (distance > 0 ? 0 : half);
          std::byte* const values = keys + distance;
          for (uint32_t t = 0; t < tokens; ++t) {
            const std::byte* const row =
                problem.rows.bytes.data() + problem.rows.offset + t * problem.rows.stride_bytes;
            std::copy_n(row, key_dim * element, keys + t * stride);
            std::copy_n(row + key_dim * element, value_dim * element, values + t * stride);
          }
          uint32_t begin = 0;
          for (RowSpan& span : split.rows.spans) {
            span.rows = keys + begin * stride;
            begin += span.token_count;
          }
          split.shape.row_stride_bytes = stride;
          split.shape.value_offset_bytes = distance;
          const Result expected = Expected(problem, AllTokens(tokens));
          ExpectClose(GetParam(), problem, RunAll(GetParam(), split), expected);
          ExpectClose(GetParam(), problem, RunChosen(GetParam(), split, AllTokens(tokens)),
                      expected);
        }
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
