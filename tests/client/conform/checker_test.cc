// The checker of records: for each clause a text that breaks it and one that keeps it, and lines
// that are no recorded calls.
#include "client/conform/checker.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/client/conform/record_text.h"

namespace pqcached::conform {
namespace {

using pqcached::testing::RecordText;

constexpr char kClient[] = R"("client":"0xc")";
constexpr char kCache[] = R"("cache":"0xa")";
constexpr char kSequence[] = R"("sequence":"0x5")";
constexpr char kStep[] = R"("step":"0x9")";
constexpr char kStepOf[] = R"("client":"0xc","items":[{"sequence":"0x5","position":4,"length":1}])";

Report CheckText(const std::string& text) {
  std::istringstream lines(text);
  return Check(lines);
}

// Clauses by line; warnings have the clause "warning".
using Found = std::vector<std::pair<size_t, std::string>>;

Found FoundIn(const RecordText& record) {
  const Report report = CheckText(record.text());
  EXPECT_TRUE(report.bad_lines.empty()) << report.bad_lines[0].reason << "\n" << record.text();
  Found found;
  for (const Finding& finding : report.findings) {
    found.emplace_back(finding.line, finding.clause.empty() ? "warning" : finding.clause);
  }
  return found;
}

// A client, a cache and a sequence: lines 2 to 4.
RecordText Opened() {
  RecordText record;
  record.Ok("pqc_client_open", kClient);
  record.Ok("pqc_cache_open", std::string(kClient) + "," + kCache);
  record.Ok("pqc_sequence_create", std::string(kCache) + "," + kSequence);
  return record;
}

RecordText& Close(RecordText& record) {
  record.Ok("pqc_sequence_drop", kSequence);
  record.Ok("pqc_cache_close", kCache);
  return record.Ok("pqc_client_close", kClient);
}

std::string Ingest(uint64_t first, uint64_t tokens, uint32_t layer = 0) {
  return std::string(kSequence) + ",\"layer\":" + std::to_string(layer) +
         ",\"first_position\":" + std::to_string(first) + ",\"tokens\":" + std::to_string(tokens);
}

TEST(ConformTest, AWellBehavedEngineBreaksNothing) {
  RecordText record = Opened();
  record.Ok("pqc_ingest", Ingest(0, 4));
  record.Ok("pqc_build_index", kSequence);
  record.Ok("pqc_step_begin", std::string(kStepOf) + "," + kStep);
  record.Ok("pqc_step_attend", std::string(kStep) + ",\"layer\":0");
  record.Ok("pqc_step_end", kStep);
  record.Ok("pqc_sequence_flush", kSequence);
  Close(record);
  const Report report = CheckText(record.text());
  EXPECT_EQ(report.findings, std::vector<Finding>{});
  EXPECT_EQ(report.bad_lines, std::vector<BadLine>{});
  EXPECT_EQ(report.call_count, 12u);
  EXPECT_EQ(report.process_count, 1u);
}

TEST(ConformTest, Clause1AHandleIsClosedOnceAndNotUsedAfterwards) {
  RecordText twice = Opened();
  twice.Ok("pqc_sequence_drop", kSequence);
  Close(twice);
  EXPECT_EQ(FoundIn(twice), (Found{{6, "client.h 1"}}));
  EXPECT_EQ(CheckText(twice.text()).findings[0].text,
            "pqc_sequence_drop closes a sequence that pqc_sequence_drop in line 5 closed");

  RecordText used = Opened();
  Close(used);
  used.Ok("pqc_sequence_describe", kSequence);
  EXPECT_EQ(FoundIn(used), (Found{{8, "client.h 1"}}));

  RecordText opened_again = Opened();
  opened_again.Ok("pqc_sequence_drop", kSequence);
  opened_again.Ok("pqc_sequence_create", std::string(kCache) + "," + kSequence);
  EXPECT_EQ(FoundIn(Close(opened_again)), Found{});
}

TEST(ConformTest, Clause1AnAddressReturnsBeforeTheCallThatClosedItEnds) {
  RecordText record = Opened();
  record.Nested("pqc_sequence_drop", kSequence, "pqc_sequence_create",
                std::string(kCache) + "," + kSequence);
  EXPECT_EQ(FoundIn(Close(record)), Found{});
}

TEST(ConformTest, Clause1CallsNeedTheirClient) {
  RecordText record = Opened();
  record.Ok("pqc_client_close", kClient);
  record.Failed("pqc_sequence_describe", kSequence, "FAILED_PRECONDITION", "client");
  record.Failed("pqc_sequence_drop", kSequence, "FAILED_PRECONDITION", "client");  // closes it
  record.Ok("pqc_cache_close", kCache);
  EXPECT_EQ(FoundIn(record), (Found{{6, "client.h 1"}}));
}

TEST(ConformTest, Clause1HandlesThatAreLeftOpenAreWarnings) {
  RecordText record = Opened();
  record.Ok("pqc_cache_close", kCache);
  record.Ok("pqc_client_close", kClient);
  EXPECT_EQ(FoundIn(record), (Found{{4, "warning"}}));
}

TEST(ConformTest, Clause1ACallOnAClosedHandleIsFoundAlthoughItEndsTheProcess) {
  RecordText record = Opened();
  Close(record);
  record.Unreturned("pqc_sequence_truncate", std::string(kSequence) + ",\"token_count\":1");
  EXPECT_EQ(FoundIn(record), (Found{{8, "client.h 1"}, {8, "warning"}}));
}

TEST(ConformTest, Clause1OperationsAreClosedOnlyOnOk) {
  const std::string operation = R"("operation":"0x8")";
  RecordText record = Opened();
  record.Ok("pqc_sequence_flush_begin", std::string(kSequence) + "," + operation);
  record.Failed("pqc_operation_close", operation, "DEADLINE_EXCEEDED", "timeout_ms", 10);
  record.Ok("pqc_operation_close", operation);
  EXPECT_EQ(FoundIn(Close(record)), Found{});
  record.Ok("pqc_operation_poll", operation);
  EXPECT_EQ(FoundIn(record), (Found{{11, "client.h 1"}}));
}

TEST(ConformTest, Clause1ReorderingClosesTheSequencesThatItDrops) {
  RecordText record = Opened();
  record.Ok("pqc_sequence_fork", R"("parent":"0x5","token_count":0,"child":"0x6")");
  record.Ok("pqc_sequences_reorder", R"("sequences":["0x5","0x6"],"reordered":["0x5","0x7"])");
  record.Ok("pqc_sequence_drop", R"("sequence":"0x7")");
  EXPECT_EQ(FoundIn(Close(record)), Found{});
  record.Ok("pqc_sequence_drop", R"("sequence":"0x6")");
  EXPECT_EQ(FoundIn(record), (Found{{11, "client.h 1"}}));
}

TEST(ConformTest, Clause2StructsHaveTheirSize) {
  RecordText record = Opened();
  record.Failed("pqc_build_index", kSequence, "INVALID_ARGUMENT", "options.struct_size");
  EXPECT_EQ(FoundIn(Close(record)), (Found{{5, "client.h 2"}}));
  RecordText kept = Opened();
  kept.Failed("pqc_build_index", kSequence, "INVALID_ARGUMENT", "options.iterations");
  EXPECT_EQ(FoundIn(Close(kept)), Found{});
}

TEST(ConformTest, Clause4ACapacityThatIsTooSmallGrows) {
  const auto topk = [](uint64_t capacity) {
    return std::string(kSequence) + ",\"capacity\":" + std::to_string(capacity);
  };
  RecordText record = Opened();
  for (int i = 0; i < 3; ++i) record.Failed("pqc_topk", topk(8), "OUT_OF_RANGE", "capacity");
  EXPECT_EQ(FoundIn(Close(record)), (Found{{6, "client.h 4"}}));
  RecordText kept = Opened();
  for (int i = 0; i < 3; ++i) {
    kept.Failed("pqc_topk", topk(8), "OUT_OF_RANGE", "capacity").Ok("pqc_topk", topk(16));
  }
  EXPECT_EQ(FoundIn(Close(kept)), Found{});
}

TEST(ConformTest, Clause5PositionsAreStored) {
  RecordText record = Opened();
  record.Ok("pqc_ingest", Ingest(0, 4, 3));
  record.Failed("pqc_ingest", Ingest(9, 4, 3), "INVALID_ARGUMENT", "first_position");
  record.Failed("pqc_attend_range", std::string(kSequence) + R"(,"layer":3)", "OUT_OF_RANGE",
                "tokens");
  EXPECT_EQ(FoundIn(Close(record)), (Found{{6, "client.h 5"}, {7, "client.h 5"}}));
  EXPECT_EQ(CheckText(record.text()).findings[0].text,
            "pqc_ingest was refused for its positions (INVALID_ARGUMENT, field first_position); "
            "layer 3 had 4 tokens");
  RecordText kept = Opened();
  kept.Ok("pqc_ingest", Ingest(0, 4, 3)).Ok("pqc_ingest", Ingest(4, 4, 3));
  kept.Failed("pqc_ingest", Ingest(8, 4, 3), "INVALID_ARGUMENT", "keys.shape[1]");
  EXPECT_EQ(FoundIn(Close(kept)), Found{});
}

TEST(ConformTest, Clause6ChangesExcludeEachOther) {
  RecordText record = Opened();
  record.Nested("pqc_ingest", Ingest(0, 4), "pqc_ingest", Ingest(0, 4, 1));
  EXPECT_EQ(FoundIn(Close(record)), (Found{{5, "client.h 6"}}));
  RecordText kept = Opened();
  kept.Nested("pqc_ingest", Ingest(0, 4), "pqc_sequence_progress", kSequence);
  kept.Nested("pqc_build_index", kSequence, "pqc_ingest", Ingest(4, 4));
  EXPECT_EQ(FoundIn(Close(kept)), Found{});
}

TEST(ConformTest, Clause6AStepHasItsSequences) {
  RecordText record = Opened();
  record.Ok("pqc_step_begin", std::string(kStepOf) + "," + kStep);
  record.Failed("pqc_sequence_truncate", std::string(kSequence) + R"(,"token_count":1)", "ABORTED",
                "sequence", 10);
  record.Failed("pqc_step_begin", kStepOf, "ABORTED", "items[0].sequence", 10);
  record.Ok("pqc_step_abandon", kStep);
  record.Ok("pqc_sequence_truncate", std::string(kSequence) + R"(,"token_count":1)");
  EXPECT_EQ(FoundIn(Close(record)), (Found{{6, "client.h 6"}, {7, "client.h 6"}}));
}

TEST(ConformTest, Clause6NoCallUsesAHandleThatIsBeingClosed) {
  RecordText record = Opened();
  record.Nested("pqc_sequence_describe", kSequence, "pqc_sequence_drop", kSequence);
  record.Ok("pqc_cache_close", kCache).Ok("pqc_client_close", kClient);
  EXPECT_EQ(FoundIn(record), (Found{{5, "client.h 6"}}));
  RecordText other = Opened();
  other.Nested("pqc_sequence_drop", kSequence, "pqc_sequence_describe", kSequence);
  other.Ok("pqc_cache_close", kCache).Ok("pqc_client_close", kClient);
  EXPECT_EQ(FoundIn(other), (Found{{5, "client.h 6"}}));
}

TEST(ConformTest, Clause7ARetryTimeOf0MeansThatRepeatingIsNotWorthwhile) {
  RecordText record = Opened();
  for (int i = 0; i < 3; ++i) {
    record.Failed("pqc_sequence_pin", kSequence, "RESOURCE_EXHAUSTED", "sequence");
  }
  EXPECT_EQ(FoundIn(Close(record)), (Found{{6, "client.h 7"}}));  // once for the whole loop
  RecordText kept = Opened();
  kept.Failed("pqc_topk", kSequence, "FAILED_PRECONDITION", "selection.index");
  kept.Ok("pqc_build_index", kSequence);  // changes the state
  kept.Failed("pqc_topk", kSequence, "FAILED_PRECONDITION", "selection.index");
  EXPECT_EQ(FoundIn(Close(kept)), Found{});
}

TEST(ConformTest, Clause7ARepetitionWaitsForTheRetryTime) {
  RecordText record = Opened();
  record.Failed("pqc_ingest", Ingest(0, 4), "RESOURCE_EXHAUSTED", "", 1000).After(100);
  record.Failed("pqc_ingest", Ingest(0, 4), "RESOURCE_EXHAUSTED", "", 1000);
  EXPECT_EQ(FoundIn(Close(record)), (Found{{6, "client.h 7"}}));
  RecordText kept = Opened();
  kept.Failed("pqc_ingest", Ingest(0, 4), "RESOURCE_EXHAUSTED", "", 1000).After(1000);
  kept.Failed("pqc_ingest", Ingest(0, 4), "RESOURCE_EXHAUSTED", "", 1000);
  kept.Failed("pqc_ingest", Ingest(0, 4), "ABORTED", "sequence", 10);
  kept.Failed("pqc_ingest", Ingest(0, 4), "ABORTED", "sequence", 10);  // at once: status.h
  EXPECT_EQ(FoundIn(Close(kept)), Found{});
}

TEST(ConformTest, Clause7ALostSessionIsNotUsed) {
  RecordText record = Opened();
  record.Failed("pqc_ingest", Ingest(0, 4), "UNAVAILABLE");
  for (int i = 0; i < 2; ++i) record.Failed("pqc_sequence_describe", kSequence, "UNAVAILABLE");
  record.Failed("pqc_sequence_drop", kSequence, "UNAVAILABLE");
  record.Ok("pqc_cache_close", kCache).Ok("pqc_client_close", kClient);
  const Found found = FoundIn(record);
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found[0], (std::pair<size_t, std::string>{6, "client.h 7"}));
  RecordText kept = Opened();
  kept.Failed("pqc_ingest", Ingest(0, 4), "UNAVAILABLE", "", 100).After(100);
  kept.Ok("pqc_ingest", Ingest(0, 4));
  kept.Failed("pqc_sequence_describe", kSequence, "UNAVAILABLE");
  kept.Failed("pqc_sequence_drop", kSequence, "UNAVAILABLE");
  kept.Ok("pqc_cache_close", kCache).Ok("pqc_client_close", kClient);
  kept.Ok("pqc_client_open", kClient).Ok("pqc_client_close", kClient);
  EXPECT_EQ(FoundIn(kept), Found{});
}

TEST(ConformTest, Clause8AChildOpensItsOwnClient) {
  RecordText record = Opened();
  record.InProcess(R"("pid":8,"forked_from":7)");
  record.Ok("pqc_sequence_describe", kSequence);
  record.InProcess(R"("pid":7)");
  EXPECT_EQ(FoundIn(Close(record)), (Found{{5, "client.h 8"}}));
  RecordText kept = Opened();
  kept.InProcess(R"("pid":8,"forked_from":7)");
  kept.Ok("pqc_client_open", kClient).Ok("pqc_client_close", kClient);
  kept.InProcess(R"("pid":7)");
  EXPECT_EQ(FoundIn(Close(kept)), Found{});
}

TEST(ConformTest, Clause9AFailedCallHasNoResult) {
  RecordText record = Opened();
  record.Failed("pqc_sequence_fork", R"("parent":"0x5","token_count":0)", "RESOURCE_EXHAUSTED", "",
                100);
  record.Failed("pqc_sequence_describe", R"("sequence":"0x0")", "INVALID_ARGUMENT", "sequence");
  EXPECT_EQ(FoundIn(Close(record)), (Found{{6, "client.h 9"}}));
  RecordText kept = Opened();
  kept.Failed("pqc_sequence_fork", R"("parent":"0x5","token_count":0)", "RESOURCE_EXHAUSTED", "",
              100);
  kept.Ok("pqc_sequence_drop", R"("sequence":"0x0")");  // NULL does nothing
  EXPECT_EQ(FoundIn(Close(kept)), Found{});
}

TEST(ConformTest, Clause9ARepeatedCreationMayMakeTwo) {
  RecordText record = Opened();
  record.Failed("pqc_sequence_create", kCache, "DEADLINE_EXCEEDED", "", 10).After(10);
  record.Ok("pqc_sequence_create", std::string(kCache) + R"(,"sequence":"0x6")");
  record.Ok("pqc_sequence_drop", R"("sequence":"0x6")");
  EXPECT_EQ(FoundIn(Close(record)), (Found{{6, "warning"}}));
}

TEST(ConformTest, AStepIsEndedAndItsAttentionIsWaitedFor) {
  RecordText record = Opened();
  record.Ok("pqc_step_begin", std::string(kStepOf) + "," + kStep);
  record.Ok("pqc_step_attend_begin", std::string(kStep) + ",\"layer\":0");
  record.Failed("pqc_step_attend", std::string(kStep) + ",\"layer\":1", "FAILED_PRECONDITION");
  record.Failed("pqc_step_end", kStep, "FAILED_PRECONDITION");
  record.Ok("pqc_step_begin", std::string(kStepOf) + "," + kStep);
  const Found found = FoundIn(Close(record));
  EXPECT_EQ(found, (Found{{7, "step.h"}, {8, "step.h"}, {9, "step.h"}}));
  RecordText kept = Opened();
  kept.Ok("pqc_step_begin", std::string(kStepOf) + "," + kStep);
  kept.Ok("pqc_step_attend_begin", std::string(kStep) + ",\"layer\":0");
  kept.Ok("pqc_step_attend_wait", kStep).Ok("pqc_step_abandon", kStep);
  EXPECT_EQ(FoundIn(Close(kept)), Found{});
}

TEST(ConformTest, AStepHasOneThread) {
  RecordText record = Opened();
  record.Ok("pqc_step_begin", std::string(kStepOf) + "," + kStep);
  record.Nested("pqc_step_attend", std::string(kStep) + ",\"layer\":0", "pqc_step_attend",
                std::string(kStep) + ",\"layer\":1");
  record.Ok("pqc_step_abandon", kStep);
  EXPECT_EQ(FoundIn(Close(record)), (Found{{6, "step.h"}}));
}

TEST(ConformTest, ADecoderHasItsSequence) {
  const std::string decoder = R"("decoder":"0xd")";
  RecordText record = Opened();
  record.Ok("pqc_decoder_open", std::string(kSequence) + "," + decoder);
  record.Ok("pqc_decoder_decode", decoder + ",\"layer\":0");
  record.Ok("pqc_ingest", Ingest(0, 4));
  record.Ok("pqc_sequence_flush", kSequence);
  record.Ok("pqc_decoder_close", decoder);
  EXPECT_EQ(FoundIn(Close(record)), (Found{{7, "step.h"}}));
}

TEST(ConformTest, RowsOfStepsThatNothingWaitedForAreWarnings) {
  RecordText record = Opened();
  record.Ok("pqc_step_begin", std::string(kStepOf) + "," + kStep).Ok("pqc_step_end", kStep);
  EXPECT_EQ(FoundIn(Close(record)), (Found{{7, "warning"}}));
  RecordText operation = Opened();
  operation.Ok("pqc_step_begin", std::string(kStepOf) + "," + kStep).Ok("pqc_step_end", kStep);
  operation.Ok("pqc_sequence_flush_begin", std::string(kSequence) + R"(,"operation":"0x8")");
  operation.Ok("pqc_operation_poll", R"("operation":"0x8","done":1)");
  operation.Ok("pqc_operation_close", R"("operation":"0x8")");
  EXPECT_EQ(FoundIn(Close(operation)), Found{});
}

TEST(ConformTest, CallsOfLaterLibrariesAreLeftOut) {
  RecordText record = Opened();
  record.Ok("pqc_sequence_drop", kSequence);
  record.Ok("pqc_sequence_dream", std::string(kSequence) + R"(,"dream":{"of":["sheep"]})");
  record.Ok("pqc_sequence_drop", kSequence);  // of the sequence that the call may have opened
  record.Ok("pqc_cache_close", kCache).Ok("pqc_client_close", kClient);
  EXPECT_EQ(FoundIn(record), Found{});
  EXPECT_EQ(CheckText(record.text()).unknown_call_count, 1u);
}

TEST(ConformTest, ProcessesAreSeparate) {
  RecordText record = Opened();
  Close(record);
  RecordText again(R"({"pid":7,"record":1})");  // a process number that returns
  again.Ok("pqc_client_open", kClient).Ok("pqc_client_close", kClient);
  const Report report = CheckText(record.text() + again.text());
  EXPECT_EQ(report.findings, std::vector<Finding>{});
  EXPECT_EQ(report.process_count, 2u);
}

TEST(ConformTest, LinesThatAreNoRecordedCallsAreNamed) {
  const std::string head = R"({"pid":7,"thread":1,"begin":1,"end":2,"begin_us":1,"end_us":2,)";
  const std::string deep = std::string(100000, '[');
  for (const std::string& line : {
           std::string("not JSON"),
           std::string("[]"),
           std::string("{"),
           std::string("null"),
           std::string("\0{}", 3),
           std::string("{\"pid\":\"\xff\xfe\"}"),
           deep,
           std::string("{\"pid\":") + std::string(400, '9') + "}",
           std::string(R"({"pid":-1})"),
           std::string(R"({"pid":1.5})"),
           std::string(R"({"pid":7,"record":2})"),
           std::string(R"({"pid":7})"),
           std::string(R"({"pid":7,"call":[]})"),
           head + R"("call":"pqc_topk"})",                                  // no status
           head + R"("call":"pqc_topk","status":0})",                       // no text
           head + R"("call":"pqc_topk","status":"OK","sequence":5})",       // no address
           head + R"("call":"pqc_topk","status":"OK","sequence":"0xzz"})",  //
           head + R"("call":"pqc_topk","status":"OK","sequence":"0x11111111111111111"})",
           head + R"("call":"pqc_topk","status":"OK","layer":-1})",
           head + R"("call":"pqc_topk","status":"OK","items":[5]})",
           head + R"("call":"pqc_topk","status":"OK","items":{"sequence":"0x5"}})",
           head + R"("call":"pqc_topk","status":"OK","items":[{"sequence":"0x5"}]})",
           head + R"("call":"pqc_topk","status":"OK","layers":[{"layer":"x"}]})",
           std::string(R"({"pid":7,"thread":1,"begin":2,"end":2,"begin_us":1,"end_us":2,)") +
               R"("call":"pqc_topk","status":"OK"})",
       }) {
    const Report report = CheckText("{\"pid\":7,\"record\":1}\n" + line + "\n");
    ASSERT_EQ(report.bad_lines.size(), 1u) << line.substr(0, 200);
    EXPECT_EQ(report.bad_lines[0].line, 2u) << line.substr(0, 200);
    EXPECT_FALSE(report.bad_lines[0].reason.empty());
  }
}

TEST(ConformTest, ARecordWithoutCallsIsNoRecord) {
  EXPECT_EQ(CheckText("").bad_lines.size(), 1u);
  EXPECT_EQ(CheckText("").bad_lines[0].line, 1u);
  EXPECT_EQ(CheckText("{\"pid\":7,\"record\":1}\n").bad_lines[0].line, 2u);
}

TEST(ConformTest, CallsInAnyOrderNeverStopTheChecker) {
  // Every call of the contract, with every handle, in texts that make no sense.
  RecordText record;
  const std::string all = std::string(kClient) + "," + kCache + "," + kSequence + "," + kStep +
                          R"(,"parent":"0x5","child":"0x5","gpu":"0x1","decoder":"0xd",)"
                          R"("operation":"0x8","events":"0x2","token_count":18446744073709551615,)"
                          R"("first_position":18446744073709551615,"tokens":18446744073709551615,)"
                          R"("layer":0,"sequences":["0x5","0x5"],"reordered":["0x5","0x6"],)"
                          R"("items":[{"sequence":"0x5","position":18446744073709551615,)"
                          R"("length":18446744073709551615},)"
                          R"({"sequence":"0x5","position":0,"length":0}])";
  for (const char* name :
       {"pqc_client_open", "pqc_cache_open", "pqc_sequence_create_with", "pqc_step_begin",
        "pqc_step_begin", "pqc_decoder_open", "pqc_ingest", "pqc_sequences_reorder", "pqc_step_end",
        "pqc_sequence_flush_begin", "pqc_operation_close", "pqc_operation_close",
        "pqc_sequence_detach", "pqc_step_end", "pqc_client_close", "pqc_client_close",
        "pqc_sequence_drop", "pqc_step_attend_wait", "pqc_decoder_close"}) {
    record.Ok(name, all).Failed(name, all, "UNAVAILABLE").Unreturned(name, all);
    record.Nested(name, all, name, all);
  }
  EXPECT_FALSE(FoundIn(record).empty());
}

}  // namespace
}  // namespace pqcached::conform
