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

void ExpectServes(const std::string& endpoint, const std::string& cache_name) {
  Engine engine({.endpoint = endpoint, .cache_name = cache_name});
  for (int i = 0; i < 20; ++i) engine.Act();
  engine.Verify();
  EXPECT_TRUE(engine.counts().clean()) << engine.counts().ToString();
}

TEST(ShortageTest, DescriptorsThatRunOutAreAnErrorOfTheCallThatNeedsThem) {
  std::unique_ptr<Daemon> daemon;
  {
    const DescriptorLimit limit(160);
    daemon = std::make_unique<Daemon>();
  }
  daemon->AwaitServing();
  Engine before({.endpoint = daemon->endpoint(), .cache_name = "before"});
  for (int i = 0; i < 10; ++i) before.Act();
  {
    std::vector<Client> clients;
    bool refused = false;
    for (int i = 0; i < 400 && !refused; ++i) {
      Result<Client> client = Client::Open({.endpoint = daemon->endpoint(), .timeout_ms = 1000});
      refused = !client.ok();
      if (client.ok()) clients.push_back(std::move(*client));
    }
    EXPECT_TRUE(refused) << "there were descriptors for all";
    for (int i = 0; i < 10; ++i) before.Act();  // who is in stays in
  }
  before.Verify();
  EXPECT_TRUE(before.counts().clean()) << before.counts().ToString();
  daemon->OpenClient();  // there is room again
  ExpectServes(daemon->endpoint(), "after");
}

TEST(ShortageTest, ALogThatCannotBeWrittenEndsNothing) {
  TempFolder folder;
  const std::string endpoint = "unix://" + folder.File("s");
  Process daemon(
      {PQCACHED_DAEMON, "--listen", endpoint, "--log-level", "debug", "--log-file", "/dev/full"});
  ExpectServes(endpoint, "cache");
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
}

}  // namespace
}  // namespace pqcached::testing
