// Engines with a real sidecar whose calls are recorded, and pqcached-conform.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Outcome;
using testing::RunProgram;
using testing::TempFolder;

class RecordTest : public ::testing::Test {
 protected:
  RecordTest() { daemon_.AwaitServing(); }

  std::string path() const { return folder_.File("calls.jsonl"); }
  Outcome RunEngine(const std::vector<std::string>& command) const {
    // An engine that leaves a handle open leaks, which a sanitizer would report as its own error.
    std::vector<std::string> recorded = {"/usr/bin/env", "PQCACHED_RECORD=" + path(),
                                         "ASAN_OPTIONS=detect_leaks=0"};
    recorded.insert(recorded.end(), command.begin(), command.end());
    return RunProgram(recorded);
  }
  // Runs the engine, which breaks a clause, and returns what pqcached-conform says.
  Outcome Break(const std::string& clause) const {
    const Outcome engine = RunEngine({PQCACHED_CONFORM_ENGINE, daemon_.endpoint(), clause});
    EXPECT_EQ(engine.exit_code, 0) << engine.output;
    return RunProgram({PQCACHED_CONFORM, path()});
  }

  Daemon daemon_;
  TempFolder folder_;
};

TEST_F(RecordTest, AWellBehavedEngineBreaksNoClause) {
  const Outcome found = Break("none");
  EXPECT_EQ(found.exit_code, 0) << found.output;
  EXPECT_EQ(found.output, "calls: 10, processes: 1, breaks: 0, warnings: 0\n");
}

TEST_F(RecordTest, TheExamplesBreakNoClause) {
  for (const char* example : {PQCACHED_EXAMPLE_ATTEND, PQCACHED_EXAMPLE_CHAT, PQCACHED_EXAMPLE_C,
                              PQCACHED_EXAMPLE_CHAT_C}) {
    const Outcome engine = RunEngine({example, daemon_.endpoint()});
    EXPECT_EQ(engine.exit_code, 0) << engine.output;
  }
  const Outcome found = RunProgram({PQCACHED_CONFORM, path()});
  EXPECT_EQ(found.exit_code, 0) << found.output;
  EXPECT_NE(found.output.find("processes: 4, breaks: 0, warnings: 0\n"), std::string::npos)
      << found.output;
}

TEST_F(RecordTest, BrokenClausesAreReported) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"client closed", "client.h 1: pqc_sequence_flush uses a sequence of a client that was"},
      {"struct size", "client.h 2: pqc_sequence_describe was refused for the size of a struct"},
      {"capacity", "client.h 4: pqc_fetch_blocks is repeated with the capacity that was too small"},
      {"position", "client.h 5: pqc_ingest was refused for its positions"},
      {"change in a step",
       "client.h 6: pqc_sequence_truncate changes a sequence while the step of"},
      {"retry", "client.h 7: pqc_cache_drop repeats the call in line"},
      {"fork", "client.h 8: pqc_client_count uses, after fork(), a client"},
      {"no result", "client.h 9: pqc_sequence_describe goes on without a sequence after"},
  };
  for (const auto& [clause, text] : cases) {
    const Outcome found = Break(clause);
    EXPECT_EQ(found.exit_code, 1) << clause << ": " << found.output;
    EXPECT_NE(found.output.find(text), std::string::npos) << clause << ": " << found.output;
    EXPECT_NE(found.output.find("breaks: 1 ("), std::string::npos) << clause << found.output;
    ASSERT_EQ(unlink(path().c_str()), 0);
  }
}

TEST_F(RecordTest, ADecisionByTheMessageIsNotVisible) {
  const Outcome found = Break("message");
  EXPECT_EQ(found.exit_code, 0) << found.output;
  EXPECT_NE(found.output.find("breaks: 0, warnings: 0\n"), std::string::npos) << found.output;
  std::ifstream record(path());
  const std::string lines((std::istreambuf_iterator<char>(record)), {});
  EXPECT_EQ(lines.find("pqc_last_error"), std::string::npos) << lines;
  const Outcome help = RunProgram({PQCACHED_CONFORM, "--help"});
  EXPECT_NE(help.output.find("Clause 3 is not checked"), std::string::npos) << help.output;
}

TEST_F(RecordTest, LostRowsAndOpenHandlesAreWarnings) {
  const Outcome unflushed = Break("flush");
  EXPECT_EQ(unflushed.exit_code, 0) << unflushed.output;
  EXPECT_NE(unflushed.output.find("warning: rows may be lost"), std::string::npos)
      << unflushed.output;
  ASSERT_EQ(unlink(path().c_str()), 0);
  const Outcome open = Break("left open");
  EXPECT_EQ(open.exit_code, 0) << open.output;
  EXPECT_NE(open.output.find("warning: left open: the cache"), std::string::npos) << open.output;
}

TEST_F(RecordTest, NothingIsWrittenWithoutTheVariable) {
  const Outcome engine = RunProgram({"/usr/bin/env", "-u", "PQCACHED_RECORD", "-C", folder_.path(),
                                     PQCACHED_CONFORM_ENGINE, daemon_.endpoint(), "none"});
  EXPECT_EQ(engine.exit_code, 0) << engine.output;
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(RecordTest, AFileThatCannotBeWrittenFailsTheFirstCall) {
  const Outcome engine = RunProgram({"/usr/bin/env", "PQCACHED_RECORD=" + folder_.path(),
                                     PQCACHED_CONFORM_ENGINE, daemon_.endpoint(), "none"});
  EXPECT_EQ(engine.exit_code, 1);
  EXPECT_NE(engine.output.find("FAILED_PRECONDITION: PQCACHED_RECORD"), std::string::npos)
      << engine.output;
}

TEST(ConformProgramTest, ReportsBadInputAndBadUse) {
  const TempFolder folder;
  EXPECT_EQ(RunProgram({PQCACHED_CONFORM}).exit_code, 2);
  EXPECT_EQ(RunProgram({PQCACHED_CONFORM, folder.File("missing")}).exit_code, 2);
  EXPECT_EQ(RunProgram({PQCACHED_CONFORM, folder.path()}).exit_code, 2);
  EXPECT_EQ(RunProgram({PQCACHED_CONFORM, "--help"}).exit_code, 0);
  const std::string path = folder.File("calls.jsonl");
  std::ofstream(path) << "{\"pid\":7,\"record\":1}\nnonsense\n";
  const Outcome outcome = RunProgram({PQCACHED_CONFORM, path});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.output.find(path + ":2: not a recorded call: it is not JSON"),
            std::string::npos)
      << outcome.output;
}

}  // namespace
}  // namespace pqcached
