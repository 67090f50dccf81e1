#include "tests/tinylm/engine.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "tests/tinylm/kernels.h"

namespace tinylm {
namespace {

constexpr uint32_t kRowTile = 64;  // tokens per task of the dense layers

void RmsNorm(const float* x, const std::vector<float>& gain, float epsilon, float* out) {
  const size_t count = gain.size();
  float sum = 0;
  for (size_t i = 0; i < count; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(count) + epsilon);
  for (size_t i = 0; i < count; ++i) out[i] = x[i] * scale * gain[i];
}

// y[rows, outputs] (+)= x[rows, inputs] W^T.
void Multiply(const Matrix& w, const float* x, float* y, uint32_t rows, bool add = false) {
  BestKernels().mat_mul({.a = x,
                         .a_stride = w.inputs,
                         .b = w.panels.data(),
                         .b_stride = kPanelColumns,
                         .b_panel_stride = size_t{w.inputs} * kPanelColumns,
                         .c = y,
                         .c_stride = w.outputs,
                         .rows = rows,
                         .inner = w.inputs,
                         .columns = w.outputs,
                         .add = add});
}

// Rotates in rotate-half layout. The angle is rounded to fp32 as in training, so that keys of the
// same token get the same rotation.
void Rope(const std::vector<float>& frequency, uint32_t position, float* head) {
  const size_t half = frequency.size();
  for (size_t d = 0; d < half; ++d) {
    const float angle = static_cast<float>(position) * frequency[d];
    const float c = std::cos(angle), s = std::sin(angle);
    const float low = head[d], high = head[d + half];
    head[d] = low * c - high * s;
    head[d + half] = high * c + low * s;
  }
}

std::vector<float> Row(const std::vector<float>& values, size_t row, size_t width) {
  const float* begin = values.data() + row * width;
  return {begin, begin + width};
}

}  // namespace

struct Engine::Activations {
  Activations(const Config& config, uint32_t tokens, uint32_t position)
      : token_count(tokens),
        first_position(position),
        x(size_t{tokens} * config.hidden),
        normed(x.size()),
        q(size_t{tokens} * config.query_heads * config.head_dim),
        k(size_t{tokens} * config.kv_heads * config.head_dim),
        v(k.size()),
        o(q.size()),
        gate(size_t{tokens} * config.intermediate),
        up(gate.size()) {}

