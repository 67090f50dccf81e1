// The C API: checks what the caller passes, and moves states between a context and the sidecar.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/engines/llama/application/last_error.h"
#include "client/engines/llama/application/llama_api.h"
#include "client/engines/llama/application/pqcached_llama.h"
#include "client/engines/llama/application/state.h"
#include "client/engines/llama/application/stored_prompts.h"

namespace {

using pqcached::llama::DescribeModel;
using pqcached::llama::FindRows;
using pqcached::llama::kStepTokens;
using pqcached::llama::KvShape;
using pqcached::llama::LlamaApi;
using pqcached::llama::LoadLlamaApi;
using pqcached::llama::ModelDescription;
using pqcached::llama::SetLastError;
using pqcached::llama::StateResult;
using pqcached::llama::StoredPrompts;
using pqcached::llama::WithoutExceptions;

constexpr size_t kMostNameBytes = 96;
constexpr size_t kMostFingerprintBytes = 256;
constexpr uint64_t kMostTokens = uint64_t{1} << 22;
constexpr uint32_t kDefaultTimeoutMs = 1000;

uint64_t Hash(const std::string& text) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325;
  for (const char each : text) hash = (hash ^ static_cast<unsigned char>(each)) * 0x100000001b3;
  return hash;
}

std::string Hexadecimal(uint64_t number) {
  std::string text(16, '0');
  for (size_t i = text.size(); i-- > 0; number >>= 4) text[i] = "0123456789abcdef"[number & 15];
  return text;
}

}  // namespace

struct pqc_llama_cache {
  LlamaApi api;
  const llama_model* model;
  KvShape shape;
  std::mutex mutex;
  StoredPrompts prompts;
};

namespace {

pqc_status Refuse(const std::string& message) {
  return SetLastError(PQC_INVALID_ARGUMENT, message);
}

pqc_status Report(const StateResult& result) { return SetLastError(result.status, result.message); }

// Sets *to to the caller's struct, as far as both know its fields.
pqc_status ReadOptions(const pqc_llama_options* from, pqc_llama_options* to) {
  if (from == nullptr) return Refuse("options: NULL");
  const size_t bytes = from->struct_size;
  if (bytes < sizeof(*to)) {
    return Refuse("options.struct_size: " + std::to_string(bytes) + ", and it has at least " +
                  std::to_string(sizeof(*to)) + " bytes: set it with PQC_INIT");
  }
  const auto* const unknown = reinterpret_cast<const char*>(from);
  if (std::any_of(unknown + sizeof(*to), unknown + bytes, [](char each) { return each != 0; })) {
    return SetLastError(PQC_UNIMPLEMENTED, "options: it has fields of a later version");
  }
  *to = *from;
  if (to->endpoint == nullptr || *to->endpoint == 0) return Refuse("options.endpoint: none");
  const size_t name_bytes =
      to->model_name == nullptr ? 0 : strnlen(to->model_name, kMostNameBytes + 1);
  if (name_bytes < 1 || name_bytes > kMostNameBytes) {
    return Refuse("options.model_name: it has 1 to " + std::to_string(kMostNameBytes) + " bytes");
  }
  if (to->kv_dtype == pqc_dtype{}) to->kv_dtype = PQC_F16;
  if (to->kv_dtype != PQC_F16 && to->kv_dtype != PQC_BF16 && to->kv_dtype != PQC_F32) {
    return Refuse("options.kv_dtype: " + std::to_string(to->kv_dtype) + " is no pqc_dtype");
  }
  if (to->timeout_ms == 0) to->timeout_ms = kDefaultTimeoutMs;
  return PQC_OK;
}

// Equal caches have equal names: the hash keeps models of other shapes apart.
StoredPrompts::Options PromptsOf(const pqc_llama_options& options, const ModelDescription& model) {
  const KvShape& shape = model.shape;
  std::string fingerprint =
      "llama.cpp, " + std::to_string(shape.layers) + " layers of " +
      std::to_string(shape.kv_heads) + " kv heads of " + std::to_string(shape.key_dim) + " and " +
      std::to_string(shape.value_dim) + " numbers of type " + std::to_string(shape.type) + ", " +
      options.model_name + ", " + model.fingerprint;
  StoredPrompts::Options prompts;
  prompts.endpoint = options.endpoint;
  prompts.tenant = options.tenant == nullptr ? "" : options.tenant;
  prompts.name = "llama.cpp/" + Hexadecimal(Hash(fingerprint)) + "/" + options.model_name;
  fingerprint.resize(std::min(fingerprint.size(), kMostFingerprintBytes));
  prompts.fingerprint = std::move(fingerprint);
  prompts.shape = shape;
  prompts.dtype = options.kv_dtype;
  prompts.timeout_ms = options.timeout_ms;
  prompts.thread_count = options.thread_count;
  return prompts;
}

// Copies the ids of tokens.
pqc_status ReadTokens(const int32_t* tokens, uint64_t count, std::vector<uint32_t>* ids) {
  if (count > kMostTokens) {
    return Refuse("count: " + std::to_string(count) + " is more than 2^22 tokens");
  }
  if (tokens == nullptr && count > 0) return Refuse("tokens: NULL");
  ids->resize(count);
  for (uint64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0) {
      return Refuse("tokens[" + std::to_string(i) + "]: " + std::to_string(tokens[i]) +
                    " is no token's id");
    }
    (*ids)[i] = static_cast<uint32_t>(tokens[i]);
  }
  return PQC_OK;
}

