// Offload follows the sequences of a context whose application offloads tokens: it frees their
// cells (llama_memory_seq_rm), the sidecar alone has their rows, and positions go on. So a context
// of 4K cells can have a sequence of a million tokens. The application asks for it, because a
// backend cannot see why cells are freed (application/pqcached_llama.h).
//
// It follows them likewise when the memory of stored rows is given back, which no application has
// to ask for (dropped_rows.h).
//
// Unlike the rest of the plug-in, this cannot fall back to llama.cpp's own rows. A graph whose rows
// cannot be attributed with certainty, or read before the deadline, fails: llama_decode returns an
// error, and never a changed token.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_OFFLOAD_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_OFFLOAD_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/engines/llama/attention.h"
#include "client/engines/llama/dropped_rows.h"
#include "client/engines/llama/histories.h"
#include "client/engines/llama/settings.h"
#include "client/engines/llama/sidecar.h"
#include "kernels/attend/merge.h"

namespace pqcached::llama {

// Makes a history shorter, with all that belongs to it.
using ShortenHistory = std::function<void(const std::shared_ptr<History>& history, uint32_t keep)>;

// Query tokens [first_row, first_row + count) of a graph, at consecutive positions of one history.
struct FollowedRows {
  std::shared_ptr<History> history;
  StoredHistory* stored;  // null: the sidecar has no rows of it
  uint32_t first_row;
  uint32_t count;
  uint32_t base;  // tokens of the history before the graph
  CellSet seen;   // cells of these that the query tokens see
};

class Offload {
 public:
  // `fingerprint` and `context`: of Histories.
  Offload(const Settings& settings, Histories* histories, FingerprintOf fingerprint,
          const void* context, int32_t rope_op, ShortenHistory shorten);

  // Attributes the query tokens of a graph to histories, at its first layer. `written`: the cells
  // that the graph writes, one per query token. `sidecar`: null in the first graph; with its lock.
  // `dropped`: null when no memory is given back. Returns false when the graph must fail; problem()
  // has the reason.
  bool Follow(const Attention& attention, std::span<const uint32_t> written, Sidecar* sidecar,
              DroppedRows* dropped);
  // False after a graph that cannot be followed at all: positions are not known, for example.
  bool is_usable() const { return is_usable_; }
  std::span<const FollowedRows> rows() const { return rows_; }
  // Returns whether a followed query token has offloaded tokens before it.
  bool graph_has_offloaded() const { return graph_has_offloaded_; }
  const std::string& problem() const { return problem_; }

  // Attends in a layer to the offloaded tokens of the query tokens whose partials[row] has no
  // output yet, and sets these: [streams, tokens]. Returns false when the graph must fail.
  bool Attend(const Attention& attention, uint32_t layer, Sidecar* sidecar,
              std::span<kernels::Partial> partials);

  // Adds the graph's tokens to the histories, once their rows are written in all layers: after the
  // last layer, or between graphs. With the sidecar's lock. Further calls do nothing.
  void EndGraph();

  // Offloads the tokens between sink and window of the history with `tokens` tokens, between
  // graphs: waits until the sidecar has their rows. Sets [*begin, *end) to the positions of all
  // offloaded tokens, whose cells the application then frees. Sets *problem unless it returns
  // PQC_OK.
  //
  // Errors: PQC_FAILED_PRECONDITION  no history of so many tokens, or several
  //         PQC_DEADLINE_EXCEEDED    the sidecar has not stored the rows in time
  pqc_status Take(uint64_t tokens, Sidecar* sidecar, uint32_t* begin, uint32_t* end,
                  std::string* problem);

 private:
  bool Fail(const char* problem);
  bool CannotFollow(const char* reason);
  bool FollowRow(const Attention& attention, uint32_t row, Sidecar* sidecar, DroppedRows* dropped);
  bool BringUnread(uint32_t row, DroppedRows* dropped);
  bool Continue(uint32_t row, uint32_t before);
  bool Begin(uint32_t row, int32_t position, Sidecar* sidecar);
  std::shared_ptr<History> Find(uint64_t tokens, std::string* problem) const;
  bool AttendRows(const Attention& attention, uint32_t layer, const FollowedRows& rows,
                  Sidecar* sidecar, std::vector<float>* results);

  const Settings& settings_;
  Histories* const histories_;
  const FingerprintOf fingerprint_;
  const void* const fingerprint_context_;
  const int32_t rope_op_;
  const ShortenHistory shorten_;
  bool is_usable_ = true;
  std::string problem_;

  // These belong to the graph.
  std::vector<uint32_t> written_;
  std::span<const int32_t> positions_;
  CellSet seen_;
  std::vector<uint32_t> away_;  // cells that a query token sees, and that are away
  std::vector<FollowedRows> rows_;
  std::vector<int32_t> group_of_;  // element of rows_ of a query token, or -1
  bool graph_has_offloaded_ = false;
  bool is_ended_ = true;
  std::chrono::steady_clock::time_point deadline_ = {};  // since the graph's first failed read
  std::vector<float> queries_;
  std::vector<std::vector<float>> results_;  // of each element of rows_: output, then lse
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_OFFLOAD_H_
