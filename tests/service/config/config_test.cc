// Configuration: where values come from, what is refused, and that people are told about all of it.
#include "service/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "service/base/exit_code.h"
#include "service/config/command_line.h"
#include "service/config/start_limits.h"

namespace pqcached::service {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class ConfigTest : public testing::Test {
 protected:
  ConfigTest() {
    std::string path = testing::TempDir() + "pqcached-config-XXXXXX";
    directory_ = mkdtemp(path.data());
  }
  ~ConfigTest() override { std::filesystem::remove_all(directory_); }

  std::string WriteFile(const std::string& text) {
    const std::string path = directory_ / "pqcached.yaml";
    std::ofstream(path) << text;
    return path;
  }

  absl::StatusOr<Config> Load(const std::string& file_text,
                              const std::map<std::string, std::string>& flags = {}) {
    ConfigSources sources;
    if (!file_text.empty()) sources.file = WriteFile(file_text);
    sources.flags = flags;
    return LoadConfig(sources, [this](const char* name) -> const char* {
      const auto found = environment_.find(name);
      return found == environment_.end() ? nullptr : found->second.c_str();
    });
  }

  void ExpectRefused(const std::string& key, const std::string& value, const std::string& why) {
    const absl::StatusOr<Config> config = Load("", {{key, value}});
    ASSERT_FALSE(config.ok()) << key << " = " << value;
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(config.status().message()), AllOf(HasSubstr(key), HasSubstr(why)));
  }

  std::filesystem::path directory_;
  std::map<std::string, std::string> environment_;
};

TEST_F(ConfigTest, DefaultsWithoutAnySource) {
  const absl::StatusOr<Config> config = Load("");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(DescribeConfig(*config), DescribeConfig(Config{}));
}

TEST(StartLimitsTest, EachLimitThatIsTooLowIsNamed) {
  Config config;
  config.max_pool_bytes = size_t{8} << 30;
  config.pool_directory = "/pools";
  EXPECT_THAT(TooLow(config, {}), testing::IsEmpty()) << "no limit is known";
  const StartLimits enough = {.descriptors = DescriptorsNeeded(config),
                              .memory_bytes = (size_t{8} << 30) + (size_t{64} << 20),
                              .memory_source = "/sys/fs/cgroup/memory.max",
                              .volume_bytes = size_t{8} << 30};
  EXPECT_THAT(TooLow(config, enough), testing::IsEmpty());
  StartLimits less = enough;
  --less.descriptors, --less.memory_bytes, --less.volume_bytes;
  EXPECT_THAT(
      TooLow(config, less),
      testing::ElementsAre(
          HasSubstr(
              "max_sessions 256, max_connections 1024, max_caches 64: up to 3328 descriptors; "
              "RLIMIT_NOFILE is 3327"),
          HasSubstr("max_pool_bytes 8gib: /sys/fs/cgroup/memory.max limits memory to "),
          HasSubstr("max_pool_bytes 8gib: /pools is on a file system of ")));
  less.memory_bytes = 1;
  EXPECT_EQ(TooLow(config, less).size(), 3u);
}

TEST(StartLimitsTest, RequestsGetAtMostAnEighthOfTheMemory) {
  Config config;
  config.request_memory_bytes = size_t{1} << 60;
  const size_t total_bytes = kvstore::ReadMemoryLimits().total_bytes;
  EXPECT_EQ(RequestMemoryBytesOf(config), std::max(config.max_message_bytes, total_bytes / 8));
  config.request_memory_bytes = config.max_message_bytes;
  EXPECT_EQ(RequestMemoryBytesOf(config), config.max_message_bytes);
}

TEST_F(ConfigTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const std::string file = "max_sessions: 11\nmax_caches: 12\nmax_sequences: 13\n";
  environment_ = {{"PQCACHED_MAX_CACHES", "22"}, {"PQCACHED_MAX_SEQUENCES", "23"}};
  const absl::StatusOr<Config> config = Load(file, {{"max_sequences", "33"}});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->max_sessions, 11u);
  EXPECT_EQ(config->max_caches, 22u);
  EXPECT_EQ(config->max_sequences, 33u);
  EXPECT_EQ(config->segment_tokens, Config{}.segment_tokens);
}

