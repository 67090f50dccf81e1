#include "tests/tinylm/tests/fake_client.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

struct pqc_client {};
struct pqc_cache {
  std::vector<uint32_t> layers;
  uint32_t kv_heads, query_heads, dim;
};
struct pqc_sequence {
  pqc_cache* cache;
  // By layer: [tokens][kv_heads][dim].
  std::map<uint32_t, std::vector<float>> keys, values;
  uint64_t prefill_end = 0;
};
struct pqc_step {
  pqc_sequence* sequence;
  uint64_t query_position;
};

namespace {

FakeSidecar sidecar;
std::string last_error;

pqc_status Fail(pqc_status status, const std::string& message) {
  last_error = message;
  return status;
}

bool IsDown(const char* call) { return sidecar.fail_call == call; }
pqc_status Down() { return Fail(PQC_UNAVAILABLE, "nobody listens"); }

size_t TokenFloats(const pqc_sequence& sequence) {
  return size_t{sequence.cache->kv_heads} * sequence.cache->dim;
}

uint64_t TokenCount(const pqc_sequence& sequence) {
  uint64_t count = UINT64_MAX;
  for (const auto& [layer, rows] : sequence.keys) {
    count = std::min<uint64_t>(count, rows.size() / TokenFloats(sequence));
  }
  return count;
}

bool HasShape(const pqc_tensor& tensor, uint64_t heads, uint64_t dim) {
  return tensor.struct_size == sizeof(pqc_tensor) && tensor.dtype == PQC_F32 && tensor.ndim == 3 &&
         !tensor.strides && tensor.shape[1] == heads && tensor.shape[2] == dim;
}

pqc_status Add(pqc_sequence& sequence, uint32_t layer, uint64_t first_position,
               const pqc_tensor& keys, const pqc_tensor& values) {
  const pqc_cache& cache = *sequence.cache;
  if (!sequence.keys.contains(layer)) return Fail(PQC_INVALID_ARGUMENT, "layer");
  if (!HasShape(keys, cache.kv_heads, cache.dim)) return Fail(PQC_INVALID_ARGUMENT, "keys");
  if (!HasShape(values, cache.kv_heads, cache.dim)) return Fail(PQC_INVALID_ARGUMENT, "values");
  const size_t floats = keys.shape[0] * TokenFloats(sequence);
  std::vector<float>& k = sequence.keys[layer];
  std::vector<float>& v = sequence.values[layer];
  if (k.size() != first_position * TokenFloats(sequence)) {
    return Fail(PQC_INVALID_ARGUMENT, "first_position");
  }
  const auto* key = static_cast<const float*>(keys.ptr);
  const auto* value = static_cast<const float*>(values.ptr);
  k.insert(k.end(), key, key + floats);
  v.insert(v.end(), value, value + floats);
  return PQC_OK;
}

float Dot(const float* a, const float* b, uint32_t dim) {
  return std::inner_product(a, a + dim, b, 0.0f);
}

// The k tokens of [begin, end) with the largest sum of softmax over the group.
std::vector<uint64_t> TopTokens(const pqc_sequence& sequence, uint32_t layer, uint32_t kv_head,
                                const float* queries, uint64_t begin, uint64_t end, uint64_t k) {
  const pqc_cache& cache = *sequence.cache;
  const uint32_t group_size = cache.query_heads / cache.kv_heads;
  const float* keys = sequence.keys.at(layer).data();
  std::vector<float> score(end - begin);
  for (uint32_t g = 0; g < group_size; ++g) {
    const float* q = queries + (kv_head * group_size + g) * cache.dim;
    std::vector<float> weight;
    for (uint64_t t = begin; t < end; ++t) {
      weight.push_back(
          std::exp(Dot(q, keys + t * TokenFloats(sequence) + kv_head * cache.dim, cache.dim)));
    }
    const float sum = std::accumulate(weight.begin(), weight.end(), 0.0f);
    for (size_t i = 0; i < score.size(); ++i) score[i] += weight[i] / sum;
  }
  std::vector<uint64_t> tokens(end - begin);
  std::iota(tokens.begin(), tokens.end(), begin);
  std::stable_sort(tokens.begin(), tokens.end(),
                   [&](uint64_t a, uint64_t b) { return score[a - begin] > score[b - begin]; });
  tokens.resize(k);
  return tokens;
}

void AttendTo(const pqc_sequence& sequence, uint32_t layer, const std::vector<uint64_t>& tokens,
              uint32_t query_head, const float* q, pqc_step_attention& out) {
  const pqc_cache& cache = *sequence.cache;
  const uint32_t kv_head = query_head / (cache.query_heads / cache.kv_heads);
  float* o = out.output + query_head * cache.dim;
  std::fill_n(o, cache.dim, 0.0f);
  float sum = 0;
  for (const uint64_t token : tokens) {
    const size_t row = token * TokenFloats(sequence) + kv_head * cache.dim;
    const float weight = std::exp(Dot(q, sequence.keys.at(layer).data() + row, cache.dim));
    sum += weight;
    for (uint32_t d = 0; d < cache.dim; ++d) {
      o[d] += weight * sequence.values.at(layer)[row + d];
    }
  }
  for (uint32_t d = 0; d < cache.dim && sum > 0; ++d) o[d] /= sum;
  out.lse[query_head] = std::log(sum);
}

}  // namespace

