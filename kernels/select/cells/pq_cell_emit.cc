#include "kernels/select/cells/pq_cell_emit.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/select/cells/pq_postings.h"

namespace pqcached::kernels {
namespace {

// Converts bits by cell (code_0, code_1) to bits by plane byte (code_1, code_0).
void SwapNibbles(const uint8_t* by_cell, uint8_t* by_byte) {
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

// Converts bits by cell to the order of CellMembers.
void FillBits(const PqGeometry& geometry, const uint8_t* by_cell, uint8_t (&bits)[8][64]) {
  if (HasNibblePlanes(geometry)) return SwapNibbles(by_cell, bits[0]);
  if (PlaneCount(geometry) == 1) {
    std::copy(by_cell, by_cell + CellCount(geometry) / 8, bits[0]);
    return;
  }
  const uint32_t centroid_count = CentroidCount(geometry);
  const uint32_t row_bytes = centroid_count / 8;
  for (uint32_t code_0 = 0; code_0 < centroid_count; ++code_0) {
    for (uint32_t byte = 0; byte < row_bytes; ++byte) {
      bits[byte][code_0] = by_cell[code_0 * row_bytes + byte];
    }
  }
}

// Calls visit(cell) for every cell whose bit is set in `a` and not in `b` (which may be null).
template <typename Visit>
void ForEachCell(const uint8_t* a, const uint8_t* b, uint32_t cell_count, Visit visit) {
  const uint32_t step = std::min(cell_count, 64u);
  for (uint32_t first = 0; first < cell_count; first += step) {
    uint64_t in_a = 0;
    uint64_t in_b = 0;
    std::memcpy(&in_a, a + first / 8, step / 8);
    if (b != nullptr) std::memcpy(&in_b, b + first / 8, step / 8);
    for (uint64_t bits = in_a & ~in_b; bits != 0; bits &= bits - 1) {
      visit(first + static_cast<uint32_t>(std::countr_zero(bits)));
    }
  }
}

// Estimated costs of scans and lists, in hundredths of a nanosecond.
struct EmissionCost {
  uint32_t scan_slot;
  uint32_t page;       // per page of lists: its bitmap
  uint32_t list;       // per list of a page: two unpredictable reads from memory
  uint32_t list_slot;  // per token of a list
};

constexpr EmissionCost kVbmiCost = {.scan_slot = 8, .page = 10000, .list = 1000, .list_slot = 500};
// Measured over 128K and 512K tokens of two planes; sets of cells for several heads take 8 tables,
// all others one or two (EPYC Zen 4 limited to AVX2, 2026-11-28). NEON, unmeasured, takes them too.
constexpr EmissionCost kAvx2Cost = {.scan_slot = 13, .page = 10000, .list = 1000, .list_slot = 500};
constexpr EmissionCost kAvx2RowsCost = {
    .scan_slot = 40, .page = 10000, .list = 1000, .list_slot = 500};
constexpr EmissionCost kPlainCost = {
    .scan_slot = 80, .page = 10000, .list = 1000, .list_slot = 500};

const EmissionCost& CostFor(const CellEmitTask& task) {
  const Level level = task.exec.level;
  if (level == Level::kAvx512Vbmi || level == Level::kAvx512Bf16) return kVbmiCost;
  if (level <= Level::kPortable) return kPlainCost;
  const bool rows = task.plan.head_count > 1 && PlaneCount(task.args.geometry) == 2;
  return rows ? kAvx2RowsCost : kAvx2Cost;
}

class CellEmission {
 public:
  explicit CellEmission(const CellEmitTask& task)
      : task_(task),
        geometry_(task.args.geometry),
        cost_(CostFor(task)),
        lists_may_pay_(task.args.positions.size() * cost_.list_slot <
                       uint64_t{task.plan.candidate_count} * cost_.scan_slot),
        output_{.positions = task.args.positions.data(),
                .capacity = static_cast<uint32_t>(task.args.positions.size()),
                .written = 0,
                .equal_quota = static_cast<uint32_t>(task.args.positions.size()) -
                               task.threshold.above_count} {
    for (CodebookEmission& codebook : task.codebooks) {
      codebook.scan = nullptr;
      codebook.listed.cells = nullptr;
      codebook.all_tokens = 0;
    }
    for (const PqSpan& span : task.args.spans) {
      if (span.slot_begin == span.slot_end) continue;
      task.codebooks[span.codebook].all_tokens += span.slot_end - span.slot_begin;
    }
  }

  void Run() {
    for (const PqSpan& span : task_.args.spans) {
      if (span.slot_begin < span.slot_end) EmitSpan(span);
    }
    FlushPages();
    PQC_CHECK(output_.written == output_.capacity);
  }

 private:
  void EmitSpan(const PqSpan& span) {
    const uint32_t begin = std::max(span.slot_begin, span.counted_begin);
    const uint32_t end = std::min(span.slot_end, span.counted_end);
    if (!lists_may_pay_ || span.posting_begins == nullptr || begin >= end ||
        !ListsPay(span, {begin, end})) {
      return Scan(span, {span.slot_begin, span.slot_end});
    }
    Scan(span, {span.slot_begin, begin});
    AddPages(span, {begin, end});
    Scan(span, {end, span.slot_end});
  }

  bool ListsPay(const PqSpan& span, SlotRange slots) {
    const CodebookEmission& codebook = Listed(span.codebook);
    const uint32_t first_page = (slots.begin - span.counted_begin) / kPostingPageSlots;
    const uint32_t page_end = PostingPageCount(slots.end - span.counted_begin);
    const uint64_t pages = page_end - first_page;
    const uint64_t cells = codebook.listed.above_count + codebook.listed.tied_count;
    const uint64_t in_pages =
        std::min(span.counted_end - span.counted_begin, page_end * kPostingPageSlots) -
        first_page * kPostingPageSlots;
    const uint64_t tokens = in_pages * codebook.listed_tokens / codebook.all_tokens;
    return pages * (cost_.page + cells * cost_.list) + tokens * cost_.list_slot <
           uint64_t{slots.end - slots.begin} * cost_.scan_slot;
  }

  const CodebookEmission& Listed(uint32_t codebook) {
    CodebookEmission& emission = task_.codebooks[codebook];
    if (emission.listed.cells != nullptr) return emission;
    const size_t first = size_t{codebook} * task_.cell_count;
    const uint32_t* const tokens = task_.tokens + first;
    const uint8_t* const above = task_.above + first / 8;
    const uint8_t* const at_least = task_.at_least + first / 8;
    uint16_t* const cells = task_.listed_cells.data() + first;
    uint32_t count = 0;
    uint64_t listed_tokens = 0;
    ForEachCell(above, nullptr, task_.cell_count, [&](uint32_t cell) {
      cells[count] = static_cast<uint16_t>(cell);
      count += tokens[cell] != 0 ? 1u : 0u;
      listed_tokens += tokens[cell];
    });
    emission.listed = {.cells = cells, .above_count = count, .tied_count = 0};
    ForEachCell(at_least, above, task_.cell_count, [&](uint32_t cell) {
      cells[count++] = static_cast<uint16_t>(cell);
      // The emission reads at most equal_quota entries of a list.
      listed_tokens += std::min(tokens[cell], output_.equal_quota);
    });
    emission.listed.tied_count = count - emission.listed.above_count;
    emission.listed_tokens =
        static_cast<uint32_t>(std::min<uint64_t>(listed_tokens, emission.all_tokens));
    return emission;
  }

  // Collects the pages of a span's lists; FlushPages emits them.
  void AddPages(const PqSpan& span, SlotRange slots) {
    const uint32_t page_count = PostingPageCount(span.counted_end - span.counted_begin);
    const ListedCells& listed = task_.codebooks[span.codebook].listed;
    const uint32_t runs = listed.above_count + listed.tied_count;
    const uint32_t last_page = (slots.end - 1 - span.counted_begin) / kPostingPageSlots;
    for (uint32_t i = (slots.begin - span.counted_begin) / kPostingPageSlots; i <= last_page; ++i) {
      const uint32_t page_begin = span.counted_begin + i * kPostingPageSlots;
      const bool is_last =
          slots.end == span.counted_end || slots.end - page_begin >= kPostingPageSlots;
      if (page_count_ == kMaxListPages || run_count_ + runs > kMaxListRuns) FlushPages();
      run_count_ += runs;
      pages_[page_count_++] = {.begins = span.posting_begins + i,
                               .begin_stride = page_count,
                               .slots = span.posting_slots + size_t{i} * kPostingPageSlots,
                               .slot_begin = std::max(slots.begin, page_begin) - page_begin,
                               .slot_end = is_last ? kPostingPageSlots : slots.end - page_begin,
                               .first_position = span.first_position + page_begin,
                               .listed = &listed};
    }
  }

  void FlushPages() {
    if (page_count_ == 0) return;
    if (!lists_cleared_) {
      std::memset(task_.lists, 0, offsetof(CellListScratch, runs));
      lists_cleared_ = true;
    }
#if defined(PQCACHED_X86)
    if (task_.exec.level >= Level::kAvx512) {
      EmitCellListsAvx512(pages_, page_count_, *task_.lists, output_);
    } else if (task_.exec.level >= Level::kAvx2) {
      EmitCellListsAvx2(pages_, page_count_, *task_.lists, output_);
    } else
#endif
      EmitCellListsPortable(pages_, page_count_, *task_.lists, output_);
    page_count_ = 0;
    run_count_ = 0;
  }

  void Scan(const PqSpan& span, SlotRange slots) {
    if (slots.begin >= slots.end) return;
    FlushPages();
    CodebookEmission& codebook = task_.codebooks[span.codebook];
    if (codebook.scan == nullptr) FillMembers(span.codebook);
    codebook.scan(
        codebook.members,
        {.plane_0 = span.planes,
         .plane_1 = PlaneCount(geometry_) == 1 ? nullptr : span.planes + span.plane_stride,
         .slot_begin = slots.begin,
         .slot_end = slots.end,
         .first_position = span.first_position},
        output_);
  }

  CellScan ScanFor(const CellMembers& members) const {
#if defined(PQCACHED_X86)
    if (members.tied_count <= CellMembers::kMaxTied) {
      if (task_.exec.level >= Level::kAvx512Vbmi) return ScanCellsAvx512Vbmi;
      if (task_.exec.level >= Level::kAvx2) return ScanCellsAvx2;
    }
#elif defined(PQCACHED_NEON)
    if (members.tied_count <= CellMembers::kMaxTied && task_.exec.level == Level::kNeon) {
      return ScanCellsNeon;
    }
#endif
    (void)members;
    return ScanCellsPortable;
  }

  // Fills the fields of the members that the codebook's scan reads.
  void FillMembers(uint32_t codebook) {
    CellMembers& members = task_.codebooks[codebook].members;
    const size_t first_byte = size_t{codebook} * task_.cell_count / 8;
    const uint8_t* const above = task_.above + first_byte;
    const uint8_t* const at_least = task_.at_least + first_byte;
    members.tied_count = 0;
    members.tied[0][0] = members.tied[0][1] = 0;
    ForEachCell(at_least, above, task_.cell_count, [&](uint32_t cell) { AddTied(cell, members); });
    const CellScan scan = ScanFor(members);
    task_.codebooks[codebook].scan = scan;
    const bool simd = scan != ScanCellsPortable;
    members.is_staircase = simd && task_.plan.head_count == 1 && PlaneCount(geometry_) == 2;
    if (members.is_staircase) {
      // Logits grow with the entry of sub-space 1, so the members of a row are its largest entries.
      const uint32_t centroid_count = CentroidCount(geometry_);
      const float* table = task_.tables + codebook * TableFloats(geometry_);
      task_.ops.rank(table + centroid_count, centroid_count, members.rank);
      task_.ops.count_bits(above, centroid_count, centroid_count / 8, members.cut);
      return;
    }
    FillBits(geometry_, above, members.above);
    if (!simd) FillBits(geometry_, at_least, members.at_least);
  }

  void AddTied(uint32_t cell, CellMembers& members) const {
    if (members.tied_count > CellMembers::kMaxTied) return;
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

  const CellEmitTask& task_;
  const PqGeometry& geometry_;
  const EmissionCost cost_;
  const bool lists_may_pay_;
  CellScanOutput output_;
  CellListPage pages_[kMaxListPages];
  uint32_t page_count_ = 0;
  uint32_t run_count_ = 0;
  bool lists_cleared_ = false;
};

}  // namespace

void EmitCells(const CellEmitTask& task) { CellEmission(task).Run(); }

}  // namespace pqcached::kernels
