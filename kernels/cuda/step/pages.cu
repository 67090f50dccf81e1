// Scores of pages are keys (OrderedKey) in memory, so that blocks keep maxima by atomicMax. No
// score has the key 0, which marks pages without candidates.
#include "kernels/cuda/step/pages.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/select/table_logits.cuh"
#include "kernels/cuda/step/refused.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kListThreads = 512;
constexpr uint32_t kListWarps = kListThreads / kWarpThreads;
constexpr uint32_t kMaxChunkPages = kChunkTokens / kMinPageTokens + 1;
constexpr uint32_t kNoCandidate = 0;
constexpr int32_t kNoPage = -1;

struct PageScratch {
  PartialNormaliser* partials;  // [chunk, G]
  uint32_t* keys;               // [list, page_capacity]: of the largest score, or kNoCandidate
  uint32_t page_capacity;
};

constexpr uint32_t PageCapacity(uint32_t token_capacity) {
  return token_capacity / kMinPageTokens + 1;
}

PageScratch CutPageScratch(const PageShape& shape, void* scratch) {
  ScratchParts parts(scratch);
  PageScratch cut;
  cut.page_capacity = PageCapacity(shape.token_capacity);
  cut.partials = parts.Take<PartialNormaliser>(size_t{shape.chunk_capacity} * shape.group_size);
  cut.keys = parts.Take<uint32_t>(size_t{shape.lane_capacity} * cut.page_capacity);
  return cut;
}

__host__ __device__ constexpr bool IsJoined(const SelectPagesArgs& args) {
  return args.pages.heads != HeadRule::kEach;
}

__host__ __device__ constexpr uint32_t ListCount(const SelectPagesArgs& args) {
  return IsJoined(args) ? 1 : args.seat_shape.kv_heads;
}

__host__ __device__ constexpr uint32_t GroupSize(const SelectPagesArgs& args) {
  return args.seat_shape.group_size * args.seat_shape.query_length;
}

// Returns whether scores are weights also where a kv head has one query: the order of its tokens is
// that of the logits, but heads are joined by weights.
__host__ __device__ constexpr bool JoinsWeights(const SelectPagesArgs& args) {
  return IsJoined(args) &&
         (args.rule == GroupRule::kSumSoftmax || args.rule == GroupRule::kMaxSoftmax);
}

__host__ __device__ constexpr bool UsesNormalisers(const SelectPagesArgs& args) {
  return JoinsWeights(args) || ReadsNormalisers(args.rule, GroupSize(args));
}

struct PageShared {
  NormaliseShared normalise;
  HeadNormaliser normalisers[kMaxSelectGroup];
  uint32_t keys[kMaxChunkPages];
  HeadFloats<kHeadsAtOnce> tables[kSharedTableFloats / kHeadsAtOnce];
};

// Logits of all heads, also under kMeanLogit: as on the CPU, the logits of the heads are added, not
// their tables.
template <uint32_t kHeads>
class PageLogits : public TableLogits<kHeads> {
 public:
  __device__ explicit PageLogits(const SelectPagesArgs& args)
      : TableLogits<kHeads>(args.geometry, args.tables, GroupSize(args), GroupRule::kMaxLogit,
                            Shared<PageShared>().tables[0].of) {}
};

template <uint32_t kHeads>
__global__ void __launch_bounds__(kChunkThreads)
    NormalisePageChunksKernel(SelectPagesArgs args, PageScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  PageLogits<kHeads> logits(args);
  logits.Begin(chunk);
  NormaliseChunk(logits, Shared<PageShared>().normalise,
                 scratch.partials + size_t{blockIdx.x} * GroupSize(args));
}

// One block scores the pages of one chunk of a list's lanes.
template <uint32_t kHeads>
class PageScorer {
 public:
  __device__ PageScorer(const SelectPagesArgs& args, const PageScratch& scratch)
      : args_(args), scratch_(scratch), logits_(args), list_(blockIdx.y) {}

