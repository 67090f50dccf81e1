#include "tests/bench/cell_order.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace pqcached::bench {

namespace {

// The first non-zero flag from `begin` on, or the size, which is a multiple of 16.
size_t NextFlag(const std::vector<int32_t>& flags, size_t begin) {
  size_t c = begin;
  for (; c < flags.size() && c % 16 != 0; ++c) {
    if (flags[c] != 0) return c;
  }
  for (; c < flags.size(); c += 16) {
    int32_t any = 0;
    for (size_t i = 0; i < 16; ++i) any |= flags[c + i];
    if (any == 0) continue;
    while (flags[c] == 0) ++c;
    return c;
  }
  return flags.size();
}

}  // namespace

CellOrder MakeCellOrder(const kernels::PqGeometry& geometry, const uint8_t* planes,
                        size_t plane_stride, uint32_t token_count) {
  CellOrder order;
  order.cell_begin.assign(kernels::CellCount(geometry) + 1, 0);
  order.token_of_row.resize(token_count);
  for (uint32_t t = 0; t < token_count; ++t) {
    ++order.cell_begin[kernels::GetCell(geometry, planes, plane_stride, t) + 1];
  }
  for (size_t c = 1; c < order.cell_begin.size(); ++c) {
    order.cell_rows.push_back(static_cast<int32_t>(order.cell_begin[c]));
    order.cell_begin[c] += order.cell_begin[c - 1];
  }
  std::vector<uint32_t> next(order.cell_begin.begin(), order.cell_begin.end() - 1);
  for (uint32_t t = 0; t < token_count; ++t) {
    order.token_of_row[next[kernels::GetCell(geometry, planes, plane_stride, t)]++] = t;
  }
  return order;
}

CellSelect::CellSelect(const kernels::PqGeometry& geometry, uint32_t group_size)
    : geometry_(geometry),
      group_size_(group_size),
      factors_(group_size * kernels::TableFloats(geometry)),
      values_(kernels::CellCount(geometry)),
      flags_(kernels::CellCount(geometry)) {
  runs_.reserve(kernels::CellCount(geometry));
}

// The value of cell (a, b) is sum_g e^T[g,0,a] e^T[g,1,b] / Z_g: exponentials of the tables alone.
void CellSelect::FindValues(const CellOrder& order, const float* tables) {
  const uint32_t count = kernels::CentroidCount(geometry_);
  for (uint32_t g = 0; g < group_size_; ++g) {
    const float* from = tables + size_t{g} * 2 * count;
    float* first = factors_.data() + size_t{g} * 2 * count;
    float* second = first + count;
    const float most_first = *std::max_element(from, from + count);
    const float most_second = *std::max_element(from + count, from + 2 * count);
    for (uint32_t i = 0; i < count; ++i) first[i] = std::exp(from[i] - most_first);
    for (uint32_t i = 0; i < count; ++i) second[i] = std::exp(from[count + i] - most_second);
  }
  totals_.assign(group_size_, 0.0f);
  for (uint32_t a = 0; a < count; ++a) {
    const int32_t* rows = order.cell_rows.data() + size_t{a} * count;
    for (uint32_t g = 0; g < group_size_; ++g) {
      const float* first = factors_.data() + size_t{g} * 2 * count;
      const float* second = first + count;
      float sum = 0.0f;
      for (uint32_t b = 0; b < count; ++b) sum += second[b] * static_cast<float>(rows[b]);
      totals_[g] += sum * first[a];
    }
  }
  for (uint32_t g = 0; g < group_size_; ++g) {
    float* first = factors_.data() + size_t{g} * 2 * count;
    for (uint32_t i = 0; i < count; ++i) first[i] /= totals_[g];
  }
  for (uint32_t a = 0; a < count; ++a) {
    float* to = values_.data() + size_t{a} * count;
    const float* first = factors_.data() + a;
    const float* second = factors_.data() + count;
    for (uint32_t b = 0; b < count; ++b) to[b] = first[0] * second[b];
    for (uint32_t g = 1; g < group_size_; ++g) {
      first += 2 * size_t{count};
      second += 2 * size_t{count};
      for (uint32_t b = 0; b < count; ++b) to[b] += first[0] * second[b];
    }
  }
}

// The largest value v such that the cells of at least v hold k rows. Values are positive, so their
// bits order like themselves: a few bisections over all cells, then the few that are left in order.
float CellSelect::FindThreshold(const CellOrder& order, uint32_t k) {
  constexpr int kBisections = 12;
  const size_t cell_count = values_.size();
  const float* values = values_.data();
  const int32_t* cell_rows = order.cell_rows.data();
  uint32_t low = 0;  // cells of at least `low` hold k rows, cells of at least `high` fewer
  uint32_t high = std::bit_cast<uint32_t>(*std::max_element(values_.begin(), values_.end())) + 1;
  uint32_t rows_from_high = 0;
  for (int i = 0; i < kBisections && high - low > 1; ++i) {
    const uint32_t middle = low + (high - low) / 2;
    const float value = std::bit_cast<float>(middle);
    int32_t rows = 0;
    for (size_t c = 0; c < cell_count; ++c) rows += values[c] >= value ? cell_rows[c] : 0;
    if (static_cast<uint32_t>(rows) >= k) {
      low = middle;
    } else {
      high = middle;
      rows_from_high = static_cast<uint32_t>(rows);
    }
  }
  candidates_.clear();
  const float low_value = std::bit_cast<float>(low);
  const float high_value = std::bit_cast<float>(high);
  int32_t* flags = flags_.data();
  for (size_t c = 0; c < cell_count; ++c) {
    flags[c] = (values[c] >= low_value ? 1 : 0) & (values[c] < high_value ? 1 : 0);
  }
  for (size_t c = NextFlag(flags_, 0); c < cell_count; c = NextFlag(flags_, c + 1)) {
    candidates_.push_back({values[c], static_cast<uint32_t>(cell_rows[c])});
  }
  std::sort(candidates_.begin(), candidates_.end(),
            [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
  uint32_t rows = rows_from_high;
  for (const Candidate& candidate : candidates_) {
    rows += candidate.rows;
    if (rows >= k) return candidate.value;
  }
  return 0.0f;
}

std::span<const kernels::RowSpan> CellSelect::Run(const CellOrder& order, const float* tables,
                                                  uint32_t k, const std::byte* rows,
                                                  size_t row_stride) {
  FindValues(order, tables);
  const float threshold = FindThreshold(order, k);
  int32_t rows_above = 0;
  int32_t* flags = flags_.data();
  for (size_t c = 0; c < values_.size(); ++c) {
    rows_above += values_[c] > threshold ? order.cell_rows[c] : 0;
    flags[c] = values_[c] >= threshold ? 1 : 0;
  }
  uint32_t quota = k - static_cast<uint32_t>(rows_above);  // for cells at the threshold
  runs_.clear();
  uint32_t run_end = ~uint32_t{0};
  for (size_t c = NextFlag(flags_, 0); c < values_.size(); c = NextFlag(flags_, c + 1)) {
    const uint32_t begin = order.cell_begin[c];
    uint32_t count = static_cast<uint32_t>(order.cell_rows[c]);
    if (values_[c] == threshold) {
      count = std::min(count, quota);
      quota -= count;
    }
    if (count == 0) continue;
    if (begin == run_end) {
      runs_.back().token_count += count;
    } else {
      runs_.push_back({rows + begin * row_stride, count, begin});
    }
    run_end = begin + count;
  }
  return runs_;
}

}  // namespace pqcached::bench
