#include "service/config/command_line.h"

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "service/base/exit_code.h"
#include "service/base/version.h"

namespace pqcached::service {
namespace {

constexpr char kDescription[] =
    "pqcached keeps the KV cache of long LLM contexts in host memory, with indexes that find the "
    "tokens that matter.\n"
    "Configuration, in order of precedence: flags, environment (PQCACHED_ and the key in "
    "capitals), "
    "file, defaults.\n"
    "Exit status: 0 stopped cleanly, 1 could not start or run, 2 invalid command line or "
    "configuration, 3 too little memory to start.";

}  // namespace

CommandLine ParseCommandLine(int argc, const char* const* argv) {
  CommandLine result;
  CLI::App app(kDescription, "pqcached");
  app.set_version_flag("--version", absl::StrCat("pqcached ", kVersion));
  bool print_config = false;
  bool check_config = false;
  app.add_flag("--print-config", print_config,
               "Print a commented configuration file with all keys and defaults.");
  app.add_flag("--check-config", check_config,
               "Check the configuration, print the effective values, and exit.");
  app.add_option("--config", result.sources.file,
                 "YAML file (environment PQCACHED_CONFIG). Default: none.");

  app.add_flag(
      kTakeOverFlag, result.take_over,
      "Take over from the supervisor that serves on this socket, with its memory and sessions.");
  bool work = false;
  app.add_flag(kWorkerFlag, work)->group("");  // internal: not in --help

  std::map<std::string, std::string> values;
  std::map<std::string, CLI::Option*> options;
  const Config defaults;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string name(key.name);
    options[name] =
        app.add_option("--" + key.flag(), values[name],
                       absl::StrCat(key.text, " Default: ",
                                    key.get(defaults).empty() ? "empty" : key.get(defaults)))
            ->type_name(std::string(key.value));
  }

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    std::ostringstream text;
    app.exit(success, text, text);
    return {Action::kPrint, {}, text.str(), 0};
  } catch (const CLI::ParseError& error) {
    return {Action::kPrint,
            {},
            absl::StrCat("error: ", error.what(), " (see pqcached --help)\n"),
            kExitBadConfig};
  }
  if (print_config) return {Action::kPrint, {}, ExampleConfig(), 0};
  if (work) result.action = Action::kWork;
  if (check_config) result.action = Action::kCheckConfig;
  for (const auto& [name, option] : options) {
    if (option->count() > 0) result.sources.flags[name] = values[name];
  }
  return result;
}

}  // namespace pqcached::service
