// Rows beside their limits: gathered from page-locked memory beside a copy of it; attention over selected rows in device
// memory beside attention over all.
#include <algorithm>
#include <memory>
#include <random>

#include "kernels/cuda/attend.h"
#include "kernels/cuda/rows.h"
#include "tests/gpu/bench/bench.h"
#include "tests/gpu/bench/torch_peer.h"

namespace pqcached::bench {
namespace {

using kernels::DType;

constexpr uint32_t kLanes = 8;
constexpr uint32_t kGroup = 4;
constexpr uint32_t kDim = 128;
constexpr size_t kRowBytes = 4 * kDim;

// Addresses of `k` random rows of each lane, [copies, lane, k].
std::vector<const std::byte*> RandomAddresses(const std::byte* rows, uint32_t tokens, uint32_t k,
                                              uint32_t copies) {
  std::mt19937 random(3);
  std::vector<const std::byte*> addresses;
  for (uint32_t list = 0; list < copies * kLanes; ++list) {
    const std::byte* lane = rows + size_t{list % kLanes} * tokens * kRowBytes;
    const size_t first = addresses.size();
    for (uint32_t i = 0; i < k; ++i) addresses.push_back(lane + random() % tokens * kRowBytes);
    std::sort(addresses.begin() + static_cast<ptrdiff_t>(first), addresses.end());
  }
  return addresses;
}

void BenchGather(Bench& bench) {
  const auto tokens = bench.Size(128u << 10, 1024u);
  const uint32_t k = bench.Size(2048u, 64u);
  const uint32_t copies = bench.Size(16u, 2u);
  gpu::PinnedBuffer mapping;
  Check(mapping.Allocate(size_t{kLanes} * tokens * kRowBytes));
  Repeat(mapping.data(), mapping.size_bytes(), RandomHalfs(1.0f, 1));
  const DeviceArray<const std::byte*> addresses(
      RandomAddresses(static_cast<const std::byte*>(mapping.data()), tokens, k, copies));
  const DeviceArray<uint32_t> counts(std::vector<uint32_t>(kLanes, k));
  const size_t bytes = size_t{kLanes} * k * kRowBytes;
  const DeviceArray<std::byte> target(bytes);
  DeviceRounds rounds(bench.stream);
  const size_t gather = rounds.Add("gather", copies, [&](cudaStream_t stream, uint32_t i) {
    Check(kernels::cuda::GatherRows({.lane_capacity = kLanes,
                                     .addresses = addresses.data() + size_t{i} * kLanes * k,
                                     .address_stride = k,
                                     .row_counts = counts.data(),
                                     .part_bytes = kRowBytes,
                                     .target = target.data(),
                                     .target_stride_bytes = kRowBytes},
                                    stream),
          "gathering");
  });
  const size_t pieces = mapping.size_bytes() / bytes;
  const size_t copy = rounds.Add("pinned copy", copies, [&](cudaStream_t stream, uint32_t i) {
    const auto* from = static_cast<const std::byte*>(mapping.data()) + i % pieces * bytes;
    Check(cudaMemcpyAsync(target.data(), from, bytes, cudaMemcpyHostToDevice, stream), "a copy");
  });
  rounds.Run(bench.rounds);
  bench.add("gpu_gather_vs_pinned_copy", rounds.Ratio(copy, gather));
}

// Attention over lists of rows, `copies` of them one after the other.
class Attention {
 public:
  Attention(Bench& bench, const std::vector<const std::byte*>& addresses, uint32_t rows_per_lane)
      : addresses_(addresses),
        counts_(std::vector<uint32_t>(kLanes, rows_per_lane)),
        queries_(std::vector<float>(size_t{kLanes} * kGroup * kDim, 0.1f)),
        output_(size_t{kLanes} * kGroup * kDim),
        lse_(size_t{kLanes} * kGroup),
        shape_{.dtype = DType::kF16,
               .key_dim = kDim,
               .value_dim = kDim,
               .group_size = kGroup,
               .lane_capacity = kLanes,
               .row_capacity = rows_per_lane,
               .split_count = kernels::cuda::ChooseSplitCount(bench.device.multiprocessor_count,
                                                              kLanes, rows_per_lane)},
        scratch_(std::max<size_t>(1, kernels::cuda::AttendScratchBytes(shape_))) {}

  void Give(cudaStream_t stream, uint32_t list) const {
    Check(kernels::cuda::AttendRows(
              {.shape = shape_,
               .scale = 0.088f,
               .queries = queries_.data(),
               .addresses = addresses_.data() + size_t{list} * kLanes * shape_.row_capacity,
               .address_stride = shape_.row_capacity,
               .row_counts = counts_.data(),
               .output = output_.data(),
               .lse = lse_.data(),
               .scratch = scratch_.data(),
               .scratch_bytes = scratch_.bytes()},
              stream),
          "attending");
  }

 private:
  DeviceArray<const std::byte*> addresses_;
  DeviceArray<uint32_t> counts_;
  DeviceArray<float> queries_;
  DeviceArray<float> output_;
  DeviceArray<float> lse_;
  kernels::cuda::AttendShape shape_;
  DeviceArray<std::byte> scratch_;
};

void BenchAttend(Bench& bench) {
  const auto tokens = bench.Size(128u << 10, 1024u);
  const uint32_t k = bench.Size(2048u, 64u);
  const uint32_t copies = bench.Size(16u, 2u);
  const DeviceArray<std::byte> rows(size_t{kLanes} * tokens * kRowBytes);
  Repeat(rows.data(), rows.bytes(), RandomHalfs(1.0f, 2));
  std::vector<const std::byte*> all;
  for (size_t row = 0; row < size_t{kLanes} * tokens; ++row) {
    all.push_back(rows.data() + row * kRowBytes);
  }
  const Attention selected_rows(bench, RandomAddresses(rows.data(), tokens, k, copies), k);
  const Attention all_rows(bench, all, tokens);
  DeviceRounds rounds(bench.stream);
  const size_t selected =
      rounds.Add("attention over selected rows", copies,
                 [&](cudaStream_t stream, uint32_t i) { selected_rows.Give(stream, i); });
  const size_t full = rounds.Add("attention over all rows", 1,
                                 [&](cudaStream_t stream, uint32_t) { all_rows.Give(stream, 0); });
  std::unique_ptr<TorchPeer> torch;
  if (!bench.smoke) torch = std::make_unique<TorchPeer>("sdpa", tokens);
  const bool has_torch = torch != nullptr && torch->why_absent().empty();
  const size_t sdpa =
      has_torch ? rounds.AddTimed("PyTorch SDPA", [&] { return torch->Time(); }) : full;
  if (torch != nullptr && !has_torch) {
    std::printf("  without PyTorch SDPA: %s\n", torch->why_absent().c_str());
  }
  rounds.Run(bench.rounds);
  const bool sdpa_is_best = rounds.Seconds(sdpa).median < rounds.Seconds(full).median;
  bench.add("gpu_attend_selected_vs_full_hbm", rounds.Ratio(sdpa_is_best ? sdpa : full, selected));
}

}  // namespace

void BenchRows(Bench& bench) {
  BenchGather(bench);
  BenchAttend(bench);
}

}  // namespace pqcached::bench
