#include "client/engines/llama/ggml_api.h"

#include <cstring>
#include <string_view>

#include "client/engines/llama/loaded_functions.h"

namespace pqcached::llama {
namespace {

std::string FindAll(GgmlApi* api) {
  LoadedFunctions lookup("libggml");
  lookup.Find("ggml_version", &api->version);
  lookup.Find("ggml_op_name", &api->op_name);
  lookup.Find("ggml_init", &api->init);
  lookup.Find("ggml_free", &api->free);
  lookup.Find("ggml_new_tensor_4d", &api->new_tensor_4d);
  lookup.Find("ggml_set_name", &api->set_name);
  lookup.Find("ggml_view_1d", &api->view_1d);
  lookup.Find("ggml_flash_attn_ext", &api->flash_attn_ext);
  lookup.Find("ggml_custom_4d", &api->custom_4d);
  lookup.Find("ggml_new_graph_custom", &api->new_graph_custom);
  lookup.Find("ggml_graph_clear", &api->graph_clear);
  lookup.Find("ggml_graph_add_node", &api->graph_add_node);
  lookup.Find("ggml_graph_n_nodes", &api->graph_n_nodes);
  lookup.Find("ggml_graph_node", &api->graph_node);
  lookup.Find("ggml_build_forward_expand", &api->build_forward_expand);
  lookup.Find("ggml_backend_graph_compute", &api->backend_graph_compute);
  lookup.Find("ggml_backend_free", &api->backend_free);
  lookup.Find("ggml_backend_dev_by_type", &api->backend_dev_by_type);
  lookup.Find("ggml_backend_dev_init", &api->backend_dev_init);
  lookup.Find("ggml_backend_reg_by_name", &api->backend_reg_by_name);
  lookup.Find("ggml_backend_reg_get_proc_address", &api->backend_reg_get_proc_address);
  lookup.Find("ggml_backend_cpu_buffer_type", &api->backend_cpu_buffer_type);
  lookup.Find("ggml_backend_buft_is_host", &api->backend_buft_is_host);
  return lookup.missing().empty() ? "" : "ggml has no function " + lookup.missing();
}

// Compares the description of a backend with the CPU backend, which leaves most functions out: the
// API version does not fix their order.
bool BackendsAreAsDescribed(const GgmlApi& api) {
  GgmlDevice* device = api.backend_dev_by_type(kGgmlCpuDevice);
  GgmlBackend* backend = device == nullptr ? nullptr : api.backend_dev_init(device, nullptr);
  if (backend == nullptr) return false;
  const GgmlBackendTable& table = backend->table;
  const bool is_as_described =
      backend->device == device && table.get_name != nullptr && table.free != nullptr &&
      !table.set_tensor_async && !table.get_tensor_async && !table.set_tensor_2d_async &&
      !table.get_tensor_2d_async && !table.cpy_tensor_async && !table.synchronize &&
      table.graph_plan_create && table.graph_plan_free && table.graph_plan_compute &&
      table.graph_compute && !table.event_record && !table.event_wait && !table.graph_optimize;
  api.backend_free(backend);
  return is_as_described;
}

// Compares the description of the tensor with tensors that this ggml makes, and sets
// flash_attn_op.
bool TensorsAreAsDescribed(GgmlApi* functions) {
  GgmlApi& api = *functions;
  GgmlContext* context = api.init({1 << 20, nullptr, false});
  if (context == nullptr) return false;
  GgmlTensor* q = api.new_tensor_4d(context, kGgmlF32, 64, 2, 8, 1);
  GgmlTensor* k = api.new_tensor_4d(context, kGgmlF16, 64, 32, 4, 1);
  GgmlTensor* v = api.new_tensor_4d(context, kGgmlF16, 64, 32, 4, 1);
  GgmlTensor* mask = api.new_tensor_4d(context, kGgmlF16, 32, 64, 1, 1);
  GgmlTensor* node = api.flash_attn_ext(context, q, k, v, mask, 0.5f, 0.0f, 3.0f);
  api.build_forward_expand(api.new_graph_custom(context, 64, false), node);
  const GgmlTensor* view = api.view_1d(context, k, 64, 128);
  api.set_name(k, "cache_k_l0");
  api.flash_attn_op = node->op;
  float parameters[3];
  std::memcpy(parameters, node->op_params, sizeof(parameters));
  const auto* const begin = static_cast<const char*>(k->data);
  const bool is_as_described =
      q->type == kGgmlF32 && k->type == kGgmlF16 && k->ne[0] == 64 && k->ne[2] == 4 &&
      k->nb[0] == 2 && k->nb[1] == 128 && begin != nullptr && view->view_src == k &&
      view->view_offs == 128 && view->data == begin + 128 && node->src[0] == q &&
      node->src[1] == k && node->src[2] == v && node->src[3] == mask && node->src[4] == nullptr &&
      node->ne[0] == 64 && node->ne[1] == 8 && parameters[0] == 0.5f && parameters[2] == 3.0f &&
      std::strcmp(k->name, "cache_k_l0") == 0 && (node->flags & kGgmlFlagCompute) != 0;
  api.free(context);
  return is_as_described;
}

}  // namespace

bool IsSetRows(const GgmlApi& api, const GgmlTensor& node) {
  return std::strcmp(api.op_name(node.op), "SET_ROWS") == 0;
}

bool IsView(const GgmlApi& api, const GgmlTensor& node) {
  const std::string_view name = api.op_name(node.op);
  return name == "NONE" || name == "RESHAPE" || name == "VIEW" || name == "PERMUTE" ||
         name == "TRANSPOSE";
}

std::string LoadGgmlApi(GgmlApi* api) {
  if (std::string problem = FindAll(api); !problem.empty()) return problem;
  const std::string version = std::string("ggml ") + api->version();
  const GgmlRegistry* cpu = api->backend_reg_by_name("CPU");
  if (cpu == nullptr) return version + " has no CPU backend, which computes the other nodes";
  if (cpu->api_version != kBackendApiVersion) {
    return version + " has backend API version " + std::to_string(cpu->api_version) +
           ", and this plug-in was made for version " + std::to_string(kBackendApiVersion);
  }
  if (!TensorsAreAsDescribed(api) ||
      std::strcmp(api->op_name(api->flash_attn_op), "FLASH_ATTN_EXT") != 0) {
    return version + " has tensors of another layout";
  }
  api->rope_op = -1;
  for (int32_t op = 0; op < api->flash_attn_op; ++op) {  // ROPE has a lower number
    if (std::strcmp(api->op_name(op), "ROPE") == 0) api->rope_op = op;
  }
  if (!BackendsAreAsDescribed(*api)) return version + " has backends of another layout";
  return "";
}

}  // namespace pqcached::llama
