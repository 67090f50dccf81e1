// Loads to device memory, on both paths: layouts, what is refused, and what happens beside them.
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "client/gpu/load.h"
#include "gpu/graph.h"
#include "pqcached/attach.h"
#include "pqcached/load.h"
#include "tests/gpu/client_step_fixture.h"

namespace pqcached::testing {
namespace {

constexpr std::byte kUntouched{0x5A};
constexpr uint32_t kBlockTokens = 16;

enum class Layout { kContiguous, kHeadsFirst, kPaged, kTransposed, kSlots };
constexpr Layout kAllLayouts[] = {Layout::kContiguous, Layout::kHeadsFirst, Layout::kPaged,
                                  Layout::kTransposed, Layout::kSlots};

// K or V of an engine on the device, for some tokens that begin at `first_token` of a block table.
class Memory {
 public:
  Memory(pqc_dtype dtype, Layout layout, uint64_t tokens, uint64_t first_token = 0)
      : dtype_(dtype), layout_(layout), tokens_(tokens), first_token_(first_token) {
    const uint64_t blocks = (first_token + tokens + kBlockTokens - 1) / kBlockTokens;
    for (uint64_t block = 0; paged() && block < blocks; ++block) {
      blocks_.push_back(static_cast<uint32_t>(blocks + 1 - block));  // of blocks + 2
    }
    for (uint64_t t = 0; layout == Layout::kSlots && t < tokens; ++t) {
      const uint64_t token = first_token + t;
      slots_.push_back(int64_t{blocks_[token / kBlockTokens]} * kBlockTokens +
                       static_cast<int64_t>(token % kBlockTokens));
    }
    constexpr int64_t kRow = kTokenFloats;
    const auto count = static_cast<int64_t>(tokens);
    if (!paged()) {
      shape_ = {tokens, kKvHeads, kDim};
      strides_ = {kRow, kDim, 1};
      if (layout == Layout::kHeadsFirst) strides_ = {kDim, count * kDim, 1};
    } else {
      shape_ = {blocks + 2, kBlockTokens, kKvHeads, kDim};
      strides_ = {kBlockTokens * kRow, kRow, kDim, 1};
      if (layout == Layout::kTransposed) {
        strides_ = {kBlockTokens * kRow, 1, kDim * kBlockTokens, kBlockTokens};
      }
    }
    const uint64_t elements = (paged() ? (blocks + 2) * kBlockTokens : tokens) * kTokenFloats;
    bytes_.assign(elements * element_bytes(), kUntouched);
    device_ = std::make_unique<DeviceArray<std::byte>>(bytes_);
    table_.block_tokens = kBlockTokens;
    table_.token_count = tokens;
    if (layout == Layout::kSlots) {
      table_.slots = slots_.data();
    } else {
      table_.blocks = blocks_.data();
      table_.block_count = blocks_.size();
      table_.first_token = first_token;
    }
  }
  Memory(Memory&&) = delete;

  pqc_tensor tensor() const {
    pqc_tensor tensor = PQC_INIT(pqc_tensor);
    tensor.ptr = device_->data();
    tensor.device = PQC_CUDA;
    tensor.dtype = dtype_;
    tensor.ndim = static_cast<uint32_t>(shape_.size());
    tensor.shape = shape_.data();
    tensor.strides = strides_.data();
    if (paged()) tensor.block_table = &table_;
    return tensor;
  }

  // Expects the rows [begin, begin + tokens) of `floats`, [tokens, kv_heads, dim], and no other byte
  // to have changed.
  void ExpectRows(const std::vector<float>& floats, uint64_t begin) {
    for (uint64_t t = 0; t < tokens_; ++t) {
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        for (uint32_t i = 0; i < kDim; ++i) {
          const float value = floats[((begin + t) * kKvHeads + head) * kDim + i];
          kernels::StoreElement(static_cast<kernels::DType>(dtype_), bytes_.data(),
                                PlaceOf(t, head, i), value);
        }
      }
    }
    ExpectBytes();
  }
  void ExpectUntouched() const { ExpectBytes(); }

  std::vector<uint32_t>& blocks() { return blocks_; }
  std::vector<int64_t>& slots() { return slots_; }
  pqc_block_table& table() { return table_; }
  const DeviceArray<std::byte>& device() const { return *device_; }

