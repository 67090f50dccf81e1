// What goes wrong with a device is a status that names the cause: only the emulation can be told to fail.
#include "gpu/device.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <sys/mman.h>

#include <string>
#include <thread>
#include <vector>

#include "gpu/block_cache.h"
#include "gpu/page_lock.h"
#include "tests/gpu/emulation/emulation.h"

namespace pqcached::gpu {
namespace {

using emulation::FailCall;
using emulation::SetMachine;

class DeviceFaultTest : public testing::Test {
 protected:
  ~DeviceFaultTest() override { emulation::Reset(); }
};

TEST_F(DeviceFaultTest, NamesWhyThereIsNoDevice) {
  Device device;
  EXPECT_TRUE(FindDevice(0, device).ok());
  EXPECT_EQ(device.compute_capability, 90u);
  EXPECT_EQ(FindDevice(1, device).code(), Code::kInvalid);
  EXPECT_EQ(FindDevice(-1, device).code(), Code::kInvalid);

  SetMachine({.count_error = cudaErrorInsufficientDriver, .driver_version = 12020});
  Status status = FindDevice(0, device);
  EXPECT_EQ(status.code(), Code::kNoDevice);
  EXPECT_EQ(status.message(), "the driver supports CUDA 12.2, the runtime needs 13.0");
  SetMachine({.count_error = cudaErrorInsufficientDriver, .driver_version = 0});
  EXPECT_EQ(FindDevice(0, device).message(), "there is no driver, the runtime needs 13.0");
  SetMachine({.device_count = 0});
  EXPECT_EQ(FindDevice(0, device).code(), Code::kNoDevice);
  SetMachine({.compute_major = 7, .compute_minor = 5});
  status = FindDevice(0, device);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("compute capability 7.5"), std::string::npos);
}

TEST_F(DeviceFaultTest, SaysHowMuchMemoryWasWanted) {
  FailCall("cudaMalloc", cudaErrorMemoryAllocation);
  DeviceBuffer buffer;
  const Status status = buffer.Allocate(1000);
  EXPECT_EQ(status.code(), Code::kOutOfMemory);
  EXPECT_NE(status.message().find("allocating 1000 bytes"), std::string::npos) << status.message();
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_TRUE(buffer.Allocate(1000).ok()) << "and it can be tried again";
  EXPECT_EQ(buffer.size_bytes(), 1000u);

  FailCall("cudaMalloc", cudaErrorMemoryAllocation);
  BlockCache cache;
  EXPECT_EQ(cache.Create({.lane_capacity = 1, .block_capacity = 1, .row_stride_bytes = 16}, nullptr)
                .code(),
            Code::kOutOfMemory);
}

TEST_F(DeviceFaultTest, TellsPageableMemoryFromWhatKernelsRead) {
  DeviceBuffer buffer;
  ASSERT_TRUE(buffer.Allocate(16).ok());
  Device device;
  ASSERT_TRUE(FindDevice(0, device).ok());
  EXPECT_TRUE(CheckDevicePointer(buffer.data(), "queries", device).ok());
  const std::vector<float> pageable(4);
  const Status status = CheckDevicePointer(pageable.data(), "queries", device);
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_EQ(status.message(), "queries is pageable host memory; a device pointer is needed");

  OwnedStream stream;
  ASSERT_TRUE(stream.Create().ok());
  EXPECT_TRUE(CheckStream(stream.get(), device).ok());
  device.index = 3;
  EXPECT_EQ(CheckStream(stream.get(), device).message(), "the stream belongs to device 0, not 3");
}

// A read-only mapping of pages.
class PageLockTest : public DeviceFaultTest {
 protected:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kBytes = 5 * kPage + 100;

  PageLockTest() {
    mapping_ = static_cast<std::byte*>(
        mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_TRUE(FindDevice(0, device_).ok());
  }
  ~PageLockTest() override { munmap(mapping_, kBytes); }

  Device device_;
  std::byte* mapping_ = nullptr;
};

TEST_F(PageLockTest, LocksWhatIsAskedForOnAnyThread) {
  PageLock lock(device_, mapping_, kBytes, 2 * kPage);
  EXPECT_EQ(lock.DeviceAddress(0), nullptr);
  EXPECT_TRUE(lock.Lock(2 * kPage - 1, 2).ok());
  EXPECT_EQ(lock.locked_bytes(), 4 * kPage);
  EXPECT_NE(lock.DeviceAddress(0), nullptr);
  EXPECT_NE(lock.DeviceAddress(4 * kPage - 1), nullptr);
  EXPECT_EQ(lock.DeviceAddress(4 * kPage), nullptr);
  std::thread other([&] { EXPECT_TRUE(lock.Lock(0, kBytes).ok()); });
  EXPECT_TRUE(lock.Lock(0, kBytes).ok());
  other.join();
  EXPECT_EQ(lock.locked_bytes(), kBytes);
  EXPECT_NE(lock.DeviceAddress(kBytes - 1), nullptr);
  EXPECT_EQ(lock.DeviceAddress(kBytes), nullptr);
  EXPECT_TRUE(lock.Lock(0, 0).ok());
  EXPECT_EQ(lock.Lock(0, kBytes + 1).code(), Code::kInvalid);
  EXPECT_EQ(lock.Lock(kBytes + 1, 0).code(), Code::kInvalid);
}

TEST_F(PageLockTest, WhatTwoLockStaysLockedUntilBothHaveLetGo) {
  const auto is_locked = [&] {
    void* address = nullptr;
    return cudaHostGetDevicePointer(&address, mapping_, 0) == cudaSuccess;
  };
  {
    PageLock lock(device_, mapping_, kBytes, 2 * kPage);
    {
      PageLock other(device_, mapping_, kBytes, 2 * kPage);
      EXPECT_TRUE(lock.Lock(0, 1).ok());
      EXPECT_TRUE(other.Lock(0, kBytes).ok());
      EXPECT_EQ(other.locked_bytes(), kBytes);
    }
    EXPECT_TRUE(is_locked());
    EXPECT_TRUE(lock.Lock(0, kBytes).ok());
  }
  EXPECT_FALSE(is_locked());
}

TEST_F(PageLockTest, KeepsWhatIsLockedWhenTheSystemRefuses) {
  PageLock lock(device_, mapping_, kBytes, 2 * kPage);
  FailCall("cudaHostRegister", cudaErrorMemoryAllocation, 1);
  const Status status = lock.Lock(0, kBytes);
  EXPECT_EQ(status.code(), Code::kOutOfMemory);
  EXPECT_NE(status.message().find("page-locking 8192 bytes"), std::string::npos);
  EXPECT_EQ(lock.locked_bytes(), 2 * kPage);
  EXPECT_NE(lock.DeviceAddress(0), nullptr);
  EXPECT_EQ(lock.DeviceAddress(2 * kPage), nullptr);
  EXPECT_TRUE(lock.Lock(0, kBytes).ok()) << "and it can be tried again";
}

TEST_F(PageLockTest, SaysWhenTheDeviceCannotLockReadOnlyMemory) {
  SetMachine({.registers_read_only = false});
  ASSERT_TRUE(FindDevice(0, device_).ok());
  PageLock lock(device_, mapping_, kBytes, kPage);
  EXPECT_EQ(lock.Lock(0, 1).code(), Code::kUnsupported);
  EXPECT_EQ(lock.locked_bytes(), 0u);
}

}  // namespace
}  // namespace pqcached::gpu
