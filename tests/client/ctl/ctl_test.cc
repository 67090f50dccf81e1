// pqcachectl: tables and JSON of a real pqcached, and exit codes.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/ctl/report.h"
#include "client/ctl/table.h"
#include "pqcached/client.hpp"
#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using ctl::Json;
using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::Outcome;
using testing::RunProgram;
using testing::SpecOf;

TEST(TableTest, ColumnsAreAlignedAndNumbersStandRight) {
  ctl::Table table({"NAME", "COUNT", "X"});
  table.Add({"a", "7", "-"});
  table.Add({"longer", "1234", "9"});
  EXPECT_EQ(table.ToText(),
            "NAME    COUNT  X\n"
            "a           7  -\n"
            "longer   1234  9\n");
}

TEST(TableTest, BytesAndSecondsAreForPeople) {
  EXPECT_EQ(ctl::FormatBytes(0), "0 B");
  EXPECT_EQ(ctl::FormatBytes(1023), "1023 B");
  EXPECT_EQ(ctl::FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(ctl::FormatBytes(uint64_t{3} << 40), "3.0 TiB");
  EXPECT_EQ(ctl::FormatSeconds(59), "59s");
  EXPECT_EQ(ctl::FormatSeconds(3 * 3600 + 120), "3h 2m");
  EXPECT_EQ(ctl::FormatSeconds(90000), "1d 1h");
}

TEST(ReportTest, IndexesHaveNames) {
  EXPECT_EQ(ctl::IndexName(Json::parse(R"({"pq": {"subspaces": 4, "bits": 8}})")), "pq m=4 b=8");
  EXPECT_EQ(ctl::IndexName(
                Json::parse(R"({"pq": {"subspaces": 4, "bits": 8, "layout": "LAYOUT_PAIRS"}})")),
            "pq m=4 b=8");
  EXPECT_EQ(ctl::IndexName(Json::parse(
                R"({"pq": {"subspaces": 4, "bits": 8, "layout": "LAYOUT_CONTIGUOUS"}})")),
            "pq m=4 b=8 contiguous");
  // A layout that a later sidecar may have, as protobuf prints it.
  EXPECT_EQ(ctl::IndexName(Json::parse(R"({"pq": {"subspaces": 4, "bits": 8, "layout": 7}})")),
            "pq m=4 b=8");
  EXPECT_EQ(ctl::IndexName(Json::parse(R"({"flat": {}})")), "flat");
  EXPECT_EQ(ctl::IndexName(Json::parse(R"({"typed": {"type": "graph", "parameters":
                {"degree": {"number": "32"}, "metric": {"name": "dot"}}}})")),
            "graph degree=32 metric=dot");
  EXPECT_EQ(ctl::Number(Json("18446744073709551615")), UINT64_MAX);
}

class CtlTest : public ::testing::Test {
 protected:
  Outcome Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {PQCACHED_CTL, "--endpoint", daemon_.endpoint()});
    return RunProgram(arguments);
  }
  Json RunJson(std::vector<std::string> arguments) {
    arguments.push_back("--json");
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return Json::parse(outcome.output);
  }

  Daemon daemon_;
  Client client_ = daemon_.OpenClient();
};

