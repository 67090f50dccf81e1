// Prefill from the device: rows packed by a stream and stored behind it, what happens when staging is full, when the
// sidecar refuses rows, and beside other work.
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/graph.h"
#include "tests/gpu/client_step_fixture.h"

namespace pqcached::testing {
namespace {

TEST_F(ClientStepTest, TwoGpusOfOneCacheShareWhatIsPageLocked) {
  ExpectOk(OpenGpu(0));
  pqc_gpu* other = std::exchange(gpu_, nullptr);
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const DeviceArray<float> keys(keys_[layer]), values(values_[layer]);
    const Shaped k(keys.data(), PQC_CUDA, kPrefill, kKvHeads);
    const Shaped v(values.data(), PQC_CUDA, kPrefill, kKvHeads);
    std::swap(gpu_, other);
    ExpectOk(pqc_gpu_ingest(gpu_, sequence_, layer, 0, &k.tensor, &v.tensor, stream_));
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }
  BuildIndex();
  for (uint64_t position = kPrefill; position < kPrefill + 2; ++position) {
    std::swap(gpu_, other);
    ExpectFullAttention(position);
    EXPECT_EQ(Counts().has_staged_rows, 0u);
    EXPECT_GT(Counts().locked_bytes, 0u);
  }
  pqc_gpu_close(other);
  ExpectFullAttention(kPrefill + 2);
  const DeviceArray<float> row(kTokenFloats);
  const Shaped last(row.data(), PQC_CUDA, 1, kKvHeads);
  ExpectOk(pqc_gpu_ingest(gpu_, sequence_, 0, kPrefill + 3, &last.tensor, &last.tensor, stream_));
  ExpectOk(pqc_sequence_flush(sequence_));
}

TEST_F(ClientStepTest, PrefillFromTheDeviceIsStoredBehindTheStream) {
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  // Chunk by chunk through the same memory, which the next chunk overwrites in the stream's order.
  constexpr uint32_t kChunk = 200;
  DeviceArray<float> keys(kChunk * kTokenFloats), values(kChunk * kTokenFloats);
  for (uint32_t begin = 0; begin < kPrefill; begin += kChunk) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Overwrite(keys, keys_[layer], begin * kTokenFloats);
      Overwrite(values, values_[layer], begin * kTokenFloats);
      const Shaped k(keys.data(), PQC_CUDA, kChunk, kKvHeads);
      const Shaped v(values.data(), PQC_CUDA, kChunk, kKvHeads);
      ExpectOk(pqc_gpu_ingest(gpu_, sequence_, layer, begin, &k.tensor, &v.tensor, stream_));
    }
  }
  BuildIndex();  // waits for the rows
  EXPECT_EQ(sidecar_.commit_count(), kLayers * kPrefill / kChunk);
  ExpectFullAttention(kPrefill);
}

TEST_F(ClientStepTest, QuerySamplesFromTheDeviceArriveBehindTheStream) {
  OpenClient({.slot_bytes = 16 << 10});  // a layer takes several slots
  ExpectOk(OpenGpu(0));
  FillRows();
  constexpr uint32_t kCount = 150;
  std::vector<uint64_t> positions;
  std::vector<float> queries[2];
  for (uint32_t i = 0; i < kCount; ++i) positions.push_back(4 * i);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (uint32_t i = 0; i < kCount * kQueryFloats; ++i) {
      queries[layer].push_back(static_cast<float>((i * (layer + 3)) % 37) / 8);
    }
  }
  const DeviceArray<float> first(queries[0]);
  DeviceArray<float> second(std::vector<float>(kCount * kQueryFloats, 9.0f));
  Overwrite(second, queries[1], 0);  // in the stream's order
  pqc_query_samples samples[2] = {PQC_INIT(pqc_query_samples), PQC_INIT(pqc_query_samples)};
  const Shaped q0(first.data(), PQC_CUDA, kCount, kQueryHeads);
  const Shaped q1(second.data(), PQC_CUDA, kCount, kQueryHeads);
  for (uint32_t i = 0; i < 2; ++i) {
    samples[i].layer = 3 * i;
    samples[i].positions = positions.data();
    samples[i].position_count = kCount;
    samples[i].queries = i == 0 ? q0.tensor : q1.tensor;
  }
  ExpectOk(pqc_gpu_add_query_samples(gpu_, sequence_, samples, 2, stream_));
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(sidecar_.samples(3 * i).positions, positions);
    EXPECT_EQ(sidecar_.samples(3 * i).queries, queries[i]);
  }
  const Shaped host(queries[0].data(), PQC_CPU, kCount, kQueryHeads);
  samples[1].queries = host.tensor;
  ExpectFails(pqc_gpu_add_query_samples(gpu_, sequence_, samples, 2, stream_), PQC_INVALID_ARGUMENT,
              "samples[1].queries.device");
  ExpectFails(pqc_add_query_samples(sequence_, samples, 1), PQC_UNIMPLEMENTED,
              "samples[0].queries.device");
}

