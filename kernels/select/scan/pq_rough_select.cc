// Selection without cells in one pass over the codes. A sample estimates the threshold, the pass
// lists tokens with rough scores from there on, and tokens near the k-th are scored exactly. Error
// bounds prove that the selection is right; where they do not suffice, nothing is selected and the
// caller scores every token.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/select/cells/pq_cells.h"
#include "kernels/select/pq_select_paths.h"
#include "kernels/select/scan/pq_rough.h"
#include "kernels/select/value_select.h"

namespace pqcached::kernels {

#if defined(PQCACHED_X86) || defined(PQCACHED_NEON)
namespace {

// Smallest number of candidates for which a sample pays off.
constexpr uint32_t kMinCandidates = 4096;

// The sample consists of runs of slots spread over the candidates; the runs are longer when sums
// are estimated too.
constexpr uint32_t kSampleRuns = 64;
constexpr uint32_t kRunSlots = 32;
constexpr uint32_t kRunSlotsOfLanes = 64;

// Tokens that are listed, as a multiple of k: sampled scores must not be exact. Once more, when a
// sample misled and the tokens are listed again.
constexpr float kListedShare = 1.5f;
constexpr float kListedAgainShare = 3.0f;

// Number of tokens that are scored exactly at a time.
constexpr uint32_t kChunkSlots = kSampleRuns * kRunSlotsOfLanes;

constexpr uint32_t kMaxPlanes = 16;
constexpr uint32_t kMaxLanes = 16;
constexpr uint32_t kListSlack = 64;  // see RoughList

#if defined(PQCACHED_X86)
const LossOps& LossOpsFor(const Exec& exec) {
  return exec.level >= Level::kAvx512Vbmi ? kLossOpsAvx512Vbmi : kLossOpsAvx2;
}

#else
const LossOps& LossOpsFor(const Exec&) { return kLossOpsNeon; }
#endif

uint32_t LaneCount(uint32_t head_count) {
  return head_count == 1 ? 1 : head_count <= 4 ? 4 : head_count <= 8 ? 8 : 16;
}

class RoughSelection {
 public:
  RoughSelection(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan)
      : exec_(exec),
        loss_ops_(LossOpsFor(exec)),
        cell_ops_(CellOpsFor(exec)),
        args_(args),
        plan_(plan),
        geometry_(args.geometry),
        k_(static_cast<uint32_t>(args.positions.size())),
        lanes_(LaneCount(plan.head_count)),
        table_floats_(TableFloats(args.geometry)) {
    ScratchCutter scratch(args.scratch);
    const size_t candidates = plan.candidate_count;
    tables_ = scratch.Take<float>(plan.codebook_count * plan.head_count * table_floats_);
    entries_ = scratch.Take<float>(plan.codebook_count * lanes_ * table_floats_ + kListSlack);
    positions_ = scratch.Take<uint32_t>(candidates + kListSlack);
    scores_ = scratch.Take<float>(candidates + kListSlack);
    band_ = scratch.Take<uint32_t>(candidates + kListSlack);
    exact_ = scratch.Take<float>(candidates + kListSlack);
    work_ = scratch.Take<float>(candidates);
    chunk_ = scratch.Take<uint8_t>(kMaxPlanes * kChunkSlots);
    chunk_slots_ = scratch.Take<uint32_t>(kChunkSlots + kListSlack);
    PrefetchSample();
    FillTables(args, plan, tables_);
  }

  // Returns false when nothing is selected.
  bool Run() {
    if (lanes_ > 1) return SelectByLanes();
    GatherSample();
    return ListByLoss() && list_.count >= k_ && SelectByExactLosses();
  }

 private:
  static constexpr float kRounding = 1e-5f;  // relative rounding error of products

  struct Band {
    float low;  // lowest and highest rough score of tokens that may be in or out
    float high;
  };

  const float* Entries(uint32_t codebook) const {
    return entries_.data() + codebook * lanes_ * table_floats_;
  }

  RoughSlots SlotsOf(const PqSpan& span) const {
    return {.subspace_count = geometry_.subspace_count,
            .bits = geometry_.bits,
            .nibble_planes = HasNibblePlanes(geometry_),
            .planes = span.planes + span.slot_begin,
            .plane_stride = span.plane_stride,
            .slot_count = span.slot_end - span.slot_begin,
            .first_position = span.first_position + span.slot_begin};
  }

