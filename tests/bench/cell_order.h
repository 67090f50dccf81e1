// A spike: rows grouped by the cell of their key's code, so that selecting cells selects long runs
// of rows.
//
// Row r of such a layout is the token token_of_row[r]; the rows of a cell keep the order of tokens.
// Attention does not depend on the order of rows, so that the table is read only when positions are
// asked for.
#ifndef PQCACHED_TESTS_BENCH_CELL_ORDER_H_
#define PQCACHED_TESTS_BENCH_CELL_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/pq.h"
#include "kernels/row_span.h"

namespace pqcached::bench {

// Which rows each cell has: [cell_begin[c], cell_begin[c + 1]), and the permutation.
struct CellOrder {
  std::vector<uint32_t> cell_begin;    // [CellCount + 1]
  std::vector<int32_t> cell_rows;      // [CellCount]: how many; signed, because CPUs convert those
  std::vector<uint32_t> token_of_row;  // [tokens]
};

// REQUIRES: HasCells(geometry).
CellOrder MakeCellOrder(const kernels::PqGeometry& geometry, const uint8_t* planes,
                        size_t plane_stride, uint32_t token_count);

// Selects k rows by the sum of the softmax weights of a group, cells at a time. Holds memory for
// one thread. Cells of equal value at the threshold are taken in the order of cells, not of
// positions: that is where it differs from PqSelect.
class CellSelect {
 public:
  // REQUIRES: two sub-spaces.
  CellSelect(const kernels::PqGeometry& geometry, uint32_t group_size);

  // Returns the chosen runs: spans whose positions are rows of the layout. `rows`: row 0. The
  // result holds until the next call.
  std::span<const kernels::RowSpan> Run(const CellOrder& order, const float* tables, uint32_t k,
                                        const std::byte* rows, size_t row_stride);

 private:
  void FindValues(const CellOrder& order, const float* tables);
  float FindThreshold(const CellOrder& order, uint32_t k);

  kernels::PqGeometry geometry_;
  uint32_t group_size_;
  std::vector<float> factors_;  // [group_size, 2, 2^bits] exponentials of tables
  std::vector<float> values_;   // [CellCount]
  std::vector<int32_t> flags_;  // [CellCount]: cells that a scan looks for
  std::vector<float> totals_;   // [group_size] sums of softmax weights before they are normalised
  struct Candidate {
    float value;
    uint32_t rows;
  };
  std::vector<Candidate> candidates_;  // cells that may be the threshold
  std::vector<kernels::RowSpan> runs_;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_CELL_ORDER_H_
