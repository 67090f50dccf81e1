// The rows of steps on their way: by way of staging, and otherwise where that is not to be had.
#include <gtest/gtest.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "client/local/session.h"
#include "client/local/step_slots.h"
#include "kvstore/share/control_memory.h"
#include "kvstore/share/staging.h"
#include "tests/client/step/step_fixture.h"

namespace pqcached {
namespace {

using client::StepSlots;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;

class StepRowsTest : public testing::StepTest {
 protected:
  static constexpr uint64_t kPrompt = 300;

  // Steps at [begin, end), one token each.
  void DecodeAll(Sequence& sequence, const Layer& layer, uint64_t begin, uint64_t end) {
    for (uint64_t position = begin; position < end; ++position) {
      MustBeOk(Decode(sequence, layer, position));
    }
  }
};

TEST_F(StepRowsTest, RowsOfStepsTravelThroughStaging) {
  const Layer layer(420, 1);
  Sequence sequence = Fill(layer, kPrompt);
  DecodeAll(sequence, layer, kPrompt, 400);
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, kPrompt, 400);
  EXPECT_EQ(sidecar_.staged_appends, 100u);
  EXPECT_EQ(sidecar_.inline_appends, 0u);
}

TEST_F(StepRowsTest, TheFirstStepsOfAClientThatNeverStagedGoInlineOrStaged) {
  const Layer layer(40, 2);
  Sequence sequence = Must(cache_.CreateSequence());
  for (uint64_t position = 0; position < 20; ++position) {
    MustBeOk(EndOnly(sequence, layer, position, 1));
    MustBeOk(sequence.Flush());
  }
  ExpectRows(sequence, layer, 0, 20);
  EXPECT_EQ(sidecar_.staged_appends + sidecar_.inline_appends, 20u);
  EXPECT_GE(sidecar_.staged_appends, 19u);  // the ring is open from the first one on
}

TEST_F(StepRowsTest, RowsThatFindNoRoomInStagingTravelInline) {
  // 8 tokens of both layers take 12 KiB, and two slots of a MiB are for steps.
  const Layer layer(320, 3);
  Sequence sequence = Fill(layer, kPrompt);
  sidecar_.CloseGate();
  DecodeAll(sequence, layer, kPrompt, 310);
  std::vector<Sequence> others;
  const Layer other(80, 4);
  for (int i = 0; i < 40; ++i) others.push_back(Must(cache_.CreateSequence()));
  for (int round = 0; round < 10; ++round) {
    for (Sequence& each : others) MustBeOk(EndOnly(each, other, uint64_t{8} * round, 8));
  }
  sidecar_.OpenGate();
  MustBeOk(sequence.Flush());
  for (Sequence& each : others) MustBeOk(each.Flush());
  EXPECT_GT(sidecar_.staged_appends, 0u);
  EXPECT_GT(sidecar_.inline_appends, 0u);
  ExpectRows(sequence, layer, kPrompt, 310);
  for (Sequence& each : others) ExpectRows(each, other, 0, 80);
}

TEST_F(StepRowsTest, WhatTheSidecarRefusesToReadFromStagingIsSentInline) {
  const Layer layer(420, 5);
  Sequence sequence = Fill(layer, kPrompt);
  sidecar_.refuse_staging = true;
  DecodeAll(sequence, layer, kPrompt, 320);
  MustBeOk(sequence.Flush());
  sidecar_.refuse_staging = false;
  DecodeAll(sequence, layer, 320, 340);
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, kPrompt, 340);
  EXPECT_EQ(sidecar_.inline_appends, 20u);
  EXPECT_EQ(sidecar_.staged_appends, 20u);
}

TEST_F(StepRowsTest, LostAnswersAndRefusalsForNowAreRepeatedFromTheSameBytes) {
  const Layer layer(420, 6);
  Sequence sequence = Fill(layer, kPrompt);
  sidecar_.lost_answers = 2;
  sidecar_.unavailable_appends = 2;
  DecodeAll(sequence, layer, kPrompt, 340);
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, kPrompt, 340);
  EXPECT_EQ(sidecar_.inline_appends, 0u);
}

TEST_F(StepRowsTest, ASlotThatTheSidecarMayStillReadIsNotWrittenAgain) {
  const Layer layer(900, 7);
  Sequence sequence = Fill(layer, kPrompt);
  sidecar_.unanswered_appends = 1;
  MustBeOk(Decode(sequence, layer, kPrompt));
  MustBeOk(sequence.Flush());  // inline: the slot is in flight
  EXPECT_EQ(sidecar_.inline_appends, 1u);
  for (uint64_t position = kPrompt + 1; position < 330; ++position) {
    MustBeOk(Decode(sequence, layer, position));
    MustBeOk(sequence.Flush());
  }
  EXPECT_EQ(sidecar_.inline_appends, 1u);  // the others found another slot
  // Rows of prompts find slots too.
  for (int i = 0; i < 8; ++i) Fill(layer, 800);
  const auto slots = sidecar_.LetGoOfSlots();
  ASSERT_EQ(slots.size(), 1u);
  const size_t key_bytes = Layer::kKvHeads * Layer::kKeyDim * sizeof(float);
  EXPECT_EQ(std::memcmp(slots[0].data(), layer.key(kPrompt, 0), key_bytes), 0);
  ExpectRows(sequence, layer, kPrompt, 330);
}

