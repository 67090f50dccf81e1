// A spike: rows grouped by the cell of their key's code, so that selecting cells selects long runs
// of rows.
//
// Row r of such a layout is the token token_of_row[r]; the rows of a cell keep the order of tokens.
// Rows are ordered within segments, each of which begins with its first token: one segment is the
// best that the layout can do, many are what a store has whose segments grow one after the other.
// Attention does not depend on the order of rows, so that the table is read only when positions are
// asked for.
#ifndef PQCACHED_TESTS_BENCH_CELL_ORDER_H_
#define PQCACHED_TESTS_BENCH_CELL_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/row_span.h"
#include "kernels/select/pq.h"

namespace pqcached::bench {

// Which rows each cell has, and the permutation.
struct CellOrder {
  uint32_t segment_count = 0;
  std::vector<uint32_t> cell_begin;    // [segment_count, CellCount + 1]: first row in the segment
  std::vector<float> cell_rows;        // [CellCount]: how many in all, below 2^24
  std::vector<uint32_t> token_of_row;  // [tokens]
};

// REQUIRES: HasCells(geometry); segment_tokens divides token_count.
CellOrder MakeCellOrder(const kernels::PqGeometry& geometry, const uint8_t* planes,
                        size_t plane_stride, uint32_t token_count, uint32_t segment_tokens);

// Selects k rows by the sum of the softmax weights of a group, cells at a time. Holds memory for
// one thread. Cells of equal value at the threshold are taken in the order of cells, not of
// positions: that is where it differs from PqSelect.
class CellSelect {
 public:
  static constexpr uint32_t kCount = 64;  // centroids of each of two sub-spaces
  static constexpr uint32_t kBlock = 16;

  explicit CellSelect(uint32_t group_size);

  // Returns the chosen runs: spans whose positions are rows of the layout. `rows`: row 0. The
  // result holds until the next call.
  std::span<const kernels::RowSpan> Run(const CellOrder& order, const float* tables, uint32_t k,
                                        const std::byte* rows, size_t row_stride);

 private:
  void FindValues(const CellOrder& order, const float* tables);
  void ListFrom(const CellOrder& order, float value);
  float FindThreshold(const CellOrder& order, float k);
  void AppendRun(uint32_t begin, uint32_t count, const std::byte* rows, size_t row_stride);

  uint32_t group_size_;
  std::vector<float> factors_;     // [group_size, 2, kCount] exponentials of tables
  std::vector<float> values_;      // of all cells
  std::vector<float> block_most_;  // the largest value of every kBlock cells
  std::vector<float> listed_values_;
  std::vector<float> listed_rows_;
  std::vector<uint32_t> listed_cells_;
  size_t listed_count_ = 0;
  struct Candidate {
    float value;
    float rows;
  };
  std::vector<Candidate> candidates_;  // cells that may be the threshold
  std::vector<kernels::RowSpan> runs_;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_CELL_ORDER_H_
