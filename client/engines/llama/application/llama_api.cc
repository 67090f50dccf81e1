#include "client/engines/llama/application/llama_api.h"

#include <cstdlib>

#include "client/engines/llama/loaded_functions.h"

namespace pqcached::llama {
namespace {

constexpr uint32_t kMostLayers = 1024;
constexpr uint32_t kMostKvHeads = 256;
constexpr uint32_t kMostGroupSize = 64;  // query heads of a kv head
constexpr uint32_t kLeastDim = 32;
constexpr uint32_t kMostDim = 256;

std::string MetaValue(const LlamaApi& api, const llama_model* model, const std::string& key) {
  char value[128] = {};
  return api.model_meta_val_str(model, key.c_str(), value, sizeof(value)) < 0 ? "" : value;
}

// A head's dimension, which the model's file has only where it is not the usual one.
uint32_t HeadDim(const LlamaApi& api, const llama_model* model, const char* name) {
  const std::string architecture = MetaValue(api, model, "general.architecture");
  const std::string value = MetaValue(api, model, architecture + ".attention." + name);
  if (!value.empty()) return static_cast<uint32_t>(std::strtoul(value.c_str(), nullptr, 10));
  const int32_t heads = api.model_n_head(model);
  return heads <= 0 ? 0 : static_cast<uint32_t>(api.model_n_embd(model) / heads);
}

void SetType(pqc_dtype dtype, KvShape* shape) {
  shape->element_bytes = dtype == PQC_F32 ? 4 : 2;
  switch (dtype) {
    case PQC_F32:
      shape->type = 0;
      return;
    case PQC_BF16:
      shape->type = 30;
      return;
    case PQC_F16:
      shape->type = 1;
      return;
  }
}

bool IsDim(uint32_t dim) { return dim >= kLeastDim && dim <= kMostDim && dim % 8 == 0; }

StateResult CheckShape(const KvShape& shape) {
  if (shape.layers < 1 || shape.layers > kMostLayers) {
    return {PQC_UNIMPLEMENTED, "the model has " + std::to_string(shape.layers) +
                                   " layers, and 1 to 1024 can be stored"};
  }
  if (shape.kv_heads < 1 || shape.kv_heads > kMostKvHeads ||
      shape.query_heads % shape.kv_heads != 0 || shape.query_heads < shape.kv_heads ||
      shape.query_heads / shape.kv_heads > kMostGroupSize) {
    return {PQC_UNIMPLEMENTED,
            "the model has " + std::to_string(shape.query_heads) + " heads over " +
                std::to_string(shape.kv_heads) +
                " kv heads, and 1 to 256 kv heads with 1 to 64 heads each can be stored"};
  }
  if (!IsDim(shape.key_dim) || !IsDim(shape.value_dim)) {
    return {PQC_UNIMPLEMENTED, "the model has head dims " + std::to_string(shape.key_dim) +
                                   " and " + std::to_string(shape.value_dim) +
                                   ", and multiples of 8 in 32 to 256 can be stored"};
  }
  return {};
}

}  // namespace

std::string LoadLlamaApi(LlamaApi* api) {
  LoadedFunctions functions("libllama");
  functions.Find("llama_model_meta_val_str", &api->model_meta_val_str);
  functions.Find("llama_model_desc", &api->model_desc);
  functions.Find("llama_model_size", &api->model_size);
  functions.Find("llama_model_n_params", &api->model_n_params);
  functions.Find("llama_model_n_layer", &api->model_n_layer);
  functions.Find("llama_model_n_embd", &api->model_n_embd);
  functions.Find("llama_model_n_head", &api->model_n_head);
  functions.Find("llama_model_n_head_kv", &api->model_n_head_kv);
  functions.Find("llama_model_n_swa", &api->model_n_swa);
  functions.Find("llama_model_has_encoder", &api->model_has_encoder);
  functions.Find("llama_model_is_recurrent", &api->model_is_recurrent);
  functions.Find("llama_model_is_hybrid", &api->model_is_hybrid);
  functions.Find("llama_get_model", &api->get_model);
  functions.Find("llama_get_memory", &api->get_memory);
  functions.Find("llama_n_ctx", &api->n_ctx);
  functions.Find("llama_n_seq_max", &api->n_seq_max);
  functions.Find("llama_memory_seq_rm", &api->memory_seq_rm);
  functions.Find("llama_memory_seq_pos_min", &api->memory_seq_pos_min);
  functions.Find("llama_memory_seq_pos_max", &api->memory_seq_pos_max);
  functions.Find("llama_state_seq_get_size", &api->state_seq_get_size);
  functions.Find("llama_state_seq_get_data", &api->state_seq_get_data);
  functions.Find("llama_state_seq_set_data", &api->state_seq_set_data);
  if (functions.missing().empty()) return "";
  return "the process has no function " + functions.missing() +
         ": libllama.so is not loaded, is of another version, or is linked into a program that "
         "hides its functions (-rdynamic shows them)";
}

StateResult DescribeModel(const LlamaApi& api, const llama_model* model, pqc_dtype dtype,
                          ModelDescription* description) {
  if (api.model_is_recurrent(model) || api.model_is_hybrid(model)) {
    return {PQC_UNIMPLEMENTED, "the model has recurrent layers, whose states are not stored"};
  }
  if (api.model_has_encoder(model)) {
    return {PQC_UNIMPLEMENTED, "the model has an encoder, whose output is not stored"};
  }
  if (api.model_n_swa(model) > 0) {
    return {PQC_UNIMPLEMENTED, "the model has window layers, whose caches are not stored"};
  }
  KvShape& shape = description->shape;
  shape.layers = static_cast<uint32_t>(api.model_n_layer(model));
  shape.kv_heads = static_cast<uint32_t>(api.model_n_head_kv(model));
  shape.query_heads = static_cast<uint32_t>(api.model_n_head(model));
  shape.key_dim = HeadDim(api, model, "key_length");
  shape.value_dim = HeadDim(api, model, "value_length");
  SetType(dtype, &shape);
  char text[128] = {};
  api.model_desc(model, text, sizeof(text));
  description->fingerprint = std::to_string(api.model_n_params(model)) + " parameters in " +
                             std::to_string(api.model_size(model)) + " bytes, " + text;
  return CheckShape(shape);
}

}  // namespace pqcached::llama
