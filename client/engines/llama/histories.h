// Histories find out which cells of llama.cpp's KV cache are which tokens of which sequence.
//
// A backend sees neither sequences nor positions. It sees which cells a graph writes (SET_ROWS),
// and which cells a query token sees (the mask). From these, a *history* is made: cells in the
// order in which a sequence has them, which one query token saw together. A query token continues
// the history whose cells it sees all of, and the longest if there are several. A history becomes
// shorter when one of its cells is written again, is not seen any more (a roll-back), or has other
// rows than it had (a restored state or a context shift, which no graph shows).
//
// A history may have *offloaded* tokens, whose rows only the sidecar has. Either the application
// has freed their cells (offload.h): no mask shows them, so a query token continues such a history
// only when its position and the cells that it sees agree with it exactly. Or they have their
// cells, and the memory of their rows was given back (dropped_rows.h).
//
// Cells are numbered over all streams. Not thread-safe.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_HISTORIES_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_HISTORIES_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace pqcached::llama {

// A set of cells: bit i of word w is cell 64 w + i.
class CellSet {
 public:
  explicit CellSet(uint32_t cells = 0) : words_((cells + 63) / 64, 0) {}
  void Clear() { words_.assign(words_.size(), 0); }
  void Add(uint32_t cell) { words_[cell / 64] |= uint64_t{1} << cell % 64; }
  void Remove(uint32_t cell) { words_[cell / 64] &= ~(uint64_t{1} << cell % 64); }
  bool Has(uint32_t cell) const { return (words_[cell / 64] >> cell % 64 & 1) != 0; }
  std::span<const uint64_t> words() const { return words_; }
  std::span<uint64_t> words() { return words_; }

 private:
  std::vector<uint64_t> words_;
};

struct History {
  static constexpr uint32_t kNoCell = UINT32_MAX;

  explicit History(uint32_t cell_count) : has(cell_count), hidden(cell_count) {}

  std::vector<uint32_t> cells;   // of token i; kNoCell: it is offloaded
  std::vector<uint64_t> prints;  // of the rows of token i: FingerprintOf
  CellSet has;                   // all of `cells` but kNoCell
  CellSet hidden;                // cells [hidden_begin, hidden_end) of `cells`: Hide
  uint32_t hidden_begin = 0;
  uint32_t hidden_end = 0;
  uint64_t last_used = 0;
  uint64_t last_checked = 0;     // graph whose query tokens found its rows unchanged
  uint64_t version = 0;          // raised when the history becomes shorter
  bool is_gone = false;          // dropped from the list
  bool has_offset = false;       // where its positions are known
  int64_t offset = 0;            // from a token's number to its position
  bool is_ordered = true;        // token i has position i
  bool is_lost = false;          // the sidecar has lost the rows of offloaded tokens
  uint32_t offloaded_begin = 0;  // offloaded tokens
  uint32_t offloaded_end = 0;

  bool has_offloaded() const { return offloaded_begin < offloaded_end; }
  // Returns whether the offloaded tokens have no cells.
  bool lacks_cells() const { return has_offloaded() && cells[offloaded_begin] == kNoCell; }
  uint32_t size() const { return static_cast<uint32_t>(cells.size()); }
  // Sets `hidden` to tokens [begin, end). A later end costs as much as the tokens between.
  void Hide(uint32_t begin, uint32_t end);
};

// Reads the 8 bytes by which a cell's rows are recognised, of the last layer's key: it depends on
// all tokens before, and on the position.
using FingerprintOf = uint64_t (*)(const void* context, uint32_t cell);

class Histories {
 public:
  // `cells`: of all streams.
  explicit Histories(uint32_t cells) : cell_count_(cells) {}

  uint32_t cell_count() const { return cell_count_; }
  const std::vector<std::shared_ptr<History>>& all() const { return all_; }

