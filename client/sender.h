// Sender: takes the rows of finished steps to the sidecar, on a thread of its own.
//
// Rows are kept until they are acknowledged, and sent again after UNAVAILABLE; positions make a repeat
// harmless. What follows a failure of a sequence is not sent: the failure stays until it is told.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_SENDER_H_
#define PQCACHED_CLIENT_SENDER_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "client/handles.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

// Rows of one layer, packed.
struct KeptRows {
  uint32_t layer = 0;
  LayerShape shape;
  pqc_dtype key_dtype = PQC_F32;
  pqc_dtype value_dtype = PQC_F32;
  std::vector<std::byte> keys = {};    // [tokens, kv_heads, key_dim]
  std::vector<std::byte> values = {};  // [tokens, kv_heads, value_dim]
};

// What one step leaves to be done for one sequence: a roll-back, new rows, or both in this order.
struct Handover {
  static constexpr uint64_t kNoRollBack = UINT64_MAX;
  std::shared_ptr<SequenceState> sequence;  // shared with its handle, which may be closed before
  uint64_t roll_back_to = kNoRollBack;
  uint64_t first_position = 0;
  uint64_t token_count = 0;
  std::vector<KeptRows> layers;  // every stored layer, or none when token_count is 0
};

class Sender {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Sender(Remote& remote);
  // What is not acknowledged is forgotten.
  ~Sender();

  // Takes the step's rows over. Never waits.
  void Add(std::vector<Handover> handovers);

  // Waits until there is room for another step.
  pqc_status WaitForRoom(Clock::time_point deadline);
  // Waits until everything of the sequence is stored; forgets its failure when it has told it.
  pqc_status Flush(const SequenceState& sequence, Clock::time_point deadline);
  // The failure of the sequence's rows, when there is one; it stays.
  pqc_status Check(const SequenceState& sequence);
  // Waits until at most `token_count` of the handed in tokens are missing.
  pqc_status WaitStored(const SequenceState& sequence, uint64_t token_count,
                        Clock::time_point deadline);
  // Where the tokens that were handed in end; false when none is on its way.
  bool HandedInEnd(const SequenceState& sequence, uint64_t* end);
  // Of a sequence that is dropped.
  void Forget(const SequenceState& sequence);

 private:
  struct Failure {
    pqc_status status = PQC_OK;
    std::string text;
  };
  struct Progress {
    std::deque<std::shared_ptr<Handover>> waiting;  // the first may be in flight
    uint64_t end = 0;                               // of the tokens handed in
    Failure failure;
  };
  using Batch = std::vector<std::shared_ptr<Handover>>;

  void Run();
  Batch TakeBatchLocked();
  void RollBack(Batch* batch);
  void Send(Batch batch);
  // Ends the first handover of its sequence.
  void Settle(const Handover& handover, pqc_status status, const char* text);
  pqc_status ReportLocked(const Progress& progress) const;

  Remote& remote_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::map<const SequenceState*, Progress> sequences_;  // until they are dropped
  const SequenceState* last_taken_ = nullptr;
  uint64_t waiting_bytes_ = 0;
  uint64_t waiting_count_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_SENDER_H_
