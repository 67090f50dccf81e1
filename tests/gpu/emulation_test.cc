// The emulation itself: what it runs is right, and what would be wrong on a device is stopped.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "kernels/cuda/launch.cuh"
#include "tests/sanitizers.h"
#include "tests/skip.h"

namespace pqcached::kernels::cuda {
namespace {

void ReverseInBlock(uint32_t* values) {
  auto* shared = &Shared<uint32_t>();
  shared[threadIdx.x] = values[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  values[blockIdx.x * blockDim.x + threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

TEST(EmulationTest, RunsThreadsBarriersAndBlocks) {
  std::vector<uint32_t> values(3 * 64);
  for (uint32_t i = 0; i < values.size(); ++i) values[i] = i;
  ASSERT_TRUE(
      Launch(ReverseInBlock, {dim3(3), 64, 64 * sizeof(uint32_t)}, nullptr, values.data()).ok());
  for (uint32_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], i / 64 * 64 + 63 - i % 64);
}

void SumsAndBallots(uint32_t* out) {
  auto* slots = &Shared<uint32_t>();
  const uint32_t sum = BlockSum(threadIdx.x, slots);
  const uint32_t before = BlockSumBefore(1u, slots);
  const uint32_t odd = __ballot_sync(kAllLanes, threadIdx.x % 2 == 1);
  out[threadIdx.x * 3] = sum;
  out[threadIdx.x * 3 + 1] = before;
  out[threadIdx.x * 3 + 2] = odd;
}

TEST(EmulationTest, SumsOverWarpsAndBlocks) {
  std::vector<uint32_t> out(3 * 96);
  ASSERT_TRUE(
      Launch(SumsAndBallots, {dim3(1), 96, 3 * sizeof(uint32_t)}, nullptr, out.data()).ok());
  for (uint32_t i = 0; i < 96; ++i) {
    EXPECT_EQ(out[i * 3], 96u * 95 / 2);
    EXPECT_EQ(out[i * 3 + 1], i);
    EXPECT_EQ(out[i * 3 + 2], 0xAAAAAAAAu);
  }
}

void DivergentBarrier() {
  if (threadIdx.x == 5) return;
  __syncthreads();
}

void BarriersOfTwoLines() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void CollectiveOfSomeLanes() {
  if (threadIdx.x < 7) __ballot_sync(kAllLanes, true);
}

void WritesBehindSharedMemory() {
  auto* shared = &Shared<uint32_t>();
  shared[threadIdx.x] = 0;
}

TEST(EmulationDeathTest, StopsAtDivergence) {
  EXPECT_DEATH((void)Launch(DivergentBarrier, {dim3(1), 32, 0}, nullptr), "barrier|waits in");
  EXPECT_DEATH((void)Launch(BarriersOfTwoLines, {dim3(1), 32, 0}, nullptr), "another line");
  EXPECT_DEATH((void)Launch(CollectiveOfSomeLanes, {dim3(1), 32, 0}, nullptr), "waits in");
}

TEST(EmulationDeathTest, LeavesAccessesOutsideToAsan) {
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH((void)Launch(WritesBehindSharedMemory, {dim3(1), 32, 64}, nullptr),
               "heap-buffer-overflow");
#else
  (void)WritesBehindSharedMemory;
  PQC_SKIP("asan") << "built without ASan";
#endif
}

TEST(EmulationTest, RefusesLaunchesBeyondTheHardware) {
  EXPECT_FALSE(Launch(DivergentBarrier, {dim3(1), 1056, 0}, nullptr).ok());
  EXPECT_FALSE(Launch(DivergentBarrier, {dim3(1, 65536), 32, 0}, nullptr).ok());
  EXPECT_FALSE(Launch(DivergentBarrier, {dim3(1), 32, 49 << 10}, nullptr).ok());
  EXPECT_TRUE(Launch(DivergentBarrier, {dim3(0), 32, 0}, nullptr).ok()) << "no blocks, no launch";
}

void AddOne(uint32_t* value) {
  if (threadIdx.x == 0) *value += 1;
}
void Double(uint32_t* value) {
  if (threadIdx.x == 0) *value *= 2;
}

TEST(EmulationTest, RunsStreamsLazilyAndInTheOrderOfEvents) {
  cudaStream_t first = nullptr;
  cudaStream_t second = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  bool other_order_seen = false;
  for (int round = 0; round < 40; ++round) {
    const bool with_event = round % 2 == 0;
    uint32_t value = 1;
    ASSERT_TRUE(Launch(AddOne, {dim3(1), 32, 0}, first, &value).ok());
    ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
    if (with_event) {
      ASSERT_EQ(cudaStreamWaitEvent(second, event), cudaSuccess);
    }
    ASSERT_TRUE(Launch(Double, {dim3(1), 32, 0}, second, &value).ok());
    EXPECT_EQ(value, 1u) << "nothing runs before somebody waits";
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (with_event) {
      EXPECT_EQ(value, 4u);
    } else {
      other_order_seen = other_order_seen || value == 3u;
    }
  }
  EXPECT_TRUE(other_order_seen) << "a missing event must show";
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(first), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(second), cudaSuccess);
}

class EmulatedCapture : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&joined_, cudaEventDisableTiming), cudaSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(cudaEventDestroy(event_), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(joined_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(side_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }
  void Begin() {
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  }
  cudaError_t End() { return cudaStreamEndCapture(stream_, &graph_); }
  void Fork() {
    ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(side_, event_), cudaSuccess);
  }
  void Add(cudaStream_t stream) {
    ASSERT_TRUE(Launch(AddOne, {dim3(1), 32, 0}, stream, &value_).ok());
  }

  uint32_t value_ = 1;
  cudaStream_t stream_ = nullptr;
  cudaStream_t side_ = nullptr;
  cudaEvent_t event_ = nullptr;
  cudaEvent_t joined_ = nullptr;
  cudaGraph_t graph_ = nullptr;
};

TEST_F(EmulatedCapture, RunsAGraphInAnyOrderThatItsEventsAllow) {
  bool other_order_seen = false;
  for (const bool joined_before_last : {true, false}) {
    Begin();
    Fork();
    Add(side_);
    ASSERT_EQ(cudaEventRecord(joined_, side_), cudaSuccess);
    if (joined_before_last) {
      ASSERT_EQ(cudaStreamWaitEvent(stream_, joined_), cudaSuccess);
    }
    ASSERT_TRUE(Launch(Double, {dim3(1), 32, 0}, stream_, &value_).ok());
    ASSERT_EQ(cudaStreamWaitEvent(stream_, joined_), cudaSuccess);
    ASSERT_EQ(End(), cudaSuccess);
    EXPECT_EQ(value_, 1u) << "nothing runs while it is captured";
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph_), cudaSuccess);
    for (int round = 0; round < 20; ++round) {
      value_ = 1;
      ASSERT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      if (joined_before_last) {
        EXPECT_EQ(value_, 4u);
      } else {
        other_order_seen = other_order_seen || value_ == 3u;
      }
    }
    value_ = 1;
    EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph_), cudaSuccess);
  }
  EXPECT_TRUE(other_order_seen) << "a missing event must show";
}