  // Scores `count` slots of the chunk from `begin` on; up to kListSlack more scores are
  // overwritten.
  void ScoreChunk(uint32_t codebook, uint32_t begin, uint32_t count, float* scores) {
    PqSpan span;
    span.planes = chunk_.data() + begin;
    span.plane_stride = kChunkSlots;
    span.slot_end = count;
    if (lanes_ == 1) {
      PqScore(exec_, {.geometry = geometry_,
                      .group_size = 1,
                      .span = span,
                      .tables = tables_.subspan(codebook * table_floats_, table_floats_),
                      .logits = {scores, count}});
      return;
    }
    RoughList list = {
        .positions = chunk_slots_.data(), .scores = scores, .losses = nullptr, .count = 0};
    ListLanes(SlotsOf(span), {lanes_, lane_rule_, Entries(codebook)},
              std::numeric_limits<float>::lowest(), lane_sums_, list);
    PQC_CHECK(list.count == count);
  }

  // Calls visit(span, slot, count) for the runs of slots in the sample.
  template <typename Visit>
  void ForEachRun(Visit visit) const {
    const uint32_t run_slots = lanes_ == 1 ? kRunSlots : kRunSlotsOfLanes;
    const uint32_t stride = plan_.candidate_count / kSampleRuns;
    uint32_t run_count = 0;
    uint32_t next = 0;   // candidate at which the next run begins
    uint32_t first = 0;  // candidate at which the span begins
    for (const PqSpan& span : args_.spans) {
      const uint32_t end = first + (span.slot_end - span.slot_begin);
      for (; next < end && run_count < kSampleRuns; next += stride, ++run_count) {
        // Runs start at whole cache lines where possible.
        const uint32_t slot = span.slot_begin + (next - first);
        const uint32_t begin = std::max(slot / run_slots * run_slots, span.slot_begin);
        visit(span, begin, std::min({run_slots, stride, span.slot_end - begin}));
      }
      first = end;
    }
  }

  // Prefetches the sample's codes.
  void PrefetchSample() const {
    ForEachRun([&](const PqSpan& span, uint32_t slot, uint32_t count) {
      const uint8_t* from = span.planes + slot;
      for (uint32_t plane = 0; plane < PlaneCount(geometry_); ++plane) {
        for (uint32_t i = 0; i < count; i += 64) __builtin_prefetch(from + i);
        from += span.plane_stride;
      }
    });
  }

  // Copies the sample's codes to chunk_.
  void GatherSample() {
    ForEachRun([&](const PqSpan& span, uint32_t slot, uint32_t count) {
      const uint8_t* from = span.planes + slot;
      uint8_t* to = chunk_.data() + sampled_;
      for (uint32_t plane = 0; plane < PlaneCount(geometry_); ++plane) {
        std::copy(from, from + count, to);
        from += span.plane_stride;
        to += kChunkSlots;
      }
      runs_[run_count_++] = {.codebook = span.codebook, .slot_count = count};
      sampled_ += count;
    });
  }

  // Scores the sample and stores the scores in exact_.
  void ScoreSample() {
    uint32_t begin = 0;
    for (uint32_t i = 0; i < run_count_;) {
      const uint32_t codebook = runs_[i].codebook;
      uint32_t count = 0;
      for (; i < run_count_ && runs_[i].codebook == codebook; ++i) count += runs_[i].slot_count;
      ScoreChunk(codebook, begin, count, exact_.data() + begin);
      begin += count;
    }
  }

  // Computes a score that about `share` * k tokens reach unless the sample is far off. Returns
  // false when most tokens reach it.
  bool FindLeast(float share, float& least) {
    ScoreSample();
    const uint32_t sampled = sampled_;
    const float rank = static_cast<float>(k_) * static_cast<float>(sampled) /
                       static_cast<float>(plan_.candidate_count);
    const float widened = share * rank + 4.0f * std::sqrt(rank) + 8.0f;
    if (widened > 0.75f * static_cast<float>(sampled)) return false;
    least = FindThreshold(exec_, {exact_.data(), sampled}, static_cast<uint32_t>(widened),
                          work_.subspan(0, sampled))
                .value;
    return true;
  }

