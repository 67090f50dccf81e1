// A layer's call of a step with exact re-ranking beside the same call without it.
#include <cstdint>
#include <string>
#include <thread>

#include "tests/bench/local/decoding.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint64_t kShort = 8 << 10, kLong = 128 << 10;

constexpr int kSteps = 4;  // of a round

// A selection of one context, without re-ranking and with factor 2.
struct Pair {
  size_t plain, reranked;
};

Pair Add(Rounds& rounds, const std::string& name, Decoding& context, pqc_selection selection) {
  const auto add = [&](double factor) {
    selection.rerank_factor = factor;
    return rounds.Add(name + (factor > 1 ? ", re-ranked" : ""), kSteps,
                      [&context, selection](int, int) {
                        for (int i = 0; i < kSteps; ++i) context.Step(selection, false);
                      });
  };
  return {.plain = add(1), .reranked = add(2)};
}

int Main(int argc, char** argv) {
  Report report(argc, argv, 51, "engine");
  const Sidecar sidecar;
  pqc_client* client = sidecar.OpenClient(std::thread::hardware_concurrency());
  if (pqc_client_path(client) != PQC_PATH_LOCAL) Require(false, "the client chose no local path");
  pqc_cache* cache = OpenCache(client, "rerank", uint64_t{1} << 30);
  {
    const Rows rows(8 << 10);
    Decoding brief(client, cache, rows, kShort, 5);
    Decoding extended(client, cache, rows, kLong, 5);
    Rounds rounds(1);
    const Pair tenth = Add(rounds, "attend a tenth, 8K", brief, Select(0.1));
    const Pair few = Add(rounds, "attend 1024 tokens, 128K", extended, SelectCount(1024));
    sidecar.WaitIdle();
    rounds.Run(report.rounds());
    report.Add(
        {"rerank2_step_cost", "x",
         "no re-ranking; begin and attend of one layer, 8K tokens at 1/10", Better::kLower, 1.6},
        rounds.Speedup(tenth.plain, tenth.reranked));
    report.Add(
        {"rerank2_step_cost_1024", "x",
         "no re-ranking; begin and attend of one layer, 1024 of 128K tokens", Better::kLower, 1.6},
        rounds.Speedup(few.plain, few.reranked));
  }
  pqc_cache_close(cache);
  pqc_client_close(client);
  return report.Finish();
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) { return pqcached::bench::Main(argc, argv); }
