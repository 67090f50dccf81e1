// The part of ggml's binary interface that the plug-in meets: tensors, and the tables of a backend
// with API version 2 (ggml-backend-impl.h). ggml does not publish these headers, and its tables
// have no size field, so the structs are described here. LoadGgmlApi (ggml_api.h) compares the
// tensor with what the loaded ggml makes; another API version is refused.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_GGML_ABI_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_GGML_ABI_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::llama {

inline constexpr int kBackendApiVersion = 2;

struct GgmlContext;
struct GgmlGraph;
struct GgmlBuffer;
struct GgmlBufferType;
struct GgmlBackend;
struct GgmlDevice;
struct GgmlRegistry;

enum GgmlType : int32_t {
  kGgmlF32 = 0,
  kGgmlF16 = 1,
  kGgmlI32 = 26,
  kGgmlI64 = 27,
  kGgmlBf16 = 30
};
enum GgmlStatus : int32_t { kGgmlFailed = -1, kGgmlSuccess = 0 };
enum GgmlDeviceType : int32_t { kGgmlCpuDevice = 0, kGgmlAccelDevice = 3 };

// ggml_tensor: element (i0, i1, i2, i3) lies at data + sum of i * nb.
struct GgmlTensor {
  GgmlType type;
  GgmlBuffer* buffer;
  int64_t ne[4];  // elements per dimension
  size_t nb[4];   // strides in bytes
  int32_t op;     // of the version: compare with GgmlApi's numbers
  int32_t op_params[16];
  int32_t flags;
  GgmlTensor* src[10];
  GgmlTensor* view_src;
  size_t view_offs;
  void* data;
  char name[64];
  void* extra;
  char padding[8];
};
inline constexpr int32_t kGgmlFlagCompute = 16;

struct GgmlDeviceCaps {
  bool async;
  bool host_buffer;
  bool buffer_from_host_ptr;
  bool events;
};
struct GgmlDeviceProps {
  const char* name;
  const char* description;
  size_t memory_free;
  size_t memory_total;
  GgmlDeviceType type;
  const char* device_id;
  GgmlDeviceCaps caps;
};

// ggml_backend. Members that stay null have the type of any function.
using GgmlUnused = void (*)();
struct GgmlBackendTable {
  const char* (*get_name)(GgmlBackend*);
  void (*free)(GgmlBackend*);
  GgmlUnused set_tensor_async, get_tensor_async, set_tensor_2d_async, get_tensor_2d_async;
  GgmlUnused cpy_tensor_async, synchronize;
  GgmlUnused graph_plan_create, graph_plan_free, graph_plan_update, graph_plan_compute;
  GgmlStatus (*graph_compute)(GgmlBackend*, GgmlGraph*);
  GgmlUnused event_record, event_wait, graph_optimize;
};
struct GgmlBackend {
  const uint8_t (*guid)[16];
  GgmlBackendTable table;
  GgmlDevice* device;
  void* context;
};

struct GgmlDeviceTable {
  const char* (*get_name)(GgmlDevice*);
  const char* (*get_description)(GgmlDevice*);
  void (*get_memory)(GgmlDevice*, size_t* free, size_t* total);
  GgmlDeviceType (*get_type)(GgmlDevice*);
  void (*get_props)(GgmlDevice*, GgmlDeviceProps*);
  GgmlBackend* (*init_backend)(GgmlDevice*, const char* params);
  GgmlBufferType* (*get_buffer_type)(GgmlDevice*);
  GgmlUnused get_host_buffer_type, buffer_from_host_ptr;
  bool (*supports_op)(GgmlDevice*, const GgmlTensor*);
  bool (*supports_buft)(GgmlDevice*, GgmlBufferType*);
  GgmlUnused offload_op, event_new, event_free, event_synchronize;
};
struct GgmlDevice {
  GgmlDeviceTable table;
  GgmlRegistry* registry;
  void* context;
};

struct GgmlRegistryTable {
  const char* (*get_name)(GgmlRegistry*);
  size_t (*get_device_count)(GgmlRegistry*);
  GgmlDevice* (*get_device)(GgmlRegistry*, size_t index);
  void* (*get_proc_address)(GgmlRegistry*, const char* name);
};
struct GgmlRegistry {
  int api_version;  // the first member in every version
  GgmlRegistryTable table;
  void* context;
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_GGML_ABI_H_
