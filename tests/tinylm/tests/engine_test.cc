// The test engine against the reference implementation's numbers, and against itself.

#include "tests/tinylm/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/sanitizers.h"
#include "tests/skip.h"
#include "tests/tinylm/prompts.h"
#include "tests/tinylm/reference.h"

namespace tinylm {
namespace {

const std::string kDirectory = TINYLM_DIRECTORY;

class EngineTest : public testing::Test {
 protected:
  // Loaded once: the weights do not change.
  static const Model& TheModel() {
    static const Model model = LoadModel(kDirectory + "/model");
    return model;
  }

  static std::vector<uint32_t> Context(uint32_t length) {
    return LoadPrompts(kDirectory + "/prompts_dev", "niah", length, 1)[0].context;
  }

  void Compare(const std::string& task, uint32_t length, size_t prompt_limit,
               ReferenceComparison& total) {
    total.Add(CompareWithReference(engine_, full_, kDirectory + "/prompts_dev",
                                   kDirectory + "/reference_dev", task, length, prompt_limit));
  }

  Workers workers_{2};
  Engine engine_{TheModel(), workers_};
  FullAttention full_{TheModel().config, workers_};
};

float MaxDifference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  float max = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float difference = std::abs(a[i] - b[i]);
    if (!(difference <= max)) max = difference;
  }
  return max;
}

// Heads, concatenated.
std::vector<float> Flat(const nlohmann::json& heads) {
  std::vector<float> values;
  for (const auto& head : heads) {
    for (const float value : head) values.push_back(value);
  }
  return values;
}

// Compares all layers with the reference of a short prompt.
void CompareLayers(Engine& engine, const std::string& references) {
  std::ifstream in(references + "/reference_tiny.json");
  const nlohmann::json reference = nlohmann::json::parse(in);
  Engine::Trace trace;
  const auto logits =
      engine.Prefill(reference.at("ids").get<std::vector<uint32_t>>(), {}, {}, &trace);

  const auto& hidden = reference.at("hidden_last");
  const auto& layers = reference.at("layers");
  ASSERT_EQ(trace.hidden.size(), hidden.size());
  ASSERT_EQ(trace.q.size(), layers.size());
  for (size_t i = 0; i < hidden.size(); ++i) {
    EXPECT_LT(MaxDifference(trace.hidden[i], hidden[i].get<std::vector<float>>()),
              1e-3f)  // of values up to 150
        << "hidden state " << i;
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    EXPECT_LT(MaxDifference(trace.q[i], Flat(layers[i].at("q"))), 1e-4f) << "q of layer " << i;
    EXPECT_LT(MaxDifference(trace.k[i], Flat(layers[i].at("k"))), 1e-4f) << "k of layer " << i;
    EXPECT_LT(MaxDifference(trace.v[i], Flat(layers[i].at("v"))), 1e-4f) << "v of layer " << i;
  }
  EXPECT_LT(MaxDifference(logits, reference.at("logits_last").get<std::vector<float>>()), 1e-4f);
}

TEST_F(EngineTest, EveryLayerMatchesTheReferenceOfATinyPrompt) {
  CompareLayers(engine_, kDirectory + "/reference_dev");
}

// The second model: rope on all layers, heads of 128, no norm of q and k.
TEST(RopeEngineTest, LayersLogitsAndGreedyOutputsMatchTheReference) {
  const std::string directory = kDirectory + "/rope";
  const Model model = LoadModel(directory + "/model");
  Workers workers(2);
  Engine engine(model, workers);
  CompareLayers(engine, directory + "/reference_dev");
  FullAttention full(model.config, workers);
  ReferenceComparison total;
  for (const char* task : {"niah", "kv", "mq", "var"}) {
    for (const uint32_t length : {256u, 1024u}) {
      total.Add(CompareWithReference(engine, full, directory + "/prompts_dev",
                                     directory + "/reference_dev", task, length,
                                     /*prompt_limit=*/3));
    }
  }
  EXPECT_GE(total.question_count, 200u);
  EXPECT_GE(total.logit_count, 8u * 512u);
  EXPECT_LT(total.logit_max_abs_error, kLogitTolerance);
  for (const auto& mismatch : total.mismatches) {
    EXPECT_TRUE(mismatch.is_near_tie) << mismatch.where << ": margin " << mismatch.margin;
  }
}

