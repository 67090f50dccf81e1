// Measures a pull of some MiB over RDMA, next to which run.sh measures ib_read_bw.
//   pqcached_rdma_read_bench MIB    prints MiB per second, from the first keys on
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>

#include "tests/rdma/ends.h"

namespace {

using Clock = std::chrono::steady_clock;
using namespace pqcached::service::rdma;  // NOLINT

int Measure(size_t mib) {
  const Plan plan = {.sizes = std::vector<size_t>(mib, 1 << 20)};
  const Child source(Role::kSource, plan);
  const auto verbs = LoadVerbs();
  if (!verbs.ok()) {
    std::fprintf(stderr, "%s\n", verbs.status().ToString().c_str());
    return 1;
  }
  boost::asio::io_context io;
  PullEnd pull(io, **verbs, source.control(), plan);
  std::optional<Clock::time_point> started;
  pull.on_keys = [&started](auto&) {
    if (!started) started = Clock::now();
  };
  RunUntil(io, [&pull] { return pull.end().has_value(); });
  if (!pull.end().has_value() || !pull.end()->ok() || !pull.has_all_bytes()) {
    std::fprintf(stderr, "the pull has failed\n");
    return 1;
  }
  const std::chrono::duration<double> duration = Clock::now() - *started;
  std::printf("%.2f\n", static_cast<double>(mib) / duration.count());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  RunIfChild(argc, argv);
  const int mib = argc == 2 ? std::atoi(argv[1]) : 0;
  if (mib < 1 || mib > 1024) {
    std::fprintf(stderr, "usage: pqcached_rdma_read_bench MIB\n");
    return 2;
  }
  return Measure(static_cast<size_t>(mib));
}
