#include "service/rpc/received_message.h"

#include <grpcpp/support/slice.h>
#include <grpcpp/support/status.h>

#include <cstring>

namespace pqcached::service {

std::span<const std::byte> ReceivedMessage::Take(grpc::ByteBuffer* received) {
  slices_.clear();
  const size_t size = received->Length();
  const bool there = received->Dump(&slices_).ok();
  received->Clear();
  if (!there || slices_.empty()) return {};
  if (slices_.size() == 1) {
    const grpc::Slice& slice = slices_.front();
    return {reinterpret_cast<const std::byte*>(slice.begin()), slice.size()};
  }
  if (joined_capacity_ < size) {
    joined_ = std::make_unique_for_overwrite<std::byte[]>(size);
    joined_capacity_ = size;
  }
  size_t at = 0;
  for (const grpc::Slice& slice : slices_) {
    std::memcpy(joined_.get() + at, slice.begin(), slice.size());
    at += slice.size();
  }
  slices_.clear();
  return {joined_.get(), at};
}

}  // namespace pqcached::service
