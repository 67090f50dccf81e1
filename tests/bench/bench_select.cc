// Token selection by product-quantized keys, beside a plain read of the codes, plain loops and
// faiss: 128K tokens of 128 dims a head, heads after heads through 256 MiB of codes.
//
// Selections give k = 1/10 of the tokens unless the figure says otherwise; a group is four query
// heads under the sum of their softmax weights. Time with faiss includes building the tables, in
// both.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/exec.h"
#include "kernels/select/pq.h"
#include "tests/bench/code_arena.h"
#include "tests/bench/faiss_peer.h"
#include "tests/bench/naive.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

using kernels::PqGeometry;

constexpr uint32_t kDim = 128;
constexpr uint32_t kTokens = 128 << 10;
constexpr uint32_t kGroup = 4;
constexpr uint32_t kTenth = kTokens / 10;
constexpr uint32_t kSmallK = 1024;
constexpr size_t kArenaBytes = size_t{256} << 20;
constexpr uint32_t kFaissIndexes = 32;
constexpr PqGeometry kM2B6{kDim, 2, 6};
constexpr PqGeometry kM4B8{kDim, 4, 8};
constexpr PqGeometry kM4B4{kDim, 4, 4};

constexpr kernels::Exec kAvx2{kernels::Level::kAvx2};

constexpr char kGenericFaiss[] =
    "Debian's generic SSE build; heaps do not suit large k, so it finds only the best token";

uint32_t ArenaHeads(const PqGeometry& geometry, uint32_t tokens) {
  return static_cast<uint32_t>(kArenaBytes / kernels::CodePlanesBytes(geometry, tokens));
}

std::string Named(const std::string& name, int threads) {
  return threads == 1 ? name : name + "_2t";
}

// Goals stand for one thread; two threads are reported.
std::optional<double> GoalOf(double goal, int threads) {
  return threads == 1 ? std::optional(goal) : std::nullopt;
}

// Walks through the heads of an arena, every thread through its own part of them.
class HeadWalk {
 public:
  HeadWalk(const CodeArena& arena, int threads, uint32_t heads_a_round)
      : share_(arena.head_count() / static_cast<uint32_t>(threads)),
        count_(std::min(heads_a_round, share_)) {}

  uint32_t count() const { return count_; }

  template <typename Visit>
  void Run(int thread, int round, Visit visit) const {
    for (uint32_t i = 0; i < count_; ++i) {
      const uint32_t step = static_cast<uint32_t>(round) * count_ + i;
      visit(static_cast<uint32_t>(thread) * share_ + step % share_, step);
    }
  }

 private:
  uint32_t share_;
  uint32_t count_;
};

// Whether two ascending selections agree but for a thousandth of the tokens, whose values are so
// close to the threshold that rounding decides.
bool Close(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  std::vector<uint32_t> shared;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(shared));
  return a.size() == b.size() && shared.size() + a.size() / 1000 + 1 >= a.size();
}

void CheckSelections(const CodeArena& arena, const QueryPool& pool, kernels::Exec exec = {}) {
  const PqGeometry& geometry = arena.geometry();
  Selector selector(geometry, kGroup, arena.token_count(), exec);
  Selector reference(geometry, kGroup, arena.token_count(), {kernels::Level::kReference});
  NaiveSelect naive;
  for (const uint32_t k : {1u, kSmallK, arena.token_count() / 10}) {
    for (const uint32_t group : {1u, kGroup}) {
      const auto tables = pool.Tables(k).first(group * kernels::TableFloats(geometry));
      const auto found = selector.Select(arena, 0, group, tables, k);
      const auto expected = reference.Select(arena, 0, group, tables, k);
      Require(group == 1 ? std::ranges::equal(found, expected) : Close(found, expected),
              "selection against the reference");
      if (kernels::HasNibblePlanes(geometry)) continue;
      std::vector<uint32_t> plain(k);
      if (group == 1) {
        naive.Single(geometry, arena.Planes(0), arena.plane_stride(), arena.token_count(),
                     tables.data(), plain);
      } else {
        naive.SumSoftmax(geometry, arena.Planes(0), arena.plane_stride(), arena.token_count(),
                         group, tables.data(), plain);
      }
      Require(Close(plain, expected), "plain loops against the reference");
    }
  }
}

std::vector<FaissPeer> FaissIndexes(FaissKind kind, const CodeArena& arena, const QueryPool& pool) {
  std::vector<FaissPeer> peers;
  for (uint32_t head = 0; head < kFaissIndexes; ++head) {
    peers.emplace_back(kind, arena.geometry(), pool.centroids().data(), arena.Planes(head),
                       arena.plane_stride(), arena.token_count());
  }
  return peers;
}

