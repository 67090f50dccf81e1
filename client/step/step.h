// State of a step, behind a pqc_step handle. Used by one thread at a time, except for the
// asynchronous attention.
#ifndef PQCACHED_CLIENT_STEP_STEP_H_
#define PQCACHED_CLIENT_STEP_STEP_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/base/remote.h"
#include "client/local/layer_source.h"
#include "client/step/decode_state.h"
#include "client/step/device.h"
#include "client/step/handles.h"
#include "client/step/handover.h"
#include "kernels/base/mutex.h"
#include "pqcached/client.h"

namespace pqcached::client {

using StepClock = std::chrono::steady_clock;

struct StepItem {
  std::shared_ptr<SequenceState> sequence;  // shared with its handle
  bool holds = false;                       // this step has set sequence->in_step
  uint64_t query_position = 0;
  uint32_t query_length = 1;
  uint64_t query_begin = 0;      // offset in packed tensors, in query tokens
  uint64_t end_before_step = 0;  // end of the sequence's tokens when the step began
  Pinned pinned;                 // local path
  // Image that the step read before, of a worker that has ended; kept until the step ends.
  std::shared_ptr<Image> former;
  kvstore::Selection exact;  // terms that take all candidates, for PickTerms
  std::optional<kvstore::ReadScratchPool::Loan> scratch;
};

// Ascending positions without repetitions.
using PositionList = std::span<const uint32_t>;

// Where a call writes pages, and which. In a step on a GPU lists and lengths are on the device.
struct PageCall {
  kvstore::PageLists ListsOf(size_t item) const {
    return {lists + item * list_count * capacity, capacity};
  }

  kvstore::PageTerms terms;
  int32_t* lists = nullptr;  // [items, list_count, capacity]
  uint32_t list_count = 0;
  uint32_t capacity = 0;
  uint32_t* lengths = nullptr;  // [items]
};

// A checked call for one layer.
struct LayerCall {
  pqc_step* step = nullptr;
  uint32_t layer = 0;
  LayerShape shape;
  // [query tokens of all items, query_heads, key_dim]; with has_logits, in their place, the logits
  // of an attention over positions: [.., query_heads, capacity of a list].
  TensorView queries;
  bool has_logits = false;
  uint32_t window_tokens = 0;                     // of a layer of kind window
  const kvstore::Selection* selection = nullptr;  // in this layer (TermsOf)
  const kvstore::Selection* given = nullptr;      // of the caller, or of the step
  bool attends = false;                           // `out` is set
  bool decodes = false;                           // step->decode has the parts of the items
  kvstore::AttentionOut out;                      // not in a step on a GPU
  float* output = nullptr;                        // on the device, in a step on a GPU
  float* lse = nullptr;                           // likewise
  const pqc_token_range* ranges = nullptr;        // [items], of an attention over ranges
  // [items, lists_per_item], of an attention over positions: a list per kv head, or per query head.
  const PositionList* lists = nullptr;
  uint32_t lists_per_item = 0;
  const PageCall* pages = nullptr;  // of a selection of pages
  uint32_t* positions = nullptr;    // of a selection of tokens, at step->offsets
  uint32_t* counts = nullptr;
};

}  // namespace pqcached::client

// State of a step, reused with its memory (StepPool), so that steps in steady state do not
// allocate.
struct pqc_step {
  pqc_step() = default;
  pqc_step(const pqc_step&) = delete;
  pqc_step& operator=(const pqc_step&) = delete;
  ~pqc_step() { Clear(); }
  // Waits for the asynchronous attention, then releases the sequences.
  void Clear();

  std::shared_ptr<pqcached::client::ClientState> client;      // shared with its handle
  std::shared_ptr<const pqcached::client::CacheState> cache;  // the same for all items
  std::vector<pqcached::client::StepItem> items;
  uint64_t query_tokens = 0;
  bool has_selection = false;
  bool no_wait = false;              // PQC_STEP_NO_WAIT; the deadline is then the step's beginning
  bool exact_until_indexed = false;  // PQC_STEP_EXACT_UNTIL_INDEXED
  bool select_per_token = false;     // PQC_STEP_SELECT_PER_TOKEN
  bool decodes = false;              // PQC_STEP_DECODES
  pqcached::kvstore::Selection selection;  // for calls that pass no selection
  pqcached::client::StepClock::time_point deadline;

