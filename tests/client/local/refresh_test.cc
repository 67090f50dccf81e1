// A lease that another holder revokes while the client refreshes it.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "client/local/image.h"
#include "client/local/sequence.h"
#include "client/local/session.h"
#include "tests/client/local/fake_worker.h"

namespace pqcached::client {
namespace {

using testing::EncodeFakeImage;
using testing::FakeWorker;
using testing::kFakeCache;
using testing::kFakeSequence;

TEST(Refresh, ALeaseThatIsRevokedMeanwhileIsReplaced) {
  constexpr uint64_t kLease = 5, kSecondLease = 6;
  FakeWorker worker(7);
  std::atomic<FakeWorker*> next = nullptr;
  const std::shared_ptr<LocalSession> session = testing::OpenFakeSession(worker, next);
  LocalSequence sequence(session, kFakeCache, kFakeSequence);
  worker.Grant(kLease, 0, 100, EncodeFakeImage(1, {110, 100}));
  std::shared_ptr<Image> image;
  ASSERT_EQ(sequence.Refresh(&image), PQC_OK) << pqc_last_error();
  worker.before_refusal = [&] {
    worker.words(0).flags |= kvstore::LeaseWords::kRevoked;
    worker.Grant(kSecondLease, 1, 40, EncodeFakeImage(1, {40, 40}));
  };
  ASSERT_EQ(sequence.Refresh(&image), PQC_OK) << pqc_last_error();
  EXPECT_EQ(sequence.lease().lease_id, kSecondLease);
  ASSERT_EQ(worker.attached.size(), 3u);
  EXPECT_EQ(worker.attached[1].lease_id, kLease);
  EXPECT_EQ(worker.attached[2].lease_id, 0u);
  // Another refusal is the caller's.
  worker.before_refusal = [] {};
  EXPECT_EQ(sequence.Refresh(&image), PQC_FAILED_PRECONDITION);
}

}  // namespace
}  // namespace pqcached::client
