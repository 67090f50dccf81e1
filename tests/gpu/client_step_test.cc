// The client's steps with device pointers and a stream: what they give is full attention where everything is selected,
// attention over what they say they selected elsewhere, and the same whether codes stay on the device or are copied one
// layer ahead. One source for two programs, as everything here; needs no store and no gRPC.
#include <vector>

#include "gpu/graph.h"
#include "tests/gpu/client_step_fixture.h"

namespace pqcached::testing {
namespace {

TEST_F(ClientStepTest, WhereAllIsSelectedItIsFullAttention) {
  ExpectOk(OpenGpu(0));
  Fill();
  for (uint64_t position = kPrefill; position < kPrefill + 10; ++position) {
    ExpectFullAttention(position);
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(Counts().resident_layers, kLayers);
}

TEST_F(ClientStepTest, RowsBehindARollBackAreNotFoundInTheBlockCache) {
  ExpectOk(OpenGpu(0, kTokenCapacity));
  // The end of a block of 128 rows lies between, so that it was complete before.
  constexpr uint32_t kEnd = 660, kBack = 620;
  Fill(kEnd);
  ExpectFullAttention(kEnd);
  for (std::vector<float>& values : values_) {
    for (size_t i = kBack * kTokenFloats; i < values.size(); ++i) values[i] += 1;
  }
  for (uint64_t position = kBack; position < kBack + 2 * kWindow; ++position) {
    ExpectFullAttention(position);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(Counts().hits, 0u);
}

TEST_F(ClientStepTest, OfSequencesWithoutASeatNothingIsKept) {
  ExpectOk(OpenGpu(0));
  for (int i = 0; i < 3; ++i) {
    Fill();
    ExpectFullAttention(kPrefill);
    EXPECT_LE(gpu_->state->seen.size(), 1u);
  }
}

TEST_F(ClientStepTest, CodesOnTheDeviceAndCodesCopiedAheadSelectAndAttendTheSame) {
  const std::vector<uint32_t> orders[] = {
      in_order_, {4, 3, 2, 1, 0}, {0, 0, 1, 3, 3, 2, 4, 1}, {2, 4, 0, 1, 3}};
  std::vector<std::vector<Results>> resident;
  for (const size_t layers : {size_t{0}, size_t{2}, size_t{3}, size_t{4}}) {
    ExpectOk(OpenGpu(layers * kLayerCodes));
    EXPECT_EQ(Counts().resident_layers, layers == 0 ? kLayers : layers - 2);
    Fill();
    for (uint64_t step = 0; step < 12; ++step) {
      const std::vector<Results> results = Decode(kPrefill + step, 0.2, orders[step % 4]);
      ASSERT_EQ(results.size(), size_t{kLayers});
      if (layers == 0) {
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
          ASSERT_GT(results[layer].counts[0], 60u);
          ExpectAttention(layer, results[layer], SelectedBy(results[layer]));
        }
        resident.push_back(results);
      }
      ASSERT_TRUE(results == resident[step]) << layers << " layers of codes, step " << step;
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ClientStepTest, GraphsOfOneLayerAndOfManyBringTheirOwnCodes) {
  std::vector<std::vector<Results>> resident;
  for (const size_t layers : {size_t{0}, size_t{2}, size_t{3}}) {
    ExpectOk(OpenGpu(layers * kLayerCodes));
    Fill();
    PrepareTensors();
    gpu::Graph first, rest;
    for (uint64_t position = kPrefill; position < kPrefill + 8; ++position) {
      pqc_step* step = nullptr;
      ExpectOk(Begin(position, 0.2, &step));
      ASSERT_TRUE(step != nullptr);
      const auto capture = [&](gpu::Graph& graph, uint32_t begin, uint32_t end) {
        ASSERT_TRUE(graph.Begin(stream_).ok());
        for (uint32_t layer = begin; layer < end; ++layer) ExpectOk(RunLayer(step, layer));
        ASSERT_TRUE(graph.End().ok());
      };
      if (position == kPrefill) {
        capture(first, 0, 1);
        capture(rest, 1, kLayers);
      }
      if (HasFatalFailure()) return;
      // A layer that is launched too, before and after a graph has used its slot for others.
      constexpr uint32_t kBothWays = 2;
      ASSERT_TRUE(first.Launch(stream_).ok());
      if (position % 2 == 1) ExpectOk(RunLayer(step, kBothWays));
      ASSERT_TRUE(rest.Launch(stream_).ok());
      if (position % 2 == 1) ExpectOk(RunLayer(step, kBothWays));
      std::vector<Results> results;
      for (uint32_t layer = 0; layer < kLayers; ++layer) results.push_back(Get(layer));
      ExpectOk(End(step, position));
      if (layers == 0) resident.push_back(results);
      ASSERT_TRUE(results == resident[position - kPrefill]) << layers << " at " << position;
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ClientStepTest, ThePoolIsPageLockedOnlyWhereItsPagesStay) {
  ExpectOk(OpenGpu(0));
  Fill();
  // A sidecar that cannot be asked now: the step is refused, and the next one asks again.
  sidecar_.RefuseHolds(PQC_UNAVAILABLE);
  pqc_step* step = nullptr;
  ExpectFails(Begin(kPrefill, 0.2, &step), PQC_UNAVAILABLE, "5");
  EXPECT_EQ(Counts().locked_bytes, 0u);
  sidecar_.RefuseHolds(PQC_OK);
  const std::vector<Results> in_place = Decode(kPrefill, 0.2, in_order_);
  (void)Decode(kPrefill + 1, 0.2, in_order_);
  EXPECT_EQ(sidecar_.hold_count(), 2u);
  EXPECT_EQ(Counts().has_staged_rows, 0u);
  EXPECT_GT(Counts().locked_bytes, 0u);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ExpectAttention(layer, in_place[layer], SelectedBy(in_place[layer]));
  }
}

TEST_F(ClientStepTest, WithAnOlderSidecarTheHostReadsTheRows) {
  sidecar_.RefuseHolds(PQC_UNIMPLEMENTED);
  ExpectOk(OpenGpu(0));
  Fill();
  const std::vector<Results> results = Decode(kPrefill, 0.2, in_order_);
  ASSERT_EQ(results.size(), size_t{kLayers});
  EXPECT_EQ(Counts().locked_bytes, 0u);
  EXPECT_EQ(Counts().has_staged_rows, 1u);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_GT(results[layer].counts[0], 60u);
    ExpectAttention(layer, results[layer], SelectedBy(results[layer]));
  }
}

#if defined(PQCACHED_CUDA_EMULATION)
TEST_F(ClientStepTest, CodesAreCopiedAheadWhereThePoolCannotBePageLocked) {
  emulation::SetMachine({.registers_read_only = false});
  ExpectOk(OpenGpu(2 * kLayerCodes));
  Fill();
  for (uint64_t position = kPrefill; position < kPrefill + 4; ++position) {
    const std::vector<Results> results = Decode(position, 0.2, in_order_);
    ASSERT_EQ(results.size(), size_t{kLayers});
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_GT(results[layer].counts[0], 60u);
      ExpectAttention(layer, results[layer], SelectedBy(results[layer]));
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(Counts().locked_bytes, 0u);
  EXPECT_EQ(Counts().resident_layers, 0u);
  emulation::Reset();
}
#endif

TEST_F(ClientStepTest, AStepThatIsEndedOrAbandonedInACaptureLeavesTheNextOnesWhole) {
  for (const size_t layers : {size_t{0}, size_t{2}}) {
    ExpectOk(OpenGpu(layers * kLayerCodes));
    Fill();
    for (const bool is_abandoned : {true, false}) {
      PrepareTensors();
      pqc_step* step = nullptr;
      ExpectOk(Begin(kPrefill, 0.2, &step));
      ASSERT_TRUE(step != nullptr);
      gpu::Graph graph;
      ASSERT_TRUE(graph.Begin(stream_).ok());
      ExpectOk(RunLayer(step, 0));
      if (is_abandoned) {
        pqc_step_abandon(step);
      } else {
        ExpectFails(End(step, kPrefill, PQC_CPU), PQC_INVALID_ARGUMENT, "the stream captures");
      }
      ASSERT_TRUE(graph.End().ok());
    }
    for (uint64_t position = kPrefill; position < kPrefill + 3; ++position) {
      ExpectFullAttention(position);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ClientStepTest, WhatCannotBeIsRefusedByName) {
  ExpectFails(OpenGpu(2 * kLayerCodes - 1), PQC_INVALID_ARGUMENT, "codes_bytes");
  ExpectOk(OpenGpu(2 * kLayerCodes));
  Fill();
  PrepareTensors();
  pqc_step* step = nullptr;
  ExpectOk(Begin(kPrefill, 0.2, &step));
  ExpectFails(Select(step, 0, kTokenCapacity - 1), PQC_OUT_OF_RANGE,
              "out.stride: 1023, must be at least selected_capacity, 1024");
  ExpectOk(RunLayer(step, 0));
  const auto capture = [&](uint32_t layer) {
    gpu::Graph graph;
    ASSERT_TRUE(graph.Begin(stream_).ok());
    ExpectFails(RunLayer(step, layer), PQC_INVALID_ARGUMENT, "capture in a step of its own");
    (void)graph.End();
  };
  capture(1);
  ExpectOk(End(step, kPrefill));

  ExpectOk(OpenGpu(0));
  Fill();
  ExpectOk(Begin(kPrefill, 0.2, &step));
  ExpectOk(RunLayer(step, 0));
  capture(0);
  ExpectOk(End(step, kPrefill));
}

}  // namespace
}  // namespace pqcached::testing
