#include "kernels/select/cells/pq_cells.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "kernels/base/simd/fast_exp.h"

namespace pqcached::kernels {
namespace {

// Loops below use independent lanes where the order of float additions would prevent vectorisation.
constexpr size_t kLanes = 16;

void AddCounts(const uint32_t* from, size_t count, uint32_t* to) {
  for (size_t i = 0; i < count; ++i) to[i] += from[i];
}

void AddListCounts(const uint16_t* const* begins, uint32_t list_count, size_t count, uint32_t* to) {
  for (uint32_t list = 0; list < list_count; ++list) {
    const uint16_t* const own = begins[list];
    for (size_t i = 0; i < count; ++i) to[i] += static_cast<uint16_t>(own[i + 1] - own[i]);
  }
}

void AddOuter(const float* row, uint32_t n0, const float* column, uint32_t n1, float* out) {
  for (uint32_t c0 = 0; c0 < n0; ++c0) {
    const float first = row[c0];
    for (uint32_t c1 = 0; c1 < n1; ++c1) out[c0 * n1 + c1] = first + column[c1];
  }
}

float Largest(const float* values, const uint32_t* tokens, size_t count, float least) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, least);
  for (size_t i = 0; i < count; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      const float value = tokens[i + j] != 0 ? values[i + j] : least;
      lanes[j] = lanes[j] < value ? value : lanes[j];
    }
  }
  return *std::max_element(lanes, lanes + kLanes);
}

double Weigh(float* values, const uint32_t* tokens, size_t count, float max) {
  float lanes[kLanes] = {};
  double sum = 0.0;
  for (size_t i = 0; i < count; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      const float weight = FastExp(values[i + j] - max);
      // Token counts are below 2^31, and a signed conversion is one instruction.
      lanes[j] += weight * static_cast<float>(static_cast<int32_t>(tokens[i + j]));
      values[i + j] = weight;
    }
  }
  for (const float lane : lanes) sum += double{lane};
  return sum;
}

EntryRange Range(const float* entries, uint32_t count) {
  float least[kLanes];
  float largest[kLanes];
  std::copy(entries, entries + kLanes, least);
  std::copy(entries, entries + kLanes, largest);
  for (uint32_t i = kLanes; i < count; i += kLanes) {
    for (uint32_t j = 0; j < kLanes; ++j) {
      least[j] = entries[i + j] < least[j] ? entries[i + j] : least[j];
      largest[j] = largest[j] < entries[i + j] ? entries[i + j] : largest[j];
    }
  }
  return {.least = *std::min_element(least, least + kLanes),
          .largest = *std::max_element(largest, largest + kLanes)};
}

void Exponentials(const float* entries, uint32_t count, float max, float* exponentials) {
  for (uint32_t i = 0; i < count; ++i) exponentials[i] = FastExp(entries[i] - max);
}

double SumProducts(const CellFactors& factors, const uint32_t* tokens) {
  const uint32_t n1 = factors.n1;
  const float* const column = factors.columns;
  double sum = 0.0;
  for (uint32_t c0 = 0; c0 < factors.n0; ++c0) {
    float lanes[kLanes] = {};
    for (uint32_t c1 = 0; c1 < n1; c1 += kLanes) {
      for (uint32_t j = 0; j < kLanes; ++j) {
        const auto n = static_cast<int32_t>(tokens[c0 * n1 + c1 + j]);
        lanes[j] += column[c1 + j] * static_cast<float>(n);
      }
    }
    double row_sum = 0.0;
    for (const float lane : lanes) row_sum += double{lane};
    sum += row_sum * double{factors.rows[c0]};
  }
  return sum;
}

void AddProducts(const CellFactors& factors, uint32_t head_count, float* values) {
  const uint32_t n1 = factors.n1;
  for (uint32_t c0 = 0; c0 < factors.n0; ++c0) {
    float* const out = values + c0 * n1;
    for (uint32_t head = 0; head < head_count; ++head) {
      const float row = factors.rows[head * factors.row_stride + c0];
      const float* const column = factors.columns + head * factors.column_stride;
      if (head == 0) {
        for (uint32_t c1 = 0; c1 < n1; ++c1) out[c1] = row * column[c1];
      } else {
        for (uint32_t c1 = 0; c1 < n1; ++c1) out[c1] += row * column[c1];
      }
    }
  }
}

void AddScaled(const float* weights, float scale, size_t count, float* sums) {
  for (size_t i = 0; i < count; ++i) sums[i] += scale * weights[i];
}

void RaiseTo(const float* values, float max, float log_sum, size_t count, float* largest) {
  for (size_t i = 0; i < count; ++i) {
    const float value = (values[i] - max) - log_sum;
    largest[i] = largest[i] < value ? value : largest[i];
  }
}

struct WeightedValue {
  float value;
  uint32_t tokens;
};