pqc_status CheckContext(const pqc_llama_cache& cache, llama_context* context, int32_t seq) {
  const LlamaApi& api = cache.api;
  if (context == nullptr) return Refuse("context: NULL");
  if (api.get_model(context) != cache.model) {
    return Refuse("context: it is of another model than the cache");
  }
  const uint32_t sequences = api.n_seq_max(context);
  if (seq < 0 || static_cast<uint32_t>(seq) >= sequences) {
    return Refuse("seq: " + std::to_string(seq) + ", and the context has the sequences 0 to " +
                  std::to_string(int64_t{sequences} - 1));
  }
  if (api.get_memory(context) == nullptr) return Refuse("context: it has no KV cache");
  return PQC_OK;
}

// A sequence's state, in memory that is not cleared first.
class StateMemory {
 public:
  std::span<std::byte> Make(size_t bytes) {
    bytes_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    return {bytes_.get(), bytes};
  }
  uint8_t* data() { return reinterpret_cast<uint8_t*>(bytes_.get()); }

 private:
  std::unique_ptr<std::byte[]> bytes_;
};

// Sets *state to the state that llama.cpp has of a sequence.
pqc_status GetState(const LlamaApi& api, llama_context* context, int32_t seq, StateMemory* memory,
                    std::span<std::byte>* state) {
  const size_t bytes = api.state_seq_get_size(context, seq);
  *state = memory->Make(bytes);
  if (bytes == 0 || api.state_seq_get_data(context, memory->data(), bytes, seq) != bytes) {
    return SetLastError(PQC_INTERNAL, "llama.cpp has not given the sequence's state");
  }
  return PQC_OK;
}

// Gives the rows of a sequence of at least `count` tokens.
pqc_status GetRows(const pqc_llama_cache& cache, llama_context* context, int32_t seq,
                   uint64_t count, StateMemory* memory, StoredPrompts::Rows* rows) {
  const pqc_status status = GetState(cache.api, context, seq, memory, &rows->state);
  if (status != PQC_OK) return status;
  const StateResult result = FindRows(rows->state, cache.shape, &rows->places);
  if (result.status != PQC_OK) return Report(result);
  if (rows->places.cells < count) {
    return Refuse("count: " + std::to_string(count) + ", and the sequence has " +
                  std::to_string(rows->places.cells) + " tokens");
  }
  return PQC_OK;
}

// Failures of the sidecar have the client's message; others have theirs already.
pqc_status ReportSidecar(pqc_status status, const pqc_llama_cache& cache, bool is_reported) {
  return is_reported ? status : SetLastError(status, cache.prompts.message());
}

pqc_status SavePrompt(pqc_llama_cache* cache, llama_context* context, int32_t seq,
                      std::vector<uint32_t> ids, uint64_t* stored) {
  const uint64_t count = ids.size();
  ids.resize(count - count % kStepTokens);
  if (ids.empty()) return SetLastError(PQC_OK, "");
  StateMemory memory;
  bool is_reported = false;
  const pqc_status status = cache->prompts.Save(ids, [&](StoredPrompts::Rows* rows) {
    const pqc_status got = GetRows(*cache, context, seq, count, &memory, rows);
    is_reported = got != PQC_OK;
    return got;
  });
  if (status == PQC_OK && stored != nullptr) *stored = ids.size();
  return ReportSidecar(status, *cache, is_reported);
}

// Loads a state of `count` tokens into an empty sequence, or leaves it empty.
pqc_status SetState(const LlamaApi& api, llama_context* context, int32_t seq,
                    std::span<const std::byte> state, uint64_t count) {
  llama_memory_i* const memory = api.get_memory(context);
  const size_t read = api.state_seq_set_data(
      context, reinterpret_cast<const uint8_t*>(state.data()), state.size(), seq);
  const bool is_loaded =
      read == state.size() && api.memory_seq_pos_min(memory, seq) == 0 &&
      api.memory_seq_pos_max(memory, seq) + int64_t{1} == static_cast<int64_t>(count) &&
      api.state_seq_get_size(context, seq) == state.size();
  if (is_loaded) return SetLastError(PQC_OK, "");
  api.memory_seq_rm(memory, seq, -1, -1);
  return SetLastError(
      PQC_FAILED_PRECONDITION,
      "llama.cpp refuses the rows of " + std::to_string(count) +
          " tokens (its log has the reason): too few free cells, flash attention is off, or the "
          "KV cache has another type than options.kv_dtype");
}

