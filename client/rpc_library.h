// Loads libpqcached_rpc, so that its gRPC and protobuf never meet those of the engine.
#ifndef PQCACHED_CLIENT_RPC_LIBRARY_H_
#define PQCACHED_CLIENT_RPC_LIBRARY_H_

#include "client/remote.h"

namespace pqcached::client {

// Sets *entry to the library's, which stays loaded for ever: gRPC's threads may outlive their
// channels. `path` null: beside this library, then the loader's search path.
//
// Errors: PQC_FAILED_PRECONDITION  it cannot be loaded, or is of another version than this library
pqc_status LoadRpcLibrary(const char* path, const RpcEntry** entry);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_LIBRARY_H_
