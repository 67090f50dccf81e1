#include "tests/quality/kcache_attention.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>

#include "tests/tinylm/client_calls.h"
#include "tests/tinylm/kernels.h"

namespace pqcached::quality {

using tinylm::Borrow;
using tinylm::Check;
using tinylm::DecodeArgs;
using tinylm::kPanelColumns;
using tinylm::Sized;

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Returns the positions of the `count` largest logits, ascending. Ties go to the lowest position.
std::vector<uint32_t> TopOf(const float* logits, uint32_t tokens, uint32_t count) {
  std::vector<uint32_t> top;
  std::vector<float> sorted(logits, logits + tokens);
  float least = kNone;
  uint32_t ties = tokens;  // logits that equal the least, to take
  if (count < tokens) {
    std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<>());
    least = sorted[count - 1];
    ties = count - static_cast<uint32_t>(std::count_if(sorted.begin(), sorted.begin() + count,
                                                       [&](float logit) { return logit > least; }));
  }
  for (uint32_t position = 0; position < tokens; ++position) {
    if (logits[position] < least || (logits[position] == least && ties == 0)) continue;
    if (logits[position] == least) --ties;
    top.push_back(position);
  }
  return top;
}

float LogSumExp(const float* logits, uint32_t tokens) {
  const float max = *std::max_element(logits, logits + tokens);
  double sum = 0;
  for (uint32_t i = 0; i < tokens; ++i) sum += std::exp(logits[i] - max);
  return max + static_cast<float>(std::log(sum));
}

}  // namespace

void KCacheAttention::Keys::Append(const float* key, uint32_t head_dim, uint32_t position) {
  const size_t panel = size_t{position / kPanelColumns} * kPanelColumns * head_dim;
  if (panels.size() < panel + size_t{kPanelColumns} * head_dim) {
    panels.resize(panel + size_t{kPanelColumns} * head_dim);
  }
  for (uint32_t d = 0; d < head_dim; ++d) {
    panels[panel + size_t{d} * kPanelColumns + position % kPanelColumns] = key[d];
  }
}

KCacheAttention::KCacheAttention(const tinylm::Model& model, const Options& options,
                                 tinylm::Workers& workers)
    : config_(model.config),
      options_(options),
      workers_(workers),
      kept_(config_.layer_count(), tinylm::KvRows(config_)),
      keys_(config_.layer_count(), std::vector<Keys>(config_.kv_heads)) {
  for (const uint32_t layer : config_.full_layers()) {
    if (IsStored(layer)) stored_layers_.push_back(layer);
  }
  if (stored_layers_.empty()) {
    throw std::runtime_error("kept_layers: " + std::to_string(options_.kept_layers) +
                             " leave no layer whose values are stored");
  }
  auto client_options = Sized<pqc_client_options>();
  client_options.endpoint = options_.endpoint.c_str();
  client_options.client_name = "kcache";
  client_options.path = options_.path;
  pqc_client* client = nullptr;
  Check(pqc_client_open(&client_options, &client), "pqc_client_open");
  client_.reset(client, pqc_client_close);
  OpenCache(model.fingerprint);
}

KCacheAttention::~KCacheAttention() {
  pqc_step_abandon(step_);
  if (sequence_) pqc_sequence_drop(sequence_);
}

void KCacheAttention::OpenCache(const std::string& fingerprint) {
  auto group = Sized<pqc_layer_group>();
  group.kind = PQC_LAYERS_VALUES;  // the engine has the keys
  group.layers = stored_layers_.data();
  group.layer_count = static_cast<uint32_t>(stored_layers_.size());
  group.kv_heads = config_.kv_heads;
  group.query_heads = config_.query_heads;
  group.value_dim = config_.head_dim;
  group.dtype = options_.dtype;
  group.softmax_scale = 1.0f;
  auto spec = Sized<pqc_cache_spec>();
  spec.name = options_.cache_name.c_str();
  spec.model_fingerprint = fingerprint.c_str();
  spec.groups = &group;
  spec.group_count = 1;
  spec.capacity_bytes = options_.capacity_bytes;
  pqc_cache* cache = nullptr;
  Check(pqc_cache_open(client_.get(), &spec, &cache), "pqc_cache_open");
  cache_.reset(cache, pqc_cache_close);
}

void KCacheAttention::SetSelection(uint32_t token_count, bool renormalises) {
  top_count_ = token_count;
  renormalises_ = renormalises;
}

