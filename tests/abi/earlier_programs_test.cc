// Programs that were built with the headers of earlier versions run with the library of today.
#include <gtest/gtest.h>

#include "tests/client/daemon.h"
#include "tests/client/process.h"

namespace pqcached::testing {
namespace {

class EarlierProgramsTest : public ::testing::TestWithParam<const char*> {};

TEST_P(EarlierProgramsTest, AProgramOf01CallsEverything) {
  Daemon daemon;
  daemon.AwaitServing();
  const Outcome outcome = RunProgram({PQCACHED_CALLS_0_1, daemon.endpoint(), GetParam()});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(outcome.output, std::string("0.1 called everything, ") + GetParam() + "\n");
}

INSTANTIATE_TEST_SUITE_P(Paths, EarlierProgramsTest, ::testing::Values("local", "remote"),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace pqcached::testing
