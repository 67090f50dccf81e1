// pqcachectl shows the state and the activity of a running pqcached, as human-readable tables or as
// JSON.
//
// Exit codes: 0 done, 1 refused by the sidecar, 2 wrong usage, 3 sidecar not reachable.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/ctl/limits.h"
#include "client/ctl/report.h"
#include "client/ctl/segments.h"
#include "client/ctl/supervisor.h"
#include "client/ctl/table.h"
#include "client/ctl/tensor_files.h"
#include "pqcached/client.hpp"

namespace pqcached::ctl {
namespace {

constexpr int kExitRefused = 1;
constexpr int kExitUsage = 2;
constexpr int kExitUnreachable = 3;

struct Arguments {
  std::string endpoint = "unix:///run/pqcached/pqcached.sock";
  uint32_t timeout_ms = 5000;
  bool json = false;
  std::optional<uint64_t> sequence;
  std::string log_level;
  uint64_t pin_seconds = 0;
  std::string as_tenant;  // empty = as an operator
  std::string tls_ca;     // empty = no TLS
  std::string tls_certificate;
  std::string tls_key;
  std::string tls_server_name;
  std::string token_file;
  std::string erased_tenant;
  bool resume = false;
  bool force = false;
  bool retry = false;
  bool discard = false;
  uint64_t cache = 0;
  uint64_t token_count = 0;
  uint64_t output_token_count = 0;
  uint64_t session = 0;
  std::string limited_tenant;       // empty = show the limits
  std::vector<std::string> limits;  // "sessions=20"
  std::string image_name;
  std::string image_path;
  std::string output;
};

// A failed call, which main reports.
struct Failure {
  Status status;
};

// An answer that is not what was asked for: a failed self-test, or data that is left. Its report is
// already printed.
struct Incomplete {};

class Sidecar {
 public:
  explicit Sidecar(Client client) : client_(std::move(client)) {}

  Json Call(const std::string& method, const Json& request = Json::object()) {
    const Result<std::string> answer = client_.AdminJson(method, request.dump());
    if (!answer.ok()) throw Failure{answer.status()};
    return Json::parse(*answer);
  }

