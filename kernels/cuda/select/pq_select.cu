// PqSelect for geometries with cells.
//
// Speed: codes are read twice, to count tokens per cell and to classify slots, 16 slots per load.
// The classes of slots, 2 bits each, are kept for the last step.
#include "kernels/cuda/select/select.h"
#include "kernels/cuda/select/select_common.cuh"
#include "kernels/cuda/select/table_logits.cuh"
#include "kernels/cuda/select/value_select.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kSelectCellsThreads = 1024;
constexpr uint32_t kSelectCellsWarps = kSelectCellsThreads / kWarpThreads;
constexpr uint32_t kMaxCells = 1u << kMaxCellBits;
constexpr uint32_t kMaxCellEntries = 256;  // m * 2^b where cells are defined
constexpr uint32_t kCellsPerWord = 16;
constexpr uint32_t kNoTable = 0xFFFFFFFFu;

constexpr uint32_t ClassWords(uint32_t cell_count) {
  return (cell_count + kCellsPerWord - 1) / kCellsPerWord;
}

// Scratch arrays over cells have the shape [table, cell].
struct CellScratch {
  uint32_t* tokens;
  float* values;
  uint32_t* keys;
  uint32_t* cell_classes;     // [table, ClassWords]: 2 bits per cell, above and at the threshold
  LaneThreshold* thresholds;  // [lane]
  ClassScratch classes;
};

size_t CellTokensBytes(const PqSelectShape& shape) {
  return ScratchPart(size_t{shape.table_capacity} * CellCount(shape.geometry) * sizeof(uint32_t));
}

size_t CellScratchBytes(const PqSelectShape& shape) {
  const size_t words = size_t{shape.table_capacity} * ClassWords(CellCount(shape.geometry));
  return 3 * CellTokensBytes(shape) + ScratchPart(words * sizeof(uint32_t)) +
         ScratchPart(shape.lane_capacity * sizeof(LaneThreshold)) +
         ClassScratchBytes(shape.chunk_capacity);
}

CellScratch CutCellScratch(const PqSelectShape& shape, void* scratch) {
  ScratchParts parts(scratch);
  const size_t cells = size_t{shape.table_capacity} * CellCount(shape.geometry);
  CellScratch cut;
  cut.tokens = parts.Take<uint32_t>(cells);
  cut.values = parts.Take<float>(cells);
  cut.keys = parts.Take<uint32_t>(cells);
  cut.cell_classes =
      parts.Take<uint32_t>(size_t{shape.table_capacity} * ClassWords(CellCount(shape.geometry)));
  cut.thresholds = parts.Take<LaneThreshold>(shape.lane_capacity);
  cut.classes = CutClassScratch(parts, shape.chunk_capacity);
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

// Adds the counts of a run of chunks to those of their tables.
__global__ void CountCellsKernel(PqSelectArgs args, CellScratch scratch) {
  auto& shared = Shared<CountShared>();
  const uint32_t cell_count = CellCount(args.geometry);
  uint32_t table = kNoTable;
  const auto end_table = [&] {
    if (table == kNoTable) return;
    __syncthreads();
    uint32_t* const tokens = scratch.tokens + size_t{table} * cell_count;
    for (uint32_t i = threadIdx.x; i < cell_count; i += kChunkThreads) {
      if (shared.tokens[i] > 0) atomicAdd(&tokens[i], shared.tokens[i]);
    }
    __syncthreads();
  };
  const ChunkRun run = RunOfBlock(args.candidates.chunk_capacity);
  for (uint32_t chunk_index = run.begin; chunk_index < run.end; ++chunk_index) {
    const SelectChunk chunk = args.candidates.chunks[chunk_index];
    if (chunk.lane == kNoLane) continue;
    const ThreadSlots slots = SlotsOfThread(chunk);
    uint32_t cells[kSlotsPerThread];
    LoadCells(chunk, args.geometry, slots, cells);
    if (chunk.table != table) {
      end_table();
      table = chunk.table;
      for (uint32_t i = threadIdx.x; i < cell_count; i += kChunkThreads) shared.tokens[i] = 0;
      __syncthreads();
    }
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
      if (i < slots.count) atomicAdd(&shared.tokens[cells[i]], 1u);
    }
  }
  end_table();
}

