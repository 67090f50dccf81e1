#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "kernels/check.h"
#include "kernels/pq_cells.h"
#include "kernels/pq_select_paths.h"
#include "kernels/scratch_cutter.h"

namespace pqcached::kernels {
namespace {

const CellOps& OpsFor(const Exec& exec) {
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512) return kCellOpsAvx512;
#endif
  (void)exec;
  return kCellOpsPortable;
}

CellScan ScanFor(const Exec& exec) {
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512Vbmi) return ScanCellsAvx512Vbmi;
#endif
  (void)exec;
  return ScanCellsPortable;
}

// One selection over cells; all arrays are [codebook, cell] unless said.
class CellSelection {
 public:
  CellSelection(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan)
      : exec_(exec),
        ops_(OpsFor(exec)),
        args_(args),
        plan_(plan),
        geometry_(args.geometry),
        cell_count_(std::max(CellCount(args.geometry), 16u)) {
    ScratchCutter scratch(args.scratch);
    const size_t total = size_t{plan.codebook_count} * cell_count_;
    tables_ = scratch.Take<float>(plan.codebook_count * plan.head_count * TableFloats(geometry_));
    tokens_ = scratch.Take<uint32_t>(total);
    values_ = scratch.Take<float>(total);
    logits_ = scratch.Take<float>(total);
    work_ = scratch.Take<uint32_t>(2 * total);
    members_ = scratch.Take<CellMembers>(plan.codebook_count);
    at_least_ = scratch.Take<uint8_t>(total / 8);
    above_ = scratch.Take<uint8_t>(total / 8);
    FillTables(args, plan, tables_);
  }