  // Begins a graph. Shortens the histories that have a cell of `written`. `shortened` is called for
  // each.
  template <class Shortened>
  void Write(std::span<const uint32_t> written, Shortened shortened) {
    ++graph_;
    for (const auto& history : all_) {
      uint32_t keep = history->size();
      for (const uint32_t cell : written) {
        if (history->has.Has(cell)) keep = std::min(keep, TokenAt(*history, cell));
      }
      if (keep < history->size()) shortened(history, keep);
    }
  }

  // Returns the history that a query token continues, made longer by the cells that it sees and the
  // history lacks, in the order of their numbers; or a new one, when no history has at least half
  // of the cells in common. `seen` is without the cells that the graph writes. Histories in `taken`
  // are not changed: a query token continues them only when it sees exactly their cells.
  // `shortened` is called before a history becomes shorter. Null when all histories are taken.
  template <class Shortened>
  std::shared_ptr<History> Continue(const CellSet& seen,
                                    std::span<const std::shared_ptr<History>> taken,
                                    FingerprintOf fingerprint, const void* context,
                                    Shortened shortened) {
    uint32_t common = 0;
    std::shared_ptr<History> best = Best(seen, taken, &common);
    if (best == nullptr) {
      std::shared_ptr<History> ended;
      best = Begin(seen, taken, fingerprint, context, &ended);
      if (ended != nullptr && ended->has_offloaded()) shortened(ended, 0);
      return best;
    }
    if (best->last_checked != graph_) {
      common = std::min(common, FirstChanged(*best, common, fingerprint, context));
      best->last_checked = graph_;
    }
    if (common < best->size()) shortened(best, common);
    best->last_used = ++uses_;
    AddSeen(seen, fingerprint, context, best.get());
    return best;
  }

  // Finds the history with offloaded tokens that a query token at `position` continues. It may have
  // more tokens than `position`, which the application has then removed. kBroken: none is found,
  // tokens have been offloaded in this process, and the query token does not see as many cells as
  // it has tokens before it, so that it may lack offloaded ones.
  enum class Match { kNone, kFound, kBroken };
  Match FindOffloaded(const CellSet& seen, uint64_t position, FingerprintOf fingerprint,
                      const void* context, std::shared_ptr<History>* found) const;
  // Marks tokens [begin, end) as offloaded. Begin is that of earlier calls.
  void Offload(History* history, uint32_t begin, uint32_t end);
  // Notes a use of a history.
  void Use(History* history) { history->last_used = ++uses_; }
  // Returns whether the rows of all tokens with cells are those that the history has.
  static bool IsUnchanged(const History& history, FingerprintOf fingerprint, const void* context) {
    return FirstChanged(history, history.size(), fingerprint, context) == history.size();
  }
  // Returns whether tokens of any history have been offloaded, since the beginning.
  bool has_offloaded() const { return has_offloaded_; }

  // Adds a cell that a step has stored, as the next token.
  static void Append(History* history, uint32_t cell, uint64_t print);
  // Keeps the first `keep` tokens.
  static void Shorten(History* history, uint32_t keep);

 private:
  static uint32_t TokenAt(const History& history, uint32_t cell);
  static bool SeesFirst(const History& history, const CellSet& seen, uint32_t seen_count,
                        uint64_t count);
  // The number of first tokens of a history that are seen.
  static uint32_t SeenTokens(const History& history, const CellSet& seen);
  static uint32_t FirstChanged(const History& history, uint32_t count, FingerprintOf fingerprint,
                               const void* context);
  static void AddSeen(const CellSet& seen, FingerprintOf fingerprint, const void* context,
                      History* history);
  std::shared_ptr<History> Best(const CellSet& seen,
                                std::span<const std::shared_ptr<History>> taken,
                                uint32_t* common) const;
  std::shared_ptr<History> Begin(const CellSet& seen,
                                 std::span<const std::shared_ptr<History>> taken,
                                 FingerprintOf fingerprint, const void* context,
                                 std::shared_ptr<History>* ended);

  uint32_t cell_count_;
  uint64_t uses_ = 0;
  uint64_t graph_ = 0;
  bool has_offloaded_ = false;
  std::vector<std::shared_ptr<History>> all_;
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_HISTORIES_H_
