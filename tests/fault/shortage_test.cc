// What a sidecar does when it runs out of descriptors, or cannot write its log: it goes on serving, and
// takes more when there is more.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <memory>
#include <vector>

#include "faults.h"

namespace pqcached::testing {
namespace {

// Lowers the limit of the processes that this one starts.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t limit) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit lower = {.rlim_cur = limit, .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &lower);
  }
  ~DescriptorLimit() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

Engine::Counts ExpectServes(const std::string& endpoint, const std::string& cache_name) {
  Engine engine({.endpoint = endpoint, .cache_name = cache_name});
  for (int i = 0; i < 20; ++i) engine.Act();
  engine.Verify();
  EXPECT_TRUE(engine.counts().clean()) << engine.counts().ToString();
  return engine.counts();
}

TEST(ShortageTest, DescriptorsThatRunOutAreAnErrorOfTheCallThatNeedsThem) {
  std::unique_ptr<Daemon> daemon;
  {
    const DescriptorLimit limit(160);
    daemon = std::make_unique<Daemon>();
  }
  daemon->AwaitServing();
  auto before = std::make_unique<Engine>(
      Engine::Options{.endpoint = daemon->endpoint(), .cache_name = "before"});
  for (int i = 0; i < 10; ++i) before->Act();
  {
    std::vector<Client> clients;
    bool refused = false;
    for (int i = 0; i < 400 && !refused; ++i) {
      Result<Client> client = Client::Open({.endpoint = daemon->endpoint(), .timeout_ms = 1000});
      refused = !client.ok();
      if (client.ok()) clients.push_back(std::move(*client));
    }
    EXPECT_TRUE(refused) << "there were descriptors for all";
    for (int i = 0; i < 10; ++i) before->Act();  // who is in stays in
  }
  before->Verify();
  Engine::Counts counts = before->counts();
  EXPECT_TRUE(counts.clean()) << counts.ToString();
  before.reset();
  Client admin = daemon->OpenClient();  // there is room again
  counts += ExpectServes(daemon->endpoint(), "after");
  const Left left = AwaitNothingLeft(admin, 1);
  EXPECT_TRUE(left.nothing_but(1)) << left.ToString();
  Record("shortages_survived", 1, counts, left);
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
