// PluginLibraries: the plug-ins of a directory.
#ifndef PQCACHED_KVSTORE_PLUGINS_PLUGIN_LIBRARY_H_
#define PQCACHED_KVSTORE_PLUGINS_PLUGIN_LIBRARY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/plugins/plugin_crashes.h"
#include "kvstore/plugins/plugin_index.h"

namespace pqcached::kvstore {

// Returns a number of a library's file that another file does not have. Errors: kInvalidArgument.
absl::StatusOr<uint64_t> PluginFileNumber(const std::string& path);

class PluginLibraries {
 public:
  // A plug-in, for the log.
  struct Report {
    std::string name;
    std::string path;
    uint32_t crashes = 0;      // the last ones
    bool has_crashed = false;  // in the last process
    bool is_off = false;
  };

  // Loads the libraries "*.so" of a directory in the order of their names, and makes their indexes
  // known (SetPluginTypes). They stay until the process ends. `keeper` may be null.
  //
  // REQUIRES: called once, before stores and other threads.
  // Errors: kInvalidArgument    index_plugins: the directory, or a library, by its name: it cannot
  //                             be loaded, is of another version, others may write to it, ...
  //         kResourceExhausted  no memory
  static absl::StatusOr<PluginLibraries> Load(const std::string& directory,
                                              DescriptorKeeper* keeper);

  const std::vector<Report>& reports() const { return reports_; }

 private:
  std::vector<Report> reports_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_PLUGINS_PLUGIN_LIBRARY_H_
