// CostModel: measures the cost of training and coding on this machine, and computes how many
// k-means iterations fit into a given time.
//
// The time of one kv head of a layer is `rows * code + tasks * samples * (load + iterations *
// step)`, where tasks are the independent training tasks of the index type; the workers share the
// kv heads. Each kind of layer is measured at its first use, which takes about ten milliseconds.
// The result is cached in memory and in a file, together with a description of the machine, so that
// the next process need not measure. A file from another machine is ignored and overwritten.
//
// Thread-safe. A measurement runs on the caller's thread and holds no lock.
#ifndef PQCACHED_KVSTORE_INDEX_COST_MODEL_H_
#define PQCACHED_KVSTORE_INDEX_COST_MODEL_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "kernels/base/exec.h"
#include "kvstore/mutex.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

// Cost in seconds for one thread and one kv head.
struct BuildCost {
  double load = 0;  // to load one row into the samples of one training task
  double step = 0;  // one iteration, per sample and training task
  double code = 0;  // to code one row and close its segment: with pq, to count and list its cell
};

// Size of the work on one layer, or on several equal layers.
struct BuildSize {
  uint32_t head_count = 0;    // kv heads, over the layers
  uint32_t head_tasks = 0;    // independent training tasks per kv head: the sub-spaces of pq
  uint32_t row_count = 0;     // per head
  uint32_t sample_count = 0;  // per head; rows trained on
  uint32_t worker_count = 1;
};

// Returns the seconds until everything is trained and coded.
double BuildSeconds(const BuildCost& cost, const BuildSize& size, uint32_t iterations);
// Returns the largest number of iterations, in [1, most], that finish within `seconds`.
uint32_t IterationsWithin(const BuildCost& cost, const BuildSize& size, double seconds,
                          uint32_t most);
// Returns the seconds that the engine needs for the prefill of `token_count` tokens in one layer;
// the keys may be clustered during that time. 0 without tokens, and when no coefficient is known.
double PrefillSeconds(const PrefillCost& cost, uint32_t token_count);

class CostModel {
 public:
  // `file`: path of the cost file; empty = costs are not saved.
  CostModel(const kernels::Exec& exec, std::string file);

  BuildCost Measured(const LayerShape& shape, const IndexDescriptor& index);

  // Returns "CPU model, core count, instruction set", the key under which measurements are valid.
  static std::string MachineKey(const kernels::Exec& exec);

 private:
  // dtype, key_dim, row_bytes, m, b
  using Kind = std::array<uint32_t, 6>;

  void Load() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Text() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const kernels::Exec exec_;
  const std::string file_;
  Mutex mutex_;
  bool loaded_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<Kind, BuildCost> costs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_COST_MODEL_H_
