// Events of a client about its sequences and its session, over a store in this process.
#include <set>
#include <thread>
#include <vector>

#include "tests/client/step/operation_loop.h"
#include "tests/client/step/step_fixture.h"

namespace pqcached::testing {
namespace {

class EventTest : public StepTest {
 protected:
  EventTest() : StepTest(600000) {}

  int Open() { return Must(Events::Open(client_)).Fd(); }

  // A sequence on which the client has a lease.
  Sequence Leased() {
    Sequence sequence = Fill(layer_, 300);
    MustBeOk(Decode(sequence, layer_, 300));
    MustBeOk(sequence.Flush());
    return sequence;
  }

  // That nothing happens for longer than the client looks at its leases.
  void ExpectNoEvent(int fd) {
    EXPECT_FALSE(IsReadable(fd, 200));
    EXPECT_EQ(TakeEvent(client_).kind, PQC_EVENT_NONE);
  }

  void Truncate(const Sequence& sequence, uint64_t tokens) {
    ASSERT_TRUE(sidecar_.store->TruncateSequence(kTestTenant, sequence.id(), tokens).ok());
  }

  const Layer layer_{400, 1};
};

TEST_F(EventTest, ARevokedLeaseIsAnEventOfItsSequence) {
  const int fd = Open();
  Sequence sequence = Leased(), other = Leased();
  ExpectNoEvent(fd);
  Truncate(sequence, 200);
  const pqc_event event = AwaitEvent(client_, fd);
  EXPECT_EQ(event.kind, PQC_EVENT_SEQUENCE_REVOKED);
  EXPECT_EQ(event.sequence_id, sequence.id());
  EXPECT_EQ(event.operation, nullptr);
  EXPECT_EQ(Must(sequence.Progress()).is_revoked, 1u);
  ExpectNoEvent(fd);  // once for each lease
  // The next lease can be revoked as well.
  MustBeOk(Decode(sequence, layer_, 200));
  MustBeOk(sequence.Flush());
  ExpectNoEvent(fd);
  ASSERT_TRUE(sidecar_.store->DropSequence(kTestTenant, sequence.id()).ok());
  EXPECT_EQ(AwaitEvent(client_, fd).sequence_id, sequence.id());
  ExpectNoEvent(fd);
}

TEST_F(EventTest, EventsOfOneSequenceCoalesce) {
  const int fd = Open();
  Sequence sequences[] = {Leased(), Leased()};
  for (uint64_t round = 0; round < 3; ++round) {
    for (Sequence& sequence : sequences) {
      Truncate(sequence, 250 - round);
      // The call acquires the next lease, mostly before the client's own thread has seen the end of
      // the last one.
      MustBeOk(Decode(sequence, layer_, 250 - round));
      MustBeOk(sequence.Flush());
    }
  }
  std::set<uint64_t> found;
  for (int i = 0; i < 2; ++i) {
    const pqc_event event = AwaitEvent(client_, fd);
    EXPECT_EQ(event.kind, PQC_EVENT_SEQUENCE_REVOKED) << i << event.sequence_id;
    found.insert(event.sequence_id);
  }
  EXPECT_EQ(found.size(), 2u);
  ExpectNoEvent(fd);
}

TEST_F(EventTest, OnlyASuspensionByAnotherIsAnEvent) {
  const int fd = Open();
  Sequence sequence = Leased();
  MustBeOk(sequence.Suspend());
  ExpectNoEvent(fd);
  Must(sequence.Resume());
  ExpectNoEvent(fd);
  for (int i = 0; i < 2; ++i) {
    // A suspension revokes the lease, too, and is one event.
    MustBeOk(Decode(sequence, layer_, 301 + i));
    MustBeOk(sequence.Flush());
    ASSERT_TRUE(sidecar_.store->SuspendSequence(kTestTenant, sequence.id()).ok());
    const pqc_event event = AwaitEvent(client_, fd);
    EXPECT_EQ(event.kind, PQC_EVENT_SEQUENCE_SUSPENDED);
    EXPECT_EQ(event.sequence_id, sequence.id());
    ASSERT_TRUE(sidecar_.store->ResumeSequence(kTestTenant, sequence.id()).ok());
    ExpectNoEvent(fd);
  }
}

TEST_F(EventTest, OwnChangesAreNoEvents) {
  const int fd = Open();
  Sequence sequence = Leased();
  MustBeOk(sequence.Truncate(200));
  MustBeOk(Decode(sequence, layer_, 200, 4, {2}));
  MustBeOk(Decode(sequence, layer_, 202));  // which rolls back
  MustBeOk(sequence.Flush());
  ExpectNoEvent(fd);
  MustBeOk(sequence.Drop());
  ExpectNoEvent(fd);
}

TEST_F(EventTest, ADroppedSequenceTakesItsEventsWithIt) {
  const int fd = Open();
  Sequence sequence = Leased();
  Truncate(sequence, 200);
  EXPECT_TRUE(IsReadable(fd, kLoopLimitMs));
  static_cast<void>(sequence.Drop());
  EXPECT_FALSE(IsReadable(fd));
  EXPECT_EQ(TakeEvent(client_).kind, PQC_EVENT_NONE);
}

TEST_F(EventTest, ANewWorkerIsAnEvent) {
  const int fd = Open();
  Sequence sequence = Leased();
  for (int i = 0; i < 3; ++i) {
    sidecar_.EndWorker();
    ExpectNoEvent(fd);  // no worker is there yet
    sidecar_.StartWorker();
    EXPECT_EQ(AwaitEvent(client_, fd).kind, PQC_EVENT_NEW_WORKER);
    EXPECT_EQ(Must(sequence.Progress()).is_restarting, 0u);
  }
  MustBeOk(Decode(sequence, layer_, 301));
}

TEST_F(EventTest, ALostSessionIsAnEvent) {
  const int fd = Open();
  sidecar_.EndWorker();
  sidecar_.knows_session = false;
  sidecar_.StartWorker();
  EXPECT_EQ(AwaitEvent(client_, fd).kind, PQC_EVENT_SESSION_LOST);
  ExpectNoEvent(fd);
}

TEST_F(EventTest, ASessionThatWasLostBeforeIsAnEvent) {
  Sequence sequence = Leased();
  sidecar_.EndWorker();
  sidecar_.knows_session = false;
  sidecar_.StartWorker();
  while (!Must(sequence.Progress()).is_lost) std::this_thread::yield();
  EXPECT_EQ(TakeEvent(client_).kind, PQC_EVENT_NONE);  // not asked for
  EXPECT_EQ(AwaitEvent(client_, Open()).kind, PQC_EVENT_SESSION_LOST);
}

TEST_F(EventTest, OperationsThatEndedBeforeAreEvents) {
  Sequence sequence = Leased();
  Operation flush = Must(Operation::Flush(sequence));
  MustBeOk(flush.Wait());
  const int fd = Open();
  EXPECT_TRUE(IsReadable(fd));
  EXPECT_EQ(TakeEvent(client_).operation, flush.get());
  EXPECT_FALSE(IsReadable(fd));
}

TEST_F(EventTest, BadArgumentsAreRefused) {
  int fd = 0;
  pqc_event event = PQC_INIT(pqc_event);
  EXPECT_EQ(pqc_client_event_fd(nullptr, &fd), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_client_event_fd(client_.get(), nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_client_next_event(nullptr, &event), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_client_next_event(client_.get(), nullptr), PQC_INVALID_ARGUMENT);
  event.struct_size = 8;
  EXPECT_EQ(pqc_client_next_event(client_.get(), &event), PQC_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace pqcached::testing