FakeSidecar& TheFakeSidecar() { return sidecar; }

const char* pqc_status_name(pqc_status status) { return status == PQC_OK ? "OK" : "FAILED"; }
const char* pqc_last_error() { return last_error.c_str(); }

pqc_status pqc_client_open(const pqc_client_options* options, pqc_client** client) {
  if (IsDown("open") || !options->endpoint) return Down();
  *client = new pqc_client;
  return PQC_OK;
}
void pqc_client_close(pqc_client* client) { delete client; }

pqc_status pqc_cache_open(pqc_client*, const pqc_cache_spec* spec, pqc_cache** cache) {
  const pqc_layer_group& group = spec->groups[0];
  if (spec->group_count != 1 || group.softmax_scale != 1.0f || group.key_dim != group.value_dim) {
    return Fail(PQC_INVALID_ARGUMENT, "groups");
  }
  *cache = new pqc_cache{{group.layers, group.layers + group.layer_count},
                         group.kv_heads,
                         group.query_heads,
                         group.key_dim};
  return PQC_OK;
}
void pqc_cache_close(pqc_cache* cache) { delete cache; }

pqc_status pqc_sequence_create(pqc_cache* cache, pqc_sequence** sequence) {
  *sequence = new pqc_sequence{cache, {}, {}};
  for (const uint32_t layer : cache->layers) (*sequence)->keys[layer];
  const std::string fail_call = sidecar.fail_call;
  sidecar = {};
  sidecar.fail_call = fail_call;
  return PQC_OK;
}

pqc_status pqc_sequence_drop(pqc_sequence* sequence) {
  delete sequence;
  return PQC_OK;
}

pqc_status pqc_sequence_truncate(pqc_sequence* sequence, uint64_t token_count) {
  if (token_count < sequence->prefill_end || token_count > TokenCount(*sequence)) {
    return Fail(PQC_INVALID_ARGUMENT, "token_count");
  }
  for (auto* part : {&sequence->keys, &sequence->values}) {
    for (auto& [layer, rows] : *part) rows.resize(token_count * TokenFloats(*sequence));
  }
  sidecar.token_count = token_count;
  return PQC_OK;
}

pqc_status pqc_sequence_describe(pqc_sequence* sequence, pqc_sequence_info* info) {
  info->token_count = TokenCount(*sequence);
  return PQC_OK;
}

pqc_status pqc_ingest(pqc_sequence* sequence, uint32_t layer, uint64_t first_position,
                      const pqc_tensor* keys, const pqc_tensor* values) {
  if (IsDown("ingest")) return Down();
  if (sidecar.is_built) return Fail(PQC_FAILED_PRECONDITION, "the prefill is closed");
  const pqc_status status = Add(*sequence, layer, first_position, *keys, *values);
  sidecar.token_count = TokenCount(*sequence);
  return status;
}

pqc_status pqc_index_make(const char*, const pqc_index_parameter*, uint32_t, pqc_index* index) {
  *index = {};
  index->kind = PQC_INDEX_GRAPH;
  return PQC_OK;
}

pqc_status pqc_add_query_samples(pqc_sequence*, const pqc_query_samples*, uint32_t) {
  return PQC_OK;
}

