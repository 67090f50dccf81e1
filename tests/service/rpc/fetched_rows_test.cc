// ToBuffer: the same message as protobuf writes.
#include "service/rpc/fetched_rows.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "pqcached/v1/kv_cache.pb.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

kvstore::Rows RowsOf(uint32_t tokens, int seed) {
  kvstore::Rows rows;
  rows.dtype = kernels::DType::kF32;
  rows.kv_heads = 2;
  rows.tokens = tokens;
  rows.dim = 8;
  rows.data.resize(size_t{rows.kv_heads} * tokens * rows.dim * sizeof(float));
  for (size_t i = 0; i < rows.data.size(); ++i) {
    rows.data[i] = static_cast<std::byte>(i * 3 + static_cast<size_t>(seed));
  }
  return rows;
}

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

TEST(FetchedRowsTest, IsTheMessageThatProtobufWrites) {
  const std::vector<std::vector<uint32_t>> cases = {{}, {1}, {5000}, {1, 5000, 3, 4, 700}};
  for (const std::vector<uint32_t>& tokens : cases) {
    for (const uint64_t epoch : {uint64_t{0}, uint64_t{1} << 40}) {
      FetchedBlocks fetched{.blocks = {}, .rows_epoch = epoch};
      v1::FetchBlocksResponse expected;
      expected.set_rows_epoch(epoch);
      for (const uint32_t count : tokens) {
        fetched.blocks.push_back(RowsOf(count, static_cast<int>(fetched.blocks.size())));
        ToWire(fetched.blocks.back(), expected.add_blocks());
      }
      EXPECT_EQ(BytesOf(ToBuffer(std::move(fetched))), expected.SerializeAsString());
    }
  }
}

TEST(FetchedRowsTest, ManyRowsAreSentFromWhereTheyAre) {
  FetchedBlocks fetched{.blocks = {}, .rows_epoch = 1};
  fetched.blocks.push_back(RowsOf(5000, 1));
  const void* const data = fetched.blocks.front().data.data();
  const grpc::ByteBuffer buffer = ToBuffer(std::move(fetched));
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(buffer.Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 3u);
  EXPECT_EQ(static_cast<const void*>(slices[1].begin()), data);
}

}  // namespace
}  // namespace pqcached::service
