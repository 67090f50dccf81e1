// pqc_llama_offload: asks the plug-in to offload tokens, and frees their cells.
#include <string>

#include "client/engines/llama/application/last_error.h"
#include "client/engines/llama/application/pqcached_llama.h"
#include "client/engines/llama/loaded_functions.h"

struct llama_memory_i;

namespace {

using pqcached::llama::LoadedFunctions;
using pqcached::llama::SetLastError;
using pqcached::llama::WithoutExceptions;

struct Functions {
  llama_memory_i* (*get_memory)(const llama_context*);
  bool (*memory_seq_rm)(llama_memory_i*, int32_t seq, int32_t begin, int32_t end);
  int32_t (*memory_seq_pos_min)(llama_memory_i*, int32_t seq);
  int32_t (*memory_seq_pos_max)(llama_memory_i*, int32_t seq);
  void* (*reg_by_name)(const char* name);
  void* (*reg_get_proc_address)(void* registry, const char* name);
};

// Finds the functions of llama.cpp and ggml in the process. Returns the first name that is missing.
std::string Load(Functions* functions) {
  LoadedFunctions llama("libllama"), ggml("libggml");
  llama.Find("llama_get_memory", &functions->get_memory);
  llama.Find("llama_memory_seq_rm", &functions->memory_seq_rm);
  llama.Find("llama_memory_seq_pos_min", &functions->memory_seq_pos_min);
  llama.Find("llama_memory_seq_pos_max", &functions->memory_seq_pos_max);
  ggml.Find("ggml_backend_reg_by_name", &functions->reg_by_name);
  ggml.Find("ggml_backend_reg_get_proc_address", &functions->reg_get_proc_address);
  return llama.missing().empty() ? ggml.missing() : llama.missing();
}

pqc_status Offload(llama_context* context, int32_t seq) {
  static Functions functions;
  static const std::string missing = Load(&functions);
  if (!missing.empty()) {
    return SetLastError(PQC_FAILED_PRECONDITION, "the process has no function " + missing);
  }
  // OffloadTokens of the plug-in (../backend.cc).
  pqc_status (*offload)(uint64_t, uint32_t*, uint32_t*, const char**) = nullptr;
  if (void* const registry = functions.reg_by_name("PQCACHED"); registry != nullptr) {
    offload = reinterpret_cast<decltype(offload)>(
        functions.reg_get_proc_address(registry, "pqcached_offload"));
  }
  if (offload == nullptr) {
    return SetLastError(PQC_FAILED_PRECONDITION,
                        "llama.cpp has not loaded libggml-pqcached.so (GGML_BACKEND_PATH)");
  }
  if (context == nullptr) return SetLastError(PQC_INVALID_ARGUMENT, "context: NULL");
  llama_memory_i* const memory = functions.get_memory(context);
  if (memory == nullptr) return SetLastError(PQC_INVALID_ARGUMENT, "context: it has no memory");
  const int32_t last = functions.memory_seq_pos_max(memory, seq);
  if (last < 0 || functions.memory_seq_pos_min(memory, seq) != 0) {
    return SetLastError(PQC_INVALID_ARGUMENT,
                        "seq: the sequence " + std::to_string(seq) + " has no position 0");
  }
  uint32_t begin = 0, end = 0;
  const char* problem = "";
  const pqc_status status = offload(static_cast<uint64_t>(last) + 1, &begin, &end, &problem);
  if (status != PQC_OK) return SetLastError(status, problem);
  if (begin < end) {
    functions.memory_seq_rm(memory, seq, static_cast<int32_t>(begin), static_cast<int32_t>(end));
  }
  return SetLastError(PQC_OK, "");
}

}  // namespace

pqc_status pqc_llama_offload(llama_context* context, int32_t seq) {
  return WithoutExceptions([&] { return Offload(context, seq); });
}
