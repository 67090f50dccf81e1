// An engine in a process of its own: works at random until it is killed. Says "working" once it has
// something to lose. After SIGTERM it compares everything, and says "clean", or what it has seen.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "engine.h"

namespace {
volatile std::sig_atomic_t g_ends = 0;
}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  std::signal(SIGTERM, [](int) { g_ends = 1; });
  try {
    pqcached::testing::Engine engine({.endpoint = argv[1],
                                      .path = static_cast<pqc_path_choice>(std::atoi(argv[2])),
                                      .seed = static_cast<uint32_t>(std::atoi(argv[3])),
                                      .cache_name = std::string("cache") + argv[3]});
    for (int i = 0; g_ends == 0; ++i) {
      engine.Act();
      if (i != 10) continue;
      std::puts("working");
      std::fflush(stdout);
    }
    engine.Verify();
    const auto& counts = engine.counts();
    std::printf("%s\n", counts.clean() ? "clean" : counts.ToString().c_str());
    return 0;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
