// Opens a GPU for a cache: loads the library and reserves device memory.
#include "client/gpu/gpu.h"

#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/base/library.h"
#include "client/gpu/load.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::client {
namespace {

constexpr char kFileName[] = "libpqcached_gpu.so";
constexpr uint32_t kDefaultSequences = 8;
constexpr uint64_t kDefaultSelected = 4096;
constexpr uint32_t kDefaultCacheTokens = 4096;
constexpr uint32_t kDefaultLoads = 32;
using LongLong = unsigned long long;  // for %llu

bool SameShape(const LayerShape& a, const LayerShape& b) {
  return a.kv_heads == b.kv_heads && a.query_heads == b.query_heads && a.key_dim == b.key_dim &&
         a.value_dim == b.value_dim && a.dtype == b.dtype && a.scale == b.scale &&
         a.softcap == b.softcap;
}

gpu::StepLayerKind KindOf(kvstore::LayerKind kind) {
  switch (kind) {
    case kvstore::LayerKind::kFull:
      return gpu::StepLayerKind::kFull;
    case kvstore::LayerKind::kWindow:
      return gpu::StepLayerKind::kWindow;
    case kvstore::LayerKind::kSelected:
    case kvstore::LayerKind::kNone:    // not stored
    case kvstore::LayerKind::kValues:  // refused
      break;
  }
  return gpu::StepLayerKind::kSelected;
}

pqc_status ReadShape(GpuState& state) {
  for (const auto& [layer, shape] : state.cache->stored_layers) {
    if (!shape.has_keys()) {
      return Fail(PQC_UNIMPLEMENTED, "cache", "layer %u is of kind PQC_LAYERS_VALUES", layer);
    }
    if (state.layers.empty()) state.shape = shape;
    if (!SameShape(state.shape, shape)) {
      return Fail(PQC_UNIMPLEMENTED, "cache",
                  "layers %u and %u differ in shape; on a GPU all layers must have one shape",
                  state.layers.front(), layer);
    }
    state.layers.push_back(layer);
    state.kinds.push_back(KindOf(shape.kind));
    const bool has_window = shape.kind == kvstore::LayerKind::kWindow;
    state.windows.push_back(has_window ? state.cache->windows.at(layer) : 0);
  }
  if (state.layers.empty()) return Fail(PQC_INVALID_ARGUMENT, "cache", "it stores no layers");
  if (state.shape.softcap > 0) {
    return Fail(PQC_UNIMPLEMENTED, "cache", "softcap is not supported on a GPU in this version");
  }
  if (state.cache->has_indexed_layers && state.index.kind != kvstore::IndexKind::kPq) {
    return Fail(PQC_UNIMPLEMENTED, "options.index", "must be pq on a GPU in this version");
  }
  if (kvstore::IsWeighted(state.index)) {
    return Fail(PQC_UNIMPLEMENTED, "options.index.layout",
                "must not be PQC_SUBSPACES_WEIGHTED on a GPU in this version");
  }
  if (state.cache->has_indexed_layers &&
      !kernels::HasSelect(kvstore::GeometryOf(state.index, state.shape.key_dim))) {
    return Fail(PQC_UNIMPLEMENTED, "options.index",
                "%s; must have subspaces 1, 2, 4, 8 or 16 and bits 4 to 8 on a GPU",
                kvstore::NameOf(state.index).c_str());
  }
  return PQC_OK;
}

pqc_status ReadCapacities(const pqc_gpu_options& options, gpu::StepsOptions* to) {
  if (options.token_capacity < 1 || options.token_capacity > kMaxSequenceTokens) {
    return Fail(PQC_INVALID_ARGUMENT, "options.token_capacity", "%llu, must be 1 to 2^30",
                LongLong{options.token_capacity});
  }
  const uint64_t selected = options.selected_capacity
                                ? options.selected_capacity
                                : std::min(kDefaultSelected, options.token_capacity);
  if (selected > options.token_capacity) {
    return Fail(PQC_INVALID_ARGUMENT, "options.selected_capacity",
                "%llu, but token_capacity is %llu", LongLong{selected},
                LongLong{options.token_capacity});
  }
  if (options.disable_block_cache > 1 || (options.disable_block_cache && options.cache_tokens)) {
    return Fail(PQC_INVALID_ARGUMENT, "options.disable_block_cache",
                "must be 0, or 1 with cache_tokens 0");
  }
  if (const uint32_t policy = RawEnum(options.policy); policy > PQC_GPU_LFU) {
    return Fail(PQC_INVALID_ARGUMENT, "options.policy", "%u is unknown", policy);
  }
  static_assert(static_cast<int>(kernels::cuda::CachePolicy::kLru) == PQC_GPU_LRU + 1 &&
                static_cast<int>(kernels::cuda::CachePolicy::kLfu) == PQC_GPU_LFU + 1 &&
                static_cast<int>(kernels::cuda::CachePolicy::kFrequencyAdmission) ==
                    PQC_GPU_FREQUENCY + 1);
  const auto tokens = static_cast<uint32_t>(options.token_capacity);
  const auto or_default = [](uint32_t value, uint32_t fallback) {
    return value ? value : fallback;
  };
  to->device = options.device;
  to->sequence_capacity = or_default(options.sequence_capacity, kDefaultSequences);
  to->token_capacity = tokens;
  to->selected_capacity = static_cast<uint32_t>(selected);
  to->query_length = or_default(options.query_length, 1);
  to->span_capacity = or_default(options.segment_capacity, tokens / 1024 + 64);
  to->codebook_capacity = or_default(options.codebook_capacity, tokens / 32768 + 2);
  to->range_capacity = kvstore::kMaxExcludedRanges + 1;
  to->cache_tokens =
      options.disable_block_cache ? 0 : or_default(options.cache_tokens, kDefaultCacheTokens);
  to->max_loads = or_default(options.max_block_loads, kDefaultLoads);
  to->policy = static_cast<kernels::cuda::CachePolicy>(RawEnum(options.policy) + 1);
  to->codes_bytes = options.codes_bytes;
  return PQC_OK;
}

}  // namespace

