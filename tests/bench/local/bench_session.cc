// A decode step of one layer against the sidecar's memory, beside reading all K and V once; counts the
// RPCs that steps wait for; reports how long attaching takes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/huge_buffer.h"
#include "tests/bench/local/decoding.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint64_t kShort = 32 << 10, kMiddle = 128 << 10, kLong = 512 << 10;

// The first step attaches.
double AttachSeconds(Decoding& context) {
  const auto begin = std::chrono::steady_clock::now();
  pqc_step_abandon(context.Begin());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

uint64_t WaitedRpcs(pqc_client* client) {
  pqc_client_counts counts = PQC_INIT(pqc_client_counts);
  Must(pqc_client_count(client, &counts), "pqc_client_count");
  return counts.rpcs;
}

// Returns whether a step, with the row of its token, waits for an RPC of whatever thread: such a step
// does not end while the worker is stopped.
bool StepWaitsForWorker(const Sidecar& sidecar, Decoding& context) {
  constexpr std::chrono::seconds kMuchLongerThanAStep(2);
  context.Flush();
  auto stopped = std::make_unique<StoppedWorker>(sidecar);
  std::future<void> step =
      std::async(std::launch::async, [&] { context.Step(SelectCount(1024), true); });
  const bool ended = step.wait_for(kMuchLongerThanAStep) == std::future_status::ready;
  stopped.reset();
  step.get();
  return !ended;
}

// The larger of two numbers: RPCs that the threads of steps have begun, as the transport counts
// them, and steps that could not end without the worker, each of which has waited for one at least.
void CountRpcs(const Sidecar& sidecar, pqc_client* client, Decoding& context, Report& report) {
  constexpr int kSteps = 256, kStoppedSteps = 16;
  const pqc_selection selection = SelectCount(1024);
  for (int i = 0; i < 16; ++i) context.Step(selection, true);
  const uint64_t before = WaitedRpcs(client);
  for (int i = 0; i < kSteps; ++i) context.Step(selection, true);
  const double begun = static_cast<double>(WaitedRpcs(client) - before) / kSteps;
  double waiting = 0;
  for (int i = 0; i < kStoppedSteps; ++i) waiting += StepWaitsForWorker(sidecar, context) ? 1 : 0;
  std::printf("of %d steps with a stopped worker, %.0f waited for it\n", kStoppedSteps, waiting);
  report.Add({"sync_rpcs_per_step", "rpcs", "none needed, not even with a stopped worker",
              Better::kLower, 0.0},
             {std::max(begun, waiting / kStoppedSteps), 0, kSteps + kStoppedSteps});
}

void Run(const Sidecar& sidecar, int threads, Report& report) {
  pqc_client* client = sidecar.OpenClient(static_cast<uint32_t>(threads));
  if (pqc_client_path(client) != PQC_PATH_LOCAL) Require(false, "the client chose no local path");
  pqc_cache* cache = OpenCache(client, "session", uint64_t{4} << 30);
  {
    const Rows rows(16 << 10);
    Decoding brief(client, cache, rows, kShort, 5);
    Decoding middle(client, cache, rows, kMiddle, 5);
    Decoding extended(client, cache, rows, kLong, 5);
    const double attach = AttachSeconds(middle);
    if (threads == 1) {
      report.Add({"attach_128k_ms", "ms", "", Better::kLower, std::nullopt}, {attach * 1e3, 0, 1});
      CountRpcs(sidecar, client, brief, report);
    }

    const HugeBuffer all(kMiddle * kTokenBytes);  // as many bytes as K and V of the middle context
    std::atomic<uint64_t> sink{0};
    Rounds rounds(1);
    const size_t read = rounds.Add("read all K and V, 128K", 1, [&](int, int) {
      TimeOnThreads(threads, [&](int thread) {
        const size_t share = all.size() / static_cast<size_t>(threads) / 64 * 64;
        sink = sink + StreamRead(all.data() + static_cast<size_t>(thread) * share, share);
      });
    });
    const auto add = [&](const char* name, Decoding& context, pqc_selection selection) {
      return rounds.Add(name, 4, [&context, selection](int, int) {
        for (int i = 0; i < 4; ++i) context.Step(selection, false);
      });
    };
    const size_t tenth = add("attend a tenth, 128K", middle, Select(0.1));
    const size_t few = add("attend 1024 tokens, 128K", middle, SelectCount(1024));
    const size_t few_short = add("attend 1024 tokens, 32K", brief, SelectCount(1024));
    const size_t few_long = add("attend 1024 tokens, 512K", extended, SelectCount(1024));
    sidecar.WaitIdle();
    rounds.Run(report.rounds());

    const std::string suffix = threads == 1 ? "" : "_2t";
    const bool goals = threads == 1;
    const auto goal = [&](double value) { return goals ? std::optional(value) : std::nullopt; };
    const std::string ideal = "reading all K and V once";
    report.Add({"session_attend_s10_vs_ideal" + suffix, "x", ideal, Better::kHigher, goal(2.5)},
               rounds.Speedup(tenth, read));
    report.Add({"session_attend_1024_vs_ideal" + suffix, "x", ideal, Better::kHigher, goal(22)},
               rounds.Speedup(few, read));
    report.Add({"session_1024_512k_over_32k" + suffix, "x", "itself", Better::kLower, goal(3)},
               rounds.Speedup(few_short, few_long));
  }
  pqc_cache_close(cache);
  pqc_client_close(client);
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;
  Report report(argc, argv, 15, "local");
  for (const int threads : {1, 2}) {
    const Sidecar sidecar;
    Run(sidecar, threads, report);
  }
  return report.Finish();
}
