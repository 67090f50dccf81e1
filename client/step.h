// A step: what pqc_step points at. One thread at a time, but for the attention that runs beside.
#ifndef PQCACHED_CLIENT_STEP_H_
#define PQCACHED_CLIENT_STEP_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "client/handles.h"
#include "client/handover.h"
#include "client/local/read.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

using StepClock = std::chrono::steady_clock;

struct GpuState;

struct StepItem {
  std::shared_ptr<SequenceState> sequence;  // shared with its handle
  bool holds = false;                       // sequence->in_step is this step's
  uint64_t query_position = 0;
  uint32_t query_length = 1;
  uint64_t query_begin = 0;  // in packed tensors
  uint64_t handed_in = 0;    // where the tokens of the sequence ended when the step began
  Pinned pinned;             // local path
  std::optional<ScratchPool::Loan> scratch;
};

// A selection and what it points at.
struct StepSelection {
  pqc_selection selection{};
  std::vector<pqc_token_range> excluded;
  kvstore::Selection terms;
};

// A checked call about one layer.
struct LayerCall {
  pqc_step* step = nullptr;
  uint32_t layer = 0;
  LayerShape shape;
  TensorView queries;  // [query tokens of all items, query_heads, key_dim]
  const StepSelection* selection = nullptr;
  float* output = nullptr;  // attention only; on the device in a step on a GPU
  float* lse = nullptr;
  uint32_t* counts = nullptr;
};

}  // namespace pqcached::client

// Used again with its memory (StepPool), so that steps do not allocate once they are under way.
struct pqc_step {
  pqc_step() = default;
  pqc_step(const pqc_step&) = delete;
  pqc_step& operator=(const pqc_step&) = delete;
  ~pqc_step() { Clear(); }
  // Lets the sequences go; waits for what runs beside.
  void Clear();

  std::shared_ptr<pqcached::client::ClientState> client;      // shared with its handle
  std::shared_ptr<const pqcached::client::CacheState> cache;  // of all items
  std::vector<pqcached::client::StepItem> items;
  uint64_t query_tokens = 0;
  bool has_selection = false;
  pqcached::client::StepSelection selection;  // of calls without one
  pqcached::client::StepClock::time_point deadline;

  // On a GPU: whose steps exclude each other, and whether its side has begun this one.
  std::shared_ptr<pqcached::client::GpuState> gpu;  // shared with its handle; null on the CPU
  void* stream = nullptr;
  bool gpu_begun = false;

  // Of the call under way.
  pqcached::client::LayerCall call;
  pqcached::client::StepSelection call_selection;  // that it brought
  std::vector<uint32_t> counts;                    // per item
  std::vector<uint64_t> begins;                    // of the items' positions, and the end
  std::vector<pqcached::client::RowBlock> blocks;
  std::vector<std::shared_ptr<pqcached::client::Handover>> handovers;  // per item

  // The attention that runs beside.
  std::mutex mutex;
  std::condition_variable finished;
  bool begun = false;
  bool running = false;
  pqc_status beside_status = PQC_OK;
  pqcached::client::RefusalBuffer beside_error;
};

namespace pqcached::client {

// Steps of one client that wait to be used again. Thread-safe.
class StepPool {
 public:
  std::unique_ptr<pqc_step> Lend();
  void Return(std::unique_ptr<pqc_step> step);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<pqc_step>> idle_;
};

// Ends a step.
struct StepReturner {
  void operator()(pqc_step* step) const;
};
using OwnedStep = std::unique_ptr<pqc_step, StepReturner>;

}  // namespace pqcached::client

namespace pqcached::client {

// Checks what every call about a layer is given, and fills step->call. `selection` may be null.
pqc_status ReadLayerCall(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                         const pqc_selection* selection);

// Copies a selection so that it needs nothing of the caller's.
pqc_status CopySelection(const pqc_selection* from, const CacheState& cache, StepSelection* to);

// Tells the sidecar, once, that the prefill of a live index is over, and waits until its first layer
// can be selected from. The only call that a step waits for.
pqc_status EndPrefill(const pqc_step& step, const kvstore::Selection& terms, const StepItem& item);

// Waits until the rows that a selection needs of an item are stored, and, with a layer, until their
// codes are there. Swaps item.pinned for a newer image where that is needed.
pqc_status WaitReady(const pqc_step& step, const kvstore::Selection& terms, const uint32_t* layer,
                     StepItem* item);

// How many tokens are selected of an item; no rows are read for it.
pqc_status CountSelected(StepItem& item, const kvstore::Selection& terms, uint32_t* count);

// Puts "items[i]: " in front of the thread's last error.
// Reports a refused selection of a step, whose items name their query positions themselves.
pqc_status FailStep(const kvstore::Refusal& refusal);

pqc_status UnderItem(size_t item, pqc_status status);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_H_
