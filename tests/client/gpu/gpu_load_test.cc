// Loads to the device by the C++ wrapper.
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "pqcached/operation.hpp"
#include "tests/client/gpu/gpu_wrapper_fixture.h"

namespace pqcached::testing {
namespace {

// K and V of a layer on the device, [tokens, heads, dim].
struct LoadedLayer {
  explicit LoadedLayer(uint64_t tokens)
      : count(tokens),
        keys(tokens * Layer::kKvHeads * Layer::kKeyDim),
        values(tokens * Layer::kKvHeads * Layer::kValueDim) {}

  LayerRows Rows(uint32_t layer, cudaStream_t stream) const {
    return {layer, Tensor(SpanOf(keys), {count, Layer::kKvHeads, Layer::kKeyDim}).OnGpu(stream),
            Tensor(SpanOf(values), {count, Layer::kKvHeads, Layer::kValueDim}).OnGpu(stream)};
  }
  void Expect(const Layer& layer, uint64_t begin) const {
    const std::vector<float> k = keys.Get(), v = values.Get();
    for (uint64_t t = 0; t < count; ++t) {
      for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
        const size_t row = t * Layer::kKvHeads + head;
        const float* const key = layer.key(begin + t, head);
        ASSERT_TRUE(std::equal(key, key + Layer::kKeyDim, &k[row * Layer::kKeyDim]))
            << "key of token " << t;
        const float* const value = layer.value(begin + t, head);
        ASSERT_TRUE(std::equal(value, value + Layer::kValueDim, &v[row * Layer::kValueDim]))
            << "value of token " << t;
      }
    }
  }

  uint64_t count;
  DeviceArray<float> keys, values;
};

// Rows of several segments of the store.
TEST_F(GpuWrapperTest, StoredRowsAreLoadedToTheDevice) {
  const Layer layer(1000, 3);
  Sequence sequence = Fill(layer, 1000);
  const LoadedLayer first(900), second(900);
  const LayerRows rows[] = {first.Rows(1, stream_), second.Rows(0, stream_)};
  EXPECT_EQ(rows[0].keys.c().stream, stream_);
  MustBeOk(sequence.Load({50, 950}, rows));
  first.Expect(layer, 50);
  second.Expect(layer, 50);

  const LoadedLayer third(1000), fourth(1000);
  const LayerRows others[] = {third.Rows(0, nullptr), fourth.Rows(1, nullptr)};
  Operation load = Must(Operation::Load(sequence, {0, 1000}, others));
  MustBeOk(load.WaitLayers(1, 60000));
  third.Expect(layer, 0);
  MustBeOk(load.WaitLayers(2, 60000));
  fourth.Expect(layer, 0);
  MustBeOk(load.Close(60000));
  Expect(sequence.Load({101, 1001}, rows), PQC_OUT_OF_RANGE, "tokens");
}

// Also a client that loads no more: the sidecar waits for the end of the former connection before
// it uses the memory again.
TEST_F(GpuWrapperTest, LoadersReleaseTheMemoryOfAWorkerThatHasEnded) {
  const Layer layer(1000, 3);
  Sequence sequence = Fill(layer, 1000);
  const LoadedLayer first(900), second(900);
  const LayerRows rows[] = {first.Rows(1, stream_)}, others[] = {second.Rows(0, stream_)};
  {  // two loads at once have two loaders
    Operation one = Must(Operation::Load(sequence, {50, 950}, rows));
    Operation two = Must(Operation::Load(sequence, {50, 950}, others));
    MustBeOk(one.Close(60000));
    MustBeOk(two.Close(60000));
  }
  sidecar_.EndWorker();
  sidecar_.StartWorker();
  MustBeOk(sequence.Load({50, 950}, rows));
  first.Expect(layer, 50);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (sidecar_.connections != 1 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(sidecar_.connections, 1);
}

}  // namespace
}  // namespace pqcached::testing