TEST_F(EngineTest, LogitsAndGreedyOutputsMatchTheReferenceAt1024) {
  ReferenceComparison total;
  for (const char* task : {"niah", "kv", "mq", "var"}) Compare(task, 1024, 0, total);
  EXPECT_EQ(total.question_count, 160u);
  EXPECT_EQ(total.logit_count, 8u * 512u);
  EXPECT_LT(total.logit_max_abs_error, kLogitTolerance);
  EXPECT_GE(total.match_count, 0.99 * total.question_count);
  for (const auto& mismatch : total.mismatches) {
    EXPECT_TRUE(mismatch.is_near_tie) << mismatch.where << ": margin " << mismatch.margin;
  }
}

TEST_F(EngineTest, LogitsAndGreedyOutputsMatchTheReferenceAt4096) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  PQC_SKIP("plain_build") << "the shorter prompts go the same ways";
#endif
  ReferenceComparison total;
  for (const char* task : {"mq", "freq"}) Compare(task, 4096, 2, total);
  EXPECT_EQ(total.question_count, 20u + 2u);
  EXPECT_EQ(total.logit_count, 4u * 512u);
  EXPECT_LT(total.logit_max_abs_error, kLogitTolerance);
  for (const auto& mismatch : total.mismatches) {
    EXPECT_TRUE(mismatch.is_near_tie) << mismatch.where << ": margin " << mismatch.margin;
  }
}

TEST_F(EngineTest, PrefillDoesNotDependOnTheChunkSize) {
  const auto tokens = Context(1024);
  const auto expected = engine_.Prefill(tokens, {});
  for (const uint32_t chunk : {1u, 63u, 64u, 65u, 400u, 5000u}) {
    engine_.chunk_tokens = chunk;
    EXPECT_LT(MaxDifference(engine_.Prefill(tokens, {}), expected), 1e-4f) << "chunk of " << chunk;
  }
}

TEST_F(EngineTest, DecodeContinuesAPrefillAsIfItHadBeenLonger) {
  const auto tokens = Context(1024);
  Attention* const attentions[] = {&full_};
  for (const size_t prefilled : {1, 15, 63, 64, 65, 513, 1000}) {
    SCOPED_TRACE(prefilled);
    const std::span<const uint32_t> all(tokens);
    const size_t end = prefilled + 20;
    const auto expected = engine_.Prefill(all.first(end), {});
    engine_.Prefill(all.first(prefilled), attentions);
    std::vector<float> logits;
    for (size_t i = prefilled; i < end; ++i) logits = engine_.Decode(tokens[i], full_);
    EXPECT_LT(MaxDifference(logits, expected), 1e-4f);
  }
}

TEST_F(EngineTest, RewoundQuestionsGiveTheSameAnswerAgain) {
  const auto prompt = LoadPrompts(kDirectory + "/prompts_dev", "mq", 1024, 1)[0];
  WindowAttention window(TheModel().config, {}, workers_);
  Attention* const attentions[] = {&full_, &window};
  engine_.Prefill(prompt.context, attentions);
  for (Attention* attention : attentions) {
    const Answer first = Ask(engine_, *attention, prompt.questions[0]);
    Ask(engine_, *attention, prompt.questions[1]);
    const Answer again = Ask(engine_, *attention, prompt.questions[0]);
    EXPECT_EQ(first.first_logits, again.first_logits);
    ASSERT_EQ(first.outputs.size(), again.outputs.size());
    for (size_t i = 0; i < first.outputs.size(); ++i) {
      EXPECT_EQ(first.outputs[i].token, again.outputs[i].token);
    }
  }
}

