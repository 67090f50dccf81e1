// PluginCrashes: the crashes of plug-ins, in memory that outlives the worker.
//
// The memory counts the calls of each plug-in that are in progress. A worker that ends by itself
// finishes them; where the next one finds some, the worker has ended during a call: a crash of the
// plug-in, as far as this can be known from outside.
//
// Single-threaded, but for the counts.
#ifndef PQCACHED_KVSTORE_PLUGINS_PLUGIN_CRASHES_H_
#define PQCACHED_KVSTORE_PLUGINS_PLUGIN_CRASHES_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/memory/keeper.h"

namespace pqcached::kvstore {

inline constexpr uint32_t kMaxPluginCrashes = 3;  // within kPluginCrashTime: switched off
inline constexpr absl::Duration kPluginCrashTime = absl::Minutes(1);

class PluginCrashes {
 public:
  static constexpr char kMemoryName[] = "plugin-calls";  // has no data of tenants

  struct Found {
    std::atomic<uint32_t>* calls = nullptr;  // in progress; 0
    uint32_t crashes = 0;                    // the last ones, at most kMaxPluginCrashes
    bool has_crashed = false;                // in the last worker
    bool is_off = false;
  };

  // Without a keeper (null) nothing is known of earlier processes.
  //
  // Errors: kResourceExhausted  no memory
  static absl::StatusOr<std::unique_ptr<PluginCrashes>> Open(DescriptorKeeper* keeper);

  // Returns what is known of a plug-in. `file`: a number of its library's file, which another file
  // does not have: what is known of one that was replaced is forgotten. REQUIRES: at most
  // kMaxPlugins different names in the life of the memory, else the oldest is forgotten.
  Found Find(std::string_view name, uint64_t file, SteadyTime now);

 private:
  struct Record;
  struct Page;
  explicit PluginCrashes(Mapping memory);
  Record& RecordOf(std::string_view name, uint64_t file);

  const Mapping memory_;
  Page& page_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_PLUGINS_PLUGIN_CRASHES_H_
