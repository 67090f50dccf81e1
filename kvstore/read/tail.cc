#include "kvstore/read/tail.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <new>

#include "kernels/attend/attend.h"
#include "kernels/attend/merge.h"
#include "kernels/base/check.h"
#include "kernels/select/exact/exact_score.h"
#include "kvstore/read/indexes/clusters.h"
#include "kvstore/read/layer_ops.h"

namespace pqcached::kvstore {
namespace {

// Clusters of one segment.
struct SegmentClusters {
  ClusterView view;
  uint32_t first_position = 0;  // of slot 0
  uint32_t first_cluster = 0;   // counted over all segments
  uint32_t visible_end = 0;     // slots from it on are not of this sequence

  // Positions of the visible slots that have clusters.
  PositionRange positions() const {
    return {first_position + view.slots.begin, first_position + visible_end};
  }
};

// The work area of one kv head.
struct TailWork {
  // Cuts the parts from `base`; null only counts the bytes.
  TailWork(const LayerView& view, size_t clusters, std::byte* base) {
    const auto take = [this, base](size_t bytes) {
      std::byte* const part = base == nullptr ? nullptr : base + total_bytes;
      total_bytes += PaddedBytes(bytes);
      return part;
    };
    const LayerShape& shape = view.shape;
    const size_t group = shape.group_size();
    segments = take(view.segments.size() * sizeof(SegmentClusters));
    spans = take(view.segments.size() * sizeof(kernels::RowSpan));
    left = {reinterpret_cast<uint32_t*>(take(clusters * sizeof(uint32_t))), clusters};
    estimated = {reinterpret_cast<uint32_t*>(take(clusters * sizeof(uint32_t))), clusters};
    logits = {reinterpret_cast<float*>(take(group * clusters * sizeof(float))), group * clusters};
    output = {reinterpret_cast<float*>(take(group * shape.value_dim * sizeof(float))),
              group * shape.value_dim};
    lse = {reinterpret_cast<float*>(take(group * sizeof(float))), group};
    const size_t bytes =
        std::max(kernels::ExactScoreScratchBytes(shape.group_size(), shape.key_dim),
                 kernels::AttendScratchBytes(AttendShapeOf(shape)));
    kernel = {take(bytes), bytes};
  }

  std::byte* segments = nullptr;
  std::byte* spans = nullptr;
  std::span<uint32_t> left;       // tokens of each cluster that are estimated
  std::span<uint32_t> estimated;  // clusters with such tokens
  std::span<float> logits;        // [G, estimated clusters]
  std::span<float> output;        // [G, value_dim]
  std::span<float> lse;           // [G]
  std::span<std::byte> kernel;
  size_t total_bytes = 0;
};

// The estimate of one kv head.
class Tail {
 public:
  Tail(const kernels::Exec& exec, const LayerView& view, const TailArgs& args, uint32_t kv_head,
       std::byte* scratch)
      : exec_(exec),
        shape_(view.shape),
        args_(args),
        kv_head_(kv_head),
        work_(view, args.most_clusters, scratch) {
    auto* const begin = reinterpret_cast<SegmentClusters*>(work_.segments);
    auto* const spans = reinterpret_cast<kernels::RowSpan*>(work_.spans);
    for (const SegmentView& segment : view.segments) {
      if (segment.index_data == nullptr) continue;
      const ClusterView clusters(*segment.index_data, args.index, shape_.row_bytes,
                                 view.stored_head(kv_head));
      if (cluster_count_ + clusters.count > work_.left.size() || clusters.count == 0) continue;
      const uint32_t visible_end =
          std::clamp(segment.token_count, clusters.slots.begin, clusters.slots.end);
      new (begin + segment_count_)
          SegmentClusters{clusters, segment.first_position, cluster_count_, visible_end};
      new (spans + segment_count_++) kernels::RowSpan{
          .rows = clusters.rows, .token_count = clusters.count, .first_position = cluster_count_};
      std::copy_n(clusters.tokens, clusters.count, &work_.left[cluster_count_]);
      cluster_count_ += clusters.count;
    }
    segments_ = {begin, segment_count_};
    spans_ = {spans, segment_count_};
  }

  void Add() {
    LeaveOutOthers();
    LeaveOutSelected();
    const uint32_t count = ListEstimated();
    if (count == 0) return;
    Score(count);
    Merge(count);
  }

 private:
  void LeaveOut(const SegmentClusters& segment, uint32_t slot) {
    const uint32_t cluster = segment.view.ClusterOf(slot);
    if (cluster >= segment.view.count) return;
    uint32_t& left = work_.left[segment.first_cluster + cluster];
    if (left > 0) --left;
  }

