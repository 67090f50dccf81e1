// PqSelect for geometries with cells.
//
// Speed: codes are read three times (to count tokens per cell, to count selected slots, to emit
// positions), 16 slots per load. Caching the cell counts of sealed segments, and one chained scan
// over chunks instead of the last two passes, would leave one read; measurements have to decide.
#include "kernels/cuda/select/select.h"
#include "kernels/cuda/select/select_common.cuh"
#include "kernels/cuda/select/value_select.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kSelectCellsThreads = 512;
constexpr uint32_t kSelectCellsWarps = kSelectCellsThreads / kWarpThreads;
constexpr uint32_t kMaxCells = 1u << kMaxCellBits;

constexpr uint32_t MemberWords(uint32_t cell_count) { return (cell_count + 31) / 32; }

// Scratch arrays over cells have the shape [table, cell].
struct CellScratch {
  uint32_t* tokens;
  float* values;
  uint32_t* keys;
  uint32_t* members;  // [table, 2, MemberWords]: a bit per cell above, then at the threshold
  LaneThreshold* thresholds;   // [lane]
  SelectedSlotCounts* counts;  // [chunk]
};

size_t CellTokensBytes(const PqSelectShape& shape) {
  return ScratchPart(size_t{shape.table_capacity} * CellCount(shape.geometry) * sizeof(uint32_t));
}

size_t CellScratchBytes(const PqSelectShape& shape) {
  const size_t words = size_t{shape.table_capacity} * 2 * MemberWords(CellCount(shape.geometry));
  return 3 * CellTokensBytes(shape) + ScratchPart(words * sizeof(uint32_t)) +
         ScratchPart(shape.lane_capacity * sizeof(LaneThreshold)) +
         ScratchPart(shape.chunk_capacity * sizeof(SelectedSlotCounts));
}

CellScratch CutCellScratch(const PqSelectShape& shape, void* scratch) {
  ScratchParts parts(scratch);
  const size_t cells = size_t{shape.table_capacity} * CellCount(shape.geometry);
  CellScratch cut;
  cut.tokens = parts.Take<uint32_t>(cells);
  cut.values = parts.Take<float>(cells);
  cut.keys = parts.Take<uint32_t>(cells);
  cut.members = parts.Take<uint32_t>(size_t{shape.table_capacity} * 2 *
                                     MemberWords(CellCount(shape.geometry)));
  cut.thresholds = parts.Take<LaneThreshold>(shape.lane_capacity);
  cut.counts = parts.Take<SelectedSlotCounts>(shape.chunk_capacity);
  return cut;
}

// Sets cells[i] to the cell of this thread's slot i.
__device__ void LoadCells(const SelectChunk& chunk, PqGeometry geometry, ThreadSlots slots,
                          uint32_t (&cells)[kSlotsPerThread]) {
  uint8_t bytes[kSlotsPerThread];
  LoadPlane(chunk.planes, slots, bytes);
  PQC_UNROLL
  for (uint32_t i = 0; i < kSlotsPerThread; ++i) cells[i] = bytes[i];
  if (geometry.subspace_count == 1) return;
  if (geometry.bits == 4) {  // one plane of nibbles, sub-space 0 in the low one
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
      cells[i] = (cells[i] & 15u) << 4 | cells[i] >> 4;
    }
    return;
  }
  LoadPlane(chunk.planes + chunk.stride, slots, bytes);
  PQC_UNROLL
  for (uint32_t i = 0; i < kSlotsPerThread; ++i) cells[i] = cells[i] << geometry.bits | bytes[i];
}

struct CountShared {
  uint32_t tokens[kMaxCells];
};

__global__ void CountCellsKernel(PqSelectArgs args, CellScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  auto& shared = Shared<CountShared>();
  const uint32_t cell_count = CellCount(args.geometry);
  for (uint32_t i = threadIdx.x; i < cell_count; i += kChunkThreads) shared.tokens[i] = 0;
  __syncthreads();
  const ThreadSlots slots = SlotsOfThread(chunk);
  uint32_t cells[kSlotsPerThread];
  LoadCells(chunk, args.geometry, slots, cells);
  PQC_UNROLL
  for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
    if (i < slots.count) atomicAdd(&shared.tokens[cells[i]], 1u);
  }
  __syncthreads();
  uint32_t* const tokens = scratch.tokens + size_t{chunk.table} * cell_count;
  for (uint32_t i = threadIdx.x; i < cell_count; i += kChunkThreads) {
    if (shared.tokens[i] > 0) atomicAdd(&tokens[i], shared.tokens[i]);
  }
}

struct SelectCellsShared {
  float floats[kSelectCellsWarps];
  double doubles[kSelectCellsWarps];
  uint32_t words[kSelectCellsWarps];
  RadixShared radix;
};

