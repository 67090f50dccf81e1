#include "tests/tinylm/attention.h"

#include <algorithm>
#include <cmath>

namespace tinylm {

const float* KvRows::k(uint32_t head, uint32_t position) const {
  return k_[head].data() + size_t{position - first_position_} * head_dim_;
}

const float* KvRows::v(uint32_t head, uint32_t position) const {
  return v_[head].data() + size_t{position - first_position_} * head_dim_;
}

void KvRows::Clear(uint32_t first_position) {
  first_position_ = first_position;
  Truncate(first_position);
}

void KvRows::Append(const float* k, const float* v, uint32_t token_count) {
  const size_t heads = k_.size();
  for (size_t head = 0; head < heads; ++head) {
    for (uint32_t token = 0; token < token_count; ++token) {
      const size_t row = (token * heads + head) * head_dim_;
      k_[head].insert(k_[head].end(), k + row, k + row + head_dim_);
      v_[head].insert(v_[head].end(), v + row, v + row + head_dim_);
    }
  }
  token_count_ += token_count;
}

void KvRows::DropBefore(uint32_t position) {
  if (position <= first_position_) return;
  const auto floats = static_cast<std::ptrdiff_t>(position - first_position_) * head_dim_;
  for (auto* part : {&k_, &v_}) {
    for (auto& rows : *part) rows.erase(rows.begin(), rows.begin() + floats);
  }
  token_count_ -= position - first_position_;
  first_position_ = position;
}

void KvRows::Truncate(uint32_t end_position) {
  token_count_ = end_position - first_position_;
  for (auto* part : {&k_, &v_}) {
    for (auto& rows : *part) rows.resize(size_t{token_count_} * head_dim_);
  }
}

void AttendRows(const KvRows& rows, uint32_t begin, uint32_t end, const float* q,
                uint32_t query_heads, Workers& workers, float* o, float* lse) {
  // Long ranges are split, so that more threads than there are kv heads have work.
  constexpr uint32_t kSplitTokens = 8192;
  const uint32_t kv_heads = rows.kv_heads(), group_size = query_heads / kv_heads;
  const uint32_t dim = rows.head_dim();
  const uint32_t splits = std::max(1u, (end - begin + kSplitTokens - 1) / kSplitTokens);
  std::vector<float> part_o(size_t{splits} * query_heads * dim);
  std::vector<float> part_lse(size_t{splits} * query_heads);
  const auto attend = [&](uint32_t task) {
    const uint32_t split = task / kv_heads, head = task % kv_heads;
    const uint32_t first = begin + split * kSplitTokens;
    const uint32_t last = std::min(end, first + kSplitTokens);
    const size_t query = size_t{split} * query_heads + size_t{head} * group_size;
    BestKernels().attend({.head_dim = dim,
                          .q = q + size_t{head} * group_size * dim,
                          .row_count = group_size,
                          .group_size = group_size,
                          .first_position = last,
                          .k = rows.k(head, first),
                          .v = rows.v(head, first),
                          .key_count = last - first,
                          .first_key = first,
                          .o = part_o.data() + query * dim,
                          .lse = part_lse.data() + query});
  };
  if (end - begin < 1024) {  // waking a thread takes longer
    for (uint32_t task = 0; task < kv_heads; ++task) attend(task);
  } else {
    workers.Run(kv_heads * splits, attend);
  }
  std::fill_n(o, query_heads * dim, 0.0f);
  std::fill_n(lse, query_heads, -INFINITY);
  for (uint32_t split = 0; split < splits; ++split) {
    const size_t first = size_t{split} * query_heads;
    MergePartial(query_heads, dim, o, lse, part_o.data() + first * dim, part_lse.data() + first);
  }
}

void MergePartial(uint32_t heads, uint32_t head_dim, float* o_a, float* lse_a, const float* o_b,
                  const float* lse_b) {
  for (uint32_t head = 0; head < heads; ++head) {
    const float max = std::max(lse_a[head], lse_b[head]);
    if (max == -INFINITY) continue;
    const float weight_a = std::exp(lse_a[head] - max), weight_b = std::exp(lse_b[head] - max);
    const float sum = weight_a + weight_b;
    for (uint32_t d = head * head_dim; d < (head + 1) * head_dim; ++d) {
      o_a[d] = (o_a[d] * weight_a + o_b[d] * weight_b) / sum;
    }
    lse_a[head] = max + std::log(sum);
  }
}

FullAttention::FullAttention(const Config& config, Workers& workers)
    : config_(config), workers_(workers), layers_(config.layer_count(), KvRows(config)) {}

void FullAttention::BeginSequence() {
  for (KvRows& rows : layers_) rows.Clear(0);
  prefill_end_ = 0;
}

void FullAttention::Prefill(const KvChunk& chunk) {
  layers_[chunk.layer].Append(chunk.k, chunk.v, chunk.token_count);
  prefill_end_ = layers_[chunk.layer].end_position();
}

void FullAttention::Decode(const DecodeArgs& args) {
  KvRows& rows = layers_[args.layer];
  rows.Append(args.k, args.v, 1);
  std::vector<float> lse(config_.query_heads);
  AttendRows(rows, 0, rows.end_position(), args.q, config_.query_heads, workers_, args.o,
             lse.data());
  attended_ = {.selected = rows.end_position()};
}

void FullAttention::Rewind() {
  for (const uint32_t layer : config_.full_layers()) layers_[layer].Truncate(prefill_end_);
}

size_t FullAttention::engine_kv_bytes() const {
  size_t bytes = 0;
  for (const KvRows& rows : layers_) bytes += rows.bytes();
  return bytes;
}

WindowAttention::WindowAttention(const Config& config, const Options& options, Workers& workers)
    : config_(config),
      options_(options),
      workers_(workers),
      sinks_(config.layer_count(), KvRows(config)),
      windows_(sinks_) {}

WindowAttention::WindowAttention(const WindowAttention& other, const Config& config,
                                 Workers& workers)
    : config_(config),
      options_(other.options_),
      workers_(workers),
      sinks_(other.sinks_),
      windows_(other.windows_),
      prefill_end_(other.prefill_end_) {}

void WindowAttention::BeginSequence() {
  for (KvRows& rows : sinks_) rows.Clear(0);
  for (KvRows& rows : windows_) rows.Clear(0);
  prefill_end_ = 0;
}

void WindowAttention::Prefill(const KvChunk& chunk) {
  KvRows& sink = sinks_[chunk.layer];
  const uint32_t sink_left = options_.sink_tokens - sink.end_position();
  sink.Append(chunk.k, chunk.v, std::min(sink_left, chunk.token_count));
  KvRows& window = windows_[chunk.layer];
  window.Append(chunk.k, chunk.v, chunk.token_count);
  prefill_end_ = window.end_position();
  if (prefill_end_ > options_.window_tokens) {
    window.DropBefore(prefill_end_ - options_.window_tokens);
  }
}

void WindowAttention::Decode(const DecodeArgs& args) {
  std::vector<float> lse(config_.query_heads);
  DecodePartial(args, lse.data());
}

void WindowAttention::DecodePartial(const DecodeArgs& args, float* lse) {
  const uint32_t heads = config_.query_heads;
  KvRows& sink = sinks_[args.layer];
  if (args.position < options_.sink_tokens) sink.Append(args.k, args.v, 1);
  KvRows& window = windows_[args.layer];
  window.Append(args.k, args.v, 1);
  const uint32_t end = window.end_position();
  const uint32_t begin = end > options_.window_tokens ? end - options_.window_tokens : 0;
  AttendRows(window, begin, end, args.q, heads, workers_, args.o, lse);

  const uint32_t sink_end = std::min(begin, sink.end_position());
  std::vector<float> sink_o(size_t{heads} * config_.head_dim), sink_lse(heads);
  AttendRows(sink, 0, sink_end, args.q, heads, workers_, sink_o.data(), sink_lse.data());
  MergePartial(heads, config_.head_dim, args.o, lse, sink_o.data(), sink_lse.data());
  attended_ = {.sink = sink_end, .window = end - begin};
}

void WindowAttention::Rewind() {
  for (const uint32_t layer : config_.full_layers()) {
    windows_[layer].Truncate(prefill_end_);
    sinks_[layer].Truncate(std::min(prefill_end_, options_.sink_tokens));
  }
}

size_t WindowAttention::engine_kv_bytes() const {
  size_t bytes = 0;
  for (const uint32_t layer : config_.full_layers()) {
    bytes += sinks_[layer].bytes() + windows_[layer].bytes();
  }
  return bytes;
}

}  // namespace tinylm