// Entries that several figures share.
struct Entries {
  Entries(const CodeArena& arena_in, const QueryPool& pool_in, int threads, kernels::Exec exec = {})
      : arena(arena_in), pool(pool_in), rounds(threads) {
    for (int i = 0; i < threads; ++i) {
      selectors.push_back(
          std::make_unique<Selector>(arena.geometry(), kGroup, arena.token_count(), exec));
      naives.emplace_back();
      plain.emplace_back(kTenth);
    }
  }

  size_t AddRead() {
    const HeadWalk walk(arena, rounds.threads(), arena.head_count());
    return rounds.Add("read", walk.count(), [this, walk](int thread, int round) {
      uint64_t sum = 0;
      walk.Run(thread, round, [&](uint32_t head, uint32_t) {
        sum |= StreamRead(arena.bytes(head), arena.head_bytes());
      });
      sink = sink + sum;
    });
  }

  size_t AddSelect(const char* name, uint32_t group, uint32_t k, uint32_t heads_a_round) {
    const HeadWalk walk(arena, rounds.threads(), heads_a_round);
    return rounds.Add(name, walk.count(), [this, walk, group, k](int thread, int round) {
      walk.Run(thread, round, [&](uint32_t head, uint32_t step) {
        selectors[static_cast<size_t>(thread)]->Select(arena, head, group, pool.Tables(step), k);
      });
    });
  }

  size_t AddBuildAndSelect(const char* name, uint32_t group, uint32_t k, uint32_t heads_a_round) {
    const HeadWalk walk(arena, rounds.threads(), heads_a_round);
    return rounds.Add(name, walk.count(), [this, walk, group, k](int thread, int round) {
      walk.Run(thread, round, [&](uint32_t head, uint32_t step) {
        selectors[static_cast<size_t>(thread)]->BuildAndSelect(arena, head, pool, step, group, k);
      });
    });
  }

  size_t AddNaive(const char* name, uint32_t group, uint32_t heads_a_round) {
    const HeadWalk walk(arena, rounds.threads(), heads_a_round);
    return rounds.Add(name, walk.count(), [this, walk, group](int thread, int round) {
      NaiveSelect& naive = naives[static_cast<size_t>(thread)];
      std::vector<uint32_t>& positions = plain[static_cast<size_t>(thread)];
      walk.Run(thread, round, [&](uint32_t head, uint32_t step) {
        if (group == 1) {
          naive.Single(arena.geometry(), arena.Planes(head), arena.plane_stride(),
                       arena.token_count(), pool.Tables(step).data(), positions);
        } else {
          naive.SumSoftmax(arena.geometry(), arena.Planes(head), arena.plane_stride(),
                           arena.token_count(), group, pool.Tables(step).data(), positions);
        }
      });
    });
  }

  size_t AddFaiss(const char* name, const std::vector<FaissPeer>& peers, uint32_t heads_a_round) {
    const uint32_t threads = static_cast<uint32_t>(rounds.threads());
    return rounds.Add(
        name, heads_a_round, [this, &peers, heads_a_round, threads](int thread, int round) {
          for (uint32_t i = 0; i < heads_a_round; ++i) {
            const uint32_t step = static_cast<uint32_t>(round) * heads_a_round + i;
            sink =
                sink + peers[(step * threads + static_cast<uint32_t>(thread)) % peers.size()].Best(
                           pool.Queries(step).data());
          }
        });
  }

  const CodeArena& arena;
  const QueryPool& pool;
  Rounds rounds;
  std::vector<std::unique_ptr<Selector>> selectors;
  std::vector<NaiveSelect> naives;
  std::vector<std::vector<uint32_t>> plain;
  std::atomic<uint64_t> sink{0};
};

