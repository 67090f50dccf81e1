#include "tests/bench/cell_order.h"

#include <algorithm>
#include <cmath>

namespace pqcached::bench {

namespace {

constexpr uint32_t kCount = CellSelect::kCount;
constexpr uint32_t kCells = kCount * kCount;
constexpr uint32_t kBlock = CellSelect::kBlock;

// Rows of the cells whose value is at least `value`.
float RowsFrom(const float* values, const float* cell_rows, size_t count, float value) {
  float rows = 0.0f;
  for (size_t c = 0; c < count; ++c) rows += values[c] >= value ? cell_rows[c] : 0.0f;
  return rows;
}

}  // namespace

CellOrder MakeCellOrder(const kernels::PqGeometry& geometry, const uint8_t* planes,
                        size_t plane_stride, uint32_t token_count, uint32_t segment_tokens) {
  const size_t cell_count = kernels::CellCount(geometry);
  const auto cell_of = [&](uint32_t token) {
    return kernels::GetCell(geometry, planes, plane_stride, token);
  };
  CellOrder order;
  order.segment_count = token_count / segment_tokens;
  order.cell_begin.assign(order.segment_count * (cell_count + 1), 0);
  order.cell_rows.assign(cell_count, 0.0f);
  order.token_of_row.resize(token_count);
  for (uint32_t segment = 0; segment < order.segment_count; ++segment) {
    const uint32_t begin = segment * segment_tokens;
    uint32_t* cell_begin = order.cell_begin.data() + segment * (cell_count + 1);
    cell_begin[0] = begin;
    for (uint32_t t = begin; t < begin + segment_tokens; ++t) ++cell_begin[cell_of(t) + 1];
    for (size_t c = 0; c < cell_count; ++c) {
      order.cell_rows[c] += static_cast<float>(cell_begin[c + 1]);
      cell_begin[c + 1] += cell_begin[c];
    }
    std::vector<uint32_t> next(cell_begin, cell_begin + cell_count);
    for (uint32_t t = begin; t < begin + segment_tokens; ++t) {
      order.token_of_row[next[cell_of(t)]++] = t;
    }
  }
  return order;
}

CellSelect::CellSelect(uint32_t group_size)
    : group_size_(group_size),
      factors_(group_size * 2 * kCount),
      values_(kCells),
      block_most_(kCells / kBlock) {
  for (std::vector<float>* list : {&listed_values_, &listed_rows_}) list->resize(kCells);
  listed_cells_.resize(kCells);
  runs_.reserve(16 * kCells);
}

// The value of cell (a, b) is sum_g e^T[g,0,a] e^T[g,1,b] / Z_g: exponentials of the tables alone.
void CellSelect::FindValues(const CellOrder& order, const float* tables) {
  for (uint32_t i = 0; i < group_size_ * 2; ++i) {
    const float* from = tables + size_t{i} * kCount;
    float* to = factors_.data() + size_t{i} * kCount;
    float most = from[0];
    for (uint32_t c = 1; c < kCount; ++c) most = std::max(most, from[c]);
    for (uint32_t c = 0; c < kCount; ++c) to[c] = std::exp(from[c] - most);
  }
  for (uint32_t g = 0; g < group_size_; ++g) {
    float* first = factors_.data() + size_t{g} * 2 * kCount;
    const float* second = first + kCount;
    float sums[kCount] = {};  // over a
    for (uint32_t a = 0; a < kCount; ++a) {
      const float* rows = order.cell_rows.data() + size_t{a} * kCount;
      for (uint32_t b = 0; b < kCount; ++b) sums[b] += first[a] * rows[b];
    }
    float total = 0.0f;
    for (uint32_t b = 0; b < kCount; ++b) total += sums[b] * second[b];
    for (uint32_t a = 0; a < kCount; ++a) first[a] /= total;
  }
  for (uint32_t a = 0; a < kCount; ++a) {
    float sums[kCount] = {};
    for (uint32_t g = 0; g < group_size_; ++g) {
      const float* first = factors_.data() + size_t{g} * 2 * kCount;
      const float* second = first + kCount;
      for (uint32_t b = 0; b < kCount; ++b) sums[b] += first[a] * second[b];
    }
    float* to = values_.data() + size_t{a} * kCount;
    float* most = block_most_.data() + a * (kCount / kBlock);
    for (uint32_t b = 0; b < kCount; ++b) to[b] = sums[b];
    for (uint32_t i = 0; i < kCount / kBlock; ++i) {
      most[i] = 0.0f;
      for (uint32_t b = 0; b < kBlock; ++b) most[i] = std::max(most[i], sums[i * kBlock + b]);
    }
  }
}

// Lists the cells of at least `value`, in order.
void CellSelect::ListFrom(const CellOrder& order, float value) {
  listed_count_ = 0;
  for (uint32_t block = 0; block < kCells / kBlock; ++block) {
    if (block_most_[block] < value) continue;
    for (uint32_t c = block * kBlock; c < (block + 1) * kBlock; ++c) {
      listed_cells_[listed_count_] = c;
      listed_values_[listed_count_] = values_[c];
      listed_rows_[listed_count_] = order.cell_rows[c];
      listed_count_ += values_[c] >= value ? 1 : 0;
    }
  }
}

// The largest value v such that the cells of at least v hold k rows. Lists the cells of about that
// and more: halves a bound until they hold k rows, then bisects among them alone.
float CellSelect::FindThreshold(const CellOrder& order, float k) {
  constexpr int kBisections = 12;
  float high = 2.0f * *std::max_element(block_most_.begin(), block_most_.end());
  float rows_from_high = 0.0f;  // fewer than k; the cells of at least `low` hold k
  float low = high / 2;
  for (;; low /= 2) {
    const float rows = RowsFrom(values_.data(), order.cell_rows.data(), kCells, low);
    if (rows >= k) break;
    high = low;
    rows_from_high = rows;
  }
  ListFrom(order, low);
  for (int i = 0; i < kBisections; ++i) {
    const float middle = low + (high - low) / 2;
    const float rows = RowsFrom(listed_values_.data(), listed_rows_.data(), listed_count_, middle);
    if (rows >= k) {
      low = middle;
    } else {
      high = middle;
      rows_from_high = rows;
    }
  }
  candidates_.clear();
  for (size_t i = 0; i < listed_count_; ++i) {
    const float value = listed_values_[i];
    if (value >= low && value < high) candidates_.push_back({value, listed_rows_[i]});
  }
  std::sort(candidates_.begin(), candidates_.end(),
            [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
  float rows = rows_from_high;
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
  const float threshold = FindThreshold(order, static_cast<float>(k));
  uint32_t quota = k;  // for cells at the threshold
  size_t chosen_count = 0;
  for (size_t i = 0; i < listed_count_; ++i) {
    if (listed_values_[i] < threshold) continue;
    quota -= listed_values_[i] > threshold ? static_cast<uint32_t>(listed_rows_[i]) : 0;
    listed_values_[chosen_count] = listed_values_[i];
    listed_cells_[chosen_count++] = listed_cells_[i];
  }
  runs_.clear();
  for (uint32_t segment = 0; segment < order.segment_count; ++segment) {
    const uint32_t* cell_begin = order.cell_begin.data() + size_t{segment} * (kCells + 1);
    for (size_t i = 0; i < chosen_count; ++i) {
      const uint32_t begin = cell_begin[listed_cells_[i]];
      uint32_t count = cell_begin[listed_cells_[i] + 1] - begin;
      if (listed_values_[i] == threshold) {
        count = std::min(count, quota);
        quota -= count;
      }
      if (count > 0) AppendRun(begin, count, rows, row_stride);
    }
  }
  return runs_;
}

void CellSelect::AppendRun(uint32_t begin, uint32_t count, const std::byte* rows,
                           size_t row_stride) {
  if (!runs_.empty() && runs_.back().first_position + runs_.back().token_count == begin) {
    runs_.back().token_count += count;
  } else {
    runs_.push_back({rows + begin * row_stride, count, begin});
  }
}

}  // namespace pqcached::bench
