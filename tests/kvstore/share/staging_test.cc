// The staging ring: limits, claims and generations, and clients that pull at its memory.
#include "kvstore/share/staging.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <thread>

#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;

constexpr size_t kSlot = size_t{1} << 20;

std::shared_ptr<StagingRing> MakeRing(uint32_t slots = 2) {
  auto ring = StagingRing::Create(kSlot, slots, size_t{16} << 20);
  EXPECT_TRUE(ring.ok()) << ring.status();
  return *std::move(ring);
}

// The client's side.
class ClientView {
 public:
  explicit ClientView(const StagingRing& ring) : shared_(*ring.Share()) {
    data_ = static_cast<std::byte*>(mmap(nullptr, shared_.size_bytes, PROT_READ | PROT_WRITE,
                                         MAP_SHARED, shared_.descriptor.get(), 0));
    EXPECT_NE(static_cast<void*>(data_), MAP_FAILED);
  }
  ~ClientView() { munmap(data_, shared_.size_bytes); }
  ClientView(const ClientView&) = delete;
  ClientView& operator=(const ClientView&) = delete;
  std::byte* data() { return data_; }
  int descriptor() const { return shared_.descriptor.get(); }

 private:
  SharedMemory shared_;
  std::byte* data_;
};

TEST(StagingRing, WhatTheClientWritesIsRead) {
  const auto ring = MakeRing();
  ClientView client(*ring);
  std::memset(client.data() + kSlot, 7, kSlot);
  const auto claimed =
      ring->Claim({.slot = 1, .offset_bytes = 10, .size_bytes = 20, .generation = 1});
  ASSERT_TRUE(claimed.ok()) << claimed.status();
  EXPECT_EQ(claimed->bytes.size(), 20u);
  EXPECT_EQ(claimed->slot.size(), kSlot);
  EXPECT_EQ(claimed->bytes.data(), claimed->slot.data() + 10);
  EXPECT_EQ(claimed->bytes[19], std::byte{7});
}

TEST(StagingRing, ASlotInFlightIsRefusedUntilItsCallEnds) {
  const auto ring = MakeRing();
  auto claimed = ring->Claim({.slot = 0, .size_bytes = 8, .generation = 1});
  ASSERT_TRUE(claimed.ok());
  const auto again = ring->Claim({.slot = 0, .size_bytes = 8, .generation = 2});
  EXPECT_EQ(again.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldOf(again.status()), "slot");
  EXPECT_TRUE(ring->Claim({.slot = 1, .size_bytes = 8, .generation = 1}).ok());
  claimed->claim.reset();
  EXPECT_TRUE(ring->Claim({.slot = 0, .size_bytes = 8, .generation = 2}).ok());
}

TEST(StagingRing, StaleGenerationsAreRefused) {
  const auto ring = MakeRing();
  EXPECT_TRUE(ring->Claim({.slot = 0, .size_bytes = 8, .generation = 5}).ok());
  for (const uint64_t stale : {uint64_t{0}, uint64_t{4}, uint64_t{5}}) {
    const auto claimed = ring->Claim({.slot = 0, .size_bytes = 8, .generation = stale});
    EXPECT_EQ(claimed.status().code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(FieldOf(claimed.status()), "generation");
  }
  EXPECT_TRUE(ring->Claim({.slot = 0, .size_bytes = 8, .generation = 6}).ok());
}

TEST(StagingRing, TheControlMemoryTellsWhenAClaimIsOver) {
  const std::shared_ptr<const ControlMemory> control = *ControlMemory::Create(1, /*boot_word=*/7);
  const auto ring = *StagingRing::Create(kSlot, 2, size_t{16} << 20, control);
  auto claimed = ring->Claim({.slot = 1, .size_bytes = 8, .generation = 5});
  ASSERT_TRUE(claimed.ok());
  EXPECT_EQ(control->slot_word(1).load(), 0u);
  claimed->claim.reset();
  EXPECT_EQ(control->slot_word(1).load(), 6u);
  EXPECT_FALSE(ring->Claim({.slot = 1, .size_bytes = 8, .generation = 5}).ok());  // stale
  EXPECT_EQ(control->slot_word(1).load(), 6u);
  EXPECT_EQ(control->slot_word(0).load(), 0u);
}

TEST(StagingRing, RangesOutsideASlotAreRefusedAndClaimNothing) {
  const auto ring = MakeRing();
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  const auto refused = [&](StagingReference reference) {
    reference.generation = 1;
    return ring->Claim(reference).status().code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused({.slot = 2, .size_bytes = 1}));
  EXPECT_TRUE(refused({.slot = ~0u, .size_bytes = 1}));
  EXPECT_TRUE(refused({.slot = 0, .offset_bytes = kSlot, .size_bytes = 1}));
  EXPECT_TRUE(refused({.slot = 0, .offset_bytes = 1, .size_bytes = kSlot}));
  EXPECT_TRUE(refused({.slot = 0, .offset_bytes = most, .size_bytes = 2}));
  EXPECT_TRUE(refused({.slot = 0, .offset_bytes = 2, .size_bytes = most}));
  EXPECT_TRUE(ring->Claim({.slot = 0, .size_bytes = kSlot, .generation = 1}).ok());
}

TEST(StagingRing, SizesHaveLimits) {
  const auto code = [](uint64_t slot_bytes, uint32_t count, size_t most) {
    return StagingRing::Create(slot_bytes, count, most).status().code();
  };
  EXPECT_EQ(code(0, 1, kSlot), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kSlot + 4096, 1, kSlot), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kSlot, 0, kSlot), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kSlot, kMaxStagingSlots + 1, ~size_t{0}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kSlot, 2, 2 * kSlot - 1), StatusCode::kResourceExhausted);
  EXPECT_EQ(code(uint64_t{1} << 63, 2, size_t{1} << 30), StatusCode::kResourceExhausted);
}

TEST(StagingRing, TheClientCanNeitherResizeNorSealIt) {
  const auto ring = MakeRing();
  ClientView client(*ring);
  EXPECT_NE(ftruncate(client.descriptor(), 0), 0);
  EXPECT_NE(ftruncate(client.descriptor(), 64 << 20), 0);
  EXPECT_NE(fcntl(client.descriptor(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(StagingRing, HolesThatTheClientPunchesReadAsZerosWhileTheyAreRead) {
  const auto ring = MakeRing();
  ClientView client(*ring);
  std::memset(client.data(), 9, kSlot);
  const auto claimed = ring->Claim({.slot = 0, .size_bytes = kSlot, .generation = 1});
  ASSERT_TRUE(claimed.ok());
  std::thread puncher([&] {
    for (int round = 0; round < 50; ++round) {
      fallocate(client.descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kSlot);
    }
  });
  for (int round = 0; round < 50; ++round) {
    for (size_t i = 0; i < kSlot; i += 512) {
      const std::byte value = claimed->bytes[i];
      ASSERT_TRUE(value == std::byte{9} || value == std::byte{0});
    }
  }
  puncher.join();
  EXPECT_EQ(claimed->bytes[kSlot - 1], std::byte{0});
}

TEST(StagingRing, AClaimOutlivesTheRingOfADeadClient) {
  auto ring = MakeRing();
  {
    ClientView client(*ring);
    std::memset(client.data(), 3, kSlot);
  }
  const auto claimed = ring->Claim({.slot = 0, .size_bytes = kSlot, .generation = 1});
  ASSERT_TRUE(claimed.ok());
  ring.reset();
  EXPECT_EQ(claimed->bytes[kSlot - 1], std::byte{3});
}

}  // namespace
}  // namespace pqcached::kvstore