  // GPU of the step, held by one step at a time; gpu_begun is set after Begin on it succeeds.
  std::shared_ptr<pqcached::client::StepDevice> gpu;  // shared with its handle; null on the CPU
  void* stream = nullptr;
  bool gpu_begun = false;

  // Call in progress.
  pqcached::client::LayerCall call;
  pqcached::kvstore::Selection call_selection;  // selection passed with the call
  pqcached::kvstore::Selection kind_selection;  // terms of it in a layer without an index
  std::vector<uint32_t> counts;                 // per item
  std::vector<uint64_t> offsets;                // offsets of the items' positions, and the end
  pqcached::client::PageCall page_call;         // of call.pages
  std::vector<pqcached::client::PositionList> lists;  // of call.lists
  std::vector<uint32_t> sorted_positions;             // of lists that the caller passes unordered
  std::vector<pqcached::client::RowBlock> blocks;
  std::vector<pqc_row_options> names;                                  // per item, or empty
  std::vector<std::shared_ptr<pqcached::client::Handover>> handovers;  // per item
  pqcached::client::DecodeState decode;

  // Asynchronous attention (pqc_step_attend_begin).
  pqcached::base::Mutex mutex;
  pqcached::base::CondVar finished;
  bool begun = false;  // used by the calls on the step only, which are made one at a time
  bool running PQCACHED_GUARDED_BY(mutex) = false;
  pqc_status async_status PQCACHED_GUARDED_BY(mutex) = PQC_OK;
  pqcached::client::RefusalBuffer async_error PQCACHED_GUARDED_BY(mutex);
};

namespace pqcached::client {

// Pool of a client's idle steps, for reuse. Thread-safe.
class StepPool {
 public:
  std::unique_ptr<pqc_step> Lend();
  void Return(std::unique_ptr<pqc_step> step);

 private:
  base::Mutex mutex_;
  std::vector<std::unique_ptr<pqc_step>> idle_ PQCACHED_GUARDED_BY(mutex_);
};

// Clears a step and returns it to its client's pool.
struct StepReturner {
  void operator()(pqc_step* step) const;
};
using OwnedStep = std::unique_ptr<pqc_step, StepReturner>;

// Target of a step; `gpu` is set for steps on a GPU.
struct StepTarget {
  const std::shared_ptr<ClientState>& client;
  std::shared_ptr<StepDevice> gpu = nullptr;  // shared with its handle
  void* stream = nullptr;
};

// Implements pqc_step_begin and pqc_gpu_step_begin.
pqc_status BeginStep(const StepTarget& target, const pqc_step_item* caller_items,
                     uint32_t item_count, const pqc_step_options* caller_options,
                     pqc_step** caller_step);
// Implements pqc_step_check.
pqc_status CheckStep(pqc_step* step);
// Implements pqc_step_end_with. Takes the step, also when it fails.
pqc_status EndStep(pqc_step* step, const pqc_layer_rows* layers, uint32_t layer_count,
                   const uint32_t* accepted, const pqc_row_options* caller_options);

// Implement pqc_step_topk, pqc_step_topk_pages, pqc_step_attend, pqc_step_attend_range,
// pqc_step_attend_positions, pqc_step_attend_begin and pqc_step_attend_wait.
pqc_status SelectInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                        const pqc_selection* selection, pqc_step_positions* caller_out);
pqc_status SelectPagesInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                             const pqc_selection* selection, const pqc_page_options* options,
                             pqc_step_pages* caller_out);
pqc_status AttendInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                        const pqc_selection* selection, pqc_step_attention* out);
pqc_status AttendRangeInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                             const pqc_token_range* ranges, pqc_step_attention* out);
pqc_status AttendPositionsInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                 const pqc_position_lists* caller_lists, pqc_step_attention* out);
pqc_status BeginAttendInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                             const pqc_selection* selection, pqc_step_attention* out);
pqc_status WaitAttendInStep(pqc_step* step);