CellThreshold FindCellThreshold(const float* values, const uint32_t* tokens, size_t count, uint32_t,
                                uint32_t k, uint32_t* work) {
  auto* cells = reinterpret_cast<WeightedValue*>(work);
  size_t size = 0;
  for (size_t i = 0; i < count; ++i) {
    cells[size] = {.value = values[i], .tokens = tokens[i]};
    size += tokens[i] != 0 ? 1 : 0;
  }
  // Quickselect by weight: cells in [0, begin) are above the threshold, cells in [end, size) are
  // not.
  size_t begin = 0;
  size_t end = size;
  uint32_t above_count = 0;
  while (true) {
    const float a = cells[begin].value;
    const float b = cells[begin + (end - begin) / 2].value;
    const float c = cells[end - 1].value;
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    WeightedValue* const first = cells + begin;
    WeightedValue* const last = cells + end;
    WeightedValue* const equal =
        std::partition(first, last, [&](const WeightedValue& x) { return x.value > pivot; });
    uint32_t greater_tokens = 0;
    for (WeightedValue* x = first; x < equal; ++x) greater_tokens += x->tokens;
    if (above_count + greater_tokens >= k) {
      end = static_cast<size_t>(equal - cells);
      continue;
    }
    WeightedValue* const less =
        std::partition(equal, last, [&](const WeightedValue& x) { return x.value == pivot; });
    uint32_t equal_tokens = 0;
    for (WeightedValue* x = equal; x < less; ++x) equal_tokens += x->tokens;
    above_count += greater_tokens;
    if (above_count + equal_tokens >= k) return {.value = pivot, .above_count = above_count};
    above_count += equal_tokens;
    begin = static_cast<size_t>(less - cells);
  }
}

void Rank(const float* entries, uint32_t count, uint8_t* rank) {
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t larger = 0;
    for (uint32_t j = 0; j < count; ++j) larger += entries[j] > entries[i] ? 1u : 0u;
    rank[i] = static_cast<uint8_t>(larger);
  }
}

void CountBits(const uint8_t* rows, uint32_t row_count, uint32_t row_bytes, uint8_t* counts) {
  for (uint32_t row = 0; row < row_count; ++row) {
    uint64_t bits = 0;
    std::memcpy(&bits, rows + row * row_bytes, row_bytes);
    counts[row] = static_cast<uint8_t>(std::popcount(bits));
  }
}

void Compare(const float* values, const uint32_t* tokens, size_t count, float threshold,
             uint8_t* at_least, uint8_t* above) {
  for (size_t i = 0; i < count; i += 8) {
    uint32_t at_least_bits = 0;
    uint32_t above_bits = 0;
    for (uint32_t j = 0; j < 8; ++j) {
      const bool is_tied = (values[i + j] == threshold) & (tokens[i + j] != 0);
      const bool is_above = values[i + j] > threshold;
      at_least_bits |= static_cast<uint32_t>(is_tied | is_above) << j;
      above_bits |= static_cast<uint32_t>(is_above) << j;
    }
    at_least[i / 8] = static_cast<uint8_t>(at_least_bits);
    above[i / 8] = static_cast<uint8_t>(above_bits);
  }
}

}  // namespace

const CellOps kCellOpsPortable = {.add_counts = AddCounts,
                                  .add_list_counts = AddListCounts,
                                  .add_outer = AddOuter,
                                  .largest = Largest,
                                  .weigh = Weigh,
                                  .range = Range,
                                  .exponentials = Exponentials,
                                  .sum_products = SumProducts,
                                  .add_products = AddProducts,
                                  .add_scaled = AddScaled,
                                  .update_max = RaiseTo,
                                  .find_threshold = FindCellThreshold,
                                  .rank = Rank,
                                  .count_bits = CountBits,
                                  .compare = Compare};

namespace {

// Spans of at least this many slots use a table with a byte for every cell: one load per token, and
// no branch that depends on the codes except for tied cells.
constexpr uint32_t kMinTableSlots = 4096;

enum : uint8_t { kNotSelected = 0, kAbove = 1, kTied = 2 };

uint8_t StateOf(const CellMembers& members, uint32_t code_0, uint32_t code_1) {
  const uint32_t at_least = members.at_least[code_1 / 8][code_0] >> (code_1 % 8) & 1u;
  const uint32_t above = members.above[code_1 / 8][code_0] >> (code_1 % 8) & 1u;
  return above != 0 ? kAbove : at_least != 0 ? kTied : kNotSelected;
}

// StateAt(slot) returns one of the states above.
template <typename StateAt>
void Emit(const CellScanSpan& span, CellScanOutput& output, StateAt state_at) {
  // Local copies: the compiler must assume that a stored position could change the originals.
  uint32_t* const positions = output.positions;
  const uint32_t capacity = output.capacity;
  const uint32_t first_position = span.first_position;
  const uint32_t slot_end = span.slot_end;
  uint32_t written = output.written;
  uint32_t quota = output.equal_quota;
  for (uint32_t slot = span.slot_begin; slot < slot_end && written < capacity; ++slot) {
    uint32_t state = state_at(slot);
    if (state == kTied) {
      state = quota > 0 ? 1 : 0;
      quota -= state;
    }
    positions[written] = first_position + slot;
    written += state;
  }
  output.written = written;
  output.equal_quota = quota;
}

}  // namespace

void ScanCellsPortable(const CellMembers& members, const CellScanSpan& span,
                       CellScanOutput& output) {
  const uint8_t* const plane_0 = span.plane_0;
  const uint8_t* const plane_1 = span.plane_1;
  if (plane_1 == nullptr) {
    uint8_t states[256];
    for (uint32_t byte = 0; byte < 256; ++byte) states[byte] = StateOf(members, byte / 8, byte % 8);
    Emit(span, output, [plane_0, &states](uint32_t slot) { return states[plane_0[slot]]; });
  } else if (span.slot_end - span.slot_begin >= kMinTableSlots) {
    uint8_t states[64 * 64];
    for (uint32_t cell = 0; cell < 64 * 64; ++cell) {
      states[cell] = StateOf(members, cell / 64, cell % 64);
    }
    Emit(span, output, [plane_0, plane_1, &states](uint32_t slot) {
      return states[plane_0[slot] * 64u + plane_1[slot]];
    });
  } else {
    Emit(span, output,
         [&](uint32_t slot) { return StateOf(members, plane_0[slot], plane_1[slot]); });
  }
}

}  // namespace pqcached::kernels
