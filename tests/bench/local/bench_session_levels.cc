// A decode step of one layer with m=4 b=8 by the best instruction set and limited to AVX2, beside
// reading all K and V once: 1024 of 128K tokens.
#include <atomic>
#include <cstdint>
#include <string>

#include "client/step/handles.h"
#include "kernels/base/exec.h"
#include "tests/bench/huge_buffer.h"
#include "tests/bench/local/decoding.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

using kernels::Level;

constexpr uint64_t kTokens = 128 << 10;
constexpr uint32_t kStepsARound = 4;

pqc_build_options BuildM4B8() {
  pqc_build_options build = QuickBuild();
  build.index.subspaces = 4;
  build.index.bits = 8;
  return build;
}

Figure FigureOf(const char* name, std::string against) {
  return {name, "x", std::move(against), Better::kHigher, std::nullopt};
}

void Run(Report& report) {
  const std::string ideal = "reading all K and V once";
  const Figure best = FigureOf("session_attend_1024_vs_ideal_m4b8", ideal);
  Figure limited =
      FigureOf("session_attend_1024_vs_ideal_m4b8_avx2", ideal + "; our code limited to AVX2");
  limited.goal = 10;
  const Sidecar sidecar;
  pqc_client* client = sidecar.OpenClient(1);
  Require(pqc_client_path(client) == PQC_PATH_LOCAL, "the client chose no local path");
  pqc_cache* cache = OpenCache(client, "session", uint64_t{2} << 30);
  {
    const Rows rows(16 << 10);
    const pqc_build_options build = BuildM4B8();
    Decoding context(client, cache, rows, kTokens, 5, build);
    pqc_selection selection = SelectCount(1024);
    selection.index = build.index;
    const HugeBuffer all(kTokens * kTokenBytes);
    std::atomic<uint64_t> sink{0};
    Rounds rounds(1);
    const size_t read = rounds.Add("read all K and V, 128K", 1, [&](int, int) {
      sink = sink + StreamRead(all.data(), all.size());
    });
    const auto add = [&](const char* name, Level level) {
      return rounds.Add(name, kStepsARound, [&context, selection, client, level](int, int) {
        client->state->exec.level = level;
        for (uint32_t i = 0; i < kStepsARound; ++i) context.Step(selection, false);
      });
    };
    const bool has_avx2 = kernels::HasLevel(Level::kAvx2);
    const size_t steps = add("attend 1024 tokens, m4b8", kernels::BestLevel());
    const size_t steps_avx2 =
        has_avx2 ? add("attend 1024 tokens, m4b8, limited to AVX2", Level::kAvx2) : 0;
    sidecar.WaitIdle();
    rounds.Run(report.rounds());
    report.Add(best, rounds.Speedup(steps, read));
    if (has_avx2) {
      report.Add(limited, rounds.Speedup(steps_avx2, read));
    } else {
      report.AddAbsent(limited, "no AVX2");
    }
  }
  pqc_cache_close(cache);
  pqc_client_close(client);
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;
  Report report(argc, argv, 15, "local");
  Run(report);
  return report.Finish();
}
