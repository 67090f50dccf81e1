// What happens to a sequence while the client reads it: another holder shortens and continues it,
// suspends or drops it, or the worker ends, in the middle of a selection or of an attention. The
// engine's parallel_for hook, which the client calls for each of these phases, is the place.
#include <algorithm>
#include <functional>
#include <vector>

#include "tests/client/step/step_fixture.h"

namespace pqcached::testing {
namespace {

constexpr uint64_t kTokens = 1200;  // enough for the client to use the hook
constexpr uint64_t kKept = 1100;    // where the other holder cuts

struct PhaseHook {
  int phase = 0;                 // of the call in progress, from 0
  int disturbed = -1;            // phase before which the script runs
  std::function<void()> script;  // what happens meanwhile

  static void Run(void* context, uint32_t count, void (*body)(void*, uint32_t), void* argument) {
    auto* hook = static_cast<PhaseHook*>(context);
    if (hook->phase++ == hook->disturbed) hook->script();
    for (uint32_t i = 0; i < count; ++i) body(argument, i);
  }
};

struct WithHook {
  PhaseHook hook_;
};

class RevocationTest : private WithHook, public StepTest {
 protected:
  static constexpr int kPhases = 2;  // selection, attention

  RevocationTest()
      : StepTest(2000, {.hook = &PhaseHook::Run, .hook_context = &hook_, .thread_count = 2}) {}

  // Runs `script` within the next call, before this phase.
  void Disturb(int phase, std::function<void()> script) {
    hook_ = {.phase = 0, .disturbed = phase, .script = std::move(script)};
  }
  // Checks that the script has run in a call of that many phases.
  void ExpectPhases(int phases) { EXPECT_EQ(hook_.phase, phases); }

  // Another holder of the sequence shortens it and continues it with other rows.
  void ReplaceEnd(const Sequence& sequence, const Layer& other) {
    MustBeDone(sidecar_.store->TruncateSequence(kTestTenant, sequence.id(), kKept).status());
    const auto view = [](const Tensor& tensor) {
      const pqc_tensor from = tensor.c();
      kvstore::TensorView to;
      to.data = static_cast<const std::byte*>(from.ptr);
      to.dtype = kernels::DType::kF32;
      to.shape.assign(from.shape, from.shape + from.ndim);
      to.data_bytes = sizeof(float) * to.shape[0] * to.shape[1] * to.shape[2];
      return to;
    };
    std::vector<kvstore::LayerRows> rows;
    for (uint32_t number = 0; number < kLayers; ++number) {
      rows.push_back({.layer = number,
                      .keys = view(other.keys(kKept, kTokens)),
                      .values = view(other.values(kKept, kTokens))});
    }
    MustBeDone(sidecar_.store->Append(kTestTenant, sequence.id(), kKept, rows).status());
  }
  static void MustBeDone(const absl::Status& status) {
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  }

  static Query QueryAtEnd(const Layer& layer) {
    return {.layer = 1, .query_position = kTokens - 1, .queries = layer.queries()};
  }

  // The failure of a step's layer that is disturbed before each of its phases.
  void ExpectStepsFail(
      pqc_status code, const char* field, const char* part,
      const std::function<void(Sequence&)>& script,
      const std::function<void()>& afterwards = [] {}) {
    std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
    for (int phase = 0; phase < kPhases; ++phase) {
      SCOPED_TRACE(phase);
      Sequence sequence = Fill(layer_, kTokens);
      const StepItem items[] = {{&sequence, kTokens}};
      Step step = Must(client_.BeginStep(items, &most_));
      Disturb(-1, {});
      MustBeOk(step.Attend(0, layer_.queries(), output, lse));
      ExpectPhases(kPhases);
      Disturb(phase, [&] { script(sequence); });
      Expect(step.Attend(1, layer_.queries(), output, lse), code, field, part);
      ExpectPhases(kPhases);
      afterwards();
    }
  }

