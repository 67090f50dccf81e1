// The keys of the configuration: their texts, ranges and checks.
#include "service/config/config.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/exec.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/layout.h"
#include "service/base/refusal.h"
#include "service/config/config_pressure.h"
#include "service/config/config_tls.h"
#include "service/config/config_values.h"

namespace pqcached::service {
namespace {

constexpr std::array kLogLevels = {"trace", "debug", "info", "warning", "error", "critical", "off"};

struct CountRange {
  uint32_t min = 0;
  uint32_t max = std::numeric_limits<uint32_t>::max();
  uint32_t multiple = 1;
};

ConfigKey CountKey(absl::string_view name, absl::string_view text, uint32_t Config::*member,
                   CountRange range) {
  return {
      name, "COUNT", text,
      [=](absl::string_view value, Config& config) -> absl::Status {
        uint32_t count = 0;
        if (!absl::SimpleAtoi(value, &count) || count < range.min || count > range.max) {
          return Invalid(absl::StrFormat("must be a whole number in %d..%d", range.min, range.max));
        }
        if (count % range.multiple != 0) {
          return Invalid(absl::StrFormat("must be a multiple of %d", range.multiple));
        }
        config.*member = count;
        return absl::OkStatus();
      },
      [=](const Config& config) { return absl::StrCat(config.*member); }};
}

ConfigKey SizeKey(absl::string_view name, absl::string_view text, size_t Config::*member,
                  size_t min, size_t max) {
  return {name, "SIZE", text,
          [=](absl::string_view value, Config& config) -> absl::Status {
            ASSIGN_OR_RETURN(const size_t bytes, ParseSize(value));
            if (bytes < min || bytes > max) {
              return Invalid(absl::StrCat("must be in ", FormatSize(min), "..", FormatSize(max)));
            }
            config.*member = bytes;
            return absl::OkStatus();
          },
          [=](const Config& config) { return FormatSize(config.*member); }};
}

ConfigKey DurationKey(absl::string_view name, absl::string_view text,
                      absl::Duration Config::*member, absl::Duration min, absl::Duration max) {
  return {name, "DURATION", text,
          [=](absl::string_view value, Config& config) -> absl::Status {
            absl::Duration duration;
            if (!absl::ParseDuration(value, &duration)) {
              return Invalid("must be a duration with a unit, for example 500ms, 30s, 5m");
            }
            if (duration < min || duration > max) {
              return Invalid(absl::StrCat("must be in ", absl::FormatDuration(min), "..",
                                          absl::FormatDuration(max)));
            }
            config.*member = duration;
            return absl::OkStatus();
          },
          [=](const Config& config) { return absl::FormatDuration(config.*member); }};
}

absl::Status SetListen(absl::string_view value, Config& config) {
  if (!absl::StartsWith(value, "unix:///")) {
    return Invalid(
        "must be unix:// and an absolute path, for example unix:///run/pqcached/pqcached.sock");
  }
  const absl::string_view path = value.substr(kUnixScheme.size());
  if (path.size() > kMaxSocketPathBytes) {
    return Invalid(absl::StrFormat("its path has %d bytes; the kernel allows at most %d",
                                   path.size(), kMaxSocketPathBytes));
  }
  if (path.back() == '/') return Invalid("must name a socket, not a directory");
  config.listen = std::string(value);
  return absl::OkStatus();
}

ConfigKey BoolKey(absl::string_view name, absl::string_view text, bool Config::*member) {
  return {name, "BOOL", text,
          [=](absl::string_view value, Config& config) -> absl::Status {
            if (value != "true" && value != "false") return Invalid("must be true or false");
            config.*member = value == "true";
            return absl::OkStatus();
          },
          [=](const Config& config) { return config.*member ? "true" : "false"; }};
}

absl::Status SetDriftRatio(absl::string_view value, Config& config) {
  double ratio = 0;
  if (!absl::SimpleAtod(value, &ratio) || !(ratio >= 1.0 && ratio <= 100.0)) {
    return Invalid("must be a number in 1..100");
  }
  config.drift_ratio = ratio;
  return absl::OkStatus();
}

absl::Status SetPrefillCost(absl::string_view value, Config& config) {
  config.prefill_cost = {};
  if (value.empty()) return absl::OkStatus();
  const std::vector<absl::string_view> parts = absl::StrSplit(value, ',');
  std::array<double, 3> numbers = {};
  bool valid = parts.size() == numbers.size();
  for (size_t i = 0; valid && i < numbers.size(); ++i) {
    valid = absl::SimpleAtod(parts[i], &numbers[i]) && numbers[i] >= 0 && numbers[i] < 1e6;
  }
  if (!valid) {
    return Invalid(
        "must be three non-negative numbers: seconds per token squared, per token, and per "
        "layer, for example 1e-12,2e-7,1e-4");
  }
  config.prefill_cost = {numbers[0], numbers[1], numbers[2]};
  return absl::OkStatus();
}

std::string PrefillCostText(const Config& config) {
  const kvstore::PrefillCost& cost = config.prefill_cost;
  if (cost.seconds_per_token_squared == 0 && cost.seconds_per_token == 0 && cost.seconds == 0) {
    return "";
  }
  return absl::StrCat(cost.seconds_per_token_squared, ",", cost.seconds_per_token, ",",
                      cost.seconds);
}

absl::Status SetTenantUids(absl::string_view value, Config& config) {
  ASSIGN_OR_RETURN(TenantUids uids, TenantUids::Parse(value));
  config.tenant_uids = std::move(uids);
  return absl::OkStatus();
}

// Keys for clients on this host, which map memory.
void AddLocalKeys(std::vector<ConfigKey>& keys) {
  keys.push_back(BoolKey(
      "broker", "Serve the broker on <socket>.broker, so that clients on this host can map memory.",
      &Config::broker));
  keys.push_back(
      {"tenant_uids", "LIST",
       "Users of each tenant: 1000=team-a,2000-2999=team-b. The broker refuses other users; "
       "sessions whose uid is unknown (gRPC) cannot be of these tenants. Empty = clients name "
       "their tenant.",
       SetTenantUids, [](const Config& c) { return c.tenant_uids.text(); }});
  keys.push_back(BoolKey("strict_memory",
                         "No other process can map a pool for writing, not even as root.",
                         &Config::strict_memory));
  keys.push_back(BoolKey(
      "compare_repeats",
      "For debugging an engine: rows that a call repeats are compared with the stored ones, and "
      "the call is INVALID_ARGUMENT with the first number that differs (layer, position, kv head, "
      "key or value, element). false: repeated rows are acknowledged unread.",
      &Config::compare_repeats));
  keys.push_back(
      SizeKey("idle_reserve_bytes",
              "Free memory of all caches together that has pages ahead of its use, so that the "
              "next rows need not wait for the kernel to clear them; OpenCache returns when a "
              "new cache has its part. Caches that were used in the last two intervals of "
              "memory_check_interval have equal parts, or else the cache that was used last has"
              " all of it. Free memory beyond that and a fifth of the bytes in use returns to "
              "the machine when it was unused for two to three intervals; that of strict_memory"
              " and of hugetlbfs never returns. 0: rows wait for the pages that they are the "
              "first to use.",
              &Config::idle_reserve_bytes, 0, size_t{1} << 40));
  keys.push_back(CountKey("max_leases", "Leases (mapped sequences) per session.",
                          &Config::max_leases, {1, 1u << 20}));
  keys.push_back(
      DurationKey("lease_timeout",
                  "A lease that its client has not refreshed for this long is revoked; its "
                  "memory stays in place until the client releases it. 0s = never.",
                  &Config::lease_timeout, absl::ZeroDuration(), absl::Hours(24)));
  keys.push_back(SizeKey("max_staging_bytes", "Largest staging ring of one session.",
                         &Config::max_staging_bytes, size_t{1} << 20, size_t{1} << 40));
}

// Keys of incremental indexes, which are extended while rows arrive.
void AddLiveKeys(std::vector<ConfigKey>& keys) {
  keys.push_back(CountKey(
      "train_tokens", "Tokens, per kv head, that a codebook of an incremental index is trained on.",
      &Config::train_tokens, {kvstore::kBlockTokens, 1u << 20}));
  keys.push_back(
      {"drift_ratio", "NUMBER",
       "An incremental index retrains when the mean squared distance of new keys to their "
       "centroids exceeds the one in training by this factor.",
       SetDriftRatio, [](const Config& c) { return absl::StrCat(c.drift_ratio); }});
  keys.push_back(CountKey("merge_segments",
                          "Number of closed active segments that are merged into one. 0 = never.",
                          &Config::merge_segments, {0, 1024}));
  keys.push_back({"prefill_cost", "S2,S1,S0",
                  "Seconds of the engine's prefill per layer: per token squared, per token, and "
                  "fixed, of caches whose engines report none. Empty = unknown.",
                  SetPrefillCost, PrefillCostText});
  keys.push_back({"cost_file", "PATH",
                  "File for the measured costs of builds. Empty = measure at each start.",
                  [](absl::string_view value, Config& config) {
                    config.cost_file = std::string(value);
                    return absl::OkStatus();
                  },
                  [](const Config& c) { return c.cost_file; }});
}

absl::Status SetPoolDirectory(absl::string_view value, Config& config) {
  if (!value.empty() && value.front() != '/') return Invalid("must be an absolute path");
  config.pool_directory = std::string(value);
  return absl::OkStatus();
}

absl::Status SetIndexPlugins(absl::string_view value, Config& config) {
  if (!value.empty() && value.front() != '/') return Invalid("must be an absolute path");
  config.index_plugins = std::string(value);
  return absl::OkStatus();
}

absl::Status SetImageDirectory(absl::string_view value, Config& config) {
  if (!value.empty() && value.front() != '/') return Invalid("must be an absolute path");
  config.image_directory = std::string(value);
  return absl::OkStatus();
}

// Keys of the supervisor and of the recovery after a worker ends.
void AddRecoveryKeys(std::vector<ConfigKey>& keys) {
  keys.push_back(
      BoolKey("supervise",
              "Run as a supervisor that holds the memory and a worker that serves, so that "
              "acknowledged data outlives the worker.",
              &Config::supervise));
  keys.push_back(
      CountKey("max_failed_recoveries",
               "Workers in a row that may end before they serve. After that no worker is started, "
               "and the memory that they failed to recover stays, until `pqcachectl recover`. Ends "
               "for want of memory are not counted.",
               &Config::max_failed_recoveries, {1, 1000}));
  keys.push_back(
      BoolKey("start_empty_after_failure",
              "After max_failed_recoveries, do what `pqcachectl recover --discard` does: set the "
              "files of pool_directory aside, release other memory, and start empty.",
              &Config::start_empty_after_failure));
  keys.push_back(
      BoolKey("strict_start",
              "Refuse to start when limits of the machine (memory, descriptors, the volume of "
              "pool_directory) are below what the configuration promises. Otherwise a warning.",
              &Config::strict_start));
  keys.push_back(DurationKey("watchdog_timeout",
                             "A worker that does not answer for this long is killed and restarted. "
                             "0 = never.",
                             &Config::watchdog_timeout, absl::ZeroDuration(), absl::Hours(1)));
  keys.push_back(DurationKey("resume_timeout",
                             "How long a session whose client is not connected waits for it after "
                             "a restart of the worker.",
                             &Config::resume_timeout, absl::Milliseconds(1), absl::Hours(24)));
  keys.push_back(DurationKey("quarantine_timeout",
                             "How long a client that keeps its connection to an earlier worker "
                             "keeps memory from use; then the worker restarts and moves the pool. "
                             "0 = without limit.",
                             &Config::quarantine_timeout, absl::ZeroDuration(), absl::Hours(240)));
  keys.push_back(
      {"pool_directory", "PATH",
       "Directory on tmpfs or hugetlbfs, private to this user. Memory is kept in files there, "
       "which outlive all processes. Empty = anonymous memory.",
       SetPoolDirectory, [](const Config& c) { return c.pool_directory; }});
  keys.push_back(
      {"index_plugins", "PATH",
       "Directory of shared libraries (*.so) with further index types. They run as code of the "
       "daemon: only trusted users may write there. Empty = none.",
       SetIndexPlugins, [](const Config& c) { return c.index_plugins; }});
  keys.push_back(
      {"image_directory", "PATH",
       "Directory, private to this user, where operators export sequences as segment images, and "
       "import them from. Empty = none.",
       SetImageDirectory, [](const Config& c) { return c.image_directory; }});
}

absl::Status SetSocketMode(absl::string_view value, Config& config) {
  for (const uint32_t mode : {0600u, 0660u}) {
    if (value == absl::StrFormat("%04o", mode) || value == absl::StrFormat("%o", mode)) {
      config.socket_mode = mode;
      return absl::OkStatus();
    }
  }
  return Invalid("must be 0600 (owner) or 0660 (owner and group)");
}

absl::Status SetLogLevel(absl::string_view value, Config& config) {
  if (std::find(kLogLevels.begin(), kLogLevels.end(), value) == kLogLevels.end()) {
    return Invalid(absl::StrCat("must be one of ", absl::StrJoin(kLogLevels, ", ")));
  }
  config.log_level = std::string(value);
  return absl::OkStatus();
}

absl::Status SetKernelLevel(absl::string_view value, Config& config) {
  if (value != "auto") {
    const std::vector<kernels::Level> available = kernels::AvailableLevels();
    const auto level = kernels::ParseLevel(std::string(value));
    if (!level || std::find(available.begin(), available.end(), *level) == available.end()) {
      return Invalid(
          absl::StrCat("must be auto or a level that this machine supports: ",
                       absl::StrJoin(available, ", ", [](std::string* out, kernels::Level each) {
                         absl::StrAppend(out, std::string(kernels::LevelName(each)));
                       })));
    }
  }
  config.kernel_level = std::string(value);
  return absl::OkStatus();
}

// Keys of TCP, most of which are in config_tls.cc.
void AddTcpKeys(std::vector<ConfigKey>& keys) {
  AddTlsKeys(keys);
  keys.push_back(BoolKey("plain_tcp",
                         "Serve tcp_listen without encryption, which is possible on the loopback "
                         "only: any local user can connect, and choose a tenant.",
                         &Config::plain_tcp));
  keys.push_back(
      CountKey("max_handshakes",
               "TLS handshakes that may be in progress at once. Beyond it the oldest one "
               "of the address with the most is closed.",
               &Config::max_handshakes, {1, 65536}));
  keys.push_back(DurationKey("handshake_timeout", "Longest duration of a TLS handshake.",
                             &Config::handshake_timeout, absl::Milliseconds(10),
                             absl::Minutes(10)));
}

std::vector<ConfigKey> MakeKeys() {
  constexpr uint32_t kBlock = kvstore::kBlockTokens;
  std::vector<ConfigKey> keys;
  keys.push_back(
      {"listen", "ADDRESS",
       "Unix socket that serves all calls. Its directory is created (mode 0700) if missing.",
       SetListen, [](const Config& c) { return c.listen; }});
  keys.push_back({"socket_mode", "MODE",
                  "Permissions of the sockets: 0600 = owner only, 0660 = owner and group.",
                  SetSocketMode,
                  [](const Config& c) { return absl::StrFormat("%04o", c.socket_mode); }});
  AddTcpKeys(keys);
  keys.push_back(SizeKey("max_pool_bytes",
                         "Memory for the KV rows and indexes of all caches together.",
                         &Config::max_pool_bytes, size_t{1} << 20, size_t{1} << 46));
  keys.push_back(CountKey(
      "max_caches",
      "Caches that may be open at once. When there is no room for a new one, caches of its "
      "tenant that no session uses are dropped, the longest unused first.",
      &Config::max_caches, {1, 65536}));
  keys.push_back(
      CountKey("max_sequences", "Sequences per cache.", &Config::max_sequences, {1, 1u << 20}));
  keys.push_back(CountKey("max_sessions", "Sessions that may be open at once.",
                          &Config::max_sessions, {1, 65536}));
  keys.push_back(CountKey("max_connections",
                          "Connections on the socket of calls; one user (uid) may have three "
                          "quarters of them. tcp_listen may have a quarter of this number in "
                          "addition. Further connections are closed.",
                          &Config::max_connections, {4, 1u << 20}));
  keys.push_back(
      SizeKey("max_message_bytes",
              "Largest request or response. Clients of a tenant may leave answers of 8 times "
              "this size unread, for stream_timeout.",
              &Config::max_message_bytes, size_t{64} << 10, size_t{1} << 30));
  keys.push_back(SizeKey("request_memory_bytes",
                         "Memory for messages in transmission on all connections, at least "
                         "max_message_bytes; beyond it, connections wait or are closed.",
                         &Config::request_memory_bytes, size_t{1} << 20, size_t{1} << 40));
  keys.push_back(
      CountKey("max_pending_calls",
               "Calls that may wait for a thread; further calls fail with RESOURCE_EXHAUSTED.",
               &Config::max_pending_calls, {1, 1u << 20}));
  keys.push_back(CountKey("max_builds", "Index builds that run at once; others wait.",
                          &Config::max_builds, {1, 64}));
  keys.push_back(CountKey("call_threads",
                          "Threads that run calls. 0 = twice the cores, at least 4.",
                          &Config::call_threads, {0, 1024}));
  keys.push_back(CountKey("threads",
                          "Threads that one selection or one build may use. 0 = one per core.",
                          &Config::threads, {0, 1024}));
  keys.push_back(CountKey("segment_tokens",
                          "Most capacity of a prefill segment, a multiple of 128.",
                          &Config::segment_tokens, {kBlock, kvstore::kMaxSegmentTokens, kBlock}));
  keys.push_back(CountKey("tail_tokens",
                          "Most capacity of a segment of appended tokens, a multiple of 128.",
                          &Config::tail_tokens, {kBlock, kvstore::kMaxSegmentTokens, kBlock}));
  keys.push_back(CountKey("codebook_tokens",
                          "Tokens that one generation of codebooks covers, at least.",
                          &Config::codebook_tokens, {kBlock, kvstore::kMaxSequenceTokens}));
  AddLiveKeys(keys);
  AddLocalKeys(keys);
  AddPressureKeys(keys);
  keys.push_back({"kernel_level", "LEVEL",
                  "Instruction set: auto, or a lower one for comparisons (reference, portable, "
                  "avx2, avx512, ...; arm64: neon).",
                  SetKernelLevel, [](const Config& c) { return c.kernel_level; }});
  keys.push_back(DurationKey("default_timeout", "Deadline of a call that has none.",
                             &Config::default_timeout, absl::Milliseconds(1), absl::Hours(24)));
  keys.push_back(DurationKey("max_timeout", "Longest duration of any call, whatever its deadline.",
                             &Config::max_timeout, absl::Milliseconds(1), absl::Hours(24)));
  keys.push_back(
      DurationKey("heartbeat_interval", "Interval of the sidecar's heartbeats on an open session.",
                  &Config::heartbeat_interval, absl::Milliseconds(10), absl::Seconds(10)));
  keys.push_back(DurationKey("shutdown_timeout", "Time for calls in flight to end after SIGTERM.",
                             &Config::shutdown_timeout, absl::ZeroDuration(), absl::Minutes(10)));
  AddRecoveryKeys(keys);
  keys.push_back({"log_level", "LEVEL", "trace, debug, info, warning, error, critical or off.",
                  SetLogLevel, [](const Config& c) { return c.log_level; }});
  keys.push_back({"log_file", "PATH", "File to append the log to. Empty = standard error.",
                  [](absl::string_view value, Config& config) {
                    config.log_file = std::string(value);
                    return absl::OkStatus();
                  },
                  [](const Config& c) { return c.log_file; }});
  return keys;
}

}  // namespace

const std::vector<ConfigKey>& ConfigKeys() {
  static const std::vector<ConfigKey> keys = MakeKeys();
  return keys;
}

}  // namespace pqcached::service