TEST_F(CtlTest, ShowsWhatThePqcachedHolds) {
  const Layer layer(300, 1);
  Cache cache = Must(client_.OpenCache(SpecOf("the-cache", {0})));
  Sequence sequence = Must(cache.CreateSequence());
  ASSERT_TRUE(sequence.Ingest(0, 0, layer.keys(0, 300), layer.values(0, 300)).ok());
  ASSERT_TRUE(sequence.BuildIndex({.iterations = 1}).ok());
  const std::string id = std::to_string(sequence.id());

  const Outcome list = Run({"ls"});
  EXPECT_EQ(list.exit_code, 0) << list.output;
  for (const char* part : {"SEQUENCE", "the-cache", "model of the-cache", "pq m=4 b=8", " 300 "}) {
    EXPECT_NE(list.output.find(part), std::string::npos) << part << " in\n" << list.output;
  }
  const Outcome description = Run({"describe", id});
  EXPECT_EQ(description.exit_code, 0) << description.output;
  for (const char* part : {"tokens     300", "SEGMENT", "0..256", "256..300", "LAYER", "ready"}) {
    EXPECT_NE(description.output.find(part), std::string::npos) << part << " in\n"
                                                                << description.output;
  }
  const Json described = RunJson({"describe", id});
  EXPECT_EQ(described.at("token_count"), "300");
  EXPECT_EQ(ctl::Number(described.at("row_bytes")), Must(sequence.Describe()).row_bytes);
  const Json listed = RunJson({"ls"});
  EXPECT_EQ(listed.at("caches").size(), 1u);
  EXPECT_EQ(listed.at("sequences").at(0).at("sequence_id"), id);
  const Json stats = RunJson({"stats"});
  EXPECT_EQ(stats.at("sequence_count"), 1);
  EXPECT_EQ(ctl::Number(stats.at("pool_used_bytes")) + ctl::Number(stats.at("pool_free_bytes")),
            ctl::Number(stats.at("pool_capacity_bytes")));
  const Outcome table = Run({"stats"});
  for (const char* part : {"BuildIndex", "MEMORY OF", "default", "pool", "records", "requests"}) {
    EXPECT_NE(table.output.find(part), std::string::npos) << part << " in\n" << table.output;
  }
  std::map<std::string, std::pair<uint64_t, uint64_t>> memory;  // promised and allocated, by use
  for (const Json& account : stats.at("memory")) {
    memory[account.at("use")] = {ctl::Number(account.at("promised_bytes")),
                                 ctl::Number(account.at("allocated_bytes"))};
  }
  EXPECT_EQ(memory["MEMORY_USE_POOL"].first, ctl::Number(stats.at("pool_capacity_bytes")));
  EXPECT_GE(memory["MEMORY_USE_POOL"].second, ctl::Number(stats.at("pool_used_bytes")));
  EXPECT_GT(memory["MEMORY_USE_REQUESTS"].first, 0u);
}

// As an operator it opens no session; as a tenant it sees what the tenant sees.
TEST_F(CtlTest, AsksAsAnOperatorOrAsATenant) {
  Client other = daemon_.OpenClient("other");
  Cache cache = Must(client_.OpenCache(SpecOf("the-cache", {0})));
  Must(other.OpenCache(SpecOf("another-cache", {0})));
  EXPECT_EQ(RunJson({"ls"}).at("caches").size(), 2u);
  EXPECT_EQ(RunJson({"stats"}).at("session_count"), 2);
  const Json own = RunJson({"--as-tenant", "other", "ls"});
  ASSERT_EQ(own.at("caches").size(), 1u);
  EXPECT_EQ(own.at("caches").at(0).at("name"), "another-cache");
  const std::string id =
      RunJson({"--as-tenant", "default", "ls"}).at("caches").at(0).at("cache_id");
  EXPECT_EQ(Run({"admit", id, "10"}).exit_code, 0);
  const Outcome foreign = Run({"--as-tenant", "other", "admit", id, "10"});
  EXPECT_EQ(foreign.exit_code, 1);
  EXPECT_NE(foreign.output.find("no cache " + id), std::string::npos) << foreign.output;
  const Outcome drain = Run({"--as-tenant", "other", "drain"});
  EXPECT_EQ(drain.exit_code, 1);
  EXPECT_NE(drain.output.find("Drain is for operators"), std::string::npos) << drain.output;
}

TEST_F(CtlTest, DropsACache) {
  Cache cache = Must(client_.OpenCache(SpecOf("the-cache", {0})));
  Sequence sequence = Must(cache.CreateSequence());
  const std::string id = RunJson({"ls"}).at("caches").at(0).at("cache_id");
  const Outcome refused = Run({"drop-cache", id});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_NE(refused.output.find("has sequence"), std::string::npos) << refused.output;
  const Outcome dropped = Run({"drop-cache", id, "--force"});
  EXPECT_EQ(dropped.exit_code, 0) << dropped.output;
  EXPECT_NE(dropped.output.find("was dropped with 1 sequences"), std::string::npos)
      << dropped.output;
  EXPECT_TRUE(RunJson({"ls"}).at("caches").empty());
  EXPECT_EQ(cache.CreateSequence().status().code(), PQC_NOT_FOUND);
  EXPECT_EQ(sequence.Describe().status().code(), PQC_NOT_FOUND);
}

