// A hostile tenant in a process of its own, or a burner: threads that compute and never call the
// sidecar.
//
//     pqcached_hostile_process burner|HOSTILITY THREADS [ENDPOINT]
//
// Prints "working" when its calls are answered as those of its kind are, or after a minute. At SIGTERM
// it prints how many calls were taken, refused and failed, and ends in the midst of others.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

#include "hostile.h"

namespace pqcached::testing {
namespace {

[[noreturn]] void Burn() {
  for (volatile uint64_t turns = 0;;) turns = turns + 1;
}

[[noreturn]] void Work(const std::string& kind, const std::string& endpoint, uint32_t number,
                       Tally& tally) {
  try {
    for (const HostilityRow& row : kHostilities) {
      if (row.name != kind) continue;
      HostileThread{endpoint, "hostile-" + kind, number, tally}.Run(row.hostility);
    }
    std::printf("no such kind: %s\n", kind.c_str());
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
  std::fflush(stdout);
  _exit(1);
}

// Whether the sidecar has answered as it answers this kind of calls: taken, refused, or some of each.
bool IsAnswered(const std::string& kind, const Tally& tally) {
  for (const HostilityRow& row : kHostilities) {
    if (row.name != kind) continue;
    return (!row.is_taken || tally.taken() > 0) && (!row.is_refused || tally.refused() > 0);
  }
  return true;  // the burner calls nothing
}

int Main(const std::string& kind, uint32_t threads, const std::string& endpoint) {
  sigset_t end;
  sigemptyset(&end);
  sigaddset(&end, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &end, nullptr);  // of the threads that are started, too
  const bool is_burner = kind == "burner";
  static Tally tally;  // threads use it until the end
  for (uint32_t number = 0; number < threads; ++number) {
    std::thread([=] { is_burner ? Burn() : Work(kind, endpoint, number, tally); }).detach();
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!IsAnswered(kind, tally) && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::puts("working");
  std::fflush(stdout);
  int signal = 0;
  sigwait(&end, &signal);
  std::printf("%llu %llu %llu\n", static_cast<unsigned long long>(tally.taken()),
              static_cast<unsigned long long>(tally.refused()),
              static_cast<unsigned long long>(tally.failed()));
  std::fflush(stdout);
  _exit(0);
}

}  // namespace
}  // namespace pqcached::testing

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  return pqcached::testing::Main(argv[1], static_cast<uint32_t>(std::atoi(argv[2])),
                                 argc == 4 ? argv[3] : "");
}
