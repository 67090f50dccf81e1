// Decode steps of one kv head with four query heads, beside the fastest possible full attention:
// one streaming read of all keys and values. 128K tokens of 128 dims, 1 GiB of rows.
//
// A step is: build tables, select k tokens (m = 2, b = 6, sum of softmax weights), attend to their
// rows where they lie. Codes are random, so selected rows are scattered: the worst case for
// locality. Cell order is a spike (cell_order.h): the same with rows grouped by cell, of the whole
// head or of each segment ("8k").
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attend/attend.h"
#include "kernels/select/pq_table.h"
#include "tests/bench/cell_order.h"
#include "tests/bench/code_arena.h"
#include "tests/bench/naive.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"
#include "tests/bench/row_arena.h"

namespace pqcached::bench {
namespace {

using kernels::DType;

constexpr uint32_t kDim = RowArena::kDim;
constexpr uint32_t kTokens = 128 << 10;
constexpr uint32_t kGroup = 4;
constexpr uint32_t kTenth = kTokens / 10;
constexpr uint32_t kSmallK = 1024;
constexpr uint32_t kSegment = 8 << 10;  // tokens of a segment, where rows lie in cell order
constexpr uint32_t kHeads = 16;
constexpr uint32_t kSelections = 3 * kHeads;  // code planes: three for the rows of every head
constexpr kernels::PqGeometry kGeometry{kDim, 2, 6};

// What all threads read.
struct World {
  World()
      : rows(kHeads, kTokens),
        codes(kGeometry, kSelections, kTokens, 1),
        pool(kGeometry, kGroup, 2) {
    for (uint32_t i = 0; i < kSelections; ++i) {
      for (auto [list, tokens] : {std::pair(&orders, kTokens), std::pair(&segmented, kSegment)}) {
        list->push_back(
            MakeCellOrder(kGeometry, codes.Planes(i), codes.plane_stride(), kTokens, tokens));
      }
      positions.push_back(RandomPositions(kTokens, kTenth, 100 + i));
    }
  }

  RowArena rows;
  CodeArena codes;
  QueryPool pool;
  std::vector<CellOrder> orders;                 // all rows of a head in one order
  std::vector<CellOrder> segmented;              // those of each segment
  std::vector<std::vector<uint32_t>> positions;  // random tenths, for attention alone
};

// What one thread writes.
class Decoder {
 public:
  explicit Decoder(const World& world, kernels::Exec exec = {})
      : exec_(exec),
        world_(world),
        selector_(kGeometry, kGroup, kTokens, exec),
        cells_(kGroup),
        tables_(kGroup * kernels::TableFloats(kGeometry)),
        scratch_(kernels::AttendScratchBytes(Shape())),
        output_(size_t{kGroup} * kDim),
        lse_(kGroup) {}

  std::span<const float> output() const { return output_; }

  // All rows of the head.
  void Full(uint32_t head, uint32_t query) {
    const kernels::RowSpan span = world_.rows.Span(head);
    kernels::AttendAllRows(exec_, Args(query, std::span(&span, 1), {}));
  }

  void Rows(uint32_t head, uint32_t query, std::span<const uint32_t> positions) {
    const kernels::RowSpan span = world_.rows.Span(head);
    kernels::AttendRows(exec_, Args(query, std::span(&span, 1), positions));
  }

  // The whole step; returns the positions.
  std::span<const uint32_t> Step(uint32_t selection, uint32_t k) {
    const std::span<const uint32_t> positions =
        selector_.BuildAndSelect(world_.codes, selection, world_.pool, selection, kGroup, k);
    Rows(selection % kHeads, selection, positions);
    return positions;
  }

  // The whole step over rows in cell order; returns the runs.
  std::span<const kernels::RowSpan> CellStep(const CellOrder& order, uint32_t selection,
                                             uint32_t k) {
    kernels::BuildTables(exec_, {kGeometry, kGroup, world_.pool.Queries(selection),
                                 world_.pool.scale(), world_.pool.centroids(), tables_});
    const std::span<const kernels::RowSpan> runs = cells_.Run(
        order, tables_.data(), k, world_.rows.Rows(selection % kHeads), RowArena::kRowBytes);
    kernels::AttendAllRows(exec_, Args(selection, runs, {}));
    return runs;
  }

  // Plain loops: the same step.
  void NaiveStep(uint32_t selection, uint32_t k) {
    plain_.resize(k);
    naive_select_.SumSoftmax(kGeometry, world_.codes.Planes(selection), world_.codes.plane_stride(),
                             kTokens, kGroup, world_.pool.Tables(selection).data(), plain_);
    NaiveRows(selection % kHeads, selection, plain_);
  }