// Limited to AVX2, the figures beside the read are some of BenchAvx2.
void RunM2B6(const CodeArena& arena, const QueryPool& pool, const std::vector<FaissPeer>& peers,
             int threads, CodeLevel level, Report& report) {
  Entries entries(arena, pool, threads, ExecOf(level));
  const size_t read = entries.AddRead();
  const size_t single = entries.AddSelect("select m2b6, 1 head", 1, kTenth, 1024);
  const size_t small = entries.AddSelect("select m2b6, 1 head, k = 1024", 1, kSmallK, 1024);
  const size_t build =
      entries.AddBuildAndSelect("build tables, select m2b6, 1 head", 1, kTenth, 512);
  const size_t naive = entries.AddNaive("plain loops, 1 head", 1, 12);
  const size_t group = entries.AddSelect("select m2b6, 4 heads", kGroup, kTenth, 512);
  const size_t naive_group = entries.AddNaive("plain loops, 4 heads", kGroup, 4);
  const size_t faiss = HasFaiss() ? entries.AddFaiss("faiss IndexPQ, k = 1", peers, 16) : 0;
  if (CanRun(level)) entries.rounds.Run(report.rounds());

  const Rounds& rounds = entries.rounds;
  const auto figure = [&](const char* name, std::string against, double goal) {
    return Figure{Named(name, threads), "x", std::move(against), Better::kHigher,
                  GoalOf(goal, threads)};
  };
  if (level == CodeLevel::kBest) {
    report.Add(figure("select_m2b6_single_vs_read", "plain read of the code planes", 0.65),
               rounds.Speedup(single, read));
    report.Add({Named("select_m2b6_single_1024_vs_read", threads), "x",
                "plain read of the code planes", Better::kHigher, std::nullopt},
               rounds.Speedup(small, read));
  }
  report.AddSpeedup(level,
                    figure("select_m2b6_single_vs_naive", "plain float scores and nth_element", 40),
                    rounds, single, naive);
  const Figure against_faiss =
      figure("select_m2b6_single_vs_faiss",
             std::string("faiss IndexPQ, k = 1 (") + kGenericFaiss + ")", 25);
  if (HasFaiss()) {
    report.AddSpeedup(level, against_faiss, rounds, build, faiss);
  } else if (level == CodeLevel::kBest) {
    report.AddAbsent(against_faiss, "not installed");
  }
  report.AddSpeedup(
      level,
      figure("select_m2b6_group4_vs_naive", "plain scores, softmax, sum and nth_element", 40),
      rounds, group, naive_group);
}

void BenchM2B6(Report& report) {
  const CodeArena arena(kM2B6, ArenaHeads(kM2B6, kTokens), kTokens, 1);
  const QueryPool pool(kM2B6, kGroup, 2);
  CheckSelections(arena, pool);
  if (CanRun(CodeLevel::kAvx2)) CheckSelections(arena, pool, kAvx2);
  std::vector<FaissPeer> peers;
  if (HasFaiss()) {
    peers = FaissIndexes(FaissKind::kPq, arena, pool);
    Selector selector(kM2B6, kGroup, kTokens);
    const uint32_t best = peers[0].Best(pool.Queries(0).data());
    const uint32_t ours = selector.Select(arena, 0, 1, pool.Tables(0), 1)[0];
    Require(kernels::GetCell(kM2B6, arena.Planes(0), arena.plane_stride(), best) ==
                kernels::GetCell(kM2B6, arena.Planes(0), arena.plane_stride(), ours),
            "faiss IndexPQ and we find tokens of different cells");
  }
  for (const int threads : {1, 2}) {
    RunM2B6(arena, pool, peers, threads, CodeLevel::kBest, report);
  }
  RunM2B6(arena, pool, peers, 1, CodeLevel::kAvx2, report);
}

void RunLengths(const CodeArena& long_arena, const CodeArena& short_arena, const QueryPool& pool,
                int threads, CodeLevel level, Report& report) {
  Entries entries(long_arena, pool, threads, ExecOf(level));
  const size_t at_long = entries.AddSelect("select m2b6, 4 heads, 512K", kGroup, kSmallK, 256);
  std::vector<std::unique_ptr<Selector>> selectors;
  for (int i = 0; i < threads; ++i) {
    selectors.push_back(
        std::make_unique<Selector>(kM2B6, kGroup, short_arena.token_count(), ExecOf(level)));
  }
  const HeadWalk walk(short_arena, threads, short_arena.head_count());
  const size_t at_short = entries.rounds.Add(
      "select m2b6, 4 heads, 32K", walk.count(), [&, walk](int thread, int round) {
        walk.Run(thread, round, [&](uint32_t head, uint32_t step) {
          selectors[static_cast<size_t>(thread)]->Select(short_arena, head, kGroup,
                                                         pool.Tables(step), kSmallK);
        });
      });
  if (CanRun(level)) entries.rounds.Run(report.rounds());
  report.AddSpeedup(level,
                    {Named("select_m2b6_group4_512k_over_32k", threads), "x",
                     "itself: time at 512K tokens over time at 32K, k = 1024", Better::kLower,
                     GoalOf(1.5, threads)},
                    entries.rounds, at_short, at_long);
}