TEST_F(EngineTest, SinkAndWindowAloneFailWhatFullAttentionAnswers) {
  WindowAttention window(TheModel().config, {}, workers_);
  uint32_t full_right = 0, window_right = 0, count = 0;
  for (const Prompt& prompt : LoadPrompts(kDirectory + "/prompts_dev", "niah", 4096, 2)) {
    Attention* const attentions[] = {&full_, &window};
    engine_.Prefill(prompt.context, attentions);
    for (const Question& question : prompt.questions) {
      full_right += Ask(engine_, full_, question).is_right;
      window_right += Ask(engine_, window, question).is_right;
      ++count;
    }
  }
  EXPECT_GE(full_right, 0.8 * count);
  EXPECT_LE(window_right, 0.1 * count);
}

TEST_F(EngineTest, WindowAttentionThatCoversEverythingIsFullAttention) {
  const auto tokens = Context(1024);
  for (const uint32_t length : {3u, 30u, 90u}) {
    SCOPED_TRACE(length);
    WindowAttention window(TheModel().config, {.sink_tokens = 16, .window_tokens = 100}, workers_);
    Attention* const attentions[] = {&full_, &window};
    engine_.Prefill(std::span(tokens).first(length), attentions);
    std::vector<float> expected, actual;
    for (uint32_t i = length; i < length + 20; ++i) expected = engine_.Decode(tokens[i], full_);
    engine_.Rewind(full_);
    for (uint32_t i = length; i < length + 20; ++i) actual = engine_.Decode(tokens[i], window);
    EXPECT_LT(MaxDifference(actual, expected), 1e-4f);
    const AttendedTokens attended = window.last_attended();
    EXPECT_EQ(attended.sink + attended.window, length + 20);
  }
}

TEST_F(EngineTest, WindowAttentionHoldsOnlySinkAndWindow) {
  WindowAttention window(TheModel().config, {}, workers_);
  Attention* const attentions[] = {&full_, &window};
  engine_.Prefill(Context(1024), attentions);
  const size_t token_bytes = 2 * 2 * 2 * 64 * sizeof(float);  // layers, k and v, kv heads, dims
  EXPECT_EQ(full_.engine_kv_bytes(), 1024 * token_bytes);
  EXPECT_EQ(window.engine_kv_bytes(), (16 + 64) * token_bytes);
}

TEST_F(EngineTest, ATokenOutsideTheVocabularyIsRefused) {
  EXPECT_THROW(engine_.Prefill(std::vector<uint32_t>{1, 512}, {}), std::runtime_error);
  EXPECT_THROW(engine_.Prefill(std::vector<uint32_t>{}, {}), std::runtime_error);
}

TEST(MergePartialTest, EqualsAttentionOverBothParts) {
  constexpr uint32_t kHeads = 2, kHeadDim = 64;
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> o_a(kHeads * kHeadDim, 1.0f), o_b(kHeads * kHeadDim, 5.0f);
  std::vector<float> lse_a{std::log(3.0f), -infinity}, lse_b{std::log(1.0f), 2.0f};
  MergePartial(kHeads, kHeadDim, o_a.data(), lse_a.data(), o_b.data(), lse_b.data());
  EXPECT_FLOAT_EQ(lse_a[0], std::log(4.0f));
  EXPECT_FLOAT_EQ(o_a[0], 2.0f);
  EXPECT_FLOAT_EQ(lse_a[1], 2.0f);
  EXPECT_FLOAT_EQ(o_a[kHeadDim], 5.0f);

  std::vector<float> nothing(kHeads * kHeadDim), no_lse(kHeads, -infinity);
  MergePartial(kHeads, kHeadDim, o_a.data(), lse_a.data(), nothing.data(), no_lse.data());
  EXPECT_FLOAT_EQ(o_a[0], 2.0f);
  auto empty = nothing;
  auto empty_lse = no_lse;
  MergePartial(kHeads, kHeadDim, empty.data(), empty_lse.data(), nothing.data(), no_lse.data());
  EXPECT_EQ(empty, nothing);
  EXPECT_EQ(empty_lse, no_lse);
}

}  // namespace
}  // namespace tinylm