void KCacheAttention::BeginSequence() {
  if (sequence_) Check(pqc_sequence_drop(std::exchange(sequence_, nullptr)), "pqc_sequence_drop");
  Check(pqc_sequence_create(cache_.get(), &sequence_), "pqc_sequence_create");
  for (tinylm::KvRows& rows : kept_) rows.Clear(0);
  for (std::vector<Keys>& layer : keys_) layer.assign(config_.kv_heads, {});
  new_rows_.clear();
  prefill_end_ = token_count_ = 0;
}

void KCacheAttention::Prefill(const tinylm::KvChunk& chunk) {
  prefill_end_ = token_count_ = chunk.first_position + chunk.token_count;
  if (!IsStored(chunk.layer)) {
    kept_[chunk.layer].Append(chunk.k, chunk.v, chunk.token_count);
    return;
  }
  for (uint32_t i = 0; i < chunk.token_count; ++i) {
    for (uint32_t head = 0; head < config_.kv_heads; ++head) {
      keys_[chunk.layer][head].Append(
          chunk.k + (size_t{i} * config_.kv_heads + head) * config_.head_dim, config_.head_dim,
          chunk.first_position + i);
    }
  }
  const uint64_t shape[3] = {chunk.token_count, config_.kv_heads, config_.head_dim};
  const pqc_tensor values = Borrow(chunk.v, shape);
  Check(pqc_ingest(sequence_, chunk.layer, chunk.first_position, nullptr, &values), "pqc_ingest");
}

