#include "kvstore/read/range_ops.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <new>

#include "kernels/attend/attend_range.h"
#include "kernels/attend/merge.h"
#include "kernels/base/check.h"
#include "kernels/base/finite.h"

namespace pqcached::kvstore {
namespace {

// Rows are split between threads when there are fewer than this many tasks per thread, so that no
// thread waits long for the last one.
constexpr uint32_t kTasksPerThread = 2;
// Fewer rows than this are not worth a task of their own.
constexpr uint64_t kMinPieceRows = 1024;
constexpr uint32_t kMaxPieces = 64;

size_t Aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The division of a call into tasks, and the scratch of each worker.
struct RangePlan {
  RangePlan(const LayerView& view, const RangeLayerArgs& args, uint32_t workers)
      : group(view.shape.group_size()),
        value_dim(view.shape.value_dim),
        tile_tokens(std::min(kernels::kMaxRangeHeads / group, args.query.query_length)),
        tile_count((args.query.query_length + tile_tokens - 1) / tile_tokens) {
    for (const PositionRange& range : args.rows) row_count += range.end - range.begin;
    tiles = view.shape.kv_heads * tile_count;
    const uint32_t wanted = (kTasksPerThread * workers + tiles - 1) / tiles;
    if (workers > 1 && wanted > 1) {
      pieces = static_cast<uint32_t>(
          std::clamp<uint64_t>(row_count / kMinPieceRows, 1, std::min(wanted, kMaxPieces)));
    }
    const size_t heads = size_t{tile_tokens} * group;
    span_bytes = Aligned((view.segments.size() + args.rows.size()) * sizeof(kernels::RowSpan));
    query_bytes = Aligned(heads * view.shape.key_dim * sizeof(float));
    output_bytes = Aligned(heads * value_dim * sizeof(float));
    lse_bytes = Aligned(heads * sizeof(float));
    kernel_bytes = Aligned(kernels::AttendRangeScratchBytes(KernelShape(view.shape, tile_tokens)));
  }

  kernels::AttendRangeShape KernelShape(const LayerShape& shape, uint32_t tokens) const {
    return {.dtype = shape.dtype,
            .key_dim = shape.key_dim,
            .value_dim = shape.value_dim,
            .row_stride_bytes = shape.row_bytes,
            .group_size = group,
            .token_count = tokens};
  }
  size_t worker_bytes() const {
    return span_bytes + query_bytes + output_bytes + lse_bytes + kernel_bytes;
  }
  size_t partial_bytes() const { return output_bytes + lse_bytes; }
  // Results of the tasks, when rows are split.
  size_t partials_bytes() const {
    return pieces > 1 ? size_t{tiles} * pieces * partial_bytes() : 0;
  }

  uint32_t group, value_dim, tile_tokens, tile_count;
  uint32_t tiles = 0;   // of all kv heads
  uint32_t pieces = 1;  // of the rows
  uint64_t row_count = 0;
  size_t span_bytes, query_bytes, output_bytes, lse_bytes, kernel_bytes;
};

struct TileResult {
  float* output;
  float* lse;
};

// Work on one call.
class RangeRun {
 public:
  RangeRun(const kernels::Exec& exec, const LayerView& view, const RangeLayerArgs& args,
           const RangePlan& plan, std::span<std::byte> scratch, uint32_t workers)
      : exec_(exec),
        view_(view),
        args_(args),
        plan_(plan),
        scratch_(scratch.data()),
        partials_(scratch.data() + workers * plan.worker_bytes()) {}

  // Attends with one tile to one piece of the rows.
  void Attend(uint32_t task, uint32_t worker) {
    const uint32_t tile = task / plan_.pieces, piece = task % plan_.pieces;
    std::byte* own = Own(worker);
    const uint32_t tokens = TokensOf(tile);
    const size_t heads = size_t{tokens} * plan_.group;
    const std::span<const float> queries =
        GatherTile(tile, reinterpret_cast<float*>(own + plan_.span_bytes));
    const TileResult to = plan_.pieces > 1 ? PartialOf(task) : OwnPartial(worker);
    kernels::AttendRange(
        exec_,
        {.shape = plan_.KernelShape(view_.shape, tokens),
         .scale = view_.shape.scale,
         .softcap = view_.shape.softcap,
         .query_position = static_cast<uint32_t>(args_.query.query_position) + FirstTokenOf(tile),
         .queries = queries,
         .spans = SpansOf(KvHeadOf(tile), plan_.row_count * piece / plan_.pieces,
                          plan_.row_count * (piece + 1) / plan_.pieces, own),
         .output = {to.output, heads * plan_.value_dim},
         .lse = {to.lse, heads},
         .scratch = {own + plan_.worker_bytes() - plan_.kernel_bytes, plan_.kernel_bytes}});
    if (plan_.pieces == 1) StoreTile(tile, to);
  }

  // Merges the pieces of one tile.
  void Merge(uint32_t tile, uint32_t worker) {
    std::array<kernels::Partial, kMaxPieces> partials;
    for (uint32_t piece = 0; piece < plan_.pieces; ++piece) {
      const TileResult partial = PartialOf(tile * plan_.pieces + piece);
      partials[piece] = {partial.output, partial.lse};
    }
    const TileResult to = OwnPartial(worker);
    const uint32_t heads = TokensOf(tile) * plan_.group;
    kernels::MergePartials(exec_, {.query_count = heads,
                                   .value_dim = plan_.value_dim,
                                   .partials = {partials.data(), plan_.pieces},
                                   .output = {to.output, size_t{heads} * plan_.value_dim},
                                   .lse = {to.lse, heads}});
    StoreTile(tile, to);
  }

