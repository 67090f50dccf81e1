// PqSelect for geometries with cells.
//
// Speed: codes are read twice, to count tokens per cell and to classify slots, 16 slots per load.
// The classes of slots, 2 bits each, are kept for the last step. The cells of a lane are divided
// among blocks by their tables.
#include "kernels/cuda/select/digits.cuh"
#include "kernels/cuda/select/select.h"
#include "kernels/cuda/select/select_common.cuh"
#include "kernels/cuda/select/table_logits.cuh"
#include "kernels/cuda/select/value_select.cuh"

namespace pqcached::kernels::cuda {
namespace {

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
  uint32_t* keys;               // 0: no tokens
  PartialNormaliser* partials;  // [table, G]
  DigitScratch digits;
  ClassScratch classes;
};

size_t CellTokensBytes(const PqSelectShape& shape) {
  return ScratchPart(size_t{shape.table_capacity} * CellCount(shape.geometry) * sizeof(uint32_t));
}

size_t CellScratchBytes(const PqSelectShape& shape) {
  return 2 * CellTokensBytes(shape) +
         ScratchPart(size_t{shape.table_capacity} * shape.group_size * sizeof(PartialNormaliser)) +
         DigitScratchBytes(shape.lane_capacity) + ClassScratchBytes(shape.chunk_capacity);
}

CellScratch CutCellScratch(const PqSelectShape& shape, void* scratch) {
  ScratchParts parts(scratch);
  const size_t cells = size_t{shape.table_capacity} * CellCount(shape.geometry);
  CellScratch cut;
  cut.tokens = parts.Take<uint32_t>(cells);
  cut.digits = CutDigitScratch(parts, shape.lane_capacity);
  cut.keys = parts.Take<uint32_t>(cells);
  cut.partials = parts.Take<PartialNormaliser>(size_t{shape.table_capacity} * shape.group_size);
  cut.classes = CutClassScratch(parts, shape.chunk_capacity);
  return cut;
}

// Sets cells[i] to the cell of this thread's slot i.
__device__ void LoadCells(const SelectChunk& chunk, PqGeometry geometry, ThreadSlots slots,
                          uint32_t (&cells)[kSlotsPerThread]) {
  uint8_t bytes[kSlotsPerThread];
  LoadPlane(chunk.planes, slots, bytes);
  if (HasNibblePlanes(geometry)) {  // one plane, sub-space 0 in the low nibbles
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) cells[i] = (bytes[i] & 15u) << 4 | bytes[i] >> 4;
    return;
  }
  // Memory that is overwritten while it is read may have any bytes.
  const uint32_t mask = (1u << geometry.bits) - 1;
  PQC_UNROLL
  for (uint32_t i = 0; i < kSlotsPerThread; ++i) cells[i] = bytes[i] & mask;
  if (geometry.subspace_count == 1) return;
  LoadPlane(chunk.planes + chunk.stride, slots, bytes);
  PQC_UNROLL
  for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
    cells[i] = cells[i] << geometry.bits | (bytes[i] & mask);
  }
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

// The tables of a lane are divided among the blocks (., lane): block x takes tables x, x +
// gridDim.x, ...
struct CellShared {
  HeadFloats<kHeadsAtOnce> table[kMaxCellEntries];
  float maxima[kHeadsAtOnce][kChunkWarps];
  double sums[kHeadsAtOnce][kChunkWarps];
  HeadNormaliser normalisers[kMaxSelectGroup];
  uint32_t bins[kMaxBins];
};

// The cells of a lane that are this block's.
class BlockCells {
 public:
  __device__ BlockCells(const PqSelectArgs& args, const CellScratch& scratch)
      : args_(args),
        scratch_(scratch),
        lane_(args.candidates.lanes[blockIdx.y]),
        head_count_(args.rule == GroupRule::kMeanLogit ? 1 : args.group_size),
        cells_per_table_(CellCount(args.geometry)) {}

  // Computes the maximum and the sum of exponentials of every head over each table.
  __device__ void Normalise() const {
    for (uint32_t table = FirstTable(); table < lane_.table_end; table += gridDim.x) {
      for (uint32_t first = 0; first < head_count_; first += kHeadsAtOnce) {
        NormaliseHeads(table, first);
      }
    }
  }

