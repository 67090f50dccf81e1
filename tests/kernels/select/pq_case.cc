#include "tests/kernels/select/pq_case.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>

#include "kernels/select/cells/pq_postings.h"

namespace pqcached::kernels {
namespace {

constexpr double kTolerance = 1e-5;

float TableEntry(TableKind kind, std::mt19937_64& random) {
  std::normal_distribution<float> normal(0.0f, 2.0f);
  const float infinity = std::numeric_limits<float>::infinity();
  const uint64_t pick = random() % 16;
  switch (kind) {
    case TableKind::kNormal:
      return normal(random);
    case TableKind::kTies:
      return static_cast<float>(pick % 3);
    case TableKind::kZeros:
      return pick % 2 == 0 ? 0.0f : -0.0f;
    case TableKind::kHuge:
      return normal(random) * (pick < 8 ? 1e37f : 1e10f);
    case TableKind::kInfinite:
      if (pick == 0) return infinity;
      if (pick == 1) return -infinity;
      if (pick == 2) return std::numeric_limits<float>::quiet_NaN();
      return normal(random);
    case TableKind::kDenormal:
      return normal(random) * 1e-40f;
    case TableKind::kPeaked:
      return normal(random) * 40.0f;
  }
  return 0.0f;
}

bool IsExact(GroupRule rule, uint32_t group_size) {
  return group_size == 1 || rule == GroupRule::kMeanLogit || rule == GroupRule::kMaxLogit;
}

// 64-byte aligned bytes of an exact size.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t size)
      : size_(size), data_(std::aligned_alloc(64, (size + 64) / 64 * 64)) {}
  ~AlignedBytes() { std::free(data_); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  std::span<std::byte> span() { return {static_cast<std::byte*>(data_), size_}; }

 private:
  size_t size_;
  void* data_;
};

}  // namespace

PqCase::PqCase(const PqCaseShape& shape, uint64_t seed) : shape_(shape) {
  std::mt19937_64 random(seed);
  MakeTables(random);
  MakeSegments(random);
  FindValues();
}

void PqCase::MakeTables(std::mt19937_64& random) {
  tables_.resize(shape_.codebook_count * shape_.group_size * TableFloats(shape_.geometry));
  for (float& entry : tables_) entry = TableEntry(shape_.tables, random);
}

void PqCase::MakeSegments(std::mt19937_64& random) {
  const PqGeometry& g = shape_.geometry;
  uint32_t position = static_cast<uint32_t>(random() % 1000);
  for (const PqSegment& segment : shape_.segments) {
    // No byte more than the slots, so that a sanitizer sees reads beyond them.
    const size_t stride = segment.slot_count;
    std::vector<uint8_t>& planes = planes_.emplace_back(stride * PlaneCount(g));
    const uint32_t distinct = shape_.codes == CodeKind::kUniform    ? CentroidCount(g)
                              : shape_.codes == CodeKind::kFewCells ? 3
                                                                    : 1;
    for (uint32_t slot = 0; slot < segment.slot_count; ++slot) {
      for (uint32_t subspace = 0; subspace < g.subspace_count; ++subspace) {
        auto code = static_cast<uint32_t>((random() % distinct * 5 + 3) % CentroidCount(g));
        if (shape_.codes == CodeKind::kDrifting) {
          code = (slot * CentroidCount(g) / segment.slot_count + code % 4) % CentroidCount(g);
        }
        SetCode(g, planes.data(), stride, subspace, slot, code);
      }
    }
    PqSpan span{.planes = planes.data(),
                .plane_stride = stride,
                .slot_begin = segment.begin,
                .slot_end = segment.end,
                .first_position = position,
                .codebook = segment.codebook};
    position += segment.slot_count + static_cast<uint32_t>(random() % 3);
    if (HasCells(g)) AddCellIndex(segment, span);
    if (segment.excluded_begin < segment.excluded_end) {
      span.slot_end = segment.excluded_begin;
      spans_.push_back(span);
      span.slot_begin = segment.excluded_end;
      span.slot_end = segment.end;
    }
    spans_.push_back(span);
  }
}

void PqCase::AddCellIndex(const PqSegment& segment, PqSpan& span) {
  const PqGeometry& g = shape_.geometry;
  if (segment.with_counts || segment.with_lists) {
    span.counted_begin = segment.counted_begin;
    span.counted_end = segment.counted_end;
  }
  if (segment.with_counts) {
    std::vector<uint32_t>& counts = counts_.emplace_back(CellCount(g), 0u);
    for (uint32_t slot = segment.counted_begin; slot < segment.counted_end; ++slot) {
      ++counts[GetCell(g, span.planes, span.plane_stride, slot)];
    }
    span.cell_counts = counts.data();
  }
  if (segment.with_lists) {
    const uint32_t slot_count = segment.counted_end - segment.counted_begin;
    std::vector<uint16_t>& begins = list_begins_.emplace_back(PostingBeginCount(g, slot_count));
    std::vector<uint16_t>& slots = list_slots_.emplace_back(slot_count);
    PqBuildPostings({}, {.geometry = g,
                         .planes = span.planes,
                         .plane_stride = span.plane_stride,
                         .slot_begin = segment.counted_begin,
                         .slot_end = segment.counted_end,
                         .begins = begins,
                         .slots = slots});
    span.posting_begins = begins.data();
    span.posting_slots = slots.data();
  }
}

void PqCase::FindValues() {
  const PqGeometry& g = shape_.geometry;
  const uint32_t group_size = shape_.group_size;
  std::map<std::vector<uint32_t>, uint32_t> code_ids;
  std::vector<std::vector<float>> logits;  // [candidate][head]
  std::vector<float> mean_logits;
  for (const PqSpan& span : spans_) {
    for (uint32_t slot = span.slot_begin; slot < span.slot_end; ++slot) {
      std::vector<uint32_t> key = {span.codebook};
      std::vector<float> heads(group_size, 0.0f);
      float mean = 0.0f;
      for (uint32_t subspace = 0; subspace < g.subspace_count; ++subspace) {
        const uint32_t code = GetCode(g, span.planes, span.plane_stride, subspace, slot);
        key.push_back(code);
        float group_sum = 0.0f;
        for (uint32_t head = 0; head < group_size; ++head) {
          const float* table =
              tables_.data() + (span.codebook * group_size + head) * TableFloats(g);
          const float entry = ClampEntry(table[subspace * CentroidCount(g) + code]);
          heads[head] += entry;
          group_sum += entry;
        }
        mean += ClampEntry(group_sum);
      }
      const auto id = code_ids.emplace(key, static_cast<uint32_t>(code_ids.size())).first;
      candidates_.push_back({.position = span.first_position + slot, .code_id = id->second});
      logits.push_back(heads);
      mean_logits.push_back(mean);
    }
  }
  std::vector<float> max(group_size, -std::numeric_limits<float>::infinity());
  std::vector<double> sum(group_size, 0.0);
  const auto weight = [&](size_t token, uint32_t head) {
    const float exponent = logits[token][head] - max[head];
    return exponent < kMinExponent ? 0.0 : std::exp(double{exponent});
  };
  for (uint32_t head = 0; head < group_size; ++head) {
    for (const auto& heads : logits) max[head] = std::max(max[head], heads[head]);
    for (size_t token = 0; token < logits.size(); ++token) sum[head] += weight(token, head);
  }
  for (size_t token = 0; token < logits.size(); ++token) {
    double& value = candidates_[token].value;
    if (group_size == 1) {
      value = double{logits[token][0]};
    } else if (shape_.rule == GroupRule::kMeanLogit) {
      value = double{mean_logits[token]};
    } else if (shape_.rule == GroupRule::kSumSoftmax) {
      for (uint32_t head = 0; head < group_size; ++head) value += weight(token, head) / sum[head];
    } else {
      value = -std::numeric_limits<double>::infinity();
      for (uint32_t head = 0; head < group_size; ++head) {
        const bool softmax = shape_.rule == GroupRule::kMaxSoftmax;
        const double log_sum = softmax ? std::log(sum[head]) : 0.0;
        const double offset = softmax ? double{max[head]} : 0.0;
        value = std::max(value, double{logits[token][head]} - offset - log_sum);
      }
    }
  }
}

std::vector<uint32_t> PqCase::Select(Level level, uint32_t k) const {
  const Exec exec{level};
  const PqSelectShape shape{.geometry = shape_.geometry,
                            .group_size = shape_.group_size,
                            .codebook_count = shape_.codebook_count,
                            .candidate_count = candidate_count()};
  AlignedBytes scratch(PqSelectScratchBytes(exec, shape));
  std::vector<uint32_t> positions(k, 0xFFFFFFFFu);
  positions.shrink_to_fit();
  PqSelect(exec, {.geometry = shape_.geometry,
                  .group_size = shape_.group_size,
                  .rule = shape_.rule,
                  .spans = spans_,
                  .tables = tables_,
                  .positions = positions,
                  .scratch = scratch.span()});
  return positions;
}

std::string PqCase::Judge(const std::vector<uint32_t>& positions) const {
  for (size_t i = 0; i + 1 < positions.size(); ++i) {
    if (positions[i] >= positions[i + 1]) return "not ascending at " + std::to_string(i);
  }
  return IsExact(shape_.rule, shape_.group_size) ? JudgeExact(positions) : JudgeClose(positions);
}

std::string PqCase::JudgeExact(const std::vector<uint32_t>& positions) const {
  std::vector<Candidate> order = candidates_;
  std::stable_sort(order.begin(), order.end(),
                   [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
  std::vector<uint32_t> expected;
  for (size_t i = 0; i < positions.size(); ++i) expected.push_back(order[i].position);
  std::sort(expected.begin(), expected.end());
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] != expected[i]) {
      return "entry " + std::to_string(i) + " is " + std::to_string(positions[i]) + ", not " +
             std::to_string(expected[i]);
    }
  }
  return "";
}