TEST_F(ClientStepTest, PrefillFromBlocksIsStoredInTheOrderOfTheTable) {
  OpenClient({.slot_bytes = 32 << 10});  // a layer takes several, which begin within blocks
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  constexpr uint32_t kBlockTokens = 16, kBlocks = kTokens / kBlockTokens;
  std::vector<uint32_t> order(kBlocks);  // where each block of the sequence lies
  for (uint32_t block = 0; block < kBlocks; ++block) order[block] = (block * 7 + 3) % kBlocks;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    // [blocks, K and V, tokens, heads, dim]
    constexpr size_t kBlockFloats = kBlockTokens * kTokenFloats;
    std::vector<float> pages(kBlocks * 2 * kBlockFloats);
    for (uint32_t block = 0; block < kBlocks; ++block) {
      const auto from = static_cast<ptrdiff_t>(block * kBlockFloats);
      const auto to = pages.begin() + static_cast<ptrdiff_t>(order[block] * 2 * kBlockFloats);
      std::copy_n(keys_[layer].begin() + from, kBlockFloats, to);
      std::copy_n(values_[layer].begin() + from, kBlockFloats,
                  to + static_cast<ptrdiff_t>(kBlockFloats));
    }
    const DeviceArray<float> device_pages(pages);
    pqc_block_table table = PQC_INIT(pqc_block_table);
    std::vector<uint32_t> blocks = order;
    table.blocks = blocks.data();
    table.block_count = blocks.size();
    table.block_tokens = kBlockTokens;
    table.token_count = kPrefill;
    const uint64_t shape[] = {kBlocks, kBlockTokens, kKvHeads, kDim};
    const int64_t strides[] = {2 * kBlockFloats, kTokenFloats, kDim, 1};
    pqc_tensor k = PQC_INIT(pqc_tensor);
    k.ptr = device_pages.data();
    k.device = PQC_CUDA;
    k.dtype = PQC_F32;
    k.ndim = 4;
    k.shape = shape;
    k.strides = strides;
    k.block_table = &table;
    pqc_tensor v = k;
    v.ptr = device_pages.data() + kBlockFloats;
    ExpectOk(pqc_gpu_ingest(gpu_, sequence_, layer, 0, &k, &v, stream_));
    blocks.assign(blocks.size(), kBlocks);    // the caller's again
    ExpectOk(pqc_sequence_flush(sequence_));  // the pages go
  }
  BuildIndex();
  ExpectFullAttention(kPrefill);
}

TEST_F(ClientStepTest, PrefillGoesOnUntilNoSlotIsLeft) {
  const auto open = [&](uint32_t timeout_ms) {
    OpenClient({.slot_count = 2, .timeout_ms = timeout_ms});
    ExpectOk(OpenGpu(0));
    ExpectOk(pqc_sequence_create(cache_, &sequence_));
  };
  const DeviceArray<float> keys(keys_[0]), values(values_[0]);
  const Shaped k(keys.data(), PQC_CUDA, kPrefill, kKvHeads);
  const Shaped v(values.data(), PQC_CUDA, kPrefill, kKvHeads);
  const auto ingest = [&](uint32_t layer) {
    return pqc_gpu_ingest(gpu_, sequence_, layer, 0, &k.tensor, &v.tensor, stream_);
  };
  open(/*timeout_ms=*/100);
  sidecar_.CloseGate();
  ExpectOk(ingest(0));
  ExpectOk(ingest(1));
  ExpectFails(ingest(2), PQC_DEADLINE_EXCEEDED, "all 2 slots are in flight");
  ExpectFails(pqc_sequence_flush(sequence_), PQC_DEADLINE_EXCEEDED, "not stored in time");
  sidecar_.OpenGate();
  CloseClient();
  const uint64_t before = sidecar_.commit_count();
  open(/*timeout_ms=*/60000);  // for what has to succeed, however slow the machine is
  for (uint32_t layer = 0; layer < kLayers; ++layer) ExpectOk(ingest(layer));
  ExpectOk(pqc_sequence_flush(sequence_));
  EXPECT_EQ(sidecar_.commit_count(), before + kLayers);
}

