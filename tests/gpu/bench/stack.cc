#include "tests/gpu/bench/stack.h"

#include <algorithm>
#include <cmath>

#include "tests/gpu/bench/model_kernels.h"

namespace pqcached::bench {

using kernels::DType;
using kernels::cuda::DeviceRowSpan;
using kernels::cuda::kBlockSlots;
using kernels::cuda::kChunkTokens;
using kernels::cuda::KeyLane;
using kernels::cuda::RowLane;
using kernels::cuda::SelectChunk;
using kernels::cuda::SelectLane;

namespace {

constexpr kernels::GroupRule kRule = kernels::GroupRule::kSumSoftmax;

size_t PartBytes(const ModelShape& shape, Weights::Part part) {
  const size_t hidden = shape.hidden;
  const size_t heads = size_t{shape.query_heads} * shape.dim;
  switch (part) {
    case Weights::Part::kQkv:
      return hidden * (heads + size_t{2} * shape.kv_heads * shape.dim) * 2;
    case Weights::Part::kOut:
      return hidden * heads * 2;
    case Weights::Part::kGateUp:
      return hidden * 2 * shape.ffn * 2;
    case Weights::Part::kDown:
      return hidden * shape.ffn * 2;
  }
  return 0;
}

constexpr Weights::Part kParts[] = {Weights::Part::kQkv, Weights::Part::kOut,
                                    Weights::Part::kGateUp, Weights::Part::kDown};

}  // namespace

Weights::Weights(const ModelShape& shape) : shape_(shape), layer_bytes_(0) {
  for (const Part part : kParts) layer_bytes_ += PartBytes(shape, part);
  const std::vector<std::byte> pattern = RandomHalfs(0.02f, 8);
  layers_ = std::make_unique<DeviceArray<std::byte>>(shape.layer_count * layer_bytes_);
  head_ = std::make_unique<DeviceArray<std::byte>>(size_t{shape.vocabulary} * shape.hidden * 2);
  Repeat(layers_->data(), layers_->bytes(), pattern);
  Repeat(head_->data(), head_->bytes(), pattern);
}

const std::byte* Weights::Get(uint32_t layer, Part part) const {
  const std::byte* at = layers_->data() + layer * layer_bytes_;
  for (const Part before : kParts) {
    if (before == part) break;
    at += PartBytes(shape_, before);
  }
  return at;
}

size_t KvBytesPerSequence(const StackOptions& options) {
  const ModelShape& model = options.model;
  const size_t tokens = options.token_count;
  const size_t lanes = size_t{model.layer_count} * model.kv_heads;
  switch (options.mode) {
    case KvMode::kFull:
      return lanes * tokens * model.row_bytes();
    case KvMode::kSelected:
      return lanes * (2 * kernels::PlaneStride(options.token_count) +
                      options.cache_tokens * model.row_bytes());
    case KvMode::kKCache: {
      const size_t kept = size_t{options.kept_value_layers} * model.kv_heads;
      return (lanes + kept) * tokens * model.row_bytes() / 2;
    }
    case KvMode::kNone:
    case KvMode::kSelect:
      return 0;
  }
  return 0;
}

Stack::Stack(const StackOptions& options, Weights& weights, cudaStream_t stream)
    : options_(options),
      weights_(weights),
      x_(size_t{options.batch} * options.model.hidden * 2),
      normed_(x_.bytes()),
      qkv_(size_t{options.batch} * (options.model.query_heads + 2 * options.model.kv_heads) *
           options.model.dim * 2),
      wide_(size_t{options.batch} * 2 * options.model.ffn * 2),
      narrow_(size_t{options.batch} *
              std::max(options.model.ffn, options.model.query_heads * options.model.dim) * 2),
      logits_(size_t{options.batch} * options.model.vocabulary * 2),
      new_rows_(lanes() * options.model.row_bytes()),
      queries_(size_t{options.batch} * options.model.query_heads * options.model.dim),
      attention_(size_t{options.batch} * options.model.query_heads * options.model.dim),
      lse_(size_t{options.batch} * options.model.query_heads) {
  Repeat(x_.data(), x_.bytes(), RandomHalfs(1.0f, 9));
  Check(cudaMemsetAsync(attention_.data(), 0, attention_.bytes(), stream), "clearing");
  switch (options.mode) {
    case KvMode::kFull:
      MakeFull();
      break;
    case KvMode::kSelect:
    case KvMode::kSelected:
      MakeSelected(stream);
      break;
    case KvMode::kKCache:
      MakeKCache();
      break;
    case KvMode::kNone:
      break;
  }
  Check(cudaDeviceSynchronize(), "making the stack");
}

void Stack::MakeAttend(uint32_t row_capacity) {
  shape_ = {.dtype = DType::kF16,
            .key_dim = options_.model.dim,
            .value_dim = options_.model.dim,
            .group_size = group(),
            .lane_capacity = lanes(),
            .row_capacity = row_capacity,
            .split_count = kernels::cuda::ChooseSplitCount(options_.multiprocessor_count, lanes(),
                                                           row_capacity)};
  scratch_ = std::make_unique<DeviceArray<std::byte>>(
      std::max<size_t>(1, kernels::cuda::AttendScratchBytes(shape_)));
}

void Stack::MakeFull() {
  const size_t row_bytes = options_.model.row_bytes();
  const uint32_t tokens = options_.token_count;
  const size_t layer_rows = size_t{lanes()} * tokens;
  kv_ =
      std::make_unique<DeviceArray<std::byte>>(options_.model.layer_count * layer_rows * row_bytes);
  Repeat(kv_->data(), kv_->bytes(), RandomHalfs(1.0f, 10));
  std::vector<const std::byte*> addresses;
  addresses.reserve(options_.model.layer_count * layer_rows);
  for (size_t row = 0; row < options_.model.layer_count * layer_rows; ++row) {
    addresses.push_back(kv_->data() + row * row_bytes);
  }
  addresses_ = std::make_unique<DeviceArray<const std::byte*>>(addresses);
  counts_ = std::make_unique<DeviceArray<uint32_t>>(std::vector<uint32_t>(lanes(), tokens));
  MakeAttend(tokens);
}

void Stack::AllocateHostRows(size_t row_bytes) {
  Check(host_rows_.Allocate(size_t{options_.model.kv_heads} * options_.token_count * row_bytes));
  Repeat(host_rows_.data(), host_rows_.size_bytes(), RandomHalfs(1.0f, 11));
  std::vector<RowLane> row_lanes;
  for (uint32_t lane = 0; lane < lanes(); ++lane) {
    row_lanes.push_back({.span_begin = lane, .span_end = lane + 1});
  }
  row_lanes_ = std::make_unique<DeviceArray<RowLane>>(row_lanes);
  addresses_ = std::make_unique<DeviceArray<const std::byte*>>(size_t{lanes()} * options_.k);
  counts_ = std::make_unique<DeviceArray<uint32_t>>(lanes());
}

std::vector<DeviceRowSpan> Stack::SpansOver(const std::byte* rows, size_t row_bytes) const {
  std::vector<DeviceRowSpan> spans;
  for (uint32_t lane = 0; lane < lanes(); ++lane) {
    const size_t head = lane % options_.model.kv_heads;
    spans.push_back({rows + head * options_.token_count * row_bytes, options_.token_count, 0, 0});
  }
  return spans;
}

void Stack::MakeSelected(cudaStream_t stream) {
  const ModelShape& model = options_.model;
  selections_ = std::make_unique<Selections>(Selections::Shape{.geometry = {model.dim, 2, 6},
                                                               .layer_count = model.layer_count,
                                                               .lane_count = lanes(),
                                                               .token_count = options_.token_count,
                                                               .group_size = group(),
                                                               .k = options_.k});
  if (options_.mode == KvMode::kSelect) return;
  AllocateHostRows(model.row_bytes());
  spans_.push_back(std::make_unique<DeviceArray<DeviceRowSpan>>(
      SpansOver(static_cast<const std::byte*>(host_rows_.data()), model.row_bytes())));
  for (uint32_t layer = 0; layer < model.layer_count && options_.cache_tokens > 0; ++layer) {
    caches_.push_back(std::make_unique<gpu::BlockCache>());
    Check(caches_.back()->Create(
        {.lane_capacity = lanes(),
         .block_capacity = (options_.token_count + kBlockSlots - 1) / kBlockSlots,
         .cache_tokens = options_.cache_tokens,
         .row_stride_bytes = model.row_bytes(),
         .policy = options_.policy,
         .max_loads = options_.max_loads},
        stream));
  }
  MakeAttend(options_.k);
}

void Stack::MakeKCache() {
  const ModelShape& model = options_.model;
  const size_t half_row = model.row_bytes() / 2;
  const uint32_t tokens = options_.token_count;
  const size_t stride = (tokens + 3) / 4 * 4;
  kv_ = std::make_unique<DeviceArray<std::byte>>(size_t{model.layer_count} * lanes() * tokens *
                                                 half_row);
  Repeat(kv_->data(), kv_->bytes(), RandomHalfs(1.0f, 12));
  AllocateHostRows(half_row);
  spans_.push_back(std::make_unique<DeviceArray<DeviceRowSpan>>(
      SpansOver(static_cast<const std::byte*>(host_rows_.data()), half_row)));
  kept_values_ = std::make_unique<DeviceArray<std::byte>>(
      std::max<size_t>(1, size_t{options_.kept_value_layers} * lanes() * tokens * half_row));
  for (uint32_t layer = 0; layer < options_.kept_value_layers; ++layer) {
    std::vector<DeviceRowSpan> spans;
    for (uint32_t lane = 0; lane < lanes(); ++lane) {
      const size_t first = (size_t{layer} * lanes() + lane) * tokens;
      spans.push_back({kept_values_->data() + first * half_row, tokens, 0, 0});
    }
    spans_.insert(spans_.begin() + layer, std::make_unique<DeviceArray<DeviceRowSpan>>(spans));
  }
  scores_ = std::make_unique<DeviceArray<float>>(size_t{lanes()} * group() * stride);
  std::vector<KeyLane> key_lanes;
  std::vector<SelectChunk> chunks;
  std::vector<SelectLane> select_lanes;
  for (uint32_t layer = 0; layer < model.layer_count; ++layer) {
    for (uint32_t lane = 0; lane < lanes(); ++lane) {
      key_lanes.push_back({kv_->data() + (size_t{layer} * lanes() + lane) * tokens * half_row,
                           queries_.data() + size_t{lane} * group() * model.dim,
                           scores_->data() + size_t{lane} * group() * stride, tokens});
    }
  }
  for (uint32_t lane = 0; lane < lanes(); ++lane) {
    const auto chunk_begin = static_cast<uint32_t>(chunks.size());
    for (uint32_t begin = 0; begin < tokens; begin += kChunkTokens) {
      chunks.push_back({.logits = scores_->data() + size_t{lane} * group() * stride,
                        .stride = stride,
                        .slot_begin = begin,
                        .slot_end = std::min(tokens, begin + kChunkTokens),
                        .lane = lane});
    }
    select_lanes.push_back(
        {chunk_begin, static_cast<uint32_t>(chunks.size()), lane, lane + 1, options_.k});
  }
  key_lanes_ = std::make_unique<DeviceArray<KeyLane>>(key_lanes);
  chunks_ = std::make_unique<DeviceArray<SelectChunk>>(chunks);
  select_lanes_ = std::make_unique<DeviceArray<SelectLane>>(select_lanes);
  positions_ = std::make_unique<DeviceArray<uint32_t>>(size_t{lanes()} * options_.k);
  scratch_ = std::make_unique<DeviceArray<std::byte>>(kernels::cuda::ScoreSelectScratchBytes(
      {group(), lanes(), static_cast<uint32_t>(chunks.size())}));
}

gpu::BlockCache::Counters Stack::Counters() const {
  gpu::BlockCache::Counters sum;
  for (const auto& cache : caches_) {
    gpu::BlockCache::Counters counters;
    Check(cache->Read(counters));
    sum.hits += counters.hits;
    sum.misses += counters.misses;
    sum.loaded += counters.loaded;
    sum.evicted += counters.evicted;
  }
  return sum;
}

std::vector<double> Stack::Run(cudaStream_t stream, int step_count) {
  const auto finish_updates = [&] {
    for (const auto& cache : caches_) Check(cache->FinishUpdate(stream));
  };
  finish_updates();
  gpu::Graph graph;
  Check(graph.Begin(stream));
  GiveStep(stream);
  finish_updates();
  Check(graph.End());
  std::vector<double> seconds;
  for (int step = 0; step < step_count; ++step) {
    if (selections_ != nullptr) selections_->Drift(stream);
    seconds.push_back(TimeOnDevice(stream, [&] { Check(graph.Launch(stream)); }));
  }
  return seconds;
}

void Stack::GiveStep(cudaStream_t stream) {
  for (uint32_t layer = 0; layer < options_.model.layer_count; ++layer) GiveLayer(stream, layer);
  const ModelShape& model = options_.model;
  Check(RmsNorm(x_.data(), options_.batch, model.hidden, normed_.data(), stream), "a norm");
  weights_.matrix().Give(stream, {normed_.data(), weights_.head(), logits_.data(), options_.batch,
                                  model.hidden, model.vocabulary, false});
}

void Stack::Product(cudaStream_t stream, uint32_t layer, Weights::Part part, const std::byte* x,
                    std::byte* y, bool adds) {
  const ModelShape& model = options_.model;
  const uint32_t heads = model.query_heads * model.dim;
  uint32_t in = model.hidden;
  uint32_t out = model.hidden;
  if (part == Weights::Part::kQkv) out = heads + 2 * model.kv_heads * model.dim;
  if (part == Weights::Part::kOut) in = heads;
  if (part == Weights::Part::kGateUp) out = 2 * model.ffn;
  if (part == Weights::Part::kDown) in = model.ffn;
  weights_.matrix().Give(stream, {x, weights_.Get(layer, part), y, options_.batch, in, out, adds});
}

void Stack::GiveLayer(cudaStream_t stream, uint32_t layer) {
  const ModelShape& model = options_.model;
  Check(RmsNorm(x_.data(), options_.batch, model.hidden, normed_.data(), stream), "a norm");
  Product(stream, layer, Weights::Part::kQkv, normed_.data(), qkv_.data(), false);
  Check(Rotate({qkv_.data(), options_.batch, model.query_heads, model.kv_heads, model.dim,
                options_.token_count, queries_.data(), new_rows_.data()},
               stream),
        "rotating");
  GiveAttention(stream, layer);
  Check(ToHalf(attention_.data(), options_.batch * model.query_heads * model.dim, narrow_.data(),
               stream),
        "rounding");
  Product(stream, layer, Weights::Part::kOut, narrow_.data(), x_.data(), true);
  Check(RmsNorm(x_.data(), options_.batch, model.hidden, normed_.data(), stream), "a norm");
  Product(stream, layer, Weights::Part::kGateUp, normed_.data(), wide_.data(), false);
  Check(SiluMultiply(wide_.data(), options_.batch, model.ffn, narrow_.data(), stream), "a gate");
  Product(stream, layer, Weights::Part::kDown, narrow_.data(), x_.data(), true);
}

void Stack::GiveAttention(cudaStream_t stream, uint32_t layer) {
  switch (options_.mode) {
    case KvMode::kNone:
      return;
    case KvMode::kSelect:
      return selections_->Give(stream, layer);
    case KvMode::kSelected:
      return GiveSelected(stream, layer);
    case KvMode::kKCache:
      return GiveKCache(stream, layer);
    case KvMode::kFull:
      return GiveAttend(stream, layer,
                        addresses_->data() + size_t{layer} * lanes() * options_.token_count,
                        counts_->data());
  }
}

void Stack::GiveAttend(cudaStream_t stream, uint32_t layer, const std::byte* const* addresses,
                       const uint32_t* counts) const {
  const float* queries = selections_ == nullptr ? queries_.data() : selections_->queries(layer);
  Check(
      kernels::cuda::AttendRows({.shape = shape_,
                                 .scale = 1.0f / std::sqrt(static_cast<float>(options_.model.dim)),
                                 .queries = queries,
                                 .addresses = addresses,
                                 .address_stride = shape_.row_capacity,
                                 .row_counts = counts,
                                 .output = attention_.data(),
                                 .lse = lse_.data(),
                                 .scratch = scratch_->data(),
                                 .scratch_bytes = scratch_->bytes()},
                                stream),
      "attending");
}

void Stack::GiveLocate(cudaStream_t stream, uint32_t layer, const uint32_t* positions,
                       const uint32_t* counts, size_t row_bytes) const {
  const auto& spans = *spans_[std::min<size_t>(layer, spans_.size() - 1)];
  Check(kernels::cuda::LocateRows({.lane_capacity = lanes(),
                                   .lanes = row_lanes_->data(),
                                   .spans = spans.data(),
                                   .row_stride_bytes = row_bytes,
                                   .positions = positions,
                                   .position_stride = options_.k,
                                   .counts = counts,
                                   .residency = caches_.empty() ? kernels::cuda::BlockResidency()
                                                                : caches_[layer]->residency(),
                                   .addresses = addresses_->data(),
                                   .address_stride = options_.k,
                                   .row_counts = counts_->data()},
                                  stream),
        "locating rows");
}

void Stack::GiveSelected(cudaStream_t stream, uint32_t layer) {
  selections_->Give(stream, layer);
  if (!caches_.empty()) Check(caches_[layer]->BeginStep(stream));
  GiveLocate(stream, layer, selections_->positions(), selections_->counts(),
             options_.model.row_bytes());
  GiveAttend(stream, layer, addresses_->data(), counts_->data());
  if (!caches_.empty()) {
    Check(caches_[layer]->EndStep(stream, row_lanes_->data(), spans_[0]->data()));
  }
}

void Stack::GiveKCache(cudaStream_t stream, uint32_t layer) const {
  const ModelShape& model = options_.model;
  const KeyLane* key_lanes = key_lanes_->data() + size_t{layer} * lanes();
  const size_t stride = (options_.token_count + 3) / 4 * 4;
  Check(kernels::cuda::ExactScores({.dtype = DType::kF16,
                                    .key_dim = model.dim,
                                    .row_stride_bytes = model.row_bytes() / 2,
                                    .group_size = group(),
                                    .scale = 1.0f / std::sqrt(static_cast<float>(model.dim)),
                                    .score_stride = stride,
                                    .lane_capacity = lanes(),
                                    .token_capacity = options_.token_count,
                                    .lanes = key_lanes},
                                   stream),
        "scoring keys");
  const size_t chunks_per_lane = (options_.token_count + kChunkTokens - 1) / kChunkTokens;
  Check(kernels::cuda::ScoreSelect(
            {.group_size = group(),
             .rule = kRule,
             .candidates = {.lane_capacity = lanes(),
                            .chunk_capacity = static_cast<uint32_t>(lanes() * chunks_per_lane),
                            .lanes = select_lanes_->data(),
                            .chunks = chunks_->data()},
             .selection = {positions_->data(), options_.k, counts_->data()},
             .lse = lse_.data(),
             .scratch = scratch_->data(),
             .scratch_bytes = scratch_->bytes()},
            stream),
        "selecting keys");
  GiveLocate(stream, layer, positions_->data(), counts_->data(), model.row_bytes() / 2);
  Check(kernels::cuda::WeightedValues({.dtype = DType::kF16,
                                       .value_dim = model.dim,
                                       .group_size = group(),
                                       .lane_capacity = lanes(),
                                       .lanes = key_lanes,
                                       .score_stride = stride,
                                       .lse = lse_.data(),
                                       .tokens = positions_->data(),
                                       .token_stride = options_.k,
                                       .counts = counts_->data(),
                                       .addresses = addresses_->data(),
                                       .output = attention_.data()},
                                      stream),
        "weighing values");
}

}  // namespace pqcached::bench
