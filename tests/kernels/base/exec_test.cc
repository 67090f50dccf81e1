// Exec: levels form a ladder and their names can be parsed back.
#include "kernels/base/exec.h"

#include <gtest/gtest.h>

namespace pqcached::kernels {
namespace {

TEST(ExecTest, LevelsAscendFromReferenceToBest) {
  const std::vector<Level> levels = AvailableLevels();
  ASSERT_GE(levels.size(), 2u);
  EXPECT_EQ(levels.front(), Level::kReference);
  EXPECT_EQ(levels[1], Level::kPortable);
  EXPECT_EQ(levels.back(), BestLevel());
  for (size_t i = 0; i + 1 < levels.size(); ++i) EXPECT_LT(levels[i], levels[i + 1]);
  EXPECT_EQ(Exec{}.level, BestLevel());
}

TEST(ExecTest, NeonIsOneLevelAbovePortableOnArm64AndNoOtherMachineHasIt) {
#if defined(__aarch64__)
  const std::vector<Level> levels = {Level::kReference, Level::kPortable, Level::kNeon};
  EXPECT_EQ(AvailableLevels(), levels);
  EXPECT_FALSE(HasLevel(Level::kAvx2));
#else
  EXPECT_FALSE(HasLevel(Level::kNeon));
#endif
  for (const Level level : AvailableLevels()) EXPECT_TRUE(HasLevel(level)) << LevelName(level);
}

TEST(ExecTest, NamesParseBack) {
  for (const Level level : AvailableLevels()) EXPECT_EQ(ParseLevel(LevelName(level)), level);
  EXPECT_EQ(ParseLevel("neon"), Level::kNeon);
  EXPECT_EQ(ParseLevel("AVX2"), std::nullopt);
  EXPECT_EQ(ParseLevel(""), std::nullopt);
}

}  // namespace
}  // namespace pqcached::kernels