pqc_status RestorePrompt(pqc_llama_cache* cache, llama_context* context, int32_t seq,
                         const std::vector<uint32_t>& ids, uint64_t* restored) {
  const LlamaApi& api = cache->api;
  if (api.memory_seq_pos_max(api.get_memory(context), seq) >= 0) {
    return SetLastError(PQC_FAILED_PRECONDITION,
                        "seq: sequence " + std::to_string(seq) + " is not empty");
  }
  if (ids.size() > api.n_ctx(context)) {
    return Refuse("count: " + std::to_string(ids.size()) + ", and the context has " +
                  std::to_string(api.n_ctx(context)) + " cells");
  }
  if (ids.size() < 2) return SetLastError(PQC_OK, "");
  StateMemory memory;
  std::span<std::byte> state = {};
  uint32_t streams = 0;
  if (const pqc_status status = GetState(api, context, seq, &memory, &state); status != PQC_OK) {
    return status;
  }
  const StateResult result = pqcached::llama::CountStreams(state, &streams);
  if (result.status != PQC_OK) return Report(result);
  uint64_t loaded = 0;
  const auto make_rows = [&](uint64_t count, StoredPrompts::Rows* rows) {
    const auto cells = static_cast<uint32_t>(count);
    state = memory.Make(pqcached::llama::StateBytes(cache->shape, streams, cells));
    pqcached::llama::WriteState(cache->shape, streams, cells, state, &rows->places);
    rows->state = state;
    return PQC_OK;
  };
  const pqc_status status = cache->prompts.Load(ids, ids.size() - 1, make_rows, &loaded);
  if (status != PQC_OK || loaded == 0) return ReportSidecar(status, *cache, false);
  const pqc_status set = SetState(api, context, seq, state, loaded);
  if (set == PQC_OK) *restored = loaded;
  return set;
}

}  // namespace

pqc_status pqc_llama_cache_open(const llama_model* model, const pqc_llama_options* options,
                                pqc_llama_cache** cache) {
  if (cache == nullptr) return Refuse("cache: NULL");
  *cache = nullptr;
  return WithoutExceptions([&] {
    pqc_llama_options own = PQC_INIT(pqc_llama_options);
    if (const pqc_status status = ReadOptions(options, &own); status != PQC_OK) return status;
    if (model == nullptr) return Refuse("model: NULL");
    LlamaApi api = {};
    if (const std::string missing = LoadLlamaApi(&api); !missing.empty()) {
      return SetLastError(PQC_FAILED_PRECONDITION, missing);
    }
    ModelDescription description;
    const StateResult result = DescribeModel(api, model, own.kv_dtype, &description);
    if (result.status != PQC_OK) return Report(result);
    *cache = new pqc_llama_cache{
        api, model, description.shape, {}, StoredPrompts(PromptsOf(own, description))};
    return SetLastError(PQC_OK, "");
  });
}

void pqc_llama_cache_close(pqc_llama_cache* cache) { delete cache; }

pqc_status pqc_llama_match(pqc_llama_cache* cache, const int32_t* tokens, uint64_t count,
                           uint64_t* stored) {
  if (cache == nullptr || stored == nullptr) return Refuse("cache or stored: NULL");
  *stored = 0;
  return WithoutExceptions([&] {
    std::vector<uint32_t> ids;
    if (const pqc_status status = ReadTokens(tokens, count, &ids); status != PQC_OK) return status;
    if (count < 2) return SetLastError(PQC_OK, "");
    const std::lock_guard lock(cache->mutex);
    const pqc_status status = cache->prompts.Match(ids, stored);
    *stored = status == PQC_OK ? std::min(*stored, count - 1) : 0;
    return ReportSidecar(status, *cache, false);
  });
}

pqc_status pqc_llama_save(pqc_llama_cache* cache, llama_context* context, int32_t seq,
                          const int32_t* tokens, uint64_t count, uint64_t* stored) {
  if (stored != nullptr) *stored = 0;
  if (cache == nullptr) return Refuse("cache: NULL");
  return WithoutExceptions([&] {
    std::vector<uint32_t> ids;
    if (const pqc_status status = ReadTokens(tokens, count, &ids); status != PQC_OK) return status;
    if (const pqc_status status = CheckContext(*cache, context, seq); status != PQC_OK) {
      return status;
    }
    const std::lock_guard lock(cache->mutex);
    return SavePrompt(cache, context, seq, std::move(ids), stored);
  });
}

pqc_status pqc_llama_restore(pqc_llama_cache* cache, llama_context* context, int32_t seq,
                             const int32_t* tokens, uint64_t count, uint64_t* restored) {
  if (cache == nullptr || restored == nullptr) return Refuse("cache or restored: NULL");
  *restored = 0;
  return WithoutExceptions([&] {
    std::vector<uint32_t> ids;
    if (const pqc_status status = ReadTokens(tokens, count, &ids); status != PQC_OK) return status;
    if (const pqc_status status = CheckContext(*cache, context, seq); status != PQC_OK) {
      return status;
    }
    const std::lock_guard lock(cache->mutex);
    return RestorePrompt(cache, context, seq, ids, restored);
  });
}
