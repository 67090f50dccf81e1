// Steps with device pointers that attend to positions which the engine gives: launched and captured, in steps with and without
// a selection, over sequences with and without an index.
#include <memory>
#include <random>
#include <vector>

#include "gpu/graph.h"
#include "tests/gpu/client_step_fixture.h"

namespace pqcached::testing {
namespace {

constexpr uint32_t kCapacity = 200;  // of a list

class ClientListsTest : public ClientStepTest {
 protected:
  void SetUp() override {
    ClientStepTest::SetUp();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      lists_.push_back(std::make_unique<DeviceArray<int32_t>>(kKvHeads * kCapacity));
      chosen_.emplace_back(kKvHeads);
    }
  }

  // Other random lists below `end` for all layers, in any order, with repetitions; in the order of the stream.
  void ChooseLists(uint32_t end) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      std::vector<int32_t> lists(kKvHeads * kCapacity, -1);
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        const uint32_t length = static_cast<uint32_t>(random_() % kCapacity);
        std::vector<uint32_t>& chosen = chosen_[layer][head];
        chosen = {end - 1};  // the newest row as well
        for (uint32_t i = 0; i < length; ++i)
          chosen.push_back(static_cast<uint32_t>(random_() % end));
        std::copy(chosen.begin(), chosen.end(), lists.begin() + head * kCapacity);
        std::sort(chosen.begin(), chosen.end());
        chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
      }
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      lists_[layer]->Set(lists);
    }
  }

  pqc_status AttendLists(pqc_step* step, uint32_t layer) {
    LayerTensors& tensors = *tensors_[layer];
    const Shaped queries(tensors.queries.data(), PQC_CUDA, 1, kQueryHeads);
    pqc_position_lists lists = PQC_INIT(pqc_position_lists);
    lists.positions = lists_[layer]->data();
    lists.list_count = kKvHeads;
    lists.capacity = kCapacity;
    pqc_step_attention out = Out(layer);
    return pqc_step_attend_positions(step, layer, &queries.tensor, &lists, &out);
  }

  void ExpectLists() {
    for (uint32_t layer = 0; layer < kLayers && !HasFatalFailure(); ++layer) {
      ExpectAttention(layer, Get(layer), chosen_[layer]);
    }
  }

  // A step without a selection, launched layer by layer.
  void DecodeLists(uint64_t position) {
    pqc_step* step = nullptr;
    ExpectOk(BeginRows(position, &step));
    if (HasFatalFailure()) return;
    ChooseLists(static_cast<uint32_t>(position));
    for (const uint32_t layer : in_order_) ExpectOk(AttendLists(step, layer));
    ExpectLists();
    ExpectOk(End(step, position));
  }

  std::mt19937 random_{5};
  std::vector<std::unique_ptr<DeviceArray<int32_t>>> lists_;  // of each layer
  std::vector<std::vector<std::vector<uint32_t>>> chosen_;    // [layers][kv_heads], ascending, once
};

