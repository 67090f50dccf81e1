// The first rows that a fresh daemon receives, beside later ones: how much of their time is the
// kernel's for memory that nothing has used yet.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <vector>

#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kTokens = 64 << 10;  // 256 MiB of rows

double GigabytesPerSecond(pqc_cache* cache, const Rows& rows) {
  pqc_sequence* sequence = nullptr;
  Must(pqc_sequence_create(cache, &sequence), "pqc_sequence_create");
  const auto begin = std::chrono::steady_clock::now();
  Fill(sequence, rows, rows.tokens());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  Must(pqc_sequence_drop(sequence), "pqc_sequence_drop");
  return static_cast<double>(rows.bytes()) / seconds.count() * 1e-9;
}

int Main(int argc, char** argv) {
  Report report(argc, argv, 5, "engine");
  const Rows rows(kTokens);
  std::vector<double> first, second;
  for (int round = 0; round < report.rounds(); ++round) {
    const Sidecar sidecar({"--idle-reserve-bytes", "256mib"});  // the default
    pqc_client* client = sidecar.OpenClient(2);
    Require(pqc_client_path(client) == PQC_PATH_LOCAL, "the local path");
    pqc_cache* cache = OpenCache(client, "first", 3 * rows.bytes());
    first.push_back(GigabytesPerSecond(cache, rows));
    sidecar.WaitIdle();
    second.push_back(GigabytesPerSecond(cache, rows));
    pqc_cache_close(cache);
    pqc_client_close(client);
    std::printf("first %.2f GB/s, second %.2f GB/s\n", first.back(), second.back());
  }
  report.Add({"first_ingest_gb_per_s", "GB/s", "256 MiB right after a daemon's first OpenCache",
              Better::kHigher, 2.0},
             StatOf(first));
  report.Add({"second_ingest_gb_per_s", "GB/s", "the same again, in memory that has pages",
              Better::kHigher, std::nullopt},
             StatOf(second));
  return report.Finish();
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) { return pqcached::bench::Main(argc, argv); }
