// The functions of llama.h that are used, and the model as they describe it.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_LLAMA_API_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_LLAMA_API_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "client/engines/llama/application/state.h"
#include "pqcached/tensor.h"

struct llama_context;
struct llama_memory_i;
struct llama_model;

namespace pqcached::llama {

struct LlamaApi {
  int32_t (*model_meta_val_str)(const llama_model*, const char* key, char* text, size_t text_size);
  int32_t (*model_desc)(const llama_model*, char* text, size_t text_size);
  uint64_t (*model_size)(const llama_model*);
  uint64_t (*model_n_params)(const llama_model*);
  int32_t (*model_n_layer)(const llama_model*);
  int32_t (*model_n_embd)(const llama_model*);
  int32_t (*model_n_head)(const llama_model*);
  int32_t (*model_n_head_kv)(const llama_model*);
  int32_t (*model_n_swa)(const llama_model*);
  bool (*model_has_encoder)(const llama_model*);
  bool (*model_is_recurrent)(const llama_model*);
  bool (*model_is_hybrid)(const llama_model*);
  const llama_model* (*get_model)(const llama_context*);
  llama_memory_i* (*get_memory)(const llama_context*);
  uint32_t (*n_ctx)(const llama_context*);
  uint32_t (*n_seq_max)(const llama_context*);
  bool (*memory_seq_rm)(llama_memory_i*, int32_t seq, int32_t begin, int32_t end);
  int32_t (*memory_seq_pos_min)(llama_memory_i*, int32_t seq);
  int32_t (*memory_seq_pos_max)(llama_memory_i*, int32_t seq);
  size_t (*state_seq_get_size)(llama_context*, int32_t seq);
  size_t (*state_seq_get_data)(llama_context*, uint8_t* to, size_t size, int32_t seq);
  size_t (*state_seq_set_data)(llama_context*, const uint8_t* from, size_t size, int32_t seq);
};

// Finds all functions in the process. Returns "", or the reason why it cannot.
std::string LoadLlamaApi(LlamaApi* api);

struct ModelDescription {
  KvShape shape;
  std::string fingerprint;  // of all that llama.h says about the model
};

// Describes a model whose KV cache has elements of `dtype`.
//
// Errors: PQC_UNIMPLEMENTED  models whose states have another format, or whose rows cannot be
//                            stored
StateResult DescribeModel(const LlamaApi& api, const llama_model* model, pqc_dtype dtype,
                          ModelDescription* description);

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_LLAMA_API_H_
