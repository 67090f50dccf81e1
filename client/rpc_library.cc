#include "client/rpc_library.h"

#include <dlfcn.h>

#include <string>

#include "client/error.h"

namespace pqcached::client {
namespace {

constexpr char kFileName[] = "libpqcached_rpc.so";

std::string BesideThisLibrary() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&LoadRpcLibrary), &info) == 0 || !info.dli_fname)
    return "";
  const std::string own = info.dli_fname;
  const size_t slash = own.rfind('/');
  return slash == std::string::npos ? "" : own.substr(0, slash + 1) + kFileName;
}

// True when the process has replaced the function, as sanitizers, jemalloc or tcmalloc do.
bool IsReplaced(const char* library, const char* function) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) return false;
  const bool replaced = dlsym(RTLD_DEFAULT, function) != dlsym(handle, function);
  dlclose(handle);
  return replaced;
}

// RTLD_DEEPBIND makes the library prefer its own gRPC and protobuf to those that the engine
// exports. Where malloc is replaced it would also make it free by libc what the replacement has
// allocated, so there it has to go: what is left is RTLD_LOCAL, which keeps the library's symbols
// from the engine, but not the engine's from the library.
int LoadMode() {
  const bool replaced = IsReplaced("libc.so.6", "malloc") || IsReplaced("libc.so.6", "free") ||
                        IsReplaced("libstdc++.so.6", "_Znwm") ||
                        IsReplaced("libstdc++.so.6", "_ZdlPv");
  return RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | (replaced ? 0 : RTLD_DEEPBIND);
}

// Null, with the loader's reason added to *reasons, when it cannot be loaded.
void* Load(const std::string& path, std::string* reasons) {
  void* library = dlopen(path.c_str(), LoadMode());
  if (!library) {
    const char* reason = dlerror();
    *reasons += (reasons->empty() ? "" : "; ") + std::string(reason ? reason : path);
  }
  return library;
}

}  // namespace

pqc_status LoadRpcLibrary(const char* path, const RpcEntry** entry) {
  std::string reasons;
  void* library = nullptr;
  if (path) {
    library = Load(path, &reasons);
  } else {
    if (const std::string beside = BesideThisLibrary(); !beside.empty())
      library = Load(beside, &reasons);
    if (!library) library = Load(kFileName, &reasons);
  }
  if (!library) return Fail(PQC_FAILED_PRECONDITION, "rpc_library_path: %s", reasons.c_str());

  const auto get = reinterpret_cast<const RpcEntry* (*)()>(dlsym(library, kRpcEntrySymbol));
  if (!get) {
    return Fail(PQC_FAILED_PRECONDITION, "rpc_library_path: %s has no %s", path ? path : kFileName,
                kRpcEntrySymbol);
  }
  const RpcEntry* found = get();
  if (found->remote_version != kRemoteVersion) {
    return Fail(
        PQC_FAILED_PRECONDITION,
        "rpc_library_path: %s has version %u of the inner interface, this client %u; install "
        "the two libraries of one release",
        path ? path : kFileName, found->remote_version, kRemoteVersion);
  }
  *entry = found;
  return PQC_OK;
}

}  // namespace pqcached::client
