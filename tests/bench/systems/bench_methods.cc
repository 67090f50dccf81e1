// A layer's decode step by each method, beside exact attention to all rows.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/local/decoding.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"
#include "tests/bench/systems/kcache_decoding.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kTopCount = 128;  // of a query head, KCache
constexpr uint64_t kSelected = 1024;

pqc_selection FlatCount(uint64_t tokens) {
  pqc_selection selection = SelectCount(tokens);
  selection.index = PQC_INIT(pqc_index);
  selection.index.kind = PQC_INDEX_FLAT;
  return selection;
}

// Ends the program unless the values of all tokens, by the engine's scores, are the exact attention.
void CheckKCache(pqc_client* client, pqc_cache* cache, pqc_cache* values, const Rows& rows) {
  constexpr uint64_t kTokens = 512;
  Decoding stored(client, cache, rows, kTokens, 5);
  KCacheDecoding kcache(client, values, rows, kTokens, kTokens, 5);
  pqc_selection all = Select(1.0);
  all.sink_tokens = 0;
  all.window_tokens = 1;  // the token of the step itself
  stored.Step(all, false);
  kcache.Step();
  double error = 0, norm = 0;
  for (size_t i = 0; i < kcache.output().size(); ++i) {
    error += std::pow(kcache.output()[i] - stored.output()[i], 2.0);
    norm += std::pow(stored.output()[i], 2.0);
  }
  Require(error < 1e-6 * norm, "the attention of KCache to all tokens is not the exact one");
}

pqc_index GraphIndex() {
  pqc_index index = PQC_INIT(pqc_index);
  Must(pqc_index_make("graph", nullptr, 0, &index), "pqc_index_make");
  return index;
}

pqc_selection GraphCount(uint64_t tokens) {
  pqc_selection selection = SelectCount(tokens);
  selection.index = GraphIndex();
  selection.group_rule = PQC_PER_QUERY_HEAD;
  return selection;
}

// Adds queries of 512 tokens, and builds graphs from them. Returns the seconds of the build.
double BuildGraphs(pqc_sequence* sequence, uint64_t tokens) {
  constexpr uint64_t kSamples = 512;
  std::vector<uint64_t> positions;
  std::vector<float> queries;
  for (uint32_t i = 0; i < kSamples; ++i) {
    positions.push_back(i * (tokens / kSamples));
    const std::vector<float> of_token = Queries(100 + i);
    queries.insert(queries.end(), of_token.begin(), of_token.end());
  }
  const uint64_t shape[3] = {kSamples, kQueryHeads, kDim};
  pqc_query_samples samples = PQC_INIT(pqc_query_samples);
  samples.positions = positions.data();
  samples.position_count = kSamples;
  samples.queries = PQC_INIT(pqc_tensor);
  samples.queries.ptr = queries.data();
  samples.queries.dtype = PQC_F32;
  samples.queries.ndim = 3;
  samples.queries.shape = shape;
  Must(pqc_add_query_samples(sequence, &samples, 1), "pqc_add_query_samples");
  pqc_build_options build = QuickBuild();
  build.index = GraphIndex();
  const auto begin = std::chrono::steady_clock::now();
  Must(pqc_build_index(sequence, &build), "pqc_build_index");
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("graphs of %d tokens were built in %.1f s\n", static_cast<int>(tokens), took.count());
  return took.count();
}

struct Context {
  Context(pqc_client* client, pqc_cache* cache, pqc_cache* values, const Rows& rows,
          uint64_t tokens)
      : stored(client, cache, rows, tokens, 5),
        kcache(client, values, rows, tokens, kTopCount, 5),
        build_seconds(BuildGraphs(stored.sequence(), tokens)) {}

  Decoding stored;
  KCacheDecoding kcache;
  const double build_seconds;  // of the graphs
};

void AddRows(const std::string& length, Context& context, Rounds& rounds, int round_count,
             Report& report) {
  const auto add = [&](const std::string& name, int steps, pqc_selection selection) {
    return rounds.Add(name + ", " + length, steps, [&context, selection, steps](int, int) {
      for (int i = 0; i < steps; ++i) context.stored.Step(selection, false);
    });
  };
  const size_t all = add("all rows", 1, Select(1.0));
  const size_t flat = add("flat", 1, FlatCount(kSelected));
  const size_t pq = add("pq", 8, SelectCount(kSelected));
  const size_t graph = add("graph", 4, GraphCount(kTopCount));
  const size_t kcache =
      rounds.Add("KCache, " + length, 1, [&](int, int) { context.kcache.Step(); });
  rounds.Run(round_count);

  const auto report_method = [&](const std::string& name, size_t entry,
                                 const std::string& setting) {
    const Stat seconds = rounds.Seconds(entry);
    report.Add(
        {"tokens_per_s_" + name + "_" + length,
         "tokens/s",
         "decode steps of one layer with 32 query heads; " + setting,
         Better::kHigher,
         {}},
        {1 / seconds.median, seconds.spread / (seconds.median * seconds.median), seconds.samples});
    if (entry == all) return;
    report.Add({"tokens_per_s_" + name + "_vs_all_" + length,
                "x",
                "exact attention to all rows in the sidecar; " + setting,
                Better::kHigher,
                {}},
               rounds.Speedup(entry, all));
  };
  report_method("all", all, "exact attention to all rows in the sidecar");
  report_method("flat", flat, "1024 tokens by exact scores");
  report_method("pq", pq, "1024 tokens, m=2 b=6");
  report_method(
      "graph", graph,
      "128 tokens of each query head by graphs, 80 of sink and window included; built in " +
          std::to_string(static_cast<int>(context.build_seconds)) + " s");
  report_method("kcache", kcache,
                "128 tokens of each query head by exact scores of the bench itself; values in the "
                "sidecar");
}

// Removes a flag of this program from the command line. Returns whether it was there.
bool TakeFlag(int* argc, char** argv, const std::string& flag) {
  char** const end = argv + *argc;
  char** const last = std::remove_if(argv + 1, end, [&](char* each) { return each == flag; });
  *argc -= static_cast<int>(end - last);
  return last != end;
}

// PROGRAM [--long] [flags of Report]. --long: also 512K tokens, whose graphs are built for minutes.
int Main(int argc, char** argv) {
  std::vector<uint64_t> lengths = {32, 128};
  if (TakeFlag(&argc, argv, "--long")) lengths.push_back(512);
  Report report(argc, argv, 15, "systems");
  const Sidecar sidecar;
  pqc_client* client = sidecar.OpenClient(1);
  if (pqc_client_path(client) != PQC_PATH_LOCAL) Require(false, "the client chose no local path");
  pqc_cache* cache = OpenCache(client, "methods", uint64_t{8} << 30);
  pqc_cache* values = OpenValueCache(client, "values", uint64_t{2} << 30);
  {
    const Rows rows(16 << 10);
    CheckKCache(client, cache, values, rows);
    for (const uint64_t kilo : lengths) {
      Context context(client, cache, values, rows, kilo << 10);
      Rounds rounds(1);
      sidecar.WaitIdle();
      AddRows(std::to_string(kilo) + "k", context, rounds, report.rounds(), report);
    }
  }
  pqc_cache_close(values);
  pqc_cache_close(cache);
  pqc_client_close(client);
  return report.Finish();
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) { return pqcached::bench::Main(argc, argv); }
