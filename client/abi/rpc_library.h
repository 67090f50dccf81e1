// Loads libpqcached_rpc, separating its gRPC and protobuf from those of the engine.
#ifndef PQCACHED_CLIENT_ABI_RPC_LIBRARY_H_
#define PQCACHED_CLIENT_ABI_RPC_LIBRARY_H_

#include "client/base/remote.h"

namespace pqcached::client {

// Sets *entry to the library's entry; `field` names the path in errors. The library stays loaded
// forever, because gRPC's threads may outlive their channels. A null `path` searches the directory
// of this library, then the loader's search path.
//
// Errors: PQC_FAILED_PRECONDITION  the library cannot be loaded, or is older or newer than this one
//                                  works with
pqc_status LoadRpcLibrary(const char* path, const char* field, const RpcEntry** entry);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_ABI_RPC_LIBRARY_H_