  uint32_t token_count, first_position;
  std::vector<float> x, normed, q, k, v, o, gate, up;
};

Engine::Engine(const Model& model, Workers& workers)
    : model_(model), workers_(workers), sliding_(model.config.layer_count(), KvRows(model.config)) {
  const uint32_t dim = model.config.head_dim;
  for (uint32_t d = 0; d < dim / 2; ++d) {
    rope_frequency_.push_back(
        std::pow(model.config.rope_theta, -2.0f * static_cast<float>(d) / static_cast<float>(dim)));
  }
}

Engine::Engine(const Engine& other, Workers& workers)
    : chunk_tokens(other.chunk_tokens),
      model_(other.model_),
      workers_(workers),
      rope_frequency_(other.rope_frequency_),
      sliding_(other.sliding_),
      position_(other.position_),
      prefill_end_(other.prefill_end_) {}

std::vector<float> Engine::Prefill(std::span<const uint32_t> tokens,
                                   std::span<Attention* const> attentions,
                                   const std::function<void(uint32_t)>& progress, Trace* trace) {
  if (tokens.empty()) throw std::runtime_error("an empty prompt");
  const Config& config = model_.config;
  for (KvRows& rows : sliding_) rows.Clear(0);
  for (Attention* attention : attentions) attention->BeginSequence();

  std::vector<KvRows> full(config.layer_count(), KvRows(config));
  const auto attend_full = [&](uint32_t layer, Activations& act) {
    full[layer].Append(act.k.data(), act.v.data(), act.token_count);
    AttendCausal(full[layer], 0, act);
    for (Attention* attention : attentions) {
      attention->Prefill(
          {layer, act.first_position, act.token_count, act.k.data(), act.v.data(), act.q.data()});
    }
  };
  std::vector<float> logits;
  for (position_ = 0; position_ < tokens.size();) {
    const auto chunk =
        tokens.subspan(position_, std::min<size_t>(chunk_tokens, tokens.size() - position_));
    Activations act(config, static_cast<uint32_t>(chunk.size()), position_);
    const bool is_last = position_ + chunk.size() == tokens.size();
    Forward(chunk, attend_full, act, is_last ? trace : nullptr);
    if (progress) progress(position_);
    if (is_last) logits = Logits(act);
  }
  prefill_end_ = position_;
  for (Attention* attention : attentions) attention->EndPrefill();
  return logits;
}

std::vector<float> Engine::Decode(uint32_t token, Attention& attention) {
  Activations act(model_.config, 1, position_);
  const auto attend_full = [&](uint32_t layer, Activations& a) {
    attention.Decode({layer, position_, a.q.data(), a.k.data(), a.v.data(), a.o.data()});
  };
  Forward({&token, 1}, attend_full, act, nullptr);
  attention.EndStep();
  return Logits(act);
}

void Engine::Rewind(Attention& attention) {
  position_ = prefill_end_;
  for (uint32_t layer = 0; layer < model_.config.layer_count(); ++layer) {
    if (!model_.config.layer_is_full[layer]) sliding_[layer].Truncate(prefill_end_);
  }
  attention.Rewind();
}

size_t Engine::sliding_kv_bytes() const {
  size_t bytes = 0;
  for (const KvRows& rows : sliding_) bytes += rows.bytes();
  return bytes;
}

void Engine::Forward(std::span<const uint32_t> tokens, const FullLayer& attend_full,
                     Activations& act, Trace* trace) {
  const Config& config = model_.config;
  const uint32_t count = act.token_count, tiles = (count + kRowTile - 1) / kRowTile;
  const auto for_tiles = [&](auto&& body) {
    workers_.Run(tiles, [&](uint32_t tile) {
      body(tile * kRowTile, std::min(kRowTile, count - tile * kRowTile));
    });
  };
  for (uint32_t i = 0; i < count; ++i) {
    if (tokens[i] >= config.vocabulary) {
      throw std::runtime_error("token " + std::to_string(tokens[i]) + " is not in the vocabulary");
    }
    std::copy_n(model_.embedding.data() + size_t{tokens[i]} * config.hidden, config.hidden,
                act.x.data() + size_t{i} * config.hidden);
  }
  if (trace) trace->hidden.push_back(Row(act.x, count - 1, config.hidden));

  for (uint32_t layer = 0; layer < config.layer_count(); ++layer) {
    for_tiles([&](uint32_t first, uint32_t n) { Project(layer, first, n, act); });
    if (config.layer_is_full[layer]) {
      attend_full(layer, act);
    } else {
      KvRows& rows = sliding_[layer];
      rows.Append(act.k.data(), act.v.data(), count);
      AttendCausal(rows, config.window, act);
      // While decoding, rows before the window are kept for a rewind; questions are short.
      if (count > 1 && rows.end_position() > config.window) {
        rows.DropBefore(rows.end_position() - config.window);
      }
    }
    for_tiles([&](uint32_t first, uint32_t n) { Mlp(layer, first, n, act); });
    if (trace) {
      trace->q.push_back(Row(act.q, count - 1, size_t{config.query_heads} * config.head_dim));
      trace->k.push_back(Row(act.k, count - 1, size_t{config.kv_heads} * config.head_dim));
      trace->v.push_back(Row(act.v, count - 1, size_t{config.kv_heads} * config.head_dim));
      trace->hidden.push_back(Row(act.x, count - 1, config.hidden));
    }
  }
  position_ += count;
}

// Computes q, k and v of `count` tokens from `first` on: normed, scaled and, on sliding layers,
// rotated.
void Engine::Project(uint32_t layer, uint32_t first, uint32_t count, Activations& act) {
  const Config& config = model_.config;
  const LayerWeights& weights = model_.layers[layer];
  float* normed = act.normed.data() + size_t{first} * config.hidden;
  float* q = act.q.data() + size_t{first} * config.query_heads * config.head_dim;
  float* k = act.k.data() + size_t{first} * config.kv_heads * config.head_dim;
  for (uint32_t i = 0; i < count; ++i) {
    RmsNorm(act.x.data() + size_t{first + i} * config.hidden, weights.input_norm,
            config.rms_epsilon, normed + size_t{i} * config.hidden);
  }
  Multiply(weights.q, normed, q, count);
  Multiply(weights.k, normed, k, count);
  Multiply(weights.v, normed, act.v.data() + size_t{first} * config.kv_heads * config.head_dim,
           count);

  const uint32_t dim = config.head_dim;
  const float head_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const bool has_rope = config.layer_has_rope[layer];
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t position = act.first_position + first + i;
    const float length = static_cast<float>(position + 1) / config.temperature_base;
    const float log_length = std::log(std::max(length, 1.0f));
    for (uint32_t h = 0; h < config.query_heads; ++h, q += dim) {
      if (config.has_qk_norm) RmsNorm(q, weights.q_norm, config.rms_epsilon, q);
      const float temperature = has_rope ? 1.0f : 1.0f + weights.temperature[h] * log_length;
      for (uint32_t d = 0; d < dim; ++d) q[d] *= head_scale * temperature;
      if (has_rope) Rope(rope_frequency_, position, q);
    }
    for (uint32_t g = 0; g < config.kv_heads; ++g, k += dim) {
      if (config.has_qk_norm) RmsNorm(k, weights.k_norm, config.rms_epsilon, k);
      if (has_rope) Rope(rope_frequency_, position, k);
    }
  }
}

