// Steps on a GPU by the C++ wrapper, with tensors on the device.
#ifndef PQCACHED_TESTS_CLIENT_GPU_GPU_WRAPPER_FIXTURE_H_
#define PQCACHED_TESTS_CLIENT_GPU_GPU_WRAPPER_FIXTURE_H_

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/gpu/gpu.h"
#include "pqcached/gpu.hpp"
#include "tests/client/step/step_fixture.h"
#include "tests/gpu/device_array.h"

extern "C" const pqcached::gpu::GpuEntry* pqcached_gpu_entry();

namespace pqcached::testing {

template <typename T>
std::span<T> SpanOf(const DeviceArray<T>& array) {
  return {array.data(), array.size()};
}

class GpuWrapperTest : public StepTest {
 protected:
  void SetUp() override {
    const std::string why = WhyNoDevice();
    if (!why.empty()) PQC_SKIP("gpu") << "no GPU: " << why;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    Open(512);
  }

  void Open(uint64_t selected_capacity, uint64_t codes_bytes = 0) {
    gpu_.reset();
    pqc_gpu_options options = PQC_INIT(pqc_gpu_options);
    options.sequence_capacity = 2;
    options.token_capacity = 2048;
    options.selected_capacity = selected_capacity;
    options.query_length = 3;
    options.codebook_capacity = 6;
    options.cache_tokens = 256;
    options.codes_bytes = codes_bytes;
    pqc_gpu* gpu = nullptr;
    ASSERT_EQ(client::Call([&] {
                return client::OpenGpu(cache_.get(), &options, pqcached_gpu_entry(), &gpu);
              }),
              PQC_OK)
        << pqc_last_error();
    gpu_ = Gpu::Adopt(gpu);
    gpu_pointer_ = gpu;
  }

  void TearDown() override {
    gpu_.reset();
    if (stream_ != nullptr) {
      EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    }
  }

  // Queries and results of the query tokens of a step, on the device.
  struct Tensors {
    explicit Tensors(const std::vector<float>& numbers)
        : tokens(numbers.size() / (Layer::kQueryHeads * Layer::kKeyDim)),
          queries(numbers),
          output(tokens * kOutput),
          lse(tokens * Layer::kQueryHeads) {}

    Tensor query() const {
      return Tensor(SpanOf(queries), {tokens, Layer::kQueryHeads, Layer::kKeyDim}).OnGpu();
    }
    Attention Get(cudaStream_t stream) const {
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      return {.output = output.Get(), .lse = lse.Get()};
    }

    uint64_t tokens;
    DeviceArray<float> queries, output, lse;
  };

  cudaStream_t stream_ = nullptr;
  std::optional<Gpu> gpu_;
  pqc_gpu* gpu_pointer_ = nullptr;  // of gpu_
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_GPU_GPU_WRAPPER_FIXTURE_H_