KCacheAttention::Selected KCacheAttention::Select(const DecodeArgs& args, uint32_t kv_head,
                                                  float* own, float* lse) const {
  const uint32_t group = config_.query_heads / config_.kv_heads, dim = config_.head_dim;
  const uint32_t tokens = args.position + 1;
  const uint32_t columns = (tokens + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
  std::vector<float> logits(size_t{group} * columns);
  tinylm::BestKernels().mat_mul({.a = args.q + size_t{kv_head} * group * dim,
                                 .a_stride = dim,
                                 .b = keys_[args.layer][kv_head].panels.data(),
                                 .b_stride = kPanelColumns,
                                 .b_panel_stride = size_t{kPanelColumns} * dim,
                                 .c = logits.data(),
                                 .c_stride = columns,
                                 .rows = group,
                                 .inner = dim,
                                 .columns = columns});
  Selected selected;
  std::vector<std::vector<uint32_t>> tops;
  for (uint32_t i = 0; i < group; ++i) {
    const float* const of_head = &logits[size_t{i} * columns];
    const uint32_t head = kv_head * group + i;
    lse[head] = LogSumExp(of_head, tokens);
    tops.push_back(TopOf(of_head, tokens, top_count_));
    own[head] = kNone;
    if (tops[i].back() == args.position) {
      own[head] = of_head[args.position];
      tops[i].pop_back();
    }
    selected.positions.insert(selected.positions.end(), tops[i].begin(), tops[i].end());
  }
  std::sort(selected.positions.begin(), selected.positions.end());
  selected.positions.erase(std::unique(selected.positions.begin(), selected.positions.end()),
                           selected.positions.end());
  for (uint32_t i = 0; i < group; ++i) {
    std::vector<float>& to = selected.logits.emplace_back(selected.positions.size(), kNone);
    for (const uint32_t position : tops[i]) {
      const auto found = std::lower_bound(selected.positions.begin(), selected.positions.end(),
                                          static_cast<int32_t>(position));
      to[static_cast<size_t>(found - selected.positions.begin())] =
          logits[size_t{i} * columns + position];
    }
  }
  return selected;
}

void KCacheAttention::AttendStored(const DecodeArgs& args, const std::vector<Selected>& selected,
                                   float* lse) {
  const uint32_t group = config_.query_heads / config_.kv_heads;
  size_t capacity = 0;
  for (const Selected& head : selected) capacity = std::max(capacity, head.positions.size());
  attended_ = {.selected = capacity};
  if (!step_) {
    auto item = Sized<pqc_step_item>();
    item.sequence = sequence_;
    item.query_position = args.position;
    item.query_length = 1;
    Check(pqc_step_begin(client_.get(), &item, 1, nullptr, &step_), "pqc_step_begin");
  }
  std::fill_n(args.o, size_t{config_.query_heads} * config_.head_dim, 0.0f);
  std::fill_n(lse, config_.query_heads, kNone);
  if (capacity == 0) return;
  std::vector<int32_t> positions(config_.kv_heads * capacity, -1);
  std::vector<float> logits(config_.query_heads * capacity, kNone);
  for (uint32_t kv_head = 0; kv_head < config_.kv_heads; ++kv_head) {
    std::copy(selected[kv_head].positions.begin(), selected[kv_head].positions.end(),
              &positions[kv_head * capacity]);
    for (uint32_t i = 0; i < group; ++i) {
      std::copy(selected[kv_head].logits[i].begin(), selected[kv_head].logits[i].end(),
                &logits[(kv_head * group + i) * capacity]);
    }
  }
  const uint64_t shape[3] = {1, config_.query_heads, capacity};
  const pqc_tensor scores = Borrow(logits.data(), shape);
  auto lists = Sized<pqc_position_lists>();
  lists.positions = positions.data();
  lists.list_count = config_.kv_heads;
  lists.capacity = static_cast<uint32_t>(capacity);
  lists.logits = &scores;
  auto out = Sized<pqc_step_attention>();
  out.output = args.o;
  out.output_capacity = size_t{config_.query_heads} * config_.head_dim;
  out.lse = lse;
  out.lse_capacity = config_.query_heads;
  Check(pqc_step_attend_positions(step_, args.layer, nullptr, &lists, &out),
        "pqc_step_attend_positions");
}

void KCacheAttention::Decode(const DecodeArgs& args) {
  const uint32_t heads = config_.query_heads, kv_heads = config_.kv_heads, dim = config_.head_dim;
  std::vector<float> lse(heads);
  token_count_ = args.position + 1;
  if (!IsStored(args.layer)) {
    tinylm::KvRows& rows = kept_[args.layer];
    rows.Append(args.k, args.v, 1);
    AttendRows(rows, 0, rows.end_position(), args.q, heads, workers_, args.o, lse.data());
    return;
  }
  for (uint32_t head = 0; head < kv_heads; ++head) {
    keys_[args.layer][head].Append(args.k + size_t{head} * dim, dim, args.position);
  }
  std::vector<float> own(heads), lse_all(heads), own_values(size_t{heads} * dim);
  std::vector<Selected> selected(kv_heads);
  workers_.Run(kv_heads, [&](uint32_t head) {
    selected[head] = Select(args, head, own.data(), lse_all.data());
  });
  AttendStored(args, selected, lse.data());
  const size_t row_floats = size_t{kv_heads} * dim;
  new_rows_.push_back({args.layer, {args.v, args.v + row_floats}});

  for (uint32_t head = 0; head < heads; ++head) {
    std::copy_n(args.v + size_t{head / (heads / kv_heads)} * dim, dim, &own_values[head * dim]);
  }
  tinylm::MergePartial(heads, dim, args.o, lse.data(), own_values.data(), own.data());
  if (renormalises_) return;
  for (uint32_t head = 0; head < heads; ++head) {
    const float share = std::exp(lse[head] - lse_all[head]);
    for (uint32_t d = 0; d < dim; ++d) args.o[head * dim + d] *= share;
  }
}

void KCacheAttention::EndStep() {
  std::vector<pqc_layer_rows> rows;
  const uint64_t shape[3] = {1, config_.kv_heads, config_.head_dim};
  for (const NewRows& from : new_rows_) {
    auto& to = rows.emplace_back(Sized<pqc_layer_rows>());
    to.layer = from.layer;
    to.values = Borrow(from.v.data(), shape);
  }
  Check(pqc_step_end(std::exchange(step_, nullptr), rows.data(), static_cast<uint32_t>(rows.size()),
                     nullptr),
        "pqc_step_end");
  new_rows_.clear();
}

void KCacheAttention::Rewind() {
  Check(pqc_sequence_truncate(sequence_, prefill_end_), "pqc_sequence_truncate");
  token_count_ = prefill_end_;
  for (const uint32_t layer : config_.full_layers()) {
    if (!IsStored(layer)) kept_[layer].Truncate(prefill_end_);
  }
}

size_t KCacheAttention::engine_kv_bytes() const {
  size_t bytes = size_t{token_count_} * config_.kv_heads * config_.head_dim * sizeof(float) *
                 stored_layers_.size();
  for (const tinylm::KvRows& rows : kept_) bytes += rows.bytes();
  return bytes;
}

uint64_t KCacheAttention::sidecar_row_bytes() const {
  auto info = Sized<pqc_sequence_info>();
  Check(pqc_sequence_describe(sequence_, &info), "pqc_sequence_describe");
  return info.row_bytes;
}

}  // namespace pqcached::quality
