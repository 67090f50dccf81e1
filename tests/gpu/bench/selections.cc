#include "tests/gpu/bench/selections.h"

#include <algorithm>
#include <cmath>

namespace pqcached::bench {

using kernels::cuda::kChunkTokens;
using kernels::cuda::SelectChunk;
using kernels::cuda::SelectLane;
using kernels::cuda::TableTask;

Selections::Selections(const Shape& shape)
    : shape_(shape),
      chunks_per_lane_((shape.token_count + kChunkTokens - 1) / kChunkTokens),
      plane_stride_(kernels::PlaneStride(shape.token_count)) {
  std::normal_distribution<float> normal;
  const size_t lanes = shape.lane_count;
  codes_ = std::make_unique<DeviceArray<uint8_t>>(shape.layer_count * layer_code_bytes());
  FillCodes();
  std::vector<float> centroids(kernels::CentroidFloats(shape.geometry));
  for (float& value : centroids) value = normal(random_);
  centroids_ = std::make_unique<DeviceArray<float>>(centroids);
  centres_.resize(shape.layer_count * lanes * shape.geometry.key_dim);
  for (float& value : centres_) value = normal(random_);
  const size_t queries = shape.layer_count * layer_query_count();
  queries_ = std::make_unique<DeviceArray<float>>(queries);
  Check(next_queries_.Allocate(queries * sizeof(float)));
  MakeTables();
  Drift(nullptr);
  Check(cudaDeviceSynchronize(), "filling the queries");
}

size_t Selections::layer_code_bytes() const {
  return shape_.lane_count * kernels::PlaneCount(shape_.geometry) * plane_stride_;
}

size_t Selections::layer_query_count() const {
  return size_t{shape_.lane_count} * shape_.group_size * shape_.geometry.key_dim;
}

const float* Selections::queries(uint32_t layer) const {
  return queries_->data() + layer * layer_query_count();
}

// A few lanes' worth of planes, repeated with a length that lets no two lanes begin alike.
void Selections::FillCodes() {
  const uint32_t mask = kernels::CentroidCount(shape_.geometry) - 1;
  const uint32_t planes = kernels::PlaneCount(shape_.geometry);
  const size_t tokens = std::min<size_t>(plane_stride_, 1 << 20);
  std::vector<std::byte> pattern;
  for (uint32_t lane = 0; lane < std::min(shape_.lane_count, 4u); ++lane) {
    std::vector<std::byte> bytes(planes * tokens);
    for (size_t token = 0; token < tokens;) {
      const size_t end = std::min<size_t>(tokens, token + 16 + random_() % 49);
      uint32_t topic[16];
      for (uint32_t& code : topic) code = static_cast<uint32_t>(random_()) & mask;
      for (; token < end; ++token) {
        for (uint32_t plane = 0; plane < planes; ++plane) {
          const auto random = static_cast<uint32_t>(random_());
          const uint32_t code = random % 10 < 7 ? topic[plane] : (random >> 8) & mask;
          bytes[plane * tokens + token] = static_cast<std::byte>(code);
        }
      }
    }
    pattern.insert(pattern.end(), bytes.begin(), bytes.end());
  }
  const size_t dropped = std::min<size_t>(pattern.size() / 2, 4096 + 128);
  pattern.erase(pattern.end() - static_cast<ptrdiff_t>(dropped), pattern.end());
  Repeat(codes_->data(), codes_->bytes(), pattern);
}

void Selections::MakeTables() {
  const uint32_t lanes = shape_.lane_count;
  std::vector<TableTask> tasks;
  std::vector<SelectChunk> chunks;
  std::vector<SelectLane> select_lanes;
  for (uint32_t layer = 0; layer < shape_.layer_count; ++layer) {
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      tasks.push_back({queries(layer) + size_t{lane} * shape_.group_size * shape_.geometry.key_dim,
                       centroids_->data()});
      for (uint32_t chunk = 0; chunk < chunks_per_lane_; ++chunk) {
        chunks.push_back({.planes = codes_->data() + layer * layer_code_bytes() +
                                    lane * kernels::PlaneCount(shape_.geometry) * plane_stride_,
                          .stride = plane_stride_,
                          .slot_begin = chunk * kChunkTokens,
                          .slot_end = std::min(shape_.token_count, (chunk + 1) * kChunkTokens),
                          .table = lane,
                          .lane = lane});
      }
    }
  }
  for (uint32_t lane = 0; lane < lanes; ++lane) {
    select_lanes.push_back(
        {lane * chunks_per_lane_, (lane + 1) * chunks_per_lane_, lane, lane + 1, shape_.k});
  }
  tasks_ = std::make_unique<DeviceArray<TableTask>>(tasks);
  chunks_ = std::make_unique<DeviceArray<SelectChunk>>(chunks);
  lanes_ = std::make_unique<DeviceArray<SelectLane>>(select_lanes);
  tables_ = std::make_unique<DeviceArray<float>>(size_t{lanes} * shape_.group_size *
                                                 kernels::TableFloats(shape_.geometry));
  positions_ = std::make_unique<DeviceArray<uint32_t>>(size_t{lanes} * shape_.k);
  counts_ = std::make_unique<DeviceArray<uint32_t>>(lanes);
  scratch_ = std::make_unique<DeviceArray<std::byte>>(kernels::cuda::PqSelectScratchBytes(
      {shape_.geometry, shape_.group_size, lanes, lanes * chunks_per_lane_, lanes}));
}