 private:
  bool paged() const { return layout_ != Layout::kContiguous && layout_ != Layout::kHeadsFirst; }
  size_t element_bytes() const { return dtype_ == PQC_F32 ? 4 : 2; }
  size_t PlaceOf(uint64_t token, uint32_t head, uint32_t i) const {
    if (!paged()) {
      return token * static_cast<size_t>(strides_[0]) + head * static_cast<size_t>(strides_[1]) + i;
    }
    token += first_token_;
    return blocks_[token / kBlockTokens] * static_cast<size_t>(strides_[0]) +
           token % kBlockTokens * static_cast<size_t>(strides_[1]) +
           head * static_cast<size_t>(strides_[2]) + i * static_cast<size_t>(strides_[3]);
  }
  void ExpectBytes() const {
    ASSERT_TRUE(device_->Get() == bytes_)
        << "dtype " << dtype_ << ", layout " << static_cast<int>(layout_) << ", tokens " << tokens_;
  }

  const pqc_dtype dtype_;
  const Layout layout_;
  const uint64_t tokens_;
  const uint64_t first_token_;
  std::vector<uint64_t> shape_;
  std::vector<int64_t> strides_;
  std::vector<uint32_t> blocks_;
  std::vector<int64_t> slots_;
  std::vector<std::byte> bytes_;  // as they should be
  std::unique_ptr<DeviceArray<std::byte>> device_;
  pqc_block_table table_ = PQC_INIT(pqc_block_table);
};

// The memory of a load of some layers, and its array of structs.
struct Targets {
  void Add(uint32_t layer, pqc_dtype dtype, Layout key_layout, Layout value_layout, uint64_t tokens,
           uint64_t first_token = 0) {
    keys.push_back(std::make_unique<Memory>(dtype, key_layout, tokens, first_token));
    values.push_back(std::make_unique<Memory>(dtype, value_layout, tokens, first_token));
    pqc_layer_rows row = PQC_INIT(pqc_layer_rows);
    row.layer = layer;
    row.keys = keys.back()->tensor();
    row.values = values.back()->tensor();
    rows.push_back(row);
  }
  uint32_t count() const { return static_cast<uint32_t>(rows.size()); }
  void ExpectUntouched() const {
    for (size_t i = 0; i < rows.size(); ++i) {
      keys[i]->ExpectUntouched();
      values[i]->ExpectUntouched();
    }
  }

  std::vector<std::unique_ptr<Memory>> keys, values;
  std::vector<pqc_layer_rows> rows;
};

class ClientLoadTest : public ClientStepTest {
 protected:
  static constexpr uint32_t kShort = 400;  // tokens of the last layer

  void SetUp() override {
    ClientStepTest::SetUp();
    if (client_ == nullptr) return;
    ExpectOk(OpenGpu(0));
    ExpectOk(pqc_sequence_create(cache_, &sequence_));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const DeviceArray<float> keys(keys_[layer]), values(values_[layer]);
      const uint32_t tokens = layer + 1 == kLayers ? kShort : kPrefill;
      const Shaped k(keys.data(), PQC_CUDA, tokens, kKvHeads);
      const Shaped v(values.data(), PQC_CUDA, tokens, kKvHeads);
      ExpectOk(pqc_gpu_ingest(gpu_, sequence_, layer, 0, &k.tensor, &v.tensor, stream_));
      ExpectOk(pqc_sequence_flush(sequence_));  // the arrays go
    }
    local_ = sequence_;
    OpenRemote(/*has_library=*/true);
  }

  void TearDown() override {
    CloseRemote();
    ClientStepTest::TearDown();
  }

  // The same sequence over the remote path.
  void OpenRemote(bool has_library) {
    CloseRemote();
    remote_client_ = sidecar_.OpenRemoteClient();
    if (has_library) {
      client::DeviceLoadsOf(*remote_client_->state)->SetEntry(*pqcached_gpu_entry());
    }
    std::swap(client_, remote_client_);
    std::swap(cache_, remote_cache_);
    OpenCache();
    ExpectOk(pqc_sequence_attach(cache_, local_->state->sequence_id, &remote_, nullptr));
    std::swap(client_, remote_client_);
    std::swap(cache_, remote_cache_);
  }

  void CloseRemote() {
    ExpectOk(pqc_sequence_detach(std::exchange(remote_, nullptr)));
    pqc_cache_close(std::exchange(remote_cache_, nullptr));
    pqc_client_close(std::exchange(remote_client_, nullptr));
  }

  static pqc_status Load(pqc_sequence* sequence, uint64_t begin, uint64_t end,
                         const Targets& targets) {
    return pqc_load(sequence, {begin, end}, targets.rows.data(), targets.count());
  }