  __device__ void Run() {
    const uint32_t head_count = IsJoined(args_) ? args_.seat_shape.kv_heads : 1;
    const uint32_t first_lane = list_ * head_count;
    const SelectLane first = args_.candidates.lanes[first_lane];
    if (blockIdx.x >= first.chunk_end - first.chunk_begin) return;
    for (uint32_t head = 0; head < head_count; ++head) {
      const SelectLane lane = args_.candidates.lanes[first_lane + head];
      AddHead(lane, args_.candidates.chunks[lane.chunk_begin + blockIdx.x], head == 0);
    }
    KeepMaxima(args_.candidates.chunks[first.chunk_begin + blockIdx.x]);
  }

 private:
  __device__ void AddHead(const SelectLane& lane, const SelectChunk& chunk, bool is_first) {
    auto& shared = Shared<PageShared>();
    __syncthreads();  // the normalisers of the head before have been read
    logits_.Begin(chunk);
    for (uint32_t head = WarpIndex(); UsesNormalisers(args_) && head < logits_.head_count();
         head += kChunkWarps) {
      const HeadNormaliser normaliser = MergeNormalisers(scratch_.partials, lane.chunk_begin,
                                                         lane.chunk_end, GroupSize(args_), head);
      if (LaneIndex() == 0) shared.normalisers[head] = normaliser;
    }
    __syncthreads();
    float values[kSlotsPerThread] = {};
    FindValues(values);
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
      values_[i] = is_first                              ? values[i]
                   : args_.pages.heads == HeadRule::kSum ? values_[i] + values[i]
                                                         : Larger(values_[i], values[i]);
    }
  }

  // Computes the scores of this thread's slots under one kv head.
  __device__ void FindValues(float (&values)[kSlotsPerThread]) {
    const HeadNormaliser* const normalisers = Shared<PageShared>().normalisers;
    const uint32_t head_count = logits_.head_count();
    HeadFloats<kHeads> of_slots[kSlotsPerThread];
    for (uint32_t first = 0; first < head_count; first += kHeads) {
      logits_.Load(first, of_slots);
      AddHeads(args_.rule, head_count, first, of_slots, normalisers, values);
    }
    if (head_count > 1 || !JoinsWeights(args_)) return;
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
      const float log_weight = values[i] - normalisers[0].max - normalisers[0].log_sum;
      values[i] = args_.rule == GroupRule::kSumSoftmax ? expf(log_weight) : log_weight;
    }
  }

  __device__ void KeepMaxima(const SelectChunk& chunk) const {
    auto& shared = Shared<PageShared>();
    for (uint32_t i = threadIdx.x; i < kMaxChunkPages; i += kChunkThreads) {
      shared.keys[i] = kNoCandidate;
    }
    __syncthreads();
    const uint32_t page_tokens = args_.pages.page_tokens;
    const uint32_t first_page = (chunk.first_position + chunk.slot_begin) / page_tokens;
    const ThreadSlots slots = SlotsOfThread(chunk);
    for (uint32_t i = 0; i < slots.count; ++i) {
      const uint32_t page = (chunk.first_position + slots.begin + i) / page_tokens;
      atomicMax(&shared.keys[page - first_page], OrderedKey(values_[i]));
    }
    __syncthreads();
    uint32_t* const keys = scratch_.keys + size_t{list_} * scratch_.page_capacity;
    for (uint32_t i = threadIdx.x; i < kMaxChunkPages; i += kChunkThreads) {
      if (shared.keys[i] == kNoCandidate || first_page + i >= scratch_.page_capacity) continue;
      atomicMax(&keys[first_page + i], shared.keys[i]);
    }
  }

  const SelectPagesArgs& args_;
  const PageScratch& scratch_;
  PageLogits<kHeads> logits_;
  const uint32_t list_;  // also the lane where heads are not joined, and else the seat
  float values_[kSlotsPerThread];
};

template <uint32_t kHeads>
__global__ void __launch_bounds__(kChunkThreads)
    ScorePagesKernel(SelectPagesArgs args, PageScratch scratch) {
  PageScorer<kHeads>(args, scratch).Run();
}

struct PageListShared {
  uint32_t words[kListWarps];
  RadixShared radix;
};

// One block writes one list.
class PageLister {
 public:
  __device__ PageLister(const SelectPagesArgs& args, const PageScratch& scratch)
      : args_(args),
        pages_(args.pages),
        seat_(blockIdx.x / ListCount(args)),
        item_(args.items[seat_]),
        keys_(scratch.keys + size_t{blockIdx.x} * scratch.page_capacity),
        page_count_((item_.window_end + pages_.page_tokens - 1) / pages_.page_tokens),
        key_count_(Smaller(page_count_, scratch.page_capacity)) {}

