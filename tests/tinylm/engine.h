#ifndef PQCACHED_TESTS_TINYLM_ENGINE_H_
#define PQCACHED_TESTS_TINYLM_ENGINE_H_

// Inference of TinyLM on the CPU, in fp32: prefill in chunks, then token by token.
//
// With W of shape (out, in), no biases, rms(x; g) = x / sqrt(mean(x^2) + eps) * g, heads of
// D = head_dim, and rms in heads only with has_qk_norm:
//
//   x_i       = E[token_i]
//   for every layer:
//     a       = rms(x; input_norm)
//     q_h     = rms((Wq a)_h; q_norm) / sqrt(D)      k_g = rms((Wk a)_g; k_norm)      v_g = (Wv a)_g
//     sliding:  q_h, k_g = rope(., i);  sees the keys j with i - window < j <= i
//     full:     q_h = q_h * (1 + temperature_h * ln(max(i + 1, base) / base));  no rope;
//               sees all keys j <= i
//     rope_full: q_h, k_g = rope(., i);  sees all keys j <= i
//     x       = x + Wo [softmax_j(q_h . k_j) v_j]         query head h reads kv head h / group_size
//     b       = rms(x; mlp_norm)
//     x       = x + Wdown (silu(Wgate b) * (Wup b))
//   logits    = E rms(x; norm)
//
// The engine keeps the K and V of the sliding layers itself. While decoding, the full layers use an
// Attention.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tests/tinylm/attention.h"
#include "tests/tinylm/model.h"
#include "tests/tinylm/workers.h"

namespace tinylm {

// Single-thread: one sequence at a time.
class Engine {
 public:
  // Intermediate values of one token, for comparison with a reference. Prefill records those of its
  // last token.
  struct Trace {
    std::vector<std::vector<float>> hidden;   // after the embedding and after each layer
    std::vector<std::vector<float>> q, k, v;  // by layer
  };

  Engine(const Model& model, Workers& workers);
  // Copies the state of `other`, and runs on other threads.
  Engine(const Engine& other, Workers& workers);

  // Starts a sequence with exact attention over all tokens. Passes K and V of the full layers to
  // each of `attentions` chunk by chunk, and then drops them here. Returns the logits after the
  // last token. Calls `progress` (may be empty) with the number of tokens processed so far.
  std::vector<float> Prefill(std::span<const uint32_t> tokens,
                             std::span<Attention* const> attentions,
                             const std::function<void(uint32_t)>& progress = {},
                             Trace* trace = nullptr);

  // Feeds one token and returns the logits after it. REQUIRES: the same `attention` for all tokens
  // until Rewind.
  std::vector<float> Decode(uint32_t token, Attention& attention);

  // Returns to the end of the prefill.
  void Rewind(Attention& attention);

  uint32_t position() const { return position_; }
  size_t sliding_kv_bytes() const;

  // Tokens per step of the prefill; results do not depend on it beyond rounding.
  uint32_t chunk_tokens = 512;

 private:
  // Activations of a chunk: [tokens, ...] each.
  struct Activations;
  using FullLayer = std::function<void(uint32_t layer, Activations& act)>;

  void Forward(std::span<const uint32_t> tokens, const FullLayer& attend_full, Activations& act,
               Trace* trace);
  void Project(uint32_t layer, uint32_t first, uint32_t count, Activations& act);
  void Mlp(uint32_t layer, uint32_t first, uint32_t count, Activations& act);
  void AttendCausal(const KvRows& rows, uint32_t window, Activations& act);
  std::vector<float> Logits(const Activations& act) const;

  const Model& model_;
  Workers& workers_;
  std::vector<float> rope_frequency_;
  std::vector<KvRows> sliding_;  // by layer; empty for full ones
  uint32_t position_ = 0, prefill_end_ = 0;
};

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_ENGINE_H_
