// A sequence of one layer with an index, and its decode steps.
#ifndef PQCACHED_TESTS_BENCH_LOCAL_DECODING_H_
#define PQCACHED_TESTS_BENCH_LOCAL_DECODING_H_

#include <cstdint>
#include <vector>

#include "pqcached/client.h"
#include "tests/bench/local/sidecar.h"

namespace pqcached::bench {

// Ends the program when a call fails. Single-thread.
class Decoding {
 public:
  // Stores `tokens` tokens of `rows`, again and again, and builds the index.
  Decoding(pqc_client* client, pqc_cache* cache, const Rows& rows, uint64_t tokens,
           uint32_t query_seed, const pqc_build_options& build = QuickBuild());
  ~Decoding() { pqc_sequence_drop(sequence_); }
  Decoding(const Decoding&) = delete;
  Decoding& operator=(const Decoding&) = delete;

  // A step at the sequence's end; the caller abandons or ends it.
  pqc_step* Begin();
  pqc_sequence* sequence() { return sequence_; }
  // Waits until the rows of all steps are stored.
  void Flush();
  // A whole step; it hands in the row of its token only when `append`.
  void Step(const pqc_selection& selection, bool append);
  // The attention of the last step, [query_heads, dim].
  const std::vector<float>& output() const { return output_; }

 private:
  pqc_client* client_;
  const Rows& rows_;
  const pqc_build_options build_;
  pqc_sequence* sequence_ = nullptr;
  uint64_t next_;
  std::vector<float> queries_, output_, lse_;
  const uint64_t queries_shape_[3] = {1, kQueryHeads, kDim};
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_LOCAL_DECODING_H_