std::string PqCase::JudgeClose(const std::vector<uint32_t>& positions) const {
  std::vector<double> values;
  for (const Candidate& candidate : candidates_) values.push_back(candidate.value);
  if (positions.empty()) return "";
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(positions.size()) - 1,
                   values.end(), std::greater<double>());
  const double kth = values[positions.size() - 1];
  const double slack = shape_.rule == GroupRule::kSumSoftmax
                           ? 2 * kTolerance * kth
                           : 2 * (kTolerance + kTolerance / 10 * std::abs(kth));
  std::vector<bool> left_out(candidates_.size(), false);  // by code id
  size_t next = 0;
  for (const Candidate& candidate : candidates_) {
    const std::string name = "position " + std::to_string(candidate.position) + " of value " +
                             std::to_string(candidate.value) + ", k-th " + std::to_string(kth);
    const bool selected = next < positions.size() && positions[next] == candidate.position;
    if (!selected) {
      left_out[candidate.code_id] = true;
      if (candidate.value > kth + slack) return "left out: " + name;
      continue;
    }
    ++next;
    if (candidate.value < kth - slack) return "selected: " + name;
    if (left_out[candidate.code_id]) return "a lower position ties but is left out: " + name;
  }
  if (next != positions.size()) return "not a candidate: " + std::to_string(positions[next]);
  return "";
}

}  // namespace pqcached::kernels
