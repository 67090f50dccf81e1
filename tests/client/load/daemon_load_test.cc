// Loads: rows that are copied back into an engine's memory, against a real pqcached on both paths.
#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <fstream>
#include <numeric>
#include <thread>
#include <vector>

#include "pqcached/client.hpp"
#include "pqcached/operation.hpp"
#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::SpecOf;

constexpr uint64_t kTokens = 1300;
constexpr uint32_t kHeads = Layer::kKvHeads;
constexpr std::byte kUntouched{0xa5};

float Bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
// Rounds to the nearest bf16, ties to even.
float RoundToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return Bf16(static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16));
}

// The K or V memory of an engine for some tokens, and where each element is.
class Memory {
 public:
  // Strides, in elements, of the tokens, heads and dims.
  using Strides = std::array<int64_t, 3>;

  Memory(pqc_dtype dtype, uint64_t tokens, uint32_t dim, Strides strides)
      : dtype_(dtype), tokens_(tokens), dim_(dim), strides_(strides) {
    Allocate(tokens * kHeads * dim);
  }
  // [tokens, heads, dim]
  static Memory Plain(pqc_dtype dtype, uint64_t tokens, uint32_t dim) {
    return {dtype, tokens, dim, {int64_t{kHeads} * dim, dim, 1}};
  }
  // Blocks of 16 tokens in descending order; `transposed`: [blocks, heads, dim, 16]. The first
  // token is `first_token` of the table.
  static Memory Paged(pqc_dtype dtype, uint64_t tokens, uint32_t dim, bool transposed,
                      uint64_t first_token = 0, bool slots = false) {
    const int64_t dims = dim;
    Memory memory(dtype, tokens, dim,
                  transposed ? Strides{1, kBlock * dims, kBlock} : Strides{kHeads * dims, dims, 1});
    const uint64_t blocks = (first_token + tokens + kBlock - 1) / kBlock;
    memory.Allocate(blocks * kBlock * kHeads * dim);
    memory.first_token_ = first_token;
    memory.blocks_.resize(blocks);
    std::iota(memory.blocks_.rbegin(), memory.blocks_.rend(), 0);
    for (uint64_t i = 0; slots && i < tokens; ++i) {
      const uint64_t token = first_token + i;
      memory.slots_.push_back(int64_t{memory.blocks_[token / kBlock]} * kBlock +
                              static_cast<int64_t>(token % kBlock));
    }
    return memory;
  }

  Tensor tensor() const {
    if (blocks_.empty()) {
      return {
          bytes_.data(), dtype_, {tokens_, kHeads, dim_}, {strides_[0], strides_[1], strides_[2]}};
    }
    const Tensor all(bytes_.data(), dtype_, {blocks_.size(), kBlock, kHeads, dim_},
                     {int64_t{kBlock} * kHeads * dim_, strides_[0], strides_[1], strides_[2]});
    if (!slots_.empty()) return Tensor::PagedSlots(all, slots_);
    return Tensor::Paged(all, blocks_, tokens_, first_token_);
  }

  float Get(uint64_t token, uint32_t head, uint32_t index) const {
    int64_t place = head * strides_[1] + index * strides_[2];
    if (blocks_.empty()) {
      place += static_cast<int64_t>(token) * strides_[0];
    } else {
      token += first_token_;
      place += int64_t{blocks_[token / kBlock]} * kBlock * kHeads * dim_ +
               static_cast<int64_t>(token % kBlock) * strides_[0];
    }
    const std::byte* const from = bytes_.data() + static_cast<size_t>(place) * ElementBytes();
    if (dtype_ == PQC_BF16) {
      uint16_t bits;
      std::memcpy(&bits, from, sizeof(bits));
      return Bf16(bits);
    }
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  size_t CountUntouched() const {
    return static_cast<size_t>(std::count(bytes_.begin(), bytes_.end(), kUntouched));
  }
  size_t size_bytes() const { return bytes_.size(); }

 private:
  static constexpr uint32_t kBlock = 16;

  size_t ElementBytes() const { return dtype_ == PQC_BF16 ? 2 : 4; }
  void Allocate(uint64_t elements) { bytes_.assign(elements * ElementBytes(), kUntouched); }

  pqc_dtype dtype_;
  uint64_t tokens_;
  uint32_t dim_;
  Strides strides_;
  std::vector<uint32_t> blocks_;
  std::vector<int64_t> slots_;
  uint64_t first_token_ = 0;
  std::vector<std::byte> bytes_;
};

void ExpectRows(const Layer& layer, uint64_t begin, uint64_t end, const Memory& keys,
                const Memory& values, bool rounded) {
  const auto stored = [&](float value) { return rounded ? RoundToBf16(value) : value; };
  for (uint64_t token = begin; token < end; ++token) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t i = 0; i < Layer::kKeyDim; ++i) {
        ASSERT_EQ(keys.Get(token - begin, head, i), stored(layer.key(token, head)[i]))
            << "key of token " << token << ", head " << head << ", element " << i;
      }
      for (uint32_t i = 0; i < Layer::kValueDim; ++i) {
        ASSERT_EQ(values.Get(token - begin, head, i), stored(layer.value(token, head)[i]))
            << "value of token " << token << ", head " << head << ", element " << i;
      }
    }
  }
}

class DaemonLoadTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  Sequence Fill(Cache& cache, uint64_t first_layer_tokens = kTokens) {
    Sequence sequence = Must(cache.CreateSequence());
    for (uint32_t number = 0; number < 2; ++number) {
      const uint64_t tokens = number == 0 ? first_layer_tokens : kTokens;
      MustBeOk(sequence.Ingest(number, 0, layers_[number].keys(0, tokens),
                               layers_[number].values(0, tokens)));
    }
    return sequence;
  }
  // Loads the tokens [begin, end) of both layers to memory that `make(dim)` makes.
  template <class Make>
  void LoadAndExpect(Sequence& sequence, uint64_t begin, uint64_t end, bool rounded,
                     const Make& make) {
    std::vector<Memory> keys, values;
    std::vector<LayerRows> rows;
    for (uint32_t number = 0; number < 2; ++number) {
      keys.push_back(make(Layer::kKeyDim));
      values.push_back(make(Layer::kValueDim));
    }
    for (const uint32_t number : {1u, 0u}) {  // in any order
      rows.push_back({number, keys[number].tensor(), values[number].tensor()});
    }
    Status status;
    do {  // a call that meets the end of a worker is UNAVAILABLE, and may be repeated
      status = sequence.Load({begin, end}, rows);
    } while (status.code() == PQC_UNAVAILABLE && status.retry_ms() > 0);
    MustBeOk(status);
    for (uint32_t number = 0; number < 2; ++number) {
      ASSERT_NO_FATAL_FAILURE(
          ExpectRows(layers_[number], begin, end, keys[number], values[number], rounded));
    }
  }
  static void Expect(const Status& status, pqc_status code, const char* field) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(status.field(), field) << status.ToString();
  }
  bool local() const { return GetParam() == PQC_PATH_ONLY_LOCAL; }

  const Layer layers_[2] = {Layer{kTokens, 1}, Layer{kTokens, 2}};
  // Rows in several segments, and in an open one.
  Daemon daemon_{{"--segment-tokens", "512", "--tail-tokens", "512"}};
  Client client_ = daemon_.OpenClient("default", GetParam());
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0, 1})));
};

TEST_P(DaemonLoadTest, RowsReachEveryLayoutThatIngestReads) {
  for (const pqc_dtype stored : {PQC_F32, PQC_BF16}) {
    Cache cache =
        Must(client_.OpenCache(SpecOf(stored == PQC_F32 ? "fp32" : "bf16", {0, 1}, stored)));
    Sequence sequence = Fill(cache);
    for (const pqc_dtype to : {PQC_F32, PQC_BF16}) {
      const bool rounded = stored == PQC_BF16 || to == PQC_BF16;
      for (const auto& range : {std::pair{0u, 1300u}, {0u, 1u}, {511u, 513u}, {37u, 1299u}}) {
        const uint64_t begin = range.first, end = range.second;  // not structured: clang 14
        SCOPED_TRACE(::testing::Message() << stored << " to " << to << ", tokens " << begin);
        const uint64_t count = end - begin;
        const auto expect = [&](const auto& make) {
          LoadAndExpect(sequence, begin, end, rounded, make);
        };
        const auto tokens = static_cast<int64_t>(count);
        expect([&](uint32_t dim) { return Memory::Plain(to, count, dim); });
        expect([&](uint32_t dim) {  // [heads, tokens, dim]
          return Memory(to, count, dim, {dim, tokens * dim, 1});
        });
        expect([&](uint32_t dim) {  // [heads, dim, tokens]
          return Memory(to, count, dim, {1, tokens * dim, tokens});
        });
        expect([&](uint32_t dim) {  // keys in blocks, values without
          return dim == Layer::kKeyDim ? Memory::Paged(to, count, dim, false)
                                       : Memory::Plain(to, count, dim);
        });
        expect([&](uint32_t dim) { return Memory::Paged(to, count, dim, true, 5); });
        expect([&](uint32_t dim) { return Memory::Paged(to, count, dim, false, 21, true); });
      }
    }
  }
}