TEST_F(EmulatedCapture, EndsAtWhatIsForbidden) {
  void* memory = nullptr;
  uint32_t pageable = 0;
  const std::vector<std::function<cudaError_t()>> forbidden = {
      [&] { return cudaMalloc(&memory, 16); },
      [&] { return cudaHostAlloc(&memory, 16, 0); },
      [&] { return cudaFree(nullptr); },
      [&] { return cudaHostRegister(&pageable, 4, 0); },
      [&] { return cudaStreamSynchronize(stream_); },
      [&] { return cudaStreamQuery(side_); },
      [&] { return cudaDeviceSynchronize(); },
      [&] { return cudaEventSynchronize(event_); },
      [&] { return cudaMemcpy(&value_, &pageable, 4, cudaMemcpyDefault); },
      [&] { return cudaMemcpyAsync(&value_, &pageable, 4, cudaMemcpyHostToDevice, stream_); },
      [&] { return cudaStreamWaitEvent(stream_, event_); },  // recorded before the capture
  };
  for (size_t i = 0; i < forbidden.size(); ++i) {
    ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
    Begin();
    Add(stream_);
    EXPECT_NE(forbidden[i](), cudaSuccess) << i;
    EXPECT_EQ(End(), cudaErrorStreamCaptureInvalidated) << i;
    EXPECT_EQ(graph_, nullptr);
  }
  Begin();
  Fork();
  Add(side_);
  EXPECT_EQ(End(), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(cudaStreamWaitEvent(side_, event_), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaStreamSynchronize(side_), cudaSuccess) << "no longer captures";
}

TEST_F(EmulatedCapture, HostFunctionsRunInTheirPlaceAndMayNotCallTheRuntime) {
  struct Seen {
    uint32_t* value;
    uint32_t before = 0;
    cudaError_t error = cudaSuccess;
  } seen = {.value = &value_};
  Add(stream_);
  ASSERT_EQ(cudaLaunchHostFunc(
                stream_,
                [](void* data) {
                  auto& here = *static_cast<Seen*>(data);
                  here.before = *here.value;
                  here.error = cudaDeviceSynchronize();
                },
                &seen),
            cudaSuccess);
  Add(stream_);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(seen.before, 2u);
  EXPECT_EQ(seen.error, cudaErrorNotPermitted);
  EXPECT_EQ(value_, 3u);
}

}  // namespace
}  // namespace pqcached::kernels::cuda
