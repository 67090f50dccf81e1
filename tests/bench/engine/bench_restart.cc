// How long an engine's step begins are kept while the sidecar's worker is dead and the next one
// starts: with PQC_STEP_NO_WAIT, and without.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <thread>
#include <vector>

#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint64_t kTokens = 4096;
using Clock = std::chrono::steady_clock;

double Microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

class Engine {
 public:
  explicit Engine(const Sidecar& sidecar) : client_(sidecar.OpenClient(1)) {
    const Rows rows(kTokens);
    cache_ = OpenCache(client_, "restart", uint64_t{256} << 20);
    Must(pqc_sequence_create(cache_, &sequence_), "pqc_sequence_create");
    Fill(sequence_, rows, kTokens);
    const pqc_build_options build = QuickBuild();
    Must(pqc_build_index(sequence_, &build), "pqc_build_index");
    Must(Begin(0), "pqc_step_begin");
  }
  ~Engine() {
    pqc_sequence_drop(sequence_);
    pqc_cache_close(cache_);
    pqc_client_close(client_);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Begins a step and abandons it.
  pqc_status Begin(uint64_t flags) {
    const pqc_selection selection = Select(0.1);
    pqc_step_item item = PQC_INIT(pqc_step_item);
    item.sequence = sequence_;
    item.query_position = kTokens;
    pqc_step_options options = PQC_INIT(pqc_step_options);
    options.selection = &selection;
    options.flags = flags;
    pqc_step* step = nullptr;
    const pqc_status status = pqc_step_begin(client_, &item, 1, &options, &step);
    pqc_step_abandon(step);
    return status;
  }

 private:
  pqc_client* client_;
  pqc_cache* cache_ = nullptr;
  pqc_sequence* sequence_ = nullptr;
};

void KillWorker(const Sidecar& sidecar) {
  Require(kill(sidecar.WorkerPid(), SIGKILL) == 0, "kill");
}

// Kills the worker, and polls until a begin succeeds after others were refused. Adds the
// microseconds of each refused begin to *refused.
void PollThroughARestart(const Sidecar& sidecar, Engine& engine, std::vector<double>* refused) {
  KillWorker(sidecar);
  for (bool was_refused = false;;) {
    const auto begin = Clock::now();
    const pqc_status status = engine.Begin(PQC_STEP_NO_WAIT);
    const double took = Microseconds(Clock::now() - begin);
    if (status == PQC_OK && was_refused) return;
    if (status == PQC_OK) continue;
    // DEADLINE_EXCEEDED: the next worker serves, and its lease is on the way.
    Require(status == PQC_UNAVAILABLE || status == PQC_DEADLINE_EXCEEDED,
            "refused because no worker serves");
    was_refused = true;
    refused->push_back(took);
    std::this_thread::sleep_for(std::chrono::microseconds(200));  // an engine's other work
  }
}

// Kills the worker, and returns the microseconds of the begin that waited for the next one.
double WaitThroughARestart(const Sidecar& sidecar, Engine& engine) {
  KillWorker(sidecar);
  for (;;) {
    const auto begin = Clock::now();
    const pqc_status status = engine.Begin(0);  // UNAVAILABLE when the worker ends during the call
    const double took = Microseconds(Clock::now() - begin);
    if (status == PQC_OK && took > 20e3) return took;  // a new worker takes longer to start
  }
}

int Main(int argc, char** argv) {
  Report report(argc, argv, 5, "engine");
  const Sidecar sidecar;
  Engine engine(sidecar);
  std::vector<double> refused, waited;
  for (int round = 0; round < report.rounds(); ++round) {
    const size_t before = refused.size();
    PollThroughARestart(sidecar, engine, &refused);
    waited.push_back(WaitThroughARestart(sidecar, engine));
    std::printf("%zu refused begins; a begin that waits: %.0f us\n", refused.size() - before,
                waited.back());
  }
  Require(!refused.empty(), "a begin was refused while the worker restarted");
  std::sort(refused.begin(), refused.end());
  const auto at = [&](double share) {
    return refused[static_cast<size_t>(share * static_cast<double>(refused.size() - 1))];
  };
  std::printf("refused begins: p50 %.1f us, p99 %.1f us, longest %.1f us\n", at(0.5), at(0.99),
              refused.back());
  report.Add(
      {"begin_step_wait_us_while_restarting", "us",
       "p99 of pqc_step_begin with PQC_STEP_NO_WAIT while no worker serves", Better::kLower, 100.0},
      {at(0.99), at(0.75) - at(0.25), static_cast<int>(refused.size())});
  report.Add(
      {"begin_step_wait_us_without_the_flag", "us",
       "the longest pqc_step_begin of a restart, without the flag", Better::kLower, std::nullopt},
      StatOf(waited));
  return report.Finish();
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) { return pqcached::bench::Main(argc, argv); }