TEST_F(StepRowsTest, PromptsAreStagedWhileStepsWait) {
  const Layer layer(420, 8);
  Sequence sequence = Fill(layer, kPrompt);
  sidecar_.CloseGate();
  DecodeAll(sequence, layer, kPrompt, 310);
  Sequence another = Fill(layer, 400);  // waits for no step
  sidecar_.OpenGate();
  MustBeOk(sequence.Flush());
  ExpectRows(another, layer, 0, 400);
  ExpectRows(sequence, layer, kPrompt, 310);
}

// Of the ring itself.
class StepSlotsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kSlotBytes = uint64_t{1} << 20;

  class Host final : public client::LocalHost {
   public:
    pqc_status OpenPool(uint64_t, std::shared_ptr<client::Mapping>*) override {
      return PQC_UNIMPLEMENTED;
    }
    pqc_status HoldPool(uint64_t) override { return PQC_UNIMPLEMENTED; }
    pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                           std::shared_ptr<client::Mapping>* ring) override {
      auto made = kvstore::StagingRing::Create(slot_bytes, slot_count, slot_bytes * slot_count);
      if (!made.ok()) return PQC_INTERNAL;
      auto shared = (*made)->Share();
      if (!shared.ok()) return PQC_INTERNAL;
      return client::Mapping::Map(dup(shared->descriptor.get()), shared->size_bytes,
                                  client::MappingAccess::kReadWrite, "ring", ring);
    }
    pqc_status Attach(uint64_t, const client::LeaseView&, client::AttachAnswer*) override {
      return PQC_UNIMPLEMENTED;
    }
    pqc_status Detach(const client::LeaseView&) override { return PQC_UNIMPLEMENTED; }
    void End() override {}
    bool WaitEnded(uint32_t) override { return false; }
    bool HoldsConnection() override { return true; }
    void Abandon() override {}
  };

  // A session of a worker that lives as long as the test.
  std::shared_ptr<client::LocalSession> Open(uint32_t slot_count) {
    constexpr uint64_t kBoot = 7;
    control_ = *kvstore::ControlMemory::Create(1, kBoot);
    const kvstore::SharedMemory shared = *control_->Share();
    client::LocalLink::Parts parts{
        .host = std::make_unique<Host>(), .control = {}, .boot_word = kBoot};
    std::shared_ptr<client::LocalSession> session;
    EXPECT_EQ(client::Mapping::Map(dup(shared.descriptor.get()), shared.size_bytes,
                                   client::MappingAccess::kRead, "control", &parts.control),
              PQC_OK);
    EXPECT_EQ(client::LocalSession::Open(std::move(parts), /*resume=*/{},
                                         {.workers = {},
                                          .staging_slot_bytes = kSlotBytes,
                                          .staging_slot_count = slot_count,
                                          .phase = std::make_shared<client::SessionPhase>()},
                                         &session),
              PQC_OK);
    return session;
  }

  std::unique_ptr<kvstore::ControlMemory> control_;
};

TEST_F(StepSlotsTest, ThereAreNoRangesBeforeTheRingIsOpenOrWithoutOne) {
  const auto session = Open(3);
  client::Staging& staging = session->staging();
  StepSlots slots(&staging);
  EXPECT_FALSE(slots.Take(100).valid());
  EXPECT_EQ(slots.Open(), PQC_OK);
  EXPECT_TRUE(slots.Take(100).valid());
  EXPECT_FALSE(slots.Take(kSlotBytes).valid());
  StepSlots none(nullptr);
  EXPECT_EQ(none.Open(), PQC_OK);
  EXPECT_FALSE(none.Take(100).valid());
}

TEST_F(StepSlotsTest, RangesOfASlotDoNotOverlapAndItsGenerationGrowsWithEachCall) {
  const auto session = Open(3);
  client::Staging& staging = session->staging();
  StepSlots slots(&staging);
  ASSERT_EQ(slots.Open(), PQC_OK);
  StepSlots::Range first = slots.Take(1000), second = slots.Take(1);
  ASSERT_TRUE(first.valid() && second.valid());
  EXPECT_GE(second.bytes().data(), first.bytes().data() + 1000);
  const client::StagingPlace before = first.Place(8, 16);
  EXPECT_EQ(before.size_bytes, 16u);
  slots.Use();
  const client::StagingPlace after = first.Place(8, 16), other = second.Place(0, 1);
  EXPECT_EQ(after.slot, before.slot);
  EXPECT_EQ(after.offset_bytes, before.offset_bytes);
  EXPECT_GT(after.generation, before.generation);
  EXPECT_EQ(other.generation, after.generation);
  first = {};
  second = {};
  const StepSlots::Range again = slots.Take(1);
  EXPECT_GE(again.Place(0, 1).generation, after.generation);
}