// The library stays loaded forever: the driver's threads may outlive their work.
pqc_status LoadGpuLibrary(const char* path, const gpu::GpuEntry** entry) {
  std::string reasons;
  void* const library =
      LoadLibrary(path, kFileName, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE, &reasons);
  if (!library) {
    return Fail(PQC_FAILED_PRECONDITION, "", "no device support: %s: %s", kFileName,
                reasons.c_str());
  }
  const auto get =
      reinterpret_cast<const gpu::GpuEntry* (*)()>(dlsym(library, gpu::kGpuEntrySymbol));
  if (!get) {
    return Fail(PQC_FAILED_PRECONDITION, "", "no device support: %s has no %s",
                path ? path : kFileName, gpu::kGpuEntrySymbol);
  }
  const gpu::GpuEntry* found = get();
  if (found->steps_version != gpu::kStepsVersion) {
    return Fail(PQC_FAILED_PRECONDITION, "",
                "no device support: %s has version %u of the internal interface, this client %u; "
                "install the two libraries of the same release",
                path ? path : kFileName, found->steps_version, gpu::kStepsVersion);
  }
  *entry = found;
  return PQC_OK;
}

pqc_status OpenGpu(pqc_cache* cache, const pqc_gpu_options* caller_options,
                   const gpu::GpuEntry* entry, pqc_gpu** gpu) {
  if (!gpu) return Fail(PQC_INVALID_ARGUMENT, "gpu", "must not be NULL");
  *gpu = nullptr;
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  pqc_gpu_options options;
  RETURN_IF_ERROR(ReadStruct(caller_options, "options", &options));
  auto state = std::make_shared<GpuState>();
  state->cache = cache->state;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(FindRemote(*state->cache->client, &remote));
  if (!state->cache->client->local) {
    return Fail(PQC_UNIMPLEMENTED, "cache",
                "a GPU reads mapped memory, and this client's path is remote");
  }
  gpu::StepsOptions wanted;
  RETURN_IF_ERROR(ReadCapacities(options, &wanted));
  state->sequence_capacity = wanted.sequence_capacity;
  state->selected_capacity = wanted.selected_capacity;
  state->query_length = wanted.query_length;
  RETURN_IF_ERROR(
      ReadIndex(options.index, "options.index", state->cache->default_index, &state->index));
  RETURN_IF_ERROR(ReadShape(*state));
  const LayerShape& shape = state->shape;
  wanted.layer_count = static_cast<uint32_t>(state->layers.size());
  wanted.dtype = shape.dtype;
  wanted.key_dim = shape.key_dim;
  wanted.value_dim = shape.value_dim;
  wanted.kv_heads = shape.kv_heads;
  wanted.group_size = shape.group_size();
  wanted.scale = shape.scale;
  wanted.layer_kinds = state->kinds.data();
  wanted.layer_windows = state->windows.data();
  wanted.geometry = state->cache->has_indexed_layers
                        ? kvstore::GeometryOf(state->index, shape.key_dim)
                        : kernels::PqGeometry{shape.key_dim, 1, 4};  // any: nothing is coded
  if (!entry) {
    RETURN_IF_ERROR(LoadGpuLibrary(options.gpu_library_path, &entry));
  }
  gpu::Steps* steps = nullptr;
  RETURN_IF_ERROR(Report(entry->open(wanted, &steps), "options"));
  state->steps.reset(steps);
  DeviceLoadsOf(*state->cache->client)->SetEntry(*entry);
  *gpu = new pqc_gpu{std::move(state)};
  return PQC_OK;
}

pqc_status Report(const gpu::Outcome& outcome, const char* what) {
  switch (outcome.code) {
    case gpu::Code::kOk:
      return PQC_OK;
    case gpu::Code::kNoDevice:
      return Fail(PQC_FAILED_PRECONDITION, "", "no device support: %s", outcome.text);
    case gpu::Code::kUnsupported:
      return Fail(PQC_UNIMPLEMENTED, what, "%s", outcome.text);
    case gpu::Code::kInvalid:
      return Fail(PQC_INVALID_ARGUMENT, what, "%s", outcome.text);
    case gpu::Code::kOutOfMemory:
      return Fail(PQC_RESOURCE_EXHAUSTED, what, "%s", outcome.text);
    case gpu::Code::kFailed:
      break;
  }
  return Fail(PQC_INTERNAL, what, "%s", outcome.text);
}

pqc_status FindGpuLayer(const GpuState& gpu, uint32_t layer, uint32_t* ordinal) {
  const auto found = std::lower_bound(gpu.layers.begin(), gpu.layers.end(), layer);
  if (found == gpu.layers.end() || *found != layer) {
    return Fail(PQC_INVALID_ARGUMENT, "layer", "the cache stores no layer %u", layer);
  }
  *ordinal = static_cast<uint32_t>(found - gpu.layers.begin());
  return PQC_OK;
}

}  // namespace pqcached::client