// One block selects cells for one lane, over all cells of all tables of the lane, numbered [0,
// cell_count).
class LaneCellSelector {
 public:
  __device__ LaneCellSelector(const PqSelectArgs& args, const CellScratch& scratch,
                              const SelectLane& lane)
      : args_(args), lane_(lane), cells_per_table_(CellCount(args.geometry)) {
    const size_t first = size_t{lane.table_begin} * cells_per_table_;
    cell_count_ = (lane.table_end - lane.table_begin) * cells_per_table_;
    tokens_ = scratch.tokens + first;
    values_ = scratch.values + first;
    keys_ = scratch.keys + first;
  }

  __device__ LaneThreshold Settle(uint32_t* selected_count) {
    auto& shared = Shared<SelectCellsShared>();
    uint32_t tokens = 0;
    for (uint32_t i = threadIdx.x; i < cell_count_; i += kSelectCellsThreads) tokens += tokens_[i];
    const uint32_t token_count = BlockSum(tokens, shared.words);
    const uint32_t k = Smaller(lane_.k, token_count);
    *selected_count = k;
    if (k == 0) return {kNoKey, 0};
    FindValues();
    return FindThreshold(k);
  }

 private:
  __device__ float Logit(uint32_t head, uint32_t cell) const {
    const TableView tables = TablesOf(args_.tables, lane_.table_begin + cell / cells_per_table_,
                                      args_.geometry, args_.group_size, args_.rule);
    const uint32_t bits = args_.geometry.bits;
    const uint32_t codes = cell % cells_per_table_;
    if (args_.geometry.subspace_count == 1) return tables.Entry(head, codes);
    return tables.Entry(head, codes >> bits) +
           tables.Entry(head, (1u << bits) + (codes & ((1u << bits) - 1)));
  }

  __device__ HeadNormaliser Normalise(uint32_t head) const {
    auto& shared = Shared<SelectCellsShared>();
    float max = -kLogitLimit;
    for (uint32_t i = threadIdx.x; i < cell_count_; i += kSelectCellsThreads) {
      if (tokens_[i] > 0) max = Larger(max, Logit(head, i));
    }
    max = BlockMax(max, shared.floats);
    double sum = 0.0;
    for (uint32_t i = threadIdx.x; i < cell_count_; i += kSelectCellsThreads) {
      if (tokens_[i] == 0) continue;
      const float exponent = Logit(head, i) - max;
      if (exponent >= kMinExponent) sum += double{expf(exponent)} * tokens_[i];
    }
    sum = BlockSum(sum, shared.doubles);
    return {max, static_cast<float>(1.0 / sum), static_cast<float>(log(sum))};
  }

  __device__ void FindValues() {
    const bool summed = args_.rule == GroupRule::kMeanLogit;
    const uint32_t head_count = summed ? 1 : args_.group_size;
    for (uint32_t head = 0; head < head_count; ++head) {
      HeadNormaliser normaliser = {0.0f, 1.0f, 0.0f};
      if (ReadsNormalisers(args_.rule, head_count)) normaliser = Normalise(head);
      for (uint32_t i = threadIdx.x; i < cell_count_; i += kSelectCellsThreads) {
        if (tokens_[i] == 0) continue;
        const float before = head == 0 ? 0.0f : values_[i];
        values_[i] = AddToValue(args_.rule, head_count, head, before, Logit(head, i), normaliser);
      }
    }
    for (uint32_t i = threadIdx.x; i < cell_count_; i += kSelectCellsThreads) {
      keys_[i] = tokens_[i] > 0 ? OrderedKey(values_[i]) : 0;
    }
  }

  __device__ LaneThreshold FindThreshold(uint32_t k) {
    auto& shared = Shared<SelectCellsShared>();
    return FindKthKey(
        cell_count_, k, [this](uint32_t cell) { return keys_[cell]; },
        [this](uint32_t cell) { return tokens_[cell]; }, shared.radix, shared.words);
  }

  const PqSelectArgs& args_;
  const SelectLane& lane_;
  uint32_t cells_per_table_;
  uint32_t cell_count_;
  uint32_t* tokens_;
  float* values_;
  uint32_t* keys_;
};

// Writes the bits of the cells above and at the threshold, one warp per word.
__device__ void WriteMembers(const PqSelectArgs& args, const CellScratch& scratch,
                             const SelectLane& lane, LaneThreshold threshold) {
  const uint32_t cells_per_table = CellCount(args.geometry);
  const uint32_t words = MemberWords(cells_per_table);
  for (uint32_t table = lane.table_begin; table < lane.table_end; ++table) {
    const uint32_t* keys = scratch.keys + size_t{table} * cells_per_table;
    uint32_t* members = scratch.members + size_t{table} * 2 * words;
    for (uint32_t word = WarpIndex(); word < words; word += kSelectCellsWarps) {
      const uint32_t cell = word * 32 + LaneIndex();
      const uint32_t key = cell < cells_per_table && threshold.key != kNoKey ? keys[cell] : 0;
      const uint32_t above = __ballot_sync(kAllLanes, key > threshold.key);
      const uint32_t equal = __ballot_sync(kAllLanes, key == threshold.key);
      if (LaneIndex() == 0) {
        members[word] = above;
        members[words + word] = equal;
      }
    }
  }
}

