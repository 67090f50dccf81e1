// Rows of a prefill that no call waits for.
#include <limits>
#include <span>
#include <vector>

#include "tests/client/step/step_fixture.h"

namespace pqcached::testing {
namespace {

class EnqueueTest : public StepTest {
 protected:
  Status Enqueue(const Layer& layer, uint64_t begin, uint64_t end) {
    return sequence_.EnqueueRows(begin, Rows(layer, begin, end));
  }
  uint64_t Stored() { return Must(sequence_.Describe()).token_count; }

  Sequence sequence_ = Must(cache_.CreateSequence());
};

TEST_F(EnqueueTest, RowsAreStoredInTheBackgroundAndInOrder) {
  const Layer layer(500, 1);
  const uint64_t before = Must(client_.Count()).rpcs;
  sidecar_.CloseGate();
  for (uint64_t begin = 0; begin < 400; begin += 50) MustBeOk(Enqueue(layer, begin, begin + 50));
  const pqc_progress progress = Must(sequence_.Progress());
  EXPECT_EQ(progress.passed_tokens, 400u);
  EXPECT_EQ(progress.stored_tokens, 0u);
  EXPECT_EQ(Must(client_.Count()).rpcs, before);
  sidecar_.OpenGate();
  MustBeOk(sequence_.Flush());
  EXPECT_EQ(Stored(), 400u);
  MustBeOk(sequence_.BuildIndex({.iterations = 1, .sink_tokens = kSink}));
  // Behind the prefill: decoded tokens, and the next turn.
  for (uint64_t position = 400; position < 410; ++position) {
    MustBeOk(Decode(sequence_, layer, position));
  }
  MustBeOk(Enqueue(layer, 410, 450));
  for (uint64_t position = 450; position < 460; ++position) {
    MustBeOk(Decode(sequence_, layer, position));
  }
  MustBeOk(sequence_.Flush());
  EXPECT_EQ(Stored(), 460u);
  ExpectRows(sequence_, layer, 0, 460);
}

TEST_F(EnqueueTest, TheCallersRowsMayChangeAfterTheCall) {
  const Layer layer(100, 2);
  std::vector<float> keys(100 * Layer::kKvHeads * Layer::kKeyDim);
  std::vector<LayerRows> rows = Rows(layer, 0, 100);
  const auto* first = static_cast<const float*>(rows[0].keys.c().ptr);
  std::copy_n(first, keys.size(), keys.begin());
  rows[0].keys = Tensor(keys, {100, Layer::kKvHeads, Layer::kKeyDim});
  sidecar_.CloseGate();
  MustBeOk(sequence_.EnqueueRows(0, rows));
  std::fill(keys.begin(), keys.end(), std::numeric_limits<float>::quiet_NaN());
  sidecar_.OpenGate();
  MustBeOk(sequence_.Flush());
  ExpectRows(sequence_, layer, 0, 100);
}

TEST_F(EnqueueTest, LongPromptsAreSentInParts) {
  // Four MiB, of which a message carries one: the size of a staging slot, without its alignment.
  const Layer layer((uint64_t{4} << 20) / (kLayers * Layer::kKvHeads *
                                           (Layer::kKeyDim + Layer::kValueDim) * sizeof(float)),
                    3);
  sidecar_.commits = 0;
  MustBeOk(Enqueue(layer, 0, 10));  // opens the staging ring
  MustBeOk(sequence_.Flush());
  MustBeOk(Enqueue(layer, 10, layer.tokens()));
  MustBeOk(sequence_.Flush());
  EXPECT_GT(sidecar_.commits, 0u);
  EXPECT_LE(sidecar_.commits, 5u);
  EXPECT_EQ(Stored(), layer.tokens());
  ExpectRows(sequence_, layer, 0, layer.tokens());
}

TEST_F(EnqueueTest, ARefusalIsReturnedLaterAndNamesTheRows) {
  const Layer layer(300, 4);
  MustBeOk(Enqueue(layer, 0, 100));
  std::vector<float> bad(100 * Layer::kKvHeads * Layer::kKeyDim, 1);
  bad[40 * Layer::kKvHeads * Layer::kKeyDim] = std::numeric_limits<float>::infinity();
  std::vector<LayerRows> rows = Rows(layer, 100, 200);
  rows[1].keys = Tensor(bad, {100, Layer::kKvHeads, Layer::kKeyDim});
  MustBeOk(sequence_.EnqueueRows(100, rows));
  const Status status = sequence_.Flush();
  EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT) << status.ToString();
  EXPECT_TRUE(HasText(status.message(), "token 140")) << status.ToString();
  EXPECT_EQ(Stored(), 100u);
  MustBeOk(Enqueue(layer, 100, 200));
  MustBeOk(sequence_.Flush());
  ExpectRows(sequence_, layer, 0, 200);
  MustBeOk(Enqueue(layer, 250, 300));  // a gap behind the stored rows
  Expect(sequence_.Flush(), PQC_INVALID_ARGUMENT, "first_position", "a gap");
  sidecar_.CloseGate();
  MustBeOk(Enqueue(layer, 200, 250));
  Expect(Enqueue(layer, 260, 300), PQC_INVALID_ARGUMENT, "first_position", "260, a gap");
  sidecar_.OpenGate();
  MustBeOk(Enqueue(layer, 250, 300));
  MustBeOk(sequence_.Flush());
  ExpectRows(sequence_, layer, 0, 300);
}

TEST_F(EnqueueTest, RowsSurviveTheEndOfAWorker) {
  const Layer layer(300, 5);
  MustBeOk(Enqueue(layer, 0, 100));
  MustBeOk(sequence_.Flush());
  for (uint64_t begin = 100; begin < 300; begin += 50) {
    sidecar_.CloseGate();
    MustBeOk(Enqueue(layer, begin, begin + 50));
    sidecar_.EndWorker();
    sidecar_.OpenGate();
    sidecar_.StartWorker();
    MustBeOk(sequence_.Flush());
    EXPECT_EQ(Stored(), begin + 50);
  }
  ExpectRows(sequence_, layer, 0, 300);
}

TEST_F(EnqueueTest, RowsWithNamesAreShared) {
  const Layer layer(300, 6);
  std::vector<uint32_t> ids(300);
  for (uint32_t i = 0; i < 300; ++i) ids[i] = 7 * i;
  MustBeOk(sequence_.EnqueueRows(0, Rows(layer, 0, 200), {.token_ids = std::span(ids).first(200)}));
  MustBeOk(sequence_.EnqueueRows(200, Rows(layer, 200, 300),
                                 {.begin = 200, .token_ids = std::span(ids).subspan(200)}));
  MustBeOk(sequence_.Flush());
  EXPECT_EQ(Must(cache_.MatchPrefix({.token_ids = ids})), 256u);
}

TEST_F(EnqueueTest, BadArguments) {
  const Layer layer(300, 7);
  std::vector<LayerRows> rows = Rows(layer, 0, 100);
  rows.pop_back();
  Expect(sequence_.EnqueueRows(0, rows), PQC_INVALID_ARGUMENT, "layer_count");
  rows = Rows(layer, 0, 100);
  rows[1].layer = 0;
  Expect(sequence_.EnqueueRows(0, rows), PQC_INVALID_ARGUMENT, "layers[1].layer", "twice");
  rows = Rows(layer, 0, 100);
  rows[1].keys = layer.keys(0, 50);
  rows[1].values = layer.values(0, 50);
  Expect(sequence_.EnqueueRows(0, rows), PQC_INVALID_ARGUMENT, "layers[1].keys.shape[0]", "50");
  MustBeOk(Enqueue(layer, 0, 100));
  const StepItem items[] = {{&sequence_, 100}};
  const Step step = Must(client_.BeginStep(items));
  Expect(Enqueue(layer, 100, 110), PQC_ABORTED, "sequence", "step");
}

}  // namespace
}  // namespace pqcached::testing
