// The test engine with a real sidecar: questions one by one, as a batch of forks, and by a model in
// two processes give the same answers.

#include "tests/tinylm/steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "tests/client/daemon.h"
#include "tests/tinylm/engine.h"
#include "tests/tinylm/pqcached_attention.h"
#include "tests/tinylm/prompts.h"
#include "tests/tinylm/ranked_attention.h"

namespace tinylm {
namespace {

const std::string kDirectory = TINYLM_DIRECTORY;

class StepsTest : public testing::TestWithParam<pqc_path_choice> {
 protected:
  PqcachedAttention::Options TheOptions() const {
    PqcachedAttention::Options options;
    options.endpoint = daemon_.endpoint();
    options.capacity_bytes = 32 << 20;
    options.indexes = {PqIndex(4, 8)};
    options.path = GetParam();
    return options;
  }

  static std::vector<uint32_t> OutputsOf(const Answer& answer) {
    std::vector<uint32_t> tokens;
    for (const GeneratedToken& output : answer.outputs) tokens.push_back(output.token);
    return tokens;
  }

  pqcached::testing::Daemon daemon_;
  const Model model_ = LoadModel(kDirectory + "/model");
  const Prompt prompt_ = LoadPrompts(kDirectory + "/prompts_dev", "mq", 1024, 1)[0];
};

TEST_P(StepsTest, ABatchOfForksAnswersAsTheirQuestionsDoOneByOne) {
  daemon_.AwaitServing();
  Workers workers(2);
  Engine engine(model_, workers);
  PqcachedAttention parent(model_, TheOptions(), workers);
  if (GetParam() == PQC_PATH_ONLY_LOCAL) {
    EXPECT_EQ(pqc_client_path(parent.client()), PQC_PATH_LOCAL);
  }
  Attention* const attentions[] = {&parent};
  engine.Prefill(prompt_.context, attentions);
  parent.SetSelection(PqIndex(4, 8), 0.2);

  const size_t count = std::min<size_t>(prompt_.questions.size(), 6);
  std::vector<std::vector<uint32_t>> expected, answered(count);
  uint32_t right = 0;
  for (size_t i = 0; i < count; ++i) {
    const Answer answer = Ask(engine, parent, prompt_.questions[i]);
    expected.push_back(OutputsOf(answer));
    right += answer.is_right;
  }
  EXPECT_GE(right, count / 2);

  BatchSteps steps(parent.client(), static_cast<uint32_t>(count));
  std::vector<std::unique_ptr<PqcachedAttention>> forks;
  std::vector<std::unique_ptr<Workers>> crews;
  for (size_t i = 0; i < count; ++i) {
    crews.push_back(std::make_unique<Workers>(1));
    forks.push_back(parent.Fork(steps, *crews.back()));
  }
  std::vector<std::thread> members;
  for (size_t i = 0; i < count; ++i) {
    members.emplace_back([&, i] {
      try {
        Engine member(engine, *crews[i]);
        answered[i] = OutputsOf(Ask(member, *forks[i], prompt_.questions[i]));
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      steps.Leave();
    });
  }
  for (std::thread& member : members) member.join();
  EXPECT_EQ(answered, expected);
  EXPECT_EQ(steps.largest_batch(), count);
}

TEST_P(StepsTest, TwoRanksAnswerAsOneProcessDoes) {
  PqcachedAttention::Options ranked = TheOptions();
  ranked.cache_name = "ranked";
  ranked.rank_count = 2;
  std::vector<RankProcess> others =
      RankedAttention::Start(TINYLM_RANK, kDirectory + "/model", ranked);
  daemon_.AwaitServing();
  Workers workers(2);
  Engine engine(model_, workers);
  RankedAttention ranks(model_, ranked, std::move(others), workers);
  PqcachedAttention single(model_, TheOptions(), workers);
  Attention* const attentions[] = {&single, &ranks};
  engine.Prefill(prompt_.context, attentions);
  // Exact scores: codebooks are trained from other random starts in each rank.
  single.SetSelection(FlatIndex(), 0.2);
  ranks.SetSelection(FlatIndex(), 0.2);

  for (size_t i = 0; i < 3; ++i) {
    SCOPED_TRACE(i);
    const Answer expected = Ask(engine, single, prompt_.questions[i]);
    const Answer answer = Ask(engine, ranks, prompt_.questions[i]);
    EXPECT_EQ(OutputsOf(answer), OutputsOf(expected));
    ASSERT_EQ(answer.first_logits.size(), expected.first_logits.size());
    for (size_t t = 0; t < expected.first_logits.size(); ++t) {
      EXPECT_NEAR(answer.first_logits[t], expected.first_logits[t], 1e-3f);
    }
  }
  EXPECT_EQ(ranks.last_attended().selected, single.last_attended().selected);
}

INSTANTIATE_TEST_SUITE_P(Paths, StepsTest,
                         testing::Values(PQC_PATH_ONLY_LOCAL, PQC_PATH_ONLY_REMOTE),
                         [](const auto& test) {
                           return test.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace tinylm
