// Complete attention in decode steps beside the attention to the selected tokens alone: what sink,
// window, merge and the keeping of rows add.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "pqcached/decode.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kContext = 8 << 10;
constexpr uint32_t kLayers = 8;
constexpr double kRatio = 0.1;

// A sequence at which an engine decodes.
class Decoding {
 public:
  Decoding(pqc_client* client, pqc_cache* cache, const Rows& rows)
      : client_(client),
        rows_(rows),
        queries_(Queries(1)),
        output_(kQueryHeads * kDim),
        lse_(kQueryHeads) {
    Must(pqc_sequence_create(cache, &sequence_), "pqc_sequence_create");
    Fill(sequence_, rows, kContext, kLayers);
    const pqc_build_options build = QuickBuild();
    Must(pqc_build_index(sequence_, &build), "pqc_build_index");
    query_.ptr = queries_.data();
    query_.dtype = PQC_F32;
    query_.ndim = 2;
    query_.shape = query_shape_;
    out_.output = output_.data();
    out_.output_capacity = output_.size();
    out_.lse = lse_.data();
    out_.lse_capacity = lse_.size();
  }
  ~Decoding() { pqc_sequence_drop(sequence_); }
  Decoding(const Decoding&) = delete;
  Decoding& operator=(const Decoding&) = delete;

  // Attends to the selected tokens in every layer; returns the seconds of the calls.
  double Attend() {
    pqc_step* step = Begin();
    const auto begin = std::chrono::steady_clock::now();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Must(pqc_step_attend(step, layer, &query_, nullptr, &out_), "pqc_step_attend");
    }
    const double seconds = Since(begin);
    pqc_step_abandon(step);
    return seconds;
  }

  // Decodes the next token; returns the seconds of the calls. The rows are then stored.
  double Decode() {
    Rows::Pair pair;
    rows_.View(static_cast<uint32_t>(position_ % rows_.tokens()), 1, &pair);
    pqc_step* step = Begin();
    const auto begin = std::chrono::steady_clock::now();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Must(pqc_step_decode(step, layer, &query_, &pair.keys, &pair.values, nullptr, &out_),
           "pqc_step_decode");
    }
    const double seconds = Since(begin);
    Must(pqc_step_end(step, nullptr, 0, nullptr), "pqc_step_end");
    Must(pqc_sequence_flush(sequence_), "pqc_sequence_flush");
    ++position_;
    return seconds;
  }

  // That Decode gives what Attend gives, merged with the attention to sink and window.
  void RequireRight() {
    Attend();
    std::vector<float> expected = output_, lse = lse_;
    const uint64_t position = position_;
    Decode();
    const std::vector<float> decoded = output_;
    pqc_query query = PQC_INIT(pqc_query);
    query.layer = kLayers - 1;
    query.query_position = position;
    query.queries = query_;
    for (const pqc_token_range own :
         {pqc_token_range{0, kSinkTokens},
          pqc_token_range{position + 1 - kWindowTokens, position + 1}}) {
      pqc_attention out = PQC_INIT(pqc_attention);
      out.output = output_.data();
      out.output_capacity = output_.size();
      out.lse = lse_.data();
      out.lse_capacity = lse_.size();
      Must(pqc_attend_range(sequence_, &query, own, &out), "pqc_attend_range");
      Must(pqc_merge(kQueryHeads, kDim, expected.data(), lse.data(), output_.data(), lse_.data()),
           "pqc_merge");
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      Require(std::abs(decoded[i] - expected[i]) <= 2e-2f, "both compute the same");
    }
  }

 private:
  static double Since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  pqc_step* Begin() {
    pqc_step_item item = PQC_INIT(pqc_step_item);
    item.sequence = sequence_;
    item.query_position = position_;
    const pqc_selection selection = Select(kRatio);
    pqc_step_options options = PQC_INIT(pqc_step_options);
    options.selection = &selection;
    pqc_step* step = nullptr;
    Must(pqc_step_begin(client_, &item, 1, &options, &step), "pqc_step_begin");
    return step;
  }

  pqc_client* const client_;
  const Rows& rows_;
  std::vector<float> queries_, output_, lse_;
  pqc_sequence* sequence_ = nullptr;
  uint64_t position_ = kContext;
  const uint64_t query_shape_[2] = {kQueryHeads, kDim};
  pqc_tensor query_ = PQC_INIT(pqc_tensor);
  pqc_step_attention out_ = PQC_INIT(pqc_step_attention);
};

int Main(int argc, char** argv) {
  Report report(argc, argv, 101, "engine");
  const Sidecar sidecar;
  pqc_client* client = sidecar.OpenClient(std::thread::hardware_concurrency());
  pqc_cache* cache = OpenCache(client, "decode", size_t{1} << 30, kLayers);
  const Rows rows(kContext);
  {
    Decoding decoding(client, cache, rows);
    sidecar.WaitIdle();
    decoding.RequireRight();
    std::vector<double> attends, ratios;
    for (int round = 0; round < report.rounds(); ++round) {
      attends.push_back(decoding.Attend());
      ratios.push_back(decoding.Decode());
    }
    // Over the median, because a single call is short.
    const double attend = StatOf(attends).median;
    for (double& ratio : ratios) ratio /= attend;
    std::printf("attention to the selected tokens: %.0f us per layer\n", attend / kLayers * 1e6);
    report.Add({"step_decode_over_attend", "x",
                "attend alone; one sequence of 8K tokens at 1/10, sink 16, window 64",
                Better::kLower, 1.3},
               StatOf(ratios));
  }
  pqc_cache_close(cache);
  pqc_client_close(client);
  return report.Finish();
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) { return pqcached::bench::Main(argc, argv); }