TEST_F(CtlTest, ShowsAndEndsSessions) {
  Client other = daemon_.OpenClient("other");
  const nlohmann::json sessions = RunJson({"sessions"}).at("sessions");
  ASSERT_EQ(sessions.size(), 2u) << sessions;
  const nlohmann::json& its = sessions.at(1);
  EXPECT_EQ(its.at("tenant"), "other");
  const std::string number = its.at("session_number");
  const Outcome ended = Run({"end-session", number});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_NE(ended.output.find("session " + number + " was ended"), std::string::npos);
  EXPECT_EQ(Run({"end-session", number}).exit_code, 1);
}

TEST_F(CtlTest, ShowsIndexTypesWithTheirParameters) {
  const Outcome shown = Run({"index-types"});
  EXPECT_EQ(shown.exit_code, 0);
  EXPECT_NE(shown.output.find("pq: Product quantization of keys"), std::string::npos);
  EXPECT_NE(shown.output.find("subspaces  4        1 to 128                     m, the number"),
            std::string::npos)
      << shown.output;
  EXPECT_NE(shown.output.find("pairs, contiguous"), std::string::npos);
  EXPECT_NE(shown.output.find("flat: Exact scores"), std::string::npos);
  EXPECT_NE(shown.output.find("graph: RetrievalAttention"), std::string::npos);
  EXPECT_NE(shown.output.find("clusters: RetroInfer"), std::string::npos);
}

TEST_F(CtlTest, EndsQuarantines) {
  const Outcome none = Run({"end-quarantine"});
  EXPECT_EQ(none.exit_code, 0) << none.output;
  EXPECT_NE(none.output.find("no memory is in quarantine"), std::string::npos) << none.output;
  EXPECT_EQ(Run({"end-quarantine", "12345"}).exit_code, 1);
}

TEST_F(CtlTest, ShowsAndChangesLimits) {
  const Outcome shown = Run({"limits"});
  EXPECT_EQ(shown.exit_code, 0) << shown.output;
  EXPECT_NE(shown.output.find("SESSIONS"), std::string::npos) << shown.output;
  const nlohmann::json changed =
      RunJson({"limits", "--tenant", "team-a", "sessions=7", "staging=1gib"}).at("tenant");
  EXPECT_EQ(changed.at("limits").at("sessions"), "7");
  EXPECT_EQ(changed.at("limits").at("staging_bytes"), "1073741824");
  for (const char* wrong :
       {"sessions", "sessions=0", "sessions=many", "chairs=3", "staging=1zib"}) {
    const Outcome refused = Run({"limits", "--tenant", "team-a", wrong});
    EXPECT_EQ(refused.exit_code, 1) << wrong;
    EXPECT_NE(refused.output.find("must be LIMIT=N"), std::string::npos) << refused.output;
  }
  EXPECT_EQ(Run({"limits", "--tenant", "team-a", "weight=1001"}).exit_code, 1);
  EXPECT_EQ(Run({"limits", "--tenant", "team-a"}).exit_code, 1);
}

TEST_F(CtlTest, ErasesATenant) {
  Client other = daemon_.OpenClient("other");
  const Layer layer(300, 1);
  std::vector<Sequence> sequences;
  std::vector<Cache> caches;
  for (Client* client : {&client_, &other}) {
    caches.push_back(Must(client->OpenCache(SpecOf("the-cache", {0}))));
    sequences.push_back(Must(caches.back().CreateSequence()));
    ASSERT_TRUE(sequences.back().Ingest(0, 0, layer.keys(0, 300), layer.values(0, 300)).ok());
  }
  EXPECT_EQ(Run({"erase"}).exit_code, 2);
  EXPECT_EQ(Run({"erase", "--tenant", "No Name"}).exit_code, 1);
  const Outcome erased = Run({"erase", "--tenant", "other"});
  EXPECT_EQ(erased.exit_code, 0) << erased.output;
  EXPECT_NE(erased.output.find("tenant other: ended 1 sessions; dropped"), std::string::npos)
      << erased.output;
  EXPECT_EQ(RunJson({"ls"}).at("sequences").size(), 1u);
  EXPECT_EQ(Must(sequences[0].Describe()).token_count, 300u);
  EXPECT_EQ(sequences[1].Describe().status().code(), PQC_UNAVAILABLE) << "the session is lost";
}

