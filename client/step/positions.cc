// Steps that attend to positions which the engine gives.
#include <algorithm>
#include <span>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/step/read_backend.h"
#include "client/step/step.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

constexpr uint32_t kMaxListCapacity = kvstore::kMaxSequenceTokens;
constexpr int32_t kPadding = -1;

// The caller's lists, [items, list_count], after a check of the struct.
class ListReader {
 public:
  ListReader(const pqc_position_lists& lists, const std::vector<StepItem>& items)
      : lists_(lists), items_(items) {}

  size_t list_count() const { return items_.size() * lists_.list_count; }

  // Reads the positions of one list, in the caller's order. Sets *ascending, which a list with
  // logits must be.
  pqc_status Read(size_t list, PositionList* positions, bool* ascending) const {
    const size_t begin = list * lists_.capacity;
    const int32_t* from = lists_.positions + begin;
    uint32_t length = lists_.capacity;
    if (lists_.lengths) {
      length = lists_.lengths[list];
      if (length > lists_.capacity) {
        return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("lists.lengths[%zu]", list),
                    "%u, must be at most lists.capacity, %u", length, lists_.capacity);
      }
    } else {
      length = static_cast<uint32_t>(std::find(from, from + length, kPadding) - from);
    }
    const uint64_t end = items_[list / lists_.list_count].query_position;
    *ascending = true;
    for (uint32_t i = 0; i < length; ++i) {
      if (from[i] < 0 || static_cast<uint32_t>(from[i]) >= end) {
        return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("lists.positions[%zu]", begin + i),
                    "%d, must be at least 0 and below the item's query_position, %llu", from[i],
                    LongLong{end});
      }
      if (i == 0 || from[i] > from[i - 1]) continue;
      *ascending = false;
      if (!lists_.logits) continue;
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("lists.positions[%zu]", begin + i),
                  "%d after %d, must ascend within a list that has logits", from[i], from[i - 1]);
    }
    // Numbers of the signed and the unsigned type may share memory.
    *positions = {reinterpret_cast<const uint32_t*>(from), length};
    return PQC_OK;
  }

 private:
  const pqc_position_lists& lists_;
  const std::vector<StepItem>& items_;
};

pqc_status CheckLists(const pqc_position_lists& lists, const LayerShape& shape) {
  if (lists.list_count != 1 && lists.list_count != shape.kv_heads &&
      lists.list_count != shape.query_heads) {
    return Fail(PQC_INVALID_ARGUMENT, "lists.list_count",
                "%u, must be 1, kv_heads, %u, or query_heads, %u", lists.list_count, shape.kv_heads,
                shape.query_heads);
  }
  if (lists.capacity > kMaxListCapacity) {
    return Fail(PQC_INVALID_ARGUMENT, "lists.capacity", "%u, must be at most %u", lists.capacity,
                kMaxListCapacity);
  }
  if (lists.capacity > 0 && !lists.positions) {
    return Fail(PQC_INVALID_ARGUMENT, "lists.positions", "must not be NULL");
  }
  return PQC_OK;
}

// Copies a list in ascending order without repetitions to `*next`, and moves that behind it.
PositionList Sorted(PositionList list, std::vector<uint32_t>::iterator* next) {
  const auto begin = *next;
  const auto end = std::copy(list.begin(), list.end(), begin);
  std::sort(begin, end);
  *next = std::unique(begin, end);
  return {begin, *next};
}

// Reads the lists into step->lists, [items, lists per item]. Unordered ones are copied.
pqc_status ReadLists(const pqc_position_lists& lists, pqc_step* step) {
  RETURN_IF_ERROR(CheckLists(lists, step->call.shape));
  const ListReader reader(lists, step->items);
  size_t unordered = 0;
  PositionList list;
  bool ascending = false;
  for (size_t i = 0; i < reader.list_count(); ++i) {
    RETURN_IF_ERROR(reader.Read(i, &list, &ascending));
    if (!ascending) unordered += list.size();
  }
  const size_t copies = lists.list_count == 1 ? step->call.shape.kv_heads : 1;
  step->sorted_positions.resize(unordered);
  step->lists.clear();
  auto next = step->sorted_positions.begin();
  for (size_t i = 0; i < reader.list_count(); ++i) {
    RETURN_IF_ERROR(reader.Read(i, &list, &ascending));
    if (!ascending) list = Sorted(list, &next);
    step->lists.insert(step->lists.end(), copies, list);
  }
  step->call.lists = step->lists.data();
  step->call.lists_per_item = static_cast<uint32_t>(lists.list_count * copies);
  return PQC_OK;
}

// Waits until the rows of all lists are stored.
pqc_status WaitForLists(const LayerCall& call) {
  for (size_t i = 0; i < call.step->items.size(); ++i) {
    uint32_t needed = 0;
    for (const PositionList& list : ListsOf(call, call.step->items[i])) {
      if (!list.empty()) needed = std::max(needed, list.back() + 1);
    }
    RETURN_IF_ERROR(WaitForTokens(*call.step, i, needed));
  }
  return PQC_OK;
}

// Attends on the GPU, where the contents of the lists are: the host checks the struct only.
pqc_status AttendOnDevice(const pqc_position_lists& lists, pqc_step* step,
                          const pqc_step_attention* out) {
  LayerCall& call = step->call;
  RETURN_IF_ERROR(CheckLists(lists, call.shape));
  if (lists.list_count != 1 && lists.list_count != call.shape.kv_heads) {
    return Fail(PQC_UNIMPLEMENTED, "lists.list_count",
                "%u, a list per query head; on a GPU must be 1 or kv_heads, %u", lists.list_count,
                call.shape.kv_heads);
  }
  RETURN_IF_ERROR(ReadStepOut(out, &call));
  RETURN_IF_ERROR(CheckNoCounts(call));
  return step->gpu->AttendPositions(call, lists);
}

}  // namespace

pqc_status AttendPositionsInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                 const pqc_position_lists* caller_lists, pqc_step_attention* out) {
  if (!step) return Fail(PQC_INVALID_ARGUMENT, "step", "must not be NULL");
  pqc_position_lists lists;
  RETURN_IF_ERROR(ReadStruct(caller_lists, "lists", &lists));
  RETURN_IF_ERROR(ReadLayerCall(step, layer, queries, lists));
  LayerCall& call = step->call;
  if (step->gpu) return AttendOnDevice(lists, step, out);
  RETURN_IF_ERROR(ReadLists(lists, step));
  RETURN_IF_ERROR(ReadStepOut(out, &call));
  pqc_status status = WaitForLists(call);
  if (status == PQC_OK) status = step->client->reads->StepAttendPositions(call);
  if (status != PQC_OK) return AdviseInStep(status, step->no_wait, /*ended=*/false);
  for (size_t i = 0; call.counts && i < step->items.size(); ++i) {
    call.counts[i] = 0;
    for (const PositionList& list : ListsOf(call, step->items[i])) {
      call.counts[i] = std::max(call.counts[i], static_cast<uint32_t>(list.size()));
    }
  }
  return PQC_OK;
}

}  // namespace pqcached::client