  // Computes the keys of all cells, and the counts of their first digits.
  __device__ void FindKeys() const {
    auto& shared = Shared<CellShared>();
    if (FirstTable() >= lane_.table_end) return;
    if (ReadsNormalisers(args_.rule, head_count_)) {
      for (uint32_t head = WarpIndex(); head < head_count_; head += kChunkWarps) {
        const HeadNormaliser normaliser = MergeNormalisers(scratch_.partials, lane_.table_begin,
                                                           lane_.table_end, args_.group_size, head);
        if (LaneIndex() == 0) shared.normalisers[head] = normaliser;
      }
    }
    for (uint32_t i = threadIdx.x; i < DigitBins(0); i += kChunkThreads) shared.bins[i] = 0;
    __syncthreads();
    for (uint32_t table = FirstTable(); table < lane_.table_end; table += gridDim.x) {
      FindKeys(table);
    }
    LaneDigits(args_.candidates, scratch_.digits, blockIdx.y).AddBins(shared.bins, 0);
  }

 private:
  static constexpr uint32_t kCellsPerThread = kMaxCells / kChunkThreads;

  __device__ uint32_t FirstTable() const { return lane_.table_begin + blockIdx.x; }
  __device__ const uint32_t* TokensOf(uint32_t table) const {
    return scratch_.tokens + size_t{table} * cells_per_table_;
  }

  // Loads the entries of heads first_head, first_head + 1, ...
  __device__ void LoadTable(uint32_t table, uint32_t first_head) const {
    auto& shared = Shared<CellShared>();
    const TableView view =
        TablesOf(args_.tables, table, args_.geometry, args_.group_size, args_.rule);
    __syncthreads();  // the entries before have been read
    for (uint32_t i = threadIdx.x; i < view.entry_count * kHeadsAtOnce; i += kChunkThreads) {
      const uint32_t head = i / view.entry_count;
      const uint32_t entry = i % view.entry_count;
      shared.table[entry].of[head] =
          first_head + head < view.head_count ? view.Entry(first_head + head, entry) : 0.0f;
    }
    __syncthreads();
  }

  __device__ HeadFloats<kHeadsAtOnce> Logits(uint32_t cell) const {
    const auto& table = Shared<CellShared>().table;
    const uint32_t bits = args_.geometry.bits;
    if (args_.geometry.subspace_count == 1) return table[cell];
    HeadFloats<kHeadsAtOnce> sums = table[cell >> bits];
    const HeadFloats<kHeadsAtOnce> second = table[(1u << bits) + (cell & ((1u << bits) - 1))];
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) sums.of[head] += second.of[head];
    return sums;
  }

  // Loads the tokens of this thread's cells, threadIdx.x + i * kChunkThreads.
  __device__ void LoadTokens(uint32_t table, uint32_t (&tokens)[kCellsPerThread]) const {
    const uint32_t* const of_table = TokensOf(table);
    PQC_UNROLL
    for (uint32_t i = 0; i < kCellsPerThread; ++i) {
      const uint32_t cell = threadIdx.x + i * kChunkThreads;
      tokens[i] = cell < cells_per_table_ ? of_table[cell] : 0;
    }
  }

  __device__ void NormaliseHeads(uint32_t table, uint32_t first_head) const {
    auto& shared = Shared<CellShared>();
    uint32_t tokens[kCellsPerThread];
    LoadTokens(table, tokens);
    LoadTable(table, first_head);
    float max[kHeadsAtOnce];
    for (float& of_head : max) of_head = -kLogitLimit;
    PQC_UNROLL
    for (uint32_t i = 0; i < kCellsPerThread; ++i) {
      if (tokens[i] == 0) continue;
      const HeadFloats<kHeadsAtOnce> logits = Logits(threadIdx.x + i * kChunkThreads);
      PQC_UNROLL
      for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
        max[head] = Larger(max[head], logits.of[head]);
      }
    }
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      max[head] = WarpMax(max[head]);
      if (LaneIndex() == 0) shared.maxima[head][WarpIndex()] = max[head];
    }
    __syncthreads();
    double sum[kHeadsAtOnce] = {};
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      for (uint32_t warp = 0; warp < kChunkWarps; ++warp) {
        max[head] = Larger(max[head], shared.maxima[head][warp]);
      }
    }
    PQC_UNROLL
    for (uint32_t i = 0; i < kCellsPerThread; ++i) {
      if (tokens[i] == 0) continue;
      const HeadFloats<kHeadsAtOnce> logits = Logits(threadIdx.x + i * kChunkThreads);
      PQC_UNROLL
      for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
        const float exponent = logits.of[head] - max[head];
        if (exponent >= kMinExponent) sum[head] += double{expf(exponent)} * tokens[i];
      }
    }
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      sum[head] = WarpSum(sum[head]);
      if (LaneIndex() == 0) shared.sums[head][WarpIndex()] = sum[head];
    }
    __syncthreads();
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      if (threadIdx.x != head || first_head + head >= head_count_) continue;
      double total = 0.0;
      for (uint32_t warp = 0; warp < kChunkWarps; ++warp) total += shared.sums[head][warp];
      scratch_.partials[size_t{table} * args_.group_size + first_head + head] = {
          max[head], static_cast<float>(total)};
    }
  }

  __device__ void FindKeys(uint32_t table) const {
    auto& shared = Shared<CellShared>();
    uint32_t tokens[kCellsPerThread];
    LoadTokens(table, tokens);
    float values[kCellsPerThread] = {};
    for (uint32_t first = 0; first < head_count_; first += kHeadsAtOnce) {
      LoadTable(table, first);
      PQC_UNROLL
      for (uint32_t i = 0; i < kCellsPerThread; ++i) {
        if (tokens[i] == 0) continue;
        const HeadFloats<kHeadsAtOnce> logits = Logits(threadIdx.x + i * kChunkThreads);
        PQC_UNROLL
        for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
          if (first + head >= head_count_) break;
          values[i] = AddToValue(args_.rule, head_count_, first + head, values[i], logits.of[head],
                                 shared.normalisers[first + head]);
        }
      }
    }
    uint32_t* const keys = scratch_.keys + size_t{table} * cells_per_table_;
    PQC_UNROLL
    for (uint32_t i = 0; i < kCellsPerThread; ++i) {
      const uint32_t cell = threadIdx.x + i * kChunkThreads;
      if (cell >= cells_per_table_) break;
      const uint32_t key = tokens[i] > 0 ? OrderedKey(values[i]) : 0;
      keys[cell] = key;
      if (tokens[i] > 0) atomicAdd(&shared.bins[key >> DigitShift(0)], tokens[i]);
    }
  }

  const PqSelectArgs& args_;
  const CellScratch& scratch_;
  const SelectLane lane_;
  uint32_t head_count_;
  uint32_t cells_per_table_;
};

