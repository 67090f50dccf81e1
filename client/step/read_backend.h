// ReadBackend is the path by which a client reads: mapped memory, or RPCs. A client has one for its
// whole life, so that no call has to choose.
//
// Arguments have been checked (base/arguments.h). Failures are the thread's last error, with fields
// named as in the C header.
//
// Thread-safe as far as outputs and steps are not shared.
#ifndef PQCACHED_CLIENT_STEP_READ_BACKEND_H_
#define PQCACHED_CLIENT_STEP_READ_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "client/base/load.h"
#include "client/base/remote.h"
#include "client/step/handles.h"
#include "kvstore/read/selection.h"

namespace pqcached::client {

struct LayerCall;
struct StepItem;

class ReadBackend {
 public:
  virtual ~ReadBackend() = default;

  // The calls that read one sequence. Positions are copied where the caller gives memory for them;
  // the counts are also set on PQC_OUT_OF_RANGE for a too small capacity. All other outputs have
  // room.
  virtual pqc_status TopK(SequenceState& sequence, const TopKItem& item) = 0;
  virtual pqc_status Attend(SequenceState& sequence, const AttendItem& item) = 0;
  virtual pqc_status AttendRange(SequenceState& sequence, const AttendRangeItem& item) = 0;
  virtual pqc_status Score(SequenceState& sequence, const QueryView& query,
                           const kvstore::IndexDescriptor& index, kvstore::TokenRange tokens,
                           const ScoresOut& out) = 0;
  virtual pqc_status FetchBlocks(SequenceState& sequence, const FetchView& fetch,
                                 kvstore::TokenRange tokens, std::byte* out) = 0;
  virtual pqc_status FetchTokens(SequenceState& sequence, const FetchView& fetch,
                                 const PositionsView& positions, std::byte* out) = 0;
  // Copies rows to the engine's memory. Checks that all of them are stored before it writes.
  virtual pqc_status Load(SequenceState& sequence, const LoadItem& item) = 0;
  // Maps the pages of rows that will be read, where memory is mapped. Asks `cancelled` after each
  // layer.
  virtual pqc_status Prefetch(SequenceState& sequence, kvstore::TokenRange tokens,
                              const std::function<bool()>& cancelled) = 0;

  // Begins to read an item of a step, and finds the number of tokens that the sequence has stored.
  virtual pqc_status Begin(const pqc_step& step, StepItem& item, uint64_t* token_count) = 0;
  // Checks that the index of the step's selection exists, as far as this is known without an RPC.
  virtual pqc_status CheckIndex(const pqc_step& step, StepItem& item,
                                const kvstore::IndexDescriptor& index) = 0;
  // Waits until the first `needed` tokens of an item are stored and, if a layer is given, until
  // their codes are available.
  virtual pqc_status Wait(const pqc_step& step, const kvstore::Selection& selection,
                          const uint32_t* layer, uint32_t needed, StepItem* item) = 0;
  // Selects for all items: the positions of item i begin at call.positions[step->offsets[i]].
  virtual pqc_status StepTopK(const LayerCall& call) = 0;
  // Selects pages for all items; the lists of call.pages have room, and are not padded.
  virtual pqc_status StepTopPages(const LayerCall& call) = 0;
  // Selects and attends for all items; counts: k of each item.
  virtual pqc_status StepAttend(const LayerCall& call, uint32_t* counts) = 0;
  // Attends to call.ranges for all items; the rows of the ranges are stored.
  virtual pqc_status StepAttendRange(const LayerCall& call) = 0;
  // Attends to sink and window of all items of a decode call, and merges with what is attended to.
  virtual pqc_status StepDecode(const LayerCall& call) = 0;
  // Attends to call.lists for all items; their rows are stored.
  virtual pqc_status StepAttendPositions(const LayerCall& call) = 0;
  // Checks at the end of a step that what was read of an item may be used. When the worker was
  // replaced during the step, it waits for the next worker's lease.
  virtual pqc_status Confirm(const pqc_step& step, const StepItem& item) = 0;
};

// Attends to call.lists for all items by rpc Attend, whose lists all have the same length: where
// the lists of an item have several lengths, each length is a query of its own, of which only the
// heads with that length count. The rows are stored. Errors: those of Remote::Attend.
pqc_status AttendListsByRpc(Remote& remote, const LayerCall& call);

// Reads by RPCs. REQUIRES, for both: the client's state outlives the backend.
std::unique_ptr<ReadBackend> MakeRemoteReads(ClientState& client);
// Reads mapped memory; a single call on a sequence for which no lease can be acquired uses an RPC.
// REQUIRES: client.local.
std::unique_ptr<ReadBackend> MakeMappedReads(ClientState& client);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_READ_BACKEND_H_