void Selections::Drift(cudaStream_t stream) {
  constexpr float kKept = 0.98f;  // of the step before
  const float moved = std::sqrt(1.0f - kKept * kKept);
  // The copy of the step before may still read them.
  Check(cudaStreamSynchronize(stream), "waiting for the queries");
  std::normal_distribution<float> normal;
  auto* next = static_cast<float*>(next_queries_.data());
  const uint32_t dim = shape_.geometry.key_dim;
  for (size_t lane = 0; lane < centres_.size() / dim; ++lane) {
    float* centre = centres_.data() + lane * dim;
    for (uint32_t d = 0; d < dim; ++d) centre[d] = kKept * centre[d] + moved * normal(random_);
    for (uint32_t head = 0; head < shape_.group_size; ++head) {
      for (uint32_t d = 0; d < dim; ++d) *next++ = centre[d] + 0.3f * normal(random_);
    }
  }
  Check(cudaMemcpyAsync(queries_->data(), next_queries_.data(), queries_->bytes(),
                        cudaMemcpyHostToDevice, stream),
        "copying queries");
}

void Selections::Give(cudaStream_t stream, uint32_t layer) const {
  Check(kernels::cuda::BuildTables(
            {.geometry = shape_.geometry,
             .group_size = shape_.group_size,
             .scale = 4.0f / std::sqrt(static_cast<float>(shape_.geometry.key_dim)),
             .task_capacity = shape_.lane_count,
             .tasks = tasks_->data() + size_t{layer} * shape_.lane_count,
             .tables = tables_->data()},
            stream),
        "building tables");
  GiveSelect(stream, layer);
}

void Selections::GiveSelect(cudaStream_t stream, uint32_t layer) const {
  const uint32_t chunk_count = shape_.lane_count * chunks_per_lane_;
  Check(kernels::cuda::PqSelect(
            {.geometry = shape_.geometry,
             .group_size = shape_.group_size,
             .candidates = {.lane_capacity = shape_.lane_count,
                            .chunk_capacity = chunk_count,
                            .lanes = lanes_->data(),
                            .chunks = chunks_->data() + size_t{layer} * chunk_count},
             .table_capacity = shape_.lane_count,
             .tables = tables_->data(),
             .selection = {positions_->data(), shape_.k, counts_->data()},
             .scratch = scratch_->data(),
             .scratch_bytes = scratch_->bytes()},
            stream),
        "selecting");
}

void Selections::RequireSelected(cudaStream_t stream) const {
  Give(stream, 0);
  Check(cudaStreamSynchronize(stream), "selecting");
  const std::vector<uint32_t> counts = counts_->Get();
  const std::vector<uint32_t> positions = positions_->Get();
  for (size_t lane = 0; lane < shape_.lane_count; ++lane) {
    Require(counts[lane] == shape_.k, "the count of selected tokens");
    for (size_t i = 1; i < shape_.k; ++i) {
      Require(positions[lane * shape_.k + i - 1] < positions[lane * shape_.k + i],
              "the order of selected tokens");
    }
  }
}

}  // namespace pqcached::bench
