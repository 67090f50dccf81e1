// pqcached client: C++20 over the C ABI of client.h. This header includes sequence.hpp, step.hpp
// and values.hpp (statuses, tensors, options and results). gpu.hpp adds steps and prefill on a GPU.
//
// Client, Cache, Sequence, Step and Decoder own their handle and move; they may be destroyed in any
// order. Nothing throws except std::bad_alloc: a function that may fail returns a Status or a
// Result<T>. Each function calls the function of the C ABI that its comment names; its errors,
// thread-safety and deadline, and whether repeating it can help, are written there, and the table
// of status codes at the top of status.h. A row is a KV entry: [key, value] of one token, layer and
// kv head.
//
// Example, which stores the rows of a prompt in one layer and attends to a tenth of them:
//
//     auto client = pqcached::Client::Open({.endpoint = "unix:///run/pqcached/pqcached.sock"});
//     if (!client.ok()) return client.status();
//     const pqcached::LayerGroup layers{.layers = {0}, .kv_heads = 8, .query_heads = 32,
//                                       .key_dim = 128, .value_dim = 128};
//     auto cache = client->OpenCache({.name = "demo", .model_fingerprint = "demo-1",
//                                     .groups = {layers}, .capacity_bytes = 64 << 20});
//     if (!cache.ok()) return cache.status();
//     auto sequence = cache->CreateSequence();
//     if (!sequence.ok()) return sequence.status();
//
//     pqcached::Status status = sequence->Ingest(0, 0, {k, {4096, 8, 128}}, {v, {4096, 8, 128}});
//     if (status.ok()) status = sequence->BuildIndex({.sink_tokens = 16});
//     if (!status.ok()) return status;
//
//     auto attention = sequence->Attend(
//         {.layer = 0, .query_position = 4095, .queries = {q, {32, 128}}},
//         {.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1});
//     if (!attention.ok()) return attention.status();
//     attention->Merge(own);  // the engine's part: sink and window
#ifndef PQCACHED_CLIENT_HPP_
#define PQCACHED_CLIENT_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pqcached/client.h"
#include "pqcached/sequence.hpp"
#include "pqcached/step.hpp"
#include "pqcached/values.hpp"

namespace pqcached {

// One tenant's KV space for one model (pqc_cache). Made by Client::OpenCache. Thread-safe, but for
// moves; the destructor closes the handle, and the cache remains in the sidecar.
class Cache {
 public:
  // Returns the handle for calls of the C ABI; this object still owns it.
  pqc_cache* get() const { return handle_.get(); }

  // Creates an empty sequence (pqc_sequence_create).
  Result<Sequence> CreateSequence() {
    pqc_sequence* sequence = nullptr;
    const pqc_status status = pqc_sequence_create(handle_.get(), &sequence);
    if (status != PQC_OK) return Status(status);
    return Sequence(sequence, sizes_);
  }

  // Creates a sequence that begins with the longest stored prefix of its prompt. *token_count (may
  // be null) receives the tokens of that prefix: the next position to ingest
  // (pqc_sequence_create_with).
  Result<Sequence> CreateSequence(const SequenceOptions& options, uint64_t* token_count = nullptr) {
    pqc_sequence_options c = PQC_INIT(pqc_sequence_options);
    c.token_ids = options.prompt.token_ids.data();
    c.token_id_count = options.prompt.token_ids.size();
    c.extra_key = options.prompt.extra_key.data();
    c.extra_key_bytes = options.prompt.extra_key.size();
    c.content_keys = options.prompt.content_keys.data();
    c.content_key_count = options.prompt.content_keys.size();
    c.group_key = options.group_key.data();
    c.group_key_bytes = options.group_key.size();
    c.at_least_tokens = options.at_least_tokens;
    if (options.retain) c.retain = *options.retain ? 1 : 2;
    if (options.live_index) {
      c.has_live_index = 1;
      c.iterations = options.live_index->iterations;
      c.index = options.live_index->index;
      c.seed = options.live_index->seed;
      c.train_tokens = options.live_index->train_tokens;
      c.sink_tokens = options.live_index->sink_tokens;
    }
    pqc_sequence* sequence = nullptr;
    const pqc_status status = pqc_sequence_create_with(handle_.get(), &c, &sequence, token_count);
    if (status != PQC_OK) return Status(status);
    return Sequence(sequence, sizes_);
  }