struct SelectCellsShared {
  HeadFloats<kHeadsAtOnce> table[kMaxCellEntries];
  float maxima[kHeadsAtOnce][kSelectCellsWarps];
  double sums[kHeadsAtOnce][kSelectCellsWarps];
  HeadNormaliser normalisers[kHeadsAtOnce];
  uint32_t words[kSelectCellsWarps];
  RadixShared radix;
};

// One block selects cells for one lane, over all cells of all tables of the lane, numbered [0,
// cell_count).
class LaneCellSelector {
 public:
  __device__ LaneCellSelector(const PqSelectArgs& args, const CellScratch& scratch,
                              const SelectLane& lane)
      : args_(args),
        lane_(lane),
        head_count_(args.rule == GroupRule::kMeanLogit ? 1 : args.group_size),
        cells_per_table_(CellCount(args.geometry)) {
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
    for (uint32_t first = 0; first < head_count_; first += kHeadsAtOnce) {
      if (ReadsNormalisers(args_.rule, head_count_)) Normalise(first);
      AddValues(first);
    }
    __syncthreads();
    return FindKthKey(
        cell_count_, k, [this](uint32_t cell) { return keys_[cell]; },
        [this](uint32_t cell) { return tokens_[cell]; }, shared.radix, shared.words);
  }

 private:
  // Loads the entries of heads first_head, first_head + 1, ... of one of the lane's tables.
  __device__ void LoadTable(uint32_t table, uint32_t first_head) const {
    auto& shared = Shared<SelectCellsShared>();
    const TableView view = TablesOf(args_.tables, lane_.table_begin + table, args_.geometry,
                                    args_.group_size, args_.rule);
    __syncthreads();  // the entries before have been read
    for (uint32_t i = threadIdx.x; i < view.entry_count * kHeadsAtOnce; i += kSelectCellsThreads) {
      const uint32_t head = i / view.entry_count;
      const uint32_t entry = i % view.entry_count;
      shared.table[entry].of[head] =
          first_head + head < view.head_count ? view.Entry(first_head + head, entry) : 0.0f;
    }
    __syncthreads();
  }

