// DeviceArray: memory of the device for tests, filled from and read back to vectors; and whether
// there is a device at all.
#ifndef PQCACHED_TESTS_GPU_DEVICE_ARRAY_H_
#define PQCACHED_TESTS_GPU_DEVICE_ARRAY_H_

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/cuda/status.h"
#include "tests/skip.h"

namespace pqcached {

// Why device tests cannot run here, or "".
inline std::string WhyNoDevice() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count > 0 ? "" : "no device";
}

// Skips every test of a program where there is no device.
class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = WhyNoDevice();
    if (!why.empty()) PQC_SKIP("gpu") << "no GPU: " << why;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }

  // Waits for the work of a kernel that has just been launched, and expects no error.
  void Finish(kernels::cuda::KernelStatus status) {
    ASSERT_EQ(status.cuda_error, 0);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

  cudaStream_t stream_ = nullptr;
};

template <typename T>
class DeviceArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  // Contents are unspecified. Without a device it stays null: a test that skips may have one as a member.
  explicit DeviceArray(size_t count) : count_(count) {
    if (count > 0 && WhyNoDevice().empty()) {
      void* memory = nullptr;
      EXPECT_EQ(cudaMalloc(&memory, count * sizeof(T)), cudaSuccess);
      data_ = static_cast<T*>(memory);
    }
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { Set(values); }
  ~DeviceArray() {
    if (data_ == nullptr) return;
    EXPECT_EQ(cudaFree(data_), cudaSuccess);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }

  void Set(const std::vector<T>& values) {
    ASSERT_EQ(values.size(), count_);
    if (count_ == 0) return;
    ASSERT_EQ(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess);
  }

  std::vector<T> Get() const {
    std::vector<T> values(count_);
    if (count_ > 0) {
      EXPECT_EQ(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
    }
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

}  // namespace pqcached

#endif  // PQCACHED_TESTS_GPU_DEVICE_ARRAY_H_
