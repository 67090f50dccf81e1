#include "client/base/library.h"

#include <dlfcn.h>

namespace pqcached::client {
namespace {

std::string PathInThisFolder(const char* file_name) {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&LoadLibrary), &info) == 0 || !info.dli_fname) return "";
  const std::string own = info.dli_fname;
  const size_t slash = own.rfind('/');
  return slash == std::string::npos ? "" : own.substr(0, slash + 1) + file_name;
}

void* Load(const std::string& path, int mode, std::string* reasons) {
  void* library = dlopen(path.c_str(), mode);
  if (!library) {
    const char* reason = dlerror();
    *reasons += (reasons->empty() ? "" : "; ") + std::string(reason ? reason : path);
  }
  return library;
}

}  // namespace

void* LoadLibrary(const char* path, const char* file_name, int mode, std::string* reasons) {
  if (path) return Load(path, mode, reasons);
  void* library = nullptr;
  if (const std::string beside = PathInThisFolder(file_name); !beside.empty()) {
    library = Load(beside, mode, reasons);
  }
  return library ? library : Load(file_name, mode, reasons);
}

}  // namespace pqcached::client
