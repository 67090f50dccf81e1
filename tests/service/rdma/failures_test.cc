// Transfers that fail: each call in turn, keys that are wrong or revoked, peers that die or are
// silent, versions, MTUs and checksums that differ. The status is clear, all memory is released, and
// other transfers go on.
#include <cstring>

#include "tests/service/rdma/transfer_fixture.h"

namespace pqcached::service::rdma {
namespace {

using testing::AnyOf;
using testing::IsEmpty;
using testing::Lt;
using testing::Optional;
using testing::SizeIs;

using Code = absl::StatusCode;

MATCHER_P(Is, code, "") { return arg.has_value() && arg->code() == code; }
MATCHER_P2(Is, code, field, "") {
  return arg.has_value() && arg->code() == code && FieldOf(*arg) == field;
}

class FailuresTest : public BothKindsTest {
 protected:
  // Starts a transfer whose READs stay in flight.
  void StartHeld(Transfer& transfer) {
    fabric_.holds_reads = true;
    ASSERT_NO_FATAL_FAILURE(Start(transfer));
    Settle();
    ASSERT_GT(pull_host_->held_reads(), 0u);
  }
  void Release() {
    fabric_.holds_reads = false;
    pull_host_->ReleaseReads(1000);
  }
  // Expects a transfer that was in flight during the failure of another one to succeed.
  void ExpectUndisturbed(Transfer& transfer) {
    Release();
    ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
    EXPECT_EQ(transfer.pull_end, absl::OkStatus());
    EXPECT_EQ(transfer.source_end, absl::OkStatus());
    EXPECT_EQ(transfer.received, transfer.sent);
  }
};

std::string Name(const testing::TestParamInfo<bool>& info) {
  return info.param ? "Windows" : "Regions";
}
INSTANTIATE_TEST_SUITE_P(, FailuresTest, testing::Bool(), Name);

// Fails call after call of a host, until a transfer needs fewer calls.
class EachCallTest : public FailuresTest {
 protected:
  // Runs a transfer, one call of which fails. Returns whether it has failed.
  bool RunOne(FakeVerbs& host, uint64_t number) {
    Transfer transfer(kExtentBytes);
    host.FailCall(number);
    absl::Status status = StartSource();
    if (status.ok()) status = Open(transfer);
    if (status.ok()) status = StartPull(transfer);
    if (status.ok()) {
      EXPECT_TRUE(RunUntil([&transfer] { return transfer.pull_end.has_value(); }));
      // The puller has closed its connections, or the source has had none.
      if (transfer.source_end == std::nullopt) Settle();
      if (transfer.source_end == std::nullopt) {
        source_->Revoke(transfer.offer.token, Cancelled("the test ends"));
      }
      EXPECT_TRUE(RunUntil([&transfer] { return transfer.has_ended(); }));
      status = *transfer.pull_end;
      ExpectReleased(transfer);
      if (status.ok()) {
        EXPECT_EQ(transfer.received, transfer.sent);
      }
    }
    host.FailCall(0);
    if (!status.ok()) {
      EXPECT_THAT(status.code(),
                  AnyOf(Code::kResourceExhausted, Code::kUnavailable, Code::kAborted));
      EXPECT_FALSE(FieldOf(status).empty()) << status;
    }
    EXPECT_EQ(source_host_->remote_keys(), 0u);
    source_.reset();
    transfer.pull.reset();
    EXPECT_THAT(source_host_->objects(), IsEmpty());
    EXPECT_THAT(pull_host_->objects(), IsEmpty());
    return !status.ok();
  }