TEST_F(ClientStepTest, WhatFailsInThePrefillIsToldAndWhatFollowsIsNotSent) {
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  std::vector<std::unique_ptr<DeviceArray<float>>> arrays;
  const auto ingest = [&](uint32_t layer) {
    arrays.push_back(std::make_unique<DeviceArray<float>>(keys_[layer]));
    const Shaped k(arrays.back()->data(), PQC_CUDA, kPrefill, kKvHeads);
    arrays.push_back(std::make_unique<DeviceArray<float>>(values_[layer]));
    const Shaped v(arrays.back()->data(), PQC_CUDA, kPrefill, kKvHeads);
    return pqc_gpu_ingest(gpu_, sequence_, layer, 0, &k.tensor, &v.tensor, stream_);
  };
  sidecar_.CloseGate();
  sidecar_.RefuseCommits(1);
  ExpectOk(ingest(0));
  ExpectOk(ingest(1));
  sidecar_.OpenGate();
  ExpectFails(pqc_sequence_flush(sequence_), PQC_INVALID_ARGUMENT,
              "rows of an earlier pqc_gpu_ingest: rows[0].keys: refused by the test");
  EXPECT_EQ(sidecar_.commit_count(), 1u);
  ExpectOk(pqc_sequence_flush(sequence_));  // it is told once
  for (uint32_t layer = 0; layer < kLayers; ++layer) ExpectOk(ingest(layer));
  BuildIndex();
  ExpectFullAttention(kPrefill);

  // One that is dropped with rows on their way; the GPU is closed with others.
  sidecar_.CloseGate();
  ExpectOk(ingest(0));
  ExpectOk(ingest(1));
  sidecar_.OpenGate();
  Drop();
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  ExpectOk(ingest(0));
  pqc_gpu_close(gpu_);
  gpu_ = nullptr;
  ExpectOk(pqc_sequence_flush(sequence_));
}

TEST_F(ClientStepTest, ThreadsPrefillSequencesOfTheirOwnBesideSteps) {
  OpenClient({.slot_bytes = 32 << 10, .slot_count = 3});
  ExpectOk(OpenGpu(0));
  Fill();
  constexpr int kThreads = 2;
  pqc_sequence* sequences[kThreads] = {};
  std::atomic<int> failed = 0;
  std::vector<std::thread> threads;
  for (pqc_sequence*& sequence : sequences) {
    ExpectOk(pqc_sequence_create(cache_, &sequence));
    threads.emplace_back([this, &failed, sequence] {
      cudaStream_t stream = nullptr;
      failed += cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess;
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const DeviceArray<float> keys(keys_[layer]), values(values_[layer]);
        const Shaped k(keys.data(), PQC_CUDA, kPrefill, kKvHeads);
        const Shaped v(values.data(), PQC_CUDA, kPrefill, kKvHeads);
        failed += pqc_gpu_ingest(gpu_, sequence, layer, 0, &k.tensor, &v.tensor, stream) != PQC_OK;
        failed += pqc_sequence_flush(sequence) != PQC_OK;  // the arrays go
      }
      failed += cudaStreamDestroy(stream) != cudaSuccess;
    });
  }
  for (uint64_t position = kPrefill; position < kPrefill + 4; ++position) {
    ExpectFullAttention(position);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed.load(), 0);
  for (pqc_sequence* sequence : sequences) {
    Drop();
    sequence_ = sequence;
    BuildIndex();
    ExpectFullAttention(kPrefill);
  }
}

TEST_F(ClientStepTest, PrefillGoesOnWhileAnotherStreamCaptures) {
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  const DeviceArray<float> keys(keys_[0]), values(values_[0]);
  const Shaped k(keys.data(), PQC_CUDA, kPrefill, kKvHeads);
  const Shaped v(values.data(), PQC_CUDA, kPrefill, kKvHeads);
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  gpu::Graph graph;
  ASSERT_TRUE(graph.Begin(other).ok());
  ExpectOk(pqc_gpu_ingest(gpu_, sequence_, 0, 0, &k.tensor, &v.tensor, stream_));
  ExpectFails(pqc_gpu_ingest(gpu_, sequence_, 0, 0, &k.tensor, &v.tensor, other),
              PQC_INVALID_ARGUMENT, "the stream captures");
  ExpectOk(pqc_sequence_flush(sequence_));
  EXPECT_EQ(sidecar_.commit_count(), 1u);
  EXPECT_GT(Counts().device_bytes, 0u);
  EXPECT_TRUE(graph.End().ok());
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
}

#if defined(PQCACHED_CUDA_EMULATION)
TEST_F(ClientStepTest, ARingThatCannotBePageLockedIsToldAndTriedAgain) {
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  const DeviceArray<float> keys(keys_[0]), values(values_[0]);
  const Shaped k(keys.data(), PQC_CUDA, kPrefill, kKvHeads);
  const Shaped v(values.data(), PQC_CUDA, kPrefill, kKvHeads);
  emulation::FailCall("cudaHostRegister", cudaErrorMemoryAllocation);
  ExpectFails(pqc_gpu_ingest(gpu_, sequence_, 0, 0, &k.tensor, &v.tensor, stream_),
              PQC_RESOURCE_EXHAUSTED, "staging: page-locking 3145728 bytes");
  ExpectOk(pqc_gpu_ingest(gpu_, sequence_, 0, 0, &k.tensor, &v.tensor, stream_));
  ExpectOk(pqc_sequence_flush(sequence_));
  emulation::Reset();
}
#endif

}  // namespace
}  // namespace pqcached::testing
