// Transfers between two processes over real libibverbs. run.sh runs this in a virtual machine with
// soft-RoCE; elsewhere it skips.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "service/base/refusal.h"
#include "tests/rdma/ends.h"
#include "tests/skip.h"

namespace pqcached::service::rdma {
namespace {

using Code = absl::StatusCode;
using testing::AnyOf;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr size_t kMib = 1 << 20;

class RdmaTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (std::getenv("RDMA_VM") == nullptr) {
      PQC_SKIP("rdma_vm") << "tests/rdma/run.sh runs these tests in a virtual machine";
    }
    plan_.use_windows = GetParam();
  }

  // Runs a pull in this process to its end.
  absl::Status RunToTheEnd(PullEnd& pull) {
    EXPECT_TRUE(RunUntil(io_, [&pull] { return pull.end().has_value(); }));
    EXPECT_TRUE(pull.is_released());
    return pull.end().value_or(Internal("the pull has not ended"));
  }

  Plan plan_ = {.sizes = {1, 4096, 300'001, 2 * kMib, 70'000}};
  boost::asio::io_context io_;
};

std::string Name(const testing::TestParamInfo<bool>& info) {
  return info.param ? "Windows" : "Regions";
}
INSTANTIATE_TEST_SUITE_P(, RdmaTest, testing::Bool(), Name);

TEST_P(RdmaTest, PullsAllBytesInOrder) {
  const Child source(Role::kSource, plan_);
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  PullEnd pull(io_, *verbs, source.control(), plan_);
  EXPECT_EQ(RunToTheEnd(pull), absl::OkStatus());
  EXPECT_TRUE(pull.has_all_bytes());
  EXPECT_THAT(pull.arrived(), testing::UnorderedElementsAre(0, 1, 2, 3, 4));
  EXPECT_EQ(pull.arrived()[0], 0u);
}

TEST_P(RdmaTest, PullsOverTwoRails) {
  plan_.source_addresses = {kSecondAddress, kFirstAddress};
  plan_.pull_addresses = {kFirstAddress, kSecondAddress};
  plan_.connection_count = 4;
  const Child source(Role::kSource, plan_);
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  PullEnd pull(io_, *verbs, source.control(), plan_);
  EXPECT_EQ(RunToTheEnd(pull), absl::OkStatus());
  EXPECT_TRUE(pull.has_all_bytes());
}

TEST_P(RdmaTest, AWrongKeyIsRefused) {
  const Child source(Role::kSource, plan_);
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  PullEnd pull(io_, *verbs, source.control(), plan_);
  pull.on_keys = [](std::vector<Key>& keys) { keys.back().key ^= 0x5500; };
  const absl::Status status = RunToTheEnd(pull);
  EXPECT_EQ(status.code(), Code::kAborted) << status;
}

TEST_P(RdmaTest, AnAddressOutsideOfTheKeyIsRefused) {
  const Child source(Role::kSource, plan_);
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  PullEnd pull(io_, *verbs, source.control(), plan_);
  pull.on_keys = [](std::vector<Key>& keys) { keys.back().address += 64; };
  const absl::Status status = RunToTheEnd(pull);
  EXPECT_EQ(status.code(), Code::kAborted) << status;
}

TEST_P(RdmaTest, ARegionThatIsRevokedWhileItIsReadEndsThePull) {
  plan_.sizes = {16 * kMib};
  const Child source(Role::kSource, plan_);
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  PullEnd pull(io_, *verbs, source.control(), plan_);
  pull.on_keys = [&source](auto&) { SendFrame(source.control(), FrameKind::kRevoke, nullptr, 0); };
  const absl::Status status = RunToTheEnd(pull);
  EXPECT_THAT(status.code(), AnyOf(Code::kAborted, Code::kUnavailable)) << status;
  EXPECT_THAT(pull.arrived(), IsEmpty());
}

TEST_P(RdmaTest, AKilledSourceMeansUnavailable) {
  plan_.sizes = {16 * kMib};
  Child source(Role::kSource, plan_);
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  PullEnd pull(io_, *verbs, source.control(), plan_);
  pull.on_keys = [&source](auto&) { source.Kill(); };
  const absl::Status status = RunToTheEnd(pull);
  EXPECT_EQ(status.code(), Code::kUnavailable) << status;
  EXPECT_EQ(FieldOf(status), "peer") << status;  // not by the deadline
}

TEST_P(RdmaTest, AKilledPullerReleasesTheLease) {
  plan_.sizes = {16 * kMib};
  Child puller(Role::kPull, plan_);
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  SourceEnd source(io_, *verbs, puller.control(), plan_);
  ASSERT_TRUE(RunUntil(io_, [&] { return source.keys_sent() > 0; }));
  puller.Kill();
  ASSERT_TRUE(RunUntil(io_, [&] { return source.end().has_value(); }));
  EXPECT_TRUE(source.is_released());
}

// Sets the MTU of one end, as long as it lives.
class LinkMtu {
 public:
  LinkMtu(std::string link, int mtu) : link_(std::move(link)) { Set(mtu); }
  ~LinkMtu() { Set(9000); }

 private:
  void Set(int mtu) const {
    EXPECT_EQ(system(("ip link set " + link_ + " mtu " + std::to_string(mtu)).c_str()), 0);
  }
  const std::string link_;
};

TEST_P(RdmaTest, ASmallerMtuAtTheSourceIsRefused) {
  const LinkMtu mtu("veth1", 1500);
  const Child source(Role::kSource, plan_);
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  PullEnd pull(io_, *verbs, source.control(), plan_);
  const absl::Status status = RunToTheEnd(pull);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition) << status;
  EXPECT_EQ(FieldOf(status), "offer.rails.mtu") << status;
}

TEST_P(RdmaTest, ASmallerMtuAtThePullerIsThatOfTheConnection) {
  const LinkMtu mtu("veth0", 1500);
  const Child source(Role::kSource, plan_);
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  PullEnd pull(io_, *verbs, source.control(), plan_);
  EXPECT_EQ(RunToTheEnd(pull), absl::OkStatus());
  EXPECT_TRUE(pull.has_all_bytes());
}

TEST_P(RdmaTest, AnAddressThatDoesNotExistIsRefused) {
  const std::unique_ptr<Verbs> verbs = *LoadVerbs();
  const absl::Status status = Source::Create(*verbs, io_, {.addresses = {"10.77.0.3"}}).status();
  EXPECT_EQ(status.code(), Code::kUnavailable) << status;
  EXPECT_EQ(FieldOf(status), "addresses[0]");
}

}  // namespace
}  // namespace pqcached::service::rdma

int main(int argc, char** argv) {
  pqcached::service::rdma::RunIfChild(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