  uint32_t bad_query_head() const { return bad_query_head_.load(std::memory_order_relaxed); }

 private:
  uint32_t KvHeadOf(uint32_t tile) const { return tile / plan_.tile_count; }
  uint32_t FirstTokenOf(uint32_t tile) const { return tile % plan_.tile_count * plan_.tile_tokens; }
  uint32_t TokensOf(uint32_t tile) const {
    return std::min(plan_.tile_tokens, args_.query.query_length - FirstTokenOf(tile));
  }
  std::byte* Own(uint32_t worker) const { return scratch_ + worker * plan_.worker_bytes(); }
  TileResult PartialAt(std::byte* begin) const {
    return {reinterpret_cast<float*>(begin), reinterpret_cast<float*>(begin + plan_.output_bytes)};
  }
  TileResult OwnPartial(uint32_t worker) const {
    return PartialAt(Own(worker) + plan_.span_bytes + plan_.query_bytes);
  }
  TileResult PartialOf(uint32_t task) const {
    return PartialAt(partials_ + task * plan_.partial_bytes());
  }

  std::span<const float> GatherTile(uint32_t tile, float* to) {
    const uint32_t key_dim = view_.shape.key_dim, first = FirstTokenOf(tile);
    const uint32_t first_head = KvHeadOf(tile) * plan_.group;
    float* next = to;
    for (uint32_t token = first; token < first + TokensOf(tile); ++token) {
      for (uint32_t head = first_head; head < first_head + plan_.group; ++head) {
        args_.query.Copy(token, head, key_dim, next);
        if (!kernels::AllFinite({next, key_dim}))
          bad_query_head_.store(head, std::memory_order_relaxed);
        next += key_dim;
      }
    }
    return {to, next};
  }

  // Writes rows [begin, end) of the ranges, counted from the first range's begin, as spans.
  std::span<const kernels::RowSpan> SpansOf(uint32_t kv_head, uint64_t begin, uint64_t end,
                                            std::byte* scratch) const {
    auto* const spans = reinterpret_cast<kernels::RowSpan*>(scratch);
    size_t count = 0;
    uint64_t first = 0;  // row number of the range's begin
    for (const PositionRange& range : args_.rows) {
      const uint64_t last = first + (range.end - range.begin);
      const auto from = static_cast<uint32_t>(range.begin + std::max(begin, first) - first);
      const auto to = static_cast<uint32_t>(range.begin + std::min(end, last) - first);
      if (begin < last && first < end) count += AddSpans(kv_head, {from, to}, spans + count);
      first = last;
    }
    return {spans, count};
  }

  size_t AddSpans(uint32_t kv_head, PositionRange range, kernels::RowSpan* spans) const {
    size_t count = 0;
    for (const SegmentView& segment : view_.segments) {
      const uint32_t begin = std::max(range.begin, segment.first_position);
      const uint32_t end = std::min(range.end, segment.first_position + segment.token_count);
      if (segment.first_position >= range.end) break;
      if (begin >= end) continue;
      new (spans + count++)
          kernels::RowSpan{.rows = segment.rows[kv_head] +
                                   size_t{begin - segment.first_position} * view_.shape.row_bytes,
                           .token_count = end - begin,
                           .first_position = begin};
    }
    return count;
  }

  void StoreTile(uint32_t tile, const TileResult& from) const {
    const uint32_t first = FirstTokenOf(tile), first_head = KvHeadOf(tile) * plan_.group;
    size_t row = 0;
    for (uint32_t token = first; token < first + TokensOf(tile); ++token) {
      for (uint32_t head = first_head; head < first_head + plan_.group; ++head, ++row) {
        args_.out.Store(token, head, from.output + row * plan_.value_dim, plan_.value_dim,
                        from.lse[row]);
      }
    }
  }

  const kernels::Exec& exec_;
  const LayerView& view_;
  const RangeLayerArgs& args_;
  const RangePlan& plan_;
  std::byte* const scratch_;
  std::byte* const partials_;
  std::atomic<uint32_t> bad_query_head_ = kNoQueryHead;
};

}  // namespace

uint32_t AttendRangeLayer(const kernels::Exec& exec, const LayerView& view,
                          const RangeLayerArgs& args, const ParallelFor& parallel,
                          ReadScratch& scratch) {
  PQC_CHECK(view.shape.group_size() <= kernels::kMaxRangeHeads);
  const RangePlan plan(view, args, parallel.worker_count);
  RangeRun run(exec, view, args, plan,
               scratch.Bytes(parallel.worker_count * plan.worker_bytes() + plan.partials_bytes()),
               parallel.worker_count);
  const auto attend = [&](uint32_t task, uint32_t worker) { run.Attend(task, worker); };
  parallel.run(plan.tiles * plan.pieces, std::cref(attend));  // a copy would allocate
  if (plan.pieces > 1) {
    const auto merge = [&](uint32_t tile, uint32_t worker) { run.Merge(tile, worker); };
    parallel.run(plan.tiles, std::cref(merge));
  }
  return run.bad_query_head();
}

}  // namespace pqcached::kvstore