 private:
  Client client_;
};

// An operator has no session; a tenant has one.
Result<Client> OpenClient(const Arguments& arguments) {
  return Client::Open({.endpoint = arguments.endpoint,
                       .tenant = arguments.as_tenant,
                       .client_name = "pqcachectl",
                       .timeout_ms = arguments.timeout_ms,
                       .path = arguments.as_tenant.empty() ? PQC_PATH_ADMIN : PQC_PATH_ANY,
                       .tls_ca = arguments.tls_ca,
                       .tls_certificate = arguments.tls_certificate,
                       .tls_key = arguments.tls_key,
                       .tls_server_name = arguments.tls_server_name,
                       .token_file = arguments.token_file});
}

void Print(const Arguments& arguments, const Json& json, const std::string& text) {
  std::fputs((arguments.json ? json.dump(2) + "\n" : text).c_str(), stdout);
}

void List(Sidecar& sidecar, const Arguments& arguments) {
  const Json caches = sidecar.Call("ListCaches");
  const Json sequences = sidecar.Call("ListSequences");
  Print(arguments, {{"caches", caches.at("caches")}, {"sequences", sequences.at("sequences")}},
        ReportCaches(caches, sequences));
}

void Describe(Sidecar& sidecar, const Arguments& arguments) {
  if (!arguments.sequence) {
    const Json info = sidecar.Call("GetServerInfo");
    return Print(arguments, info, ReportServer(info));
  }
  const Json description =
      sidecar.Call("DescribeSequence", {{"sequence_id", std::to_string(*arguments.sequence)}});
  Print(arguments, description.at("sequence"), ReportSequence(description));
}

void Stats(Sidecar& sidecar, const Arguments& arguments) {
  const Json stats = sidecar.Call("Stats");
  Print(arguments, stats, ReportStats(stats));
}

void Leases(Sidecar& sidecar, const Arguments& arguments) {
  const Json leases = sidecar.Call("ListLeases");
  Print(arguments, leases, ReportLeases(leases));
}

void Ping(Sidecar& sidecar, const Arguments& arguments) {
  const auto begin = std::chrono::steady_clock::now();
  const Json info = sidecar.Call("GetServerInfo");
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  Print(arguments,
        {{"endpoint", arguments.endpoint},
         {"version", info.at("version")},
         {"boot_id", info.at("boot_id")},
         {"uptime_seconds", Number(info.at("uptime_seconds"))},
         {"milliseconds", took.count()}},
        ReportPing(arguments.endpoint, info, took.count()));
}

void SetLogLevel(Sidecar& sidecar, const Arguments& arguments) {
  const Json answer = sidecar.Call("SetLogLevel", {{"level", arguments.log_level}});
  Print(arguments, answer,
        "log level " + arguments.log_level + " (was " +
            answer.at("previous_level").get<std::string>() + ")\n");
}

void Evict(Sidecar& sidecar, const Arguments& arguments) {
  const std::string id = std::to_string(*arguments.sequence);
  const Json answer = sidecar.Call("Evict", {{"sequence_id", id}});
  Print(arguments, answer, "sequence " + id + " was evicted\n");
}

void Pin(Sidecar& sidecar, const Arguments& arguments) {
  const std::string id = std::to_string(*arguments.sequence);
  const Json answer = sidecar.Call(
      "Pin", {{"sequence_id", id}, {"ttl_ms", std::to_string(arguments.pin_seconds * 1000)}});
  Print(arguments, answer,
        arguments.pin_seconds == 0
            ? "sequence " + id + " is no longer pinned\n"
            : "sequence " + id + " is pinned for " + FormatSeconds(arguments.pin_seconds) + "\n");
}

void Drain(Sidecar& sidecar, const Arguments& arguments) {
  const Json answer = sidecar.Call("Drain", {{"resume", arguments.resume}});
  Print(arguments, answer, ReportDrain(answer));
}

void Admit(Sidecar& sidecar, const Arguments& arguments) {
  const Json answer =
      sidecar.Call("Admit", {{"cache_id", std::to_string(arguments.cache)},
                             {"token_count", std::to_string(arguments.token_count)},
                             {"output_token_count", std::to_string(arguments.output_token_count)}});
  Print(arguments, answer, ReportAdmission(answer));
}

void DropCache(Sidecar& sidecar, const Arguments& arguments) {
  const std::string id = std::to_string(arguments.cache);
  const Json answer = sidecar.Call("DropCache", {{"cache_id", id}, {"force", arguments.force}});
  Print(arguments, answer,
        "cache " + id + " was dropped with " +
            std::to_string(Number(answer.at("dropped_sequences"))) + " sequences and prefixes; " +
            FormatBytes(Number(answer.at("freed_bytes"))) + " are free\n");
}

void Sessions(Sidecar& sidecar, const Arguments& arguments) {
  const Json sessions = sidecar.Call("ListSessions");
  Print(arguments, sessions, ReportSessions(sessions));
}

void IndexTypes(Sidecar& sidecar, const Arguments& arguments) {
  const Json types = sidecar.Call("ListIndexTypes");
  Print(arguments, types, ReportIndexTypes(types));
}

void EndSession(Sidecar& sidecar, const Arguments& arguments) {
  const std::string number = std::to_string(arguments.session);
  const Json answer = sidecar.Call("EndSession", {{"session_number", number}});
  Print(arguments, answer,
        "session " + number + " was ended with " +
            std::to_string(Number(answer.at("dropped_sequences"))) + " sequences\n");
}

void EndQuarantine(Sidecar& sidecar, const Arguments& arguments) {
  const Json answer =
      sidecar.Call("EndQuarantine", {{"cache_id", std::to_string(arguments.cache)}});
  const uint64_t pools = Number(answer.at("moving_pools"));
  Print(arguments, answer,
        pools == 0 ? "no memory is in quarantine\n"
                   : "the worker restarts; the next one moves " + std::to_string(pools) +
                         " pools to new memory\n");
}

void ExportSegments(Sidecar& sidecar, const Arguments& arguments) {
  const Json answer = sidecar.Call(
      "ExportSequence",
      {{"sequence_id", std::to_string(*arguments.sequence)}, {"name", arguments.image_name}});
  Print(arguments, answer,
        std::to_string(Number(answer.at("token_count"))) + " tokens were exported as " +
            arguments.image_name + ": " + std::to_string(Number(answer.at("image_count"))) +
            " images, " + FormatBytes(Number(answer.at("bytes"))) + "\n");
}

void ImportSegments(Sidecar& sidecar, const Arguments& arguments) {
  const Json answer = sidecar.Call("ImportSequence", {{"cache_id", std::to_string(arguments.cache)},
                                                      {"name", arguments.image_name}});
  Print(arguments, answer,
        std::to_string(Number(answer.at("token_count"))) + " tokens were imported as sequence " +
            std::to_string(Number(answer.at("sequence_id"))) + "; " +
            std::to_string(Number(answer.at("shared_tokens"))) + " of them were there already\n");
}

void Limits(Sidecar& sidecar, const Arguments& arguments) {
  if (arguments.limited_tenant.empty()) {
    const Json all = sidecar.Call("ListTenantLimits");
    return Print(arguments, all, ReportLimits(all.at("tenants")));
  }
  const Result<Json> limits = ParseLimits(arguments.limits);
  if (!limits.ok()) throw Failure{limits.status()};
  const Json answer =
      sidecar.Call("SetTenantLimits", {{"tenant", arguments.limited_tenant}, {"limits", *limits}});
  Print(arguments, answer, ReportLimits(Json::array({answer.at("tenant")})));
}

// The exit code reports if nothing of the tenant may be left.
void Erase(Sidecar& sidecar, const Arguments& arguments) {
  const Json answer = sidecar.Call("EraseTenant", {{"tenant", arguments.erased_tenant}});
  Print(arguments, answer, ReportErased(arguments.erased_tenant, answer));
  const bool complete =
      Number(answer.at("remaining_bytes")) == 0 && answer.at("unreadable_folders").empty();
  if (!complete) throw Incomplete();
}

// The exit code reports if all checks passed.
void SelfTest(Sidecar& sidecar, const Arguments& arguments) {
  const Json answer = sidecar.Call("SelfTest");
  Print(arguments, answer, ReportSelfTest(answer));
  if (!answer.at("passed").get<bool>()) throw Incomplete();
}

int ReportError(const Arguments& arguments, const pqcached::Status& status) {
  const bool unreachable =
      status.code() == PQC_UNAVAILABLE || status.code() == PQC_DEADLINE_EXCEEDED;
  std::fprintf(stderr, "pqcachectl: %s\n", status.ToString().c_str());
  if (!unreachable) return kExitRefused;
  if (const Result<Json> state = ReadSupervisor(arguments.endpoint); state.ok()) {
    std::fputs(ReportSupervisor(*state).c_str(), stderr);
  } else {
    std::fprintf(stderr,
                 "Is pqcached running and listening on %s? Choose another with --endpoint.\n",
                 arguments.endpoint.c_str());
  }
  return kExitUnreachable;
}

bool FailsToRecover(const Json& supervisor) {
  const std::string state = supervisor.at("state");
  return state == "given_up" || (state == "pausing" && supervisor.at("recovers").get<bool>());
}

// Asks the supervisor, as there is no worker that could answer.
int Recover(const Arguments& arguments) {
  if (arguments.retry == arguments.discard) {
    std::fputs("pqcachectl: recover needs --retry or --discard\n", stderr);
    return kExitUsage;
  }
  const auto failed = [&](const Status& status) {
    std::fprintf(stderr, "pqcachectl: %s\n", status.ToString().c_str());
    return kExitUnreachable;
  };
  Result<Json> state = ReadSupervisor(arguments.endpoint);
  if (!state.ok()) return failed(state.status());
  if (!FailsToRecover(*state)) {
    std::fputs(("pqcachectl: no recovery has failed\n" + ReportSupervisor(*state)).c_str(), stderr);
    return kExitRefused;
  }
  const Status sent = SendChoice(arguments.endpoint, arguments.retry ? "retry" : "discard");
  if (!sent.ok()) return failed(sent);
  state = ReadSupervisor(arguments.endpoint);
  if (!state.ok()) return failed(state.status());
  Print(arguments, *state, ReportSupervisor(*state));
  return state->at("state") == "given_up" ? kExitRefused : 0;
}

// The commands on exported sequences that work on files, without a sidecar.
struct SegmentFiles {
  CLI::App* list = nullptr;
  CLI::App* verify = nullptr;
  CLI::App* to_safetensors = nullptr;
  CLI::App* to_numpy = nullptr;
};

int RunOnFiles(const Arguments& arguments, const SegmentFiles& commands) {
  const auto refused = [](const Status& status) {
    std::fprintf(stderr, "pqcachectl: %s\n", status.ToString().c_str());
    return kExitRefused;
  };
  if (commands.list->parsed()) {
    const Result<Json> rows = ListSegments(arguments.image_path);
    if (!rows.ok()) return refused(rows.status());
    Print(arguments, *rows, ReportSegments(*rows));
    return 0;
  }
  if (commands.verify->parsed()) {
    const Result<Json> row = VerifySegments(arguments.image_path);
    if (!row.ok()) return refused(row.status());
    Print(arguments, *row, "all checksums are right\n" + ReportSegments(Json::array({*row})));
    return 0;
  }
  const Status written = commands.to_numpy->parsed()
                             ? WriteNumpy(arguments.image_path, arguments.output)
                             : WriteSafetensors(arguments.image_path, arguments.output);
  return written.ok() ? 0 : refused(written);
}

// The subcommands of "segment".
struct SegmentCommands {
  CLI::App* exports = nullptr;
  CLI::App* imports = nullptr;
  SegmentFiles files;
};

SegmentCommands AddSegmentCommands(CLI::App& app, Arguments& arguments) {
  CLI::App* const segment = app.add_subcommand(
      "segment", "sequences as files: exports and imports them, and reads what was exported");
  segment->require_subcommand(1);
  segment->fallthrough();
  SegmentCommands commands;
  const char* const name = "name of a folder in the sidecar's image_directory";
  commands.exports = segment->add_subcommand("export", "writes a sequence as segment images");
  commands.exports->add_option("SEQUENCE", arguments.sequence, "id of a sequence, as ls shows it")
      ->required();
  commands.exports->add_option("NAME", arguments.image_name, name)->required();
  commands.imports = segment->add_subcommand("import", "reads segment images into a cache");
  commands.imports->add_option("CACHE", arguments.cache, "id of a cache, as ls shows it")
      ->required();
  commands.imports->add_option("NAME", arguments.image_name, name)->required();
  SegmentFiles& files = commands.files;
  files.list = segment->add_subcommand("list", "exported sequences in a directory");
  files.list->add_option("DIRECTORY", arguments.image_path)->required();
  files.verify = segment->add_subcommand("verify", "reads all bytes, and checks their checksums");
  files.to_safetensors =
      segment->add_subcommand("to-safetensors", "writes keys and values as a safetensors file");
  files.to_numpy =
      segment->add_subcommand("to-numpy", "writes keys and values as a folder of .npy files");
  for (CLI::App* command : {files.verify, files.to_safetensors, files.to_numpy}) {
    command->add_option("FOLDER", arguments.image_path, "an exported sequence")->required();
  }
  for (CLI::App* command : {files.to_safetensors, files.to_numpy}) {
    command->add_option("OUTPUT", arguments.output, "must not exist yet")->required();
  }
  return commands;
}

using Command = void (*)(Sidecar&, const Arguments&);

int Run(const Arguments& arguments, Command command) {
  Result<Client> client = OpenClient(arguments);
  if (!client.ok()) return ReportError(arguments, client.status());
  Sidecar sidecar(std::move(*client));
  try {
    command(sidecar, arguments);
  } catch (const Failure& failure) {
    return ReportError(arguments, failure.status);
  } catch (const Incomplete&) {
    return kExitRefused;
  } catch (const Json::exception& exception) {
    std::fprintf(stderr, "pqcachectl: the sidecar's answer has an unexpected form: %s\n",
                 exception.what());
    return kExitRefused;
  }
  return 0;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Inspects and controls a running pqcached.", "pqcachectl");
  app.add_option("--endpoint", arguments.endpoint,
                 "unix:///path, or host:port with --tls-ca; with --as-tenant also host:port on the "
                 "loopback")
      ->capture_default_str();
  app.add_option("--timeout-ms", arguments.timeout_ms, "timeout of each call in milliseconds")
      ->capture_default_str()
      ->check(CLI::Range(1, 3600000));
  app.add_option("--as-tenant", arguments.as_tenant,
                 "ask as a client of this tenant, not as an operator");
  app.add_option("--tls-ca", arguments.tls_ca, "CA of the sidecar's certificate (PEM)");
  app.add_option("--tls-certificate", arguments.tls_certificate,
                 "certificate of this client (PEM)");
  app.add_option("--tls-key", arguments.tls_key, "its key (PEM)");
  app.add_option("--tls-server-name", arguments.tls_server_name,
                 "name in the sidecar's certificate; default: the host of the endpoint");
  app.add_option("--token-file", arguments.token_file, "file with the token of this client");
  app.add_flag("--json", arguments.json, "print JSON instead of tables");
  app.require_subcommand(1);
  app.fallthrough();

  app.add_subcommand("ls", "caches and sequences");
  CLI::App* describe = app.add_subcommand("describe", "a sequence, or the sidecar itself");
  describe->add_option("SEQUENCE", arguments.sequence, "id of a sequence, as ls shows it");
  app.add_subcommand("stats", "memory use and call counts");
  app.add_subcommand("leases", "leases of local clients and the memory that they pin");
  app.add_subcommand("ping", "version and round-trip time");
  CLI::App* evict = app.add_subcommand("evict", "drops a sequence that is not in use");
  CLI::App* pin = app.add_subcommand("pin", "protects a sequence from eviction");
  for (CLI::App* command : {evict, pin}) {
    command->add_option("SEQUENCE", arguments.sequence, "id of a sequence, as ls shows it")
        ->required();
  }
  pin->add_option("SECONDS", arguments.pin_seconds, "duration of the pin; 0 = unpin")
      ->required()
      ->check(CLI::Range(0, 30 * 24 * 3600));
  CLI::App* admit = app.add_subcommand("admit", "checks if a request would fit into a cache");
  admit->add_option("CACHE", arguments.cache, "id of a cache, as ls shows it")->required();
  admit->add_option("TOKENS", arguments.token_count, "tokens of the prompt")
      ->required()
      ->check(CLI::NonNegativeNumber);
  admit->add_option("OUTPUT_TOKENS", arguments.output_token_count, "expected output tokens")
      ->check(CLI::NonNegativeNumber);
  app.add_subcommand("drain", "stops admitting new sequences; existing sequences continue")
      ->add_flag("--resume", arguments.resume, "ends the drain: admits new sequences again");
  app.add_subcommand("selftest", "checks the kernels and the store on this machine");
  CLI::App* drop_cache =
      app.add_subcommand("drop-cache", "closes a cache that no session uses, and frees its memory");
  drop_cache->add_option("CACHE", arguments.cache, "id of a cache, as ls shows it")->required();
  drop_cache->add_flag("--force", arguments.force, "also when sessions have sequences there");
  app.add_subcommand("erase", "ends the sessions of a tenant, and drops all its data")
      ->add_option("--tenant", arguments.erased_tenant, "name of the tenant, as ls shows it")
      ->required();
  app.add_subcommand("sessions", "open sessions, with the processes that opened them");
  app.add_subcommand("index-types", "index types that the sidecar has, with their parameters");
  app.add_subcommand("end-quarantine",
                     "moves pools to new memory, which clients of earlier workers do not map; "
                     "restarts the worker")
      ->add_option("CACHE", arguments.cache, "id of a cache, as ls shows it; default: all");
  app.add_subcommand("end-session", "ends a session, and drops its sequences")
      ->add_option("SESSION", arguments.session, "number of a session, as sessions shows it")
      ->required();
  CLI::App* limits = app.add_subcommand(
      "limits", "what tenants may use and do use; with --tenant it changes a tenant's limits");
  limits->add_option("--tenant", arguments.limited_tenant, "name of a tenant; * = all others");
  limits->add_option("LIMIT=N", arguments.limits,
                     "sessions, caches, staging, builds, calls, weight, pool or guaranteed");
  const SegmentCommands segment = AddSegmentCommands(app, arguments);
  CLI::App* recover = app.add_subcommand(
      "recover", "after recoveries have failed: what becomes of the memory that is kept");
  recover->add_flag("--retry", arguments.retry, "starts workers again, which recover it");
  recover->add_flag("--discard", arguments.discard,
                    "sets files of pool_directory aside, frees other memory, and starts empty");
  CLI::App* log_level = app.add_subcommand("log-level", "sets the sidecar's log level");
  log_level
      ->add_option("LEVEL", arguments.log_level,
                   "trace, debug, info, warning, error, critical, off")
      ->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (app.got_subcommand(recover)) return Recover(arguments);
  if (segment.exports->parsed()) return Run(arguments, &ExportSegments);
  if (segment.imports->parsed()) return Run(arguments, &ImportSegments);
  if (app.got_subcommand("segment")) return RunOnFiles(arguments, segment.files);
  const std::pair<const char*, Command> commands[] = {{"ls", &List},
                                                      {"describe", &Describe},
                                                      {"stats", &Stats},
                                                      {"leases", &Leases},
                                                      {"ping", &Ping},
                                                      {"log-level", &SetLogLevel},
                                                      {"evict", &Evict},
                                                      {"pin", &Pin},
                                                      {"drain", &Drain},
                                                      {"selftest", &SelfTest},
                                                      {"admit", &Admit},
                                                      {"erase", &Erase},
                                                      {"drop-cache", &DropCache},
                                                      {"sessions", &Sessions},
                                                      {"index-types", &IndexTypes},
                                                      {"end-session", &EndSession},
                                                      {"end-quarantine", &EndQuarantine},
                                                      {"limits", &Limits}};
  for (const auto& [name, command] : commands) {
    if (app.got_subcommand(name)) return Run(arguments, command);
  }
  return kExitUsage;
}

}  // namespace
}  // namespace pqcached::ctl

int main(int argc, char** argv) {
  try {
    return pqcached::ctl::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pqcachectl: %s\n", error.what());
    return 1;
  }
}
