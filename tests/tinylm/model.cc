#include "tests/tinylm/model.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "tests/tinylm/kernels.h"

namespace tinylm {
namespace {

using nlohmann::json;

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (!in) throw std::runtime_error("cannot be read");
  return content;
}

float F16ToF32(uint16_t half) {
  const uint32_t exponent = (half >> 10) & 31u, fraction = half & 0x3FFu;
  const float sign = half & 0x8000u ? -1.0f : 1.0f;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  if (exponent == 31) return fraction ? std::nanf("") : sign * INFINITY;
  return sign * std::bit_cast<float>((exponent + 112) << 23 | fraction << 13);
}

// A file of named tensors: 8 bytes of header size, a JSON header, the data.
class Safetensors {
 public:
  explicit Safetensors(std::string bytes) : bytes_(std::move(bytes)) {
    uint64_t header_bytes = 0;
    if (bytes_.size() < sizeof header_bytes) Fail("header", "is truncated");
    std::memcpy(&header_bytes, bytes_.data(), sizeof header_bytes);
    if (header_bytes > bytes_.size() - sizeof header_bytes) Fail("header", "is truncated");
    data_begin_ = sizeof header_bytes + header_bytes;
    header_ = json::parse(bytes_.begin() + sizeof header_bytes,
                          bytes_.begin() + static_cast<std::ptrdiff_t>(data_begin_));
  }

  // Returns a tensor in fp32. Throws if its shape is not `shape`.
  std::vector<float> Get(const std::string& name, const std::vector<uint64_t>& shape) const {
    if (!header_.contains(name)) Fail(name, "is missing");
    const json& entry = header_[name];
    if (entry.at("shape") != json(shape)) Fail(name, "has shape " + entry.at("shape").dump());
    const bool is_half = entry.at("dtype") == "F16";
    if (!is_half && entry.at("dtype") != "F32") Fail(name, "has an unknown dtype");
    size_t count = 1;
    for (const uint64_t size : shape) count *= size;
    const auto begin = entry.at("data_offsets").at(0).get<uint64_t>();
    const auto end = entry.at("data_offsets").at(1).get<uint64_t>();
    if (begin > end || end > bytes_.size() - data_begin_) Fail(name, "is outside of the file");
    if (end - begin != count * (is_half ? 2 : 4))
      Fail(name, "has a size that does not match its shape");

    const char* from = bytes_.data() + data_begin_ + begin;
    std::vector<float> values(count);
    if (!is_half) {
      std::memcpy(values.data(), from, count * sizeof(float));
      return values;
    }
    for (size_t i = 0; i < count; ++i) {
      uint16_t half;
      std::memcpy(&half, from + 2 * i, sizeof half);
      values[i] = F16ToF32(half);
    }
    return values;
  }

  // Returns the FNV-1a hash of the file.
  std::string Fingerprint() const {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char byte : bytes_) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3u;
    char text[32];
    std::snprintf(text, sizeof text, "tinylm-%016llx", static_cast<unsigned long long>(hash));
    return text;
  }

 private:
  [[noreturn]] void Fail(const std::string& name, const std::string& what) const {
    throw std::runtime_error(name + " " + what);
  }

  std::string bytes_;
  size_t data_begin_ = 0;
  json header_;
};

Matrix Pack(const std::vector<float>& weight, uint32_t outputs, uint32_t inputs) {
  Matrix matrix{.inputs = inputs, .outputs = outputs, .panels = std::vector<float>(weight.size())};
  for (uint32_t out = 0; out < outputs; ++out) {
    const size_t panel = size_t{out / kPanelColumns} * inputs * kPanelColumns + out % kPanelColumns;
    for (uint32_t in = 0; in < inputs; ++in) {
      matrix.panels[panel + size_t{in} * kPanelColumns] = weight[size_t{out} * inputs + in];
    }
  }
  return matrix;
}

