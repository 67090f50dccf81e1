// Handover: what one step leaves to be done for one sequence. It is lent by the Sender and used again,
// with its memory, when the sidecar has acknowledged it.
//
// Thread-compatible.
#ifndef PQCACHED_CLIENT_HANDOVER_H_
#define PQCACHED_CLIENT_HANDOVER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/handles.h"
#include "client/local/step_slots.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

// Rows of one layer, packed: where they begin in the memory of their handover.
struct KeptRows {
  uint32_t layer = 0;
  LayerShape shape;
  pqc_dtype key_dtype = PQC_F32;
  pqc_dtype value_dtype = PQC_F32;
  uint64_t keys_begin = 0;    // [tokens, kv_heads, key_dim]
  uint64_t values_begin = 0;  // [tokens, kv_heads, value_dim]
};

// How a message tells of the rows of one layer: places of staging, or the bytes themselves.
struct SentRows {
  StagingPlace keys;
  StagingPlace values;
};

// A roll-back, new rows, or both in this order.
struct Handover {
  static constexpr uint64_t kNoRollBack = UINT64_MAX;
  std::shared_ptr<SequenceState> sequence;  // shared with its handle, which may be closed before
  uint64_t roll_back_to = kNoRollBack;
  uint64_t first_position = 0;
  uint64_t token_count = 0;
  std::vector<KeptRows> layers;  // every stored layer, or none when token_count is 0
  StepSlots::Range staged;       // where the rows lie, or else
  std::vector<std::byte> own;
  uint64_t row_bytes = 0;

  std::shared_ptr<Handover> next;  // in its queue

  bool rolls_back() const { return roll_back_to != kNoRollBack; }
  // Copies the tokens [begin, begin + token_count) of all layers: into staging when there is room.
  void Keep(std::span<const RowBlock> blocks, const CacheState& cache, uint64_t begin,
            StepSlots& slots);
  // The rows for a message. `places`: one per layer, in use as long as the blocks; empty: inline.
  void Describe(std::span<SentRows> places, std::span<RowBlock> blocks) const;
  // As it was made, but for memory that is worth keeping.
  void Clear();
};

// Handovers of one sequence, in order.
class HandoverQueue {
 public:
  HandoverQueue() = default;
  HandoverQueue(const HandoverQueue&) = delete;
  HandoverQueue& operator=(const HandoverQueue&) = delete;
  // One by one: a chain of destructors would be as deep as the queue is long.
  ~HandoverQueue() {
    while (!empty()) Pop();
  }

  bool empty() const { return first_ == nullptr; }
  const std::shared_ptr<Handover>& front() const { return first_; }
  void Push(std::shared_ptr<Handover> handover);
  std::shared_ptr<Handover> Pop();

 private:
  std::shared_ptr<Handover> first_;  // shared with the message under way
  Handover* last_ = nullptr;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_HANDOVER_H_
