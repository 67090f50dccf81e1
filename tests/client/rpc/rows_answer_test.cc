// RowsAnswer: the rows of an answer, whatever pieces gRPC has received it in.
#include "client/rpc/rows_answer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "pqcached/v1/kv_cache.pb.h"

namespace pqcached::client {
namespace {

constexpr RowsAnswer::Shape kShape{
    .dtype = kernels::DType::kBf16, .kv_heads = 3, .tokens = 50, .dim = 20};
constexpr size_t kRowBytes = 40;

std::string RowBytesOf(const RowsAnswer::Shape& shape) {
  std::string bytes(shape.kv_heads * shape.tokens * shape.row_bytes(), '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 251);
  return bytes;
}

v1::FetchBlocksResponse MessageOf(const RowsAnswer::Shape& shape) {
  v1::FetchBlocksResponse message;
  v1::Tensor* const block = message.add_blocks();
  block->set_dtype(v1::DTYPE_BFLOAT16);
  for (const uint64_t extent : {shape.kv_heads, shape.tokens, shape.dim}) block->add_shape(extent);
  block->set_inline_data(RowBytesOf(shape));
  message.set_rows_epoch(77);
  return message;
}

grpc::ByteBuffer BufferOf(const std::string& bytes, size_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += slice_bytes) {
    slices.emplace_back(bytes.substr(at, slice_bytes));
  }
  return {slices.data(), slices.size()};
}

grpc::Status Take(const std::string& message, RowsAnswer* answer) {
  grpc::ByteBuffer buffer = BufferOf(message, 1000);
  return answer->Take(&buffer, kShape);
}

// Copies the runs of an answer to where their rows belong.
std::string JoinRuns(const RowsAnswer& answer) {
  std::string joined(kShape.kv_heads * kShape.tokens * kRowBytes, '\0');
  uint64_t next = 0;
  EXPECT_TRUE(answer.VisitRuns([&](uint64_t token, uint64_t count, const std::byte* const* heads) {
    EXPECT_EQ(token, next);
    next += count;
    for (size_t head = 0; head < kShape.kv_heads; ++head) {
      std::memcpy(joined.data() + (head * kShape.tokens + token) * kRowBytes, heads[head],
                  count * kRowBytes);
    }
    return true;
  }));
  EXPECT_EQ(next, kShape.tokens);
  return joined;
}

TEST(RowsAnswerTest, GivesTheRowsOfAnyPieces) {
  const std::string sent = MessageOf(kShape).SerializeAsString();
  const std::string rows = RowBytesOf(kShape);
  constexpr size_t kStride = 60 * kRowBytes;
  for (const size_t slice_bytes : {1, 7, 40, 64, 1000, 1999, 2000, 2001, 100000}) {
    RowsAnswer answer;
    grpc::ByteBuffer buffer = BufferOf(sent, slice_bytes);
    ASSERT_TRUE(answer.Take(&buffer, kShape).ok());
    EXPECT_EQ(answer.rows_epoch(), 77u);
    EXPECT_EQ(JoinRuns(answer), rows) << slice_bytes;

    std::string copied(kShape.kv_heads * kStride, 'x');
    answer.CopyTo(reinterpret_cast<std::byte*>(copied.data()), kStride);
    constexpr size_t kHeadBytes = kShape.tokens * kRowBytes;
    for (size_t head = 0; head < kShape.kv_heads; ++head) {
      EXPECT_EQ(copied.substr(head * kStride, kHeadBytes),
                rows.substr(head * kHeadBytes, kHeadBytes));
      EXPECT_EQ(copied[head * kStride + kHeadBytes], 'x');
    }
  }
}

TEST(RowsAnswerTest, VisitsEndWhenTheVisitorSaysSo) {
  RowsAnswer answer;
  ASSERT_TRUE(Take(MessageOf(kShape).SerializeAsString(), &answer).ok());
  int visits = 0;
  EXPECT_FALSE(answer.VisitRuns([&](uint64_t, uint64_t, const std::byte* const*) {
    ++visits;
    return false;
  }));
  EXPECT_EQ(visits, 1);
}

TEST(RowsAnswerTest, UnknownFieldsAndAnotherOrderDoNotMatter) {
  const v1::FetchBlocksResponse message = MessageOf(kShape);
  v1::FetchBlocksResponse epoch;
  epoch.set_rows_epoch(message.rows_epoch());
  v1::FetchBlocksResponse blocks = message;
  blocks.clear_rows_epoch();
  const std::string unknown = {'\x78', '\x05'};  // field 15, a varint
  RowsAnswer answer;
  const grpc::Status taken =
      Take(epoch.SerializeAsString() + unknown + blocks.SerializeAsString() + unknown, &answer);
  ASSERT_TRUE(taken.ok()) << taken.error_message();
  EXPECT_EQ(answer.rows_epoch(), 77u);
  EXPECT_EQ(JoinRuns(answer), RowBytesOf(kShape));
}

TEST(RowsAnswerTest, OtherAnswersAreRefused) {
  const auto refuses = [](const std::string& message, const std::string& reason) {
    RowsAnswer answer;
    const grpc::Status status = Take(message, &answer);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL) << reason;
    EXPECT_NE(status.error_message().find(reason), std::string::npos) << status.error_message();
  };
  const auto changed = [](auto change) {
    v1::FetchBlocksResponse message = MessageOf(kShape);
    change(message);
    return message.SerializeAsString();
  };
  const std::string good = MessageOf(kShape).SerializeAsString();
  refuses("", "blocks: must be one");
  refuses(good + good, "blocks: must be one");
  refuses(changed([](auto& message) { message.mutable_blocks(0)->set_dtype(v1::DTYPE_FLOAT16); }),
          "blocks[0]: dtype");
  refuses(changed([](auto& message) { message.mutable_blocks(0)->set_shape(1, 49); }),
          "blocks[0]: another shape");
  refuses(changed([](auto& message) { message.mutable_blocks(0)->add_strides(1); }),
          "blocks[0]: strides");
  refuses(
      changed([](auto& message) { message.mutable_blocks(0)->mutable_inline_data()->pop_back(); }),
      "blocks[0]: 5999 bytes");
  refuses(changed([](auto& message) { message.mutable_blocks(0)->clear_inline_data(); }),
          "blocks[0]: 0 bytes");
  for (const size_t size : {size_t{1}, size_t{5}, size_t{20}, size_t{3000}, good.size() - 1}) {
    refuses(good.substr(0, size), "is not a FetchBlocksResponse");
  }
}

}  // namespace
}  // namespace pqcached::client