  // Lists tokens for one head.
  bool ListByLoss() {
    float least = 0.0f;
    if (!FindLeast(kListedShare, least)) return false;
    float magnitude = 0.0f;
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      float largest = 0.0f;
      float all = 0.0f;
      for (uint32_t subspace = 0; subspace < geometry_.subspace_count; ++subspace) {
        const EntryRange range = RangeOf(codebook, subspace);
        largest += range.largest;
        all += std::max(std::abs(range.least), std::abs(range.largest));
      }
      top_ = codebook == 0 ? largest : std::max(top_, largest);
      magnitude = std::max(magnitude, all);
    }
    // Half a unit of rounding for every sub-space and for the codebook's offset, plus float
    // rounding.
    const auto terms = static_cast<float>(geometry_.subspace_count + 1);
    max_error_ = 0.5f * terms + 0.05f;
    loss_scale_ = (static_cast<float>(kMaxLoss) - 2.0f * max_error_) / (top_ - least);
    const float float_error = 4.0f * terms * 6e-8f * magnitude * loss_scale_;
    // The comparisons are also false for NaN, which occurs when all scores are equal.
    if (!(float_error < 0.2f) || !(loss_scale_ < 1e30f)) return false;
    max_error_ += float_error;
    auto* const losses = reinterpret_cast<uint8_t*>(entries_.data());
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      FillLosses(codebook, losses + codebook * table_floats_);
    }
    list_ = {.positions = positions_.data(),
             .scores = nullptr,
             .losses = reinterpret_cast<uint8_t*>(scores_.data()),
             .count = 0};
    for (const PqSpan& span : args_.spans) {
      if (span.slot_begin == span.slot_end) continue;
      loss_ops_.list(SlotsOf(span), losses + span.codebook * table_floats_, list_);
    }
    return true;
  }

  EntryRange RangeOf(uint32_t codebook, uint32_t row) const {
    const float* entries = tables_.data() + codebook * plan_.head_count * table_floats_ +
                           row * CentroidCount(geometry_);
    return cell_ops_.range(entries, CentroidCount(geometry_));
  }

  void FillLosses(uint32_t codebook, uint8_t* losses) const {
    const float* entries = tables_.data() + codebook * table_floats_;
    const uint32_t centroid_count = CentroidCount(geometry_);
    float offset = top_;
    for (uint32_t j = 0; j < geometry_.subspace_count; ++j) offset -= RangeOf(codebook, j).largest;
    const float offset_units =
        std::min(255.0f, std::nearbyint(std::max(0.0f, offset * loss_scale_)));
    for (uint32_t j = 0; j < geometry_.subspace_count; ++j) {
      const float largest = RangeOf(codebook, j).largest;
      const float base = (j == 0 ? offset_units : 0.0f) + 0.5f;
      for (uint32_t c = 0; c < centroid_count; ++c) {
        const float loss = (largest - entries[c]) * loss_scale_ + base;
        losses[c] = static_cast<uint8_t>(static_cast<int32_t>(loss < 255.0f ? loss : 255.0f));
      }
      entries += centroid_count;
      losses += centroid_count;
    }
  }

  // Selects for several heads. A second pass has the normalisers of all tokens, which the first one
  // computed; where attention is concentrated, those of a sample are often far off.
  bool SelectByLanes() {
    lane_rule_ = args_.rule == GroupRule::kSumSoftmax   ? LaneRule::kSumOfProducts
                 : args_.rule == GroupRule::kMaxSoftmax ? LaneRule::kMaxOfProducts
                                                        : LaneRule::kMaxOfSums;
    const bool products = lane_rule_ != LaneRule::kMaxOfSums;
    if (!FillEntries(products)) return false;
    GatherSample();
    if (products) {
      std::fill(lane_sums_, lane_sums_ + kMaxLanes, 0.0);
      ScoreSample();
      ScaleBySums();
    }
    if (!FindLeast(kListedShare, least_)) return false;
    float bound = 0.0f;
    if (ListByLanes(bound)) return true;
    if (bound > 0.0f) {
      least_ = bound;
    } else if (!FindLeast(kListedAgainShare, least_)) {
      return false;
    }
    return ListByLanes(bound);
  }

