// Fuzz target: the configuration: a YAML file, environment and flags. An input is a file, and values
// of keys. What is refused has a message that names the key; what is accepted describes itself such
// that it reads the same again.
#include <sys/mman.h>
#include <unistd.h>

#include <map>

#include "kvstore/memory/memfd.h"
#include "service/config/config.h"
#include "service/config/tenant_uids.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using service::ConfigKey;
using service::ConfigKeys;
using service::ConfigSources;

constexpr size_t kMaxFileBytes = 1024;
constexpr const char* kValues[] = {"",           "0",         "1",      "-1",    "true", "false",
                                   "512mib",     "30gb",      "30s",    "1e999", "nan",  "0x10",
                                   "auto",       "reuse",     "5ms",    "1tib",  "0.5",  "1.5",
                                   "4294967296", "unix:///a", "1500kib"};

// A file that exists only in memory.
class File {
 public:
  File() : file_(memfd_create("config", MFD_CLOEXEC)) {
    path_ = "/proc/self/fd/" + std::to_string(file_.get());
  }
  void Write(const std::string& text) const {
    const auto size = static_cast<ssize_t>(text.size());
    if (ftruncate(file_.get(), 0) != 0 ||
        pwrite(file_.get(), text.data(), text.size(), 0) != size) {
      Found("no memory for a file");
    }
  }
  const std::string& path() const { return path_; }

 private:
  const kvstore::FileDescriptor file_;
  std::string path_;
};

std::string ValueOf(Bytes& bytes) {
  const uint8_t choice = bytes.Byte();
  if (choice < std::size(kValues)) return kValues[choice];
  return bytes.Text(choice % 32);
}

std::map<std::string, std::string> PairsOf(Bytes& bytes, size_t count) {
  std::map<std::string, std::string> pairs;
  for (size_t i = 0; i < count; ++i) {
    const ConfigKey& key = ConfigKeys()[bytes.Below(ConfigKeys().size())];
    pairs[std::string(key.name)] = ValueOf(bytes);
  }
  return pairs;
}

std::string Escaped(const std::string& value) {
  std::string text = "'";
  for (const char c : value) {
    text += c;
    if (c == '\'') text += c;
  }
  return text + "'";
}

// The values in force, given again as flags, give the same values.
void CheckDescription(const service::Config& config) {
  ConfigSources sources;
  for (const ConfigKey& key : ConfigKeys()) {
    sources.flags[std::string(key.name)] = key.get(config);
  }
  const auto none = [](const char*) -> const char* { return nullptr; };
  const auto again = LoadConfig(sources, none);
  if (!again.ok()) Found("values in force are refused: " + again.status().ToString());
  if (DescribeConfig(*again) != DescribeConfig(config)) Found("values in force change");
}

void Run(Bytes& bytes) {
  static const File file;
  const uint8_t kind = bytes.Byte();
  ConfigSources sources;
  sources.flags = PairsOf(bytes, kind % 4);
  const std::map<std::string, std::string> variables = PairsOf(bytes, kind / 4 % 4);
  if (kind / 16 % 4 != 0) {
    std::string text;
    for (const auto& [name, value] : PairsOf(bytes, kind / 16 % 4)) {
      text += name + ": " + (kind >= 128 ? Escaped(value) : value) + "\n";
    }
    file.Write(text + bytes.Text(kMaxFileBytes));
    sources.file = file.path();
  }
  std::map<std::string, std::string> environment;
  for (const ConfigKey& key : ConfigKeys()) {
    const auto found = variables.find(std::string(key.name));
    if (found != variables.end()) environment[key.environment()] = found->second;
  }
  const auto config = LoadConfig(sources, [&environment](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
  if (config.ok()) return CheckDescription(*config);
  if (!absl::IsInvalidArgument(config.status()) || config.status().message().empty()) {
    Found("a configuration is refused so: " + config.status().ToString());
  }
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds = {std::string("\x30", 1) + "max_pool_bytes: 1gib\nretain: true\n",
                                    std::string("\x10\x00\x06", 3) + "a: [1, {b: c}]\n- d\n",
                                    std::string("\x10\x00\x06", 3) + "&a x: *a\n? y\n: |\n  z\n"};
  const std::string example = service::ExampleConfig();
  seeds.push_back(std::string("\x10\x00\x06", 3) + example.substr(0, kMaxFileBytes));
  for (size_t key = 0; key < ConfigKeys().size(); ++key) {
    for (const char value : {'\2', '\6', '\10', '\24'}) {
      seeds.push_back(std::string(1, '\1') + static_cast<char>(key) + value);
    }
  }
  return seeds;
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pqcached::fuzz::Bytes bytes(data, size);
  pqcached::fuzz::Run(bytes);
  return 0;
}
