// PqCase: one random selection problem over product-quantized tokens, and what must come out of it
// by brute force.
#ifndef PQCACHED_TESTS_KERNELS_SELECT_PQ_CASE_H_
#define PQCACHED_TESTS_KERNELS_SELECT_PQ_CASE_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/exec.h"
#include "kernels/base/group_rule.h"
#include "kernels/select/pq.h"
#include "kernels/select/pq_select.h"

namespace pqcached::kernels {

// Drifting codes change slowly with the slot, so that samples mislead.
enum class CodeKind { kUniform, kFewCells, kOneCell, kDrifting };
enum class TableKind { kNormal, kTies, kZeros, kHuge, kInfinite, kDenormal, kPeaked };

inline constexpr CodeKind kAllCodeKinds[] = {CodeKind::kUniform, CodeKind::kFewCells,
                                             CodeKind::kOneCell, CodeKind::kDrifting};
inline constexpr TableKind kAllTableKinds[] = {
    TableKind::kNormal,   TableKind::kTies,     TableKind::kZeros, TableKind::kHuge,
    TableKind::kInfinite, TableKind::kDenormal, TableKind::kPeaked};

inline constexpr GroupRule kAllRules[] = {GroupRule::kSumSoftmax, GroupRule::kMaxSoftmax,
                                          GroupRule::kMeanLogit, GroupRule::kMaxLogit};

// Slots of one segment; candidates are [begin, end) without [excluded_begin, excluded_end), which
// cuts them into two spans.
struct PqSegment {
  uint32_t slot_count = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t excluded_begin = 0;
  uint32_t excluded_end = 0;
  uint32_t codebook = 0;
  bool with_counts = false;
  bool with_lists = false;
  uint32_t counted_begin = 0;
  uint32_t counted_end = 0;
};

struct PqCaseShape {
  PqGeometry geometry;
  uint32_t group_size = 1;
  GroupRule rule = GroupRule::kSumSoftmax;
  uint32_t codebook_count = 1;
  std::vector<PqSegment> segments = {};
  CodeKind codes = CodeKind::kUniform;
  TableKind tables = TableKind::kNormal;
};

class PqCase {
 public:
  PqCase(const PqCaseShape& shape, uint64_t seed);

  uint32_t candidate_count() const { return static_cast<uint32_t>(candidates_.size()); }

  // Runs PqSelect at `level`. The buffers have exactly the promised sizes.
  std::vector<uint32_t> Select(Level level, uint32_t k) const;

  // Returns what is wrong with a selection of k positions, or "".
  std::string Judge(const std::vector<uint32_t>& positions) const;

  const std::vector<PqSpan>& spans() const { return spans_; }
  const std::vector<float>& tables() const { return tables_; }

 private:
  struct Candidate {
    uint32_t position = 0;
    uint32_t code_id = 0;  // the same for tokens of equal codebook and codes
    double value = 0.0;    // by the definition, in double where it allows
  };

  void MakeTables(std::mt19937_64& random);
  void MakeSegments(std::mt19937_64& random);
  void AddCellIndex(const PqSegment& segment, PqSpan& span);
  void FindValues();
  std::string JudgeExact(const std::vector<uint32_t>& positions) const;
  std::string JudgeClose(const std::vector<uint32_t>& positions) const;

  PqCaseShape shape_;
  std::vector<float> tables_;
  std::vector<std::vector<uint8_t>> planes_;
  std::vector<std::vector<uint32_t>> counts_;
  std::vector<std::vector<uint16_t>> list_begins_;
  std::vector<std::vector<uint16_t>> list_slots_;
  std::vector<PqSpan> spans_;
  std::vector<Candidate> candidates_;
};

}  // namespace pqcached::kernels

#endif  // PQCACHED_TESTS_KERNELS_SELECT_PQ_CASE_H_
