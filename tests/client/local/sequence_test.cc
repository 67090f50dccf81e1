// The lease protocol of a client, step by step: a test changes the sidecar's words, or installs
// another answer, between two calls of the client or within a call of Attach.
#include "client/local/sequence.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "client/base/error.h"
#include "client/local/layer_source.h"
#include "tests/client/local/fake_worker.h"

namespace pqcached::client {
namespace {

using kvstore::LeaseWords;
using testing::EncodeFakeImage;
using testing::FakeWorker;
using testing::kFakeCache;
using testing::kFakeSequence;

constexpr uint64_t kLease = 5, kSecondLease = 6;

class SequenceTest : public ::testing::Test {
 protected:
  SequenceTest() { worker_.Grant(kLease, 0, 100, EncodeFakeImage(1, {110, 100})); }

  Pinned PinNow() {
    Pinned pinned;
    EXPECT_EQ(PinNewest(sequence_, &pinned), PQC_OK) << pqc_last_error();
    EXPECT_EQ(sequence_.Check(pinned.lease_epoch), PQC_OK) << pqc_last_error();
    return pinned;
  }
  pqc_status Check(const Pinned& pinned) const { return sequence_.Check(pinned.lease_epoch); }

  pqc_status CheckInStep(const Pinned& pinned) {
    return sequence_.CheckInStep(pinned.lease_epoch, &confirmed_);
  }

  // Installs an image from the answer to a call that named the present lease.
  void Install(uint64_t version, std::vector<uint32_t> layer_tokens) {
    EXPECT_EQ(sequence_.Install(sequence_.lease(), EncodeFakeImage(version, layer_tokens)), PQC_OK);
  }

  // Replaces the worker by the next one, and waits until the session has noticed.
  void ReplaceWorker() {
    next_ = &second_;
    worker_.End();
    EXPECT_EQ(session_->Await(), PQC_OK) << pqc_last_error();
  }

  // Lets the other holder of the sequence revoke the lease; the next Attach grants another one.
  void Revoke(uint32_t token_count, ImageBytes image) {
    worker_.words(0).flags |= LeaseWords::kRevoked;
    worker_.Grant(kSecondLease, 1, token_count, std::move(image));
  }

  static std::vector<uint64_t> IdsOf(const std::vector<LeaseView>& leases) {
    std::vector<uint64_t> ids;
    for (const LeaseView& lease : leases) ids.push_back(lease.lease_id);
    return ids;
  }
  using Ids = std::vector<uint64_t>;