  void ExpectLayer(const Targets& targets, size_t i, uint64_t begin) {
    const uint32_t layer = targets.rows[i].layer;
    targets.keys[i]->ExpectRows(keys_[layer], begin);
    targets.values[i]->ExpectRows(values_[layer], begin);
  }

  void ExpectLoads(pqc_sequence* sequence) {
    for (const pqc_dtype dtype : {PQC_F16, PQC_BF16, PQC_F32}) {
      for (const Layout layout : kAllLayouts) {
        for (const auto& [begin, end] : {std::pair{0u, kPrefill}, {0u, 1u}, {37u, 599u}}) {
          Targets targets;
          targets.Add(1, dtype, layout, layout, end - begin, begin);  // in any order
          targets.Add(0, dtype, layout, Layout::kContiguous, end - begin, begin);
          ExpectOk(Load(sequence, begin, end, targets));
          for (size_t i = 0; i < 2; ++i) ExpectLayer(targets, i, begin);
          if (HasFatalFailure()) return;
        }
      }
    }
  }

  pqc_sequence* local_ = nullptr;
  pqc_client* remote_client_ = nullptr;
  pqc_cache* remote_cache_ = nullptr;
  pqc_sequence* remote_ = nullptr;
};

TEST_F(ClientLoadTest, IngestedRowsReachEveryLayoutOnTheLocalPath) { ExpectLoads(local_); }

TEST_F(ClientLoadTest, IngestedRowsReachEveryLayoutOnTheRemotePath) { ExpectLoads(remote_); }

TEST_F(ClientLoadTest, NothingIsWrittenWhenRowsAreMissing) {
  for (pqc_sequence* const sequence : {local_, remote_}) {
    for (const auto& [begin, end] : {std::pair{kShort - 20, kShort + 1}, {0u, kShort + 1}}) {
      Targets targets;
      targets.Add(0, PQC_F16, Layout::kPaged, Layout::kPaged, end - begin, begin);
      targets.Add(kLayers - 1, PQC_F16, Layout::kPaged, Layout::kPaged, end - begin, begin);
      ExpectFails(Load(sequence, begin, end, targets), PQC_OUT_OF_RANGE, "tokens: ");
      targets.ExpectUntouched();
    }
    Targets targets;
    targets.Add(0, PQC_F16, Layout::kPaged, Layout::kPaged, 17, kPrefill - 16);
    ExpectFails(Load(sequence, kPrefill - 16, kPrefill + 1, targets), PQC_OUT_OF_RANGE, "tokens: ");
    targets.ExpectUntouched();
  }
}

// Engines list block 0, or slot 0, for the tokens that they do not keep in a layer.
TEST_F(ClientLoadTest, TheNullBlockMayRepeat) {
  for (pqc_sequence* const sequence : {local_, remote_}) {
    Targets targets;
    targets.Add(0, PQC_F16, Layout::kPaged, Layout::kSlots, 40, 5);
    targets.keys[0]->blocks()[0] = targets.keys[0]->blocks()[1] = 0;
    targets.values[0]->slots()[0] = targets.values[0]->slots()[1] = 0;
    EXPECT_EQ(Load(sequence, 5, 45, targets), PQC_OK) << pqc_last_error();
  }
}

