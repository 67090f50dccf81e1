// A libpqcached_rpc of another version, for tests: the real one, with other version numbers. It has
// all functions that an older one has, and a newer one would have more.
//   PQCACHED_RPC_LIBRARY, PQCACHED_OTHER_VERSION, PQCACHED_OTHER_OLDEST_CLIENT  set by CMake
#include <dlfcn.h>

#include "client/base/remote.h"

extern "C" __attribute__((visibility("default"))) const pqcached::client::RpcEntry*
pqcached_rpc_entry() {
  using pqcached::client::RpcEntry;
  static const RpcEntry entry = [] {
    void* const library = dlopen(PQCACHED_RPC_LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    const auto get = library ? reinterpret_cast<const RpcEntry* (*)()>(
                                   dlsym(library, pqcached::client::kRpcEntrySymbol))
                             : nullptr;
    RpcEntry other = get ? *get() : RpcEntry{};
    other.remote_version = PQCACHED_OTHER_VERSION;
    other.oldest_client_version = PQCACHED_OTHER_OLDEST_CLIENT;
    return other;
  }();
  return &entry;
}
