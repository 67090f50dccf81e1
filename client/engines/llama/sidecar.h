// Sidecar keeps the rows of histories in a pqcached sidecar, so that steps can select among them.
//
// A thread of its own makes all calls that wait: it opens the client, creates a sequence with a
// live index for each history, and stores rows that no step has passed. The engine's thread never
// waits for it, with one exception: while up to kCopiedTokens rows of a layer are copied.
//
// Both threads read histories, so the engine's thread changes them under Lock().
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_SIDECAR_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_SIDECAR_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/engines/llama/attention.h"
#include "client/engines/llama/histories.h"
#include "client/engines/llama/settings.h"
#include "pqcached/client.h"
#include "pqcached/index.h"
#include "pqcached/operation.h"

namespace pqcached::llama {

// The arrays of one layer, over all streams.
struct LayerArrays {
  const GgmlTensor* keys_root = nullptr;
  const GgmlTensor* values_root = nullptr;
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
};

// The stored layers, in the order of the graph, all of one shape.
struct Layers {
  Attention shape;  // of any node
  std::vector<LayerArrays> arrays;

  const std::byte* KeyRow(uint32_t layer, uint32_t cell) const {
    return arrays[layer].keys + size_t{cell} * shape.cell_bytes;
  }
  const std::byte* ValueRow(uint32_t layer, uint32_t cell) const {
    return arrays[layer].values + size_t{cell} * shape.cell_bytes;
  }
};

// Rows of some tokens in all layers, as calls of the client have them. They lie in one piece of
// memory: for each layer the keys, then the values.
class RowsToPass {
 public:
  void Set(const Layers& layers, uint64_t tokens, const std::byte* memory);
  std::span<const pqc_layer_rows> layers() const { return rows_; }

 private:
  uint64_t key_shape_[3];
  uint64_t value_shape_[3];
  std::vector<pqc_layer_rows> rows_;
};

// A history's sequence in the sidecar.
struct StoredHistory {
  std::shared_ptr<History> history;
  pqc_sequence* sequence = nullptr;
  uint32_t stored = 0;             // first tokens whose rows are passed on
  uint32_t acknowledged = 0;       // first tokens whose rows the sidecar has
  bool is_awaited = false;         // the engine's thread waits for `acknowledged`
  bool is_filling = false;         // the thread uses the sequence
  bool is_in_step = false;         // the engine's thread does
  bool is_longer = false;          // the sequence may have tokens behind `stored`
  bool is_broken = false;          // the sequence is to be dropped, and another one created
  bool has_clusters = false;       // steps may estimate what they do not select
  pqc_operation* build = nullptr;  // of the clusters; the thread's
  std::chrono::steady_clock::time_point build_at = {};  // the next build begins no earlier
  std::chrono::milliseconds delay{0};                   // after the last failure
  std::chrono::steady_clock::time_point retry_at = {};
};

pqc_dtype PqcDType(kernels::DType dtype);

class Sidecar {
 public:
  static constexpr uint32_t kMostLeft = 64;

  // `parallel_for` runs kernels of calls that the engine's thread makes.
  Sidecar(const Settings& settings, Layers layers, pqc_parallel_for parallel_for, void* context,
          uint32_t threads);
  ~Sidecar();
  Sidecar(const Sidecar&) = delete;
  Sidecar& operator=(const Sidecar&) = delete;

  const Layers& layers() const { return layers_; }

  // Has `bring` called before rows of cells are copied, with the lock: it returns false when they
  // cannot be read.
  void SetBring(std::function<bool(std::span<const uint32_t> cells)> bring);

  // Locks the histories for the engine's thread. All calls below are made with this lock.
  std::unique_lock<std::mutex> Lock();

  // Returns the history's sequence, whose rows are stored from now on.
  StoredHistory& Of(const std::shared_ptr<History>& history);
  // Returns whether a step may have the sequence: at most kMostLeft of the history's tokens are not
  // passed on, which is left to the engine's thread.
  bool IsReady(const StoredHistory& stored) const;
  // Notes that a history is about to become shorter.
  void Shorten(const History& history, uint32_t keep);
  // Waits until the sidecar has the rows of the first `tokens` tokens, and protects them from
  // eviction. Returns false when it takes too long.
  bool WaitUntilStored(const std::shared_ptr<History>& history, uint32_t tokens,
                       std::chrono::steady_clock::time_point deadline,
                       std::unique_lock<std::mutex>* lock);
  // The open client, or null. It stays open until EndUse.
  pqc_client* BeginUse();
  void EndUse();
  // Likewise during a step, on any thread, with or without the lock: returns the sequence, or null.
  pqc_sequence* BeginReading(const StoredHistory& stored);
  void EndReading();
  // Returns whether the rows of a history's offloaded tokens are lost.
  bool IsLost(const StoredHistory& stored);
  // A step has failed with this status: the sequence is stored again when that is needed.
  void ReportFailure(StoredHistory* stored, pqc_status status);

 private:
  void Run();
  void Work();
  bool Connect();
  void Disconnect(std::unique_lock<std::mutex>* lock);
  void DropBroken(std::unique_lock<std::mutex>* lock);
  void BuildClusters(std::unique_lock<std::mutex>* lock);
  bool CanBuildClusters(const StoredHistory& stored) const;
  pqc_status BeginClusters(StoredHistory* stored);
  void EndClusters(StoredHistory* stored);
  void CloseBuilds();
  StoredHistory* NextToFill();
  void Repair(StoredHistory* stored, std::unique_lock<std::mutex>* lock);
  pqc_status Fill(StoredHistory* stored, std::unique_lock<std::mutex>* lock);
  pqc_status Create(StoredHistory* stored, std::unique_lock<std::mutex>* lock);
  pqc_status SendChunk(StoredHistory* stored, std::unique_lock<std::mutex>* lock);
  uint32_t CopyChunk(StoredHistory* stored, std::unique_lock<std::mutex>* lock);
  bool HasRowsOf(const History& history, uint32_t begin, uint32_t end) const;
  void Say(const std::string& line);

  const Settings settings_;
  const Layers layers_;
  const pqc_parallel_for parallel_for_;
  void* const parallel_for_context_;
  const uint32_t threads_;

  std::mutex mutex_;
  std::atomic<uint32_t> waiting_{0};  // calls of Lock that wait
  std::condition_variable wake_;
  std::condition_variable filled_;
  bool stops_ = false;
  bool is_used_ = false;
  std::atomic<bool> is_lost_{false};  // the client's session has ended
  pqc_client* client_ = nullptr;
  pqc_cache* cache_ = nullptr;
  std::vector<std::unique_ptr<StoredHistory>> stored_;
  std::function<bool(std::span<const uint32_t>)> bring_;

  // Held while client and sequences end, which waits for readers. Taken after mutex_.
  std::mutex reading_mutex_;
  uint32_t readers_ = 0;

  // Used by the thread only.
  std::vector<std::byte> chunk_;
  uint32_t chunk_tokens_ = 0;                  // most tokens of a chunk
  std::vector<pqc_operation*> former_builds_;  // of sequences that are dropped
  std::string said_;
  bool answers_ = true;  // the sidecar has done what the last call asked for

  std::thread thread_;
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_SIDECAR_H_