  // Lists the tokens that reach least_, and selects from them. If that fails, sets `bound` to a
  // score that k tokens reach, or to 0 if it found none.
  bool ListByLanes(float& bound) {
    std::fill(lane_sums_, lane_sums_ + kMaxLanes, 0.0);
    list_ = {
        .positions = positions_.data(), .scores = scores_.data(), .losses = nullptr, .count = 0};
    for (const PqSpan& span : args_.spans) {
      if (span.slot_begin == span.slot_end) continue;
      ListLanes(SlotsOf(span), {lanes_, lane_rule_, Entries(span.codebook)}, least_, lane_sums_,
                list_);
    }
    least_ratio_ = largest_ratio_ = 1.0f;
    // The sums over all tokens differ slightly from those over the sample.
    const bool products = lane_rule_ != LaneRule::kMaxOfSums;
    if (products) ScaleBySums();
    bound = 0.0f;
    if (list_.count < k_) return false;
    const float kth =
        FindThreshold(exec_, {scores_.data(), list_.count}, k_, work_.subspan(0, list_.count))
            .value;
    // Lower than the k-th by more than rounding, so that a pass with this bound lists k tokens.
    if (products) bound = kth * least_ratio_ * (1.0f - 4.0f * kRounding);
    return SelectByExactScores({kth * (least_ratio_ / largest_ratio_) * (1.0f - kRounding),
                                kth * (largest_ratio_ / least_ratio_) * (1.0f + kRounding)});
  }

  // Scales the lanes by the inverses of their sums, and sets the ratios to the least and the
  // largest of these.
  void ScaleBySums() {
    float scales[kMaxLanes];
    for (uint32_t i = 0; i < plan_.head_count; ++i) {
      scales[i] = static_cast<float>(1.0 / lane_sums_[i]);
      least_ratio_ = i == 0 ? scales[i] : std::min(least_ratio_, scales[i]);
      largest_ratio_ = i == 0 ? scales[i] : std::max(largest_ratio_, scales[i]);
    }
    ScaleLanes(scales);
  }

