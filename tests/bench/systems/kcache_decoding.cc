#include "tests/bench/systems/kcache_decoding.h"

#include <algorithm>
#include <cstring>

#include "kernels/select/exact/exact_score.h"
#include "kernels/select/score_select.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kGroup = kQueryHeads / kKvHeads;
constexpr size_t kKeyBytes = kDim * sizeof(uint16_t);

// Stores values only: what Fill does for whole rows.
void FillValues(pqc_sequence* sequence, const Rows& rows, uint64_t tokens) {
  for (uint64_t position = 0; position < tokens;) {
    const auto begin = static_cast<uint32_t>(position % rows.tokens());
    const auto count =
        static_cast<uint32_t>(std::min<uint64_t>({tokens - position, rows.tokens() - begin, 1024}));
    Rows::Pair pair;
    rows.View(begin, count, &pair);
    Must(pqc_ingest(sequence, 0, position, nullptr, &pair.values), "pqc_ingest");
    position += count;
  }
  Must(pqc_sequence_flush(sequence), "pqc_sequence_flush");
}

}  // namespace

pqc_cache* OpenValueCache(pqc_client* client, const char* name, uint64_t capacity_bytes) {
  const uint32_t layer = 0;
  pqc_layer_group group = PQC_INIT(pqc_layer_group);
  group.kind = PQC_LAYERS_VALUES;
  group.layers = &layer;
  group.layer_count = 1;
  group.kv_heads = kKvHeads;
  group.query_heads = kQueryHeads;
  group.value_dim = kDim;
  group.dtype = PQC_BF16;
  return OpenCache(client, name, capacity_bytes, group);
}

KCacheDecoding::KCacheDecoding(pqc_client* client, pqc_cache* cache, const Rows& rows,
                               uint64_t tokens, uint32_t top_count, uint32_t query_seed)
    : client_(client),
      tokens_(static_cast<uint32_t>(tokens)),
      top_count_(top_count),
      keys_(tokens * kKvHeads * kKeyBytes),
      queries_(Queries(query_seed)),
      scores_(size_t{kGroup} * tokens),
      output_(queries_.size()),
      lse_(kQueryHeads),
      logits_(size_t{kQueryHeads} * top_count),
      positions_(size_t{kQueryHeads} * top_count),
      score_scratch_(kernels::ExactScoreScratchBytes(kGroup, kDim)),
      select_scratch_(kernels::ScoreSelectScratchBytes(1, static_cast<uint32_t>(tokens))) {
  for (uint32_t kv_head = 0; kv_head < kKvHeads; ++kv_head) {
    for (uint64_t token = 0; token < tokens; ++token) {
      std::memcpy(keys_.data() + (kv_head * tokens + token) * kKeyBytes,
                  rows.keys() + (token % rows.tokens() * kKvHeads + kv_head) * kKeyBytes,
                  kKeyBytes);
    }
  }
  Must(pqc_sequence_create(cache, &sequence_), "pqc_sequence_create");
  FillValues(sequence_, rows, tokens);
}

void KCacheDecoding::Select(uint32_t kv_head) {
  const kernels::Exec exec{};
  const size_t first_head = size_t{kv_head} * kGroup;
  kernels::ExactScores(
      exec, {.dtype = kernels::DType::kBf16,
             .key_dim = kDim,
             .row_stride_bytes = kKeyBytes,
             .group_size = kGroup,
             .token_count = tokens_,
             .scale = 0.088388348f,
             .queries = std::span(queries_).subspan(first_head * kDim, size_t{kGroup} * kDim),
             .rows = keys_.data() + size_t{kv_head} * tokens_ * kKeyBytes,
             .score_stride = tokens_,
             .scores = scores_,
             .scratch = score_scratch_});
  for (size_t i = 0; i < kGroup; ++i) {
    const float* const scores = scores_.data() + i * tokens_;
    const kernels::ScoreSpan span{.logits = scores, .head_stride = tokens_, .token_count = tokens_};
    int32_t* const positions = &positions_[(first_head + i) * top_count_];
    kernels::ScoreSelect(exec, {.group_size = 1,
                                .rule = kernels::GroupRule::kMaxLogit,
                                .spans = {&span, 1},
                                .positions = {reinterpret_cast<uint32_t*>(positions), top_count_},
                                .scratch = {select_scratch_.data(), select_scratch_.size()}});
    for (uint32_t j = 0; j < top_count_; ++j) {
      logits_[(first_head + i) * top_count_ + j] = scores[positions[j]];
    }
  }
}

void KCacheDecoding::Step() {
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence_;
  item.query_position = tokens_;
  pqc_step_options options = PQC_INIT(pqc_step_options);
  options.timeout_ms = 60000;
  pqc_step* step = nullptr;
  Must(pqc_step_begin(client_, &item, 1, &options, &step), "pqc_step_begin");
  for (uint32_t kv_head = 0; kv_head < kKvHeads; ++kv_head) Select(kv_head);
  const uint64_t shape[3] = {1, kQueryHeads, top_count_};
  pqc_tensor logits = PQC_INIT(pqc_tensor);
  logits.ptr = logits_.data();
  logits.dtype = PQC_F32;
  logits.ndim = 3;
  logits.shape = shape;
  pqc_position_lists lists = PQC_INIT(pqc_position_lists);
  lists.positions = positions_.data();
  lists.list_count = kQueryHeads;
  lists.capacity = top_count_;
  lists.logits = &logits;
  pqc_step_attention attention = PQC_INIT(pqc_step_attention);
  attention.output = output_.data();
  attention.output_capacity = output_.size();
  attention.lse = lse_.data();
  attention.lse_capacity = lse_.size();
  Must(pqc_step_attend_positions(step, 0, nullptr, &lists, &attention),
       "pqc_step_attend_positions");
  pqc_step_abandon(step);
}

}  // namespace pqcached::bench
