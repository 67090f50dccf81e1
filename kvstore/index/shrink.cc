#include "kvstore/index/shrink.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

}  // namespace

absl::StatusOr<bool> ShrinkSegment(const Cache& cache, Sequence& sequence,
                                   const Snapshot& snapshot) {
  for (const SegmentEntry& entry : snapshot.list->segments) {
    if (!CanShrink(snapshot, entry)) continue;
    if (!HasRoom(cache, entry)) return false;
    auto copy = CopySegment(cache, entry);
    if (!copy.ok()) return false;  // another call took the room
    const uint64_t segment_id = entry.rows->segment_id();
    std::vector<SegmentEntry> replacement;
    replacement.push_back(*std::move(copy));
    RETURN_IF_ERROR(sequence.ReplaceSegments({&segment_id, 1}, std::move(replacement)));
    return true;
  }
  return false;
}

void ShrinkSegments(const Cache& cache, const std::shared_ptr<Sequence>& sequence) {
  // While another build begins or a writer appends, the segments that it has read must stay.
  const auto lease = WriteLease::TakeShort(sequence, SteadyTime::Now());
  while (lease.ok()) {
    const auto snapshot = sequence->Peek();
    if (!snapshot.ok()) return;
    const auto shrunk = ShrinkSegment(cache, *sequence, **snapshot);
    if (!shrunk.ok() || !*shrunk) return;
  }
}

}  // namespace pqcached::kvstore
