#include "client/engines/llama/application/stored_prompts.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "pqcached/load.h"

namespace pqcached::llama {
namespace {

constexpr uint64_t kMostChunkBytes = uint64_t{16} << 20;  // of rows, in one call

}  // namespace

StoredPrompts::StoredPrompts(Options options) : options_(std::move(options)) {
  layer_rows_.resize(options_.shape.layers);
}

StoredPrompts::~StoredPrompts() { Disconnect(); }

pqc_status StoredPrompts::Note(pqc_status status) {
  if (status == PQC_OK) return status;
  message_ = pqc_last_error();
  // The sidecar may not know the session, or the cache, any more; a late one must not be waited
  // for again.
  has_lost_connection_ = status == PQC_UNAVAILABLE || status == PQC_UNAUTHENTICATED ||
                         status == PQC_NOT_FOUND || status == PQC_DEADLINE_EXCEEDED;
  return status;
}

pqc_status StoredPrompts::Repeat(const std::function<pqc_status()>& request) {
  for (bool is_repeated = false;; is_repeated = true) {
    End();  // of a request that has thrown
    const bool was_connected = client_ != nullptr;
    has_lost_connection_ = false;
    pqc_status status = Connect();
    const bool is_connected = status == PQC_OK;
    if (is_connected) status = request();
    End();
    if (has_lost_connection_) Disconnect();
    const bool may_repeat = is_connected || was_connected;
    if (status == PQC_OK || !has_lost_connection_ || status == PQC_DEADLINE_EXCEEDED ||
        is_repeated || !may_repeat) {
      return status;
    }
  }
}

pqc_status StoredPrompts::Connect() {
  if (client_ != nullptr) return PQC_OK;
  pqc_client_options options = PQC_INIT(pqc_client_options);
  options.endpoint = options_.endpoint.c_str();
  options.tenant = options_.tenant.empty() ? nullptr : options_.tenant.c_str();
  options.client_name = "llama.cpp";
  options.timeout_ms = options_.timeout_ms;
  options.thread_count = options_.thread_count;
  if (const pqc_status status = Note(pqc_client_open(&options, &client_)); status != PQC_OK) {
    return status;
  }
  std::vector<uint32_t> layers(options_.shape.layers);
  std::iota(layers.begin(), layers.end(), 0);
  pqc_layer_group group = PQC_INIT(pqc_layer_group);
  group.kind = PQC_LAYERS_SELECTED;
  group.layers = layers.data();
  group.layer_count = options_.shape.layers;
  group.kv_heads = options_.shape.kv_heads;
  group.query_heads = options_.shape.query_heads;
  group.key_dim = options_.shape.key_dim;
  group.value_dim = options_.shape.value_dim;
  group.dtype = options_.dtype;
  pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
  spec.name = options_.name.c_str();
  spec.model_fingerprint = options_.fingerprint.c_str();
  spec.groups = &group;
  spec.group_count = 1;
  const pqc_status status = Note(pqc_cache_open(client_, &spec, &cache_));
  if (status != PQC_OK) pqc_client_close(std::exchange(client_, nullptr));
  return status;
}

void StoredPrompts::Disconnect() {
  // Handles of a closed client do not wait for the sidecar, which drops the sequence with the
  // session.
  pqc_cache_close(std::exchange(cache_, nullptr));
  pqc_client_close(std::exchange(client_, nullptr));
  pqc_sequence_detach(std::exchange(sequence_, nullptr));
}

pqc_status StoredPrompts::Begin(std::span<const uint32_t> tokens, uint64_t* stored) {
  pqc_sequence_options options = PQC_INIT(pqc_sequence_options);
  options.token_ids = tokens.data();
  options.token_id_count = tokens.size();
  options.retain = 1;
  return Note(pqc_sequence_create_with(cache_, &options, &sequence_, stored));
}

// Drops the sequence; its whole steps of tokens remain. When that fails, the session has to end.
void StoredPrompts::End() {
  if (sequence_ == nullptr || has_lost_connection_) return;
  if (pqc_sequence_drop(std::exchange(sequence_, nullptr)) != PQC_OK) has_lost_connection_ = true;
}

uint64_t StoredPrompts::ChunkTokens() const {
  return std::max<uint64_t>(kMostChunkBytes / options_.shape.TokenBytes(), 1);
}

void StoredPrompts::SetLayerRows(const Rows& rows, uint64_t begin, uint64_t count) {
  const KvShape& shape = options_.shape;
  const StateRows& places = rows.places;
  const bool has_order = !places.cell_of_position.empty();
  const uint64_t tokens = has_order ? places.cells : count;
  const uint64_t keys[] = {tokens, shape.kv_heads, shape.key_dim};
  const uint64_t values[] = {tokens, shape.kv_heads, shape.value_dim};
  // With an order, the cells are blocks of one token each.
  const auto set = [&](const uint64_t(&from)[3], uint64_t(&to)[4]) {
    uint64_t* next = to;
    *next++ = from[0];
    if (has_order) *next++ = 1;
    *next++ = from[1];
    *next = from[2];
  };
  set(keys, key_shape_);
  set(values, value_shape_);
  cells_ = PQC_INIT(pqc_block_table);
  if (has_order) {
    cells_.block_tokens = 1;
    cells_.token_count = count;
    cells_.slots = places.cell_of_position.data() + begin;
  }
  const auto tensor = [&](size_t place, uint64_t row_bytes, const uint64_t* dims) {
    pqc_tensor each = PQC_INIT(pqc_tensor);
    each.ptr = rows.state.data() + place + (has_order ? 0 : begin * row_bytes);
    each.dtype = options_.dtype;
    each.ndim = has_order ? 4 : 3;
    each.shape = dims;
    each.block_table = has_order ? &cells_ : nullptr;
    return each;
  };
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    pqc_layer_rows& each = layer_rows_[layer] = PQC_INIT(pqc_layer_rows);
    each.layer = layer;
    each.keys = tensor(places.keys[layer], shape.KeyRowBytes(), key_shape_);
    each.values = tensor(places.values[layer], shape.ValueRowBytes(), value_shape_);
  }
}

