// CommandLine is the parsed command line of the daemon: the sources of the configuration and the
// action to perform.
#ifndef PQCACHED_SERVICE_CONFIG_COMMAND_LINE_H_
#define PQCACHED_SERVICE_CONFIG_COMMAND_LINE_H_

#include <string>

#include "service/config/config.h"

namespace pqcached::service {

enum class Action {
  kServe,
  kWork,         // serve as the worker of the supervisor that started this process
  kCheckConfig,  // load the configuration, print the values in force, exit
  kPrint,        // print `text` and exit with `exit_code`
};

struct CommandLine {
  Action action = Action::kServe;
  ConfigSources sources;
  std::string text;
  int exit_code = 0;
  bool take_over = false;  // kServe: take over from the supervisor that holds the socket
};

// Flag with which the supervisor starts the program as its worker.
inline constexpr char kWorkerFlag[] = "--worker";
inline constexpr char kTakeOverFlag[] = "--take-over";

// Parses the command line. Every key of the configuration is a flag, and --help lists them all.
// Never fails: a wrong command line becomes kPrint.
CommandLine ParseCommandLine(int argc, const char* const* argv);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_CONFIG_COMMAND_LINE_H_
