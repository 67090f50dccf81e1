#include "service/config/config.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <limits>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kernels/base/exec.h"
#include "kernels/base/status_macros.h"
#include "kvstore/limits/memory_limits.h"
#include "kvstore/read/broker_protocol.h"
#include "service/base/refusal.h"
#include "service/config/config_tls.h"
#include "service/config/config_values.h"

namespace pqcached::service {
namespace {

constexpr absl::string_view kSupervisorSuffix = ".supervisor";
constexpr absl::string_view kAdminSuffix = ".admin";
constexpr absl::string_view kSupervisorStatusSuffix = ".status";
static_assert(kSupervisorStatusSuffix.size() <= kSupervisorSuffix.size());  // one length is checked
struct Unit {
  absl::string_view name;
  size_t bytes;
};
constexpr std::array kUnits = {
    Unit{"tib", size_t{1} << 40},
    Unit{"gib", size_t{1} << 30},
    Unit{"mib", size_t{1} << 20},
    Unit{"kib", size_t{1} << 10},
    Unit{"tb", 1'000'000'000'000},
    Unit{"gb", 1'000'000'000},
    Unit{"mb", 1'000'000},
    Unit{"kb", 1'000},
    Unit{"b", 1},
};

absl::Status Set(const ConfigKey& key, absl::string_view value, absl::string_view source,
                 Config& config) {
  absl::Status status = key.set(value, config);
  if (status.ok()) return status;
  return InvalidArgument(key.name,
                         absl::StrCat("'", value, "' ", TextOf(status), " (", source, ")"));
}

const ConfigKey* FindKey(absl::string_view name) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

std::string KeyNames() {
  return absl::StrJoin(ConfigKeys(), ", ", [](std::string* out, const ConfigKey& key) {
    absl::StrAppend(out, key.name);
  });
}

absl::Status ApplyNode(const YAML::Node& root, const std::string& path, Config& config) {
  if (root.IsNull()) return absl::OkStatus();
  if (!root.IsMap()) return Invalid(absl::StrCat(path, ": must be a map of keys to values"));
  std::set<std::string> seen;
  for (const auto& entry : root) {
    const std::string source = absl::StrCat(path, " line ", entry.first.Mark().line + 1);
    const std::string name = entry.first.IsScalar() ? entry.first.Scalar() : "";
    const ConfigKey* key = FindKey(name);
    if (key == nullptr) {
      return Invalid(absl::StrCat("unknown key '", name, "' (", source, "); known: ", KeyNames()));
    }
    if (!seen.insert(name).second) return Invalid(absl::StrCat(name, ": set twice (", source, ")"));
    if (entry.second.IsNull()) {
      return Invalid(
          absl::StrCat(name, ": has no value (", source, "); write \"\" for an empty one"));
    }
    if (!entry.second.IsScalar())
      return Invalid(absl::StrCat(name, ": must be one value (", source, ")"));
    RETURN_IF_ERROR(Set(*key, entry.second.Scalar(), source, config));
  }
  return absl::OkStatus();
}

absl::Status ApplyFile(const std::string& path, Config& config) {
  try {
    return ApplyNode(YAML::LoadFile(path), path, config);
  } catch (const YAML::BadFile&) {
    return NotFound("config", absl::StrCat("cannot read ", path));
  } catch (const YAML::Exception& error) {
    return Invalid(absl::StrCat("config: ", path, " is not valid YAML: ", error.what()));
  }
}

}  // namespace

std::string ConfigKey::flag() const { return absl::StrReplaceAll(name, {{"_", "-"}}); }

std::string ConfigKey::environment() const {
  return absl::StrCat("PQCACHED_", absl::AsciiStrToUpper(name));
}

absl::StatusOr<Config> LoadConfig(const ConfigSources& sources, const Environment& environment) {
  Config config;
  std::string file = sources.file;
  if (file.empty()) {
    if (const char* value = environment("PQCACHED_CONFIG")) file = value;
  }
  if (!file.empty()) {
    RETURN_IF_ERROR(ApplyFile(file, config));
  }
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string name = key.environment();
    if (const char* value = environment(name.c_str())) {
      RETURN_IF_ERROR(Set(key, value, absl::StrCat("environment ", name), config));
    }
  }
  for (const auto& [name, value] : sources.flags) {
    const ConfigKey* key = FindKey(name);
    if (key == nullptr)
      return Invalid(absl::StrCat("unknown key '", name, "'; known: ", KeyNames()));
    RETURN_IF_ERROR(Set(*key, value, absl::StrCat("flag --", key->flag()), config));
  }
  if (config.request_memory_bytes < config.max_message_bytes) {
    return Invalid(absl::StrCat("request_memory_bytes: ", FormatSize(config.request_memory_bytes),
                                " is below max_message_bytes, ",
                                FormatSize(config.max_message_bytes)));
  }
  for (const auto& [wanted, suffix, key] :
       {std::tuple(config.broker, absl::string_view(kvstore::kBrokerSuffix), "broker"),
        std::tuple(config.supervise, kSupervisorSuffix, "supervise")}) {
    const size_t path_bytes = config.listen.size() - kUnixScheme.size();
    if (!wanted || path_bytes + suffix.size() <= kMaxSocketPathBytes) continue;
    return Invalid(absl::StrCat("listen: its path has ", path_bytes, " bytes; with '", suffix,
                                "' it exceeds the ", kMaxSocketPathBytes,
                                " that the kernel allows; shorten it, or set ", key, " to false"));
  }
  if (config.strict_memory && !config.pool_directory.empty()) {
    return Invalid(
        "strict_memory: not possible with pool_directory, as other processes can write to pools in "
        "files");
  }
  RETURN_IF_ERROR(CheckTls(config));
  if (config.max_timeout < config.default_timeout) {
    return Invalid(absl::StrCat("max_timeout: ", absl::FormatDuration(config.max_timeout),
                                " is below default_timeout, ",
                                absl::FormatDuration(config.default_timeout)));
  }
  return config;
}

std::string ExampleConfig() {
  std::string text =
      "# Configuration of pqcached. Every key is listed with its default; remove the '#' to "
      "change one.\n"
      "# A flag (--max-pool-bytes) overrides the environment (PQCACHED_MAX_POOL_BYTES), which "
      "overrides this file.\n"
      "# Sizes: bytes, or kb mb gb tb (powers of 1000), kib mib gib tib (powers of 1024). "
      "Durations: 500ms, 30s, 5m.\n";
  const Config defaults;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string value = key.get(defaults);
    absl::StrAppend(&text, "\n# ", key.text, "\n#", key.name, ": ",
                    value.empty() || key.value == "MODE" ? absl::StrCat("\"", value, "\"") : value,
                    "\n");
  }
  return text;
}

std::map<std::string, std::string> DescribeConfig(const Config& config) {
  std::map<std::string, std::string> values;
  for (const ConfigKey& key : ConfigKeys()) values[std::string(key.name)] = key.get(config);
  return values;
}

std::string SocketPath(const Config& config) { return config.listen.substr(kUnixScheme.size()); }

std::string AdminPath(const Config& config) {
  return absl::StrCat(SocketPath(config), kAdminSuffix);
}

std::string SupervisorPath(const Config& config) {
  return absl::StrCat(SocketPath(config), kSupervisorSuffix);
}

std::string SupervisorStatusPath(const Config& config) {
  return absl::StrCat(SocketPath(config), kSupervisorStatusSuffix);
}

kvstore::StoreOptions StoreOptionsOf(const Config& config) {
  kvstore::StoreOptions options;
  options.max_pool_bytes = config.max_pool_bytes;
  options.max_caches = config.max_caches;
  options.max_sequences = config.max_sequences;
  options.segment_tokens = config.segment_tokens;
  options.tail_tokens = config.tail_tokens;
  options.codebook_tokens = config.codebook_tokens;
  options.train_tokens = config.train_tokens;
  options.drift_ratio = config.drift_ratio;
  options.merge_segments = config.merge_segments;
  options.compare_repeats = config.compare_repeats;
  options.idle_reserve_bytes = config.idle_reserve_bytes;
  options.prefill_cost = config.prefill_cost;
  options.cost_file = config.cost_file;
  options.strict_memory = config.strict_memory;
  options.max_leases = config.max_leases;
  options.lease_timeout =
      config.lease_timeout > absl::ZeroDuration() ? config.lease_timeout : absl::InfiniteDuration();
  options.max_staging_bytes = config.max_staging_bytes;
  options.request_memory_bytes = RequestMemoryBytesOf(config);
  options.retain = config.retain;
  options.max_retained_share = config.max_retained_share;
  options.eviction_policy = config.eviction_policy;
  options.evict_idle_after = config.evict_idle;
  options.memory_check_interval = config.memory_check_interval;
  options.threads = config.threads;
  if (config.kernel_level != "auto") options.exec.level = *kernels::ParseLevel(config.kernel_level);
  return options;
}

uint32_t TcpConnectionsOf(const Config& config) { return config.max_connections / 4; }

size_t RequestMemoryBytesOf(const Config& config) {
  const size_t share_bytes = kvstore::ReadMemoryLimits().total_bytes / 8;
  return std::max(config.max_message_bytes, std::min(config.request_memory_bytes, share_bytes));
}

uint32_t CallThreadsOf(const Config& config) {
  if (config.call_threads != 0) return config.call_threads;
  return std::max(4u, 2 * std::thread::hardware_concurrency());
}

absl::StatusOr<size_t> ParseSize(absl::string_view text) {
  const absl::Status malformed = Invalid("must be a size, for example 512mib, 30gb, 65536");
  const std::string lower = absl::AsciiStrToLower(text);
  absl::string_view number = lower;
  size_t unit = 1;
  for (const Unit& each : kUnits) {
    if (absl::EndsWith(lower, each.name)) {
      unit = each.bytes;
      number.remove_suffix(each.name.size());
      break;
    }
  }
  number = absl::StripTrailingAsciiWhitespace(number);
  uint64_t count = 0;
  if (number.empty() || !absl::ascii_isdigit(static_cast<unsigned char>(number.front())) ||
      !absl::SimpleAtoi(number, &count)) {
    return malformed;
  }
  if (count > std::numeric_limits<size_t>::max() / unit) return malformed;
  return size_t{count} * unit;
}

std::string FormatSize(size_t bytes) {
  for (const Unit& unit : kUnits) {
    if (unit.bytes > 1 && bytes >= unit.bytes && bytes % unit.bytes == 0) {
      return absl::StrCat(bytes / unit.bytes, unit.name);
    }
  }
  return absl::StrCat(bytes);
}

}  // namespace pqcached::service
