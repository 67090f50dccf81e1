// The test engine's use of the client, against a client in this process that keeps its contract.

#include "tests/tinylm/pqcached_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "tests/tinylm/engine.h"
#include "tests/tinylm/prompts.h"
#include "tests/tinylm/tests/fake_client.h"

namespace tinylm {
namespace {

using testing::HasSubstr;

const std::string kDirectory = TINYLM_DIRECTORY;

class PqcachedAttentionTest : public testing::Test {
 protected:
  static const Model& TheModel() {
    static const Model model = LoadModel(kDirectory + "/model");
    return model;
  }

  void SetUp() override {
    TheFakeSidecar() = {};
    sidecar_ = std::make_unique<PqcachedAttention>(TheModel(), TheOptions(), workers_);
  }

  static PqcachedAttention::Options TheOptions() {
    return {
        .endpoint = "unix:///fake", .indexes = {PqIndex(4, 8), PqIndex(2, 6)}, .engine_tokens = {}};
  }

  // The first `length` tokens of a context go to both attentions.
  void Prefill(uint32_t length) {
    context_ = LoadPrompts(kDirectory + "/prompts_dev", "niah", 1024, 1)[0].context;
    Attention* const attentions[] = {&full_, sidecar_.get()};
    engine_.Prefill(std::span(context_).first(length), attentions);
  }

  std::vector<float> DecodeNext(Attention& attention, uint32_t count) {
    std::vector<float> logits;
    const uint32_t begin = engine_.position();
    for (uint32_t i = begin; i < begin + count; ++i)
      logits = engine_.Decode(context_[i], attention);
    return logits;
  }

  Workers workers_{2};
  Engine engine_{TheModel(), workers_};
  FullAttention full_{TheModel().config, workers_};
  std::unique_ptr<PqcachedAttention> sidecar_;
  std::vector<uint32_t> context_;
};

TEST_F(PqcachedAttentionTest, AllTokensThroughTheSidecarEqualFullAttention) {
  // Below, at and above sink + window = 80 tokens.
  for (const uint32_t length : {10u, 60u, 79u, 80u, 81u, 300u}) {
    SCOPED_TRACE(length);
    Prefill(length);
    sidecar_->SetSelection(FlatIndex(), 1.0);
    const auto expected = DecodeNext(full_, 10);
    engine_.Rewind(full_);
    const auto actual = DecodeNext(*sidecar_, 10);
    float max = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      max = std::max(max, std::abs(expected[i] - actual[i]));
    }
    EXPECT_LT(max, 1e-4f);
    const AttendedTokens attended = sidecar_->last_attended();
    EXPECT_EQ(attended.sink + attended.window + attended.selected, length + 10);
  }
}

TEST_F(PqcachedAttentionTest, EveryStepAppendsOneTokenAndARewindTakesThemBack) {
  Prefill(300);
  EXPECT_EQ(TheFakeSidecar().token_count, 300u);
  for (int question = 0; question < 2; ++question) {
    DecodeNext(*sidecar_, 7);
    EXPECT_EQ(TheFakeSidecar().token_count, 307u);
    engine_.Rewind(*sidecar_);
    EXPECT_EQ(TheFakeSidecar().token_count, 300u);
  }
  EXPECT_EQ(TheFakeSidecar().append_count, 14u);
}

TEST_F(PqcachedAttentionTest, TheBudgetCountsSinkWindowAndSelected) {
  Prefill(999);
  sidecar_->SetSelection(FlatIndex(), 0.1);
  DecodeNext(*sidecar_, 1);
  EXPECT_EQ(sidecar_->last_attended().sink, 16u);
  EXPECT_EQ(sidecar_->last_attended().window, 64u);
  EXPECT_EQ(sidecar_->last_attended().selected, 20u);
}

TEST_F(PqcachedAttentionTest, ABudgetBelowSinkAndWindowSelectsNothing) {
  Prefill(300);
  sidecar_->SetSelection(FlatIndex(), 0.1);
  DecodeNext(*sidecar_, 1);
  EXPECT_EQ(sidecar_->last_attended().window, 64u);
  EXPECT_EQ(sidecar_->last_attended().selected, 0u);
}

TEST_F(PqcachedAttentionTest, OneTenthOfTheTokensAnswersWhatSinkAndWindowCannot) {
  const Prompt prompt = LoadPrompts(kDirectory + "/prompts_dev", "niah", 1024, 1)[0];
  WindowAttention window(TheModel().config, {}, workers_);
  Attention* const attentions[] = {&full_, &window, sidecar_.get()};
  engine_.Prefill(prompt.context, attentions);
  int full = 0, selected = 0, ends = 0;
  for (const Question& question : prompt.questions) {
    full += Ask(engine_, full_, question).is_right;
    selected += Ask(engine_, *sidecar_, question).is_right;
    ends += Ask(engine_, window, question).is_right;
  }
  EXPECT_GE(full, 9);
  EXPECT_GE(selected, full - 1);
  EXPECT_LE(ends, 2);
}

TEST_F(PqcachedAttentionTest, BuildsEveryIndexOnceAndNotesEachLayersCost) {
  Prefill(100);
  ASSERT_EQ(TheFakeSidecar().built.size(), 2u);
  EXPECT_EQ(TheFakeSidecar().built[1].subspaces, 2u);
  EXPECT_EQ(TheFakeSidecar().built[1].bits, 6u);
  ASSERT_EQ(sidecar_->builds().size(), 2u);
  for (const auto& build : sidecar_->builds()) {
    ASSERT_EQ(build.layers.size(), 2u);
    EXPECT_EQ(build.layers[0].layer, 1u);
    EXPECT_EQ(build.layers[1].layer, 3u);
    EXPECT_DOUBLE_EQ(build.layers[0].seconds, 1.0);
    EXPECT_DOUBLE_EQ(build.layers[1].seconds, 1.0);
    EXPECT_EQ(build.layers[1].index_bytes, 103u);
  }
  Prefill(200);  // a new sequence
  EXPECT_EQ(TheFakeSidecar().token_count, 200u);
  EXPECT_EQ(sidecar_->builds().size(), 2u);
}

TEST_F(PqcachedAttentionTest, TheEngineKeepsOnlySinkAndWindow) {
  Prefill(1000);
  const size_t token_bytes = 2 * 2 * 2 * 64 * sizeof(float);  // layers, k and v, kv heads, dims
  EXPECT_EQ(sidecar_->engine_kv_bytes(), (16 + 64) * token_bytes);
}

TEST_F(PqcachedAttentionTest, AFailedCallSurfacesWithTheClientsMessage) {
  Prefill(300);
  for (const char* call : {"attend", "step_end", "ingest", "open"}) {
    SCOPED_TRACE(call);
    TheFakeSidecar().fail_call = call;
    try {
      if (call == std::string("ingest")) {
        Prefill(300);
      } else if (call == std::string("open")) {
        PqcachedAttention(TheModel(), TheOptions(), workers_);
      } else {
        DecodeNext(*sidecar_, 1);
      }
      FAIL() << "the failure was lost";
    } catch (const std::runtime_error& error) {
      EXPECT_THAT(error.what(), HasSubstr("nobody listens"));
      EXPECT_THAT(error.what(), HasSubstr(call));
    }
  }
}

}  // namespace
}  // namespace tinylm