  FakeWorker worker_{7}, second_{8};
  std::atomic<FakeWorker*> next_ = nullptr;
  bool confirmed_ = false;
  std::shared_ptr<LocalSession> session_ = testing::OpenFakeSession(worker_, next_);
  LocalSequence sequence_{session_, kFakeCache, kFakeSequence};
};

TEST_F(SequenceTest, ARevocationDuringAReadFailsItsCheck) {
  const Pinned pinned = PinNow();
  worker_.words(0).flags |= LeaseWords::kRevoked;
  EXPECT_EQ(Check(pinned), PQC_ABORTED);
}

TEST_F(SequenceTest, ASuspensionDuringAReadFailsItsCheck) {
  const Pinned pinned = PinNow();
  worker_.words(0).flags |= LeaseWords::kSuspended | LeaseWords::kRevoked;
  EXPECT_EQ(Check(pinned), PQC_FAILED_PRECONDITION);
}

TEST_F(SequenceTest, ARollBackDuringAReadFailsItsCheck) {
  const Pinned pinned = PinNow();
  sequence_.BeginRollBack(60);
  EXPECT_EQ(Check(pinned), PQC_ABORTED);
  const Pinned during = PinNow();  // which reads no row that is rolled back
  sequence_.EndRollBack();
  EXPECT_EQ(Check(pinned), PQC_ABORTED);
  EXPECT_EQ(Check(during), PQC_OK);
}

TEST_F(SequenceTest, TheEndOfTheWorkerDuringAReadFailsItsCheck) {
  const Pinned pinned = PinNow();
  worker_.End();
  EXPECT_EQ(Check(pinned), PQC_UNAVAILABLE);
}

TEST_F(SequenceTest, TheEndOfTheConnectionDuringAReadFailsItsCheck) {
  const Pinned pinned = PinNow();
  worker_.connection_ended = true;
  EXPECT_EQ(Check(pinned), PQC_UNAVAILABLE);
}

TEST_F(SequenceTest, AReadOfAFormerWorkersMemoryFailsItsCheckForEver) {
  const Pinned pinned = PinNow();
  second_.Grant(kLease, 0, 100, EncodeFakeImage(1, {100, 100}));  // equal in every number
  ReplaceWorker();
  EXPECT_EQ(Check(pinned), PQC_UNAVAILABLE);
  const Pinned later = PinNow();
  EXPECT_EQ(Check(pinned), PQC_UNAVAILABLE);
  EXPECT_EQ(Check(later), PQC_OK);
  EXPECT_NE(later.image, pinned.image);
}

TEST_F(SequenceTest, AStepUsesWhatItReadsOfAWorkerThatHasEnded) {
  const Pinned pinned = PinNow();
  worker_.Die();
  EXPECT_EQ(CheckInStep(pinned), PQC_OK);
  EXPECT_TRUE(confirmed_);
  EXPECT_EQ(Check(pinned), PQC_UNAVAILABLE) << "a call outside of steps does not";
  EXPECT_EQ(sequence_.VisibleTokens(*pinned.image, 0), 110u);
  worker_.words(0).flags |= LeaseWords::kRevoked;
  EXPECT_NE(CheckInStep(pinned), PQC_OK);
}

TEST_F(SequenceTest, AStepUsesNothingOfASessionThatItsWorkerHasEnded) {
  const Pinned pinned = PinNow();
  worker_.End();
  worker_.connection_ended = true;
  EXPECT_EQ(CheckInStep(pinned), PQC_UNAVAILABLE);
  worker_.Die();  // later: the supervisor does not take this back
  EXPECT_EQ(CheckInStep(pinned), PQC_UNAVAILABLE);
}

TEST_F(SequenceTest, AStepUsesNothingThatTheSidecarMayReuse) {
  const Pinned pinned = PinNow();
  worker_.connection_ended = true;  // and no supervisor has noted the end
  EXPECT_EQ(CheckInStep(pinned), PQC_UNAVAILABLE);
  worker_.Die();
  EXPECT_EQ(CheckInStep(pinned), PQC_OK);
  worker_.holds_connection = false;  // the supervisor has ended as well
  EXPECT_EQ(CheckInStep(pinned), PQC_UNAVAILABLE);
}

TEST_F(SequenceTest, OnlyALeaseOfTheNextWorkerConfirmsWhatAStepHasRead) {
  const Pinned pinned = PinNow();
  worker_.Die();
  worker_.SetSucceeded();
  EXPECT_EQ(CheckInStep(pinned), PQC_OK);
  EXPECT_FALSE(confirmed_) << "the client does not know the next worker yet";
  second_.Grant(kSecondLease, 0, 100, EncodeFakeImage(1, {100, 100}));
  ReplaceWorker();
  EXPECT_EQ(CheckInStep(pinned), PQC_OK);
  EXPECT_FALSE(confirmed_) << "it has no lease yet";
  PinNow();
  EXPECT_EQ(CheckInStep(pinned), PQC_OK);
  EXPECT_TRUE(confirmed_);
  EXPECT_EQ(Check(pinned), PQC_UNAVAILABLE);
  second_.words(0).flags |= LeaseWords::kRevoked;
  EXPECT_NE(CheckInStep(pinned), PQC_OK);
}

TEST_F(SequenceTest, AStepNeedsTheLeaseOfANextWorkerThatMarksNothing) {
  const Pinned pinned = PinNow();
  worker_.words(0).token_count = 110;
  worker_.Die();
  ReplaceWorker();  // by an older program
  EXPECT_EQ(CheckInStep(pinned), PQC_OK);
  EXPECT_FALSE(confirmed_);
  EXPECT_EQ(sequence_.ReadableTokens(*pinned.image), 110u) << "which it had stored at its end";
}

TEST_F(SequenceTest, AStepThatReadsOnInTheNextWorkersMemoryNeedsThatWorker) {
  const Pinned pinned = PinNow();
  worker_.Die();
  worker_.SetSucceeded();
  second_.Grant(kSecondLease, 0, 100, EncodeFakeImage(1, {100, 100}));
  ReplaceWorker();
  PinNow();
  second_.End();
  EXPECT_EQ(CheckInStep(pinned), PQC_UNAVAILABLE);
}

TEST_F(SequenceTest, ARollBackAfterTheEndOfTheWorkerFailsTheCheckOfAStep) {
  const Pinned pinned = PinNow();
  worker_.Die();
  sequence_.BeginRollBack(60);
  EXPECT_NE(CheckInStep(pinned), PQC_OK);
  sequence_.EndRollBack();
  EXPECT_NE(CheckInStep(pinned), PQC_OK);
}

TEST_F(SequenceTest, ARollBackAtTheNextWorkerFailsTheCheckOfAStep) {
  const Pinned pinned = PinNow();
  worker_.Die();
  second_.Grant(kSecondLease, 0, 100, EncodeFakeImage(1, {100, 100}));
  ReplaceWorker();
  PinNow();
  EXPECT_EQ(CheckInStep(pinned), PQC_OK);
  sequence_.BeginRollBack(60);
  sequence_.EndRollBack();
  EXPECT_NE(CheckInStep(pinned), PQC_OK);
}

TEST_F(SequenceTest, RowsThatTheNextWorkerRollsBackStayInvisibleInTheMemoryOfTheFormerOne) {
  PinNow();
  sequence_.BeginRollBack(60);
  const Pinned pinned = PinNow();
  EXPECT_EQ(sequence_.ReadableTokens(*pinned.image), 60u);
  worker_.Die();
  worker_.SetSucceeded();
  sequence_.EndRollBack();  // the next worker has made it; the words of the former one say 100
  EXPECT_EQ(sequence_.ReadableTokens(*pinned.image), 60u);
  second_.Grant(kSecondLease, 0, 60, EncodeFakeImage(1, {60, 60}));
  ReplaceWorker();
  EXPECT_EQ(sequence_.ReadableTokens(*pinned.image), 60u);
  EXPECT_EQ(sequence_.VisibleTokens(*pinned.image, 0), 60u);
  const Pinned later = PinNow();
  second_.words(0).token_count = 80;
  EXPECT_EQ(sequence_.ReadableTokens(*pinned.image), 60u);
  EXPECT_EQ(sequence_.ReadableTokens(*later.image), 80u);
  EXPECT_EQ(CheckInStep(pinned), PQC_OK);
}

TEST_F(SequenceTest, AReadBeginsInNoMemoryOfAWorkerThatHasEnded) {
  PinNow();
  second_.Grant(kSecondLease, 0, 50, EncodeFakeImage(1, {50, 50}));
  next_ = &second_;
  worker_.End();
  EXPECT_EQ(PinNow().image->token_count(), 50u);
}

TEST_F(SequenceTest, AReadUnderARevokedLeaseFailsItsCheckAlsoWhenThereIsANewLease) {
  const Pinned pinned = PinNow();
  Revoke(40, EncodeFakeImage(1, {40, 40}));
  const Pinned later = PinNow();  // another reader of the same client acquires the new lease
  EXPECT_EQ(sequence_.lease().lease_id, kSecondLease);
  EXPECT_EQ(Check(pinned), PQC_ABORTED);
  EXPECT_EQ(Check(later), PQC_OK);
  EXPECT_EQ(sequence_.UnchangedSince(pinned.lease_epoch), 0u);
  EXPECT_EQ(sequence_.VisibleTokens(*later.image, 0), 40u);
}

TEST_F(SequenceTest, ALeaseThatIsReleasedDuringAReadFailsItsCheck) {
  const Pinned pinned = PinNow();
  sequence_.Detach();
  EXPECT_EQ(Check(pinned), PQC_ABORTED);
  PinNow();
  EXPECT_EQ(Check(pinned), PQC_ABORTED);
}

TEST_F(SequenceTest, NoVersionIsAcknowledgedWhileAReaderHoldsAnOlderOne) {
  Pinned first = PinNow();
  Install(2, {110, 110});
  EXPECT_EQ(sequence_.lease().known_version, 1u);
  Pinned second = PinNow();
  Install(3, {120, 120});
  EXPECT_EQ(sequence_.lease().known_version, 1u);
  first.image.reset();
  EXPECT_EQ(sequence_.lease().known_version, 2u);
  second.image.reset();
  EXPECT_EQ(sequence_.lease().known_version, 3u);
}

TEST_F(SequenceTest, AFetchReplacesNoVersionThatAReaderHolds) {
  const Pinned first = PinNow();
  worker_.Grant(kLease, 0, 120, EncodeFakeImage(2, {120, 120}));
  std::shared_ptr<Image> newest;
  ASSERT_EQ(sequence_.Refresh(&newest), PQC_OK);
  EXPECT_EQ(newest->version(), 2u);
  EXPECT_EQ(sequence_.lease().known_version, 1u);
}

TEST_F(SequenceTest, ALeaseIsGivenBackOnlyAfterItsLastReaderOfAnyVersion) {
  Pinned older = PinNow();
  Install(2, {110, 110});
  Pinned newest = PinNow();
  sequence_.Detach();
  EXPECT_EQ(session_->lease_count(), 0u);
  EXPECT_TRUE(worker_.detached.empty());
  newest.image.reset();
  sequence_.Detach();
  EXPECT_TRUE(worker_.detached.empty()) << "the older image has a reader";
  older.image.reset();
  sequence_.Detach();
  EXPECT_EQ(IdsOf(worker_.detached), Ids{kLease});
  EXPECT_EQ(worker_.detached[0].boot_word, worker_.boot_word());
}

TEST_F(SequenceTest, ALeaseWithAReaderOfTheNewestImageIsNotGivenBack) {
  Pinned newest = PinNow();
  sequence_.Detach();
  EXPECT_TRUE(worker_.detached.empty());
  newest.image.reset();
  sequence_.Detach();
  EXPECT_EQ(IdsOf(worker_.detached), Ids{kLease});
}

TEST_F(SequenceTest, ARevokedLeaseIsGivenBackWhenItsReaderHasEnded) {
  Pinned pinned = PinNow();
  Revoke(40, EncodeFakeImage(1, {40, 40}));
  PinNow();
  EXPECT_EQ(IdsOf(worker_.attached), (Ids{0, 0})) << "the revoked lease is not refreshed";
  EXPECT_TRUE(worker_.detached.empty());
  EXPECT_EQ(session_->lease_count(), 1u);
  pinned.image.reset();
  std::shared_ptr<Image> image;
  ASSERT_EQ(sequence_.Refresh(&image), PQC_OK);
  EXPECT_EQ(IdsOf(worker_.detached), Ids{kLease});
}

TEST_F(SequenceTest, ALeaseOfAFormerWorkerIsNeverNamedToTheNextOne) {
  Pinned pinned = PinNow();
  sequence_.Detach();  // deferred, because it has a reader
  PinNow();
  second_.Grant(kSecondLease, 0, 100, EncodeFakeImage(1, {100, 100}));
  ReplaceWorker();
  EXPECT_EQ(sequence_.lease().lease_id, 0u);
  PinNow();
  pinned.image.reset();
  sequence_.Detach();
  EXPECT_EQ(IdsOf(second_.attached), Ids{0});
  EXPECT_EQ(second_.attached[0].known_version, 0u);
  EXPECT_EQ(IdsOf(second_.detached), Ids{kSecondLease});
  EXPECT_TRUE(worker_.detached.empty());
}

TEST_F(SequenceTest, NothingIsNamedToAWorkerThatHasEnded) {
  PinNow();
  worker_.End();
  EXPECT_EQ(sequence_.lease().lease_id, 0u);
  sequence_.Detach();
  EXPECT_TRUE(worker_.detached.empty());
}

TEST_F(SequenceTest, ACallThatIsUnavailableWhileTheWorkerLivesIsRepeatedAFewTimes) {
  worker_.unavailable_attaches = 3;
  PinNow();
  EXPECT_EQ(worker_.attached.size(), 4u);
  sequence_.Detach();
  worker_.unavailable_attaches = 100;
  Pinned pinned;
  EXPECT_EQ(PinNewest(sequence_, &pinned), PQC_UNAVAILABLE);
  EXPECT_EQ(worker_.unavailable_attaches, 96);
}

TEST_F(SequenceTest, NoLeaseIsGivenBackAfterTheSessionIsClosed) {
  PinNow();
  session_->Close();
  sequence_.Detach();
  EXPECT_TRUE(worker_.detached.empty());
}

TEST_F(SequenceTest, TheMemoryOfAFormerWorkerIsReleasedWithItsLastReader) {
  Pinned pinned = PinNow();
  ReplaceWorker();
  EXPECT_EQ(worker_.connections, 1);
  pinned.image.reset();
  // The session's own thread may have held the link for a moment longer.
  while (worker_.connections != 0) std::this_thread::yield();
}

TEST_F(SequenceTest, TheWordsOfAFormerWorkerStayMappedForThreadsThatLoadThem) {
  {
    LocalSequence read(session_, kFakeCache, kFakeSequence);
    std::shared_ptr<Image> image;
    ASSERT_EQ(read.Refresh(&image), PQC_OK);
    image.reset();
    ReplaceWorker();
    while (worker_.connections != 0) std::this_thread::yield();
    EXPECT_EQ(worker_.control_users(), 1);
  }
  EXPECT_EQ(worker_.control_users(), 0);
}

TEST_F(SequenceTest, AnImageOfAnotherLeaseOrWorkerIsNotInstalled) {
  const Pinned pinned = PinNow();
  const LeaseView present = sequence_.lease();
  const LeaseView foreign[] = {
      {.lease_id = kSecondLease, .known_version = 1, .boot_word = present.boot_word},
      {.lease_id = kLease, .known_version = 1, .boot_word = second_.boot_word()},
  };
  for (const LeaseView& lease : foreign) {
    EXPECT_EQ(sequence_.Install(lease, EncodeFakeImage(2, {120, 120})), PQC_OK);
    EXPECT_EQ(PinNow().image, pinned.image);
  }
  sequence_.Detach();
  EXPECT_EQ(sequence_.Install(present, EncodeFakeImage(2, {120, 120})), PQC_OK);
  EXPECT_EQ(sequence_.lease().lease_id, 0u);
  EXPECT_EQ(PinNow().image->version(), 1u);
}

TEST_F(SequenceTest, AnImageThatIsNotNewerIsNotInstalled) {
  PinNow();
  Install(3, {100, 100});
  const Pinned pinned = PinNow();
  for (const uint64_t version : {1, 2, 3}) {
    Install(version, {100, 100});
    EXPECT_EQ(PinNow().image, pinned.image) << version;
  }
}

TEST_F(SequenceTest, AnImageOfAnotherSequenceIsRefusedAndChangesNothing) {
  const Pinned pinned = PinNow();
  EXPECT_EQ(sequence_.Install(sequence_.lease(), EncodeFakeImage(2, {120, 120}, kFakeSequence + 1)),
            PQC_INTERNAL);
  EXPECT_EQ(PinNow().image, pinned.image);
}

TEST_F(SequenceTest, AnAnswerOfAWorkerThatEndsMeanwhileIsNotInstalled) {
  second_.Grant(kSecondLease, 3, 50, EncodeFakeImage(1, {50, 50}));
  worker_.during_attach = [this] { ReplaceWorker(); };
  const Pinned pinned = PinNow();
  EXPECT_EQ(pinned.image->token_count(), 50u);
  EXPECT_EQ(sequence_.lease().lease_id, kSecondLease);
  EXPECT_EQ(sequence_.lease().boot_word, second_.boot_word());
  EXPECT_EQ(sequence_.token_count(), 50u);
  EXPECT_EQ(IdsOf(second_.attached), Ids{0});
  EXPECT_EQ(session_->lease_count(), 1u);
}

TEST_F(SequenceTest, AnAnswerThatIsOvertakenByANewerImageReplacesNothing) {
  const Pinned pinned = PinNow();
  worker_.Grant(kLease, 0, 110, EncodeFakeImage(2, {110, 110}));
  worker_.during_attach = [this] { Install(3, {120, 120}); };
  std::shared_ptr<Image> image;
  ASSERT_EQ(sequence_.Refresh(&image), PQC_OK);
  EXPECT_EQ(image->version(), 3u);
  EXPECT_EQ(PinNow().image->version(), 3u);
}

TEST_F(SequenceTest, WordsOfAnotherLeaseAreRefusedAndTheLeaseIsGivenBack) {
  worker_.words(0).lease_id = kSecondLease;
  std::shared_ptr<Image> image;
  EXPECT_EQ(sequence_.Refresh(&image), PQC_INTERNAL);
  EXPECT_EQ(image, nullptr);
  EXPECT_EQ(sequence_.token_count(), 0u);
  sequence_.Detach();
  EXPECT_EQ(IdsOf(worker_.detached), Ids{kLease});
}

TEST_F(SequenceTest, WordsBeyondTheControlMemoryAreRefused) {
  worker_.words(testing::kFakeWordCount).lease_id = kLease;
  worker_.answer.word_index = testing::kFakeWordCount;
  std::shared_ptr<Image> image;
  EXPECT_EQ(sequence_.Refresh(&image), PQC_INTERNAL);
  EXPECT_EQ(sequence_.token_count(), 0u);
}

TEST_F(SequenceTest, AnInvalidImageIsRefusedAndTheLeaseIsGivenBack) {
  worker_.answer.image = EncodeFakeImage(1, {100, 100}, kFakeSequence + 1);
  std::shared_ptr<Image> image;
  EXPECT_EQ(sequence_.Refresh(&image), PQC_INTERNAL);
  EXPECT_EQ(image, nullptr);
  sequence_.Detach();
  EXPECT_EQ(IdsOf(worker_.detached), Ids{kLease});
}

TEST_F(SequenceTest, ARefreshRequestsAnImageThatTheClientAlreadyKnows) {
  PinNow();
  std::shared_ptr<Image> image;
  ASSERT_EQ(sequence_.Refresh(&image), PQC_OK);
  EXPECT_EQ(worker_.attached.back().lease_id, kLease);
  EXPECT_EQ(worker_.attached.back().known_version, 0u);
  EXPECT_EQ(worker_.attached.back().boot_word, worker_.boot_word());
}

TEST_F(SequenceTest, TheSidecarsVersionTellsOfANewerImage) {
  EXPECT_TRUE(sequence_.HasNewer()) << "there is none yet";
  PinNow();
  EXPECT_FALSE(sequence_.HasNewer());
  worker_.words(0).version = 2;
  EXPECT_TRUE(sequence_.HasNewer());
}

// A newer image may place later tokens elsewhere, although the older one has slots for them.
TEST_F(SequenceTest, TokensThatAreNewerThanAnImageAreNotReadThroughIt) {
  const Pinned pinned = PinNow();
  worker_.words(0).token_count = 105;
  EXPECT_EQ(sequence_.ReadableTokens(*pinned.image), 105u);
  worker_.words(0).version = 2;
  worker_.words(0).token_count = 120;
  EXPECT_EQ(sequence_.ReadableTokens(*pinned.image), 105u);
  EXPECT_EQ(sequence_.VisibleTokens(*pinned.image, 0), 110u) << "the image's own count";
  EXPECT_EQ(sequence_.VisibleTokens(*pinned.image, 1), 105u);
  Install(2, {120, 120});
  EXPECT_EQ(sequence_.ReadableTokens(*pinned.image), 105u);
  EXPECT_EQ(sequence_.ReadableTokens(*PinNow().image), 120u);
}

TEST_F(SequenceTest, TokensThatReplaceThoseOfARollBackAreNotReadThroughAnOlderImage) {
  const Pinned before = PinNow();
  EXPECT_EQ(sequence_.ReadableTokens(*before.image), 100u);
  sequence_.BeginRollBack(60);
  worker_.words(0).version = 2;
  worker_.words(0).token_count = 60;
  sequence_.EndRollBack();
  worker_.words(0).token_count = 90;
  EXPECT_EQ(sequence_.ReadableTokens(*PinNow().image), 60u);
}

TEST_F(SequenceTest, AnImageThatMayBeOlderThanARollBackIsKnownToPlaceNothing) {
  PinNow();
  sequence_.BeginRollBack(60);
  Install(2, {100, 100});
  worker_.words(0).version = 3;
  worker_.words(0).token_count = 60;
  sequence_.EndRollBack();
  worker_.words(0).token_count = 90;
  EXPECT_EQ(sequence_.ReadableTokens(*PinNow().image), 0u);
  worker_.Grant(kLease, 0, 90, EncodeFakeImage(3, {100, 90}));
  worker_.during_attach = [this] {
    sequence_.BeginRollBack(50);
    sequence_.EndRollBack();
    worker_.words(0).version = 4;
  };
  std::shared_ptr<Image> image;
  ASSERT_EQ(sequence_.Refresh(&image), PQC_OK);
  EXPECT_EQ(sequence_.ReadableTokens(*image), 0u);
}

TEST_F(SequenceTest, RowsOfARollBackAreInvisibleUntilTheLastOneEnds) {
  const Pinned pinned = PinNow();
  EXPECT_EQ(sequence_.token_count(), 100u);
  EXPECT_EQ(sequence_.VisibleTokens(*pinned.image, 0), 110u);
  EXPECT_EQ(sequence_.VisibleTokens(*pinned.image, 1), 100u);
  sequence_.BeginRollBack(60);
  sequence_.BeginRollBack(80);
  EXPECT_EQ(sequence_.token_count(), 60u);
  EXPECT_EQ(sequence_.VisibleTokens(*pinned.image, 0), 60u);
  sequence_.EndRollBack();
  EXPECT_EQ(sequence_.token_count(), 60u);
  worker_.words(0).token_count = 80;
  sequence_.EndRollBack();
  EXPECT_EQ(sequence_.token_count(), 80u);
  EXPECT_EQ(sequence_.VisibleTokens(*pinned.image, 0), 80u) << "the image's counts are outdated";
  worker_.words(0).token_count = 1000;
  EXPECT_EQ(sequence_.VisibleTokens(*pinned.image, 0), testing::kFakeSlots);
}

TEST_F(SequenceTest, AnImageFromBeforeARollBackShowsNoRowThatIsRolledBack) {
  PinNow();
  const auto roll_back = [this] {
    worker_.words(0).token_count = 60;
    sequence_.EndRollBack();
  };
  for (const bool begun_before : {true, false}) {
    worker_.Grant(kLease, 0, 100, EncodeFakeImage(1, {110, 100}));
    if (begun_before) sequence_.BeginRollBack(60);
    worker_.during_attach = [&] {  // the answer is older than the roll-back at the sidecar
      if (!begun_before) sequence_.BeginRollBack(60);
      roll_back();
    };
    std::shared_ptr<Image> image;
    ASSERT_EQ(sequence_.Refresh(&image), PQC_OK);
    EXPECT_EQ(sequence_.VisibleTokens(*image, 0), 60u) << begun_before;
  }
  worker_.Grant(kLease, 0, 100, EncodeFakeImage(1, {110, 100}));
  sequence_.BeginRollBack(60);
  Install(2, {110, 100});  // from an answer to rows that were sent before
  roll_back();
  EXPECT_EQ(sequence_.VisibleTokens(*PinNow().image, 0), 60u);
  std::shared_ptr<Image> image;
  worker_.Grant(kLease, 0, 60, EncodeFakeImage(2, {70, 60}));
  ASSERT_EQ(sequence_.Refresh(&image), PQC_OK);
  EXPECT_EQ(sequence_.VisibleTokens(*image, 0), 70u) << "its counts are newer";
}

TEST_F(SequenceTest, TokensAreUnchangedUpToTheLowestRollBackAndNotBeyondAWorker) {
  const uint64_t begin = PinNow().lease_epoch;
  EXPECT_EQ(sequence_.UnchangedSince(begin), UINT32_MAX);
  const auto roll_back = [this](uint32_t token_count) {
    sequence_.BeginRollBack(token_count);
    sequence_.EndRollBack();
  };
  roll_back(60);
  const uint64_t middle = sequence_.lease_epoch();
  roll_back(80);
  EXPECT_EQ(sequence_.UnchangedSince(begin), 60u);
  EXPECT_EQ(sequence_.UnchangedSince(middle), 80u);
  for (int i = 0; i < 14; ++i) roll_back(90);
  EXPECT_EQ(sequence_.UnchangedSince(begin), 60u);
  roll_back(90);
  EXPECT_EQ(sequence_.UnchangedSince(begin), 0u) << "too long ago";
  EXPECT_EQ(sequence_.UnchangedSince(middle), 80u);
  second_.Grant(kLease, 0, 100, EncodeFakeImage(1, {100, 100}));
  ReplaceWorker();
  PinNow();
  EXPECT_EQ(sequence_.UnchangedSince(middle), 0u);
}

}  // namespace
}  // namespace pqcached::client