  // Leaves out the tokens that are no candidates, and slots of other sequences.
  void LeaveOutOthers() {
    for (const SegmentClusters& segment : segments_) {
      for (uint32_t slot = segment.visible_end; slot < segment.view.slots.end; ++slot) {
        LeaveOut(segment, slot);
      }
      const PositionRange all = segment.positions();
      uint32_t begin = all.begin;  // of the tokens that may be none
      const auto leave_out_until = [&](uint32_t end) {
        for (uint32_t position = begin; position < std::min(end, all.end); ++position) {
          LeaveOut(segment, position - segment.first_position);
        }
      };
      for (const PositionRange& range : args_.candidates) {
        leave_out_until(range.begin);
        begin = std::max(begin, range.end);
      }
      leave_out_until(all.end);
    }
  }

  void LeaveOutSelected() {
    const size_t count = args_.positions.size() / shape_.kv_heads;
    const SegmentClusters* segment = segments_.data();
    const SegmentClusters* const end = segment + segments_.size();
    for (const uint32_t position : args_.positions.subspan(kv_head_ * count, count)) {
      while (segment != end && position >= segment->positions().end) ++segment;
      if (segment == end) return;
      if (position < segment->positions().begin) continue;
      LeaveOut(*segment, position - segment->first_position);
    }
  }

  uint32_t ListEstimated() {
    uint32_t count = 0;
    for (uint32_t cluster = 0; cluster < cluster_count_; ++cluster) {
      if (work_.left[cluster] > 0) work_.estimated[count++] = cluster;
    }
    return count;
  }

  void Score(uint32_t count) {
    const uint32_t group = shape_.group_size();
    const size_t query_floats = size_t{group} * shape_.key_dim;
    const std::span<float> logits = work_.logits.first(size_t{group} * count);
    kernels::ExactScoresAt(exec_,
                           {.dtype = shape_.dtype,
                            .key_dim = shape_.key_dim,
                            .row_stride_bytes = shape_.row_bytes,
                            .group_size = group,
                            .token_count = count,
                            .scale = shape_.scale,
                            .queries = args_.queries.subspan(kv_head_ * query_floats, query_floats),
                            .spans = spans_,
                            .positions = work_.estimated.first(count),
                            .score_stride = count,
                            .scores = logits,
                            .scratch = work_.kernel});
    CapLogits(shape_, logits);
    for (uint32_t i = 0; i < count; ++i) {
      const float more = std::log(static_cast<float>(work_.left[work_.estimated[i]]));
      for (uint32_t head = 0; head < group; ++head) logits[head * size_t{count} + i] += more;
    }
  }

  void Merge(uint32_t count) {
    const uint32_t group = shape_.group_size();
    kernels::AttendScored(exec_, {.shape = AttendShapeOf(shape_),
                                  .spans = spans_,
                                  .positions = work_.estimated.first(count),
                                  .output = work_.output,
                                  .lse = work_.lse,
                                  .scratch = work_.kernel,
                                  .logits = work_.logits.first(size_t{group} * count)});
    const size_t floats = size_t{group} * shape_.value_dim;
    const std::span<float> output = args_.output.subspan(kv_head_ * floats, floats);
    const std::span<float> lse = args_.lse.subspan(size_t{kv_head_} * group, group);
    const kernels::Partial partials[] = {{.output = output.data(), .lse = lse.data()},
                                         {.output = work_.output.data(), .lse = work_.lse.data()}};
    kernels::MergePartials(exec_, {.query_count = group,
                                   .value_dim = shape_.value_dim,
                                   .partials = partials,
                                   .output = output,
                                   .lse = lse});
  }

  const kernels::Exec& exec_;
  const LayerShape& shape_;
  const TailArgs& args_;
  const uint32_t kv_head_;
  TailWork work_;
  size_t segment_count_ = 0;
  uint32_t cluster_count_ = 0;
  std::span<const SegmentClusters> segments_;
  std::span<const kernels::RowSpan> spans_;
};

}  // namespace

size_t MostClusters(const LayerView& view, const IndexDescriptor& index) {
  size_t clusters = 0;
  for (const SegmentView& segment : view.segments) {
    if (segment.index_data == nullptr) continue;
    clusters += ClusterSizesOf(index).MostClusters(segment.index_data->slot_capacity);
  }
  return clusters;
}

size_t TailScratchBytes(const LayerView& view, size_t most_clusters) {
  return TailWork(view, most_clusters, nullptr).total_bytes;
}

void AddTail(const kernels::Exec& exec, const LayerView& view, const TailArgs& args,
             const ParallelFor& parallel, std::span<std::byte> scratch) {
  const size_t bytes = TailScratchBytes(view, args.most_clusters);
  PQC_CHECK(parallel.worker_count * bytes <= scratch.size());
  const auto add = [&](uint32_t kv_head, uint32_t worker) {
    Tail(exec, view, args, kv_head, scratch.data() + worker * bytes).Add();
  };
  parallel.run(view.shape.kv_heads, std::cref(add));
}

}  // namespace pqcached::kvstore
