// Config holds every setting that an operator can change, with its default.
//
// A *key* has one name, which each source spells in its own way:
//
//   YAML file      max_pool_bytes
//   environment    PQCACHED_MAX_POOL_BYTES
//   command line   --max-pool-bytes
//
// The command line takes precedence over the environment, the environment over the file, and the
// file over the default. Values are texts with units ("512mib", "30gb", "30s"). Every source goes
// through the same check, and an error names the key and the source of the value.
//
// Plain values. The functions are thread-safe as long as no thread changes the environment.
#ifndef PQCACHED_SERVICE_CONFIG_CONFIG_H_
#define PQCACHED_SERVICE_CONFIG_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>
#include "absl/strings/string_view.h"

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/store.h"
#include "service/base/environment.h"
#include "service/config/tenant_limits.h"
#include "service/config/tenant_uids.h"

namespace pqcached::service {

struct Config {
  std::string listen = "unix:///run/pqcached/pqcached.sock";
  uint32_t socket_mode = 0600;
  std::string tcp_listen;  // empty = none
  bool plain_tcp = false;
  std::string tls_certificate;  // empty = no TLS
  std::string tls_key;
  std::string tls_client_ca;  // empty = clients have no certificates
  std::string token_file;     // empty = clients have no tokens
  uint32_t max_handshakes = 256;
  absl::Duration handshake_timeout = absl::Seconds(5);
  size_t max_pool_bytes = size_t{8} << 30;
  uint32_t max_caches = 64;
  uint32_t max_sequences = 4096;  // per cache
  uint32_t max_sessions = 256;
  uint32_t max_connections = 1024;
  size_t max_message_bytes = size_t{64} << 20;
  size_t request_memory_bytes = size_t{1} << 30;
  uint32_t max_pending_calls = 1024;
  uint32_t max_builds = 2;
  uint32_t call_threads = 0;  // 0 = twice the cores, at least 4
  uint32_t threads = 0;       // 0 = all cores
  uint32_t segment_tokens = 8192;
  uint32_t tail_tokens = 1024;
  uint32_t codebook_tokens = 32768;
  uint32_t train_tokens = 8192;
  double drift_ratio = 1.25;
  uint32_t merge_segments = 8;
  bool compare_repeats = false;
  uint64_t idle_reserve_bytes = uint64_t{256} << 20;
  kvstore::PrefillCost prefill_cost;
  std::string cost_file;  // empty = none
  bool broker = true;
  TenantUids tenant_uids;
  bool strict_memory = false;
  uint32_t max_leases = 4096;                           // per session
  absl::Duration lease_timeout = absl::ZeroDuration();  // zero = never
  size_t max_staging_bytes = size_t{256} << 20;         // per session
  bool retain = true;
  double max_retained_share = 0.8;
  kvstore::EvictionPolicy eviction_policy = kvstore::EvictionPolicy::kReuse;
  absl::Duration evict_idle = absl::Seconds(60);  // 0 = never
  std::map<std::string, kvstore::TenantQuota, std::less<>> tenant_quotas;
  TenantLimitMap tenant_limits;
  absl::Duration memory_check_interval = absl::Seconds(2);
  int32_t oom_score_adjust = -500;
  std::string kernel_level = "auto";
  absl::Duration default_timeout = absl::Seconds(30);
  absl::Duration max_timeout = absl::Hours(1);
  absl::Duration stream_timeout = absl::Seconds(60);
  absl::Duration heartbeat_interval = absl::Seconds(10);
  absl::Duration shutdown_timeout = absl::Seconds(10);
  bool supervise = true;
  uint32_t max_failed_recoveries = 5;
  bool start_empty_after_failure = false;
  bool strict_start = false;
  absl::Duration watchdog_timeout = absl::Seconds(30);  // 0 = none
  absl::Duration resume_timeout = absl::Seconds(30);
  absl::Duration quarantine_timeout = absl::Hours(1);
  std::string pool_directory;   // empty = none
  std::string index_plugins;    // directory; empty = none
  std::string image_directory;  // empty = none
  std::string log_level = "info";
  std::string log_file;  // empty = standard error
};

struct ConfigKey {
  absl::string_view name;
  absl::string_view value;  // kind of value, as --help shows it: "SIZE", "DURATION", ...
  absl::string_view text;   // help text: its effect and its range
  // Parses `value` and sets the field of `config`.
  //
  // Errors: kInvalidArgument  the message says what is wrong, without the key's name
  std::function<absl::Status(absl::string_view value, Config& config)> set;
  std::function<std::string(const Config& config)> get;

  std::string flag() const;         // "max-pool-bytes"
  std::string environment() const;  // "PQCACHED_MAX_POOL_BYTES"
};

// Returns all keys, in the order of the help text and of the example file.
const std::vector<ConfigKey>& ConfigKeys();

// The sources that the command line names, with values that are not parsed yet.
struct ConfigSources {
  std::string file;  // path of the YAML file; empty = environment PQCACHED_CONFIG, or none
  std::map<std::string, std::string> flags;  // by key name
};

// Merges the sources and checks the result.
//
// Errors: kInvalidArgument  names the key, the value, the allowed values, and the source
//         kNotFound         the file does not exist or cannot be read
absl::StatusOr<Config> LoadConfig(const ConfigSources& sources, const Environment& environment);

// Returns a YAML file with every key, its meaning and its default, all commented out.
std::string ExampleConfig();

// Returns the values in force, by key.
std::map<std::string, std::string> DescribeConfig(const Config& config);

// Return the paths of the socket of clients, and of those next to it: that of operators, and the
// supervisor's two, for messages of its worker and of operators, and for its state.
std::string SocketPath(const Config& config);
std::string AdminPath(const Config& config);
// Returns the most connections that may be open on tcp_listen.
uint32_t TcpConnectionsOf(const Config& config);
// Returns whether connections on tcp_listen use TLS.
inline bool UsesTls(const Config& config) { return !config.tls_certificate.empty(); }
std::string SupervisorPath(const Config& config);
std::string SupervisorStatusPath(const Config& config);

// REQUIRES: `config` is a result of LoadConfig.
kvstore::StoreOptions StoreOptionsOf(const Config& config);
uint32_t CallThreadsOf(const Config& config);
// Returns request_memory_bytes, but at most an eighth of the memory that this process can have, and
// at least one message.
size_t RequestMemoryBytesOf(const Config& config);

// Converts between a number of bytes and its text: "512mib" is 2^29. Units are decimal (kb, mb, gb,
// tb) or binary (kib, mib, gib, tib); a bare number counts bytes.
absl::StatusOr<size_t> ParseSize(absl::string_view text);
std::string FormatSize(size_t bytes);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_CONFIG_CONFIG_H_
