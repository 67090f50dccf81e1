// The record of calls (client/base/call_log.h). A process opens its record once, so the tests run
// in their order.
#include "client/base/call_log.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "client/base/deadline.h"
#include "client/conform/call.h"
#include "client/conform/checker.h"
#include "tests/client/process.h"

namespace pqcached::client {
namespace {

using Line = conform::RecordedCall;

const testing::TempFolder& Folder() {
  static const testing::TempFolder folder;
  return folder;
}

std::string RecordPath() { return Folder().File("calls.jsonl"); }

std::string RecordedText() {
  std::ostringstream text;
  text << std::ifstream(RecordPath()).rdbuf();
  return text.str();
}

// Returns the calls that `calls` adds to the record.
template <class Calls>
std::vector<Line> Recorded(const Calls& calls) {
  const size_t before = RecordedText().size();
  calls();
  std::istringstream lines(RecordedText().substr(before));
  std::vector<Line> recorded;
  for (std::string line; std::getline(lines, line);) {
    EXPECT_EQ(conform::ReadCall(line, &recorded.emplace_back()), "") << line;
  }
  return recorded;
}

const void* Address(uintptr_t number) { return reinterpret_cast<const void*>(number); }

void CloseAt(uintptr_t address) {
  RecordedClose("pqc_cache_close", "cache", Address(address), [] {});
}

TEST(CallLogTest, StartsWithoutTheVariableAndRecordsNothing) {
  // In a child, because a process decides once.
  const pid_t child = fork();
  if (child == 0) {
    unsetenv("PQCACHED_RECORD");
    bool described = false;
    const bool started = StartCallLog() == PQC_OK;
    setenv("PQCACHED_RECORD", RecordPath().c_str(), 1);  // too late
    const bool still_off = StartCallLog() == PQC_OK && !call_log_on;
    RecordedCall(
        "pqc_cache_drop", [&](CallRecord&) { described = true; }, [] { return PQC_OK; });
    _exit(started && still_off && !described && access(RecordPath().c_str(), F_OK) != 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(CallLogTest, AFileThatCannotBeOpenedIsAnErrorThatNamesTheVariable) {
  setenv("PQCACHED_RECORD", Folder().File("no/such/folder").c_str(), 1);
  EXPECT_EQ(StartCallLog(), PQC_FAILED_PRECONDITION);
  EXPECT_STREQ(pqc_last_error_field(), "PQCACHED_RECORD");
  EXPECT_EQ(pqc_last_error_retry_ms(), 0u);
  EXPECT_FALSE(call_log_on);
}

TEST(CallLogTest, StartsWithALineOfTheFormat) {
  setenv("PQCACHED_RECORD", RecordPath().c_str(), 1);
  ASSERT_EQ(StartCallLog(), PQC_OK);
  ASSERT_TRUE(call_log_on);
  EXPECT_EQ(RecordedText(), "{\"pid\":" + std::to_string(getpid()) +
                                ",\"record\":" + std::to_string(conform::kFormat) + "}\n");
}

TEST(CallLogTest, ALineHasArgumentsResultsAndStatus) {
  const auto calls = Recorded([] {
    const void* child = Address(0x66);
    RecordedCall(
        "pqc_sequence_fork",
        [&](CallRecord& call) {
          call.Handle("parent", Address(0x55)).Number("token_count", 7).Opens("child", &child);
        },
        [] { return PQC_OK; });
    RecordedCall(
        "pqc_sequence_fork",
        [&](CallRecord& call) { call.Handle("parent", nullptr).Opens("child", &child); },
        [] { return SetRetry(30, Fail(PQC_ABORTED, "a \"quoted\\ field\n", "text")); });
  });
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0].name, "pqc_sequence_fork");
  EXPECT_EQ(calls[0].pid, static_cast<uint64_t>(getpid()));
  EXPECT_EQ(calls[0].handles.at("parent"), 0x55u);
  EXPECT_EQ(calls[0].handles.at("child"), 0x66u);
  EXPECT_EQ(calls[0].Number("token_count"), 7u);
  EXPECT_EQ(calls[0].status, PQC_OK);
  EXPECT_LT(calls[0].begin, *calls[0].end);
  EXPECT_LT(*calls[0].end, calls[1].begin);
  EXPECT_EQ(calls[1].handles.at("parent"), 0u);
  EXPECT_FALSE(calls[1].handles.contains("child"));
  EXPECT_EQ(calls[1].status, PQC_ABORTED);
  EXPECT_EQ(calls[1].field, "a \"quoted\\ field?");
  EXPECT_EQ(calls[1].retry_ms, 30u);
}

TEST(CallLogTest, ArraysAreReadAsFarAsTheyAreValid) {
  const uint64_t shape[] = {5, 2, 8};
  pqc_layer_rows layers[2] = {PQC_INIT(pqc_layer_rows), PQC_INIT(pqc_layer_rows)};
  layers[0].layer = 3;
  layers[0].keys.ndim = 3;
  layers[0].keys.shape = shape;
  layers[1].struct_size = 1;
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.query_position = 9;
  const auto calls = Recorded([&] {
    RecordedCall(
        "pqc_append",
        [&](CallRecord& call) { call.Layers(layers, 2).Items(&item, 1).Tokens(nullptr); },
        [] { return PQC_OK; });
    RecordedCall(
        "pqc_append",
        [&](CallRecord& call) { call.Layers(nullptr, 2).Items(&item, UINT32_MAX).Tokens(nullptr); },
        [] { return PQC_OK; });
  });
  ASSERT_EQ(calls.size(), 2u);
  ASSERT_EQ(calls[0].layers.size(), 1u);
  EXPECT_EQ(calls[0].layers[0].layer, 3u);
  EXPECT_EQ(calls[0].layers[0].tokens, 5u);
  ASSERT_EQ(calls[0].items.size(), 1u);
  EXPECT_EQ(calls[0].items[0].position, 9u);
  EXPECT_TRUE(calls[1].layers.empty());
  EXPECT_TRUE(calls[1].items.empty());
}

TEST(CallLogTest, CallsInCallsAndOnTheClientsThreadsAreLeftOut) {
  const auto calls = Recorded([] {
    RecordedClose("pqc_decoder_close", "decoder", Address(0x77), [] { CloseAt(0x78); });
    std::thread([] {
      MarkOwnThread();
      CloseAt(0x79);
    }).join();
    CloseAt(0x7a);
  });
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0].name, "pqc_decoder_close");
  EXPECT_EQ(calls[1].handles.at("cache"), 0x7au);
}

TEST(CallLogTest, ACallOnAClosedHandleIsWrittenBeforeItBegins) {
  const auto calls = Recorded([] {
    CloseAt(0x90);
    CloseAt(0x90);  // might end the process
    const void* opened = Address(0x90);
    RecordedCall(
        "pqc_cache_open", [&](CallRecord& call) { call.Opens("cache", &opened); },
        [] { return PQC_OK; });
    CloseAt(0x90);
  });
  ASSERT_EQ(calls.size(), 5u);
  EXPECT_FALSE(calls[1].end);
  EXPECT_EQ(calls[1].begin, calls[2].begin);
  EXPECT_TRUE(calls[2].end);
}

TEST(CallLogTest, AChildOfTheProcessNamesIt) {
  const auto calls = Recorded([] {
    const pid_t child = fork();
    if (child == 0) {
      CloseAt(0xa0);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
  });
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_NE(calls[0].pid, static_cast<uint64_t>(getpid()));
  EXPECT_EQ(calls[0].forked_from, static_cast<uint64_t>(getpid()));
}

TEST(CallLogTest, LinesOfSeveralThreadsAreWhole) {
  constexpr int kThreads = 4, kCalls = 500;
  const auto calls = Recorded([] {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([] {
        for (int j = 0; j < kCalls; ++j) {
          RecordedCall(
              "pqc_match_prefix", [](CallRecord& call) { call.Handle("cache", Address(0xb0)); },
              [] { return PQC_OK; });
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  EXPECT_EQ(calls.size(), size_t{kThreads} * kCalls);
}

TEST(CallLogTest, ARecordThatCannotBeContinuedEnds) {
  const size_t before = RecordedText().size();
  rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  rlimit limit = old_limit;
  limit.rlim_cur = before + 10;
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  CloseAt(0xc0);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  signal(SIGXFSZ, handler);
  EXPECT_FALSE(call_log_on);
  std::istringstream lines(RecordedText());
  EXPECT_EQ(conform::Check(lines).bad_lines.size(), 1u);  // the cut line
}

}  // namespace
}  // namespace pqcached::client
