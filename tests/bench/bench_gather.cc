// Reading scattered rows of 512 bytes, and scoring all keys, beside a streaming read of the same
// bytes. 128K tokens of 128 dims a head, 1 GiB of rows.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/rows/gather.h"
#include "kernels/select/exact/exact_score.h"
#include "tests/bench/code_arena.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"
#include "tests/bench/row_arena.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kDim = RowArena::kDim;
constexpr uint32_t kTokens = 128 << 10;
constexpr uint32_t kTenth = kTokens / 10;
constexpr uint32_t kHeads = 16;
constexpr uint32_t kGroup = 4;
constexpr size_t kRowBytes = RowArena::kRowBytes;
constexpr size_t kKeyBytes = kRowBytes / 2;
constexpr uint32_t kStagedRows = 512;  // 256 KiB: a part of the L2 cache

struct World {
  World() : rows(kHeads, kTokens), queries(NormalFloats(size_t{kGroup} * kDim, 7)) {
    rows.Fill(kernels::DType::kBf16, 3);
    for (uint32_t i = 0; i < kHeads; ++i) positions.push_back(RandomPositions(kTokens, kTenth, i));
  }

  RowArena rows;
  std::vector<float> queries;
  std::vector<std::vector<uint32_t>> positions;
};

// What one thread writes.
class Worker {
 public:
  explicit Worker(const World& world, kernels::Exec exec)
      : exec_(exec),
        world_(world),
        target_(kTenth * kRowBytes),
        scores_(size_t{kGroup} * kTokens * sizeof(float)),
        scratch_(kernels::ExactScoreScratchBytes(kGroup, kDim)) {}

  // Copies the chosen rows, `batch` at a time, every batch to the same place.
  void Gather(uint32_t head, size_t part_bytes, uint32_t batch) {
    const kernels::RowSpan span = world_.rows.Span(head);
    const std::vector<uint32_t>& all = world_.positions[head];
    for (size_t i = 0; i < all.size(); i += batch) {
      kernels::GatherArgs args;
      args.row_stride_bytes = kRowBytes;
      args.part_bytes = part_bytes;
      args.spans = std::span(&span, 1);
      args.positions = std::span(all).subspan(i, std::min<size_t>(batch, all.size() - i));
      args.target_stride_bytes = part_bytes;
      args.target = target_.bytes();
      kernels::GatherRows(exec_, args);
    }
  }

  void Score(uint32_t head) {
    kernels::ExactScoreArgs args;
    args.dtype = world_.rows.dtype();
    args.key_dim = kDim;
    args.row_stride_bytes = kRowBytes;
    args.group_size = kGroup;
    args.token_count = kTokens;
    args.queries = world_.queries;
    args.rows = world_.rows.Rows(head);
    args.score_stride = kTokens;
    args.scores = scores();
    args.scratch = scratch_;
    kernels::ExactScores(exec_, args);
  }

  std::span<float> scores() const { return {scores_.As<float>(), size_t{kGroup} * kTokens}; }
  const std::byte* target() const { return target_.data(); }

 private:
  kernels::Exec exec_;
  const World& world_;
  HugeBuffer target_;
  HugeBuffer scores_;
  std::vector<std::byte> scratch_;
};

void Check(const World& world, CodeLevel level) {
  if (!CanRun(level)) return;
  Worker worker(world, ExecOf(level));
  for (const size_t part : {kRowBytes, kKeyBytes}) {
    worker.Gather(1, part, kTenth);
    bool equal = true;
    for (uint32_t i = 0; i < kTenth; ++i) {
      equal =
          equal && std::memcmp(worker.target() + i * part,
                               world.rows.Rows(1) + world.positions[1][i] * kRowBytes, part) == 0;
    }
    Require(equal, "gathered rows");
  }
  worker.Score(1);
  for (uint32_t t = 0; t < kTokens; t += 1001) {
    for (uint32_t g = 0; g < kGroup; ++g) {
      float sum = 0.0f;
      for (uint32_t d = 0; d < kDim; ++d) {
        sum += world.queries[g * kDim + d] *
               kernels::LoadElement(world.rows.dtype(), world.rows.Rows(1) + t * kRowBytes, d);
      }
      Require(std::abs(sum - worker.scores()[size_t{g} * kTokens + t]) < 0.02f, "exact scores");
    }
  }
}

void Run(const World& world, int threads, CodeLevel level, Report& report) {
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < threads; ++i) {
    workers.push_back(std::make_unique<Worker>(world, ExecOf(level)));
  }
  const uint32_t share = kHeads / static_cast<uint32_t>(threads);
  std::atomic<uint64_t> sink{0};
  Rounds rounds(threads);
  // visit(worker, head) for `count` heads a round; units are bytes.
  const auto add = [&](const char* name, uint32_t count, size_t bytes, auto visit) {
    return rounds.Add(name, static_cast<double>(count * bytes),
                      [&, count, visit](int thread, int round) {
                        for (uint32_t i = 0; i < count; ++i) {
                          const uint32_t step = static_cast<uint32_t>(round) * count + i;
                          visit(*workers[static_cast<size_t>(thread)],
                                static_cast<uint32_t>(thread) * share + step % share);
                        }
                      });
  };
  const size_t read =
      add("read all rows", share, world.rows.head_bytes(), [&](Worker&, uint32_t head) {
        sink = sink + StreamRead(world.rows.Rows(head), world.rows.head_bytes());
      });
  const size_t staged =
      add("gather into staging", 8, kTenth * kRowBytes,
          [](Worker& worker, uint32_t head) { worker.Gather(head, kRowBytes, kStagedRows); });
  const size_t keys =
      add("gather keys into staging", 8, kTenth * kKeyBytes,
          [](Worker& worker, uint32_t head) { worker.Gather(head, kKeyBytes, kStagedRows); });
  const size_t exact = add("exact scores, 4 heads", 4, kTokens * kKeyBytes,
                           [](Worker& worker, uint32_t head) { worker.Score(head); });
  if (CanRun(level)) rounds.Run(report.rounds());

  const std::string suffix = threads == 1 ? "_1t" : "_2t";
  const std::string plain = threads == 1 ? "" : "_2t";
  const char* against = "streaming read, in bytes a second";
  const auto figure = [&](std::string name, std::optional<double> goal, size_t entry) {
    report.AddSpeedup(level, {std::move(name), "x", against, Better::kHigher, goal}, rounds, entry,
                      read);
  };
  figure("gather512_vs_stream" + suffix, 0.40, staged);
  figure("gather256_vs_stream" + suffix, std::nullopt, keys);
  figure("exact_scores_group4_vs_stream" + plain, std::nullopt, exact);
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;
  Report report(argc, argv, 25);
  const World world;
  for (const CodeLevel level : {CodeLevel::kBest, CodeLevel::kAvx2}) Check(world, level);
  for (const int threads : {1, 2}) Run(world, threads, CodeLevel::kBest, report);
  Run(world, 1, CodeLevel::kAvx2, report);
  return report.Finish();
}
