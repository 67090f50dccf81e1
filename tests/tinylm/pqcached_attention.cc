#include "tests/tinylm/pqcached_attention.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "tests/tinylm/client_calls.h"

namespace tinylm {
namespace {

// Records the cost of each layer of a build: the time since the previous report counts for the
// reporting layer.
int RecordProgress(void* context, const pqc_build_progress* progress) {
  auto& layers = static_cast<PqcachedAttention::IndexBuild*>(context)->layers;
  double seconds_before = 0;
  for (const auto& layer : layers) seconds_before += layer.seconds;
  auto layer = std::lower_bound(layers.begin(), layers.end(), progress->layer,
                                [](const auto& entry, uint32_t id) { return entry.layer < id; });
  if (layer == layers.end() || layer->layer != progress->layer) {
    layer = layers.insert(layer, {.layer = progress->layer});
  }
  layer->seconds += progress->seconds - seconds_before;
  layer->index_bytes = progress->index_bytes;
  layer->codebook_bytes = progress->codebook_bytes;
  return 1;
}

}  // namespace

PqcachedAttention::PqcachedAttention(const Model& model, const Options& options, Workers& workers)
    : PqcachedAttention(model.config, model.fingerprint, options, workers) {}

PqcachedAttention::PqcachedAttention(const Config& config, const std::string& fingerprint,
                                     const Options& options, Workers& workers)
    : config_(config),
      options_(options),
      sink_and_window_(config_, options.engine_tokens, workers),
      selection_(Sized<pqc_selection>()) {
  auto client_options = Sized<pqc_client_options>();
  client_options.endpoint = options_.endpoint.c_str();
  client_options.client_name = "tinylm";
  client_options.path = options_.path;
  pqc_client* client = nullptr;
  Check(pqc_client_open(&client_options, &client), "pqc_client_open");
  client_.reset(client, pqc_client_close);
  OpenCache(fingerprint);
  own_steps_ = std::make_unique<SingleSteps>(client);
  steps_ = own_steps_.get();

  selection_.group_rule = PQC_SUM_SOFTMAX;
  selection_.sink_tokens = options_.engine_tokens.sink_tokens;
  selection_.window_tokens = options_.engine_tokens.window_tokens;
  SetSelection(FlatIndex(), 0.1);
}

PqcachedAttention::PqcachedAttention(const PqcachedAttention& parent, Steps& steps,
                                     Workers& workers)
    : config_(parent.config_),
      options_(parent.options_),
      sink_and_window_(parent.sink_and_window_, config_, workers),
      client_(parent.client_),
      cache_(parent.cache_),
      steps_(&steps),
      selection_(parent.selection_),
      token_budget_(parent.token_budget_) {
  Check(pqc_sequence_fork(parent.sequence_, 0, &sequence_), "pqc_sequence_fork");
}

PqcachedAttention::~PqcachedAttention() {
  own_steps_.reset();  // before its sequence is dropped
  if (sequence_) pqc_sequence_drop(sequence_);
}

std::unique_ptr<PqcachedAttention> PqcachedAttention::Fork(Steps& steps, Workers& workers) const {
  return std::unique_ptr<PqcachedAttention>(new PqcachedAttention(*this, steps, workers));
}

void PqcachedAttention::OpenCache(const std::string& fingerprint) {
  // Stores only the full layers: the engine keeps the sliding ones itself. Queries are already
  // scaled.
  const std::vector<uint32_t> layers = config_.full_layers();
  auto group = Sized<pqc_layer_group>();
  group.kind = PQC_LAYERS_SELECTED;
  group.layers = layers.data();
  group.layer_count = static_cast<uint32_t>(layers.size());
  group.kv_heads = config_.kv_heads;
  group.query_heads = config_.query_heads;
  group.key_dim = config_.head_dim;
  group.value_dim = config_.head_dim;
  group.dtype = options_.dtype;
  group.softmax_scale = 1.0f;
  const bool has_rope = config_.layer_has_rope[layers.front()];
  group.rope_layout = has_rope ? PQC_ROPE_HALF : PQC_ROPE_NONE;
  group.rope_theta = has_rope ? config_.rope_theta : 0;
  auto spec = Sized<pqc_cache_spec>();
  spec.name = options_.cache_name.c_str();
  spec.model_fingerprint = fingerprint.c_str();
  spec.groups = &group;
  spec.group_count = 1;
  spec.capacity_bytes = options_.capacity_bytes;
  spec.default_index = FlatIndex();
  if (options_.rank_count > 1) {
    spec.rank_group = options_.cache_name.c_str();
    spec.rank = options_.rank;
    spec.rank_count = options_.rank_count;
    spec.kv_head_begin = options_.rank * config_.kv_heads;
  }
  pqc_cache* cache = nullptr;
  Check(pqc_cache_open(client_.get(), &spec, &cache), "pqc_cache_open");
  cache_.reset(cache, pqc_cache_close);
}

void PqcachedAttention::SetSelection(const pqc_index& index, double ratio) {
  selection_.index = index;
  selection_.budget = PQC_BUDGET_RATIO;
  selection_.ratio = ratio;
  token_budget_ = 0;
}

void PqcachedAttention::SetTokenBudget(const pqc_index& index, uint64_t token_count) {
  selection_.index = index;
  selection_.budget = PQC_BUDGET_COUNT;
  token_budget_ = token_count;
}

void PqcachedAttention::BeginSequence() {
  if (sequence_) Check(pqc_sequence_drop(std::exchange(sequence_, nullptr)), "pqc_sequence_drop");
  Check(pqc_sequence_create(cache_.get(), &sequence_), "pqc_sequence_create");
  builds_.clear();
  new_rows_.clear();
  sink_and_window_.BeginSequence();
}

void PqcachedAttention::Prefill(const KvChunk& chunk) {
  const uint64_t shape[3] = {chunk.token_count, config_.kv_heads, config_.head_dim};
  const pqc_tensor keys = Borrow(chunk.k, shape), values = Borrow(chunk.v, shape);
  Check(pqc_ingest(sequence_, chunk.layer, chunk.first_position, &keys, &values), "pqc_ingest");
  sink_and_window_.Prefill(chunk);
  const auto needs_samples = [](const pqc_index& index) { return index.kind == PQC_INDEX_GRAPH; };
  if (std::any_of(options_.indexes.begin(), options_.indexes.end(), needs_samples)) {
    AddSamples(chunk);
  }
}

// Adds the queries of every kSampleGap-th token; the sidecar keeps as many as it has room for.
void PqcachedAttention::AddSamples(const KvChunk& chunk) {
  constexpr uint32_t kSampleGap = 4;
  if (chunk.q == nullptr) throw std::runtime_error("graphs need the queries of the prefill");
  const size_t query_floats = size_t{config_.query_heads} * config_.head_dim;
  std::vector<uint64_t> positions;
  std::vector<float> queries;
  for (uint32_t i = 0; i < chunk.token_count; i += kSampleGap) {
    positions.push_back(chunk.first_position + i);
    const float* const query = chunk.q + i * query_floats;
    queries.insert(queries.end(), query, query + query_floats);
  }
  const uint64_t shape[3] = {positions.size(), config_.query_heads, config_.head_dim};
  auto samples = Sized<pqc_query_samples>();
  samples.layer = chunk.layer;
  samples.positions = positions.data();
  samples.position_count = positions.size();
  samples.queries = Borrow(queries.data(), shape);
  Check(pqc_add_query_samples(sequence_, &samples, 1), "pqc_add_query_samples");
}

void PqcachedAttention::EndPrefill() {
  for (const pqc_index& index : options_.indexes) {
    if (index.kind == PQC_INDEX_FLAT) continue;
    builds_.push_back({.index = index, .layers = {}});
    auto build = Sized<pqc_build_options>();
    build.index = index;
    build.sink_tokens = options_.engine_tokens.sink_tokens;
    build.callback = RecordProgress;
    build.callback_context = &builds_.back();
    const auto start = std::chrono::steady_clock::now();
    Check(pqc_build_index(sequence_, &build), "pqc_build_index");
    builds_.back().seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
}

void PqcachedAttention::Decode(const DecodeArgs& args) {
  const uint32_t heads = config_.query_heads;
  std::vector<float> lse(heads);
  sink_and_window_.DecodePartial(args, lse.data());
  attended_ = sink_and_window_.last_attended();

  position_ = args.position;
  const size_t row_floats = size_t{config_.kv_heads} * config_.head_dim;
  new_rows_.push_back({args.layer, {args.k, args.k + row_floats}, {args.v, args.v + row_floats}});
  if (args.position + 1 <= selection_.sink_tokens + selection_.window_tokens) return;

  if (token_budget_ > 0) {
    selection_.token_count = std::min<uint64_t>(token_budget_, args.position + 1);
  }
  std::vector<float> middle_o(size_t{heads} * config_.head_dim), middle_lse(heads);
  attended_.selected = steps_->Attend({.sequence = sequence_,
                                       .position = args.position,
                                       .layer = args.layer,
                                       .query_heads = heads,
                                       .head_dim = config_.head_dim,
                                       .q = args.q,
                                       .selection = selection_,
                                       .o = middle_o.data(),
                                       .lse = middle_lse.data()});
  Check(pqc_merge(heads, config_.head_dim, args.o, lse.data(), middle_o.data(), middle_lse.data()),
        "pqc_merge");
}

void PqcachedAttention::EndStep() {
  steps_->End(sequence_, position_, config_.kv_heads, new_rows_);
  new_rows_.clear();
}

void PqcachedAttention::Rewind() {
  Check(pqc_sequence_truncate(sequence_, sink_and_window_.prefill_end()), "pqc_sequence_truncate");
  sink_and_window_.Rewind();
}

pqc_sequence_info PqcachedAttention::DescribeSequence() const {
  auto info = Sized<pqc_sequence_info>();
  Check(pqc_sequence_describe(sequence_, &info), "pqc_sequence_describe");
  return info;
}

pqc_index PqIndex(uint32_t subspaces, uint32_t bits) {
  auto index = Sized<pqc_index>();
  index.kind = PQC_INDEX_PQ;
  index.subspaces = subspaces;
  index.bits = bits;
  return index;
}

pqc_index GraphIndex() {
  auto index = Sized<pqc_index>();
  Check(pqc_index_make("graph", nullptr, 0, &index), "pqc_index_make");
  return index;
}

pqc_index FlatIndex() {
  auto index = Sized<pqc_index>();
  index.kind = PQC_INDEX_FLAT;
  return index;
}

}  // namespace tinylm