  __device__ void Run() {
    auto& shared = Shared<PageListShared>();
    LaneThreshold threshold = {kNoKey, 0};
    if (const uint32_t count = SelectCount(); count > 0) {
      threshold = FindKthKey(
          key_count_, count, [this](uint32_t page) { return keys_[page]; },
          [this](uint32_t page) { return Competes(page) ? 1u : 0u; }, shared.radix, shared.words);
    }
    WriteList(threshold);
  }

 private:
  // Returns whether [begin, end) has tokens of a page, not all of them excluded.
  __device__ bool HasToken(uint32_t begin, uint32_t end, uint32_t page) const {
    begin = Larger(begin, page * pages_.page_tokens);
    end = Smaller(end, page * pages_.page_tokens + pages_.page_tokens);
    if (begin >= end) return false;
    uint32_t count = end - begin;
    for (uint32_t i = 0; i < args_.excluded_capacity; ++i) {
      const uint32_t gap_begin = Larger(args_.excluded[i].begin, begin);
      const uint32_t gap_end = Smaller(args_.excluded[i].end, end);
      if (gap_begin < gap_end) count -= gap_end - gap_begin;
    }
    return count > 0;
  }

  __device__ bool IsListed(uint32_t page) const {
    return (pages_.with_sink && HasToken(0, item_.sink_end, page)) ||
           (pages_.with_window && HasToken(item_.window_begin, item_.window_end, page));
  }

  __device__ bool Competes(uint32_t page) const {
    return page < key_count_ && keys_[page] != kNoCandidate && !IsListed(page);
  }

  // Returns how many of the pages that compete are selected.
  __device__ uint32_t SelectCount() const {
    auto& shared = Shared<PageListShared>();
    const uint32_t lane_index = IsJoined(args_) ? seat_ * args_.seat_shape.kv_heads : blockIdx.x;
    const SelectLane lane = args_.candidates.lanes[lane_index];
    uint32_t tokens = 0;
    for (uint32_t i = lane.chunk_begin + threadIdx.x; i < lane.chunk_end; i += kListThreads) {
      tokens += args_.candidates.chunks[i].slot_end - args_.candidates.chunks[i].slot_begin;
    }
    uint32_t competing = 0;
    for (uint32_t page = threadIdx.x; page < key_count_; page += kListThreads) {
      competing += Competes(page) ? 1 : 0;
    }
    tokens = BlockSum(tokens, shared.words);
    competing = BlockSum(competing, shared.words);
    if (lane.k >= tokens) return competing;
    const uint32_t wanted = lane.k / pages_.page_tokens + (lane.k % pages_.page_tokens > 0 ? 1 : 0);
    return Smaller(wanted, competing);
  }

  __device__ void WriteList(LaneThreshold threshold) const {
    auto& shared = Shared<PageListShared>();
    const size_t list =
        size_t{args_.seats[seat_].item} * ListCount(args_) + blockIdx.x % ListCount(args_);
    int32_t* const to = pages_.lists + list * pages_.capacity;
    uint32_t above_count = 0;  // listed pages and those above the threshold, so far
    uint32_t equal_count = 0;
    for (uint32_t first = 0; first < page_count_; first += kListThreads) {
      const uint32_t page = first + threadIdx.x;
      const uint32_t key = Competes(page) ? keys_[page] : kNoCandidate;
      const bool above =
          (key != kNoCandidate && key > threshold.key) || (page < page_count_ && IsListed(page));
      const bool equal = key == threshold.key;
      const uint32_t packed = (above ? 1u << 16 : 0u) | (equal ? 1u : 0u);
      const uint32_t before = BlockSumBefore(packed, shared.words);
      const uint32_t above_before = above_count + (before >> 16);
      const uint32_t equal_before = equal_count + (before & 0xFFFFu);
      const uint32_t at = above_before + Smaller(equal_before, threshold.equal_quota);
      if ((above || (equal && equal_before < threshold.equal_quota)) && at < pages_.capacity) {
        to[at] = static_cast<int32_t>(page);
      }
      const uint32_t total = BlockSum(packed, shared.words);
      above_count += total >> 16;
      equal_count += total & 0xFFFFu;
    }
    const uint32_t needed = above_count + Smaller(equal_count, threshold.equal_quota);
    const uint32_t length = Smaller(needed, pages_.capacity);
    for (uint32_t i = length + threadIdx.x; i < pages_.capacity; i += kListThreads) to[i] = kNoPage;
    if (threadIdx.x != 0) return;
    pages_.lengths[args_.seats[seat_].item] = length;  // the same for all lists of the item
    if (needed > pages_.capacity) Refuse(args_.refused_capacity, args_.seats[seat_].item);
  }