  // Fewer than all candidates, which would need no selection.
  const Selection most_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.9};
  const Layer layer_{kTokens, 21};
  const Layer other_{kTokens, 22};
};

TEST_F(RevocationTest, ALayerThatAnotherHolderShortensMeanwhileFails) {
  ExpectStepsFail(PQC_ABORTED, "items[0].sequence", "revoked",
                  [this](Sequence& sequence) { ReplaceEnd(sequence, other_); });
}

TEST_F(RevocationTest, ALayerOfASequenceThatIsDroppedMeanwhileFails) {
  ExpectStepsFail(PQC_ABORTED, "items[0].sequence", "revoked", [this](Sequence& sequence) {
    MustBeDone(sidecar_.store->DropSequence(kTestTenant, sequence.id()));
  });
}

TEST_F(RevocationTest, ALayerOfASequenceThatIsSuspendedMeanwhileFails) {
  ExpectStepsFail(
      PQC_FAILED_PRECONDITION, "items[0].sequence", "suspended", [this](Sequence& sequence) {
        MustBeDone(sidecar_.store->SuspendSequence(kTestTenant, sequence.id()).status());
      });
}

TEST_F(RevocationTest, ALayerWhoseWorkerEndsMeanwhileFails) {
  ExpectStepsFail(
      PQC_UNAVAILABLE, "", "worker", [this](Sequence&) { sidecar_.EndWorker(); },
      [this] { sidecar_.StartWorker(); });
}

TEST_F(RevocationTest, AStepsSelectionThatAnotherHolderShortensMeanwhileFails) {
  Sequence sequence = Fill(layer_, kTokens);
  const StepItem items[] = {{&sequence, kTokens}};
  Step step = Must(client_.BeginStep(items, &most_));
  Disturb(0, [&] { ReplaceEnd(sequence, other_); });
  Expect(step.TopK(1, layer_.queries()).status(), PQC_ABORTED, "items[0].sequence", "revoked");
  ExpectPhases(1);
}

TEST_F(RevocationTest, AStepOfARevokedLeaseFailsAlsoAfterAnotherCallHasANewLease) {
  Sequence sequence = Fill(layer_, kTokens);
  const StepItem items[] = {{&sequence, kTokens}};
  std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
  Step step = Must(client_.BeginStep(items, &most_));
  MustBeOk(step.Attend(0, layer_.queries(), output, lse));
  MustBeOk(step.Check());
  ReplaceEnd(sequence, other_);
  Expect(step.Check(), PQC_ABORTED, "items[0].sequence", "abandon the step");
  MustBeOk(sequence.TopK(QueryAtEnd(layer_), most_).status());
  Expect(step.Check(), PQC_ABORTED, "items[0].sequence");
  Expect(step.Attend(1, layer_.queries(), output, lse), PQC_ABORTED, "items[0].sequence");
  Expect(step.End(Rows(layer_, kTokens - 1, kTokens)), PQC_ABORTED, "items[0].sequence");
}

TEST_F(RevocationTest, ACallGivesTheRowsThatAreThereAtItsEnd) {
  for (int phase = 0; phase < kPhases; ++phase) {
    SCOPED_TRACE(phase);
    Sequence sequence = Fill(layer_, kTokens);
    const Selection most = {.index = Index::Flat(), .ratio = 0.9};
    Disturb(phase, [&] { ReplaceEnd(sequence, other_); });
    const Attention attention = Must(sequence.Attend(QueryAtEnd(layer_), most));
    ExpectPhases(2 * kPhases);  // the call has begun again
    Sequence expected = Fill(layer_, kTokens);
    ReplaceEnd(expected, other_);
    Disturb(-1, {});
    EXPECT_EQ(attention.output, Must(expected.Attend(QueryAtEnd(layer_), most)).output);
    EXPECT_NE(attention.output,
              Must(Fill(layer_, kTokens).Attend(QueryAtEnd(layer_), most)).output);
  }
}

// Attention to all candidates has one phase only.
TEST_F(RevocationTest, AnExactLayerThatAnotherHolderShortensMeanwhileFails) {
  Sequence sequence = Fill(layer_, kTokens);
  const StepItem items[] = {{&sequence, kTokens}};
  std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
  Step step = Must(client_.BeginStep(items, &selection_));
  Disturb(0, [&] { ReplaceEnd(sequence, other_); });
  Expect(step.Attend(1, layer_.queries(), output, lse), PQC_ABORTED, "items[0].sequence",
         "revoked");
  ExpectPhases(1);
}

TEST_F(RevocationTest, ARangeWhoseRowsAreReplacedMeanwhileIsReadAgain) {
  Sequence sequence = Fill(layer_, kTokens);
  Disturb(0, [&] { ReplaceEnd(sequence, other_); });
  const Query query = {
      .layer = 1,
      .query_position = kTokens,
      .queries = {layer_.queries().c().ptr, PQC_F32, {1, Layer::kQueryHeads, Layer::kKeyDim}}};
  const Attention attention = Must(sequence.AttendRange(query, {0, kTokens}));
  ExpectPhases(2);  // the call has begun again
  Sequence expected = Fill(layer_, kTokens);
  ReplaceEnd(expected, other_);
  Disturb(-1, {});
  EXPECT_EQ(attention.output, Must(expected.AttendRange(query, {0, kTokens})).output);
}

TEST_F(RevocationTest, ACallWhoseWorkerEndsMeanwhileFails) {
  Sequence sequence = Fill(layer_, kTokens);
  Disturb(1, [this] { sidecar_.EndWorker(); });
  Expect(sequence.Attend(QueryAtEnd(layer_), most_).status(), PQC_UNAVAILABLE, "", "worker");
  sidecar_.StartWorker();
}

}  // namespace
}  // namespace pqcached::testing
