#include "tests/bench/local/live_world.h"

#include <algorithm>
#include <cmath>

#include "kvstore/clock.h"
#include "kvstore/index/live_index.h"
#include "tests/bench/report.h"

namespace pqcached::bench {
namespace {

constexpr char kTenant[] = "bench";
constexpr uint32_t kSink = 16;
constexpr uint32_t kWindow = 64;

// All pages of the pool are present from the start.
std::unique_ptr<kvstore::Store> MakeStore(kvstore::StoreOptions options, size_t capacity_bytes) {
  options.idle_reserve_bytes = capacity_bytes;
  return *kvstore::Store::Create(options);
}

}  // namespace

LiveWorld::LiveWorld(const kvstore::StoreOptions& options, const DriftShape& shape, uint32_t layers,
                     size_t capacity_bytes)
    : shape_(shape), layers_(layers), store_(MakeStore(options, capacity_bytes)) {
  kvstore::LayerGroup group;
  for (uint32_t layer = 0; layer < layers; ++layer) group.layers.push_back(layer);
  group.kv_heads = shape.kv_heads;
  group.query_heads = shape.kv_heads * shape.group_size;
  group.key_dim = group.value_dim = shape.dim;
  group.dtype = kernels::DType::kBf16;
  const auto cache = store_->OpenCache(kTenant, {.name = "live",
                                                 .model_fingerprint = "bench",
                                                 .groups = {group},
                                                 .capacity_bytes = capacity_bytes,
                                                 .default_index = kLiveIndex});
  Require(cache.ok(), "OpenCache");
  cache_id_ = cache->cache_id;
}

uint64_t LiveWorld::NewSequence(bool live, uint32_t iterations) {
  kvstore::SequenceSpec spec{.session = "s"};
  if (live) spec.live_index = kvstore::LiveIndex{.index = kLiveIndex, .iterations = iterations};
  const auto made = store_->CreateSequence(kTenant, cache_id_, spec);
  Require(made.ok(), "CreateSequence");
  return made->sequence_id;
}

std::vector<kvstore::LayerRows> LiveWorld::Rows(const Bf16Rows& keys,
                                                const Bf16Rows& values) const {
  std::vector<kvstore::LayerRows> rows;
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    rows.push_back({.layer = layer, .keys = keys.view(), .values = values.view()});
  }
  return rows;
}

void LiveWorld::Ingest(uint64_t sequence_id, uint32_t first, const Bf16Rows& keys,
                       const Bf16Rows& values) {
  auto ingest = store_->BeginIngest(kTenant, sequence_id);
  Require(ingest.ok(), "BeginIngest");
  for (const kvstore::LayerRows& rows : Rows(keys, values)) {
    Require((*ingest)->Write(first, rows).ok(), "Write");
  }
  Require((*ingest)->Commit().ok(), "Commit");
}

void LiveWorld::Append(uint64_t sequence_id, uint32_t first, const Bf16Rows& keys,
                       const Bf16Rows& values) {
  Require(store_->Append(kTenant, sequence_id, first, Rows(keys, values)).ok(), "Append");
}

void LiveWorld::Build(uint64_t sequence_id, const kvstore::BuildSpec& spec) {
  Require(store_->BuildIndex(kTenant, sequence_id, spec, {}).ok(), "BuildIndex");
}

uint64_t LiveWorld::Fork(uint64_t sequence_id, uint32_t tokens) {
  const auto fork = store_->ForkSequence(kTenant, sequence_id, tokens, "s");
  Require(fork.ok(), "ForkSequence");
  return fork->sequence_id;
}

void LiveWorld::Drop(uint64_t sequence_id) {
  Require(store_->DropSequence(kTenant, sequence_id).ok(), "DropSequence");
}

void LiveWorld::WaitIdle(uint64_t sequence_id) {
  Require(store_->WaitIdle(kvstore::SteadyTime::Now() + absl::Minutes(10)), "idle");
  const auto info = store_->DescribeSequence(kTenant, sequence_id);
  Require(info.ok() && info->live_index.ok(), "live index");
}

size_t LiveWorld::IndexBytes(uint64_t sequence_id) {
  const auto info = store_->DescribeSequence(kTenant, sequence_id);
  Require(info.ok(), "DescribeSequence");
  return info->index_bytes + info->codebook_bytes;
}

Quality LiveWorld::Judge(uint64_t sequence_id, uint32_t tokens,
                         const std::vector<Bf16Rows>& queries, uint32_t count) {
  Quality quality;
  const uint32_t last = tokens - 1;
  for (const Bf16Rows& query : queries) {
    kvstore::Selection selection;
    selection.sink_tokens = kSink;
    selection.window_tokens = kWindow;
    selection.budget_kind = kvstore::BudgetKind::kCount;
    selection.budget_count = kSink + kWindow + count;
    const kvstore::Query asked{.layer = 0, .query_position = last, .queries = query.view()};
    const auto exact = store_->TopK(kTenant, sequence_id, asked, selection);
    selection.index = kLiveIndex;
    const auto found = store_->TopK(kTenant, sequence_id, asked, selection);
    const kvstore::TokenRange middle{kSink, last + 1 - kWindow};
    const auto scores = store_->Score(kTenant, sequence_id, asked, {}, middle);
    Require(exact.ok() && found.ok() && scores.ok(), "TopK, Score");
    const size_t columns = middle.end - middle.begin;
    for (uint32_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
      const auto begin = static_cast<ptrdiff_t>(size_t{kv_head} * count);
      const auto* e = exact->positions.data() + begin;
      const auto* f = found->positions.data() + begin;
      std::vector<uint32_t> both;
      std::set_intersection(e, e + count, f, f + count, std::back_inserter(both));
      quality.recall += static_cast<double>(both.size()) / count;
      for (uint32_t g = 0; g < shape_.group_size; ++g) {
        const size_t head = size_t{kv_head} * shape_.group_size + g;
        double mass = 0;
        for (uint32_t i = 0; i < count; ++i) {
          mass +=
              std::exp(static_cast<double>(scores->logits[head * columns + f[i] - middle.begin]) -
                       static_cast<double>(scores->max[head]));
        }
        quality.mass += mass / static_cast<double>(scores->sum_exp[head]) / shape_.group_size;
      }
    }
  }
  const double judged = static_cast<double>(queries.size()) * shape_.kv_heads;
  return {quality.recall / judged, quality.mass / judged};
}

}  // namespace pqcached::bench
