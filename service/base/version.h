// Version and capabilities of this sidecar, as shown to operators and as sent in the capability
// handshake.
#ifndef PQCACHED_SERVICE_BASE_VERSION_H_
#define PQCACHED_SERVICE_BASE_VERSION_H_

#include <array>
#include <cstdint>
#include "absl/strings/string_view.h"

namespace pqcached::service {

inline constexpr absl::string_view kVersion = PQCACHED_VERSION;
inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr std::array<absl::string_view, 16> kCapabilities = {
    "append",        "attend",           "commit",  "fetch",        "index.flat", "index.live",
    "index.pq",      "ingest.inline",    "prefix",  "query.length", "rank",       "score",
    "sequence.fork", "sequence.suspend", "session", "topk"};
// Further capabilities of a sidecar that serves a broker, which local clients need.
inline constexpr std::array<absl::string_view, 2> kLocalCapabilities = {"local.broker", "staging"};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_VERSION_H_