TEST_F(CtlTest, TellsWhatASequenceIsTiedBy) {
  CacheSpec spec = SpecOf("the-cache", {0});
  spec.rank_group = "group";
  spec.rank_count = 1;
  Cache cache = Must(client_.OpenCache(spec));
  Sequence tied = Must(cache.CreateSequence(SequenceOptions{.group_key = "request\1"}));
  Sequence untied = Must(cache.CreateSequence());
  const auto describe = [&](const Sequence& sequence) {
    return Run({"describe", std::to_string(sequence.id())}).output;
  };
  EXPECT_NE(describe(tied).find("group key  request\\001\n"), std::string::npos) << describe(tied);
  EXPECT_EQ(describe(untied).find("group key"), std::string::npos);
}

TEST_F(CtlTest, PingsDescribesAndSetsTheLogLevel) {
  EXPECT_GT(RunJson({"ping"}).at("milliseconds").get<double>(), 0);
  const Outcome ping = Run({"ping"});
  EXPECT_EQ(ping.output.rfind("pqcached ", 0), 0u) << ping.output;
  const Outcome server = Run({"describe"});
  EXPECT_NE(server.output.find("segment_tokens"), std::string::npos) << server.output;
  EXPECT_EQ(Run({"log-level", "debug"}).exit_code, 0);
  EXPECT_EQ(RunJson({"log-level", "info"}).at("previous_level"), "debug");
}

TEST_F(CtlTest, SteersThePqcached) {
  const Layer layer(300, 1);
  Cache cache = Must(client_.OpenCache(SpecOf("the-cache", {0})));
  Sequence sequence = Must(cache.CreateSequence());
  ASSERT_TRUE(sequence.Ingest(0, 0, layer.keys(0, 300), layer.values(0, 300)).ok());
  const std::string id = std::to_string(sequence.id());

  const Outcome pinned = Run({"pin", id, "7200"});
  EXPECT_EQ(pinned.exit_code, 0) << pinned.output;
  EXPECT_NE(pinned.output.find("is pinned for 2h"), std::string::npos) << pinned.output;
  EXPECT_NE(Run({"ls"}).output.find("pinned 1h 59m"), std::string::npos);
  const Outcome refused = Run({"evict", id});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_NE(refused.output.find("pinned"), std::string::npos) << refused.output;
  EXPECT_EQ(Run({"pin", id, "0"}).exit_code, 0);
  EXPECT_EQ(Run({"pin", id, "-1"}).exit_code, 2);
  EXPECT_EQ(Run({"pin", id}).exit_code, 2);
  EXPECT_EQ(Run({"evict", id}).exit_code, 0);
  EXPECT_EQ(Run({"evict", id}).exit_code, 1);
  EXPECT_EQ(Run({"evict"}).exit_code, 2);
  EXPECT_EQ(RunJson({"stats"}).at("evicted_sequences"), "1");

  const Outcome drained = Run({"drain"});
  EXPECT_NE(drained.output.find("draining: "), std::string::npos) << drained.output;
  EXPECT_FALSE(cache.CreateSequence().ok());
  EXPECT_TRUE(RunJson({"stats"}).at("draining").get<bool>());
}