__global__ void __launch_bounds__(kChunkThreads)
    NormaliseCellsKernel(PqSelectArgs args, CellScratch scratch) {
  BlockCells(args, scratch).Normalise();
}

__global__ void __launch_bounds__(kChunkThreads)
    FindCellKeysKernel(PqSelectArgs args, CellScratch scratch) {
  BlockCells(args, scratch).FindKeys();
}

// Counts the tokens of each value of `digit` among the cells whose keys share the digits found so
// far.
__global__ void CountCellDigitsKernel(PqSelectArgs args, CellScratch scratch, uint32_t digit) {
  auto& shared = Shared<DigitShared>();
  const SelectLane lane = args.candidates.lanes[blockIdx.y];
  const LaneDigits digits(args.candidates, scratch.digits, blockIdx.y);
  const uint32_t begin = lane.table_begin + blockIdx.x;
  // The first block also stores the count of a lane without tables.
  if (begin >= lane.table_end && blockIdx.x > 0) return;
  const LaneThreshold progress =
      digits.Find(digit - 1, shared, blockIdx.x == 0, args.selection.counts);
  for (uint32_t i = threadIdx.x; i < DigitBins(digit); i += kChunkThreads) shared.bins[i] = 0;
  __syncthreads();
  const uint32_t cell_count = CellCount(args.geometry);
  for (uint32_t table = begin; table < lane.table_end; table += gridDim.x) {
    const size_t first = size_t{table} * cell_count;
    PQC_UNROLL_4
    for (uint32_t i = threadIdx.x; i < cell_count; i += kChunkThreads) {
      CountDigit(scratch.keys[first + i], scratch.tokens[first + i], progress.key, digit,
                 shared.bins);
    }
  }
  digits.AddBins(shared.bins, digit);
}

struct ClassifyShared {
  DigitShared digits;
  uint32_t cell_classes[ClassWords(kMaxCells)];  // 2 bits per cell: above, and at the threshold
};

// Computes the classes of a table's cells, in shared memory.
__device__ void ClassifyCells(const uint32_t* keys, uint32_t cell_count, LaneThreshold threshold,
                              uint32_t* cell_classes) {
  for (uint32_t word = threadIdx.x; word < ClassWords(cell_count); word += kChunkThreads) {
    const auto* const fours = reinterpret_cast<const uint4*>(keys + word * kCellsPerWord);
    uint32_t classes = 0;
    PQC_UNROLL
    for (uint32_t i = 0; i < kCellsPerWord; i += 4) {
      const uint4 four = fours[i / 4];
      const uint32_t parts[4] = {four.x, four.y, four.z, four.w};
      PQC_UNROLL
      for (uint32_t j = 0; j < 4; ++j) {
        classes |= (parts[j] > threshold.key    ? 1u
                    : parts[j] == threshold.key ? 2u
                                                : 0u)
                   << 2 * (i + j);
      }
    }
    cell_classes[word] = classes;
  }
}

