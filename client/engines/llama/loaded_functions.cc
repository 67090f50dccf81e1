#include "client/engines/llama/loaded_functions.h"

#include <dlfcn.h>
#include <link.h>

namespace pqcached::llama {
namespace {

struct LibrarySearch {
  std::string_view prefix;
  std::vector<std::string> paths;
};

int AddLibrary(dl_phdr_info* info, size_t, void* context) {
  auto* const search = static_cast<LibrarySearch*>(context);
  const std::string_view path = info->dlpi_name;
  const std::string_view file = path.substr(path.rfind('/') + 1);
  if (file.starts_with(search->prefix) && file.find("pqcached") == std::string_view::npos) {
    search->paths.emplace_back(path);
  }
  return 0;
}

}  // namespace

LoadedFunctions::LoadedFunctions(std::string_view prefix) {
  LibrarySearch search{prefix, {}};
  dl_iterate_phdr(AddLibrary, &search);
  for (const std::string& path : search.paths) {
    if (void* handle = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_NOW)) libraries_.push_back(handle);
  }
}

void* LoadedFunctions::Address(const char* name) {
  void* address = dlsym(RTLD_DEFAULT, name);
  for (size_t i = 0; address == nullptr && i < libraries_.size(); ++i) {
    address = dlsym(libraries_[i], name);
  }
  if (address == nullptr && missing_.empty()) missing_ = name;
  return address;
}

}  // namespace pqcached::llama
