#ifndef PQCACHED_TESTS_TINYLM_MODEL_H_
#define PQCACHED_TESTS_TINYLM_MODEL_H_

// The weights of TinyLM in fp32, in the engine's layout, read from config.json and
// model.safetensors.

#include <cstdint>
#include <string>
#include <vector>

namespace tinylm {

struct Config {
  uint32_t vocabulary = 0;
  uint32_t hidden = 0;
  uint32_t intermediate = 0;
  uint32_t query_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;  // 64 or 128
  bool has_qk_norm = false;
  uint32_t window = 0;  // of the sliding layers; includes the token itself
  float rms_epsilon = 0;
  float rope_theta = 0;
  float temperature_base = 0;
  std::vector<bool> layer_is_full;
  std::vector<bool> layer_has_rope;  // the full layers without it have a length temperature

  uint32_t layer_count() const { return static_cast<uint32_t>(layer_is_full.size()); }
  uint32_t group_size() const { return query_heads / kv_heads; }
  std::vector<uint32_t> full_layers() const;
};

// The transpose of a weight (out, in), split into panels of kPanelColumns outputs, as mat_mul
// expects it.
struct Matrix {
  uint32_t inputs = 0, outputs = 0;
  std::vector<float> panels;
};

struct LayerWeights {
  std::vector<float> input_norm, mlp_norm;
  std::vector<float> q_norm, k_norm;  // empty without has_qk_norm
  std::vector<float> temperature;     // empty on layers with rope
  Matrix q, k, v, o, gate, up, down;
};

struct Model {
  Config config;
  std::vector<float> embedding;  // [vocabulary, hidden]
  Matrix unembedding;            // the same weights
  std::vector<float> norm;
  std::vector<LayerWeights> layers;
  // of the weights' bytes; a cache of K and V is valid only for this model
  std::string fingerprint;
};

// Throws std::runtime_error that names the file and its fault.
Model LoadModel(const std::string& directory);

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_MODEL_H_