  void Run() {
    CountTokens();
    FindValues();
    const auto k = static_cast<uint32_t>(args_.positions.size());
    const CellThreshold threshold =
        ops_.find_threshold(values_.data(), tokens_.data(), values_.size(), k, work_.data());
    ops_.compare(values_.data(), values_.size(), threshold.value, at_least_.data(), above_.data());
    CellScan scan = ScanFor(exec_);
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      ListTied(codebook);
      if (members_[codebook].tied_count > CellMembers::kMaxTied) scan = ScanCellsPortable;
    }
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      FillMembers(codebook, scan);
    }
    CellScanOutput output{.positions = args_.positions.data(),
                          .capacity = k,
                          .written = 0,
                          .equal_quota = k - threshold.above_count};
    const bool one_plane = PlaneCount(geometry_) == 1;
    for (const PqSpan& span : args_.spans) {
      if (span.slot_begin == span.slot_end) continue;
      scan(members_[span.codebook],
           {.plane_0 = span.planes,
            .plane_1 = one_plane ? nullptr : span.planes + span.plane_stride,
            .slot_begin = span.slot_begin,
            .slot_end = span.slot_end,
            .first_position = span.first_position},
           output);
    }
    PQC_CHECK(output.written == k);
  }

 private:
  const float* Table(uint32_t codebook, uint32_t head) const {
    return tables_.data() + (codebook * plan_.head_count + head) * TableFloats(geometry_);
  }

  void CountTokens() {
    std::fill(tokens_.begin(), tokens_.end(), 0u);
    for (const PqSpan& span : args_.spans) {
      AddSpanTokens(span, tokens_.subspan(size_t{span.codebook} * cell_count_, cell_count_));
    }
  }

  // Adds the candidates of a span, from its counts where these are nearly right.
  void AddSpanTokens(const PqSpan& span, std::span<uint32_t> tokens) const {
    const uint32_t begin = span.slot_begin;
    const uint32_t end = span.slot_end;
    const uint32_t common_begin = std::max(begin, span.counted_begin);
    const uint32_t common_end = std::min(end, span.counted_end);
    const uint32_t common = common_end > common_begin ? common_end - common_begin : 0;
    const bool counted = span.cell_counts != nullptr && common > 0;
    if (!counted ||
        end - begin + span.counted_end - span.counted_begin - 2 * common > end - begin) {
      AddCells(geometry_, span, {begin, end}, 1, tokens);
      return;
    }
    std::transform(tokens.begin(), tokens.begin() + CellCount(geometry_), span.cell_counts,
                   tokens.begin(), std::plus<uint32_t>());
    constexpr uint32_t kMinusOne = ~0u;
    AddCells(geometry_, span, {begin, common_begin}, 1, tokens);
    AddCells(geometry_, span, {common_end, end}, 1, tokens);
    AddCells(geometry_, span, {span.counted_begin, common_begin}, kMinusOne, tokens);
    AddCells(geometry_, span, {common_end, span.counted_end}, kMinusOne, tokens);
  }

  // Logits of all cells under one head of the plan.
  void FindLogits(uint32_t head, std::span<float> logits) const {
    const uint32_t centroid_count = CentroidCount(geometry_);
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      const float* table = Table(codebook, head);
      float* out = logits.data() + size_t{codebook} * cell_count_;
      if (geometry_.subspace_count == 1) {
        std::copy(table, table + centroid_count, out);
      } else {
        ops_.add_outer(table, centroid_count, table + centroid_count, centroid_count, out);
      }
    }
  }

  void FindValues() {
    if (plan_.head_count == 1) {
      FindLogits(0, values_);
      return;
    }
    const size_t total = values_.size();
    const bool sum = args_.rule == GroupRule::kSumSoftmax;
    std::fill(values_.begin(), values_.end(), sum ? 0.0f : std::numeric_limits<float>::lowest());
    for (uint32_t head = 0; head < plan_.head_count; ++head) {
      FindLogits(head, logits_);
      if (args_.rule == GroupRule::kMaxLogit) {
        ops_.raise_to(logits_.data(), 0.0f, 0.0f, total, values_.data());
        continue;
      }
      const float max = ops_.largest(logits_.data(), tokens_.data(), total, -kLogitLimit);
      float* const weights = sum ? logits_.data() : reinterpret_cast<float*>(work_.data());
      if (!sum) std::copy(logits_.begin(), logits_.end(), weights);
      const double weight_sum = ops_.weigh(weights, tokens_.data(), total, max);
      if (sum) {
        ops_.add_scaled(weights, static_cast<float>(1.0 / weight_sum), total, values_.data());
      } else {
        const auto log_sum = static_cast<float>(std::log(weight_sum));
        ops_.raise_to(logits_.data(), max, log_sum, total, values_.data());
      }
    }
  }

  // Fills what `scan` reads of the members.
  void FillMembers(uint32_t codebook, CellScan scan) {
    CellMembers& members = members_[codebook];
    const uint8_t* above = above_.data() + codebook * cell_count_ / 8;
    const bool simd = scan != ScanCellsPortable;
    members.is_staircase = simd && plan_.head_count == 1 && PlaneCount(geometry_) == 2;
    if (members.is_staircase) {
      // Logits grow with the entry of sub-space 1, so the members of a row are its first by rank.
      const uint32_t centroid_count = CentroidCount(geometry_);
      ops_.rank(Table(codebook, 0) + centroid_count, centroid_count, members.rank);
      ops_.count_bits(above, centroid_count, centroid_count / 8, members.cut);
      return;
    }
    FillBits(above, members.above);
    if (!simd) FillBits(at_least_.data() + codebook * cell_count_ / 8, members.at_least);
  }

  // From bits by cell to the order of CellMembers.
  void FillBits(const uint8_t* by_cell, uint8_t (&bits)[8][64]) const {
    if (HasNibblePlanes(geometry_)) return SwapNibbles(by_cell, bits[0]);
    if (PlaneCount(geometry_) == 1) {
      std::copy(by_cell, by_cell + cell_count_ / 8, bits[0]);
      return;
    }
    const uint32_t centroid_count = CentroidCount(geometry_);
    const uint32_t row_bytes = centroid_count / 8;
    for (uint32_t code_0 = 0; code_0 < centroid_count; ++code_0) {
      for (uint32_t byte = 0; byte < row_bytes; ++byte) {
        bits[byte][code_0] = by_cell[code_0 * row_bytes + byte];
      }
    }
  }

  // From bits by cell (code_0, code_1) to bits by plane byte (code_1, code_0).
  static void SwapNibbles(const uint8_t* by_cell, uint8_t* by_byte) {
    for (uint32_t byte = 0; byte < 32; ++byte) {
      uint32_t bits = 0;
      for (uint32_t bit = 0; bit < 8; ++bit) {
        const uint32_t value = byte * 8 + bit;
        const uint32_t cell = (value & 15u) << 4u | value >> 4u;
        bits |= (by_cell[cell / 8] >> (cell % 8) & 1u) << bit;
      }
      by_byte[byte] = static_cast<uint8_t>(bits);
    }
  }

  void ListTied(uint32_t codebook) {
    CellMembers& members = members_[codebook];
    const size_t first = size_t{codebook} * cell_count_;
    members.tied_count = 0;
    for (uint32_t group = 0; group < cell_count_; group += 16) {
      uint16_t at_least;
      uint16_t above;
      std::memcpy(&at_least, at_least_.data() + (first + group) / 8, sizeof(at_least));
      std::memcpy(&above, above_.data() + (first + group) / 8, sizeof(above));
      for (uint32_t bits = at_least ^ above; bits != 0; bits &= bits - 1) {
        const uint32_t cell = group + static_cast<uint32_t>(std::countr_zero(bits));
        if (tokens_[first + cell] == 0) continue;
        if (members.tied_count++ == CellMembers::kMaxTied) return;
        uint8_t* const tied = members.tied[members.tied_count - 1];
        if (PlaneCount(geometry_) == 2) {
          tied[0] = static_cast<uint8_t>(cell >> geometry_.bits);
          tied[1] = static_cast<uint8_t>(cell & (CentroidCount(geometry_) - 1));
        } else {
          const uint32_t swapped = (cell & 15u) << 4u | cell >> 4u;
          tied[0] = static_cast<uint8_t>(HasNibblePlanes(geometry_) ? swapped : cell);
          tied[1] = 0;
        }
      }
    }
  }

  const Exec& exec_;
  const CellOps& ops_;
  const PqSelectArgs& args_;
  const PqSelectPlan& plan_;
  const PqGeometry& geometry_;
  const uint32_t cell_count_;  // per codebook
  std::span<float> tables_;    // [codebook, head of the plan, TableFloats], clamped
  std::span<uint32_t> tokens_;
  std::span<float> values_;
  std::span<float> logits_;  // of one head; then its weights
  std::span<uint32_t> work_;
  std::span<uint8_t> at_least_;     // bits
  std::span<uint8_t> above_;        // bits
  std::span<CellMembers> members_;  // [codebook]
};

}  // namespace

