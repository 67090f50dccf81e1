// Selection over cells: the implementation of PqSelect for geometries with at most 4096 cells.
//
// All tokens of one codebook and cell have the same value. Values, group rule and threshold are
// therefore computed on *weighted cells* (value and token count), at a cost that does not grow with
// the context. Then one pass over the code planes converts *member* cells to positions.
//
// Included by the files of PqSelect and the instruction-set files only.
#ifndef PQCACHED_KERNELS_SELECT_CELLS_PQ_CELLS_H_
#define PQCACHED_KERNELS_SELECT_CELLS_PQ_CELLS_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

// Set of the selected cells of one codebook. Only the fields that the scan reads are filled. Cells
// whose value equals the threshold are *tied*: only their first tokens are selected, while the
// quota lasts.
//
// Two planes: bits are indexed by [code_1 / 8][code_0] and bit code_1 % 8. One plane: by [0][byte /
// 8] and bit byte % 8, where byte is the plane's byte.
struct CellMembers {
  static constexpr uint32_t kMaxTied = 4;

  alignas(64) uint8_t at_least[8][64];  // value >= threshold
  alignas(64) uint8_t above[8][64];     // value > threshold
  // Used for staircases only: a cell is above the threshold exactly if rank[code_1] < cut[code_0].
  alignas(64) uint8_t rank[64];
  alignas(64) uint8_t cut[64];
  bool is_staircase;
  uint32_t tied_count;        // cells listed below; kMaxTied + 1 means too many
  uint8_t tied[kMaxTied][2];  // codes 0 and 1, or the plane's byte and 0
};

struct CellScanSpan {
  const uint8_t* plane_0;
  const uint8_t* plane_1;  // null: there is one plane
  uint32_t slot_begin;
  uint32_t slot_end;
  uint32_t first_position;  // position of slot 0
};

struct CellScanOutput {
  uint32_t* positions;  // [capacity]; entries from written on may be overwritten
  uint32_t capacity;
  uint32_t written;
  uint32_t equal_quota;  // tokens of tied cells that may still be selected
};

// The k-th largest value, and the tokens above it.
struct CellThreshold {
  float value;
  uint32_t above_count;  // tokens with larger values
};

// Weights exp(logit - max) of all cells, as products of a row's and a column's factor.
struct CellFactors {
  const float* rows;  // [head][n0]
  size_t row_stride;  // floats between heads
  uint32_t n0;
  const float* columns;  // [head][n1]
  size_t column_stride;
  uint32_t n1;  // a multiple of 16
};

// Number of posting lists (one page each) that are counted in one pass: sums of their begins are
// summed counts. Four lists of 4096 cells, from L3: 0.9 us together, 2.1 us one by one (EPYC Zen 4,
// 2026-11-22).
inline constexpr uint32_t kMaxSummedLists = 4;

struct EntryRange {
  float least;
  float largest;
};

// Arithmetic over arrays of cells; `count` is a multiple of 16, arrays are 64-byte aligned.
struct CellOps {
  // Sets to[i] += from[i].
  void (*add_counts)(const uint32_t* from, size_t count, uint32_t* to);
  // Adds begins[list][i + 1] - begins[list][i] of every list to to[i]: the counts of posting lists.
  //
  // REQUIRES: list_count <= kMaxSummedLists; the lists have less than 65536 slots together.
  void (*add_list_counts)(const uint16_t* const* begins, uint32_t list_count, size_t count,
                          uint32_t* to);
  // Sets out[c0 * n1 + c1] = row[c0] + column[c1].
  void (*add_outer)(const float* row, uint32_t n0, const float* column, uint32_t n1, float* out);
  // Returns the largest value among cells with tokens, or `least`.
  float (*largest)(const float* values, const uint32_t* tokens, size_t count, float least);
  // Sets values[i] = exp(values[i] - max), zero below kMinExponent, and returns the sum over
  // tokens. Cells without tokens may have values above max; their weight is at most 1.
  double (*weigh)(float* values, const uint32_t* tokens, size_t count, float max);
  // Returns the smallest and largest of `count` entries, a multiple of 16.
  EntryRange (*range)(const float* entries, uint32_t count);
  // Sets exponentials[i] = exp(entries[i] - max) for `count` entries, a multiple of 16.
  void (*exponentials)(const float* entries, uint32_t count, float max, float* exponentials);
  // Returns the sum over cells of row[c0] * column[c1] * tokens[c0 * n1 + c1] for the first head.
  double (*sum_products)(const CellFactors& factors, const uint32_t* tokens);
  // Sets values[c0 * n1 + c1] = sum over heads of row[c0] * column[c1].
  void (*add_products)(const CellFactors& factors, uint32_t head_count, float* values);
  // Sets sums[i] += scale * weights[i].
  void (*add_scaled)(const float* weights, float scale, size_t count, float* sums);
  // Sets largest[i] = max(largest[i], (values[i] - max) - log_sum).
  void (*update_max)(const float* values, float max, float log_sum, size_t count, float* largest);
  // Finds the k-th largest value by tokens, of which there are all_tokens. `work` has 2 * count
  // words.
  // REQUIRES: 1 <= k <= all_tokens.
  CellThreshold (*find_threshold)(const float* values, const uint32_t* tokens, size_t count,
                                  uint32_t all_tokens, uint32_t k, uint32_t* work);
  // Sets rank[i] to the number of entries that are larger than entry i.
  void (*rank)(const float* entries, uint32_t count, uint8_t* rank);
  // Sets counts[r] to the number of bits set in row r; rows have row_bytes (4 or 8) bytes.
  void (*count_bits)(const uint8_t* rows, uint32_t row_count, uint32_t row_bytes, uint8_t* counts);
  // Sets bit i of above if values[i] > threshold. Sets bit i of at_least in the same case, and if
  // cell i has tokens and values[i] == threshold. Both have count / 8 bytes.
  void (*compare)(const float* values, const uint32_t* tokens, size_t count, float threshold,
                  uint8_t* at_least, uint8_t* above);
};

// Scans one span; see CellMembers. Null when the instruction set has no scan and members must be
// looked up one by one.
using CellScan = void (*)(const CellMembers& members, const CellScanSpan& span,
                          CellScanOutput& output);

extern const CellOps kCellOpsPortable;
extern const CellOps kCellOpsAvx2;
extern const CellOps kCellOpsAvx512;
extern const CellOps kCellOpsNeon;

// Implements CellOps::find_threshold.
CellThreshold FindCellThresholdAvx512(const float* values, const uint32_t* tokens, size_t count,
                                      uint32_t all_tokens, uint32_t k, uint32_t* work);

void ScanCellsPortable(const CellMembers& members, const CellScanSpan& span,
                       CellScanOutput& output);
// REQUIRES of the next three: members.tied_count <= kMaxTied.
void ScanCellsAvx2(const CellMembers& members, const CellScanSpan& span, CellScanOutput& output);
void ScanCellsNeon(const CellMembers& members, const CellScanSpan& span, CellScanOutput& output);
void ScanCellsAvx512Vbmi(const CellMembers& members, const CellScanSpan& span,
                         CellScanOutput& output);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_CELLS_PQ_CELLS_H_