TEST_F(ClientLoadTest, ErrorsNameTheFieldAndNothingIsWritten) {
  const auto refused = [&](pqc_status expected, const std::string& part, const auto& change) {
    for (pqc_sequence* const sequence : {local_, remote_}) {
      Targets targets;
      targets.Add(0, PQC_F16, Layout::kPaged, Layout::kSlots, 40, 5);
      targets.Add(1, PQC_F16, Layout::kTransposed, Layout::kContiguous, 40, 5);
      change(targets);
      ExpectFails(Load(sequence, 5, 45, targets), expected, part);
      targets.ExpectUntouched();
    }
  };
  refused(PQC_INVALID_ARGUMENT,
          "layers[1].layer: ", [](Targets& targets) { targets.rows[1].layer = kLayers; });
  refused(PQC_INVALID_ARGUMENT,
          "layers[1].layer: ", [](Targets& targets) { targets.rows[1].layer = 0; });
  refused(PQC_INVALID_ARGUMENT, "layers[1].keys.block_table.block_count: 2",
          [](Targets& targets) { targets.keys[1]->table().block_count = 2; });
  refused(PQC_INVALID_ARGUMENT, "layers[0].keys.block_table.token_count: ", [](Targets& targets) {
    targets.keys[0]->table().token_count = (uint64_t{1} << 30) + 1;
  });
  refused(PQC_INVALID_ARGUMENT, "layers[0].keys.shape[0]: 39", [](Targets& targets) {
    targets.keys[0]->table().token_count = 39;
    targets.values[0]->table().token_count = 39;
  });
  refused(
      PQC_INVALID_ARGUMENT, "layers[1].keys.block_table.blocks[2]: 4 is listed twice",
      [](Targets& targets) { targets.keys[1]->blocks()[0] = targets.keys[1]->blocks()[2] = 4; });
  refused(PQC_INVALID_ARGUMENT, "layers[0].keys.block_table.blocks[1]: 99, must be below",
          [](Targets& targets) { targets.keys[0]->blocks()[1] = 99; });
  refused(PQC_INVALID_ARGUMENT, "layers[0].values.block_table.slots[39]: ", [](Targets& targets) {
    targets.values[0]->slots()[39] = targets.values[0]->slots()[7];
  });
  refused(PQC_INVALID_ARGUMENT, "layers[1].keys.strides[0]: 0", [](Targets& targets) {
    static constexpr int64_t kStrides[] = {0, 1, kBlockTokens * kDim, kBlockTokens};
    targets.rows[1].keys.strides = kStrides;
  });
  refused(PQC_INVALID_ARGUMENT, "layers[1].values.strides[1]: ", [](Targets& targets) {
    static constexpr int64_t kStrides[] = {kTokenFloats, 0, 1};
    targets.rows[1].values.strides = kStrides;
  });
  std::vector<std::byte> pageable(1 << 16, kUntouched);
  refused(PQC_INVALID_ARGUMENT, "layers[1].values.ptr: ", [&](Targets& targets) {
    targets.rows[1].values.ptr = pageable.data();
  });
  refused(PQC_INVALID_ARGUMENT, "layers[0].keys.ptr: ", [&](Targets& targets) {
    targets.rows[0].keys.ptr = pageable.data();
  });
  refused(PQC_INVALID_ARGUMENT, "layers[1].keys.ptr: must be aligned", [](Targets& targets) {
    auto*& ptr = targets.rows[1].keys.ptr;
    ptr = static_cast<std::byte*>(ptr) + 1;
  });
  refused(PQC_INVALID_ARGUMENT, "layers[1].keys.device: ", [](Targets& targets) {
    targets.rows[1].keys.device = PQC_CPU;
  });
  refused(PQC_UNIMPLEMENTED, "layers[0].values.device: ", [](Targets& targets) {
    targets.rows[0].keys.device = PQC_CPU;
  });
  refused(PQC_INVALID_ARGUMENT, "layers[1].values.stream: ", [&](Targets& targets) {
    targets.rows[0].keys.stream = stream_;
    targets.rows[1].values.stream = &targets;
  });
  for (const std::byte byte : pageable) ASSERT_EQ(byte, kUntouched);
}

// Also by a client that has no loader yet.
TEST_F(ClientLoadTest, RowsAreLoadedWhileAnotherStreamCaptures) {
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  for (pqc_sequence* const sequence : {local_, remote_}) {
    Targets captured, loaded;
    captured.Add(0, PQC_F16, Layout::kPaged, Layout::kPaged, 100);
    captured.rows[0].keys.stream = other;
    loaded.Add(0, PQC_F16, Layout::kPaged, Layout::kPaged, 100);
    loaded.rows[0].keys.stream = stream_;
    gpu::Graph graph;
    ASSERT_TRUE(graph.Begin(other).ok());
    const pqc_status refused = Load(sequence, 0, 100, captured);
    ExpectFails(refused, PQC_INVALID_ARGUMENT, "layers[0].keys.stream: the stream captures");
    ExpectOk(Load(sequence, 0, 100, loaded));
    EXPECT_TRUE(graph.End().ok());
    captured.ExpectUntouched();
    ExpectLayer(loaded, 0, 0);
  }
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
}

TEST_F(ClientLoadTest, RowsAreWrittenAfterTheWorkThatTheStreamHasReceived) {
  for (pqc_sequence* const sequence : {local_, remote_}) {
    for (int round = 0; round < 5; ++round) {  // the emulation's streams run in any order
      Targets targets;
      targets.Add(2, PQC_F32, Layout::kContiguous, Layout::kPaged, kPrefill);
      targets.rows[0].keys.stream = stream_;
      const DeviceArray<std::byte>& keys = targets.keys[0]->device();
      for (int i = 0; i < 3; ++i) {
        ASSERT_EQ(cudaMemsetAsync(keys.data(), 0, keys.bytes(), stream_), cudaSuccess);
      }
      ExpectOk(Load(sequence, 0, kPrefill, targets));
      ExpectLayer(targets, 0, 0);
    }
  }
}