TEST_F(CtlTest, TellsWhetherARequestWouldFit) {
  constexpr uint64_t kTokens = 1024;  // 512 KiB in rows, and 896 KiB more with their index
  const Layer layer(kTokens, 1);
  CacheSpec spec = SpecOf("the-cache", {0});
  spec.capacity_bytes = 24 << 16;
  spec.default_index = Index::Pq(2, 6);
  Client tenant = Must(Client::Open({.endpoint = daemon_.endpoint(), .tenant = "tenant"}));
  Cache cache = Must(tenant.OpenCache(spec));
  const std::string id = RunJson({"ls"}).at("caches").at(0).at("cache_id");
  const auto expect = [&](const std::string& tokens, const char* verdict, const char* words) {
    EXPECT_EQ(RunJson({"admit", id, tokens}).at("verdict"), verdict);
    const Outcome text = Run({"admit", id, tokens});
    EXPECT_EQ(text.exit_code, 0) << text.output;
    EXPECT_NE(text.output.find(words), std::string::npos) << words << " in\n" << text.output;
    EXPECT_NE(text.output.find("the cache may hold 1.5 MiB"), std::string::npos) << text.output;
  };
  const std::string wanted = std::to_string(kTokens);
  expect(wanted, "VERDICT_FITS_NOW", "fits now: needs ");
  expect("1000000", "VERDICT_NEVER", " over the limit");
  EXPECT_EQ(RunJson({"admit", id, "1", "1000000"}).at("verdict"), "VERDICT_NEVER");
  {
    const std::vector<uint32_t> names = testing::Range(0, kTokens);
    Sequence sequence = Must(cache.CreateSequence({.prompt = {.token_ids = names}}));
    ASSERT_TRUE(sequence.Ingest(0, 0, layer.keys(0, kTokens), layer.values(0, kTokens)).ok());
    expect(wanted, "VERDICT_LATER", " short until other sequences are released; retry in ");
    ASSERT_TRUE(sequence.Drop().ok());
  }
  expect(wanted, "VERDICT_AFTER_EVICTION", " of cached prefixes would be evicted");
  EXPECT_EQ(Run({"admit", id}).exit_code, 2);
  EXPECT_EQ(Run({"admit", id, "-5"}).exit_code, 2);
  const Outcome unknown = Run({"admit", "4711", "5"});
  EXPECT_EQ(unknown.exit_code, 1);
  EXPECT_NE(unknown.output.find("cache_id"), std::string::npos) << unknown.output;
}

TEST_F(CtlTest, AnswersTheSelfTestWithItsExitCode) {
  const Outcome tested = Run({"selftest", "--timeout-ms", "60000"});
  EXPECT_EQ(tested.exit_code, 0) << tested.output;
  EXPECT_NE(tested.output.find("reference.attend"), std::string::npos) << tested.output;
  EXPECT_TRUE(RunJson({"selftest", "--timeout-ms", "60000"}).at("passed").get<bool>());
}

TEST_F(CtlTest, ExitCodesTellWhoIsWrong) {
  const Outcome unknown = Run({"describe", "4711"});
  EXPECT_EQ(unknown.exit_code, 1);
  EXPECT_NE(unknown.output.find("NOT_FOUND"), std::string::npos) << unknown.output;
  EXPECT_EQ(Run({"log-level", "loud"}).exit_code, 1);
  EXPECT_EQ(Run({}).exit_code, 2);
  EXPECT_EQ(Run({"nonsense"}).exit_code, 2);
  EXPECT_EQ(Run({"describe", "not-a-number"}).exit_code, 2);
  EXPECT_EQ(Run({"--help"}).exit_code, 0);
  const Outcome nobody = RunProgram({PQCACHED_CTL, "--endpoint", daemon_.endpoint() + "x", "ping"});
  EXPECT_EQ(nobody.exit_code, 3);
  EXPECT_NE(nobody.output.find("Is pqcached running"), std::string::npos) << nobody.output;
}

TEST_F(CtlTest, TheSmallExampleRuns) {
  const Outcome outcome = RunProgram({PQCACHED_EXAMPLE, daemon_.endpoint()});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_NE(outcome.output.find("attended 16 sink + 64 window + 329 selected of 4096 tokens"),
            std::string::npos)
      << outcome.output;
}

}  // namespace
}  // namespace pqcached
