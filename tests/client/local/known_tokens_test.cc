// The number of tokens that an image is known to place, which readers raise and roll-backs limit.
#include <gtest/gtest.h>

#include "client/local/image.h"

namespace pqcached::client {
namespace {

TEST(KnownTokensTest, ANumberFromBeforeALimitRaisesNothing) {
  KnownTokens known(100);
  const KnownTokens::Value before = known.Load();
  known.Raise(before, 90);
  EXPECT_EQ(known.Load().tokens, 100u);
  known.Raise(before, 110);
  known.Raise(before, 105);  // of a slower reader
  EXPECT_EQ(known.Load().tokens, 110u);
  known.Limit(60);
  known.Raise(before, 120);
  EXPECT_EQ(known.Load().tokens, 60u);
  known.Raise(known.Load(), 70);
  EXPECT_EQ(known.Load().tokens, 70u);
}

}  // namespace
}  // namespace pqcached::client