TEST_F(ClientLoadTest, LayersAreThereOneAfterTheOther) {
  sidecar_.CloseGate();
  Targets targets;
  for (const uint32_t layer : {2u, 0u, 1u}) {
    targets.Add(layer, PQC_F16, Layout::kTransposed, Layout::kPaged, 100, 3);
  }
  pqc_operation* load = nullptr;
  ExpectOk(
      pqc_load_begin(remote_, {50, 150}, targets.rows.data(), targets.count(), nullptr, &load));
  sidecar_.LetFetchesPass(3);  // two that check the layers, and the first layer
  ExpectOk(pqc_load_wait(load, 1, 60000));
  ExpectLayer(targets, 0, 50);
  ExpectFails(pqc_load_wait(load, 2, PQC_TIMEOUT_POLL), PQC_DEADLINE_EXCEEDED, "timeout_ms");
  targets.keys[1]->ExpectUntouched();
  sidecar_.OpenGate();
  ExpectOk(pqc_load_wait(load, 3, 60000));
  for (size_t i = 0; i < 3; ++i) ExpectLayer(targets, i, 50);
  ExpectOk(pqc_operation_close(load, 60000));
}

TEST_F(ClientLoadTest, ALoadThatIsCancelledLeavesTheOtherLayers) {
  sidecar_.CloseGate();
  Targets targets;
  for (const uint32_t layer : {0u, 1u, 2u}) {
    targets.Add(layer, PQC_F16, Layout::kPaged, Layout::kPaged, 100);
  }
  pqc_operation* load = nullptr;
  ExpectOk(pqc_load_begin(remote_, {0, 100}, targets.rows.data(), targets.count(), nullptr, &load));
  sidecar_.LetFetchesPass(3);
  ExpectOk(pqc_load_wait(load, 1, 60000));
  pqc_operation_cancel(load);
  sidecar_.OpenGate();
  ExpectFails(pqc_operation_wait(load, 60000), PQC_CANCELLED, "layers are not loaded");
  ExpectFails(pqc_load_wait(load, 3, 60000), PQC_CANCELLED, "operation");
  ExpectLayer(targets, 0, 0);
  if (pqc_load_wait(load, 2, 60000) == PQC_OK) {  // it had begun
    ExpectLayer(targets, 1, 0);
  } else {
    targets.keys[1]->ExpectUntouched();
  }
  targets.keys[2]->ExpectUntouched();
  targets.values[2]->ExpectUntouched();
  ExpectOk(pqc_operation_close(load, 60000));
  Targets later;  // the client's loaders are as before
  later.Add(2, PQC_F32, Layout::kTransposed, Layout::kSlots, 77, 9);
  ExpectOk(Load(remote_, 20, 97, later));
  ExpectLayer(later, 0, 20);
}

TEST_F(ClientLoadTest, ThreadsLoadBesideSteps) {
  constexpr int kThreads = 3;
  constexpr int kRounds = 4;
  Targets targets[kThreads];
  for (int i = 0; i < kThreads; ++i) {
    targets[i].Add(0, PQC_F16, Layout::kPaged, Layout::kPaged, kPrefill, static_cast<uint64_t>(i));
    targets[i].Add(1, PQC_F32, Layout::kTransposed, Layout::kContiguous, kPrefill);
  }
  std::atomic<int> failed = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) {
        failed += Load(i == 0 ? remote_ : local_, 0, kPrefill, targets[i]) != PQC_OK;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed.load(), 0);
  for (const Targets& each : targets) {
    for (size_t layer = 0; layer < 2; ++layer) ExpectLayer(each, layer, 0);
  }
}

TEST_F(ClientLoadTest, AClientWithoutTheLibrarySaysSo) {
  OpenRemote(/*has_library=*/false);
  Targets targets;
  targets.Add(0, PQC_F16, Layout::kPaged, Layout::kPaged, 100);
  ExpectFails(Load(remote_, 0, 100, targets), PQC_FAILED_PRECONDITION, "no device support");
  targets.ExpectUntouched();
}

