// Selection beside its limits: a chain of empty launches for a small one, reading the codes once for a large one; and PyTorch.
#include <algorithm>
#include <memory>

#include "tests/gpu/bench/bench.h"
#include "tests/gpu/bench/model_kernels.h"
#include "tests/gpu/bench/selections.h"
#include "tests/gpu/bench/torch_peer.h"

namespace pqcached::bench {
namespace {

// Other layers' codes push a layer's out of the cache of the device between two steps: so here.
void BenchSmall(Bench& bench) {
  const auto tokens = bench.Size(128u << 10, 1024u);
  const uint32_t layers = bench.Size(32u, 2u);
  const Selections selections({.geometry = {128, 2, 6},
                               .layer_count = layers,
                               .lane_count = 8,
                               .token_count = tokens,
                               .k = bench.Size(2048u, 64u)});
  selections.RequireSelected(bench.stream);
  DeviceRounds rounds(bench.stream);
  const size_t select =
      rounds.Add("tables and selection, 128K", layers,
                 [&](cudaStream_t stream, uint32_t i) { selections.Give(stream, i); });
  const auto launches = static_cast<uint32_t>(rounds.NodesPerRepetition(select) + 0.5);
  const size_t empty =
      rounds.Add("as many empty launches", layers, [&](cudaStream_t stream, uint32_t) {
        for (uint32_t i = 0; i < launches; ++i) Check(GiveEmpty(stream), "an empty launch");
      });
  std::unique_ptr<TorchPeer> torch;
  size_t torch_entry = 0;
  if (!bench.smoke) torch = std::make_unique<TorchPeer>("select", tokens);
  const bool has_torch = torch != nullptr && torch->why_absent().empty();
  if (has_torch) torch_entry = rounds.AddTimed("PyTorch", [&] { return torch->Time(); });
  rounds.Run(bench.rounds);
  bench.add("gpu_select_128k_over_empty_chain", rounds.Ratio(select, empty));
  if (has_torch) bench.add("gpu_select_vs_torch", rounds.Ratio(torch_entry, select));
  if (torch != nullptr && !has_torch) throw Absent(torch->why_absent());
}

Stat ShareOfHbm(Bench& bench, kernels::PqGeometry geometry) {
  const uint32_t lanes = bench.Size(512u / geometry.subspace_count, 4u);
  const Selections selections({.geometry = geometry,
                               .lane_count = lanes,
                               .token_count = bench.Size(4u << 20, 2048u),
                               .k = bench.Size(2048u, 64u)});
  selections.RequireSelected(bench.stream);
  const size_t bytes = selections.code_bytes();
  const DeviceArray<std::byte> from(bytes);
  const DeviceArray<std::byte> to(bytes);
  DeviceRounds rounds(bench.stream);
  const size_t select =
      rounds.Add("selection from many codes, m=" + std::to_string(geometry.subspace_count), 1,
                 [&](cudaStream_t stream, uint32_t) { selections.GiveSelect(stream, 0); });
  const size_t copy = rounds.Add("device copy", 1, [&](cudaStream_t stream, uint32_t) {
    Check(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, stream),
          "a copy");
  });
  rounds.Run(bench.rounds);
  return rounds.Ratio(copy, select, 0.5);  // a copy moves every byte twice
}

}  // namespace

void BenchSelect(Bench& bench) {
  const Stat m2 = ShareOfHbm(bench, {128, 2, 6});
  const Stat m4 = ShareOfHbm(bench, {128, 4, 8});
  bench.add("gpu_select_large_share_of_hbm", m2.median < m4.median ? m2 : m4);
  BenchSmall(bench);
}

}  // namespace pqcached::bench