TEST_F(StepSlotsTest, OneSlotIsLeftToPromptsAndSlotsComeBackWhenTheirRangesDo) {
  const auto session = Open(3);
  client::Staging& staging = session->staging();
  StepSlots slots(&staging);
  ASSERT_EQ(slots.Open(), PQC_OK);
  std::vector<StepSlots::Range> ranges;
  for (StepSlots::Range range = slots.Take(kSlotBytes / 4); range.valid();
       range = slots.Take(kSlotBytes / 4)) {
    ranges.push_back(std::move(range));
  }
  EXPECT_EQ(ranges.size(), 8u);  // of two slots
  {
    client::Staging::Slot slot;
    EXPECT_EQ(staging.Take(std::chrono::steady_clock::now(), &slot), PQC_OK);
  }
  ranges.erase(ranges.begin(), ranges.begin() + 4);
  EXPECT_TRUE(slots.Take(kSlotBytes / 4).valid());
}

TEST_F(StepSlotsTest, ASlotThatMayBeReadIsLostAndARingWithoutSlotsSaysSo) {
  const auto session = Open(1);
  client::Staging& staging = session->staging();
  StepSlots slots(&staging);
  ASSERT_EQ(slots.Open(), PQC_OK);
  {
    StepSlots::Range range = slots.Take(10), other = slots.Take(10);
    range.SetMayBeRead(true);
    range = {};
    EXPECT_FALSE(slots.Take(10).valid());
    EXPECT_TRUE(other.valid());
  }
  EXPECT_FALSE(slots.Take(10).valid());
  client::Staging::Slot slot;
  EXPECT_EQ(staging.Take(std::chrono::steady_clock::now() + std::chrono::seconds(10), &slot),
            PQC_RESOURCE_EXHAUSTED);
}

TEST_F(StepSlotsTest, ASlotThatADeviceMayWriteNeverComesBack) {
  const auto session = Open(1);
  client::Staging& staging = session->staging();
  ASSERT_EQ(staging.Open(), PQC_OK);
  const auto now = std::chrono::steady_clock::now();
  client::Staging::Slot slot;
  ASSERT_EQ(staging.Take(now, &slot), PQC_OK);
  slot.Use();
  const uint64_t generation = slot.Place(0, 1).generation;
  control_->slot_word(0) = generation;  // all calls so far are over
  EXPECT_TRUE(slot.Done());
  slot.Lose();
  EXPECT_EQ(staging.Take(now, &slot), PQC_RESOURCE_EXHAUSTED);
  EXPECT_TRUE(staging.Abandoned().empty());
}

TEST_F(StepSlotsTest, AnAbandonedSlotComesBackWhenTheSidecarTellsThatItIsDone) {
  const auto session = Open(1);
  client::Staging& staging = session->staging();
  ASSERT_EQ(staging.Open(), PQC_OK);
  const auto now = std::chrono::steady_clock::now();
  client::Staging::Slot slot;
  ASSERT_EQ(staging.Take(now, &slot), PQC_OK);
  const uint64_t generation = slot.Place(0, 1).generation;
  slot.Use();
  EXPECT_FALSE(slot.Done());
  slot.Abandon();
  control_->slot_word(0) = generation;  // of a call before it
  EXPECT_EQ(staging.Take(now, &slot), PQC_RESOURCE_EXHAUSTED);
  // A call that the sidecar takes ends those before, also one that never came to it.
  const std::vector<client::StagingPlace> places = staging.Abandoned();
  ASSERT_EQ(places.size(), 1u);
  EXPECT_EQ(places[0].generation, generation + 1);
  control_->slot_word(0) = generation + 1;
  EXPECT_EQ(staging.Take(now, &slot), PQC_RESOURCE_EXHAUSTED);
  control_->slot_word(0) = generation + 2;
  ASSERT_EQ(staging.Take(now, &slot), PQC_OK);
  EXPECT_GT(slot.Place(0, 1).generation, generation);
}

TEST_F(StepSlotsTest, ASlotKeepsItsBytesWhenItsPagesAreTouched) {
  constexpr uint64_t kLongSlotBytes = uint64_t{4} << 20;
  const auto session = Open(1);
  client::Staging staging(*session, kLongSlotBytes, 2);
  ASSERT_EQ(staging.Open(), PQC_OK);
  client::Staging::Slot slot;
  staging.TryTake(&slot, /*left=*/0);
  ASSERT_TRUE(slot.valid());
  const auto pattern = [](size_t i) { return static_cast<std::byte>(i % 251); };
  for (size_t i = 0; i < kLongSlotBytes; i += 997) slot.bytes()[i] = pattern(i);
  slot.Touch();
  slot.Touch();
  for (size_t i = 0; i < kLongSlotBytes; i += 997) ASSERT_EQ(slot.bytes()[i], pattern(i)) << i;
  std::vector<unsigned char> present(kLongSlotBytes / 4096);
  ASSERT_EQ(mincore(slot.bytes().data(), kLongSlotBytes, present.data()), 0);
  EXPECT_TRUE(std::all_of(present.begin(), present.end(), [](unsigned char p) { return p & 1; }));
}

}  // namespace
}  // namespace pqcached