#if defined(PQCACHED_CUDA_EMULATION)
TEST_F(ClientLoadTest, APoolWhosePagesStayIsLockedOnce) {
  for (const bool is_locked : {false, true}) {
    Targets targets;
    targets.Add(0, PQC_F16, Layout::kContiguous, Layout::kContiguous, kPrefill);
    emulation::FailCall("cudaHostAlloc", cudaErrorMemoryAllocation);  // of staging
    if (is_locked) emulation::FailCall("cudaHostRegister", cudaErrorMemoryAllocation);
    ExpectOk(Load(local_, 0, kPrefill, targets));
    emulation::Reset();
    ExpectLayer(targets, 0, 0);
  }
  EXPECT_EQ(sidecar_.hold_count(), 1u);
}

TEST_F(ClientLoadTest, APoolWhosePagesMayGoIsNotLocked) {
  sidecar_.RefuseHolds(PQC_UNAVAILABLE);
  Targets staged, in_place;
  staged.Add(0, PQC_F16, Layout::kContiguous, Layout::kContiguous, kPrefill);
  emulation::FailCall("cudaHostRegister", cudaErrorUnknown);
  ExpectOk(Load(local_, 0, kPrefill, staged));
  EXPECT_EQ(std::string(pqc_last_error()), "");
  emulation::Reset();
  ExpectLayer(staged, 0, 0);
  sidecar_.RefuseHolds(PQC_OK);
  in_place.Add(0, PQC_F16, Layout::kContiguous, Layout::kContiguous, kPrefill);
  ExpectOk(Load(local_, 0, kPrefill, in_place));
  ExpectLayer(in_place, 0, 0);
  EXPECT_EQ(sidecar_.hold_count(), 2u);
}

TEST_F(ClientLoadTest, RowsAreReadInPlaceWhereThePoolIsPageLocked) {
  Targets targets;
  targets.Add(0, PQC_F16, Layout::kContiguous, Layout::kContiguous, kPrefill);
  emulation::FailCall("cudaHostAlloc", cudaErrorMemoryAllocation);  // of staging
  ExpectOk(Load(local_, 0, kPrefill, targets));
  ExpectLayer(targets, 0, 0);
  emulation::FailCall("cudaHostAlloc", cudaErrorMemoryAllocation);
  Targets others;
  others.Add(0, PQC_F16, Layout::kContiguous, Layout::kContiguous, kPrefill);
  ExpectFails(Load(remote_, 0, kPrefill, others), PQC_RESOURCE_EXHAUSTED,
              "layers: allocating 8388608 bytes of page-locked memory");
  others.ExpectUntouched();
  emulation::Reset();
  ExpectOk(Load(remote_, 0, kPrefill, others));
  ExpectLayer(others, 0, 0);
}

TEST_F(ClientLoadTest, RowsThatCannotBePageLockedAreStaged) {
  Targets targets;
  targets.Add(0, PQC_F16, Layout::kContiguous, Layout::kContiguous, kPrefill);
  emulation::FailCall("cudaHostRegister", cudaErrorMemoryAllocation);
  emulation::FailCall("cudaHostAlloc", cudaErrorMemoryAllocation);
  ExpectFails(Load(local_, 0, kPrefill, targets), PQC_RESOURCE_EXHAUSTED, "layers: allocating");
  targets.ExpectUntouched();
  emulation::Reset();
  emulation::FailCall("cudaHostRegister", cudaErrorMemoryAllocation);
  ExpectLoads(local_);
  emulation::Reset();
}

TEST_F(ClientLoadTest, ADeviceThatFailsIsNoSuccess) {
  for (const char* const call : {"cudaLaunchKernelEx", "cudaMemcpyAsync"}) {
    for (pqc_sequence* const sequence : {local_, remote_}) {
      Targets targets;
      targets.Add(0, PQC_F16, Layout::kPaged, Layout::kPaged, kPrefill);
      targets.Add(1, PQC_F16, Layout::kPaged, Layout::kPaged, kPrefill);
      emulation::FailCall(call, cudaErrorUnknown);
      ExpectFails(Load(sequence, 0, kPrefill, targets), PQC_INTERNAL, "layers: ");
      targets.keys[1]->ExpectUntouched();
      emulation::Reset();
      ExpectOk(Load(sequence, 0, kPrefill, targets));
      for (size_t i = 0; i < 2; ++i) ExpectLayer(targets, i, 0);
    }
  }
}
#endif

}  // namespace
}  // namespace pqcached::testing