pqc_status pqc_build_index(pqc_sequence* sequence, const pqc_build_options* options) {
  sequence->prefill_end = TokenCount(*sequence);
  sidecar.is_built = true;
  sidecar.built.push_back(options->index);
  // Layers are built side by side and report in any order.
  double seconds = 0;
  for (uint32_t iteration = 0; iteration < 2; ++iteration) {
    for (auto layer = sequence->keys.rbegin(); layer != sequence->keys.rend(); ++layer) {
      pqc_build_progress progress{};
      progress.layer = layer->first;
      progress.index_bytes = 100 + layer->first;
      progress.codebook_bytes = 10;
      progress.seconds = seconds += 0.5;
      options->callback(options->callback_context, &progress);
    }
  }
  return PQC_OK;
}

pqc_status pqc_sequence_fork(pqc_sequence* parent, uint64_t, pqc_sequence** child) {
  *child = new pqc_sequence(*parent);
  return PQC_OK;
}

pqc_status pqc_step_begin(pqc_client*, const pqc_step_item* items, uint32_t item_count,
                          const pqc_step_options*, pqc_step** step) {
  if (item_count != 1 || items[0].query_length != 1) return Fail(PQC_INVALID_ARGUMENT, "items");
  if (items[0].query_position != TokenCount(*items[0].sequence)) {
    return Fail(PQC_INVALID_ARGUMENT, "query_position");
  }
  *step = new pqc_step{items[0].sequence, items[0].query_position};
  return PQC_OK;
}

pqc_status pqc_step_attend(pqc_step* step, uint32_t layer, const pqc_tensor* tensor,
                           const pqc_selection* selection, pqc_step_attention* out) {
  if (IsDown("attend")) return Down();
  const pqc_sequence& sequence = *step->sequence;
  const pqc_cache& cache = *sequence.cache;
  const uint64_t n = step->query_position + 1;
  const uint64_t ends = selection->sink_tokens + selection->window_tokens;
  if (!HasShape(*tensor, cache.query_heads, cache.dim) || tensor->shape[0] != 1) {
    return Fail(PQC_INVALID_ARGUMENT, "queries");
  }
  const auto budget = static_cast<uint64_t>(selection->ratio * static_cast<double>(n));
  const uint64_t k = budget > ends ? budget - ends : 0;
  const auto* queries = static_cast<const float*>(tensor->ptr);
  const uint32_t group_size = cache.query_heads / cache.kv_heads;
  for (uint32_t head = 0; head < cache.kv_heads; ++head) {
    const auto tokens = TopTokens(sequence, layer, head, queries, selection->sink_tokens,
                                  n - selection->window_tokens, k);
    for (uint32_t h = head * group_size; h < (head + 1) * group_size; ++h) {
      AttendTo(sequence, layer, tokens, h, queries + h * cache.dim, *out);
    }
  }
  out->counts[0] = static_cast<uint32_t>(k);
  return PQC_OK;
}

pqc_status pqc_step_end(pqc_step* step, const pqc_layer_rows* layers, uint32_t layer_count,
                        const uint32_t* accepted) {
  pqc_sequence& sequence = *step->sequence;
  const uint64_t position = step->query_position;
  delete step;
  if (IsDown("step_end")) return Down();
  if (layer_count != sequence.keys.size()) return Fail(PQC_INVALID_ARGUMENT, "layers");
  if (accepted) return Fail(PQC_UNIMPLEMENTED, "accepted");
  for (uint32_t i = 0; i < layer_count; ++i) {
    const pqc_status status =
        Add(sequence, layers[i].layer, position, layers[i].keys, layers[i].values);
    if (status != PQC_OK) return status;
  }
  ++sidecar.append_count;
  sidecar.token_count = TokenCount(sequence);
  return PQC_OK;
}

void pqc_step_abandon(pqc_step* step) { delete step; }

pqc_status pqc_merge(uint32_t rows, uint32_t dim, float* output_a, float* lse_a,
                     const float* output_b, const float* lse_b) {
  for (uint32_t row = 0; row < rows; ++row) {
    const float lse = std::log(std::exp(lse_a[row]) + std::exp(lse_b[row]));
    for (uint32_t d = row * dim; d < (row + 1) * dim; ++d) {
      output_a[d] =
          output_a[d] * std::exp(lse_a[row] - lse) + output_b[d] * std::exp(lse_b[row] - lse);
    }
    lse_a[row] = lse;
  }
  return PQC_OK;
}