TEST_F(ConfigTest, QuotasNameTenantsAndSizes) {
  const absl::StatusOr<Config> config =
      Load("tenant_quotas: team-a=1gib:4gib,team-b=0:2gib,team-c=1mib\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->tenant_quotas.size(), 3u);
  EXPECT_EQ(config->tenant_quotas.at("team-a").guaranteed_bytes, size_t{1} << 30);
  EXPECT_EQ(config->tenant_quotas.at("team-a").max_bytes, size_t{4} << 30);
  EXPECT_EQ(config->tenant_quotas.at("team-c").max_bytes, SIZE_MAX);
  EXPECT_EQ(DescribeConfig(*config).at("tenant_quotas"),
            "team-a=1gib:4gib,team-b=0:2gib,team-c=1mib");
  EXPECT_TRUE(Load("tenant_quotas: \"\"\n")->tenant_quotas.empty());
  for (const char* bad : {"a", "a=", "a=1gib:", "=1gib", "A=1gib", "a=2gib:1gib", "a=1:2:3",
                          "a=1gib,a=2gib", "a=1gib,"}) {
    const absl::Status status = Load(std::string("tenant_quotas: \"") + bad + "\"\n").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("tenant_quotas")) << bad;
  }
}

TEST_F(ConfigTest, LimitsNameTenantsAndCounts) {
  const std::string text = "*=sessions:20;weight:2,team-a=caches:8;staging:1gib;builds:1;calls:64";
  const absl::StatusOr<Config> config = Load("tenant_limits: \"" + text + "\"\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->tenant_limits.at("*").sessions, 20u);
  EXPECT_EQ(config->tenant_limits.at("*").caches, 0u) << "not set";
  EXPECT_EQ(config->tenant_limits.at("team-a").staging_bytes, uint64_t{1} << 30);
  EXPECT_EQ(DescribeConfig(*config).at("tenant_limits"), text);
  EXPECT_TRUE(Load("tenant_limits: \"\"\n")->tenant_limits.empty());
  for (const char* bad : {"a", "a=", "a=sessions", "a=sessions:0", "a=sessions:x", "a=weight:1001",
                          "a=pool:1gib", "a=sessions:1;sessions:2", "a=sessions:1,a=caches:1",
                          "A=sessions:1", "a=sessions:1,", "a=staging:1zib"}) {
    const absl::Status status = Load(std::string("tenant_limits: \"") + bad + "\"\n").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("tenant_limits")) << bad;
  }
}

TEST_F(ConfigTest, KeysOfMemoryPressureNameTheirRanges) {
  for (const char* bad :
       {"retain: maybe", "max_retained_share: 1.1", "max_retained_share: nan",
        "eviction_policy: random", "evict_idle: -1s", "oom_score_adjust: 1001",
        "oom_score_adjust: low", "stream_timeout: 0s", "memory_check_interval: 25h"}) {
    EXPECT_EQ(Load(std::string(bad) + "\n").status().code(), absl::StatusCode::kInvalidArgument)
        << bad;
  }
  const absl::StatusOr<Config> config = Load(
      "retain: false\nmax_retained_share: 0.25\neviction_policy: lru\nevict_idle: 0s\n"
      "oom_score_adjust: -1000\nstream_timeout: 5s\nmemory_check_interval: 0s\n");
  ASSERT_TRUE(config.ok()) << config.status();
  const kvstore::StoreOptions options = StoreOptionsOf(*config);
  EXPECT_FALSE(options.retain);
  EXPECT_EQ(options.max_retained_share, 0.25);
  EXPECT_EQ(options.eviction_policy, kvstore::EvictionPolicy::kLru);
  EXPECT_EQ(options.evict_idle_after, absl::ZeroDuration());
  EXPECT_EQ(config->oom_score_adjust, -1000);
  EXPECT_EQ(config->stream_timeout, absl::Seconds(5));
}

