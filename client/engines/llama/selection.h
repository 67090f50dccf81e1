// Selection computes attention nodes of long contexts as steps of the sidecar: attention to
// selected tokens there, and to sink and window in llama.cpp's own rows.
//
// Every problem has the same answer, the exact attention over llama.cpp's own rows: no call of the
// engine's thread waits for the sidecar. What a step has read is checked before the node's result
// is used (pqc_step_check).
//
// The calls come in the order of the graph: for each layer Write, then Arrive with the attention
// node, and Prepare, Attend and Finish, or NotePrefill. One thread at a time.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_SELECTION_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_SELECTION_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/engines/llama/attention.h"
#include "client/engines/llama/dropped_rows.h"
#include "client/engines/llama/engine_threads.h"
#include "client/engines/llama/histories.h"
#include "client/engines/llama/offload.h"
#include "client/engines/llama/settings.h"
#include "client/engines/llama/sidecar.h"
#include "kernels/attend/merge.h"
#include "pqcached/client.h"

namespace pqcached::llama {

class Selection {
 public:
  Selection(const Settings& settings, EngineThreads* threads, int32_t rope_op);
  ~Selection();
  Selection(const Selection&) = delete;
  Selection& operator=(const Selection&) = delete;

  // The graph is about to write `cells` of the layer whose keys are in `keys_root`.
  void Write(const LayerArrays& arrays, const Attention& shape, std::span<const uint32_t> cells);

  // The graph has come to an attention node, which is the one of the calls that follow. Returns
  // false when the graph must fail, because of offloaded tokens (offload.h).
  bool Arrive(const Attention& attention);
  // Plans the graph's step at its first layer. Returns [streams, tokens] cells that the sidecar
  // attends to (OwnRows::Prepare); empty: none.
  std::span<const uint64_t* const> Prepare(const Attention& attention);
  // Attends to these cells in this layer. Returns the partial attentions (OwnRows::Compute), empty
  // when it failed: then all is attended to exactly, and Prepare returns nothing until the next
  // graph.
  std::span<const kernels::Partial> Attend(const Attention& attention);
  // Returns whether query tokens of the graph have offloaded tokens before them, which llama.cpp
  // cannot attend to.
  bool graph_has_offloaded() const {
    return offload_ != nullptr && offload_->graph_has_offloaded();
  }
  // Attends to these where Attend did not. Returns [streams, tokens] partial attentions, those of
  // Attend included; empty: the graph must fail.
  std::span<const kernels::Partial> AttendOffloaded(const Attention& attention);
  // The cells that these do not leave to llama.cpp's rows: [streams, tokens], or empty.
  std::span<const uint64_t* const> hidden() const { return hidden_; }
  // Has the rows of earlier tokens stored, at the first layer of a node that ggml computes. Of each
  // stream, it looks at the last query token.
  void NotePrefill(const Attention& attention);

  // The node is computed: after the last layer, passes the rows of the step's tokens.
  void Finish();
  // Likewise for a node that is ggml's.
  void Leave();
  // The node is computed, by ggml or not.
  void Complete();

  // Offload::Take.
  pqc_status TakeOffload(uint64_t tokens, uint32_t* begin, uint32_t* end, std::string* problem);
  // Fetches all rows whose memory was given back. Returns false when llama.cpp cannot go on without
  // this object.
  bool ReturnAll();

  const DroppedRows* dropped() const { return dropped_.get(); }
  uint64_t selected_nodes() const { return selected_nodes_; }
  uint64_t estimated_nodes() const { return estimated_nodes_; }  // of them, with a tail estimate
  // The longest time that a node waited for the client or for the sidecar's thread.
  double longest_wait_ms() const { return longest_wait_ms_; }

 private:
  // Query tokens [first_row, first_row + count) of the nodes, which continue one history.
  struct Item {
    StoredHistory* stored;
    uint32_t first_row;
    uint32_t count;
  };

  void TurnOff(const char* reason);
  void Learn(const LayerArrays& arrays, const Attention& shape);
  void EndLearning();
  void MakeHistories(const LayerArrays& arrays);
  std::unique_lock<std::mutex> LockHistories();
  bool Follow(const Attention& attention);
  bool IsLastLayer() const;
  void Shorten(const std::shared_ptr<History>& history, uint32_t keep);
  void HideOffloaded(const Attention& attention);
  void DropStored();
  bool MaySelect(const History& history) const;
  void BeginGraph(std::span<const uint32_t> cells);
  std::optional<uint32_t> LayerOf(const GgmlTensor* keys_root) const;
  bool FindHistories(const Attention& attention);
  bool AddItem(const Attention& attention, uint32_t row, std::vector<Item>* found);
  void PlanStep(const Attention& attention);
  bool CatchUp(StoredHistory* stored);
  bool BeginStep(bool selects);
  void HideSelected(const Attention& attention);
  bool AttendSelected(const Attention& attention, uint32_t layer);
  void LoadQueries(const Attention& attention);
  void EndStep();
  void LoadRows(std::span<const uint32_t> cells);
  void Abandon(pqc_status status);
  void LeaveStep(pqc_status status);
  pqc_selection Terms() const;
  static void ParallelFor(void* self, uint32_t count, void (*body)(void* context, uint32_t index),
                          void* context);
  static uint64_t Fingerprint(const void* self, uint32_t cell);

  const Settings& settings_;
  EngineThreads* threads_;
  Layers layers_;            // in the order of the graph
  bool is_learned_ = false;  // layers_ is complete
  bool is_off_ = false;      // the graph is not understood
  std::unique_ptr<Histories> histories_;
  std::unique_ptr<Sidecar> sidecar_;
  const int32_t rope_op_;
  std::unique_ptr<Offload> offload_;      // null: no tokens are offloaded
  std::unique_ptr<DroppedRows> dropped_;  // null: no memory is given back
  bool fails_ = false;                    // llama.cpp lacks rows
  bool is_to_drop_ = false;               // Complete drops rows

  // These belong to the graph.
  std::vector<uint32_t> written_;     // cells, of all query tokens
  std::vector<uint32_t> step_cells_;  // those of the step's tokens
  CellSet seen_;                      // of a query token
  std::vector<Item> items_;
  uint32_t rows_ = 0;  // streams * tokens
  uint32_t step_tokens_ = 0;
  std::optional<uint32_t> layer_;     // of the node
  bool is_to_plan_ = false;           // Prepare plans the step
  bool is_fresh_ = false;             // Write has begun the graph, whose step is not planned yet
  const GgmlTensor* mask_ = nullptr;  // of the node of the first layer
  pqc_step* step_ = nullptr;
  bool step_selects_ = false;
  bool step_estimates_ = false;
  std::vector<const uint64_t*> hidden_;     // [rows]
  std::vector<float> queries_;              // [step tokens, query heads, key_dim]
  std::vector<float> output_;               // [step tokens, query heads, value_dim]
  std::vector<float> lse_;                  // [step tokens, query heads]
  std::vector<kernels::Partial> partials_;  // [rows]
  std::vector<std::byte> new_rows_;
  RowsToPass rows_to_pass_;
  uint64_t selected_nodes_ = 0;
  uint64_t estimated_nodes_ = 0;
  double longest_wait_ms_ = 0.0;
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_SELECTION_H_