void AddCells(const PqGeometry& geometry, const PqSpan& span, SlotRange slots, uint32_t weight,
              std::span<uint32_t> counts) {
  if (PlaneCount(geometry) == 2) {
    const uint8_t* const plane_0 = span.planes;
    const uint8_t* const plane_1 = span.planes + span.plane_stride;
    uint32_t* const cells = counts.data();
    const uint32_t bits = geometry.bits;
    for (uint32_t slot = slots.begin; slot < slots.end; ++slot) {
      cells[uint32_t{plane_0[slot]} << bits | plane_1[slot]] += weight;
    }
    return;
  }
  for (uint32_t slot = slots.begin; slot < slots.end; ++slot) {
    counts[GetCell(geometry, span.planes, span.plane_stride, slot)] += weight;
  }
}

size_t CellSelectScratchBytes(const PqSelectShape& shape) {
  const size_t total = size_t{shape.codebook_count} * CellCount(shape.geometry) * sizeof(uint32_t);
  const size_t table_floats =
      size_t{shape.codebook_count} * shape.group_size * TableFloats(shape.geometry);
  return ScratchAligned(table_floats * sizeof(float)) + 3 * ScratchAligned(total) +
         ScratchAligned(2 * total) + 2 * ScratchAligned(total / 32) +
         ScratchAligned(shape.codebook_count * sizeof(CellMembers));
}

void SelectByCells(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan) {
  CellSelection(exec, args, plan).Run();
}

}  // namespace pqcached::kernels
