#include "service/config/start_limits.h"

#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/statfs.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvstore/limits/memory_ledger.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

// Per session: the connection of the broker, control memory, staging, and copies of these that are
// on their way to a client.
constexpr size_t kDescriptorsOfASession = 7;
constexpr size_t kDescriptorsOfACache = 4;  // pool and records, twice while they are recovered
// The connection, and both ends of the plain one behind it.
constexpr size_t kDescriptorsOfATlsConnection = 3;
constexpr size_t kOtherDescriptors = 256;

}  // namespace

size_t DescriptorsNeeded(const Config& config) {
  size_t tcp_connections = config.tcp_listen.empty() ? 0 : TcpConnectionsOf(config);
  if (UsesTls(config)) {
    tcp_connections = kDescriptorsOfATlsConnection * tcp_connections + 2 * config.max_handshakes;
  }
  return kDescriptorsOfASession * config.max_sessions + config.max_connections + tcp_connections +
         kDescriptorsOfACache * config.max_caches + kOtherDescriptors;
}

StartLimits ReadStartLimits(const Config& config) {
  StartLimits limits;
  rlimit descriptors = {};
  if (getrlimit(RLIMIT_NOFILE, &descriptors) == 0 && descriptors.rlim_max != RLIM_INFINITY) {
    limits.descriptors = descriptors.rlim_max;
  }
  struct statfs volume = {};
  bool huge = false;
  if (!config.pool_directory.empty() && statfs(config.pool_directory.c_str(), &volume) == 0) {
    huge = static_cast<uint64_t>(volume.f_type) == HUGETLBFS_MAGIC;
    // A tmpfs without a size has no blocks.
    if (volume.f_blocks > 0) {
      limits.volume_bytes =
          static_cast<size_t>(volume.f_blocks) * static_cast<size_t>(volume.f_bsize);
    }
  }
  if (huge) return limits;
  const kvstore::MemoryLimits memory = kvstore::ReadMemoryLimits();
  limits.memory_bytes = memory.total_bytes;
  limits.memory_source = memory.total_source;
  return limits;
}

std::vector<std::string> TooLow(const Config& config, const StartLimits& limits) {
  std::vector<std::string> texts;
  if (const size_t needed = DescriptorsNeeded(config); needed > limits.descriptors) {
    texts.push_back(absl::StrCat("max_sessions ", config.max_sessions, ", max_connections ",
                                 config.max_connections, ", max_caches ", config.max_caches,
                                 ": up to ", needed, " descriptors; RLIMIT_NOFILE is ",
                                 limits.descriptors));
  }
  constexpr size_t kMargin = kvstore::MemoryLedger::kMarginBytes;
  if (limits.memory_bytes != kvstore::kUnlimitedBytes &&
      (limits.memory_bytes < kMargin || config.max_pool_bytes > limits.memory_bytes - kMargin)) {
    texts.push_back(absl::StrCat("max_pool_bytes ", FormatSize(config.max_pool_bytes), ": ",
                                 limits.memory_source, " limits memory to ", limits.memory_bytes,
                                 " bytes, ", kMargin, " of which stay free"));
  }
  if (config.max_pool_bytes > limits.volume_bytes) {
    texts.push_back(absl::StrCat("max_pool_bytes ", FormatSize(config.max_pool_bytes), ": ",
                                 config.pool_directory, " is on a file system of ",
                                 limits.volume_bytes, " bytes"));
  }
  return texts;
}

absl::Status CheckStartLimits(const Config& config, const Log& log) {
  const std::vector<std::string> texts = TooLow(config, ReadStartLimits(config));
  for (const std::string& text : texts) log.Warning("limit_too_low", {{"message", text}});
  if (texts.empty() || !config.strict_start) return absl::OkStatus();
  return FailedPrecondition("strict_start", absl::StrJoin(texts, "; "));
}

}  // namespace pqcached::service
