// The cost model: its arithmetic, and the file that it keeps. No test depends on how fast the machine is.
#include "kvstore/index/cost_model.h"

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "gtest/gtest.h"

namespace pqcached::kvstore {
namespace {

constexpr BuildCost kCost = {.load = 1e-7, .step = 2e-7, .code = 5e-7};
constexpr BuildSize kSize = {
    .head_count = 8, .head_tasks = 2, .row_count = 10000, .sample_count = 4000, .worker_count = 4};
constexpr LayerShape kShape = {.dtype = kernels::DType::kBf16,
                               .key_dim = 32,
                               .value_dim = 32,
                               .kv_heads = 2,
                               .query_heads = 4,
                               .row_bytes = 128};
constexpr IndexDescriptor kIndex = {IndexKind::kPq, 2, 4};

TEST(BuildSeconds, AddsTrainingAndCodingOfAWorkersHeads) {
  EXPECT_NEAR(BuildSeconds(kCost, kSize, 0), 2 * (2 * 4000 * 1e-7 + 10000 * 5e-7), 1e-12);
  EXPECT_NEAR(BuildSeconds(kCost, kSize, 3), 2 * (2 * 4000 * (1e-7 + 3 * 2e-7) + 10000 * 5e-7),
              1e-12);
  BuildSize nobody = kSize;
  nobody.worker_count = 0;  // counts as one
  EXPECT_NEAR(BuildSeconds(kCost, nobody, 3), 4 * BuildSeconds(kCost, kSize, 3), 1e-12);
  EXPECT_EQ(BuildSeconds(kCost, {}, 7), 0);
}

TEST(IterationsWithin, GivesTheMostThatEndInTime) {
  for (uint32_t iterations = 1; iterations <= 20; ++iterations) {
    const double seconds = BuildSeconds(kCost, kSize, iterations);
    EXPECT_EQ(IterationsWithin(kCost, kSize, seconds * 1.0001, 100), iterations);
    EXPECT_EQ(IterationsWithin(kCost, kSize, seconds * 0.9999, 100), std::max(1u, iterations - 1));
  }
}

TEST(IterationsWithin, IsAtLeastOneAndAtMostTheLimit) {
  EXPECT_EQ(IterationsWithin(kCost, kSize, 0, 10), 1u);
  EXPECT_EQ(IterationsWithin(kCost, kSize, -1, 10), 1u);
  EXPECT_EQ(IterationsWithin(kCost, kSize, 1e9, 10), 10u);
  EXPECT_EQ(IterationsWithin(kCost, kSize, 1e300, 10), 10u);
  EXPECT_EQ(IterationsWithin(kCost, kSize, 1e9, 0), 1u);
  EXPECT_EQ(IterationsWithin(kCost, {}, 1, 10), 10u);  // nothing to train costs nothing
}

TEST(PrefillSeconds, IsTheQuadraticThatTheEngineReports) {
  const PrefillCost cost{4.75e-11, 2.5e-6, 4e-4};
  EXPECT_NEAR(PrefillSeconds(cost, 32768), 4.75e-11 * 32768 * 32768 + 2.5e-6 * 32768 + 4e-4, 1e-12);
  EXPECT_EQ(PrefillSeconds({}, 32768), 0);
}

class CostFile : public ::testing::Test {
 protected:
  CostFile() {
    char name[] = "/tmp/pqcached-costs-XXXXXX";
    directory_ = mkdtemp(name);
    file_ = directory_ / "costs";
  }
  ~CostFile() override { std::filesystem::remove_all(directory_); }

  std::string Read() const {
    std::ifstream in(file_);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  }
  void Write(const std::string& text) const { std::ofstream(file_) << text; }
  // A file that holds these costs for kShape and kIndex.
  std::string Text(const std::string& machine, const std::string& costs) const {
    return "pqcached build costs 2\n" + machine + "\n" +
           std::to_string(static_cast<uint32_t>(kShape.dtype)) + " 32 128 2 4 0 " + costs + "\n";
  }
  BuildCost Measured() { return CostModel(exec_, file_).Measured(kShape, kIndex); }

  const kernels::Exec exec_;
  const std::string machine_ = CostModel::MachineKey(exec_);
  std::filesystem::path directory_, file_;
};

TEST_F(CostFile, WhatWasMeasuredIsKeptWithTheMachine) {
  CostModel model(exec_, file_);
  const BuildCost cost = model.Measured(kShape, kIndex);
  EXPECT_GT(cost.load, 0);
  EXPECT_GT(cost.step, 0);
  EXPECT_GT(cost.code, 0);
  const std::string text = Read();
  EXPECT_EQ(text.find("pqcached build costs 2\n" + machine_ + "\n"), 0u) << text;
  const BuildCost again = Measured();  // of the next process; written with six digits
  EXPECT_NEAR(again.load, cost.load, 1e-5 * cost.load);
  EXPECT_NEAR(again.step, cost.step, 1e-5 * cost.step);
  EXPECT_NEAR(again.code, cost.code, 1e-5 * cost.code);
  EXPECT_EQ(Read(), text);
  model.Measured(kShape, {IndexKind::kPq, 4, 4});  // another kind joins it
  EXPECT_EQ(Read().find(text), 0u);
  EXPECT_GT(Read().size(), text.size());
}

TEST_F(CostFile, KnownCostsAreNotMeasuredAgain) {
  Write(Text(machine_, "0.25 0.125 0.0625"));  // no machine is that slow
  const BuildCost cost = Measured();
  EXPECT_EQ(cost.load, 0.25);
  EXPECT_EQ(cost.step, 0.125);
  EXPECT_EQ(cost.code, 0.0625);
  IndexDescriptor weighted = kIndex;  // another layout takes other times
  weighted.layout = SubspaceLayout::kWeighted;
  EXPECT_LT(CostModel(exec_, file_).Measured(kShape, weighted).load, 0.25);
}

TEST_F(CostFile, OfAnotherMachineOrVersionIsMeasuredAnewAndReplaced) {
  for (const std::string& text :
       {Text("another " + machine_, "0.25 0.125 0.0625"),
        "pqcached build costs 0\n" + Text(machine_, "0.25 0.125 0.0625"), std::string()}) {
    Write(text);
    EXPECT_LT(Measured().load, 0.25);
    EXPECT_EQ(Read().find("pqcached build costs 2\n" + machine_ + "\n"), 0u);
  }
}

TEST_F(CostFile, WhatIsNoCostIsIgnored) {
  for (const char* costs : {"", "0.25 0.125", "nan 0.125 0.0625", "0.25 -0.125 0.0625",
                            "0.25 0.125 0", "1 0.125 0.0625", "0.25 inf 0.0625", "a b c"}) {
    Write(Text(machine_, costs));
    EXPECT_LT(Measured().load, 0.25) << costs;
  }
  Write(Text(machine_, "junk") +
        Text(machine_, "0.25 0.125 0.0625"));  // a good line behind bad ones
  EXPECT_EQ(Measured().load, 0.25);
}

TEST_F(CostFile, ThatCannotBeWrittenIsDoneWithout) {
  const BuildCost cost =
      CostModel(exec_, directory_ / "no" / "such" / "directory").Measured(kShape, kIndex);
  EXPECT_GT(cost.step, 0);
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

}  // namespace
}  // namespace pqcached::kvstore