// Classifies the slots of a run of chunks by their cells.
__global__ void ClassifySlotsKernel(PqSelectArgs args, CellScratch scratch) {
  auto& shared = Shared<ClassifyShared>();
  const uint32_t cell_count = CellCount(args.geometry);
  const ChunkRun run = RunOfBlock(args.candidates.chunk_capacity);
  LaneThreshold threshold = {kNoKey, 0};
  uint32_t lane = kNoLane;
  uint32_t table = kNoTable;
  for (uint32_t chunk_index = run.begin; chunk_index < run.end; ++chunk_index) {
    const SelectChunk chunk = args.candidates.chunks[chunk_index];
    if (chunk.lane == kNoLane) continue;
    const ThreadSlots slots = SlotsOfThread(chunk);
    uint32_t cells[kSlotsPerThread];
    LoadCells(chunk, args.geometry, slots, cells);
    __syncthreads();  // what the chunk before kept in shared memory has been read
    if (chunk.lane != lane) {
      lane = chunk.lane;
      threshold =
          LaneDigits(args.candidates, scratch.digits, lane)
              .Find(kDigitCount - 1, shared.digits,
                    chunk_index == args.candidates.lanes[lane].chunk_begin, args.selection.counts);
    }
    if (chunk.table != table) {
      table = chunk.table;
      ClassifyCells(scratch.keys + size_t{table} * cell_count, cell_count, threshold,
                    shared.cell_classes);
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
    KeepClasses(classes, chunk_index, scratch.classes, shared.digits.words);
  }
}

__global__ void EmitSlotsKernel(PqSelectArgs args, CellScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  const LaneThreshold threshold =
      LaneDigits(args.candidates, scratch.digits, chunk.lane).Progress(kDigitCount - 1);
  EmitSelectedSlots(chunk, args.candidates.lanes[chunk.lane], threshold, scratch.classes,
                    args.selection, Shared<DigitShared>().words);
}

// The lane's cells are divided among as many blocks as it has tables, on average.
dim3 CellBlocks(const PqSelectArgs& args) {
  constexpr uint32_t kMost = 8;
  const uint32_t lanes = args.candidates.lane_capacity;
  if (lanes == 0) return dim3(0);
  return dim3(Larger(1u, Smaller(kMost, (args.table_capacity + lanes - 1) / lanes)), lanes);
}

PqSelectShape ShapeOf(const PqSelectArgs& args) {
  return {args.geometry, args.group_size, args.candidates.lane_capacity,
          args.candidates.chunk_capacity, args.table_capacity};
}

KernelStatus SelectByCells(const PqSelectArgs& args, Stream stream) {
  const PqSelectShape shape = ShapeOf(args);
  const CellScratch scratch = CutCellScratch(shape, args.scratch);
  const dim3 runs(ChunkBlocks(args.candidates.chunk_capacity));
  const LaunchShape cells = {CellBlocks(args), kChunkThreads, sizeof(CellShared)};
  const LaunchShape digits = {CellBlocks(args), kChunkThreads, sizeof(DigitShared)};
  // The counts of cells and of digits are neighbours.
  KernelStatus status =
      Clear(scratch.tokens, CellTokensBytes(shape) + DigitBinsBytes(shape.lane_capacity), stream);
  if (status.ok()) {
    status =
        Launch(CountCellsKernel, {runs, kChunkThreads, sizeof(CountShared)}, stream, args, scratch);
  }
  if (status.ok() && ReadsNormalisers(args.rule, args.group_size)) {
    status = Launch(NormaliseCellsKernel, cells, stream, args, scratch);
  }
  if (status.ok()) status = Launch(FindCellKeysKernel, cells, stream, args, scratch);
  for (uint32_t digit = 1; status.ok() && digit < kDigitCount; ++digit) {
    status = Launch(CountCellDigitsKernel, digits, stream, args, scratch, digit);
  }
  if (status.ok()) {
    status = Launch(ClassifySlotsKernel, {runs, kChunkThreads, sizeof(ClassifyShared)}, stream,
                    args, scratch);
  }
  if (!status.ok()) return status;
  return Launch(EmitSlotsKernel,
                {dim3(args.candidates.chunk_capacity), kChunkThreads, sizeof(DigitShared)}, stream,
                args, scratch);
}

}  // namespace

size_t PqSelectScratchBytes(const PqSelectShape& shape) {
  if (HasCells(shape.geometry)) return CellScratchBytes(shape);
  return ScoreSelectScratchBytes({shape.group_size, shape.lane_capacity, shape.chunk_capacity});
}

KernelStatus PqSelect(const PqSelectArgs& args, Stream stream) {
  if (!IsValid(args.geometry) || !HasSelect(args.geometry) || args.group_size == 0 ||
      args.group_size > kMaxSelectGroup || args.candidates.lane_capacity > kMaxLanes ||
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
