#include "kvstore/plugins/plugin_library.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/indexes/seeds.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

constexpr char kKey[] = "index_plugins";
constexpr char kEntrySymbol[] = "pqcached_index_plugin";

// Memory that stays until the process ends: index types point into it, and it counts for them.
struct Loaded {
  std::deque<PluginIndex> called;
  std::deque<SwitchedOffIndex> switched_off;
  std::vector<std::unique_ptr<PluginCrashes>> crashes;
};

Loaded& AllLoaded() {
  static Loaded& loaded = *new Loaded;
  return loaded;
}

struct Library {
  std::string path;
  uint64_t file = 0;  // PluginFileNumber
  const PluginDescription* description = nullptr;
};

absl::Status Refuse(const std::string& path, const std::string& text) {
  return InvalidArgument(kKey, absl::StrCat(path, ": ", text));
}

// Refuses what every user of the machine could replace.
absl::Status CheckWriters(const std::string& path, struct stat* status) {
  if (stat(path.c_str(), status) != 0) return Refuse(path, "cannot be read");
  if ((status->st_mode & S_IWOTH) != 0) return Refuse(path, "every user can write to it");
  if (status->st_uid != 0 && status->st_uid != geteuid()) {
    return Refuse(path, "belongs to another user than root or the sidecar's");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> LibrariesIn(const std::string& directory) {
  struct stat status = {};
  RETURN_IF_ERROR(CheckWriters(directory, &status));
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator each(directory, error), end; !error && each != end;
       each.increment(error)) {
    if (each->path().extension() == ".so") paths.push_back(each->path().string());
  }
  if (error) return Refuse(directory, error.message());
  if (paths.size() > kMaxPlugins) {
    return Refuse(directory,
                  absl::StrCat(paths.size(), " libraries, must be at most ", kMaxPlugins));
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Returns a description of this version for one of version 1, which ends before needs_queries. It
// stays, as libraries do.
const PluginDescription* WithoutQueries(const PluginDescription& description) {
  static std::deque<PluginDescription> copies;
  PluginDescription& copy = copies.emplace_back();
  std::memcpy(&copy, &description, offsetof(PluginDescription, needs_queries));
  return &copy;
}

absl::StatusOr<Library> Open(const std::string& path) {
  Library library{.path = path};
  ASSIGN_OR_RETURN(library.file, PluginFileNumber(path));
  // Never closed: the types point into it.
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Refuse(path, absl::StrCat("cannot be loaded: ", dlerror()));
  void* const entry = dlsym(handle, kEntrySymbol);
  if (entry == nullptr) return Refuse(path, absl::StrCat("does not export ", kEntrySymbol));
  library.description = reinterpret_cast<const PluginDescription* (*)()>(entry)();
  if (library.description == nullptr) return Refuse(path, "describes nothing");
  const uint32_t version = library.description->version;
  if (version < 1 || version > PQCACHED_INDEX_PLUGIN_VERSION) {
    return Refuse(path,
                  absl::StrCat("is of version ", version, " of the interface, must lie in [1, ",
                               PQCACHED_INDEX_PLUGIN_VERSION, "]"));
  }
  if (version < 2) library.description = WithoutQueries(*library.description);
  if (const std::string wrong = CheckDescription(*library.description); !wrong.empty()) {
    return Refuse(path, wrong);
  }
  return library;
}

absl::Status CheckNew(const Library& library, const std::vector<Library>& others) {
  const std::string_view name = library.description->name;
  const bool exists = FindIndexType(name) != nullptr ||
                      std::any_of(others.begin(), others.end(), [&](const Library& other) {
                        return other.description->name == name;
                      });
  if (!exists) return absl::OkStatus();
  return Refuse(library.path, absl::StrCat("the index ", library.description->name, " exists"));
}

}  // namespace

absl::StatusOr<uint64_t> PluginFileNumber(const std::string& path) {
  struct stat status = {};
  RETURN_IF_ERROR(CheckWriters(path, &status));
  uint64_t number = 0;
  for (const uint64_t part :
       {uint64_t{status.st_dev}, uint64_t{status.st_ino}, static_cast<uint64_t>(status.st_size),
        static_cast<uint64_t>(status.st_mtim.tv_sec),
        static_cast<uint64_t>(status.st_mtim.tv_nsec)}) {
    number = MixSeed(number, part);
  }
  return number;
}

absl::StatusOr<PluginLibraries> PluginLibraries::Load(const std::string& directory,
                                                      DescriptorKeeper* keeper) {
  PluginLibraries loaded;
  SetPluginTypes({});
  ASSIGN_OR_RETURN(const std::vector<std::string> paths, LibrariesIn(directory));
  std::vector<Library> libraries;
  for (const std::string& path : paths) {
    ASSIGN_OR_RETURN(Library library, Open(path));
    RETURN_IF_ERROR(CheckNew(library, libraries));
    libraries.push_back(std::move(library));
  }
  if (libraries.empty()) return loaded;
  ASSIGN_OR_RETURN(auto crashes, PluginCrashes::Open(keeper));
  std::vector<const IndexType*> types;
  for (const Library& library : libraries) {
    const PluginDescription& description = *library.description;
    const PluginCrashes::Found found =
        crashes->Find(description.name, library.file, SteadyTime::Now());
    loaded.reports_.push_back({.name = description.name,
                               .path = library.path,
                               .crashes = found.crashes,
                               .has_crashed = found.has_crashed,
                               .is_off = found.is_off});
    if (found.is_off) {
      types.push_back(&AllLoaded().switched_off.emplace_back(
          description, absl::StrCat("is switched off after ", kMaxPluginCrashes,
                                    " crashes within a minute; replace ", library.path,
                                    " and restart the worker")));
    } else {
      types.push_back(&AllLoaded().called.emplace_back(description, found.calls));
    }
  }
  SetPluginTypes(types);
  AllLoaded().crashes.push_back(std::move(crashes));
  return loaded;
}

}  // namespace pqcached::kvstore