Config ParseConfig(const json& file) {
  Config config;
  config.vocabulary = file.at("vocab_size");
  config.hidden = file.at("hidden_size");
  config.intermediate = file.at("intermediate_size");
  config.query_heads = file.at("num_attention_heads");
  config.kv_heads = file.at("num_key_value_heads");
  config.window = file.at("sliding_window");
  config.rms_epsilon = file.at("rms_norm_eps");
  config.rope_theta = file.at("rope_theta");
  config.temperature_base = file.at("attn_temp_base");
  config.head_dim = file.at("head_dim");
  config.has_qk_norm = file.value("qk_norm", true);
  bool slides = false;
  for (const std::string kind : file.at("layer_types")) {
    if (kind != "full" && kind != "sliding" && kind != "rope_full")
      throw std::runtime_error("has an unknown layer type " + kind);
    slides = slides || kind == "sliding";
    config.layer_is_full.push_back(kind != "sliding");
    config.layer_has_rope.push_back(kind != "full");
  }
  const bool fits = config.kv_heads > 0 && config.query_heads % config.kv_heads == 0 &&
                    (config.window > 0 || !slides) && IsHeadDim(config.head_dim) &&
                    config.hidden % kPanelColumns == 0 && config.vocabulary % kPanelColumns == 0 &&
                    config.intermediate % kPanelColumns == 0;
  if (!fits) throw std::runtime_error("has sizes that this engine does not support");
  return config;
}

LayerWeights LoadLayer(const Safetensors& file, const Config& config, uint32_t layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const auto matrix = [&](const char* name, uint32_t outputs, uint32_t inputs) {
    return Pack(file.Get(prefix + name + ".weight", {outputs, inputs}), outputs, inputs);
  };
  const auto gains = [&](const char* name, uint32_t count) {
    return file.Get(prefix + name + ".weight", {count});
  };
  const uint32_t hidden = config.hidden;
  LayerWeights weights;
  weights.input_norm = gains("input_layernorm", hidden);
  weights.mlp_norm = gains("post_attention_layernorm", hidden);
  if (config.has_qk_norm) {
    weights.q_norm = gains("self_attn.q_norm", config.head_dim);
    weights.k_norm = gains("self_attn.k_norm", config.head_dim);
  }
  if (!config.layer_has_rope[layer]) {
    weights.temperature = file.Get(prefix + "self_attn.attn_temp", {config.query_heads});
  }
  weights.q = matrix("self_attn.q_proj", config.query_heads * config.head_dim, hidden);
  weights.k = matrix("self_attn.k_proj", config.kv_heads * config.head_dim, hidden);
  weights.v = matrix("self_attn.v_proj", config.kv_heads * config.head_dim, hidden);
  weights.o = matrix("self_attn.o_proj", hidden, config.query_heads * config.head_dim);
  weights.gate = matrix("mlp.gate_proj", config.intermediate, hidden);
  weights.up = matrix("mlp.up_proj", config.intermediate, hidden);
  weights.down = matrix("mlp.down_proj", hidden, config.intermediate);
  return weights;
}

}  // namespace

std::vector<uint32_t> Config::full_layers() const {
  std::vector<uint32_t> layers;
  for (uint32_t layer = 0; layer < layer_count(); ++layer) {
    if (layer_is_full[layer]) layers.push_back(layer);
  }
  return layers;
}

Model LoadModel(const std::string& directory) {
  std::string path = directory + "/config.json";
  try {
    Model model;
    model.config = ParseConfig(json::parse(ReadFile(path)));
    const Config& config = model.config;
    path = directory + "/model.safetensors";
    const Safetensors file(ReadFile(path));
    model.embedding = file.Get("model.embed_tokens.weight", {config.vocabulary, config.hidden});
    model.unembedding = Pack(model.embedding, config.vocabulary, config.hidden);
    model.norm = file.Get("model.norm.weight", {config.hidden});
    for (uint32_t layer = 0; layer < config.layer_count(); ++layer) {
      model.layers.push_back(LoadLayer(file, config, layer));
    }
    model.fingerprint = file.Fingerprint();
    return model;
  } catch (const std::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

}  // namespace tinylm
