// An engine that keeps the keys and leaves the values in a running pqcached (KCache, arXiv
// 2404.18057): scores of its own select the N best tokens of each query head, and a step reads only
// their values. Usage: kcache ENDPOINT, for example unix:///run/pqcached/pqcached.sock.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "pqcached/client.hpp"

namespace {

constexpr uint64_t kTokens = 4096;
constexpr uint32_t kHeads = 2, kGroup = 4, kQueryHeads = kHeads * kGroup, kDim = 64, kTop = 64;

// Ends the program on an error: an example has no caller to report it to.
void Must(const pqcached::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

template <class T>
T Must(pqcached::Result<T> result) {
  Must(result.status());
  return std::move(*result);
}

std::vector<float> Numbers(uint64_t count, float frequency) {
  std::vector<float> numbers(count);
  for (uint64_t i = 0; i < count; ++i) {
    numbers[i] = std::sin(frequency * static_cast<float>(i * i % 9973));
  }
  return numbers;
}

// Logits of one query over all tokens, whose keys the engine has, [query_heads][tokens].
struct Scores {
  std::vector<std::vector<float>> logits;
  std::vector<float> lse;  // of all tokens, [query_heads]
};

Scores Score(const std::vector<float>& k, const std::vector<float>& q) {
  Scores scores;
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    std::vector<float> logits(kTokens);
    double sum = 0;
    for (uint64_t token = 0; token < kTokens; ++token) {
      const float* key = &k[(token * kHeads + head / kGroup) * kDim];
      for (uint32_t d = 0; d < kDim; ++d) logits[token] += q[head * kDim + d] * key[d];
      logits[token] /= std::sqrt(static_cast<float>(kDim));
      sum += std::exp(logits[token]);
    }
    scores.logits.push_back(logits);
    scores.lse.push_back(static_cast<float>(std::log(sum)));
  }
  return scores;
}

// A list of positions for each kv head, which are the union of the N best of each query head of its
// group, so that a value that several of them want is read once.
struct Selected {
  std::vector<int32_t> positions;  // [kv_heads, capacity], ascending, then -1
  std::vector<float> logits;       // [query_heads, capacity]; -infinity: another head's token
  uint64_t rows = 0;               // values of all lists
};

Selected Select(const Scores& scores) {
  constexpr uint64_t kCapacity = kTop * kGroup;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  Selected selected{.positions = std::vector<int32_t>(kHeads * kCapacity, -1),
                    .logits = std::vector<float>(kQueryHeads * kCapacity, kNone)};
  for (uint32_t kv_head = 0; kv_head < kHeads; ++kv_head) {
    std::vector<std::vector<bool>> is_best(kGroup, std::vector<bool>(kTokens));
    for (uint32_t i = 0; i < kGroup; ++i) {
      const std::vector<float>& logits = scores.logits[kv_head * kGroup + i];
      std::vector<uint32_t> order(kTokens);
      std::iota(order.begin(), order.end(), 0u);
      std::partial_sort(order.begin(), order.begin() + kTop, order.end(),
                        [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; });
      for (uint32_t j = 0; j < kTop; ++j) is_best[i][order[j]] = true;
    }
    uint64_t next = 0;
    for (uint32_t token = 0; token < kTokens; ++token) {
      bool wanted = false;
      for (uint32_t i = 0; i < kGroup; ++i) {
        if (!is_best[i][token]) continue;
        wanted = true;
        const uint32_t head = kv_head * kGroup + i;
        selected.logits[head * kCapacity + next] = scores.logits[head][token];
      }
      if (wanted) selected.positions[kv_head * kCapacity + next++] = static_cast<int32_t>(token);
    }
    selected.rows += next;
  }
  return selected;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s ENDPOINT\n", argv[0]);
    return 2;
  }
  const std::vector<float> k = Numbers(kTokens * kHeads * kDim, 1.0f);
  const std::vector<float> v = Numbers(kTokens * kHeads * kDim, 0.3f);
  std::vector<float> q(kQueryHeads * kDim);  // each head looks for a token of its own
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    const float* key = &k[((1000 + head) * kHeads + head / kGroup) * kDim];
    for (uint32_t d = 0; d < kDim; ++d) q[head * kDim + d] = 3 * key[d];
  }
  const pqcached::LayerGroup layers{.kind = PQC_LAYERS_VALUES,  // the engine has the keys
                                    .layers = {0},
                                    .kv_heads = kHeads,
                                    .query_heads = kQueryHeads,
                                    .value_dim = kDim};
  auto client = Must(pqcached::Client::Open({.endpoint = argv[1]}));
  auto cache = Must(client.OpenCache({.name = "kcache",
                                      .model_fingerprint = "kcache-1",
                                      .groups = {layers},
                                      .capacity_bytes = 64 << 20}));
  auto sequence = Must(cache.CreateSequence());
  Must(sequence.Ingest(0, 0, {}, {v, {kTokens, kHeads, kDim}}));

  // No index is built: the engine selects by its own keys.
  const Scores scores = Score(k, q);
  const Selected selected = Select(scores);
  const pqcached::Tensor logits(selected.logits,
                                {kQueryHeads, selected.logits.size() / kQueryHeads});
  pqcached::Attention attention{.output = std::vector<float>(kQueryHeads * kDim),
                                .lse = std::vector<float>(kQueryHeads)};
  const pqcached::StepItem items[] = {{&sequence, kTokens}};
  auto step = Must(client.BeginStep(items, nullptr));
  Must(step.AttendPositions(
      0, {}, {.positions = selected.positions, .list_count = kHeads, .logits = &logits},
      attention.output, attention.lse));
  // An engine attends to the step's own token by itself, merges, and ends the step with its rows.

  // Renormalised, the weights of the selected tokens have the sum 1. Without renormalisation they
  // are those of the softmax over all tokens.
  float least_share = 1;
  std::vector<float> plain = attention.output;
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    const float share = std::exp(attention.lse[head] - scores.lse[head]);
    least_share = std::min(least_share, share);
    for (uint32_t d = 0; d < kDim; ++d) plain[head * kDim + d] *= share;
  }
  constexpr uint64_t kRows = kHeads * kTokens;
  std::printf(
      "read %llu of %llu values, with %.0f %% of the attention at least; output[0] = %.4f, "
      "without renormalisation %.4f\n",
      static_cast<unsigned long long>(selected.rows), static_cast<unsigned long long>(kRows),
      100 * least_share, attention.output[0], plain[0]);
  return 0;
}