TEST_P(DaemonLoadTest, NothingIsWrittenWhenRowsAreMissing) {
  Sequence sequence = Fill(cache_, 700);
  const auto load = [&](uint64_t begin, uint64_t end, std::vector<uint32_t> numbers) {
    std::vector<Memory> memories;
    memories.reserve(2 * numbers.size());
    std::vector<LayerRows> rows;
    for (const uint32_t number : numbers) {
      memories.push_back(Memory::Plain(PQC_F32, end - begin, Layer::kKeyDim));
      memories.push_back(Memory::Plain(PQC_F32, end - begin, Layer::kValueDim));
      rows.push_back({number, memories[memories.size() - 2].tensor(), memories.back().tensor()});
    }
    const Status status = sequence.Load({begin, end}, rows);
    if (status.ok()) return status;
    for (const Memory& memory : memories) {
      EXPECT_EQ(memory.CountUntouched(), memory.size_bytes());
    }
    return status;
  };
  MustBeOk(load(0, 700, {0, 1}));
  MustBeOk(load(700, 1300, {1}));
  Expect(load(0, 701, {1, 0}), PQC_OUT_OF_RANGE, "tokens");
  Expect(load(1299, 1301, {1}), PQC_OUT_OF_RANGE, "tokens");
  MustBeOk(sequence.Truncate(600));
  Expect(load(0, 601, {0, 1}), PQC_OUT_OF_RANGE, "tokens");
  MustBeOk(load(0, 600, {0, 1}));
}

TEST_P(DaemonLoadTest, ErrorsNameTheField) {
  Sequence sequence = Fill(cache_);
  const Memory keys = Memory::Plain(PQC_F32, 10, Layer::kKeyDim);
  const Memory values = Memory::Plain(PQC_F32, 10, Layer::kValueDim);
  const auto load = [&](pqc_token_range tokens, std::vector<LayerRows> rows) {
    return sequence.Load(tokens, rows);
  };
  const LayerRows good{0, keys.tensor(), values.tensor()};
  Expect(load({5, 5}, {good}), PQC_INVALID_ARGUMENT, "tokens");
  Expect(load({0, (1 << 30) + 1}, {good}), PQC_INVALID_ARGUMENT, "tokens");
  Expect(load({0, 10}, {}), PQC_INVALID_ARGUMENT, "layers");
  Expect(load({0, 10}, {good, good}), PQC_INVALID_ARGUMENT, "layers[1].layer");
  Expect(load({0, 10}, {{2, keys.tensor(), values.tensor()}}), PQC_INVALID_ARGUMENT,
         "layers[0].layer");
  Expect(load({0, 9}, {good}), PQC_INVALID_ARGUMENT, "layers[0].keys.shape[0]");
  Expect(load({0, 10}, {{0, values.tensor(), values.tensor()}}), PQC_INVALID_ARGUMENT,
         "layers[0].keys.shape[2]");
  const Tensor repeated(keys.tensor().c().ptr, PQC_F32, {10, kHeads, Layer::kKeyDim},
                        {0, Layer::kKeyDim, 1});
  Expect(load({0, 10}, {{0, repeated, values.tensor()}}), PQC_INVALID_ARGUMENT,
         "layers[0].keys.strides[0]");
  Expect(load({0, 10}, {{0, keys.tensor().OnGpu(), values.tensor()}}), PQC_INVALID_ARGUMENT,
         "layers[0].values.device");
  Expect(load({0, 10}, {{0, keys.tensor(), values.tensor().OnGpu()}}), PQC_UNIMPLEMENTED,
         "layers[0].values.device");
  Expect(sequence.Prefetch({7, 7}), PQC_INVALID_ARGUMENT, "tokens");
  EXPECT_EQ(keys.CountUntouched(), keys.size_bytes());
}

