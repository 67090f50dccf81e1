// ReceivedMessage: one piece, whatever gRPC has received it in.
#include "service/rpc/received_message.h"

#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace pqcached::service {
namespace {

grpc::ByteBuffer BufferOf(const std::string& bytes, size_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += slice_bytes) {
    slices.emplace_back(bytes.substr(at, slice_bytes));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

TEST(ReceivedMessageTest, JoinsSlices) {
  std::string bytes;
  for (int i = 0; i < 10000; ++i) bytes += static_cast<char>(i * 7);
  ReceivedMessage message;
  for (const size_t size : {size_t{10000}, size_t{3}, size_t{9999}, size_t{0}, size_t{700}}) {
    for (const size_t slice_bytes : {size_t{1}, size_t{64}, size_t{4096}, size_t{10000}}) {
      const std::string sent = bytes.substr(0, size);
      grpc::ByteBuffer buffer = BufferOf(sent, slice_bytes);
      const std::span<const std::byte> taken = message.Take(&buffer);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(taken.data()), taken.size()), sent);
    }
  }
}

TEST(ReceivedMessageTest, DoesNotCopyWhatIsOnePiece) {
  const grpc::Slice slice(std::string(5000, 'a'));
  grpc::ByteBuffer buffer(&slice, 1);
  ReceivedMessage message;
  EXPECT_EQ(static_cast<const void*>(message.Take(&buffer).data()), slice.begin());
}

}  // namespace
}  // namespace pqcached::service
