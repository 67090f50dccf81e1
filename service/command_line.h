// The command line of the daemon: which configuration, and what to do with it.
#ifndef PQCACHED_SERVICE_COMMAND_LINE_H_
#define PQCACHED_SERVICE_COMMAND_LINE_H_

#include <string>

#include "service/config.h"

namespace pqcached::service {

enum class Action {
  kServe,
  kWork,         // serve under a supervisor, which has started this process
  kCheckConfig,  // load the configuration, say what is in force, exit
  kPrint,        // print `text` and exit with `exit_code`
};

struct CommandLine {
  Action action = Action::kServe;
  ConfigSources sources;
  std::string text;
  int exit_code = 0;
  bool take_over = false;  // kServe: from the supervisor that holds the socket
};

inline constexpr int kExitFailed = 1;     // could not start or run
inline constexpr int kExitBadConfig = 2;  // command line or configuration

// With this flag the program is the worker that its supervisor starts.
inline constexpr char kWorkerFlag[] = "--worker";
inline constexpr char kTakeOverFlag[] = "--take-over";

// Every key of the configuration is a flag; --help tells them all. Never fails: a wrong command
// line becomes kPrint.
CommandLine ParseCommandLine(int argc, const char* const* argv);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_COMMAND_LINE_H_