void BenchLengths(Report& report) {
  constexpr uint32_t kLong = 512 << 10;
  constexpr uint32_t kShort = 32 << 10;
  const CodeArena long_arena(kM2B6, ArenaHeads(kM2B6, kLong), kLong, 3);
  const CodeArena short_arena(kM2B6, ArenaHeads(kM2B6, kShort) / 4, kShort, 4);
  const QueryPool pool(kM2B6, kGroup, 5);
  for (const int threads : {1, 2}) {
    RunLengths(long_arena, short_arena, pool, threads, CodeLevel::kBest, report);
  }
  RunLengths(long_arena, short_arena, pool, 1, CodeLevel::kAvx2, report);
}

void BenchM4B8(Report& report) {
  const CodeArena arena(kM4B8, ArenaHeads(kM4B8, kTokens), kTokens, 6);
  const QueryPool pool(kM4B8, kGroup, 7);
  CheckSelections(arena, pool);
  for (const int threads : {1, 2}) {
    Entries entries(arena, pool, threads);
    const size_t read = entries.AddRead();
    const size_t single = entries.AddSelect("select m4b8, 1 head", 1, kTenth, 256);
    const size_t group = entries.AddSelect("select m4b8, 4 heads", kGroup, kTenth, 128);
    const size_t single_small = entries.AddSelect("select m4b8, 1 head, k = 1024", 1, kSmallK, 256);
    const size_t group_small =
        entries.AddSelect("select m4b8, 4 heads, k = 1024", kGroup, kSmallK, 128);
    entries.rounds.Run(report.rounds());
    const char* against = "plain read of the code planes";
    report.Add({Named("select_m4b8_single_vs_read", threads), "x", against, Better::kHigher,
                GoalOf(0.40, threads)},
               entries.rounds.Speedup(single, read));
    report.Add({Named("select_m4b8_group4_vs_read", threads), "x", against, Better::kHigher,
                GoalOf(0.10, threads)},
               entries.rounds.Speedup(group, read));
    report.Add({Named("select_m4b8_single_1024_vs_read", threads), "x", against, Better::kHigher,
                std::nullopt},
               entries.rounds.Speedup(single_small, read));
    report.Add({Named("select_m4b8_group4_1024_vs_read", threads), "x", against, Better::kHigher,
                std::nullopt},
               entries.rounds.Speedup(group_small, read));
  }
}

void BenchM4B4(Report& report) {
  const CodeArena arena(kM4B4, ArenaHeads(kM4B4, kTokens), kTokens, 8);
  const QueryPool pool(kM4B4, kGroup, 9);
  CheckSelections(arena, pool);
  std::vector<FaissPeer> peers;
  if (HasFaiss()) peers = FaissIndexes(FaissKind::kPqFastScan, arena, pool);
  for (const int threads : {1, 2}) {
    Entries entries(arena, pool, threads);
    const size_t read = entries.AddRead();
    const size_t best = entries.AddBuildAndSelect("build tables, select m4b4, k = 1", 1, 1, 512);
    const size_t tenth =
        entries.AddBuildAndSelect("build tables, select m4b4, k = 1/10", 1, kTenth, 512);
    const size_t faiss =
        HasFaiss() ? entries.AddFaiss("faiss IndexPQFastScan, k = 1", peers, 16) : 0;
    entries.rounds.Run(report.rounds());
    const std::string against = std::string("faiss IndexPQFastScan, k = 1 (") + kGenericFaiss + ")";
    const Figure scan{Named("scan_m4b4_vs_faiss_fastscan", threads), "x", against, Better::kHigher,
                      GoalOf(5, threads)};
    const Figure select{Named("select_m4b4_single_vs_faiss_fastscan", threads), "x",
                        against + "; ours selects 1/10", Better::kHigher, std::nullopt};
    if (HasFaiss()) {
      report.Add(scan, entries.rounds.Speedup(best, faiss));
      report.Add(select, entries.rounds.Speedup(tenth, faiss));
    } else {
      report.AddAbsent(scan, "not installed");
      report.AddAbsent(select, "not installed");
    }
    report.Add({Named("select_m4b4_single_vs_read", threads), "x", "plain read of the code planes",
                Better::kHigher, std::nullopt},
               entries.rounds.Speedup(tenth, read));
  }
}

constexpr char kRead[] = "plain read of the code planes; our code limited to AVX2";

// A selection of k tokens beside a plain read, as a share of the read's speed.
struct ShareOfRead {
  const char* name;
  uint32_t group;
  uint32_t k;
  double goal;
  // Enough for rounds as long as the read's: another process interrupts all entries alike.
  uint32_t heads_a_round;
};

