// Steps over mapped memory, with a store in this process in place of the sidecar.
#ifndef PQCACHED_TESTS_CLIENT_STEP_STEP_FIXTURE_H_
#define PQCACHED_TESTS_CLIENT_STEP_STEP_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "tests/client/layer.h"
#include "tests/client/local/store_client.h"
#include "tests/rewritten_texts.h"

namespace pqcached::testing {

inline constexpr uint64_t kSink = 4, kWindow = 16;
inline constexpr size_t kOutput = Layer::kQueryHeads * Layer::kValueDim;

// A call failed with this code about this field ("" = none), and its message has `part`.
inline void Expect(const Status& status, pqc_status code, const char* field,
                   const char* part = "") {
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_EQ(status.field(), field) << status.ToString();
  EXPECT_TRUE(HasText(status.message(), part)) << status.ToString();
}

class StepTest : public ::testing::Test {
 protected:
  StepTest() : StepTest(2000) {}
  explicit StepTest(uint32_t timeout_ms,
                    const client::Workers::Options& workers = {.thread_count = 2},
                    const kvstore::StoreOptions& options = SmallSegments())
      : sidecar_(options),
        handle_(OpenStoreHandle(sidecar_, workers, timeout_ms)),
        client_(Client::Adopt(handle_)) {}

  Sequence Fill(const Layer& layer, uint64_t tokens) {
    return FillIndexed(cache_, layer, tokens, kLayers, kSink);
  }

  // Rows of query tokens [begin, end) of a layer, for all layers.
  static std::vector<LayerRows> Rows(const Layer& layer, uint64_t begin, uint64_t end) {
    return RowsOf(layer, begin, end, kLayers);
  }

  Status Decode(Sequence& sequence, const Layer& layer, uint64_t position, uint32_t length = 1,
                std::vector<uint32_t> accepted = {}, const Layer* rows = nullptr) {
    const StepItem items[] = {{&sequence, position, length}};
    auto step = client_.BeginStep(items, &selection_);
    if (!step.ok()) return step.status();
    std::vector<float> queries;
    for (uint32_t i = 0; i < length; ++i) {
      const auto* numbers = static_cast<const float*>(layer.queries().c().ptr);
      queries.insert(queries.end(), numbers, numbers + Layer::kQueryHeads * Layer::kKeyDim);
    }
    output_.resize(length * kOutput);
    lse_.resize(length * Layer::kQueryHeads);
    for (uint32_t number = 0; number < kLayers; ++number) {
      const Status attended = step->Attend(
          number, {queries, {length, Layer::kQueryHeads, Layer::kKeyDim}}, output_, lse_);
      if (!attended.ok()) return attended;
    }
    return step->End(Rows(rows ? *rows : layer, position, position + length), accepted);
  }

  // A step of `length` tokens that attends to nothing.
  Status EndOnly(Sequence& sequence, const Layer& layer, uint64_t position, uint32_t length) {
    const StepItem items[] = {{&sequence, position, length}};
    auto step = client_.BeginStep(items, nullptr);
    return step.ok() ? step->End(Rows(layer, position, position + length), {}) : step.status();
  }

  // That the rows of the sequence are `layer`'s.
  void ExpectRows(Sequence& sequence, const Layer& layer, uint64_t begin, uint64_t end) {
    std::vector<float> keys(Layer::kKvHeads * (end - begin) * Layer::kKeyDim);
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.FetchBlocks(number, {begin, end}, PQC_KEY,
                                    std::as_writable_bytes(std::span(keys))));
      for (uint64_t token = begin; token < end; ++token) {
        ASSERT_EQ(std::memcmp(&keys[(token - begin) * Layer::kKeyDim], layer.key(token, 0),
                              Layer::kKeyDim * sizeof(float)),
                  0)
            << "token " << token << " of layer " << number;
      }
    }
  }

  static constexpr uint32_t kLayers = 2;
  Sidecar sidecar_;
  pqc_client* const handle_;  // the client's
  Client client_;
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0, 1})));
  const Selection selection_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0};
  std::vector<float> output_, lse_;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_STEP_STEP_FIXTURE_H_
