// A decode step of one layer against the sidecar's memory, beside reading all K and V once; counts the
// RPCs that steps wait for; reports how long attaching takes.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/huge_buffer.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint64_t kShort = 32 << 10, kMiddle = 128 << 10, kLong = 512 << 10;

// One sequence with an index, and what a step of it needs.
class Context {
 public:
  Context(pqc_client* client, pqc_cache* cache, const Rows& rows, uint64_t tokens)
      : client_(client),
        rows_(rows),
        next_(tokens),
        queries_(Queries(5)),
        queries_shape_{1, kQueryHeads, kDim} {
    Must(pqc_sequence_create(cache, &sequence_), "pqc_sequence_create");
    Fill(sequence_, rows, tokens);
    const pqc_build_options build = QuickBuild();
    Must(pqc_build_index(sequence_, &build), "pqc_build_index");
    output_.resize(queries_.size());
    lse_.resize(kQueryHeads);
  }
  Context(const Context&) = delete;
  ~Context() { pqc_sequence_drop(sequence_); }

  // The first one attaches; returns its seconds.
  double Attach() {
    const auto begin = std::chrono::steady_clock::now();
    pqc_step* step = Begin();
    pqc_step_abandon(step);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  // A step that attends and hands in the row of its token only when `append`.
  void Step(const pqc_selection& selection, bool append) {
    pqc_step* step = Begin();
    pqc_tensor queries = PQC_INIT(pqc_tensor);
    queries.ptr = queries_.data();
    queries.dtype = PQC_F32;
    queries.ndim = 3;
    queries.shape = queries_shape_;
    pqc_step_attention attention = PQC_INIT(pqc_step_attention);
    attention.output = output_.data();
    attention.output_capacity = output_.size();
    attention.lse = lse_.data();
    attention.lse_capacity = lse_.size();
    Must(pqc_step_attend(step, 0, &queries, &selection, &attention), "pqc_step_attend");
    if (!append) {
      pqc_step_abandon(step);
      return;
    }
    Rows::Pair pair;
    rows_.View(static_cast<uint32_t>(next_ % rows_.tokens()), 1, &pair);
    pqc_layer_rows layer = PQC_INIT(pqc_layer_rows);
    layer.keys = pair.keys;
    layer.values = pair.values;
    Must(pqc_step_end(step, &layer, 1, nullptr), "pqc_step_end");
    ++next_;
  }

 private:
  pqc_step* Begin() {
    pqc_step_item item = PQC_INIT(pqc_step_item);
    item.sequence = sequence_;
    item.query_position = next_;
    const pqc_selection selection = Select(0.1);
    pqc_step_options options = PQC_INIT(pqc_step_options);
    options.selection = &selection;
    pqc_step* step = nullptr;
    Must(pqc_step_begin(client_, &item, 1, &options, &step), "pqc_step_begin");
    return step;
  }

  pqc_client* client_;
  const Rows& rows_;
  pqc_sequence* sequence_ = nullptr;
  uint64_t next_;
  std::vector<float> queries_, output_, lse_;
  uint64_t queries_shape_[3];
};

uint64_t WaitedRpcs(pqc_client* client) {
  pqc_client_counts counts = PQC_INIT(pqc_client_counts);
  Must(pqc_client_count(client, &counts), "pqc_client_count");
  return counts.rpcs;
}

void CountRpcs(pqc_client* client, Context& context, Report& report) {
  constexpr int kSteps = 256;
  const pqc_selection selection = SelectCount(1024);
  for (int i = 0; i < 16; ++i) context.Step(selection, true);
  const uint64_t before = WaitedRpcs(client);
  for (int i = 0; i < kSteps; ++i) context.Step(selection, true);
  const double waited = static_cast<double>(WaitedRpcs(client) - before);
  report.Add({"sync_rpcs_per_step", "rpcs", "none needed", Better::kLower, 0.0},
             {waited / kSteps, 0, kSteps});
}

void Run(const Sidecar& sidecar, int threads, Report& report) {
  pqc_client* client = sidecar.OpenClient(static_cast<uint32_t>(threads));
  if (pqc_client_path(client) != PQC_PATH_LOCAL) Require(false, "the client chose no local path");
  pqc_cache* cache = OpenCache(client, "session", uint64_t{4} << 30);
  {
    const Rows rows(16 << 10);
    Context brief(client, cache, rows, kShort);
    Context middle(client, cache, rows, kMiddle);
    Context extended(client, cache, rows, kLong);
    const double attach = middle.Attach();
    if (threads == 1) {
      report.Add({"attach_128k_ms", "ms", "", Better::kLower, std::nullopt}, {attach * 1e3, 0, 1});
      CountRpcs(client, brief, report);
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
    const auto add = [&](const char* name, Context& context, pqc_selection selection) {
      return rounds.Add(name, 4, [&context, selection](int, int) {
        for (int i = 0; i < 4; ++i) context.Step(selection, false);
      });
    };
    const size_t tenth = add("attend a tenth, 128K", middle, Select(0.1));
    const size_t few = add("attend 1024 tokens, 128K", middle, SelectCount(1024));
    const size_t few_short = add("attend 1024 tokens, 32K", brief, SelectCount(1024));
    const size_t few_long = add("attend 1024 tokens, 512K", extended, SelectCount(1024));
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