pqc_status StoredPrompts::Send(const Rows& rows, uint64_t begin, uint64_t end) {
  while (begin < end) {
    const uint64_t count = std::min(ChunkTokens(), end - begin);
    SetLayerRows(rows, begin, count);
    const pqc_status status = Note(
        pqc_enqueue_rows(sequence_, begin, layer_rows_.data(), options_.shape.layers, nullptr));
    if (status != PQC_OK) return status;
    begin += count;
  }
  return Note(pqc_sequence_flush(sequence_));
}

pqc_status StoredPrompts::Receive(const Rows& rows, uint64_t end) {
  for (uint64_t begin = 0; begin < end;) {
    const uint64_t count = std::min(ChunkTokens(), end - begin);
    SetLayerRows(rows, begin, count);
    const pqc_token_range tokens = {begin, begin + count};
    const pqc_status status =
        Note(pqc_load(sequence_, tokens, layer_rows_.data(), options_.shape.layers));
    if (status != PQC_OK) return status;
    begin += count;
  }
  return PQC_OK;
}

pqc_status StoredPrompts::Match(std::span<const uint32_t> tokens, uint64_t* stored) {
  return Repeat([&] {
    return Note(pqc_match_prefix(cache_, tokens.data(), tokens.size(), nullptr, 0, stored));
  });
}

pqc_status StoredPrompts::Save(std::span<const uint32_t> tokens, const GetRows& get_rows) {
  Rows rows;
  return Repeat([&] {
    uint64_t stored = 0;
    if (const pqc_status status = Begin(tokens, &stored); status != PQC_OK) return status;
    if (stored == tokens.size()) return PQC_OK;
    if (rows.state.empty()) {
      if (const pqc_status status = get_rows(&rows); status != PQC_OK) return status;
    }
    return Send(rows, stored, tokens.size());
  });
}

pqc_status StoredPrompts::Load(std::span<const uint32_t> tokens, uint64_t most,
                               const MakeRows& make_rows, uint64_t* loaded) {
  *loaded = 0;
  return Repeat([&] {
    uint64_t stored = 0;
    if (const pqc_status status = Begin(tokens, &stored); status != PQC_OK) return status;
    stored = std::min(stored, most);
    if (stored == 0) return PQC_OK;
    Rows rows;
    if (const pqc_status status = make_rows(stored, &rows); status != PQC_OK) return status;
    const pqc_status status = Receive(rows, stored);
    if (status == PQC_OK) *loaded = stored;
    return status;
  });
}

}  // namespace pqcached::llama