  void NaiveRows(uint32_t head, uint32_t query, std::span<const uint32_t> positions) {
    naive_attend_.Run({world_.rows.dtype(), world_.rows.Rows(head), RowArena::kRowBytes, kDim},
                      kGroup, world_.pool.Queries(query).data(), world_.pool.scale(), positions,
                      output_.data());
  }

 private:
  kernels::AttendShape Shape() const {
    return {world_.rows.dtype(), kDim, kDim, RowArena::kRowBytes, kGroup, 1};
  }

  kernels::AttendArgs Args(uint32_t query, std::span<const kernels::RowSpan> spans,
                           std::span<const uint32_t> positions) {
    kernels::AttendArgs args;
    args.shape = Shape();
    args.scale = world_.pool.scale();
    args.queries = world_.pool.Queries(query);
    args.spans = spans;
    args.positions = positions;
    args.output = output_;
    args.lse = lse_;
    args.scratch = scratch_;
    return args;
  }

  kernels::Exec exec_;
  const World& world_;
  Selector selector_;
  CellSelect cells_;
  NaiveSelect naive_select_;
  NaiveAttend naive_attend_;
  std::vector<float> tables_;
  std::vector<uint32_t> plain_;
  std::vector<std::byte> scratch_;
  std::vector<float> output_;
  std::vector<float> lse_;
};

void CheckOutput(Decoder& decoder, uint32_t head, uint32_t query,
                 std::span<const uint32_t> positions, const char* what) {
  const std::vector<float> output(decoder.output().begin(), decoder.output().end());
  decoder.NaiveRows(head, query, positions);
  float difference = 0.0f;
  float largest = 0.0f;
  for (size_t i = 0; i < output.size(); ++i) {
    difference = std::max(difference, std::abs(output[i] - decoder.output()[i]));
    largest = std::max(largest, std::abs(decoder.output()[i]));
  }
  Require(largest > 0.0f && difference <= 1e-2f * largest, what);
}

void Check(const World& world, CodeLevel level) {
  if (!CanRun(level)) return;
  Decoder decoder(world, ExecOf(level));
  std::vector<uint32_t> all(kTokens);
  std::iota(all.begin(), all.end(), 0u);
  decoder.Full(1, 1);
  CheckOutput(decoder, 1, 1, all, "full attention");
  for (const uint32_t k : {kSmallK, kTenth}) {
    const auto found = decoder.Step(2, k);
    const std::vector<uint32_t> positions(found.begin(), found.end());
    CheckOutput(decoder, 2, 2, positions, "attention to selected rows");

    for (const CellOrder* order : {&world.orders[2], &world.segmented[2]}) {
      std::vector<uint32_t> rows;
      std::vector<uint32_t> tokens;
      for (const kernels::RowSpan& run : decoder.CellStep(*order, 2, k)) {
        for (uint32_t i = 0; i < run.token_count; ++i) {
          rows.push_back(run.first_position + i);
          tokens.push_back(order->token_of_row[rows.back()]);
        }
      }
      CheckOutput(decoder, 2, 2, rows, "attention to runs of rows");
      std::ranges::sort(tokens);
      std::vector<uint32_t> shared;
      std::ranges::set_intersection(tokens, positions, std::back_inserter(shared));
      Require(tokens.size() == k && shared.size() + 64 >= k, "cells choose other tokens");
    }
  }
}

// Every thread works on its own heads.
class Bench {
 public:
  Bench(const World& world, int threads, CodeLevel level)
      : world_(world),
        level_(level),
        rounds_(threads),
        heads_(kHeads / static_cast<uint32_t>(threads)) {
    for (int i = 0; i < threads; ++i) {
      decoders_.push_back(std::make_unique<Decoder>(world, ExecOf(level)));
    }
  }

  // visit(decoder, selection) for `count` selections a round.
  template <typename Visit>
  size_t Add(const char* name, uint32_t count, Visit visit) {
    return rounds_.Add(name, count, [this, count, visit](int thread, int round) {
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t step = static_cast<uint32_t>(round) * count + i;
        const uint32_t head = static_cast<uint32_t>(thread) * heads_ + step % heads_;
        visit(*decoders_[static_cast<size_t>(thread)],
              head + kHeads * (step / heads_ % (kSelections / kHeads)));
      }
    });
  }

