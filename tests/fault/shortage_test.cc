// A sidecar that can never write its log goes on serving. Other shortages: environment/.
#include <gtest/gtest.h>

#include <string>

#include "faults.h"

namespace pqcached::testing {
namespace {

Engine::Counts ExpectServes(const std::string& endpoint, const std::string& cache_name) {
  Engine engine({.endpoint = endpoint, .cache_name = cache_name});
  for (int i = 0; i < 20; ++i) engine.Act();
  engine.Verify();
  EXPECT_TRUE(engine.counts().clean()) << engine.counts().ToString();
  return engine.counts();
}

TEST(ShortageTest, ALogThatCannotBeWrittenEndsNothing) {
  TempFolder folder;
  const std::string endpoint = "unix://" + folder.File("s");
  Process daemon(
      {PQCACHED_DAEMON, "--listen", endpoint, "--log-level", "debug", "--log-file", "/dev/full"});
  const Engine::Counts counts = ExpectServes(endpoint, "cache");
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
  Record("shortages_survived", 1, counts, {});
}

}  // namespace
}  // namespace pqcached::testing