  // Stores the entries of all heads adjacent: either unchanged, or as weights relative to the
  // largest entry of their sub-space, so that sums become products. Returns false when weights are
  // too far apart, or entries too large for the promised rounding.
  bool FillEntries(bool products) {
    const uint32_t centroid_count = CentroidCount(geometry_);
    const size_t codebook_floats = plan_.head_count * table_floats_;
    float magnitudes[kMaxLanes] = {};
    float distances[kMaxLanes] = {};
    for (uint32_t subspace = 0; subspace < geometry_.subspace_count; ++subspace) {
      float largest[kMaxLanes];
      for (uint32_t head = 0; head < plan_.head_count; ++head) {
        const EntryRange all = RangeOfAll(head * geometry_.subspace_count + subspace);
        magnitudes[head] += std::max(std::abs(all.least), std::abs(all.largest));
        distances[head] += all.largest - all.least;
        largest[head] = all.largest;
      }
      for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
        const float* rows = tables_.data() + codebook * codebook_floats + subspace * centroid_count;
        float* const to =
            entries_.data() + (codebook * table_floats_ + subspace * centroid_count) * lanes_;
        if (!products) {
          InterleaveLanes(rows, table_floats_, plan_.head_count, centroid_count, lanes_, to);
          continue;
        }
        for (uint32_t head = 0; head < plan_.head_count; ++head, rows += table_floats_) {
          cell_ops_.exponentials(rows, centroid_count, largest[head],
                                 work_.data() + head * centroid_count);
        }
        InterleaveLanes(work_.data(), centroid_count, plan_.head_count, centroid_count, lanes_, to);
      }
    }
    if (!products) {
      FillNeutral();
      return true;
    }
    const float limit = 256.0f / static_cast<float>(geometry_.subspace_count);
    for (uint32_t head = 0; head < plan_.head_count; ++head) {
      if (!(magnitudes[head] <= limit) || !(distances[head] <= -kMinExponent)) return false;
    }
    return true;
  }

  // Returns the range of a row of tables over all codebooks.
  EntryRange RangeOfAll(uint32_t row) const {
    EntryRange all = {.least = kEntryLimit, .largest = -kEntryLimit};
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      const EntryRange range = RangeOf(codebook, row);
      all.least = std::min(all.least, range.least);
      all.largest = std::max(all.largest, range.largest);
    }
    return all;
  }

  // Fills lanes without a head so that they never have the largest sum.
  void FillNeutral() {
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      float* to = entries_.data() + codebook * table_floats_ * lanes_;
      for (uint32_t c = 0; c < CentroidCount(geometry_); ++c, to += lanes_) {
        std::fill(to + plan_.head_count, to + lanes_, 2.0f * -kLogitLimit);
      }
    }
  }

  // Multiplies the products of every lane by its scale.
  void ScaleLanes(const float* scales) {
    for (uint32_t codebook = 0; codebook < plan_.codebook_count; ++codebook) {
      float* to = entries_.data() + codebook * table_floats_ * lanes_;
      for (uint32_t c = 0; c < CentroidCount(geometry_); ++c, to += lanes_) {
        for (uint32_t head = 0; head < plan_.head_count; ++head) to[head] *= scales[head];
      }
    }
  }

  // Scores the tokens near the k-th exactly, and selects if that decides all of them.
  bool SelectByExactScores(const Band& band) {
    const BandCount count =
        ListLaneBand(scores_.data(), list_.count, band.low, band.high, band_.data());
    if (count.above >= k_ || count.above + count.band < k_) return false;
    ValueThreshold threshold = FindExactThreshold(count);
    if (lane_rule_ != LaneRule::kMaxOfSums &&
        !(threshold.value > largest_ratio_ * least_ * (1.0f + kRounding))) {
      return false;
    }
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    constexpr float kOutOrIn[] = {-kInfinity, kInfinity};
    for (uint32_t i = 0; i < count.band; ++i) {
      scores_[band_[i]] = kOutOrIn[IsSelected(exact_[i], threshold)];
    }
    TakeLanesAbove(list_, band.high, args_.positions.data(), k_);
    return true;
  }

  bool SelectByExactLosses() {
    const int kth = loss_ops_.find(list_.losses, list_.count, k_);
    // Most rounding errors cancel: a narrow band is often sufficient.
    const int error = static_cast<int>(max_error_);
    for (int width = error; width <= 3 * error + 2; ++width) {
      const int low = std::max(kth - width, 0);
      const int high = std::min(kth + width, static_cast<int>(kMaxLoss));
      const BandCount count =
          loss_ops_.list_band(list_.losses, list_.count, static_cast<uint8_t>(low),
                              static_cast<uint8_t>(high), band_.data());
      ValueThreshold threshold = FindExactThreshold(count);
      const double loss = (double{top_} - double{threshold.value}) * double{loss_scale_};
      // Tokens outside the band must be proven to be on the assumed side of the threshold.
      if ((count.above > 0 && loss <= low - 1 + double{max_error_}) ||
          loss >= high + 1 - double{max_error_}) {
        continue;
      }
      for (uint32_t i = 0; i < count.band; ++i) {
        list_.losses[band_[i]] = static_cast<uint8_t>(IsSelected(exact_[i], threshold) - 1);
      }
      loss_ops_.take_below(list_, static_cast<uint8_t>(std::max(low, 1)), args_.positions.data(),
                           k_);
      return true;
    }
    return false;
  }

  // Returns 1 or 0 without branches, which would be unpredictable.
  static uint32_t IsSelected(float score, ValueThreshold& threshold) {
    const uint32_t is_tied = static_cast<uint32_t>(score == threshold.value) &
                             static_cast<uint32_t>(threshold.equal_quota > 0);
    threshold.equal_quota -= is_tied;
    return static_cast<uint32_t>(score > threshold.value) | is_tied;
  }

  // Returns the threshold among the band's tokens when count.above tokens are above the band.
  ValueThreshold FindExactThreshold(const BandCount& count) {
    ScoreBand(count.band);
    return FindThreshold(exec_, exact_.subspan(0, count.band), k_ - count.above,
                         work_.subspan(0, count.band));
  }

  // Scores the tokens of the band exactly, span by span.
  void ScoreBand(uint32_t count) {
    const PqSpan* span = args_.spans.data();
    for (uint32_t i = 0; i < count;) {
      const uint32_t position = positions_[band_[i]];
      while (span->slot_begin == span->slot_end ||
             position - span->first_position >= span->slot_end) {
        ++span;
      }
      uint32_t in_chunk = 0;
      for (; in_chunk < kChunkSlots && i + in_chunk < count; ++in_chunk) {
        const uint32_t slot = positions_[band_[i + in_chunk]] - span->first_position;
        if (slot >= span->slot_end) break;
        chunk_slots_[in_chunk] = slot;
      }
      const uint8_t* from = span->planes;
      uint8_t* to = chunk_.data();
      for (uint32_t plane = 0; plane < PlaneCount(geometry_); ++plane) {
        for (uint32_t j = 0; j < in_chunk; ++j) to[j] = from[chunk_slots_[j]];
        from += span->plane_stride;
        to += kChunkSlots;
      }
      ScoreChunk(span->codebook, 0, in_chunk, exact_.data() + i);
      i += in_chunk;
    }
  }

  const Exec& exec_;
  const LossOps& loss_ops_;
  const CellOps& cell_ops_;
  const PqSelectArgs& args_;
  const PqSelectPlan& plan_;
  const PqGeometry& geometry_;
  const uint32_t k_;
  const uint32_t lanes_;
  const size_t table_floats_;
  std::span<float> tables_;   // [codebook, head of the plan, TableFloats], clamped
  std::span<float> entries_;  // [codebook, subspace, code, lane]; for one head, losses as bytes
  std::span<uint32_t> positions_;  // positions of list_
  std::span<float> scores_;        // scores of list_
  std::span<uint32_t> band_;       // indices into list_
  std::span<float> exact_;         // scores of the band, or of the sample
  std::span<float> work_;
  std::span<uint8_t> chunk_;         // codes, [plane, kChunkSlots]
  std::span<uint32_t> chunk_slots_;  // [kChunkSlots + kListSlack]
  struct SampleRun {
    uint32_t codebook;
    uint32_t slot_count;
  };
  SampleRun runs_[kSampleRuns];
  uint32_t run_count_ = 0;
  uint32_t sampled_ = 0;  // total slots of the runs
  RoughList list_ = {.positions = nullptr, .scores = nullptr, .losses = nullptr, .count = 0};

  // Bytes variant: loss = (top_ - score) * loss_scale_, within max_error_.
  float top_ = 0.0f;
  float loss_scale_ = 0.0f;
  float max_error_ = 0.0f;

  // Lanes variant: the exact score is the rough one times a factor between the two ratios.
  LaneRule lane_rule_ = LaneRule::kSumOfProducts;
  float least_ = 0.0f;
  float least_ratio_ = 0.0f;
  float largest_ratio_ = 0.0f;
  double lane_sums_[kMaxLanes];
};

}  // namespace

bool SelectByRoughScores(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan) {
  if (exec.level <= Level::kPortable || plan.candidate_count < kMinCandidates ||
      plan.head_count > kMaxLanes || args.geometry.subspace_count < 2) {
    return false;
  }
  return RoughSelection(exec, args, plan).Run();
}

size_t RoughSelectScratchBytes(const PqSelectShape& shape) {
  const size_t candidates = size_t{shape.candidate_count} + kListSlack;
  const size_t table_floats = shape.codebook_count * TableFloats(shape.geometry);
  const size_t lanes = std::max(LaneCount(shape.group_size), 4u);
  return ScratchAligned(shape.group_size * table_floats * sizeof(float)) +
         ScratchAligned((lanes * table_floats + kListSlack) * sizeof(float)) +
         5 * ScratchAligned(candidates * sizeof(float)) + ScratchAligned(kMaxPlanes * kChunkSlots) +
         ScratchAligned((kChunkSlots + kListSlack) * sizeof(uint32_t));
}

#else

bool SelectByRoughScores(const Exec&, const PqSelectArgs&, const PqSelectPlan&) { return false; }
size_t RoughSelectScratchBytes(const PqSelectShape&) { return 0; }

#endif

}  // namespace pqcached::kernels