TEST_F(ClientListsTest, SequencesNeedNoIndex) {
  ExpectOk(OpenGpu(0, kTokenCapacity));
  FillRows();
  PrepareTensors();
  for (uint64_t position = kPrefill; position < kPrefill + 40; ++position) {
    DecodeLists(position);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(Counts().hits, 0u) << "the block cache took part";
}

// Codes are described apart from rows: a step without a selection leaves those of earlier steps.
TEST_F(ClientListsTest, StepsWithAndWithoutASelectionTakeTurns) {
  for (const size_t layers : {size_t{0}, size_t{2}}) {
    ExpectOk(OpenGpu(layers * kLayerCodes));
    Fill();
    PrepareTensors();
    for (uint64_t position = kPrefill; position < kPrefill + kWindow + 8; position += 2) {
      ExpectFullAttention(position);
      DecodeLists(position + 1);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ClientListsTest, RowsAndCodesBehindARollBackAreReadAnew) {
  ExpectOk(OpenGpu(0, kTokenCapacity));
  constexpr uint32_t kEnd = 660, kBack = 620;
  Fill(kEnd);
  PrepareTensors();
  for (const uint32_t position : {kEnd, kEnd + 1}) DecodeLists(position);
  ExpectFullAttention(kEnd + 2);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (size_t i = kBack * kTokenFloats; i < keys_[layer].size(); ++i) {
      keys_[layer][i] = -keys_[layer][i];
      values_[layer][i] += 1;
    }
  }
  constexpr uint64_t kNext = kBack + 3 * kWindow;
  for (uint64_t position = kBack; position < kNext; ++position) {
    DecodeLists(position);
    if (HasFatalFailure()) return;
  }
  // What is kept on the device selects as what is copied anew.
  const std::vector<Results> kept = Decode(kNext, 0.2, in_order_);
  ExpectOk(OpenGpu(0));
  ASSERT_TRUE(Decode(kNext, 0.2, in_order_) == kept);
}

TEST_F(ClientListsTest, AGraphReadsTheListsOfItsReplay) {
  ExpectOk(OpenGpu(2 * kLayerCodes));
  Fill();
  PrepareTensors();
  gpu::Graph graph;
  for (uint64_t position = kPrefill; position < kPrefill + 8; ++position) {
    pqc_step* step = nullptr;
    // Steps with a selection replay it, too: their lists end before the window.
    const bool selects = position % 2 == 1;
    ExpectOk(selects ? Begin(position, 0.2, &step) : BeginRows(position, &step));
    if (HasFatalFailure()) return;
    if (position == kPrefill) {
      ASSERT_TRUE(graph.Begin(stream_).ok());
      for (uint32_t layer = 0; layer < kLayers; ++layer) ExpectOk(AttendLists(step, layer));
      ASSERT_TRUE(graph.End().ok());
    }
    ChooseLists(static_cast<uint32_t>(selects ? position + 1 - kWindow : position));
    ASSERT_TRUE(graph.Launch(stream_).ok());
    ExpectLists();
    ExpectOk(End(step, position));
    if (HasFatalFailure()) return;
  }
}

TEST_F(ClientListsTest, AReplayThatRefusesAPositionFailsItsStepOnly) {
  ExpectOk(OpenGpu(0));
  FillRows();
  PrepareTensors();
  gpu::Graph graph;
  for (uint64_t position = kPrefill; position < kPrefill + 4; ++position) {
    pqc_step* step = nullptr;
    ExpectOk(BeginRows(position, &step));
    if (HasFatalFailure()) return;
    if (position == kPrefill) {
      ASSERT_TRUE(graph.Begin(stream_).ok());
      ExpectOk(AttendLists(step, 3));
      ASSERT_TRUE(graph.End().ok());
    }
    ChooseLists(static_cast<uint32_t>(position));
    std::vector<int32_t> lists = lists_[3]->Get();
    lists[kCapacity] = static_cast<int32_t>(position);
    lists_[3]->Set(lists);
    ASSERT_TRUE(graph.Launch(stream_).ok());
    ExpectFails(End(step, position), PQC_INVALID_ARGUMENT, "in layer 3 it was negative");
    EXPECT_EQ(std::string(pqc_last_error_field()), "lists.positions[200]");
    DecodeLists(position);
  }
}

#if defined(PQCACHED_CUDA_EMULATION)
TEST_F(ClientListsTest, RowsThatOnlyTheHostCanReadAreStaged) {
  emulation::SetMachine({.registers_read_only = false});
  ExpectOk(OpenGpu(0));
  FillRows();
  PrepareTensors();
  for (uint64_t position = kPrefill; position < kPrefill + 4; ++position) DecodeLists(position);
  EXPECT_EQ(Counts().locked_bytes, 0u);
  emulation::Reset();
}
#endif

TEST_F(ClientListsTest, WhatCannotBeIsRefusedByName) {
  ExpectOk(OpenGpu(0));
  Fill();
  PrepareTensors();
  ChooseLists(kPrefill);
  pqc_step* step = nullptr;
  ExpectOk(BeginRows(kPrefill, &step));
  if (HasFatalFailure()) return;
  const Shaped queries(tensors_[0]->queries.data(), PQC_CUDA, 1, kQueryHeads);
  pqc_position_lists lists = PQC_INIT(pqc_position_lists);
  lists.positions = lists_[0]->data();
  lists.list_count = 1;
  lists.capacity = kCapacity;
  pqc_step_attention out = Out(0);
  uint32_t count = 0;
  out.counts = &count;
  ExpectFails(pqc_step_attend_positions(step, 0, &queries.tensor, &lists, &out), PQC_UNIMPLEMENTED,
              "out.counts: must be NULL in a step on a GPU");
  out.counts = nullptr;
  lists.positions = nullptr;
  ExpectFails(pqc_step_attend_positions(step, 0, &queries.tensor, &lists, &out),
              PQC_INVALID_ARGUMENT, "lists.positions: must not be NULL");
  ExpectOk(AttendLists(step, 0));
  gpu::Graph graph;
  ASSERT_TRUE(graph.Begin(stream_).ok());
  ExpectFails(AttendLists(step, 0), PQC_INVALID_ARGUMENT, "capture in a step of its own");
  (void)graph.End();
  ExpectOk(End(step, kPrefill));
}

}  // namespace
}  // namespace pqcached::testing