__global__ void SelectCellsKernel(PqSelectArgs args, CellScratch scratch) {
  const SelectLane lane = args.candidates.lanes[blockIdx.x];
  uint32_t count = 0;
  LaneThreshold threshold = {kNoKey, 0};
  if (lane.chunk_begin < lane.chunk_end) {
    LaneCellSelector settler(args, scratch, lane);
    threshold = settler.Settle(&count);
    __syncthreads();
    WriteMembers(args, scratch, lane, threshold);
  }
  if (threadIdx.x == 0) {
    scratch.thresholds[blockIdx.x] = threshold;
    args.selection.counts[blockIdx.x] = count;
  }
}

struct MemberShared {
  uint32_t slots[kChunkWarps];
  uint32_t members[2 * MemberWords(kMaxCells)];
};

__device__ SlotClasses ClassifyByCell(const PqSelectArgs& args, const CellScratch& scratch,
                                      const SelectChunk& chunk) {
  auto& shared = Shared<MemberShared>();
  const uint32_t words = MemberWords(CellCount(args.geometry));
  for (uint32_t i = threadIdx.x; i < 2 * words; i += kChunkThreads) {
    shared.members[i] = scratch.members[size_t{chunk.table} * 2 * words + i];
  }
  __syncthreads();
  const ThreadSlots slots = SlotsOfThread(chunk);
  uint32_t cells[kSlotsPerThread];
  LoadCells(chunk, args.geometry, slots, cells);
  SlotClasses classes = {0, 0};
  PQC_UNROLL
  for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
    if (i >= slots.count) break;
    classes.above |= (shared.members[cells[i] / 32] >> cells[i] % 32 & 1u) << i;
    classes.equal |= (shared.members[words + cells[i] / 32] >> cells[i] % 32 & 1u) << i;
  }
  return classes;
}

__global__ void CountMembersKernel(PqSelectArgs args, CellScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  const SlotClasses classes = ClassifyByCell(args, scratch, chunk);
  CountSelectedSlots(classes, &scratch.counts[blockIdx.x], Shared<MemberShared>().slots);
}

__global__ void EmitMembersKernel(PqSelectArgs args, CellScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  const SlotClasses classes = ClassifyByCell(args, scratch, chunk);
  EmitSelectedSlots(chunk, args.candidates.lanes[chunk.lane], scratch.thresholds[chunk.lane],
                    classes, scratch.counts, args.selection, Shared<MemberShared>().slots);
}

PqSelectShape ShapeOf(const PqSelectArgs& args) {
  return {args.geometry, args.group_size, args.candidates.lane_capacity,
          args.candidates.chunk_capacity, args.table_capacity};
}

KernelStatus SelectByCells(const PqSelectArgs& args, Stream stream) {
  const CellScratch scratch = CutCellScratch(ShapeOf(args), args.scratch);
  const dim3 chunks(args.candidates.chunk_capacity);
  const dim3 lanes(args.candidates.lane_capacity);
  KernelStatus status = Clear(scratch.tokens, CellTokensBytes(ShapeOf(args)), stream);
  if (!status.ok()) return status;
  status =
      Launch(CountCellsKernel, {chunks, kChunkThreads, sizeof(CountShared)}, stream, args, scratch);
  if (!status.ok()) return status;
  status = Launch(SelectCellsKernel, {lanes, kSelectCellsThreads, sizeof(SelectCellsShared)},
                  stream, args, scratch);
  if (!status.ok()) return status;
  status = Launch(CountMembersKernel, {chunks, kChunkThreads, sizeof(MemberShared)}, stream, args,
                  scratch);
  if (!status.ok()) return status;
  return Launch(EmitMembersKernel, {chunks, kChunkThreads, sizeof(MemberShared)}, stream, args,
                scratch);
}

}  // namespace

size_t PqSelectScratchBytes(const PqSelectShape& shape) {
  if (HasCells(shape.geometry)) return CellScratchBytes(shape);
  return ScoreSelectScratchBytes({shape.group_size, shape.lane_capacity, shape.chunk_capacity});
}

KernelStatus PqSelect(const PqSelectArgs& args, Stream stream) {
  if (!IsValid(args.geometry) || args.group_size == 0 || args.group_size > kMaxSelectGroup ||
      args.candidates.lane_capacity > kMaxLanes ||
      args.scratch_bytes < PqSelectScratchBytes(ShapeOf(args))) {
    return {cudaErrorInvalidValue};
  }
  if (HasCells(args.geometry)) return SelectByCells(args, stream);
  return SelectByValues({.group_size = args.group_size,
                         .rule = args.rule,
                         .candidates = args.candidates,
                         .geometry = args.geometry,
                         .tables = args.tables,
                         .selection = args.selection,
                         .lse = nullptr,
                         .scratch = args.scratch},
                        stream);
}

}  // namespace pqcached::kernels::cuda
