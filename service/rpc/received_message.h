// ReceivedMessage holds the bytes of one message as gRPC has received them, and shows them in one
// piece.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_RPC_RECEIVED_MESSAGE_H_
#define PQCACHED_SERVICE_RPC_RECEIVED_MESSAGE_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace pqcached::service {

class ReceivedMessage {
 public:
  // Takes the message out of `received`, in place of the previous one, and returns its bytes. They
  // are copied only when they were received in several slices.
  std::span<const std::byte> Take(grpc::ByteBuffer* received);

 private:
  std::vector<grpc::Slice> slices_;
  std::unique_ptr<std::byte[]> joined_;
  size_t joined_capacity_ = 0;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_RECEIVED_MESSAGE_H_
