// Two hosts of a fake fabric, and transfers between them.
#ifndef PQCACHED_TESTS_SERVICE_RDMA_TRANSFER_FIXTURE_H_
#define PQCACHED_TESTS_SERVICE_RDMA_TRANSFER_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/crc32c.h"
#include "service/base/refusal.h"
#include "service/rdma/pull.h"
#include "service/rdma/source.h"
#include "tests/service/rdma/fake_verbs.h"

namespace pqcached::service::rdma {

// Sizes that meet every border: of pages, keys, regions and messages.
inline const std::vector<size_t> kExtentBytes = {1, 4096, 65536, 200'001, 131'072, 4095, 300'000};

// One transfer, as both callers see it.
struct Transfer {
  explicit Transfer(const std::vector<size_t>& sizes, uint8_t seed = 1) {
    for (const size_t size : sizes) {
      std::vector<std::byte>& bytes = sent.emplace_back(size);
      for (size_t index = 0; index < size; ++index) {
        bytes[index] = static_cast<std::byte>(index * 7 + size + seed);
      }
      received.emplace_back(size);
    }
  }

  std::vector<std::vector<std::byte>> sent;
  std::vector<std::vector<std::byte>> received;
  std::shared_ptr<int> lease = std::make_shared<int>();
  std::shared_ptr<int> memory = std::make_shared<int>();
  std::optional<absl::Status> source_end;
  std::optional<absl::Status> pull_end;
  long leases_at_end = -1;  // references to `lease` when the source had ended
  long memories_at_end = -1;
  std::vector<uint32_t> arrived;
  std::vector<Key> keys;
  Offer offer;
  std::shared_ptr<Pull> pull;

  bool has_ended() const { return source_end.has_value() && pull_end.has_value(); }
};

class TransferTest : public testing::Test {
 protected:
  TransferTest() : TransferTest(true) {}
  explicit TransferTest(bool has_windows) : has_windows_(has_windows) {
    source_host_.emplace(fabric_, Devices("10.0.0."));
    pull_host_.emplace(fabric_, Devices("10.0.1."));
  }
  ~TransferTest() override {
    source_.reset();
    EXPECT_THAT(source_host_->objects(), testing::IsEmpty());
    EXPECT_THAT(pull_host_->objects(), testing::IsEmpty());
    EXPECT_THAT(source_host_->violations(), testing::IsEmpty());
    EXPECT_THAT(pull_host_->violations(), testing::IsEmpty());
  }

  std::vector<FakeDevice> Devices(const std::string& prefix) const {
    std::vector<FakeDevice> devices(2);
    for (FakeDevice& device : devices) {
      device = {.address = prefix + std::to_string(&device - devices.data() + 1),
                .max_region_bytes = 128 << 10,
                .max_message_bytes = 20'000,
                .max_reads = 4,
                .has_windows = has_windows_};
    }
    devices[1].max_region_bytes = 100 << 10;
    return devices;
  }

  absl::Status StartSource() {
    absl::StatusOr<std::unique_ptr<Source>> made = Source::Create(
        *source_host_, io_,
        {.addresses = {"10.0.0.1", "10.0.0.2"}, .key_bytes = 64 << 10, .step_bytes = 150'000});
    if (!made.ok()) return made.status();
    source_ = *std::move(made);
    return absl::OkStatus();
  }

  absl::Status Open(Transfer& transfer) {
    GrantRequest request = {.peer = "host-b", .extents = {}, .lease = transfer.lease};
    for (const auto& bytes : transfer.sent) request.extents.push_back(bytes);
    request.deadline = deadline_;
    request.granted = [&transfer](std::span<const Key> keys) {
      transfer.keys.insert(transfer.keys.end(), keys.begin(), keys.end());
      if (transfer.pull != nullptr) (void)transfer.pull->AddKeys(keys);
    };
    request.ended = [&transfer](const absl::Status& status) {
      EXPECT_FALSE(transfer.source_end.has_value());
      transfer.source_end = status;
      transfer.leases_at_end = transfer.lease.use_count();
    };
    absl::StatusOr<Offer> offer = source_->Open(std::move(request));
    if (!offer.ok()) return offer.status();
    transfer.offer = *std::move(offer);
    return absl::OkStatus();
  }

  absl::Status StartPull(Transfer& transfer) {
    PullRequest request = {.offer = transfer.offer, .targets = {}, .memory = transfer.memory};
    for (size_t index = 0; index < transfer.received.size(); ++index) {
      request.targets.push_back({transfer.received[index],
                                 kernels::Crc32c({}, transfer.sent[index]),
                                 static_cast<uint32_t>(index / 2)});
    }
    request.deadline = deadline_;
    request.arrived = [&transfer](uint32_t part) {
      for (size_t index = 2 * part; index < std::min<size_t>(2 * part + 2, transfer.sent.size());
           ++index) {
        EXPECT_EQ(transfer.received[index], transfer.sent[index]);
      }
      transfer.arrived.push_back(part);
    };
    request.ended = [&transfer](const absl::Status& status) {
      EXPECT_FALSE(transfer.pull_end.has_value());
      transfer.pull_end = status;
      transfer.memories_at_end = transfer.memory.use_count();
    };
    absl::StatusOr<std::shared_ptr<Pull>> pull =
        Pull::Start(*pull_host_, io_, {.addresses = {"10.0.1.1", "10.0.1.2"}}, std::move(request));
    if (!pull.ok()) return pull.status();
    transfer.pull = *std::move(pull);
    return absl::OkStatus();
  }

  void Start(Transfer& transfer) {
    if (source_ == nullptr) {
      ASSERT_EQ(StartSource(), absl::OkStatus());
    }
    ASSERT_EQ(Open(transfer), absl::OkStatus());
    ASSERT_EQ(StartPull(transfer), absl::OkStatus());
  }

  // Runs handlers until `is_done`; returns whether that happened.
  bool RunUntil(const std::function<bool()>& is_done) {
    while (!is_done()) {
      io_.restart();
      if (io_.run_one_for(std::chrono::seconds(30)) == 0) return false;
    }
    return true;
  }
  void RunToTheEnd(Transfer& transfer) {
    ASSERT_TRUE(RunUntil([&transfer] { return transfer.has_ended(); }));
  }
  // Runs the handlers that are ready.
  void Settle() {
    io_.restart();
    io_.poll();
  }

  // Both ends have released what they held, before they said that they have ended.
  static void ExpectReleased(const Transfer& transfer) {
    EXPECT_EQ(transfer.leases_at_end, 1);
    EXPECT_EQ(transfer.memories_at_end, 1);
  }

  const bool has_windows_;
  FakeFabric fabric_;
  std::optional<FakeVerbs> source_host_;
  std::optional<FakeVerbs> pull_host_;
  boost::asio::io_context io_;
  std::unique_ptr<Source> source_;
  kvstore::SteadyTime deadline_ = kvstore::SteadyTime::Now() + absl::Minutes(10);
};

// With memory windows, and without.
class BothKindsTest : public TransferTest, public testing::WithParamInterface<bool> {
 protected:
  BothKindsTest() : TransferTest(GetParam()) {}
};

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_TESTS_SERVICE_RDMA_TRANSFER_FIXTURE_H_
