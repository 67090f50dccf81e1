// Handover holds the roll-back and the new rows that one step has to send for one sequence. The
// Sender lends it, and reuses it with its memory after the sidecar has acknowledged it.
//
// Thread-compatible.
#ifndef PQCACHED_CLIENT_STEP_HANDOVER_H_
#define PQCACHED_CLIENT_STEP_HANDOVER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/base/remote.h"
#include "client/base/token_names.h"
#include "client/local/step_slots.h"
#include "client/step/handles.h"
#include "pqcached/client.h"

namespace pqcached::client {

// Packed rows of one layer: their place in the memory of their handover.
struct CopiedRows {
  uint32_t layer = 0;
  LayerShape shape;
  DType key_dtype = DType::kF32;
  DType value_dtype = DType::kF32;
  uint64_t keys_begin = 0;    // [tokens, kv_heads, key_dim]
  uint64_t values_begin = 0;  // [tokens, kv_heads, value_dim]
};

// Staging references of the rows of one layer in a message that does not carry the rows inline.
struct SentRows {
  StagingPlace keys;
  StagingPlace values;
};

// A roll-back, new rows, or both in this order; rows of a prefill come alone.
struct Handover {
  static constexpr uint64_t kNoRollBack = UINT64_MAX;
  std::shared_ptr<SequenceState> sequence;  // shared with its handle, which may be closed earlier
  uint64_t roll_back_to = kNoRollBack;
  uint64_t first_position = 0;
  uint64_t token_count = 0;
  bool is_prefill = false;         // the rows are ingested instead of appended
  std::vector<CopiedRows> layers;  // every stored layer; empty when token_count is 0
  StepSlots::Range staged;         // staging memory of the rows; without it, they are in `own`
  std::vector<std::byte> own;
  uint64_t row_bytes = 0;
  OwnedNames names;  // recorded with the rows

  std::shared_ptr<Handover> next;  // in the same queue

  bool rolls_back() const { return roll_back_to != kNoRollBack; }
  // Copies the tokens [begin, begin + token_count) of all layers: into staging if there is room,
  // else into `own`.
  void CopyTokens(std::span<const RowBlock> blocks, const CacheState& cache, uint64_t begin,
                  StepSlots& slots);
  // Fills in the row blocks of a message. `places` has one entry per layer and must live as long as
  // the blocks; empty means that the rows are sent inline.
  void Describe(std::span<SentRows> places, std::span<RowBlock> blocks) const;
  // Resets the object to its initial state, but keeps memory that is worth reusing.
  void Clear();
};

// Queue of the handovers of one sequence, in order.
class HandoverQueue {
 public:
  HandoverQueue() = default;
  HandoverQueue(const HandoverQueue&) = delete;
  HandoverQueue& operator=(const HandoverQueue&) = delete;
  // Pops one by one: a chain of destructors would recurse as deep as the queue is long.
  ~HandoverQueue() {
    while (!empty()) Pop();
  }

  bool empty() const { return first_ == nullptr; }
  const std::shared_ptr<Handover>& front() const { return first_; }
  void Push(std::shared_ptr<Handover> handover);
  std::shared_ptr<Handover> Pop();

 private:
  std::shared_ptr<Handover> first_;  // shared with the message in flight
  Handover* last_ = nullptr;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_HANDOVER_H_
