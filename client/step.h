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
#include "client/local/read.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

using StepClock = std::chrono::steady_clock;

struct StepItem {
  std::shared_ptr<SequenceState> sequence;  // shared with its handle
  bool holds = false;                       // sequence->in_step is this step's
  uint64_t query_position = 0;
  uint32_t query_length = 1;
  uint64_t query_begin = 0;  // in packed tensors
  uint64_t handed_in = 0;    // where the tokens of the sequence ended when the step began
  Pinned pinned;             // local path
  std::unique_ptr<ScratchPool::Loan> scratch;
};

// A selection and what it points at.
struct StepSelection {
  pqc_selection selection{};
  std::vector<pqc_token_range> excluded;
  kvstore::Selection terms;
};

}  // namespace pqcached::client

struct pqc_step {
  pqc_step() = default;
  pqc_step(const pqc_step&) = delete;
  pqc_step& operator=(const pqc_step&) = delete;
  // Lets the sequences go; waits for what runs beside.
  ~pqc_step();

  std::shared_ptr<pqcached::client::ClientState> client;      // shared with its handle
  std::shared_ptr<const pqcached::client::CacheState> cache;  // of all items
  std::vector<pqcached::client::StepItem> items;
  uint64_t query_tokens = 0;
  std::optional<pqcached::client::StepSelection> selection;
  pqcached::client::StepClock::time_point deadline;

  // The attention that runs beside.
  std::mutex mutex;
  std::condition_variable finished;
  bool begun = false;
  bool running = false;
  pqc_status beside_status = PQC_OK;
  std::string beside_error;
};

namespace pqcached::client {

// Copies a selection so that it needs nothing of the caller's.
pqc_status CopySelection(const pqc_selection* from, const CacheState& cache, StepSelection* to);

// Waits until the rows that a selection needs of an item are stored, and, with a layer, until their
// codes are there. Swaps item.pinned for a newer image where that is needed.
pqc_status WaitReady(const pqc_step& step, const kvstore::Selection& terms, const uint32_t* layer,
                     StepItem* item);

// How many tokens are selected of an item; no rows are read for it.
pqc_status CountSelected(const StepItem& item, const kvstore::Selection& terms, uint32_t* count);

// Puts "items[i]: " in front of the thread's last error.
pqc_status UnderItem(size_t item, pqc_status status);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_H_