  __device__ HeadFloats<kHeadsAtOnce> Logits(uint32_t cell) const {
    const auto& table = Shared<SelectCellsShared>().table;
    const uint32_t bits = args_.geometry.bits;
    if (args_.geometry.subspace_count == 1) return table[cell];
    HeadFloats<kHeadsAtOnce> sums = table[cell >> bits];
    const HeadFloats<kHeadsAtOnce> second = table[(1u << bits) + (cell & ((1u << bits) - 1))];
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) sums.of[head] += second.of[head];
    return sums;
  }

  // Calls visit(cell, tokens, logits) for the cells of this thread, also for those without tokens.
  template <typename Visit>
  __device__ void VisitCells(uint32_t first_head, const Visit& visit) const {
    for (uint32_t first = 0; first < cell_count_; first += cells_per_table_) {
      LoadTable(first / cells_per_table_, first_head);
      PQC_UNROLL_4
      for (uint32_t cell = threadIdx.x; cell < cells_per_table_; cell += kSelectCellsThreads) {
        visit(first + cell, tokens_[first + cell], Logits(cell));
      }
    }
  }

  __device__ void Normalise(uint32_t first_head) const {
    auto& shared = Shared<SelectCellsShared>();
    float max[kHeadsAtOnce];
    for (float& of_head : max) of_head = -kLogitLimit;
    VisitCells(first_head, [&](uint32_t, uint32_t tokens, const HeadFloats<kHeadsAtOnce>& logits) {
      PQC_UNROLL
      for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
        if (tokens > 0) max[head] = Larger(max[head], logits.of[head]);
      }
    });
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      max[head] = WarpMax(max[head]);
      if (LaneIndex() == 0) shared.maxima[head][WarpIndex()] = max[head];
    }
    __syncthreads();
    double sum[kHeadsAtOnce] = {};
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      max[head] = WarpMax(shared.maxima[head][LaneIndex()]);
    }
    VisitCells(first_head, [&](uint32_t, uint32_t tokens, const HeadFloats<kHeadsAtOnce>& logits) {
      PQC_UNROLL
      for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
        const float exponent = logits.of[head] - max[head];
        if (tokens > 0 && exponent >= kMinExponent) sum[head] += double{expf(exponent)} * tokens;
      }
    });
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      sum[head] = WarpSum(sum[head]);
      if (LaneIndex() == 0) shared.sums[head][WarpIndex()] = sum[head];
    }
    __syncthreads();
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      if (WarpIndex() != head) continue;
      const double total = WarpSum(shared.sums[head][LaneIndex()]);
      if (LaneIndex() != 0) continue;
      shared.normalisers[head] = {max[head], static_cast<float>(1.0 / total),
                                  static_cast<float>(log(total))};
    }
    __syncthreads();
  }

  // Adds these heads to the values of the cells, and computes their keys after the last head.
  __device__ void AddValues(uint32_t first_head) const {
    const auto& normalisers = Shared<SelectCellsShared>().normalisers;
    const bool has_more = first_head + kHeadsAtOnce < head_count_;
    VisitCells(first_head,
               [&](uint32_t cell, uint32_t tokens, const HeadFloats<kHeadsAtOnce>& logits) {
                 float value = first_head > 0 ? values_[cell] : 0.0f;
                 PQC_UNROLL
                 for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
                   if (first_head + head >= head_count_) break;
                   value = AddToValue(args_.rule, head_count_, first_head + head, value,
                                      logits.of[head], normalisers[head]);
                 }
                 if (has_more) {
                   values_[cell] = value;
                 } else {
                   keys_[cell] = tokens > 0 ? OrderedKey(value) : 0;
                 }
               });
  }

  const PqSelectArgs& args_;
  const SelectLane& lane_;
  uint32_t head_count_;
  uint32_t cells_per_table_;
  uint32_t cell_count_;
  uint32_t* tokens_;
  float* values_;
  uint32_t* keys_;
};

// Writes the classes of a lane's cells: 1 above the threshold, 2 at it.
__device__ void WriteCellClasses(const PqSelectArgs& args, const CellScratch& scratch,
                                 const SelectLane& lane, LaneThreshold threshold) {
  const uint32_t cells_per_table = CellCount(args.geometry);
  const uint32_t words = ClassWords(cells_per_table);
  const uint32_t word_count = (lane.table_end - lane.table_begin) * words;
  for (uint32_t i = threadIdx.x; i < word_count; i += kSelectCellsThreads) {
    const uint32_t table = lane.table_begin + i / words;
    const uint32_t word = i % words;
    const uint32_t* keys =
        scratch.keys + size_t{table} * cells_per_table + size_t{word} * kCellsPerWord;
    uint32_t classes = 0;
    PQC_UNROLL
    for (uint32_t cell = 0; cell < kCellsPerWord; ++cell) {
      if (threshold.key == kNoKey) break;
      classes |= (keys[cell] > threshold.key    ? 1u
                  : keys[cell] == threshold.key ? 2u
                                                : 0u)
                 << 2 * cell;
    }
    scratch.cell_classes[size_t{table} * words + word] = classes;
  }
}

