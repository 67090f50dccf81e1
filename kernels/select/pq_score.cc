#include "kernels/select/pq_score.h"

#include "kernels/base/group_rule.h"

namespace pqcached::kernels {
namespace {

// Slots per block, so that logits and codes stay in the L1 cache across the sub-spaces.
constexpr uint32_t kBlockSlots = 2048;
constexpr uint32_t kMaxCentroidCount = 256;

template <bool kFirst, typename CodeOf>
void AddEntries(const float* table, const uint8_t* plane, uint32_t slot_count, CodeOf code_of,
                float* logits) {
  for (uint32_t slot = 0; slot < slot_count; ++slot) {
    const float entry = table[code_of(plane[slot])];
    logits[slot] = kFirst ? entry : logits[slot] + entry;
  }
}

template <bool kFirst>
void AddSubspace(const PqScoreTask& task, uint32_t subspace, const float* table, uint32_t begin,
                 uint32_t slot_count, float* logits) {
  if (!task.nibble_planes) {
    const uint8_t* plane = task.planes + subspace * task.plane_stride + begin;
    AddEntries<kFirst>(
        table, plane, slot_count, [](uint8_t byte) { return uint32_t{byte}; }, logits);
    return;
  }
  const uint8_t* plane = task.planes + subspace / 2 * task.plane_stride + begin;
  if (subspace % 2 == 0) {
    AddEntries<kFirst>(
        table, plane, slot_count, [](uint8_t byte) { return byte & 15u; }, logits);
  } else {
    AddEntries<kFirst>(
        table, plane, slot_count, [](uint8_t byte) { return uint32_t{byte} >> 4u; }, logits);
  }
}

}  // namespace

void PqScorePortable(const PqScoreTask& task) {
  const uint32_t centroid_count = 1u << task.bits;
  float table[kMaxCentroidCount];
  for (uint32_t begin = 0; begin < task.slot_count; begin += kBlockSlots) {
    const uint32_t rest = task.slot_count - begin;
    const uint32_t slot_count = rest < kBlockSlots ? rest : kBlockSlots;
    for (uint32_t head = 0; head < task.group_size; ++head) {
      float* logits = task.logits + size_t{head} * task.slot_count + begin;
      for (uint32_t subspace = 0; subspace < task.subspace_count; ++subspace) {
        const size_t row = size_t{head} * task.subspace_count + subspace;
        const float* entries = task.tables + row * centroid_count;
        for (uint32_t c = 0; c < centroid_count; ++c) table[c] = ClampEntry(entries[c]);
        if (subspace == 0) {
          AddSubspace<true>(task, subspace, table, begin, slot_count, logits);
        } else {
          AddSubspace<false>(task, subspace, table, begin, slot_count, logits);
        }
      }
    }
  }
}

}  // namespace pqcached::kernels
