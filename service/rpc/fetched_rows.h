// The answer of FetchBlocks as gRPC sends it. The rows are sent from where the store has written
// them, because a protobuf message would copy them twice more. The wire format is that of
// v1::FetchBlocksResponse.
#ifndef PQCACHED_SERVICE_RPC_FETCHED_ROWS_H_
#define PQCACHED_SERVICE_RPC_FETCHED_ROWS_H_

#include <grpcpp/support/byte_buffer.h>

#include "service/handlers/query_handlers.h"

namespace pqcached::service {

grpc::ByteBuffer ToBuffer(FetchedBlocks fetched);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_FETCHED_ROWS_H_
