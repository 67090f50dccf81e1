#ifndef PQCACHED_TESTS_TINYLM_ATTENTION_H_
#define PQCACHED_TESTS_TINYLM_ATTENTION_H_

// Interface of the attention that the engine's full layers use during decoding, and two
// implementations that need no other process: exact over all tokens, and over sink + window only.
// The third implementation is in pqcached_attention.h.
//
// K and V are passed during the prefill, chunk by chunk; a decode step then passes one query, key
// and value per layer. A sequence can be rewound to the end of its prefill, so that many questions
// share one prefilled context.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tests/tinylm/kernels.h"
#include "tests/tinylm/model.h"
#include "tests/tinylm/workers.h"

namespace tinylm {

// K and V of consecutive tokens of one layer: k, v [token_count, kv_heads, head_dim], keys after
// norm and rope; and queries as in DecodeArgs, q [token_count, query_heads, head_dim], or null.
struct KvChunk {
  uint32_t layer = 0;
  uint32_t first_position = 0;
  uint32_t token_count = 0;
  const float* k = nullptr;
  const float* v = nullptr;
  const float* q = nullptr;
};

// One token of one layer. The query is scaled already: q . k is the logit.
struct DecodeArgs {
  uint32_t layer = 0;
  uint32_t position = 0;
  const float* q = nullptr;  // [query_heads, head_dim]
  const float* k = nullptr;  // [kv_heads, head_dim]
  const float* v = nullptr;  // [kv_heads, head_dim]
  float* o = nullptr;        // [query_heads, head_dim], written
};

// Tokens that one decode step attends to, per layer and kv head.
struct AttendedTokens {
  uint64_t sink = 0, window = 0, selected = 0;
};

// Single-thread. Failures are std::runtime_error.
class Attention {
 public:
  virtual ~Attention() = default;

  virtual void BeginSequence() = 0;
  // Called for every full layer of a chunk, then for the next chunk.
  virtual void Prefill(const KvChunk& chunk) = 0;
  virtual void EndPrefill() {}
  // Attends to the token itself and all earlier tokens. Called for every full layer of a step in
  // order; EndStep follows.
  virtual void Decode(const DecodeArgs& args) = 0;
  virtual void EndStep() {}
  // Returns to the end of the prefill.
  virtual void Rewind() = 0;

  virtual AttendedTokens last_attended() const = 0;
  virtual size_t engine_kv_bytes() const = 0;
};

// K and V of one layer's tokens, [kv_heads] x [tokens, head_dim] each.
class KvRows {
 public:
  KvRows(uint32_t kv_heads, uint32_t head_dim) : head_dim_(head_dim), k_(kv_heads), v_(kv_heads) {}
  explicit KvRows(const Config& config) : KvRows(config.kv_heads, config.head_dim) {}

  uint32_t kv_heads() const { return static_cast<uint32_t>(k_.size()); }
  uint32_t head_dim() const { return head_dim_; }
  uint32_t first_position() const { return first_position_; }
  uint32_t end_position() const { return first_position_ + token_count_; }
  const float* k(uint32_t head, uint32_t position) const;
  const float* v(uint32_t head, uint32_t position) const;
  size_t bytes() const { return size_t{token_count_} * k_.size() * 2 * head_dim_ * sizeof(float); }

  void Clear(uint32_t first_position);
  // Appends k, v: [token_count, kv_heads, head_dim], at the positions from end_position() on.
  void Append(const float* k, const float* v, uint32_t token_count);
  void DropBefore(uint32_t position);
  void Truncate(uint32_t end_position);

 private:
  uint32_t head_dim_, first_position_ = 0, token_count_ = 0;
  std::vector<std::vector<float>> k_, v_;
};

// Computes the attention of one query token (q [query_heads, head_dim]) to rows [begin, end): o
// [query_heads, head_dim], lse [query_heads].
void AttendRows(const KvRows& rows, uint32_t begin, uint32_t end, const float* q,
                uint32_t query_heads, Workers& workers, float* o, float* lse);

// Merges the partial attention b into a: lse = ln(exp(lse_a) + exp(lse_b)), o weighted accordingly.
void MergePartial(uint32_t heads, uint32_t head_dim, float* o_a, float* lse_a, const float* o_b,
                  const float* lse_b);

// Exact attention over all tokens, whose K and V the engine holds: 4 bytes x 2 x head_dim x
// kv_heads per token and layer.
class FullAttention : public Attention {
 public:
  FullAttention(const Config& config, Workers& workers);

  void BeginSequence() override;
  void Prefill(const KvChunk& chunk) override;
  void Decode(const DecodeArgs& args) override;
  void Rewind() override;
  AttendedTokens last_attended() const override { return attended_; }
  size_t engine_kv_bytes() const override;

 private:
  const Config& config_;
  Workers& workers_;
  std::vector<KvRows> layers_;
  uint32_t prefill_end_ = 0;
  AttendedTokens attended_;
};

// Attention over the first and the last tokens (the current one included); the tokens between are
// dropped. Alone, it fails every question about the middle; merged with a sidecar's partial
// attention over the middle, it is complete.
class WindowAttention : public Attention {
 public:
  struct Options {
    uint32_t sink_tokens = 16;
    uint32_t window_tokens = 64;
  };
  WindowAttention(const Config& config, const Options& options, Workers& workers);
  // Copies the state of `other`, for a fork.
  WindowAttention(const WindowAttention& other, const Config& config, Workers& workers);

  void BeginSequence() override;
  void Prefill(const KvChunk& chunk) override;
  void Decode(const DecodeArgs& args) override;
  void Rewind() override;
  AttendedTokens last_attended() const override { return attended_; }
  size_t engine_kv_bytes() const override;

  // Like Decode, but also writes the log-sum-exp of the logits: lse [query_heads].
  void DecodePartial(const DecodeArgs& args, float* lse);
  uint32_t prefill_end() const { return prefill_end_; }

 private:
  const Config& config_;
  Options options_;
  Workers& workers_;
  // by layer; a window also keeps rows that a rewind needs again
  std::vector<KvRows> sinks_, windows_;
  uint32_t prefill_end_ = 0;
  AttendedTokens attended_;
};

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_ATTENTION_H_