// Return an item's part of a call.
QueryView QueryOf(const LayerCall& call, const StepItem& item);
kvstore::LayerQuery LayerQueryOf(const QueryView& query, bool has_logits = false);
kvstore::AttentionOut OutOf(const LayerCall& call, const StepItem& item, uint32_t token = 0);
// Returns one query token of an item, at the item's query_position: the candidates of all the
// item's tokens are those of the first.
QueryView TokenQueryOf(const LayerCall& call, const StepItem& item, uint32_t token);
// Returns how many selections the call makes for an item: one for each query token, or one for all
// of them, also where those of the tokens would be equal and only the attention is wanted.
uint32_t SelectionCount(const LayerCall& call, StepItem& item, const kvstore::Selection& terms);
kvstore::TokenRange RangeOf(const LayerCall& call, const StepItem& item);
// Returns whether the call selects nothing for an item, whatever its index.
bool SkipsSelection(const LayerCall& call, const StepItem& item);
std::span<const PositionList> ListsOf(const LayerCall& call, const StepItem& item);

// Checks the arguments that every call for a layer has, and fills step->call.
pqc_status ReadLayerCall(pqc_step* step, uint32_t layer, const pqc_tensor* queries);
// Likewise for lists of positions, with logits in place of queries where the lists have them.
pqc_status ReadLayerCall(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                         const pqc_position_lists& lists);
// Plans the pages of an item in its scratch, without reading rows.
pqc_status PlanItemPages(const LayerCall& call, StepItem& item);
// Reads where the attention of the call is written.
pqc_status ReadStepOut(const pqc_step_attention* caller_out, LayerCall* call);
// Checks that a call on a GPU whose counts only the device knows has no place for them.
pqc_status CheckNoCounts(const LayerCall& call);
// Waits until the first `needed` tokens of items[i] are stored, without an index.
pqc_status WaitForTokens(pqc_step& step, size_t i, uint32_t needed);
// Reads the selection of the call, which may be null: then it is the step's.
pqc_status ReadCallSelection(pqc_step* step, const pqc_selection* selection);

// Ends the prefill of an incremental index once, before the first selection that needs it. The only
// RPC that a step waits for.
pqc_status ClosePrefill(const pqc_step& step, const kvstore::Selection& terms,
                        const StepItem& item);

// Waits until the rows that a selection needs of an item are stored, and, if a layer is given,
// until their codes are available. Replaces item.pinned by a newer image where necessary.
pqc_status WaitReady(const pqc_step& step, const kvstore::Selection& terms, const uint32_t* layer,
                     StepItem* item);

// Waits until an item's rows are stored, and returns the terms of its attention in one layer: those
// of the call or, where an index that they need is not ready, and the step need not wait for it,
// terms that take all candidates.
pqc_status PickTerms(const LayerCall& call, StepItem* item, const kvstore::Selection** terms);

// Has the next selection by a live index close the prefill once more, at most once a second: the
// sidecar may have given up its work on the index, which that starts again.
void CloseAgainLater(SequenceState& sequence);

// Returns the terms without an index that take all candidates of the given ones.
kvstore::Selection AllCandidates(const kvstore::Selection& terms);

// Waits in mapped memory as WaitReady; `needed`: tokens that must be stored.
pqc_status WaitMapped(const pqc_step& step, const kvstore::Selection& terms, const uint32_t* layer,
                      uint32_t needed, StepItem* item);

// Counts the tokens that are selected for an item, without reading rows.
pqc_status CountSelected(StepItem& item, const kvstore::Selection& terms, uint32_t* count);

// Reports a refused selection of a step, whose items name their query positions themselves.
pqc_status FailInStep(const kvstore::Refusal& refusal);

// Says in the message of a failed call what helps: to begin the step again, when a retry time says
// that this may succeed and the call itself would fail again. `ended`: the call has closed the
// step.
pqc_status AdviseInStep(pqc_status status, bool no_wait, bool ended);

// Puts "items[i]" before the field of the thread's last refusal.
pqc_status PrefixItem(size_t item, pqc_status status);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_STEP_H_
