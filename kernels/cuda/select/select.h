// PqSelect and ScoreSelect on the device: select the positions of the tokens with the largest
// values, for all kv heads of a layer and a batch of sequences at once.
//
// A *lane* is one sequence under one kv head; one call of the CPU function selects for one lane.
// Candidates of a lane are divided into *chunks*, pieces of its spans. Two tables in device memory,
// which the host updates between steps, list the candidates and the number of tokens to select, so
// that the launches stay the same. Logits, values, GQA head aggregation (group rules) and ties are
// defined in kernels/select/pq_select.h and kernels/select/score_select.h. With one head, and with
// mean or max of logits, the positions equal those of the CPU exactly; the softmax rules may differ
// in tokens within the stated rounding.
#ifndef PQCACHED_KERNELS_CUDA_SELECT_SELECT_H_
#define PQCACHED_KERNELS_CUDA_SELECT_SELECT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/group_rule.h"
#include "kernels/cuda/status.h"
#include "kernels/select/pq.h"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kChunkTokens = 4096;
inline constexpr uint32_t kNoLane = 0xFFFFFFFFu;

// Candidates [slot_begin, slot_end) of one lane, at most kChunkTokens; only these slots of planes
// or logits are read. Chunks are read fastest when slot_begin is a multiple of 16 and planes are
// aligned to 16 bytes: cut spans at multiples of kChunkTokens.
struct SelectChunk {
  const uint8_t* planes = nullptr;  // PqSelect: plane at slot 0
  const float* logits = nullptr;    // ScoreSelect: logits at slot 0, [G, slots]
  size_t stride = 0;                // bytes between planes, or floats between heads of logits
  uint32_t slot_begin = 0;
  uint32_t slot_end = 0;
  uint32_t first_position = 0;  // position of slot 0
  uint32_t table = 0;           // PqSelect: index into tables
  uint32_t lane = kNoLane;      // kNoLane: unused
};

// Chunks [chunk_begin, chunk_end) belong to this lane, in ascending order of positions. Their
// tables are [table_begin, table_end), which no other lane uses. A lane without chunks selects
// nothing.
struct SelectLane {
  uint32_t chunk_begin = 0;
  uint32_t chunk_end = 0;
  uint32_t table_begin = 0;
  uint32_t table_end = 0;
  uint32_t k = 0;  // tokens to select; all candidates when there are fewer
};

struct SelectTables {
  uint32_t lane_capacity = 0;           // at most 65535
  uint32_t chunk_capacity = 0;          // chunks of all lanes
  const SelectLane* lanes = nullptr;    // [lane_capacity], in device memory
  const SelectChunk* chunks = nullptr;  // [chunk_capacity], in device memory
};

struct Selection {
  uint32_t* positions = nullptr;  // [lane, position_stride]: ascending
  size_t position_stride = 0;     // at least the largest k
  uint32_t* counts = nullptr;     // [lane]: number of selected positions
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

// Returns the scratch size in bytes. It grows with the candidates, by 4 bytes each where the
// geometry has no cells and by a quarter of a byte elsewhere.
size_t PqSelectScratchBytes(const PqSelectShape& shape);

// Selects tokens. When the geometry has cells: counts the tokens of each cell, computes values and
// thresholds over the cells with a block for each table, and converts selected cells to positions
// (8 launches at most). Otherwise: selects like ScoreSelect, with logits summed from tables
// whenever they are needed.
//
// Errors: those of the launches. cudaErrorInvalidValue when a number is out of range or the scratch
// is too small; then nothing is launched.
KernelStatus PqSelect(const PqSelectArgs& args, Stream stream);

struct ScoreSelectArgs {
  uint32_t group_size = 0;  // G, 1 to 64
  GroupRule rule = GroupRule::kSumSoftmax;
  SelectTables candidates;
  Selection selection;
  // When not null, [lane, G]: the natural log of the sum of exp(logit) over all candidates of the
  // lane, the normaliser of their softmax.
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

// Selects tokens by given logits: computes normalisers over all chunks of a lane, values, the k-th
// largest value by radix select in three digits, and positions; at most 6 launches. Errors as
// above.
KernelStatus ScoreSelect(const ScoreSelectArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_SELECT_SELECT_H_