void BenchSharesAtAvx2(const PqGeometry& geometry, std::span<const ShareOfRead> figures,
                       uint64_t seed, Report& report) {
  const CodeArena arena(geometry, ArenaHeads(geometry, kTokens), kTokens, seed);
  const QueryPool pool(geometry, kGroup, seed + 1);
  CheckSelections(arena, pool, kAvx2);
  Entries entries(arena, pool, 1, kAvx2);
  const size_t read = entries.AddRead();
  std::vector<size_t> selections;
  for (const ShareOfRead& figure : figures) {
    selections.push_back(
        entries.AddSelect(figure.name, figure.group, figure.k, figure.heads_a_round));
  }
  entries.rounds.Run(report.rounds());
  for (size_t i = 0; i < figures.size(); ++i) {
    report.Add({figures[i].name, "x", kRead, Better::kHigher, figures[i].goal},
               entries.rounds.Speedup(selections[i], read));
  }
}

void BenchFastScanAtAvx2(Report& report) {
  const Figure scan{
      "scan_m4b4_vs_faiss_fastscan_avx2", "x",
      std::string("faiss IndexPQFastScan, k = 1 (") + kGenericFaiss + "); our code limited to AVX2",
      Better::kHigher, 1.2};
  if (!HasFaiss()) return report.AddAbsent(scan, "not installed");
  const CodeArena arena(kM4B4, ArenaHeads(kM4B4, kTokens), kTokens, 8);
  const QueryPool pool(kM4B4, kGroup, 9);
  CheckSelections(arena, pool, kAvx2);
  const std::vector<FaissPeer> peers = FaissIndexes(FaissKind::kPqFastScan, arena, pool);
  Entries entries(arena, pool, 1, kAvx2);
  const size_t best = entries.AddBuildAndSelect("build tables, select m4b4, k = 1", 1, 1, 128);
  const size_t tenth =
      entries.AddBuildAndSelect("build tables, select m4b4, k = 1/10", 1, kTenth, 128);
  const size_t faiss = entries.AddFaiss("faiss IndexPQFastScan, k = 1", peers, 16);
  const size_t read = entries.AddRead();
  entries.rounds.Run(report.rounds());
  report.Add(scan, entries.rounds.Speedup(best, faiss));
  const Figure select{
      "select_m4b4_single_vs_faiss_fastscan", "x",
      std::string("faiss IndexPQFastScan, k = 1 (") + kGenericFaiss + "); ours selects 1/10",
      Better::kHigher, std::nullopt};
  report.AddSpeedup(CodeLevel::kAvx2, select, entries.rounds, tenth, faiss);
  report.AddSpeedup(CodeLevel::kAvx2,
                    {"select_m4b4_single_vs_read", "x", "plain read of the code planes",
                     Better::kHigher, std::nullopt},
                    entries.rounds, tenth, read);
}

// What machines without AVX-512 reach, measured on all that have AVX2. One thread.
void BenchAvx2(Report& report) {
  constexpr ShareOfRead kM2B6Figures[] = {
      {"select_m2b6_single_vs_read_avx2", 1, kTenth, 0.25, 512},
      {"select_m2b6_single_1024_vs_read_avx2", 1, kSmallK, 0.45, 512}};
  constexpr ShareOfRead kM4B8Figures[] = {
      {"select_m4b8_single_vs_read_avx2", 1, kTenth, 0.12, 128},
      {"select_m4b8_single_1024_vs_read_avx2", 1, kSmallK, 0.14, 128},
      {"select_m4b8_group4_vs_read_avx2", kGroup, kTenth, 0.045, 32},
      {"select_m4b8_group4_1024_vs_read_avx2", kGroup, kSmallK, 0.06, 64}};
  if (!CanRun(CodeLevel::kAvx2)) {
    for (const auto& figures : {std::span<const ShareOfRead>(kM2B6Figures), {kM4B8Figures}}) {
      for (const ShareOfRead& figure : figures) {
        report.AddAbsent({figure.name, "x", kRead, Better::kHigher, figure.goal}, "no AVX2");
      }
    }
    return;
  }
  BenchSharesAtAvx2(kM2B6, kM2B6Figures, 1, report);
  BenchSharesAtAvx2(kM4B8, kM4B8Figures, 6, report);
  BenchFastScanAtAvx2(report);
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;
  Report report(argc, argv, 21);
  BenchM2B6(report);
  BenchLengths(report);
  BenchM4B8(report);
  BenchM4B4(report);
  BenchAvx2(report);
  return report.Finish();
}