  const SelectPagesArgs& args_;
  const PageLists& pages_;
  const uint32_t seat_;
  const PageItem item_;
  const uint32_t* const keys_;
  const uint32_t page_count_;  // pages of the item
  const uint32_t key_count_;   // of them, those that may have candidates
};

__global__ void ListPagesKernel(SelectPagesArgs args, PageScratch scratch) {
  if (args.seats[blockIdx.x / ListCount(args)].item == kEmptySeat) return;
  PageLister(args, scratch).Run();
}

bool IsValidPages(const SelectPagesArgs& args) {
  const uint64_t lanes = uint64_t{args.seat_shape.seat_capacity} * args.seat_shape.kv_heads;
  const uint64_t group = uint64_t{args.seat_shape.group_size} * args.seat_shape.query_length;
  const uint32_t tokens = args.pages.page_tokens;
  return IsValid(args.geometry) && HasSelect(args.geometry) && group > 0 &&
         group <= kMaxSelectGroup && lanes <= kMaxLanes && lanes <= args.candidates.lane_capacity &&
         (tokens == 16 || tokens == 32 || tokens == 64) && args.pages.heads <= HeadRule::kSum;
}

PageShape PageShapeOf(const SelectPagesArgs& args) {
  return {GroupSize(args), args.candidates.lane_capacity, args.candidates.chunk_capacity,
          args.token_capacity};
}

template <uint32_t kHeads>
KernelStatus ScorePages(const SelectPagesArgs& args, const PageScratch& scratch,
                        uint32_t list_count, Stream stream) {
  if (UsesNormalisers(args)) {
    const KernelStatus status =
        Launch(NormalisePageChunksKernel<kHeads>,
               {dim3(args.candidates.chunk_capacity), kChunkThreads, sizeof(PageShared)}, stream,
               args, scratch);
    if (!status.ok()) return status;
  }
  return Launch(ScorePagesKernel<kHeads>,
                {dim3(args.lane_chunk_capacity, list_count), kChunkThreads, sizeof(PageShared)},
                stream, args, scratch);
}

}  // namespace

size_t PageScratchBytes(const PageShape& shape) {
  return ScratchPart(size_t{shape.chunk_capacity} * shape.group_size * sizeof(PartialNormaliser)) +
         ScratchPart(size_t{shape.lane_capacity} * PageCapacity(shape.token_capacity) *
                     sizeof(uint32_t));
}

KernelStatus SelectPages(const SelectPagesArgs& args, Stream stream) {
  if (!IsValidPages(args) || args.scratch_bytes < PageScratchBytes(PageShapeOf(args))) {
    return {cudaErrorInvalidValue};
  }
  const uint32_t list_count = args.seat_shape.seat_capacity * ListCount(args);
  if (list_count == 0) return {};
  const PageScratch scratch = CutPageScratch(PageShapeOf(args), args.scratch);
  KernelStatus status =
      Clear(scratch.keys, size_t{list_count} * scratch.page_capacity * sizeof(uint32_t), stream);
  if (status.ok()) {
    status = LoadsHeadsAtOnce(args.geometry, GroupSize(args))
                 ? ScorePages<kHeadsAtOnce>(args, scratch, list_count, stream)
                 : ScorePages<1>(args, scratch, list_count, stream);
  }
  if (!status.ok()) return status;
  return Launch(ListPagesKernel, {dim3(list_count), kListThreads, sizeof(PageListShared)}, stream,
                args, scratch);
}

}  // namespace pqcached::kernels::cuda
