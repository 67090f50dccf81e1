// Transfers that work, and requests that are refused.
#include <algorithm>
#include <cstring>
#include <limits>

#include "tests/service/rdma/transfer_fixture.h"

namespace pqcached::service::rdma {
namespace {

using testing::ElementsAre;
using testing::Eq;
using testing::Optional;

std::string Name(const testing::TestParamInfo<bool>& info) {
  return info.param ? "Windows" : "Regions";
}
INSTANTIATE_TEST_SUITE_P(, BothKindsTest, testing::Bool(), Name);

TEST_P(BothKindsTest, ReadsAllBytesOverAllRails) {
  Transfer transfer(kExtentBytes);
  ASSERT_NO_FATAL_FAILURE(Start(transfer));
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  EXPECT_THAT(transfer.pull_end, Optional(absl::OkStatus()));
  EXPECT_THAT(transfer.source_end, Optional(absl::OkStatus()));
  EXPECT_EQ(transfer.received, transfer.sent);
  EXPECT_THAT(transfer.arrived, ElementsAre(0, 1, 2, 3));
  ExpectReleased(transfer);
  EXPECT_GT(pull_host_->reads_of("10.0.1.1"), 0u);
  EXPECT_GT(pull_host_->reads_of("10.0.1.2"), 0u);
  EXPECT_EQ(source_host_->remote_keys(), 0u);
  EXPECT_EQ(source_->pull_count(), 0u);
}

TEST_P(BothKindsTest, KeysCoverTheExtentsInOrderAndUseConnectionsByTurns) {
  Transfer transfer(kExtentBytes);
  ASSERT_NO_FATAL_FAILURE(Start(transfer));
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  uint32_t extent = 0;
  uint64_t offset = 0;
  for (size_t index = 0; index < transfer.keys.size(); ++index) {
    const Key& key = transfer.keys[index];
    EXPECT_EQ(key.extent_index, extent);
    EXPECT_EQ(key.offset_bytes, offset);
    EXPECT_EQ(key.connection, index % 4);
    EXPECT_LE(key.bytes, 64u << 10);
    // The smaller device's regions have 100 KiB.
    EXPECT_EQ(offset / (100 << 10), (offset + key.bytes - 1) / (100 << 10));
    offset += key.bytes;
    if (offset < kExtentBytes[extent]) continue;
    ++extent;
    offset = 0;
  }
  EXPECT_EQ(extent, kExtentBytes.size());
}

TEST_P(BothKindsTest, ReadsInFlightStayWithinTheCreditsOfBothDevices) {
  fabric_.holds_reads = true;
  Transfer transfer({1 << 20});
  ASSERT_NO_FATAL_FAILURE(Start(transfer));
  Settle();
  EXPECT_EQ(pull_host_->held_reads(), 4u * 4u);  // lanes, READs that the source allows
  while (!transfer.has_ended()) {
    pull_host_->ReleaseReads(1);
    Settle();
  }
  EXPECT_THAT(transfer.pull_end, Optional(absl::OkStatus()));
  EXPECT_EQ(pull_host_->most_reads_in_flight(), 4u);
}

TEST_P(BothKindsTest, AnEarlyPartArrivesBeforeALaterOneIsRead) {
  fabric_.holds_reads = true;
  Transfer transfer({50'000, 50'000, 1 << 20, 1 << 20});
  ASSERT_NO_FATAL_FAILURE(Start(transfer));
  size_t released = 0;
  while (transfer.arrived.empty()) {
    Settle();
    pull_host_->ReleaseReads(1);
    ++released;
  }
  // Keys of 64 KiB are READs of 20 KB: an eighth of all is more than the first part and what the
  // lanes had in flight.
  EXPECT_LT(released, 110u / 4);
  EXPECT_THAT(transfer.arrived, ElementsAre(0));
  fabric_.holds_reads = false;
  pull_host_->ReleaseReads(1000);
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  EXPECT_EQ(transfer.received, transfer.sent);
}

TEST_P(BothKindsTest, TargetsAreRegisteredOnlyWhileTheyAreRead) {
  fabric_.holds_reads = true;
  Transfer transfer(std::vector<size_t>(100, 16'000));
  ASSERT_NO_FATAL_FAILURE(Start(transfer));
  while (!transfer.has_ended()) {
    Settle();
    EXPECT_LE(pull_host_->objects()["region"], 17);
    pull_host_->ReleaseReads(1);
  }
  EXPECT_EQ(transfer.received, transfer.sent);
}

TEST_F(TransferTest, ConcurrentPullsShareTheRegistrationOfAnExtent) {
  fabric_.holds_reads = true;
  Transfer first({100'000}), second({1});
  ASSERT_NO_FATAL_FAILURE(Start(first));
  Settle();
  const uint64_t regions = source_host_->regions_made();
  EXPECT_GT(regions, 0u);
  second.sent[0] = std::move(first.sent[0]);  // the same bytes at the same place
  first.sent[0] = second.sent[0];
  second.received[0].resize(second.sent[0].size());
  ASSERT_NO_FATAL_FAILURE(Start(second));
  Settle();
  EXPECT_EQ(source_host_->regions_made(), regions);
  fabric_.holds_reads = false;
  pull_host_->ReleaseReads(1000);
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(first));
  ASSERT_NO_FATAL_FAILURE(RunToTheEnd(second));
  EXPECT_EQ(second.received, second.sent);
}

TEST_F(TransferTest, ManyPullsAtATime) {
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (uint8_t seed = 0; seed < 64; ++seed) {
    transfers.push_back(std::make_unique<Transfer>(std::vector<size_t>{30'000, 70'000}, seed));
    ASSERT_NO_FATAL_FAILURE(Start(*transfers.back()));
  }
  Transfer one_too_many({1});
  const absl::Status status = Open(one_too_many);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(FieldOf(status), "max_pulls");
  for (const auto& transfer : transfers) {
    ASSERT_NO_FATAL_FAILURE(RunToTheEnd(*transfer));
    EXPECT_EQ(transfer->received, transfer->sent);
  }
  EXPECT_EQ(Open(one_too_many), absl::OkStatus());
}

TEST_F(TransferTest, ASourceRefusesBadOptions) {
  const auto field = [this](Source::Options options) {
    const absl::Status status = Source::Create(*source_host_, io_, std::move(options)).status();
    return FieldOf(status);
  };
  EXPECT_EQ(field({}), "addresses");
  EXPECT_EQ(field({.addresses = std::vector<std::string>(17, "10.0.0.1")}), "addresses");
  EXPECT_EQ(field({.addresses = {"10.0.0.1", "host"}}), "addresses[1]");
  EXPECT_EQ(field({.addresses = {"10.0.0.3"}}), "addresses[0]");  // of no device
  EXPECT_EQ(field({.addresses = {"10.0.0.1"}, .key_bytes = 0}), "key_bytes");
  EXPECT_EQ(field({.addresses = {"10.0.0.1"}, .key_bytes = 4095}), "key_bytes");
}

TEST_F(TransferTest, ASourceGrantsNothingWithoutAnIdentityOrForABadRequest) {
  ASSERT_EQ(StartSource(), absl::OkStatus());
  const std::vector<std::byte> bytes(10);
  const auto refusal = [&](std::string peer, std::vector<std::span<const std::byte>> extents,
                           uint32_t connections) {
    const absl::Status status = source_
                                    ->Open({.peer = std::move(peer),
                                            .extents = std::move(extents),
                                            .connection_count = connections})
                                    .status();
    return std::pair(status.code(), FieldOf(status));
  };
  using Code = absl::StatusCode;
  EXPECT_EQ(refusal("", {bytes}, 1), std::pair(Code::kUnauthenticated, std::string("peer")));
  EXPECT_EQ(refusal("b", {}, 1), std::pair(Code::kInvalidArgument, std::string("extents")));
  EXPECT_EQ(refusal("b", {bytes, {}}, 1),
            std::pair(Code::kInvalidArgument, std::string("extents[1]")));
  EXPECT_EQ(refusal("b", {bytes}, 0),
            std::pair(Code::kInvalidArgument, std::string("connection_count")));
  EXPECT_EQ(refusal("b", {bytes}, 65),
            std::pair(Code::kInvalidArgument, std::string("connection_count")));
  EXPECT_EQ(source_->pull_count(), 0u);
}

TEST_F(TransferTest, APullRefusesABadRequest) {
  std::vector<std::byte> bytes(10);
  const Offer offer = {.connection_count = 1, .rails = {{"10.0.0.1", 1}}};
  const auto field = [&](const Offer& offered, std::vector<PullTarget> targets,
                         Pull::Options options = {}) {
    const absl::Status status =
        Pull::Start(*pull_host_, io_, std::move(options),
                    {.offer = offered, .targets = std::move(targets), .memory = nullptr})
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return FieldOf(status);
  };
  const std::vector<PullTarget> good = {{.memory = bytes}};
  EXPECT_EQ(field({.connection_count = 1}, good), "offer.rails");
  EXPECT_EQ(field({.connection_count = 1, .rails = std::vector<Rail>(17)}, good), "offer.rails");
  EXPECT_EQ(field({.connection_count = 1, .rails = {{"x", 1}}}, good), "offer.rails[0]");
  EXPECT_EQ(field({.connection_count = 0, .rails = offer.rails}, good), "offer.connection_count");
  EXPECT_EQ(field({.connection_count = 65, .rails = offer.rails}, good), "offer.connection_count");
  EXPECT_EQ(field(offer, {}), "targets");
  EXPECT_EQ(field(offer, {{.memory = bytes}, {}}), "targets[1]");
  EXPECT_EQ(field(offer, {{.memory = bytes, .part_index = 2}}), "targets[0].part_index");
  EXPECT_EQ(field(offer, {{.memory = bytes, .part_index = 1}, {.memory = bytes}}),
            "targets[1].part_index");
  EXPECT_EQ(field(offer, good, {.addresses = {"x"}}), "addresses[0]");
  EXPECT_EQ(field(offer, good, {.max_reads_in_flight = 256}), "max_reads_in_flight");
  EXPECT_EQ(field(offer, good, {.read_bytes = 0}), "read_bytes");
}

TEST_F(TransferTest, KeysThatDoNotFitEndThePull) {
  fabric_.holds_reads = true;
  using Change = std::function<void(std::vector<Key>&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"keys.extent_index", [](auto& keys) { keys[0].extent_index = 1; }},
      {"keys.extent_index", [](auto& keys) { keys.push_back(keys.back()); }},
      {"keys.extent_index", [](auto& keys) { keys.back().extent_index = UINT32_MAX; }},
      {"keys.connection", [](auto& keys) { keys[0].connection = 4; }},
      {"keys.offset_bytes", [](auto& keys) { keys.erase(keys.begin()); }},
      {"keys.offset_bytes", [](auto& keys) { keys[1].offset_bytes = UINT64_MAX; }},
      {"keys.bytes", [](auto& keys) { keys[0].bytes = 0; }},
      {"keys.bytes", [](auto& keys) { keys[0].bytes = UINT64_MAX; }},
      {"keys.bytes", [](auto& keys) { keys[0].bytes = 4095; }},
  };
  for (size_t index = 0; index < changes.size(); ++index) {
    SCOPED_TRACE(index);
    Transfer honest({100'000}), transfer({100'000});
    ASSERT_NO_FATAL_FAILURE(Start(honest));
    Settle();
    ASSERT_EQ(Open(transfer), absl::OkStatus());
    ASSERT_EQ(StartPull(transfer), absl::OkStatus());
    std::vector<Key> keys = honest.keys;
    changes[index].second(keys);
    const absl::Status status = transfer.pull->AddKeys(keys);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(FieldOf(status), changes[index].first);
    ASSERT_TRUE(RunUntil([&] { return transfer.pull_end.has_value(); }));
    EXPECT_THAT(transfer.pull_end, Optional(Eq(status)));
    EXPECT_EQ(transfer.memories_at_end, 1);
    source_->Revoke(transfer.offer.token, Aborted("", "the test ends", kNoRetry));
    honest.pull->Cancel(Cancelled("the test ends"));
    ASSERT_NO_FATAL_FAILURE(RunToTheEnd(honest));
    ASSERT_NO_FATAL_FAILURE(RunToTheEnd(transfer));
  }
}

TEST(VerbsTest, AHostWithoutRdmaHasNoVerbs) {
  const absl::StatusOr<std::unique_ptr<Verbs>> verbs = LoadVerbs();
  if (verbs.ok()) {
    EXPECT_NE(*verbs, nullptr);
  } else {
    EXPECT_EQ(verbs.status().code(), absl::StatusCode::kUnimplemented);
  }
}

}  // namespace
}  // namespace pqcached::service::rdma