  // Opens a handle for a sequence of this cache that another client of the tenant may have created.
  // Its destructor closes the handle and does not drop the sequence. *token_count (may be null)
  // receives the next position to ingest (pqc_sequence_attach).
  Result<Sequence> Attach(uint64_t sequence_id, uint64_t* token_count = nullptr) {
    pqc_sequence* sequence = nullptr;
    const pqc_status status =
        pqc_sequence_attach(handle_.get(), sequence_id, &sequence, token_count);
    if (status != PQC_OK) return Status(status);
    return Sequence(sequence, sizes_, /*detaches=*/true);
  }

  // Drops the cache in the sidecar, with its cached prefixes (pqc_cache_drop).
  Status Drop() { return Status(pqc_cache_drop(handle_.get())); }

  // Returns whether a request fits: `token_count` prefill tokens that MatchPrefix has not found,
  // and `output_token_count` expected tokens. Reserves nothing (pqc_admit).
  Result<pqc_admission> Admit(uint64_t token_count, uint64_t output_token_count = 0) {
    pqc_admission admission = PQC_INIT(pqc_admission);
    const pqc_status status = pqc_admit(handle_.get(), token_count, output_token_count, &admission);
    if (status != PQC_OK) return Status(status);
    return admission;
  }

  // Returns how many tokens of the prompt are stored: a multiple of 128 (pqc_match_prefix_with).
  Result<uint64_t> MatchPrefix(const Prompt& prompt) {
    pqc_sequence_options c = PQC_INIT(pqc_sequence_options);
    c.token_ids = prompt.token_ids.data();
    c.token_id_count = prompt.token_ids.size();
    c.extra_key = prompt.extra_key.data();
    c.extra_key_bytes = prompt.extra_key.size();
    c.content_keys = prompt.content_keys.data();
    c.content_key_count = prompt.content_keys.size();
    uint64_t token_count = 0;
    const pqc_status status = pqc_match_prefix_with(handle_.get(), &c, &token_count);
    if (status != PQC_OK) return Status(status);
    return token_count;
  }

 private:
  friend class Client;
  struct Closer {
    void operator()(pqc_cache* cache) const { pqc_cache_close(cache); }
  };

  Cache(pqc_cache* handle, const CacheSpec& spec) : handle_(handle) {
    auto sizes = std::make_shared<Sequence::SizesByLayer>();
    for (const LayerGroup& group : spec.groups) {
      for (const uint32_t layer : group.layers) (*sizes)[layer] = {group.kv_heads, group.value_dim};
    }
    sizes_ = std::move(sizes);
  }