TEST_F(ConfigTest, EnvironmentNamesTheFile) {
  environment_ = {{"PQCACHED_CONFIG", WriteFile("max_sessions: 7\n")}};
  const absl::StatusOr<Config> config = Load("");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->max_sessions, 7u);
}

TEST_F(ConfigTest, SizesTakeDecimalAndBinaryUnits) {
  const std::map<std::string, size_t> sizes = {{"0", 0},
                                               {"17", 17},
                                               {"17b", 17},
                                               {"3kb", 3000},
                                               {"3kib", 3072},
                                               {"512mib", 512u << 20},
                                               {"30gb", 30'000'000'000},
                                               {"30 GB", 30'000'000'000},
                                               {"2tib", size_t{2} << 40}};
  for (const auto& [text, bytes] : sizes) {
    const absl::StatusOr<size_t> parsed = ParseSize(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(*parsed, bytes) << text;
  }
  for (const char* text :
       {"", "gb", "-1", "1.5gb", "12xb", "99999999999999999999", "99999999tib", "+1"}) {
    EXPECT_FALSE(ParseSize(text).ok()) << text;
  }
}

TEST_F(ConfigTest, FormatsSizesSoThatTheyParseBack) {
  for (const size_t bytes : {size_t{1}, size_t{1000}, size_t{1024}, size_t{8} << 30,
                             size_t{30'000'000'000}, size_t{12345}}) {
    EXPECT_EQ(*ParseSize(FormatSize(bytes)), bytes);
  }
}

TEST_F(ConfigTest, RefusesUnknownKeysByName) {
  const absl::StatusOr<Config> config = Load("max_sessions: 3\nmax_pool: 1gb\n");
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(config.status().message()),
      AllOf(HasSubstr("unknown key 'max_pool'"), HasSubstr("line 2"), HasSubstr("max_pool_bytes")));
}

TEST_F(ConfigTest, RefusesWhatIsNoFlatMap) {
  for (const char* text :
       {"- a\n- b\n", "max_sessions: [1, 2]\n", "max_sessions: 1\nmax_sessions: 2\n",
        "max_sessions:\n", "max_sessions: {a: b}\n", "a: b: c\n"}) {
    EXPECT_EQ(Load(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST_F(ConfigTest, RefusesAMissingFile) {
  ConfigSources sources;
  sources.file = directory_ / "nowhere.yaml";
  const absl::Status status = LoadConfig(sources, [](const char*) { return nullptr; }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("nowhere.yaml"));
}

TEST_F(ConfigTest, NamesTheSourceOfABadValue) {
  EXPECT_THAT(
      std::string(Load("max_caches: many\n").status().message()),
      AllOf(HasSubstr("max_caches"), HasSubstr("'many'"), HasSubstr("pqcached.yaml line 1")));
  environment_ = {{"PQCACHED_MAX_CACHES", "0"}};
  EXPECT_THAT(std::string(Load("").status().message()),
              HasSubstr("environment PQCACHED_MAX_CACHES"));
  environment_.clear();
  EXPECT_THAT(std::string(Load("", {{"max_caches", "-1"}}).status().message()),
              HasSubstr("flag --max-caches"));
}

TEST_F(ConfigTest, RefusesValuesOutOfRange) {
  ExpectRefused("listen", "/tmp/socket", "unix://");
  ExpectRefused("listen", "unix:relative", "unix://");
  ExpectRefused("listen", "unix:///tmp/", "directory");
  ExpectRefused("listen", "unix:///" + std::string(200, 'x'), "at most 107");
  ExpectRefused("socket_mode", "0777", "0600");
  ExpectRefused("max_pool_bytes", "12", "must be in");
  ExpectRefused("max_message_bytes", "2gib", "must be in");
  ExpectRefused("request_memory_bytes", "2mib", "below max_message_bytes");
  ExpectRefused("max_caches", "0", "1..");
  ExpectRefused("max_sequences", "0", "1..");
  ExpectRefused("max_sessions", "99999999", "1..");
  ExpectRefused("max_pending_calls", "0", "1..");
  ExpectRefused("max_builds", "65", "1..64");
  ExpectRefused("call_threads", "1025", "0..1024");
  ExpectRefused("threads", "many", "0..1024");
  ExpectRefused("segment_tokens", "100", "128..");
  ExpectRefused("segment_tokens", "130", "multiple of 128");
  ExpectRefused("tail_tokens", "129", "multiple of 128");
  ExpectRefused("codebook_tokens", "1", "128..");
  ExpectRefused("kernel_level", "mmx", "reference");
  ExpectRefused("default_timeout", "30", "unit");
  ExpectRefused("default_timeout", "0s", "must be in");
  ExpectRefused("max_timeout", "1s", "below default_timeout");
  ExpectRefused("heartbeat_interval", "11s", "must be in");
  ExpectRefused("shutdown_timeout", "-1s", "must be in");
  ExpectRefused("max_failed_recoveries", "0", "1..");
  ExpectRefused("watchdog_timeout", "2h", "must be in");
  ExpectRefused("resume_timeout", "0s", "must be in");
  ExpectRefused("pool_directory", "pools", "absolute path");
  ExpectRefused("index_plugins", "plugins", "absolute path");
  ExpectRefused("image_directory", "images", "absolute path");
  ExpectRefused("log_level", "loud", "debug");
}

TEST_F(ConfigTest, LeavesRoomForTheNamesOfTheSocketsBesideTheFirst) {
  const auto path_of = [](size_t bytes) { return "unix:///" + std::string(bytes - 1, 'x'); };
  EXPECT_TRUE(Load("", {{"listen", path_of(96)}}).ok());
  ExpectRefused("listen", path_of(97), "set supervise to false");
  EXPECT_TRUE(Load("", {{"listen", path_of(100)}, {"supervise", "false"}}).ok());
  const absl::Status status = Load("", {{"listen", path_of(101)}, {"supervise", "false"}}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("set broker to false"));
}

TEST_F(ConfigTest, StrictMemoryHasNoFiles) {
  const absl::Status status =
      Load("", {{"strict_memory", "true"}, {"pool_directory", "/dev/shm/pools"}}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("pool_directory"));
}

TEST_F(ConfigTest, ServesTcpWithoutTlsOnTheLoopbackOnly) {
  for (const char* value : {"127.0.0.1:0", "127.1.2.3:7070", "localhost:7070", "[::1]:7070"}) {
    EXPECT_TRUE(Load("", {{"tcp_listen", value}, {"plain_tcp", "true"}}).ok()) << value;
    const absl::Status status = Load("", {{"tcp_listen", value}}).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr("plain_tcp")) << value;
  }
  EXPECT_TRUE(Load("", {{"tcp_listen", ""}}).ok());
  EXPECT_THAT(
      std::string(
          Load("", {{"tcp_listen", "10.0.0.1:7"}, {"plain_tcp", "true"}}).status().message()),
      HasSubstr("loopback"));
  ExpectRefused("tcp_listen", "0.0.0.0:7070", "loopback");
  ExpectRefused("tcp_listen", "10.1.2.3:7070", "loopback");
  ExpectRefused("tcp_listen", "127.0.0.1.example.org:7070", "loopback");
  ExpectRefused("tcp_listen", "127.0.0.256:7070", "loopback");
  ExpectRefused("tcp_listen", "[::]:7070", "loopback");
  ExpectRefused("tcp_listen", ":7070", "host:port");
  ExpectRefused("tcp_listen", "127.0.0.1", "host:port");
  ExpectRefused("tcp_listen", "127.0.0.1:70707", "0..65535");
}

TEST_F(ConfigTest, ServesTlsOnlyToClientsThatItCanIdentify) {
  std::map<std::string, std::string> keys = {{"tcp_listen", "0.0.0.0:7070"},
                                             {"tls_certificate", "/etc/pqcached.pem"}};
  const auto refusal = [&] { return std::string(Load("", keys).status().message()); };
  EXPECT_THAT(refusal(), HasSubstr("tls_key"));
  keys["tls_key"] = "/etc/pqcached.key";
  EXPECT_THAT(refusal(), HasSubstr("tls_client_ca or token_file"));
  for (const char* identifies : {"tls_client_ca", "token_file"}) {
    auto complete = keys;
    complete[identifies] = "/etc/clients";
    EXPECT_TRUE(Load("", complete).ok()) << identifies;
    complete["plain_tcp"] = "true";
    EXPECT_THAT(std::string(Load("", complete).status().message()), HasSubstr("plain_tcp"));
    ExpectRefused(identifies, "clients.pem", "absolute path");
    ExpectRefused(identifies, "/etc/clients", "needs tls_certificate");
  }
}

TEST_F(ConfigTest, EveryKeyTakesItsOwnDefaultBack) {
  const Config defaults;
  for (const ConfigKey& key : ConfigKeys()) {
    Config config;
    EXPECT_TRUE(key.set(key.get(defaults), config).ok()) << key.name;
    EXPECT_EQ(key.get(config), key.get(defaults)) << key.name;
  }
}

TEST_F(ConfigTest, ExampleNamesEveryKeyAndLoadsWhenUncommented) {
  const std::string example = ExampleConfig();
  EXPECT_TRUE(Load(example).ok());
  std::string uncommented;
  std::istringstream lines(example);
  for (std::string line; std::getline(lines, line);) {
    const bool is_key = line.size() > 1 && line[0] == '#' && line[1] != ' ';
    if (is_key) uncommented += line.substr(1) + "\n";
  }
  for (const ConfigKey& key : ConfigKeys()) {
    EXPECT_THAT(uncommented, HasSubstr(std::string(key.name) + ": "));
    EXPECT_THAT(example, HasSubstr("# " + std::string(key.text)));
  }
  const absl::StatusOr<Config> config = Load(uncommented);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(DescribeConfig(*config), DescribeConfig(Config{}));
}

TEST_F(ConfigTest, ExampleInDeployIsWhatTheDaemonPrints) {
  std::ifstream file(PQCACHED_EXAMPLE_CONFIG);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), ExampleConfig())
      << "renew it: pqcached --print-config > deploy/pqcached.yaml";
}

CommandLine Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "pqcached");
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data());
}

TEST(CommandLineTest, EveryKeyIsAFlag) {
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string flag = "--" + key.flag();
    const CommandLine command_line = Parse({flag.c_str(), "value"});
    EXPECT_EQ(command_line.action, Action::kServe) << command_line.text;
    EXPECT_EQ(command_line.sources.flags,
              (std::map<std::string, std::string>{{std::string(key.name), "value"}}));
  }
}

TEST(CommandLineTest, HelpNamesEveryKeyItsMeaningAndItsDefault) {
  const CommandLine command_line = Parse({"--help"});
  EXPECT_EQ(command_line.action, Action::kPrint);
  EXPECT_EQ(command_line.exit_code, 0);
  for (const ConfigKey& key : ConfigKeys()) {
    EXPECT_THAT(command_line.text, HasSubstr("--" + key.flag()));
    EXPECT_THAT(command_line.text, HasSubstr(key.get(Config{})));
  }
}

TEST(CommandLineTest, PrintsVersionAndExampleAndChecks) {
  EXPECT_THAT(Parse({"--version"}).text, HasSubstr("pqcached "));
  EXPECT_EQ(Parse({"--print-config"}).text, ExampleConfig());
  EXPECT_EQ(Parse({"--check-config", "--config", "a.yaml"}).action, Action::kCheckConfig);
  EXPECT_EQ(Parse({"--config", "a.yaml"}).sources.file, "a.yaml");
}

TEST(CommandLineTest, RefusesUnknownFlags) {
  const CommandLine command_line = Parse({"--max-pool", "1gb"});
  EXPECT_EQ(command_line.action, Action::kPrint);
  EXPECT_EQ(command_line.exit_code, kExitBadConfig);
  EXPECT_THAT(command_line.text, HasSubstr("--max-pool"));
  EXPECT_EQ(Parse({"stray"}).exit_code, kExitBadConfig);
}

}  // namespace
}  // namespace pqcached::service
