// DroppedRows gives the memory of stored rows back to the system: whole pages of llama.cpp's KV
// cache whose rows the sidecar has. The plug-in reads these rows from the sidecar. All other reads
// (a state that is saved, keys that are rotated in place, attention that ggml computes) fetch the
// pages again: a thread of this object gets their page faults (userfaultfd), and fills the pages
// before the read goes on. So no read finds other rows than those that llama.cpp has written.
//
// Rows that the sidecar has lost cannot be fetched. A query token that sees them makes its graph
// fail (SeesLost); any other read of their pages ends the process with a line that says so.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_DROPPED_ROWS_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_DROPPED_ROWS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/engines/llama/histories.h"
#include "client/engines/llama/sidecar.h"

namespace pqcached::llama {

class DroppedRows {
 public:
  // `cells`: of all streams. Returns null, and sets *problem, where the system allows no such
  // faults or the cache has another layout.
  static std::unique_ptr<DroppedRows> Open(const Layers& layers, uint32_t cells, Sidecar* sidecar,
                                           std::chrono::milliseconds deadline,
                                           std::string* problem);
  ~DroppedRows();
  DroppedRows(const DroppedRows&) = delete;
  DroppedRows& operator=(const DroppedRows&) = delete;

  // Drops the rows of tokens [begin, end) of a history, which are those of its fingerprints and
  // which the sidecar has, and notes that in the history. Only pages are given back that have no
  // other rows.
  void Drop(const std::shared_ptr<History>& history, uint32_t begin, uint32_t end,
            StoredHistory* stored);
  // Fetches the rows of a history's dropped tokens from `keep` on, before the history becomes
  // shorter. Rows that cannot be fetched before the deadline are lost.
  void Return(const History& history, uint32_t keep);
  // Fetches the rows of cells that other reads than the plug-in's are about to need. Returns false
  // when some cannot be fetched before the deadline.
  bool Bring(std::span<const uint32_t> cells);
  // The graph is about to write these cells, whose rows are not lost any more.
  void Write(std::span<const uint32_t> cells);

  // Bytes that were given back, and bytes of these that were fetched again.
  uint64_t given_back_bytes() const { return given_back_bytes_; }
  uint64_t fetched_bytes() const { return fetched_bytes_; }
  bool has_lost() const;
  // The number of times that rows were lost.
  uint64_t losses() const { return losses_; }
  // Returns whether a query token sees a lost row.
  bool SeesLost(const CellSet& seen) const;
  // Returns whether the page with the first bytes of a cell's key of the last layer was given back,
  // and not fetched since: then the key is what it was, and PrintOf its fingerprint.
  bool IsAway(uint32_t cell) const {
    return (away_[cell / 64].load(std::memory_order_acquire) >> cell % 64 & 1) != 0;
  }
  uint64_t PrintOf(uint32_t cell) const { return prints_[cell].load(std::memory_order_relaxed); }
  // Sets `cells` to those of `seen` that are away.
  void FindAway(const CellSet& seen, std::vector<uint32_t>* cells) const;

 private:
  // An array of rows, and its whole pages.
  struct Array {
    std::byte* begin;  // of the rows
    std::byte* pages;
    size_t page_count;
    uint32_t layer;
    bool has_values;
    std::vector<uint64_t> missing;  // bit per page
  };
  static constexpr uint32_t kFree = UINT32_MAX;
  static constexpr uint32_t kLost = UINT32_MAX - 1;
  struct Cell {
    uint32_t owner = kFree;  // element of owners_
    uint32_t token = 0;
  };
  enum class Fill { kDone, kLost, kFailed };

  DroppedRows(const Layers& layers, uint32_t cells, Sidecar* sidecar,
              std::chrono::milliseconds deadline);
  std::string Register();
  void Run();
  void Serve(uintptr_t address, bool is_write);
  template <class Work>
  void ForPages(Array* array, uint32_t cell, Work work);
  bool HasMissingPages(uint32_t cell);
  void LoseRows(const Array& array, size_t page);
  static bool IsMissing(const Array& array, size_t page);
  void SetMissing(Array* array, size_t page, bool is_missing);
  bool IsDropped(const Array& array, uint32_t owner, size_t page) const;
  void GiveBack(Array* array, uint32_t owner, uint32_t first_cell, uint32_t last_cell);
  using Deadline = std::chrono::steady_clock::time_point;
  Fill FillPages(Array* array, size_t page, size_t count, bool fills_lost, Deadline deadline);
  Fill FillMissing(uint32_t cell, Deadline deadline);
  bool CopyPage(std::byte* to, const std::byte* from) const;
  bool Fetch(const Array& array, uint32_t begin, uint32_t end, std::byte* to, Deadline deadline);
  uint32_t OwnerOf(StoredHistory* stored);

  const Layers& layers_;
  Sidecar* const sidecar_;
  const std::chrono::milliseconds deadline_;
  const size_t row_bytes_;
  int faults_ = -1;
  int stop_[2] = {-1, -1};  // a pipe
  std::thread thread_;

  mutable std::mutex mutex_;  // never held while llama.cpp's rows are read
  std::vector<Array> arrays_;
  std::vector<Cell> cells_;
  CellSet lost_;
  bool has_lost_ = false;
  std::atomic<uint64_t> losses_{0};
  std::vector<std::atomic<uint64_t>> away_;    // bit per cell: IsAway
  std::vector<std::atomic<uint64_t>> prints_;  // of each cell: PrintOf
  std::atomic<uint64_t> given_back_bytes_{0};
  std::atomic<uint64_t> fetched_bytes_{0};
  std::vector<StoredHistory*> owners_;
  std::vector<std::byte> rows_, other_rows_;
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_DROPPED_ROWS_H_
