#include "kernels/graph/prune.h"

#include <algorithm>
#include <functional>

#include "kernels/graph/top_picker.h"

namespace pqcached::kernels::internal {
namespace {

enum CandidateState : uint8_t { kOpen, kOccluded, kChosen };

}  // namespace

Pruner::Pruner(const BuildTask& task, ScratchCutter* cutter)
    : task_(task), scorer_(RowScorerFor(task.exec, task.args.dtype)) {
  const uint32_t most = MostPruned(task.args.size);
  const uint32_t dim = task.args.size.key_dim;
  candidates_ = cutter->Take<uint32_t>(most);
  order_ = cutter->Take<uint64_t>(most);
  distances_ = cutter->Take<float>(most);
  scores_ = cutter->Take<float>(most);
  rows_ = cutter->Take<const std::byte*>(most);
  state_ = cutter->Take<uint8_t>(most);
  chosen_ = cutter->Take<uint32_t>(task.degree());
  query_ = cutter->Take<float>(dim);
  prepared_ = cutter->Take<float>(ScoreRowsQueryFloats(dim));
}

size_t Pruner::ScratchBytes(const GraphBuildSize& size) {
  const size_t most = MostPruned(size);
  return 3 * ScratchAligned(most * sizeof(uint32_t)) + 2 * ScratchAligned(most * sizeof(uint64_t)) +
         ScratchAligned(most) + ScratchAligned(size.options.degree * sizeof(uint32_t)) +
         ScratchAligned(size.key_dim * sizeof(float)) +
         ScratchAligned(ScoreRowsQueryFloats(size.key_dim) * sizeof(float));
}

void Pruner::ScoreCandidates(uint32_t key, uint32_t first, uint32_t count) {
  const GraphBuildArgs& args = task_.args;
  ConvertElements(args.dtype, task_.KeyRow(key), DType::kF32,
                  reinterpret_cast<std::byte*>(query_.data()), query_.size());
  scorer_.prepare(query_.data(), args.size.key_dim, 1.0f, prepared_.data());
  scorer_.score({.key_dim = args.size.key_dim,
                 .query = prepared_.data(),
                 .rows = rows_.data() + first,
                 .count = count - first,
                 .scores = scores_.data() + first});
}

void Pruner::SortByDistance(uint32_t key, uint32_t count) {
  const std::span<const float> norms = task_.memory.norms;
  for (uint32_t i = 0; i < count; ++i) rows_[i] = task_.KeyRow(candidates_[i]);
  ScoreCandidates(key, 0, count);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t node = candidates_[i];
    // Negated: RankKey orders by descending value.
    order_[i] = RankKey(2 * scores_[i] - norms[node] - norms[key], node);
  }
  std::sort(order_.begin(), order_.begin() + static_cast<ptrdiff_t>(count), std::greater<>());
  for (uint32_t i = 0; i < count; ++i) {
    candidates_[i] = RankId(order_[i]);
    rows_[i] = task_.KeyRow(candidates_[i]);
    distances_[i] = -RankValue(order_[i]);
    state_[i] = kOpen;
  }
}

void Pruner::MarkOccluded(uint32_t chosen, uint32_t count) {
  const std::span<const float> norms = task_.memory.norms;
  const uint32_t key = candidates_[chosen];
  ScoreCandidates(key, chosen + 1, count);
  for (uint32_t i = chosen + 1; i < count; ++i) {
    const float distance = norms[candidates_[i]] + norms[key] - 2 * scores_[i];
    if (distance < distances_[i]) state_[i] = kOccluded;
  }
}

std::span<const uint32_t> Pruner::Choose(uint32_t key, uint32_t count, uint32_t most, bool fill) {
  SortByDistance(key, count);
  uint32_t size = 0;
  for (uint32_t i = 0; i < count && size < most; ++i) {
    if (state_[i] != kOpen) continue;
    state_[i] = kChosen;
    chosen_[size++] = candidates_[i];
    if (size < most) MarkOccluded(i, count);
  }
  for (uint32_t i = 0; fill && i < count && size < most; ++i) {
    if (state_[i] != kChosen) chosen_[size++] = candidates_[i];
  }
  return chosen_.first(size);
}

}  // namespace pqcached::kernels::internal
