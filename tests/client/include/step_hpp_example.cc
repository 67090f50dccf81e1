// The example of step.hpp, compiled. It is not run, because it needs a sidecar.
#include "pqcached/client.hpp"

#include <span>

// q: [32, 128]; output: [32, 128]; lse: [32]; rows: the new token's K and V.
pqcached::Status StepHppExample(pqcached::Client& client, const pqcached::Sequence& sequence,
                                std::span<const float> q, const pqcached::LayerRows& rows,
                                std::span<float> output, std::span<float> lse);

// clang-format off
pqcached::Status StepHppExample(pqcached::Client& client, const pqcached::Sequence& sequence,
                                std::span<const float> q, const pqcached::LayerRows& rows,
                                std::span<float> output, std::span<float> lse) {
  // [example]
  const pqcached::StepItem item = {.sequence = &sequence, .query_position = 4096};
  const pqcached::Selection selection = {.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1};
  auto step = client.BeginStep({&item, 1}, &selection);
  if (!step.ok()) return step.status();

  // Per layer, once its query is computed; the engine merges its sink and window.
  pqcached::Status status = step->Attend(0, {q, {1, 32, 128}}, output, lse);
  if (!status.ok()) return status;

  // The new token's rows in all stored layers; the step is closed in any case.
  return step->End({&rows, 1});
  // [/example]
}
