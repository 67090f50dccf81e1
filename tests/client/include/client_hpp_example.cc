// The example of client.hpp, compiled. It is not run, because it needs a sidecar.
#include "pqcached/client.hpp"

#include <cstdint>
#include <span>

// k, v: [4096, 8, 128]; q: [32, 128]; own: the engine's attention over sink and window.
pqcached::Status ClientHppExample(std::span<const float> k, std::span<const float> v,
                                  std::span<const float> q, const pqcached::Attention& own);

// clang-format off
pqcached::Status ClientHppExample(std::span<const float> k, std::span<const float> v,
                                  std::span<const float> q, const pqcached::Attention& own) {
  // [example]
  auto client = pqcached::Client::Open({.endpoint = "unix:///run/pqcached/pqcached.sock"});
  if (!client.ok()) return client.status();
  const pqcached::LayerGroup layers{.layers = {0}, .kv_heads = 8, .query_heads = 32,
                                    .key_dim = 128, .value_dim = 128};
  auto cache = client->OpenCache({.name = "demo", .model_fingerprint = "demo-1",
                                  .groups = {layers}, .capacity_bytes = 64 << 20});
  if (!cache.ok()) return cache.status();
  auto sequence = cache->CreateSequence();
  if (!sequence.ok()) return sequence.status();

  pqcached::Status status = sequence->Ingest(0, 0, {k, {4096, 8, 128}}, {v, {4096, 8, 128}});
  if (status.ok()) status = sequence->BuildIndex({.sink_tokens = 16});
  if (!status.ok()) return status;

  auto attention = sequence->Attend(
      {.layer = 0, .query_position = 4095, .queries = {q, {32, 128}}},
      {.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1});
  if (!attention.ok()) return attention.status();
  attention->Merge(own);  // the engine's part: sink and window
  // [/example]
  return {};
}