// Attends with the chunk's queries to `rows`, which end with the chunk's own rows.
void Engine::AttendCausal(const KvRows& rows, uint32_t window, Activations& act) {
  const Config& config = model_.config;
  const uint32_t group_size = config.group_size(), tile_tokens = kAttendRows / group_size;
  const uint32_t tiles = (act.token_count + tile_tokens - 1) / tile_tokens;
  const auto attend_tile = [&](uint32_t task) {
    const uint32_t head = task % config.kv_heads, first = task / config.kv_heads * tile_tokens;
    const uint32_t count = std::min(tile_tokens, act.token_count - first);
    const uint32_t position = act.first_position + first;
    const uint32_t oldest =
        window > 0 && position + 1 > window ? position + 1 - window : rows.first_position();
    float q[kAttendRows * kMaxHeadDim], o[kAttendRows * kMaxHeadDim], lse[kAttendRows];
    const size_t group_floats = size_t{group_size} * config.head_dim;
    const auto group = [&](std::vector<float>& of, uint32_t token) {
      return of.data() + (size_t{first + token} * config.kv_heads + head) * group_floats;
    };
    for (uint32_t i = 0; i < count; ++i) {
      std::copy_n(group(act.q, i), group_floats, q + i * group_floats);
    }
    BestKernels().attend({.head_dim = config.head_dim,
                          .q = q,
                          .row_count = count * group_size,
                          .group_size = group_size,
                          .first_position = position,
                          .k = rows.k(head, oldest),
                          .v = rows.v(head, oldest),
                          .key_count = position + count - oldest,
                          .first_key = oldest,
                          .window = window,
                          .o = o,
                          .lse = lse});
    for (uint32_t i = 0; i < count; ++i) {
      std::copy_n(o + i * group_floats, group_floats, group(act.o, i));
    }
  };
  if (act.token_count == 1) {
    for (uint32_t task = 0; task < config.kv_heads; ++task) attend_tile(task);
  } else {
    workers_.Run(tiles * config.kv_heads, attend_tile);
  }
}

// Adds the attention's output and the feed-forward block to x.
void Engine::Mlp(uint32_t layer, uint32_t first, uint32_t count, Activations& act) {
  const Config& config = model_.config;
  const LayerWeights& weights = model_.layers[layer];
  float* x = act.x.data() + size_t{first} * config.hidden;
  float* normed = act.normed.data() + size_t{first} * config.hidden;
  float* gate = act.gate.data() + size_t{first} * config.intermediate;
  float* up = act.up.data() + size_t{first} * config.intermediate;
  Multiply(weights.o, act.o.data() + size_t{first} * config.query_heads * config.head_dim, x, count,
           /*add=*/true);
  for (uint32_t i = 0; i < count; ++i) {
    RmsNorm(x + size_t{i} * config.hidden, weights.mlp_norm, config.rms_epsilon,
            normed + size_t{i} * config.hidden);
  }
  Multiply(weights.gate, normed, gate, count);
  Multiply(weights.up, normed, up, count);
  BestKernels().silu_mul(gate, up, size_t{count} * config.intermediate);
  Multiply(weights.down, gate, x, count, /*add=*/true);
}

std::vector<float> Engine::Logits(const Activations& act) const {
  const Config& config = model_.config;
  std::vector<float> normed(config.hidden), logits(config.vocabulary);
  RmsNorm(act.x.data() + size_t{act.token_count - 1} * config.hidden, model_.norm,
          config.rms_epsilon, normed.data());
  Multiply(model_.unembedding, normed.data(), logits.data(), 1);
  return logits;
}

}  // namespace tinylm
