// The functions of the ggml that has loaded the plug-in. They are looked up by name when the
// plug-in is loaded, so that it is built without ggml and runs with every version that has them.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_GGML_API_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_GGML_API_H_

#include <string>

#include "client/engines/llama/ggml_abi.h"

namespace pqcached::llama {

struct GgmlInitParams {
  size_t mem_size;
  void* mem_buffer;
  bool no_alloc;
};
// ith of nth threads; all of them make the call.
using GgmlCustomOp = void (*)(GgmlTensor* result, int ith, int nth, void* context);
inline constexpr int kGgmlAllThreads = -1;

struct GgmlApi {
  const char* (*version)();
  const char* (*op_name)(int32_t op);
  GgmlContext* (*init)(GgmlInitParams);
  void (*free)(GgmlContext*);
  GgmlTensor* (*new_tensor_4d)(GgmlContext*, GgmlType, int64_t, int64_t, int64_t, int64_t);
  GgmlTensor* (*set_name)(GgmlTensor*, const char*);
  GgmlTensor* (*view_1d)(GgmlContext*, GgmlTensor*, int64_t ne0, size_t offset);
  GgmlTensor* (*flash_attn_ext)(GgmlContext*, GgmlTensor* q, GgmlTensor* k, GgmlTensor* v,
                                GgmlTensor* mask, float scale, float max_bias, float softcap);
  GgmlTensor* (*custom_4d)(GgmlContext*, GgmlType, int64_t, int64_t, int64_t, int64_t,
                           GgmlTensor** args, int arg_count, GgmlCustomOp, int tasks,
                           void* context);
  GgmlGraph* (*new_graph_custom)(GgmlContext*, size_t size, bool grads);
  void (*graph_clear)(GgmlGraph*);
  void (*graph_add_node)(GgmlGraph*, GgmlTensor*);
  int (*graph_n_nodes)(GgmlGraph*);
  GgmlTensor* (*graph_node)(GgmlGraph*, int index);
  void (*build_forward_expand)(GgmlGraph*, GgmlTensor*);
  GgmlStatus (*backend_graph_compute)(GgmlBackend*, GgmlGraph*);
  void (*backend_free)(GgmlBackend*);
  GgmlDevice* (*backend_dev_by_type)(GgmlDeviceType);
  GgmlBackend* (*backend_dev_init)(GgmlDevice*, const char* params);
  GgmlRegistry* (*backend_reg_by_name)(const char*);
  void* (*backend_reg_get_proc_address)(GgmlRegistry*, const char*);
  GgmlBufferType* (*backend_cpu_buffer_type)();
  bool (*backend_buft_is_host)(GgmlBufferType*);

  int32_t flash_attn_op;  // number of FLASH_ATTN_EXT in this version
  int32_t rope_op;        // number of ROPE, or -1
};

// Looks up all functions in the libraries that the process has loaded. Returns why this version
// cannot be used, or an empty text.
std::string LoadGgmlApi(GgmlApi* api);

// Returns whether a node writes rows (SET_ROWS): src[0] has the rows, src[1] their places.
bool IsSetRows(const GgmlApi& api, const GgmlTensor& node);

// Returns whether a node only describes memory, so that there is nothing to compute.
bool IsView(const GgmlApi& api, const GgmlTensor& node);

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_GGML_API_H_
