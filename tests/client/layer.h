// Made-up layers to put into a sidecar, and what is right about them.
#ifndef PQCACHED_TESTS_CLIENT_LAYER_H_
#define PQCACHED_TESTS_CLIENT_LAYER_H_

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pqcached/client.hpp"

namespace pqcached::testing {

// One layer's made-up rows, and what is right about them, computed in plain loops.
class Layer {
 public:
  static constexpr uint32_t kKvHeads = 2, kGroup = 3, kQueryHeads = kKvHeads * kGroup;
  static constexpr uint32_t kKeyDim = 64, kValueDim = 32;

  Layer(uint64_t tokens, uint32_t seed);

  uint64_t tokens() const { return tokens_; }
  // [end - begin, kv_heads, dim]
  Tensor keys(uint64_t begin, uint64_t end) const;
  Tensor values(uint64_t begin, uint64_t end) const;
  const float* key(uint64_t token, uint32_t kv_head) const;
  const float* value(uint64_t token, uint32_t kv_head) const;
  Tensor queries() const { return {queries_, {kQueryHeads, kKeyDim}}; }

  // Scaled by 1 / sqrt(key_dim).
  double Logit(uint64_t token, uint32_t query_head) const;
  // Over positions[kv_head].
  Attention Attend(const std::vector<std::vector<uint32_t>>& positions) const;
  // Per kv head, the `count` of `candidates` with the largest sum over the query heads of softmax;
  // ascending.
  std::vector<std::vector<uint32_t>> Best(const std::vector<uint32_t>& candidates,
                                          uint32_t count) const;

 private:
  const uint64_t tokens_;
  std::vector<float> keys_, values_, queries_;
};

// begin, begin + 1, ..., end - 1.
std::vector<uint32_t> Range(uint64_t begin, uint64_t end);

// The rows of tokens [begin, end), for each of the layers 0 .. layer_count - 1.
std::vector<LayerRows> RowsOf(const Layer& layer, uint64_t begin, uint64_t end,
                              uint32_t layer_count);

LayerGroup GroupOf(std::vector<uint32_t> layers, pqc_dtype dtype);
CacheSpec SpecOf(const std::string& name, std::vector<uint32_t> layers, pqc_dtype dtype = PQC_F32);

// Throws with the reason, which ends the test.
inline void MustBeOk(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}
// The value, or an exception with the reason.
template <class T>
T Must(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().ToString());
  return std::move(*result);
}

// A sequence of `layer_count` layers that all hold the first `tokens` of these rows, with its index.
// Inline: it calls the client, which this library's users link in one way or another.
inline Sequence FillIndexed(Cache& cache, const Layer& layer, uint64_t tokens, uint32_t layer_count,
                            uint64_t sink_tokens) {
  Sequence sequence = Must(cache.CreateSequence());
  for (uint32_t number = 0; number < layer_count; ++number) {
    MustBeOk(sequence.Ingest(number, 0, layer.keys(0, tokens), layer.values(0, tokens)));
  }
  MustBeOk(sequence.BuildIndex({.iterations = 3, .seed = 1, .sink_tokens = sink_tokens}));
  return sequence;
}

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_LAYER_H_
