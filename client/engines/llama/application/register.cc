// pqc_llama_register: loads the plug-in into a ggml that does not load libraries by itself.
#include <dlfcn.h>

#include <string>

#include "client/engines/llama/application/last_error.h"
#include "client/engines/llama/application/pqcached_llama.h"
#include "client/engines/llama/loaded_functions.h"

namespace {

using pqcached::llama::LoadedFunctions;
using pqcached::llama::SetLastError;
using pqcached::llama::WithoutExceptions;

constexpr const char* kPlugin = "libggml-pqcached.so";

pqc_status Register(const char* path) {
  void* (*reg_by_name)(const char*) = nullptr;
  void (*register_backend)(void*) = nullptr;
  LoadedFunctions ggml("libggml");
  ggml.Find("ggml_backend_reg_by_name", &reg_by_name);
  ggml.Find("ggml_backend_register", &register_backend);
  if (!ggml.missing().empty()) {
    return SetLastError(PQC_FAILED_PRECONDITION,
                        "the process shows no function " + ggml.missing() +
                            ": a program with ggml in it has to be linked with -rdynamic");
  }
  if (reg_by_name("PQCACHED") != nullptr) return SetLastError(PQC_OK, "");
  void* const library = dlopen(path == nullptr ? kPlugin : path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return SetLastError(PQC_NOT_FOUND, dlerror());
  const auto init = reinterpret_cast<void* (*)()>(dlsym(library, "ggml_backend_init"));
  if (init == nullptr) return SetLastError(PQC_INVALID_ARGUMENT, "path: not a backend of ggml");
  void* const registry = init();
  if (registry == nullptr) {
    return SetLastError(PQC_FAILED_PRECONDITION,
                        "the plug-in has refused this ggml or its settings, and logged the reason");
  }
  register_backend(registry);
  return SetLastError(PQC_OK, "");
}

}  // namespace

pqc_status pqc_llama_register(const char* path) {
  return WithoutExceptions([&] { return Register(path); });
}
