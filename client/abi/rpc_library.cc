#include "client/abi/rpc_library.h"

#include <dlfcn.h>

#include <string>

#include "client/base/error.h"
#include "client/base/library.h"

namespace pqcached::client {
namespace {

constexpr char kFileName[] = "libpqcached_rpc.so";

// Returns true when the process has replaced the function, as sanitizers, jemalloc or tcmalloc do.
bool IsReplaced(const char* library, const char* function) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) return false;
  const bool replaced = dlsym(RTLD_DEFAULT, function) != dlsym(handle, function);
  dlclose(handle);
  return replaced;
}

// Returns dlopen's mode. RTLD_DEEPBIND makes the library prefer its own gRPC and protobuf to those
// that the engine exports. If malloc is replaced, it would also make the library free, with libc's
// free, memory that the replacement has allocated, so RTLD_DEEPBIND is left out there. RTLD_LOCAL
// remains: it hides the library's symbols from the engine, but not the engine's from the library.
int LoadMode() {
  const bool replaced = IsReplaced("libc.so.6", "malloc") || IsReplaced("libc.so.6", "free") ||
                        IsReplaced("libstdc++.so.6", "_Znwm") ||
                        IsReplaced("libstdc++.so.6", "_ZdlPv");
  return RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | (replaced ? 0 : RTLD_DEEPBIND);
}

}  // namespace

pqc_status LoadRpcLibrary(const char* path, const char* field, const RpcEntry** entry) {
  std::string reasons;
  void* const library = LoadLibrary(path, kFileName, LoadMode(), &reasons);
  if (!library) return Fail(PQC_FAILED_PRECONDITION, field, "%s", reasons.c_str());

  const auto get = reinterpret_cast<const RpcEntry* (*)()>(dlsym(library, kRpcEntrySymbol));
  if (!get) {
    return Fail(PQC_FAILED_PRECONDITION, field, "%s has no %s", path ? path : kFileName,
                kRpcEntrySymbol);
  }
  const RpcEntry* found = get();
  const bool is_newer = found->remote_version > kRemoteVersion;
  if (is_newer ? found->oldest_client_version > kRemoteVersion
               : found->remote_version < kOldestRemoteVersion) {
    return Fail(PQC_FAILED_PRECONDITION, field,
                "%s has version %u of the internal interface, and this client works with %u to %u; "
                "install the two libraries of one release",
                path ? path : kFileName, found->remote_version, kOldestRemoteVersion,
                kRemoteVersion);
  }
  *entry = found;
  return PQC_OK;
}

}  // namespace pqcached::client