__global__ void __launch_bounds__(kSelectCellsThreads)
    SelectCellsKernel(PqSelectArgs args, CellScratch scratch) {
  const SelectLane lane = args.candidates.lanes[blockIdx.x];
  uint32_t count = 0;
  LaneThreshold threshold = {kNoKey, 0};
  if (lane.chunk_begin < lane.chunk_end) {
    LaneCellSelector settler(args, scratch, lane);
    threshold = settler.Settle(&count);
    __syncthreads();
    WriteCellClasses(args, scratch, lane, threshold);
  }
  if (threadIdx.x == 0) {
    scratch.thresholds[blockIdx.x] = threshold;
    args.selection.counts[blockIdx.x] = count;
  }
}

struct ClassifyShared {
  uint32_t slots[kChunkWarps];
  uint32_t cell_classes[ClassWords(kMaxCells)];
};

// Classifies the slots of a run of chunks by their cells.
__global__ void ClassifyCellsKernel(PqSelectArgs args, CellScratch scratch) {
  auto& shared = Shared<ClassifyShared>();
  const uint32_t words = ClassWords(CellCount(args.geometry));
  const ChunkRun run = RunOfBlock(args.candidates.chunk_capacity);
  uint32_t table = kNoTable;
  for (uint32_t chunk_index = run.begin; chunk_index < run.end; ++chunk_index) {
    const SelectChunk chunk = args.candidates.chunks[chunk_index];
    if (chunk.lane == kNoLane) continue;
    const ThreadSlots slots = SlotsOfThread(chunk);
    uint32_t cells[kSlotsPerThread];
    LoadCells(chunk, args.geometry, slots, cells);
    if (chunk.table != table) {
      table = chunk.table;
      __syncthreads();  // the classes before have been read
      for (uint32_t i = threadIdx.x; i < words; i += kChunkThreads) {
        shared.cell_classes[i] = scratch.cell_classes[size_t{table} * words + i];
      }
      __syncthreads();
    }
    SlotClasses classes = {0, 0};
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
      const uint32_t word = shared.cell_classes[cells[i] / kCellsPerWord];
      const uint32_t of_cell = i < slots.count ? word >> 2 * (cells[i] % kCellsPerWord) : 0;
      classes.above |= (of_cell & 1u) << i;
      classes.equal |= (of_cell >> 1 & 1u) << i;
    }
    KeepClasses(classes, chunk_index, scratch.classes, shared.slots);
  }
}

__global__ void EmitCellsKernel(PqSelectArgs args, CellScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  EmitSelectedSlots(chunk, args.candidates.lanes[chunk.lane], scratch.thresholds[chunk.lane],
                    scratch.classes, args.selection, Shared<ClassifyShared>().slots);
}

PqSelectShape ShapeOf(const PqSelectArgs& args) {
  return {args.geometry, args.group_size, args.candidates.lane_capacity,
          args.candidates.chunk_capacity, args.table_capacity};
}

KernelStatus SelectByCells(const PqSelectArgs& args, Stream stream) {
  const CellScratch scratch = CutCellScratch(ShapeOf(args), args.scratch);
  const dim3 chunks(args.candidates.chunk_capacity);
  const dim3 runs(ChunkBlocks(args.candidates.chunk_capacity));
  const dim3 lanes(args.candidates.lane_capacity);
  KernelStatus status = Clear(scratch.tokens, CellTokensBytes(ShapeOf(args)), stream);
  if (status.ok()) {
    status =
        Launch(CountCellsKernel, {runs, kChunkThreads, sizeof(CountShared)}, stream, args, scratch);
  }
  if (status.ok()) {
    status = Launch(SelectCellsKernel, {lanes, kSelectCellsThreads, sizeof(SelectCellsShared)},
                    stream, args, scratch);
  }
  if (status.ok()) {
    status = Launch(ClassifyCellsKernel, {runs, kChunkThreads, sizeof(ClassifyShared)}, stream,
                    args, scratch);
  }
  if (!status.ok()) return status;
  return Launch(EmitCellsKernel, {chunks, kChunkThreads, sizeof(ClassifyShared)}, stream, args,
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
