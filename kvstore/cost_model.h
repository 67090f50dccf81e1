// CostModel: what training and coding cost on this machine, measured here; and how many iterations of
// k-means fit into a time.
//
// The time of one layer is `fixed + rows * (load + code) + sample * (load + iterations * step)` over
// its kv heads, shared by the workers. A kind of layer is measured when it is first asked for, in
// some ten milliseconds, and kept: in memory, and in a file together with a description of the
// machine, so that the next process need not measure. A file of another machine is measured anew.
//
// Thread-safe. A measurement runs on the caller's thread and holds no lock.
#ifndef PQCACHED_KVSTORE_COST_MODEL_H_
#define PQCACHED_KVSTORE_COST_MODEL_H_

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "kernels/exec.h"
#include "kvstore/mutex.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/store.h"

namespace pqcached::kvstore {

// Seconds of one thread and kv head.
struct BuildCost {
  double load = 0;  // a row into the samples of one sub-space
  double step = 0;  // an iteration, per sample and sub-space
  double code = 0;  // a row in all sub-spaces, with its cell counted and listed
};

// One layer, or several alike.
struct BuildSize {
  uint32_t head_count = 0;  // kv heads, over the layers
  uint32_t subspace_count = 0;
  uint32_t row_count = 0;     // per head
  uint32_t sample_count = 0;  // per head; rows trained on
  uint32_t worker_count = 1;
};

// Seconds until all is trained and coded.
double BuildSeconds(const BuildCost& cost, const BuildSize& size, uint32_t iterations);
// The most iterations that end within `seconds`, in [1, most].
uint32_t IterationsWithin(const BuildCost& cost, const BuildSize& size, double seconds,
                          uint32_t most);
// Time that the engine takes for the prefill of one layer of this many tokens, during which its keys
// may be clustered. 0 when no coefficient is known.
double PrefillSeconds(const PrefillCost& cost, uint32_t token_count);

class CostModel {
 public:
  // `file`: empty = not kept.
  CostModel(const kernels::Exec& exec, std::string file);

  BuildCost Measured(const LayerShape& shape, const IndexDescriptor& index);

  // "CPU model, level": what a measurement is good for.
  static std::string DescribeMachine(const kernels::Exec& exec);

 private:
  // dtype, key_dim, row_bytes, m, b
  using Kind = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>;

  void Load() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Text() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const kernels::Exec exec_;
  const std::string file_;
  Mutex mutex_;
  bool loaded_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<Kind, BuildCost> costs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_COST_MODEL_H_