TEST_P(DaemonLoadTest, LayersAreThereOneAfterTheOther) {
  Sequence sequence = Fill(cache_);
  MustBeOk(sequence.Prefetch({0, kTokens}));
  std::vector<Memory> keys, values;
  std::vector<LayerRows> rows;
  for (uint32_t number = 0; number < 2; ++number) {
    keys.push_back(Memory::Paged(PQC_F32, kTokens, Layer::kKeyDim, false));
    values.push_back(Memory::Paged(PQC_F32, kTokens, Layer::kValueDim, false));
    rows.push_back({number, keys[number].tensor(), values[number].tensor()});
  }
  Operation load = Must(Operation::Load(sequence, {0, kTokens}, rows));
  for (uint32_t number = 0; number < 2; ++number) {
    MustBeOk(load.WaitLayers(number + 1));
    ASSERT_NO_FATAL_FAILURE(
        ExpectRows(layers_[number], 0, kTokens, keys[number], values[number], false));
  }
  Expect(load.WaitLayers(3), PQC_INVALID_ARGUMENT, "layer_count");
  MustBeOk(load.Wait());
  MustBeOk(load.WaitLayers(2, PQC_TIMEOUT_POLL));
  Operation flush = Must(Operation::Flush(sequence));
  Expect(flush.WaitLayers(1), PQC_INVALID_ARGUMENT, "operation");
}

TEST_P(DaemonLoadTest, ALoadMayBeCancelledAndItsSequenceDropped) {
  for (int round = 0; round < 10; ++round) {
    Sequence sequence = Fill(cache_);
    const Memory keys = Memory::Plain(PQC_F32, kTokens, Layer::kKeyDim);
    const Memory values = Memory::Plain(PQC_F32, kTokens, Layer::kValueDim);
    const Memory other_keys = keys, other_values = values;
    const LayerRows rows[] = {{0, keys.tensor(), values.tensor()},
                              {1, other_keys.tensor(), other_values.tensor()}};
    Operation load = Must(Operation::Load(sequence, {0, kTokens}, rows));
    if (round % 2 == 0) {
      load.Cancel();
    } else {
      static_cast<void>(sequence.Drop());
    }
    const Status status = load.Wait();
    const Status first = load.WaitLayers(1);
    EXPECT_TRUE(status.ok() || status.code() == PQC_CANCELLED || status.code() == PQC_NOT_FOUND ||
                status.code() == PQC_ABORTED)
        << status.ToString();
    if (first.ok()) {
      ExpectRows(layers_[0], 0, kTokens, keys, values, false);
    } else {
      EXPECT_EQ(first.code(), status.code());
    }
  }
}

TEST_P(DaemonLoadTest, ALoadThatIsCancelledTooLateSucceeds) {
  Sequence sequence = Fill(cache_);
  const Memory keys = Memory::Plain(PQC_F32, kTokens, Layer::kKeyDim);
  const Memory values = Memory::Plain(PQC_F32, kTokens, Layer::kValueDim);
  const LayerRows rows[] = {{0, keys.tensor(), values.tensor()}};
  for (int round = 0; round < 50; ++round) {
    Operation load = Must(Operation::Load(sequence, {0, kTokens}, rows));
    std::this_thread::sleep_for(std::chrono::microseconds(10 * round));
    load.Cancel();
    const Status status = load.Wait();
    EXPECT_EQ(load.WaitLayers(1).ok(), status.ok()) << status.ToString();
  }
}

TEST_P(DaemonLoadTest, RowsAreLoadedFromTheNextWorker) {
  Sequence sequence = Fill(cache_);
  const auto make = [](uint32_t dim) { return Memory::Plain(PQC_F32, kTokens, dim); };
  LoadAndExpect(sequence, 0, kTokens, false, make);
  const std::string pid = std::to_string(daemon_.process().pid());
  std::ifstream children("/proc/" + pid + "/task/" + pid + "/children");
  pid_t worker = 0;
  ASSERT_TRUE(children >> worker);
  ASSERT_EQ(kill(worker, SIGKILL), 0);
  while (kill(worker, 0) == 0) poll(nullptr, 0, 1);
  LoadAndExpect(sequence, 0, kTokens, false, make);
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonLoadTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
