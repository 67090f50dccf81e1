// PqSelect and ScoreSelect on the device: positions of the tokens with the largest values, for all kv
// heads of a layer and a batch of sequences at once.
//
// A *lane* is one sequence under one kv head: what one call of the CPU form selects from. Candidates
// of a lane come in *chunks*, pieces of its spans; which tokens are candidates, and how many are
// wanted, stands in two tables in device memory that the host updates between steps, so that the
// launches stay the same. The definitions of logits, values, group rules and ties are those of
// kernels/pq_select.h and kernels/score_select.h: one head, mean and max of logits select exactly
// the positions of the CPU, the softmax rules may differ in tokens within the stated rounding.
#ifndef PQCACHED_KERNELS_CUDA_SELECT_H_
#define PQCACHED_KERNELS_CUDA_SELECT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/status.h"
#include "kernels/group_rule.h"
#include "kernels/pq.h"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kChunkTokens = 4096;
inline constexpr uint32_t kNoLane = 0xFFFFFFFFu;

// Candidates [slot_begin, slot_end) of one lane, at most kChunkTokens, and nothing else of planes or
// logits is read. Chunks whose slot_begin is a multiple of 16 in planes aligned to 16 bytes are read
// fastest: cut spans at multiples of kChunkTokens.
struct SelectChunk {
  const uint8_t* planes = nullptr;  // PqSelect: of slot 0
  const float* logits = nullptr;    // ScoreSelect: of slot 0, [G, slots]
  size_t stride = 0;  // bytes from plane to plane, or floats from head to head of logits
  uint32_t slot_begin = 0;
  uint32_t slot_end = 0;
  uint32_t first_position = 0;  // of slot 0
  uint32_t table = 0;           // PqSelect: index into tables
  uint32_t lane = kNoLane;      // kNoLane: unused
};

// Chunks [chunk_begin, chunk_end) are of this lane, in ascending order of positions. The tables that
// they name are [table_begin, table_end), of this lane alone. A lane without chunks selects nothing.
struct SelectLane {
  uint32_t chunk_begin = 0;
  uint32_t chunk_end = 0;
  uint32_t table_begin = 0;
  uint32_t table_end = 0;
  uint32_t k = 0;  // wanted; all candidates where there are fewer
};

struct SelectTables {
  uint32_t lane_capacity = 0;           // at most 65535
  uint32_t chunk_capacity = 0;          // of all lanes
  const SelectLane* lanes = nullptr;    // [lane_capacity], in device memory
  const SelectChunk* chunks = nullptr;  // [chunk_capacity], in device memory
};

struct Selection {
  uint32_t* positions = nullptr;  // [lane, position_stride]: ascending
  size_t position_stride = 0;     // at least the largest k
  uint32_t* counts = nullptr;     // [lane]: how many were selected
};

struct PqSelectArgs {
  PqGeometry geometry;
  uint32_t group_size = 0;  // G, 1 to 64
  GroupRule rule = GroupRule::kSumSoftmax;
  SelectTables candidates;
  uint32_t table_capacity = 0;
  const float* tables = nullptr;  // [table_capacity, G, subspace_count, 2^bits]
  Selection selection;
  void* scratch = nullptr;  // PqSelectScratchBytes, 256-byte aligned
  size_t scratch_bytes = 0;
};

struct PqSelectShape {
  PqGeometry geometry;
  uint32_t group_size = 0;
  uint32_t lane_capacity = 0;
  uint32_t chunk_capacity = 0;
  uint32_t table_capacity = 0;
};

// Grows with the candidates, by 4 bytes each, only where the geometry has no cells.
size_t PqSelectScratchBytes(const PqSelectShape& shape);

// Where the geometry has cells: counts them, settles values and thresholds on cells, one block a
// lane, and turns member cells into positions (4 launches). Elsewhere as ScoreSelect does it, with
// logits summed up from tables whenever they are needed.
//
// Errors: those of the launches. cudaErrorInvalidValue when a number is out of range or the scratch
// too small; then nothing is launched.
KernelStatus PqSelect(const PqSelectArgs& args, Stream stream);

struct ScoreSelectArgs {
  uint32_t group_size = 0;  // G, 1 to 64
  GroupRule rule = GroupRule::kSumSoftmax;
  SelectTables candidates;
  Selection selection;
  // When not null, [lane, G]: the natural log of the sum of exp(logit) over all candidates of the
  // lane, the normaliser of a softmax over them.
  float* lse = nullptr;
  void* scratch = nullptr;  // ScoreSelectScratchBytes, 256-byte aligned
  size_t scratch_bytes = 0;
};

struct ScoreSelectShape {
  uint32_t group_size = 0;
  uint32_t lane_capacity = 0;
  uint32_t chunk_capacity = 0;
};

size_t ScoreSelectScratchBytes(const ScoreSelectShape& shape);

// Normalisers over all chunks of a lane, values, their k-th largest by radix select in three digits,
// positions: at most 6 launches. Errors as above.
KernelStatus ScoreSelect(const ScoreSelectArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_SELECT_H_
