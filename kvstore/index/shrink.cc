#include "kvstore/index/shrink.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "kvstore/index/merge.h"
#include "kvstore/memory/free_map.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kUnusedParts = 8;  // a segment is shrunk when one of these parts is unused

bool CanShrink(const Snapshot& snapshot, const SegmentEntry& entry) {
  const uint32_t capacity = entry.rows->slot_capacity();
  return entry.closed && entry.token_end <= snapshot.token_count() &&
         RoundUpToBlock(entry.token_end - entry.rows->first_position()) <
             capacity - capacity / kUnusedParts &&
         entry.rows->user_count() <= 1 && entry.indexes.size() == snapshot.list->indexes.size() &&
         std::all_of(entry.indexes.begin(), entry.indexes.end(),
                     [](const auto& index) { return index != nullptr && index->all_ready(); });
}

bool HasRoom(const Cache& cache, const SegmentEntry& entry) {
  const uint32_t capacity = RoundUpToBlock(entry.token_end - entry.rows->first_position());
  std::vector<size_t> sizes_bytes;
  SegmentRows::AppendSizes(cache.layers, capacity, sizes_bytes);
  for (const auto& index : entry.indexes) {
    SegmentIndex::AppendSizes(cache.layers, index->index(), capacity, sizes_bytes);
  }
  return cache.pool->free_map().Fits(ExtentDemand(sizes_bytes));
}

struct Shrunk {
  uint64_t segment_id = 0;  // of the segment that the copy replaces
  SegmentEntry copy;
};

// Copies the first segment that can be shrunk, if there is room; nothing otherwise.
std::optional<Shrunk> CopyFirst(const Cache& cache, const Snapshot& snapshot) {
  for (const SegmentEntry& entry : snapshot.list->segments) {
    if (!CanShrink(snapshot, entry) || !HasRoom(cache, entry)) continue;
    auto copy = CopySegment(cache, entry);
    if (!copy.ok()) return std::nullopt;  // another call took the room
    return Shrunk{.segment_id = entry.rows->segment_id(), .copy = *std::move(copy)};
  }
  return std::nullopt;
}

absl::Status Replace(Sequence& sequence, Shrunk shrunk) {
  std::vector<SegmentEntry> replacement;
  replacement.push_back(std::move(shrunk.copy));
  return sequence.ReplaceSegments({&shrunk.segment_id, 1}, std::move(replacement));
}

}  // namespace

absl::StatusOr<bool> ShrinkSegment(const Cache& cache, Sequence& sequence,
                                   const Snapshot& snapshot) {
  auto shrunk = CopyFirst(cache, snapshot);
  if (!shrunk.has_value()) return false;
  RETURN_IF_ERROR(Replace(sequence, *std::move(shrunk)));
  return true;
}

void ShrinkSegments(const Cache& cache, const std::shared_ptr<Sequence>& sequence) {
  while (true) {
    const auto snapshot = sequence->Peek();
    // A rebuild codes the segments that it has read.
    if (!snapshot.ok() || sequence->rebuilding().load()) return;
    auto shrunk = CopyFirst(cache, **snapshot);
    if (!shrunk.has_value()) return;
    // While another build begins or a writer appends, the segments that it has read must stay.
    const auto lease = WriteLease::TakeShort(sequence, SteadyTime::Now());
    const auto newest = sequence->Peek();
    if (!lease.ok() || !newest.ok() || sequence->rebuilding().load() ||
        (*newest)->list != (*snapshot)->list || !Replace(*sequence, *std::move(shrunk)).ok()) {
      return;
    }
  }
}

}  // namespace pqcached::kvstore
