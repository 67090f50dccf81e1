// The interface between libpqcached_client and libpqcached_rpc keeps what version 10 had, so
// that libraries of adjacent versions work together. A struct that changes here is a break.
#include <gtest/gtest.h>

#include <cstddef>

#include "client/base/remote.h"

namespace pqcached::client {
namespace {

TEST(RemoteLayoutTest, StructsHaveTheLayoutOfVersion10) {
  EXPECT_EQ(sizeof(RefusalBuffer), 1284u);
  EXPECT_EQ(sizeof(StagingPlace), 40u);
  EXPECT_EQ(sizeof(TensorView), 128u);
  EXPECT_EQ(sizeof(RowBlock), 272u);
  EXPECT_EQ(sizeof(LayerShape), 32u);
  EXPECT_EQ(sizeof(QueryView), 184u);
  EXPECT_EQ(sizeof(FetchView), 48u);
  EXPECT_EQ(sizeof(PositionsView), 16u);
  EXPECT_EQ(sizeof(TopKItem), 200u);
  EXPECT_EQ(sizeof(AttendItem), 288u);
  EXPECT_EQ(sizeof(LeaseView), 24u);
  EXPECT_EQ(sizeof(ImageSink), 16u);
  EXPECT_EQ(sizeof(AppendItem), 88u);
  EXPECT_EQ(sizeof(StagedRows), 32u);
  EXPECT_EQ(sizeof(TextSink), 16u);
  EXPECT_EQ(sizeof(ScoresOut), 24u);
  EXPECT_EQ(sizeof(RemoteOptions), 96u);
  EXPECT_EQ(sizeof(kvstore::Selection), 184u);
  EXPECT_EQ(sizeof(kvstore::IndexDescriptor), 16u);
  EXPECT_EQ(offsetof(RpcEntry, open), 8u);
}

TEST(RemoteLayoutTest, LaterStructsHaveTheLayoutOfTheirFirstVersion) {
  EXPECT_EQ(sizeof(ScoredItem), 280u);  // 17
}

}  // namespace
}  // namespace pqcached::client
