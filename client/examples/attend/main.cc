// The smallest engine: stores one layer's keys and values in a running pqcached, and attends to a
// tenth of them. Usage: attend ENDPOINT, for example unix:///run/pqcached/pqcached.sock.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "pqcached/client.hpp"

namespace {

constexpr uint64_t kTokens = 4096, kSink = 16, kWindow = 64;
constexpr uint32_t kHeads = 2, kQueryHeads = 8, kDim = 64;

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

// The engine's own part: attention of one query over the sink and the window, in plain loops.
pqcached::Attention AttendOwn(const std::vector<float>& k, const std::vector<float>& v,
                              const std::vector<float>& q) {
  pqcached::Attention own{.output = std::vector<float>(kQueryHeads * kDim),
                          .lse = std::vector<float>(kQueryHeads)};
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    const uint32_t kv_head = head / (kQueryHeads / kHeads);
    double sum = 0;
    for (uint64_t token = 0; token < kTokens; ++token) {
      if (token >= kSink && token < kTokens - kWindow) continue;
      const float* key = &k[(token * kHeads + kv_head) * kDim];
      const float* value = &v[(token * kHeads + kv_head) * kDim];
      float logit = 0;
      for (uint32_t d = 0; d < kDim; ++d) logit += q[head * kDim + d] * key[d];
      const float weight = std::exp(logit / std::sqrt(static_cast<float>(kDim)));
      for (uint32_t d = 0; d < kDim; ++d) own.output[head * kDim + d] += weight * value[d];
      sum += weight;
    }
    for (uint32_t d = 0; d < kDim; ++d) own.output[head * kDim + d] /= static_cast<float>(sum);
    own.lse[head] = static_cast<float>(std::log(sum));
  }
  return own;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s ENDPOINT\n", argv[0]);
    return 2;
  }
  const char* endpoint = argv[1];
  const std::vector<float> k = Numbers(kTokens * kHeads * kDim, 1.0f);
  const std::vector<float> v = Numbers(kTokens * kHeads * kDim, 0.3f);
  const std::vector<float> q = Numbers(kQueryHeads * kDim, 0.7f);
  const pqcached::LayerGroup layers{.layers = {0},
                                    .kv_heads = kHeads,
                                    .query_heads = kQueryHeads,
                                    .key_dim = kDim,
                                    .value_dim = kDim};
  // clang-format off
  auto client = Must(pqcached::Client::Open({.endpoint = endpoint}));
  auto cache = Must(client.OpenCache({.name = "demo", .model_fingerprint = "demo-1",
                                      .groups = {layers}, .capacity_bytes = 64 << 20}));
  auto sequence = Must(cache.CreateSequence());
  Must(sequence.Ingest(0, 0, {k, {kTokens, kHeads, kDim}}, {v, {kTokens, kHeads, kDim}}));
  Must(sequence.BuildIndex({.sink_tokens = kSink}));
  auto attention = Must(sequence.Attend(
      {.layer = 0, .query_position = kTokens - 1, .queries = {q, {kQueryHeads, kDim}}},
      {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.1}));
  attention.Merge(AttendOwn(k, v, q));  // the engine's part: sink and window
  // clang-format on
  std::printf("attended %llu sink + %llu window + %u selected of %llu tokens; output[0] = %.4f\n",
              static_cast<unsigned long long>(kSink), static_cast<unsigned long long>(kWindow),
              attention.selected.count, static_cast<unsigned long long>(kTokens),
              attention.output[0]);
  return 0;
}