  void FailEachCall(FakeVerbs& host) {
    std::map<std::string, int> failures;
    uint64_t number = 1;
    for (;; ++number) {
      SCOPED_TRACE(number);
      const uint64_t calls = host.calls();
      const bool failed = RunOne(host, number);
      if (host.calls() - calls < number) break;
      SCOPED_TRACE(host.failed_call());
      // Without consequences: a source asks for its events again, and destroys what it disconnects.
      const bool is_repeated = host.failed_call() == "Disconnect" ||
                               (&host == &*source_host_ && host.failed_call() == "GetEvent");
      EXPECT_TRUE(failed || is_repeated);
      if (failed) ++failures[host.failed_call()];
      if (HasFailure()) return;
    }
    EXPECT_GT(number, 50u);
    EXPECT_THAT(failures, testing::Contains(testing::Key("PostSend"))
                              .Times(&host == &*pull_host_ || has_windows_ ? 1 : 0));
    EXPECT_THAT(failures, testing::Contains(testing::Key("RegisterMemory")));
    EXPECT_THAT(failures, testing::Contains(testing::Key("CreateQueuePair")));
  }
};
INSTANTIATE_TEST_SUITE_P(, EachCallTest, testing::Bool(), Name);

TEST_P(EachCallTest, OfTheSource) { FailEachCall(*source_host_); }

TEST_P(EachCallTest, OfThePuller) { FailEachCall(*pull_host_); }

TEST_P(FailuresTest, AWrongKeyIsRefusedAndOtherPullsGoOn) {
  Transfer other({50'000}, 9), transfer({200'000});
  ASSERT_NO_FATAL_FAILURE(StartHeld(other));
  ASSERT_EQ(Open(transfer), absl::OkStatus());
  ASSERT_EQ(StartPull(transfer), absl::OkStatus());
  std::shared_ptr<Pull> pull = std::exchange(transfer.pull, nullptr);
  Settle();
  ASSERT_THAT(transfer.keys, testing::Not(IsEmpty()));
  fabric_.holds_reads = false;
  transfer.keys[1].key ^= 0x10000;
  EXPECT_EQ(pull->AddKeys(transfer.keys), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  EXPECT_THAT(transfer.pull_end, Is(Code::kAborted, "keys"));
  EXPECT_THAT(transfer.arrived, IsEmpty());
  ExpectReleased(transfer);
  ExpectUndisturbed(other);
}

TEST_P(FailuresTest, AKeyGivesNoAccessBehindItsPiece) {
  Transfer transfer({4096, 4096});
  ASSERT_NO_FATAL_FAILURE(Start(transfer));
  std::shared_ptr<Pull> pull = std::exchange(transfer.pull, nullptr);
  Settle();
  ASSERT_THAT(transfer.keys, SizeIs(2));
  transfer.keys[0].address += 1;
  (void)pull->AddKeys(transfer.keys);
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  EXPECT_THAT(transfer.pull_end, Is(Code::kAborted, "keys"));
}

TEST_P(FailuresTest, KeysOfOnePullAreWorthlessInAnother) {
  Transfer victim({100'000}), thief({100'000}, 2);
  ASSERT_NO_FATAL_FAILURE(StartHeld(victim));
  ASSERT_EQ(Open(thief), absl::OkStatus());
  ASSERT_EQ(StartPull(thief), absl::OkStatus());
  std::shared_ptr<Pull> pull = std::exchange(thief.pull, nullptr);
  Settle();
  fabric_.holds_reads = false;
  EXPECT_EQ(pull->AddKeys(victim.keys), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(thief));
  EXPECT_THAT(thief.pull_end, Is(Code::kAborted, "keys"));
  EXPECT_EQ(thief.received[0], std::vector<std::byte>(100'000));
  ExpectUndisturbed(victim);
}

TEST_P(FailuresTest, ARevocationDuringReadsEndsThePullAndLeavesNoKey) {
  Transfer other({50'000}, 9), transfer({1 << 20});
  ASSERT_NO_FATAL_FAILURE(StartHeld(other));
  const size_t other_keys = source_host_->remote_keys();
  ASSERT_NO_FATAL_FAILURE(StartHeld(transfer));
  source_->Revoke(transfer.offer.token, Aborted("sequence", "was evicted", kNoRetry));
  ASSERT_TRUE(RunUntil([&] { return transfer.source_end.has_value(); }));
  EXPECT_EQ(source_host_->remote_keys(), other_keys);
  EXPECT_THAT(transfer.source_end, Is(Code::kAborted, "sequence"));
  EXPECT_EQ(transfer.leases_at_end, 1);
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  EXPECT_THAT(transfer.pull_end, AnyOf(Is(Code::kAborted, "keys"), Is(Code::kUnavailable, "peer")));
  ExpectReleased(transfer);
  ExpectUndisturbed(other);
}

TEST_F(TransferTest, WindowsAreInvalidBeforeTheConnectionEnds) {
  fabric_.holds_reads = true;
  Transfer transfer({1 << 20});
  ASSERT_NO_FATAL_FAILURE(Start(transfer));
  Settle();
  source_->Revoke(transfer.offer.token, Aborted("sequence", "was evicted", kNoRetry));
  while (source_host_->remote_keys() > 0) io_.run_one();
  EXPECT_EQ(transfer.source_end, std::nullopt);
  fabric_.holds_reads = false;
  pull_host_->ReleaseReads(1);
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  EXPECT_THAT(transfer.pull_end, Is(Code::kAborted, "keys"));
}

TEST_P(FailuresTest, ADeadSourceMeansUnavailable) {
  Transfer transfer({1 << 20});
  ASSERT_NO_FATAL_FAILURE(StartHeld(transfer));
  source_.reset();
  EXPECT_EQ(source_host_->objects().size(), 0u);
  EXPECT_EQ(transfer.lease.use_count(), 1);
  ASSERT_TRUE(RunUntil([&] { return transfer.pull_end.has_value(); }));
  EXPECT_THAT(transfer.pull_end, Is(Code::kUnavailable, "peer"));
  EXPECT_EQ(transfer.memories_at_end, 1);
}

TEST_P(FailuresTest, ADeadPullerReleasesTheLeaseAndOtherPullsGoOn) {
  Transfer other({50'000}, 9), transfer({1 << 20});
  ASSERT_NO_FATAL_FAILURE(StartHeld(other));
  ASSERT_NO_FATAL_FAILURE(StartHeld(transfer));
  transfer.pull.reset();
  ASSERT_TRUE(RunUntil([&] { return transfer.source_end.has_value(); }));
  EXPECT_THAT(transfer.source_end, Optional(absl::OkStatus()));  // it had all keys
  EXPECT_EQ(transfer.leases_at_end, 1);
  EXPECT_EQ(transfer.pull_end, std::nullopt);
  EXPECT_EQ(transfer.memory.use_count(), 1);
  ExpectUndisturbed(other);
}

TEST_P(FailuresTest, APullerThatNeverConnectsLosesItsPlaceAtTheDeadline) {
  ASSERT_EQ(StartSource(), absl::OkStatus());
  deadline_ = kvstore::SteadyTime::Now() + absl::Milliseconds(20);
  Transfer transfer({1000});
  ASSERT_EQ(Open(transfer), absl::OkStatus());
  ASSERT_TRUE(RunUntil([&] { return transfer.source_end.has_value(); }));
  EXPECT_THAT(transfer.source_end, Is(Code::kUnavailable, "deadline"));
  EXPECT_EQ(transfer.leases_at_end, 1);
  EXPECT_EQ(source_->pull_count(), 0u);
}

TEST_P(FailuresTest, ASilentPeerMeansUnavailableAtTheDeadline) {
  deadline_ = kvstore::SteadyTime::Now() + absl::Milliseconds(200);
  fabric_.is_silent = true;
  Transfer never_connected({1 << 20});
  ASSERT_NO_FATAL_FAILURE(Start(never_connected));
  fabric_.is_silent = false;
  Transfer transfer({1 << 20});
  ASSERT_NO_FATAL_FAILURE(StartHeld(transfer));
  fabric_.is_silent = true;
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(never_connected));
  for (const Transfer* each : {&transfer, &never_connected}) {
    EXPECT_THAT(each->pull_end, Is(Code::kUnavailable, "deadline"));
    EXPECT_THAT(each->source_end, Is(Code::kUnavailable, "deadline"));
    ExpectReleased(*each);
  }
}

TEST_P(FailuresTest, BytesThatArriveChangedAreDataLoss) {
  pull_host_->CorruptReads();
  Transfer transfer(kExtentBytes);
  ASSERT_NO_FATAL_FAILURE(Start(transfer));
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  EXPECT_THAT(transfer.pull_end, Is(Code::kDataLoss));
  EXPECT_THAT(transfer.arrived, IsEmpty());
  ExpectReleased(transfer);
}

TEST_P(FailuresTest, AnAddressWithoutARouteIsUnavailable) {
  ASSERT_EQ(StartSource(), absl::OkStatus());
  fabric_.has_route = false;
  Transfer transfer({1000});
  ASSERT_EQ(Open(transfer), absl::OkStatus());
  ASSERT_EQ(StartPull(transfer), absl::OkStatus());
  ASSERT_TRUE(RunUntil([&] { return transfer.pull_end.has_value(); }));
  EXPECT_THAT(transfer.pull_end, Is(Code::kUnavailable, "offer.rails"));
  EXPECT_EQ(transfer.memories_at_end, 1);
}

TEST_P(FailuresTest, AForeignTokenIsDenied) {
  ASSERT_EQ(StartSource(), absl::OkStatus());
  Transfer transfer({1000});
  ASSERT_EQ(Open(transfer), absl::OkStatus());
  transfer.offer.token[3] ^= std::byte{1};
  ASSERT_EQ(StartPull(transfer), absl::OkStatus());
  ASSERT_TRUE(RunUntil([&] { return transfer.pull_end.has_value(); }));
  EXPECT_THAT(transfer.pull_end, Is(Code::kPermissionDenied, "offer.token"));
  EXPECT_EQ(source_host_->remote_keys(), 0u);
  EXPECT_EQ(source_->pull_count(), 1u);  // until its deadline
}

TEST_P(FailuresTest, ATokenIsOfOnePuller) {
  Transfer transfer({1000}), second({1000});
  ASSERT_NO_FATAL_FAILURE(StartHeld(transfer));
  second.offer = transfer.offer;
  ASSERT_EQ(StartPull(second), absl::OkStatus());
  ASSERT_TRUE(RunUntil([&] { return second.pull_end.has_value(); }));
  EXPECT_THAT(second.pull_end, Is(Code::kInvalidArgument, "offer.token"));
  ExpectUndisturbed(transfer);
}

// Hosts whose first ports have different MTUs.
class MtuTest : public TransferTest {
 protected:
  void Run(ibv_mtu source, ibv_mtu puller, Transfer& transfer) {
    std::vector<FakeDevice> devices = Devices("10.0.0.");
    devices[0].mtu = source;
    source_host_.emplace(fabric_, devices);
    devices = Devices("10.0.1.");
    devices[0].mtu = puller;
    pull_host_.emplace(fabric_, devices);
    ASSERT_NO_FATAL_FAILURE(Start(transfer));
    ASSERT_TRUE(RunUntil([&] { return transfer.pull_end.has_value(); }));
  }
};

TEST_F(MtuTest, ASmallerMtuAtTheSourceIsRefused) {
  Transfer transfer({1 << 20});
  ASSERT_NO_FATAL_FAILURE(Run(IBV_MTU_1024, IBV_MTU_4096, transfer));
  EXPECT_THAT(transfer.pull_end, Is(Code::kFailedPrecondition, "offer.rails.mtu"));
  EXPECT_EQ(TextOf(*transfer.pull_end), "4096 bytes here, at most 1024 at the source");
}

TEST_F(MtuTest, ASmallerMtuAtThePullerIsThatOfTheConnection) {
  Transfer transfer({1 << 20});
  ASSERT_NO_FATAL_FAILURE(Run(IBV_MTU_4096, IBV_MTU_1024, transfer));
  EXPECT_EQ(transfer.pull_end, absl::OkStatus());
}

// Private data as another version, or another program, sends them.
class HelloTest : public TransferTest {
 protected:
  void Run(Hello hello, size_t bytes, Transfer& transfer) {
    ASSERT_EQ(StartSource(), absl::OkStatus());
    ASSERT_EQ(Open(transfer), absl::OkStatus());
    hello.token = transfer.offer.token;
    pull_host_->ReplacePrivateData(std::as_bytes(std::span(&hello, 1)).first(bytes));
    ASSERT_EQ(StartPull(transfer), absl::OkStatus());
    ASSERT_TRUE(RunUntil([&] { return transfer.pull_end.has_value(); }));
  }
};

TEST_F(HelloTest, APeerOfAnotherVersionIsRefused) {
  Transfer transfer({1000});
  ASSERT_NO_FATAL_FAILURE(Run({.version = 2}, sizeof(Hello), transfer));
  EXPECT_THAT(transfer.pull_end, Is(Code::kFailedPrecondition, "offer.version"));
}

TEST_F(HelloTest, AnotherProtocolIsRefused) {
  Transfer transfer({1000});
  ASSERT_NO_FATAL_FAILURE(Run({.magic = 7}, sizeof(Hello), transfer));
  EXPECT_THAT(transfer.pull_end, Is(Code::kPermissionDenied));
}

TEST_F(HelloTest, ShortPrivateDataAreRefused) {
  Transfer transfer({1000});
  ASSERT_NO_FATAL_FAILURE(Run({}, sizeof(Hello) - 1, transfer));
  EXPECT_THAT(transfer.pull_end, Is(Code::kPermissionDenied));
}

TEST_F(HelloTest, AConnectionThatWasNotOfferedIsRefused) {
  Transfer transfer({1000});
  ASSERT_NO_FATAL_FAILURE(Run({.connection = 4}, sizeof(Hello), transfer));
  EXPECT_THAT(transfer.pull_end, Is(Code::kInvalidArgument, "offer.token"));
}

TEST_F(TransferTest, ADeviceWithoutReadsIsRefused) {
  std::vector<FakeDevice> devices = Devices("10.0.0.");
  devices[1].max_reads = 0;
  source_host_.emplace(fabric_, devices);
  const absl::Status status = StartSource();
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(FieldOf(status), "addresses[1]");
}

}  // namespace
}  // namespace pqcached::service::rdma
