// How recall and attention mass at equal budget depend on the size of segments and the length of
// epochs: prints a table. Keys: 64K tokens whose theme changes every 20K (drift_keys.h).
#include <cstdio>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "tests/bench/local/drift_keys.h"
#include "tests/bench/local/live_world.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kTokens = 64 << 10;
constexpr uint32_t kThemeTokens = 20 << 10;
constexpr uint32_t kPiece = 2048;
constexpr int kQueries = 48;

struct Row {
  Quality quality;
  double bytes_per_token_head = 0;
  double seconds = 0;
};

Row Measure(uint32_t segment_tokens, uint32_t epoch_tokens, double drift_ratio) {
  kvstore::StoreOptions options;
  options.segment_tokens = segment_tokens;
  options.epoch_tokens = epoch_tokens;
  options.drift_ratio = drift_ratio;
  const DriftShape shape;
  LiveWorld world(options, shape, 1, size_t{256} << 20);
  DriftKeys keys(shape, 17);
  const uint64_t live = world.NewSequence(true, 10);
  const Bf16Rows values = keys.Values(kPiece);
  double seconds = 0;
  for (uint32_t first = 0; first < kTokens; first += kPiece) {
    if (first > 0 && first % kThemeTokens == 0) keys.ChangeTheme();
    world.Ingest(live, first, keys.Next(kPiece), values);
    const absl::Time begin = absl::Now();
    world.WaitIdle(live);
    seconds += absl::ToDoubleSeconds(absl::Now() - begin);
  }
  const absl::Time begin = absl::Now();
  world.Build(live, {.index = kLiveIndex});
  world.WaitIdle(live);
  seconds += absl::ToDoubleSeconds(absl::Now() - begin);
  std::vector<Bf16Rows> queries;
  for (int i = 0; i < kQueries; ++i) queries.push_back(keys.Query(kTokens - 1, i % 2 == 0));
  return {world.Judge(live, kTokens, queries, 1024),
          static_cast<double>(world.IndexBytes(live)) / kTokens / shape.kv_heads, seconds};
}

}  // namespace
}  // namespace pqcached::bench

int main() {
  using pqcached::bench::Measure;
  std::printf(
      "segment   epoch  drift ratio  recall@1024  mass@1024  B/token/head  build seconds\n");
  for (const uint32_t segment : {2u << 10, 8u << 10, 32u << 10}) {
    for (const uint32_t epoch : {8u << 10, 32u << 10, 1u << 30}) {
      for (const double ratio : {1.25, 1e9}) {
        const auto row = Measure(segment, epoch, ratio);
        std::printf("%6uK %7s %12s %12.4f %10.4f %13.2f %14.2f\n", segment >> 10,
                    epoch == 1u << 30 ? "all" : (std::to_string(epoch >> 10) + "K").c_str(),
                    ratio > 1e6 ? "never" : "1.25", row.quality.recall, row.quality.mass,
                    row.bytes_per_token_head, row.seconds);
        std::fflush(stdout);
      }
    }
  }
  return 0;
}
