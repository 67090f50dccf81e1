// Hostile tenants: threads that make the calls of one kind that cost the sidecar most, without a
// pause, until their process ends.
#ifndef PQCACHED_TESTS_FAULT_TENANTS_HOSTILE_H_
#define PQCACHED_TESTS_FAULT_TENANTS_HOSTILE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "pqcached/client.hpp"

namespace pqcached::testing {

enum class Hostility : uint8_t { kSessions, kIngest, kBuilds, kSelfTest, kOpenCache };

struct HostilityRow {
  Hostility hostility = Hostility::kSessions;
  const char* name = "";
  uint32_t threads = 0;
  // Whether the sidecar carries out calls of this kind, and whether it refuses any.
  bool is_taken = true;
  bool is_refused = true;
};

inline constexpr std::array kHostilities = {
    // Sessions up to the limit, which are then all closed.
    HostilityRow{Hostility::kSessions, "sessions", 4, true, true},
    // Rows of prompts in messages of 12 MB, until the cache is full.
    HostilityRow{Hostility::kIngest, "ingest", 8, true, true},
    // Indexes of long sequences.
    HostilityRow{Hostility::kBuilds, "builds", 4, true, false},
    // An rpc for operators, which occupies a core for long.
    HostilityRow{Hostility::kSelfTest, "selftest", 16, false, true},
    // Caches of more memory than there is, and as many as it holds, which are then dropped.
    HostilityRow{Hostility::kOpenCache, "opencache", 8, true, true},
};

// What became of calls. Thread-safe.
class Tally {
 public:
  // Counts a call; returns whether it was carried out.
  bool Note(const Status& status);

  uint64_t taken() const { return taken_; }
  uint64_t refused() const { return refused_; }  // for a limit or a missing right
  uint64_t failed() const { return failed_; }    // for any other reason, which is printed

 private:
  std::atomic<uint64_t> taken_ = 0, refused_ = 0, failed_ = 0;
};

// A thread of a hostile tenant.
struct HostileThread {
  std::string endpoint;
  std::string tenant;
  uint32_t number = 0;  // odd ones take the remote path
  Tally& tally;

  // Makes calls forever. Throws when a call fails that the tenant's own calls depend on.
  void Run(Hostility hostility) const;

 private:
  Result<Client> Open() const;
  void OpenSessions() const;
  void IngestRows() const;
  void BuildIndexes() const;
  void CallSelfTest() const;
  void OpenCaches() const;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_TENANTS_HOSTILE_H_