  std::unique_ptr<pqc_cache, Closer> handle_;
  std::shared_ptr<const Sequence::SizesByLayer> sizes_;  // shared with the sequences
};

// Reads the layer groups of a model from the content of its config.json (pqc_model_read,
// pqc_model_groups, pqc_model_close).
//
//     auto groups = pqcached::GroupsOf(text);
//     if (!groups.ok()) return groups.status();
//     auto cache = client.OpenCache({.name = "chat", .model_fingerprint = "m", .groups = *groups});
inline Result<std::vector<LayerGroup>> GroupsOf(const std::string& config_json,
                                                const std::string& rpc_library_path = {}) {
  pqc_model* model = nullptr;
  const pqc_status status = pqc_model_read(
      config_json.c_str(), rpc_library_path.empty() ? nullptr : rpc_library_path.c_str(), &model);
  if (status != PQC_OK) return Status(status);
  const std::unique_ptr<pqc_model, void (*)(pqc_model*)> owner(model, pqc_model_close);
  uint32_t count = 0;
  const auto* const groups = pqc_model_groups(model, &count);
  std::vector<LayerGroup> result(count);
  for (uint32_t i = 0; i < count; ++i) {
    const auto& group = groups[i];
    result[i] = {.kind = group.kind,
                 .layers = {group.layers, group.layers + group.layer_count},
                 .kv_heads = group.kv_heads,
                 .query_heads = group.query_heads,
                 .key_dim = group.key_dim,
                 .value_dim = group.value_dim,
                 .dtype = group.dtype,
                 .softmax_scale = group.softmax_scale,
                 .softcap = group.softcap,
                 .rope_layout = group.rope_layout,
                 .rope_theta = group.rope_theta,
                 .rotary_dim = group.rotary_dim,
                 .window_tokens = group.window_tokens};
  }
  return result;
}

// A connection and session with the sidecar (pqc_client). Thread-safe, but for moves; the
// destructor ends the session, which drops its sequences.
class Client {
 public:
  // Connects to the sidecar and opens a session (pqc_client_open).
  static Result<Client> Open(const ClientOptions& options) {
    pqc_client_options c = PQC_INIT(pqc_client_options);
    const auto given = [](const std::string& text) {
      return text.empty() ? nullptr : text.c_str();
    };
    c.endpoint = options.endpoint.c_str();
    c.tenant = given(options.tenant);
    c.client_name = given(options.client_name);
    c.timeout_ms = options.timeout_ms;
    c.rpc_library_path = given(options.rpc_library_path);
    c.path = options.path;
    c.thread_count = options.thread_count;
    c.parallel_for = options.parallel_for;
    c.parallel_for_context = options.parallel_for_context;
    c.staging_slot_bytes = options.staging_slot_bytes;
    c.staging_slot_count = options.staging_slot_count;
    c.tls_ca = given(options.tls_ca);
    c.tls_certificate = given(options.tls_certificate);
    c.tls_key = given(options.tls_key);
    c.tls_server_name = given(options.tls_server_name);
    c.token_file = given(options.token_file);
    pqc_client* client = nullptr;
    const pqc_status status = pqc_client_open(&c, &client);
    if (status != PQC_OK) return Status(status);
    return Client(client);
  }

  // Returns the handle for calls of the C ABI; this object still owns it.
  pqc_client* get() const { return handle_.get(); }

  // Takes ownership of a handle of the C ABI.
  static Client Adopt(pqc_client* handle) { return Client(handle); }

  // Returns how this client reaches the rows: by RPC, or in mapped memory (pqc_client_path).
  pqc_path path() const { return pqc_client_path(handle_.get()); }

  // Returns the client's counters: RPCs, mapped bytes, leases (pqc_client_count).
  Result<pqc_client_counts> Count() const {
    pqc_client_counts counts = PQC_INIT(pqc_client_counts);
    const pqc_status status = pqc_client_count(handle_.get(), &counts);
    if (status != PQC_OK) return Status(status);
    return counts;
  }

  // Changes the number of threads of the kernels: 0 = all cores, PQC_THREADS_CALLER = only the
  // calling thread (pqc_client_set_threads).
  Status SetThreads(uint32_t thread_count) {
    return Status(pqc_client_set_threads(handle_.get(), thread_count));
  }

  // Begins a step for `items`. `selection` holds for all layers; null = each call passes one.
  // timeout_ms: deadline of all the step's waits, in milliseconds; 0 = the client's. flags:
  // a sum of pqc_step_flag (pqc_step_begin).
  Result<Step> BeginStep(std::span<const StepItem> items, const Selection* selection = nullptr,
                         uint32_t timeout_ms = 0, uint64_t flags = 0) {
    const Step::BeginArguments terms(items, selection, timeout_ms, flags);
    pqc_step* step = nullptr;
    const pqc_status status =
        pqc_step_begin(handle_.get(), terms.items.data(), static_cast<uint32_t>(items.size()),
                       &terms.options, &step);
    if (status != PQC_OK) return Status(status);
    return Step(step, items.size());
  }