  void Run(Report& report) {
    const size_t read = Add("read all rows", heads_, [this](Decoder&, uint32_t selection) {
      sink_ = sink_ + StreamRead(world_.rows.Rows(selection % kHeads), world_.rows.head_bytes());
    });
    const size_t tenth = Add("step, k = 1/10", 16, [](Decoder& decoder, uint32_t selection) {
      decoder.Step(selection, kTenth);
    });
    const size_t full = Add("full attention", 4, [](Decoder& decoder, uint32_t selection) {
      decoder.Full(selection % kHeads, selection);
    });
    const size_t small = Add("step, k = 1024", 48, [](Decoder& decoder, uint32_t selection) {
      decoder.Step(selection, kSmallK);
    });
    const size_t naive = Add("plain loops, k = 1/10", 3, [](Decoder& decoder, uint32_t selection) {
      decoder.NaiveStep(selection, kTenth);
    });
    const size_t cell_tenth =
        Add("cell order, k = 1/10", 16, [this](Decoder& decoder, uint32_t selection) {
          decoder.CellStep(world_.orders[selection], selection, kTenth);
        });
    const size_t rows =
        Add("attention alone, k = 1/10", 16, [this](Decoder& decoder, uint32_t selection) {
          decoder.Rows(selection % kHeads, selection, world_.positions[selection]);
        });
    const size_t cell_small =
        Add("cell order, k = 1024", 48, [this](Decoder& decoder, uint32_t selection) {
          decoder.CellStep(world_.orders[selection], selection, kSmallK);
        });
    const size_t segment_tenth =
        Add("cell order in segments, k = 1/10", 16, [this](Decoder& decoder, uint32_t selection) {
          decoder.CellStep(world_.segmented[selection], selection, kTenth);
        });
    const size_t segment_small =
        Add("cell order in segments, k = 1024", 48, [this](Decoder& decoder, uint32_t selection) {
          decoder.CellStep(world_.segmented[selection], selection, kSmallK);
        });
    const size_t naive_rows =
        Add("plain attention alone, k = 1/10", 8, [this](Decoder& decoder, uint32_t selection) {
          decoder.NaiveRows(selection % kHeads, selection, world_.positions[selection]);
        });
    if (CanRun(level_)) rounds_.Run(report.rounds());

    const char* ideal = "reading all keys and values once at full speed";
    AddFigure(report, "attend_s10_vs_ideal", ideal, 3.0, tenth, read);
    AddFigure(report, "attend_1024_vs_ideal", ideal, 28.0, small, read);
    AddFigure(report, "attend_s10_vs_naive",
              "plain scores, softmax, sum, nth_element and attention to rows without prefetch", 3.0,
              tenth, naive);
    AddFigure(report, "attend_rows_s10_vs_naive",
              "plain attention to the same scattered rows, no selection in either", std::nullopt,
              rows, naive_rows);
    AddFigure(report, "cell_order_attend_s10_vs_ideal", ideal, 4.0, cell_tenth, read);
    AddFigure(report, "cell_order_attend_1024_vs_ideal", ideal, 45.0, cell_small, read);
    const char* scattered = "the same over rows in order of tokens, with posting lists";
    AddFigure(report, "cell_order_s10_vs_scattered", scattered, std::nullopt, cell_tenth, tenth);
    AddFigure(report, "cell_order_1024_vs_scattered", scattered, std::nullopt, cell_small, small);
    AddFigure(report, "cell_order_8k_s10_vs_scattered", scattered, std::nullopt, segment_tenth,
              tenth);
    AddFigure(report, "cell_order_8k_1024_vs_scattered", scattered, std::nullopt, segment_small,
              small);
    AddFigure(report, "full_attention_vs_ideal", ideal, 0.60, full, read);
  }

 private:
  void AddFigure(Report& report, std::string name, const char* against, std::optional<double> goal,
                 size_t entry, size_t other) const {
    if (world_.rows.dtype() == DType::kF16) name += "_f16";
    if (rounds_.threads() == 2) name += "_2t";
    // Goals stand for bf16 rows and one thread; the rest is reported.
    if (world_.rows.dtype() == DType::kF16 || rounds_.threads() == 2) goal.reset();
    report.AddSpeedup(level_, {name, "x", against, Better::kHigher, goal}, rounds_, entry, other);
  }

  const World& world_;
  CodeLevel level_;
  Rounds rounds_;
  uint32_t heads_;  // of one thread
  std::vector<std::unique_ptr<Decoder>> decoders_;
  std::atomic<uint64_t> sink_{0};
};

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;
  Report report(argc, argv, 25);
  World world;
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    world.rows.Fill(dtype, 3);
    for (const CodeLevel level : {CodeLevel::kBest, CodeLevel::kAvx2}) Check(world, level);
    for (const int threads : {1, 2}) Bench(world, threads, CodeLevel::kBest).Run(report);
    Bench(world, 1, CodeLevel::kAvx2).Run(report);
  }
  return report.Finish();
}
