// PqSelect selects exactly k tokens, those with the largest values under product-quantized keys,
// and PqScore computes the logits.
//
// Both work on *spans*: runs of slots of several segments, each under its own codebook. The logit
// of a token under query head g is the float sum of its tables' entries, added in the order of the
// sub-spaces:
//   ((T[g,0,code_0] + T[g,1,code_1]) + T[g,2,code_2]) + ...
// after ClampEntry of every entry. Under kMeanLogit the tables are first added over the group, in
// the order of heads, each sum passes ClampEntry, and the value is the logit of the sums. Therefore
// kMeanLogit, kMaxLogit and a group of one are exact: every instruction set selects the same
// positions. Under the softmax rules, instruction sets may round a value by 1e-5 of itself
// (kMaxSoftmax: by 1e-5 + 1e-6 * |value|), and so differ in tokens whose values are that close to
// the k-th. This also holds when weights are computed as products of table-wise exponentials, which
// is done only while the tables' entries are small enough: the normalisers, sums over all
// candidates computed in the same pass, stay within 1e-5 of themselves.
#ifndef PQCACHED_KERNELS_SELECT_PQ_SELECT_H_
#define PQCACHED_KERNELS_SELECT_PQ_SELECT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/base/group_rule.h"
#include "kernels/select/pq.h"

namespace pqcached::kernels {

// Candidates are the slots [slot_begin, slot_end); only these slots of the planes are read. An
// empty span is allowed.
struct PqSpan {
  const uint8_t* planes = nullptr;  // planes at slot 0; no alignment needed
  size_t plane_stride = 0;          // bytes between planes
  uint32_t slot_begin = 0;
  uint32_t slot_end = 0;
  uint32_t first_position = 0;  // position of slot 0: the position of slot s is first_position + s
  uint32_t codebook = 0;        // index into tables

  // Number of slots of each cell in [counted_begin, counted_end), which should be nearly the
  // candidates. It speeds up the search for the threshold when the geometry has cells. Null:
  // PqSelect counts, at about 1 ns per token. Slots that are counted but are not candidates are
  // read too.
  const uint32_t* cell_counts = nullptr;  // [CellCount]
  uint32_t counted_begin = 0;
  uint32_t counted_end = 0;

  // Posting lists of the slots [counted_begin, counted_end) (pq_postings.h), with or without
  // cell_counts; both pointers are null when there are none. With them, a selection of few tokens
  // reads no codes of these slots. They also help when the candidates are only a part of the slots,
  // for example when excluded ranges cut a segment into several spans: each span may name the lists
  // of the whole segment.
  const uint16_t* posting_begins = nullptr;  // [CellCount + 1, PostingPageCount]
  const uint16_t* posting_slots = nullptr;   // [counted_end - counted_begin]
};

struct PqSelectArgs {
  PqGeometry geometry;
  uint32_t group_size = 0;  // G, 1 to 64
  GroupRule rule = GroupRule::kSumSoftmax;
  std::span<const PqSpan> spans;  // positions ascend from span to span, without overlap
  std::span<const float> tables;  // [codebooks, G, subspace_count, 2^bits]
  std::span<uint32_t> positions;  // [k], overwritten: ascending
  std::span<std::byte>
      scratch;  // PqSelectScratchBytes, 64-byte aligned; contents are unspecified afterwards
};

struct PqSelectShape {
  PqGeometry geometry;
  uint32_t group_size = 0;
  uint32_t codebook_count = 0;
  uint32_t candidate_count = 0;  // candidates of all spans
};

// Returns the bytes of scratch for PqSelect. Grows with candidate_count, by about 4 *
// max(group_size + 2, 5) bytes per candidate, when the geometry has no cells or the level is
// kReference. Never decreases when a number of the shape increases.
size_t PqSelectScratchBytes(const Exec& exec, const PqSelectShape& shape);

// Writes the positions of the k = positions.size() candidates with the largest values, ascending.
// Among candidates whose values equal the k-th, those at the lowest positions are selected.
//
// REQUIRES: IsValid(geometry), HasSelect(geometry); k <= candidates of all spans; every codebook
// index < codebooks; scratch as above.
void PqSelect(const Exec& exec, const PqSelectArgs& args);

struct PqScoreArgs {
  PqGeometry geometry;
  uint32_t group_size = 0;        // G
  PqSpan span;                    // codebook and cell_counts are ignored
  std::span<const float> tables;  // [G, subspace_count, 2^bits] of the span's codebook
  std::span<float> logits;        // [G, slot_end - slot_begin], overwritten
};

// Sets logits[g, t] to the logit of slot slot_begin + t under head g, as defined above. All
// instruction sets give the same bits.
//
// REQUIRES: IsValid(geometry); shapes as above.
void PqScore(const Exec& exec, const PqScoreArgs& args);

struct PqCountCellsArgs {
  PqGeometry geometry;
  const uint8_t* planes = nullptr;
  size_t plane_stride = 0;
  uint32_t slot_begin = 0;
  uint32_t slot_end = 0;
  std::span<uint32_t> cell_counts;  // [CellCount], incremented
};

// Adds 1 to the count of the cell of every slot in [slot_begin, slot_end).
//
// REQUIRES: HasCells(geometry).
void PqCountCells(const Exec& exec, const PqCountCellsArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_PQ_SELECT_H_