  // Opens the tenant's cache of this name, or joins it when it is open with the same spec
  // (pqc_cache_open).
  Result<Cache> OpenCache(const CacheSpec& spec) {
    std::vector<pqc_layer_group> groups(spec.groups.size(), PQC_INIT(pqc_layer_group));
    for (size_t i = 0; i < groups.size(); ++i) {
      const LayerGroup& group = spec.groups[i];
      groups[i].kind = group.kind;
      groups[i].layers = group.layers.data();
      groups[i].layer_count = static_cast<uint32_t>(group.layers.size());
      groups[i].kv_heads = group.kv_heads;
      groups[i].query_heads = group.query_heads;
      groups[i].key_dim = group.key_dim;
      groups[i].value_dim = group.value_dim;
      groups[i].dtype = group.dtype;
      groups[i].softmax_scale = group.softmax_scale;
      groups[i].softcap = group.softcap;
      groups[i].rope_layout = group.rope_layout;
      groups[i].rope_theta = group.rope_theta;
      groups[i].rotary_dim = group.rotary_dim;
      groups[i].window_tokens = group.window_tokens;
    }
    pqc_cache_spec c = PQC_INIT(pqc_cache_spec);
    c.name = spec.name.c_str();
    c.model_fingerprint = spec.model_fingerprint.c_str();
    c.groups = groups.data();
    c.group_count = static_cast<uint32_t>(groups.size());
    c.capacity_bytes = spec.capacity_bytes;
    c.default_index = spec.default_index;
    c.rank_group = spec.rank_group.empty() ? nullptr : spec.rank_group.c_str();
    c.rank = spec.rank;
    c.rank_count = spec.rank_count;
    c.kv_head_begin = spec.kv_head_begin;
    c.layer_begin = spec.layer_begin;
    c.numa_node = spec.numa_node;
    c.prefill_measured = spec.prefill_measured ? 1 : 0;
    std::copy(spec.prefill_seconds.begin(), spec.prefill_seconds.end(), c.prefill_seconds);
    pqc_cache* cache = nullptr;
    const pqc_status status = pqc_cache_open(handle_.get(), &c, &cache);
    if (status != PQC_OK) return Status(status);
    return Cache(cache, spec);
  }

  // An index of a type of the sidecar, which may be a plug-in: MakeIndex("sq", {{"bits", 4}})
  // (pqc_client_index_make).
  Result<Index> MakeIndex(const std::string& type,
                          const std::vector<IndexParameter>& parameters = {}) {
    const std::vector<pqc_index_parameter> c = Index::InC(parameters);
    Index index;
    index.struct_size = sizeof(pqc_index);
    const pqc_status status = pqc_client_index_make(handle_.get(), type.c_str(), c.data(),
                                                    static_cast<uint32_t>(c.size()), &index);
    if (status != PQC_OK) return Status(status);
    return index;
  }

  // Calls a unary Admin RPC by its name, for example "Stats", and returns its answer; both
  // messages are JSON with the proto's field names (pqc_admin_json).
  Result<std::string> AdminJson(const std::string& method, const std::string& request = "{}") {
    char* answer = nullptr;
    const pqc_status status =
        pqc_admin_json(handle_.get(), method.c_str(), request.c_str(), &answer);
    if (status != PQC_OK) return Status(status);
    std::string text = answer;
    pqc_free(answer);
    return text;
  }

 private:
  struct Closer {
    void operator()(pqc_client* client) const { pqc_client_close(client); }
  };
  explicit Client(pqc_client* handle) : handle_(handle) {}

  std::unique_ptr<pqc_client, Closer> handle_;
};

}  // namespace pqcached

#endif  // PQCACHED_CLIENT_HPP_
