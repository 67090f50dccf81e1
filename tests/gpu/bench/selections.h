// Selections: codes, codebooks and drifting queries of several layers on the device, and the launches that select from them.
//
// Keys come in topics, runs of 16 to 64 tokens that share most of their codes; queries move slowly from step to step, each
// kv head's own way, and the heads of a group around it (methods.md 6.3, e and g).
#ifndef PQCACHED_TESTS_GPU_BENCH_SELECTIONS_H_
#define PQCACHED_TESTS_GPU_BENCH_SELECTIONS_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cuda/select/pq_table.h"
#include "kernels/cuda/select/select.h"
#include "kernels/select/pq.h"
#include "tests/gpu/bench/bench.h"

namespace pqcached::bench {

class Selections {
 public:
  struct Shape {
    kernels::PqGeometry geometry;
    uint32_t layer_count = 1;
    uint32_t lane_count = 0;
    uint32_t token_count = 0;
    uint32_t group_size = 4;
    uint32_t k = 2048;
  };

  explicit Selections(const Shape& shape);

  // Tables and positions of all lanes of one layer.
  void Give(cudaStream_t stream, uint32_t layer) const;
  // Selection alone.
  void GiveSelect(cudaStream_t stream, uint32_t layer) const;

  // Moves the queries of all layers on by one step.
  void Drift(cudaStream_t stream);
  const float* queries(uint32_t layer) const;  // [lane, group, key_dim]

  const uint32_t* positions() const { return positions_->data(); }  // [lane, k]
  const uint32_t* counts() const { return counts_->data(); }
  size_t code_bytes() const { return codes_->bytes(); }
  // Ends the program unless all lanes have selected k tokens, ascending.
  void RequireSelected(cudaStream_t stream) const;

 private:
  size_t layer_code_bytes() const;
  size_t layer_query_count() const;
  void FillCodes();
  void MakeTables();

  Shape shape_;
  uint32_t chunks_per_lane_;
  size_t plane_stride_;
  std::mt19937 random_{5};
  std::vector<float> centres_;  // [layer, lane, key_dim]: where the group's queries are
  std::unique_ptr<DeviceArray<uint8_t>> codes_;
  std::unique_ptr<DeviceArray<float>> centroids_;
  gpu::PinnedBuffer next_queries_;
  std::unique_ptr<DeviceArray<float>> queries_;
  std::unique_ptr<DeviceArray<kernels::cuda::TableTask>> tasks_;
  std::unique_ptr<DeviceArray<float>> tables_;
  std::unique_ptr<DeviceArray<kernels::cuda::SelectChunk>> chunks_;
  std::unique_ptr<DeviceArray<kernels::cuda::SelectLane>> lanes_;
  std::unique_ptr<DeviceArray<uint32_t>> positions_;
  std::unique_ptr<DeviceArray<uint32_t>> counts_;
  std::unique_ptr<DeviceArray<std::byte>> scratch_;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_GPU_BENCH_SELECTIONS_H_
