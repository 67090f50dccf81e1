// pqcached-conform checks the calls that an engine has made against the contract of the client
// library.
//
// Exit codes: 0 no clause is broken, 1 some are, 2 wrong usage or an unreadable file.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "client/conform/checker.h"

namespace pqcached::conform {
namespace {

constexpr int kExitBroken = 1;
constexpr int kExitUnreadable = 2;

constexpr char kFooter[] =
    "Record the calls of an engine: PQCACHED_RECORD=calls.jsonl ENGINE, with a real sidecar.\n"
    "A clause is a numbered convention of pqcached/client.h, or the header that has the rule.\n"
    "Warnings are about handles that are left open and rows that may be lost; they do not change\n"
    "the exit code.\n\n"
    "Clause 3 is not checked: a record has no reason of a decision, so it does not show whether "
    "an\n"
    "engine reads the message of a failure in place of its status, field and retry time. Clause 7\n"
    "reports repetitions that the retry time rules out.\n\n"
    "Not visible in a record: rows, queries and outputs, and results that an engine uses although\n"
    "pqc_step_end failed; memory that a call still needs; a sequence that several processes or\n"
    "handles write at once; a handle whose address a later one has received; calls of "
    "callbacks.\n\n"
    "Exit codes: 0 no clause is broken, 1 some are, 2 wrong usage or an unreadable file";

struct Totals {
  size_t calls = 0, unknown_calls = 0, processes = 0, warnings = 0;
  std::map<std::string, size_t> breaks;  // by clause
  bool unreadable = false;
};

void PrintReport(const std::string& path, const Report& report, Totals* totals) {
  totals->calls += report.call_count;
  totals->unknown_calls += report.unknown_call_count;
  totals->processes += report.process_count;
  for (const Finding& finding : report.findings) {
    const bool is_warning = finding.clause.empty();
    std::printf("%s:%zu: %s: %s\n", path.c_str(), finding.line,
                is_warning ? "warning" : finding.clause.c_str(), finding.text.c_str());
    if (is_warning) {
      ++totals->warnings;
    } else {
      ++totals->breaks[finding.clause];
    }
  }
  for (const BadLine& bad : report.bad_lines) {
    totals->unreadable = true;
    std::fprintf(stderr, "%s:%zu: not a recorded call: %s\n", path.c_str(), bad.line,
                 bad.reason.c_str());
  }
}

void PrintSummary(const Totals& totals) {
  size_t breaks = 0;
  std::string clauses;
  for (const auto& [clause, count] : totals.breaks) {
    breaks += count;
    clauses += (clauses.empty() ? " (" : ", ") + clause + ": " + std::to_string(count);
  }
  if (!clauses.empty()) clauses += ")";
  std::printf("calls: %zu, processes: %zu, breaks: %zu%s, warnings: %zu\n", totals.calls,
              totals.processes, breaks, clauses.c_str(), totals.warnings);
  if (totals.unknown_calls > 0) {
    std::printf("%zu calls are of functions that this version does not know\n",
                totals.unknown_calls);
  }
}

int Main(int argc, char** argv) {
  std::vector<std::string> paths;
  CLI::App app("Checks the recorded calls of an engine against the contract of pqcached/client.h.",
               "pqcached-conform");
  app.add_option("FILE", paths, "records that libpqcached_client wrote (PQCACHED_RECORD)")
      ->required();
  app.footer(kFooter);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUnreadable;
  }
  Totals totals;
  for (const std::string& path : paths) {
    std::ifstream lines(path);
    if (lines.is_open()) PrintReport(path, Check(lines), &totals);
    if (!lines.is_open() || lines.bad()) {
      std::fprintf(stderr, "pqcached-conform: %s cannot be read\n", path.c_str());
      totals.unreadable = true;
    }
  }
  PrintSummary(totals);
  if (totals.unreadable) return kExitUnreadable;
  return totals.breaks.empty() ? 0 : kExitBroken;
}

}  // namespace
}  // namespace pqcached::conform

int main(int argc, char** argv) {
  try {
    return pqcached::conform::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pqcached-conform: %s\n", error.what());
    return pqcached::conform::kExitUnreadable;
  }
}
