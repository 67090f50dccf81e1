// The example of sequence.hpp, compiled. It is not run, because it needs a sidecar.
#include "pqcached/sequence.hpp"

#include <cstddef>
#include <cstdint>
#include <span>

// Loads the tokens of a kv head; the engine has this function.
void Load(uint32_t kv_head, std::span<const uint32_t> positions);
// q: [32, 128].
pqcached::Status SequenceHppExample(pqcached::Sequence& sequence, std::span<const float> q);

// clang-format off
pqcached::Status SequenceHppExample(pqcached::Sequence& sequence, std::span<const float> q) {
  // [example]
  auto selected = sequence.TopK(
      {.layer = 0, .query_position = 4095, .queries = {q, {32, 128}}},
      {.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1});
  if (!selected.ok()) return selected.status();
  for (uint32_t head = 0; head < selected->kv_heads; ++head) {
    const uint32_t* positions = selected->positions.data() + size_t{head} * selected->count;
    Load(head, {positions, selected->count});  // the engine's own gather of these tokens
  }
  // [/example]
  return {};
}
