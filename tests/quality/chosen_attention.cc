#include "tests/quality/chosen_attention.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <random>
#include <utility>

namespace pqcached::quality {
namespace {

// Independent partial sums, so that the compiler may use vectors.
float Dot(const float* a, const float* b, uint32_t head_dim) {
  float sums[16] = {};
  for (uint32_t d = 0; d < head_dim; d += 16) {
    for (uint32_t lane = 0; lane < 16; ++lane) sums[lane] += a[d + lane] * b[d + lane];
  }
  return std::accumulate(std::begin(sums), std::end(sums), 0.0f);
}

uint32_t SelectCount(const Budget& budget, uint32_t token_count, uint32_t ends, uint32_t middle) {
  const auto total =
      budget.count > 0 ? budget.count : static_cast<uint64_t>(budget.ratio * token_count);
  return total <= ends ? 0 : static_cast<uint32_t>(std::min<uint64_t>(total - ends, middle));
}

}  // namespace

std::vector<uint32_t> ChooseExactTopK(const Choice& choice) {
  const uint32_t token_count = choice.position + 1;
  std::vector<float> logits(token_count);
  std::vector<double> shares(token_count);
  for (uint32_t g = 0; g < choice.group_size; ++g) {
    const float* const query = choice.queries + size_t{g} * choice.rows.head_dim();
    for (uint32_t t = 0; t < token_count; ++t) {
      logits[t] = Dot(query, choice.rows.k(choice.kv_head, t), choice.rows.head_dim());
    }
    const float max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (float& logit : logits) sum += logit = std::exp(logit - max);
    for (uint32_t t = 0; t < token_count; ++t) shares[t] += logits[t] / sum;
  }
  std::vector<uint32_t> positions(choice.end - choice.begin);
  std::iota(positions.begin(), positions.end(), choice.begin);
  const auto better = [&](uint32_t a, uint32_t b) {
    return shares[a] != shares[b] ? shares[a] > shares[b] : a < b;
  };
  std::nth_element(positions.begin(), positions.begin() + choice.count, positions.end(), better);
  positions.resize(choice.count);
  return positions;
}

std::vector<uint32_t> ChooseLatest(const Choice& choice) {
  std::vector<uint32_t> positions(choice.count);
  std::iota(positions.begin(), positions.end(), choice.end - choice.count);
  return positions;
}

std::vector<uint32_t> ChooseRandom(const Choice& choice) {
  std::seed_seq seed{choice.layer, choice.kv_head, choice.position};
  std::mt19937 random(seed);
  std::vector<uint32_t> all(choice.end - choice.begin), positions;
  std::iota(all.begin(), all.end(), choice.begin);
  std::sample(all.begin(), all.end(), std::back_inserter(positions), choice.count, random);
  return positions;
}

ChosenAttention::ChosenAttention(const tinylm::Config& config,
                                 tinylm::WindowAttention::Options ends, tinylm::Workers& workers)
    : config_(config),
      sink_and_window_(ends),
      workers_(workers),
      layers_(config.layer_count(), tinylm::KvRows(config)) {}

void ChosenAttention::SetChooser(Chooser chooser, Budget budget) {
  chooser_ = std::move(chooser);
  budget_ = budget;
}

void ChosenAttention::BeginSequence() {
  for (tinylm::KvRows& rows : layers_) rows.Clear(0);
  prefill_end_ = 0;
}

void ChosenAttention::Prefill(const tinylm::KvChunk& chunk) {
  layers_[chunk.layer].Append(chunk.k, chunk.v, chunk.token_count);
  prefill_end_ = layers_[chunk.layer].end_position();
}

void ChosenAttention::Decode(const tinylm::DecodeArgs& args) {
  tinylm::KvRows& rows = layers_[args.layer];
  rows.Append(args.k, args.v, 1);
  const uint32_t token_count = args.position + 1, group_size = config_.group_size();
  const uint32_t begin = std::min(sink_and_window_.sink_tokens, token_count);
  const uint32_t end =
      std::max(begin, token_count - std::min(sink_and_window_.window_tokens, token_count));
  const uint32_t select = SelectCount(budget_, token_count, begin + token_count - end, end - begin);
  attended_ = {.sink = begin, .window = token_count - end, .selected = select};
  const uint32_t dim = config_.head_dim;
  workers_.Run(config_.kv_heads, [&](uint32_t head) {
    const float* const queries = args.q + size_t{head} * group_size * dim;
    std::vector<uint32_t> positions =
        chooser_({args.layer, head, args.position, begin, end, select, queries, group_size, rows});
    std::sort(positions.begin(), positions.end());
    std::vector<float> keys, values;
    const auto take = [&](uint32_t position) {
      keys.insert(keys.end(), rows.k(head, position), rows.k(head, position) + dim);
      values.insert(values.end(), rows.v(head, position), rows.v(head, position) + dim);
    };
    for (uint32_t position = 0; position < begin; ++position) take(position);
    for (const uint32_t position : positions) take(position);
    for (uint32_t position = end; position < token_count; ++position) take(position);
    const auto key_count = static_cast<uint32_t>(keys.size() / dim);
    std::vector<float> lse(group_size);
    tinylm::BestKernels().attend({.head_dim = dim,
                                  .q = queries,
                                  .row_count = group_size,
                                  .group_size = group_size,
                                  .first_position = key_count,
                                  .k = keys.data(),
                                  .v = values.data(),
                                  .key_count = key_count,
                                  .first_key = 0,
                                  .o = args.o + size_t{head} * group_size * dim,
                                  .lse = lse.data()});
  });
}

void ChosenAttention::Rewind() {
  for (const uint32_t layer : config_.full_layers()) layers_[layer].Truncate(prefill_end_);
}

size_t ChosenAttention::engine_kv_bytes() const {
  size_t bytes = 0;
  for (const tinylm::KvRows& rows : layers_) bytes += rows.bytes();
  return bytes;
}

}  // namespace pqcached::quality
