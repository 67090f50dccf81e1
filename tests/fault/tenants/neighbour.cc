#include "neighbour.h"

#include <signal.h>

#include <sstream>
#include <stdexcept>

namespace pqcached::testing {

Neighbour::Calls& Neighbour::Calls::operator+=(const Calls& other) {
  taken += other.taken;
  refused += other.refused;
  failed += other.failed;
  return *this;
}

std::string Neighbour::Calls::ToString() const {
  return std::to_string(taken) + " taken, " + std::to_string(refused) + " refused, " +
         std::to_string(failed) + " failed";
}

Neighbour::Neighbour(const HostilityRow& hostility, const std::string& endpoint)
    : process_(
          {PQCACHED_HOSTILE_PROCESS, hostility.name, std::to_string(hostility.threads), endpoint}) {
  AwaitWorking();
}

Neighbour::Neighbour(uint32_t threads)
    : process_({PQCACHED_HOSTILE_PROCESS, "burner", std::to_string(threads)}) {
  AwaitWorking();
}

void Neighbour::AwaitWorking() {
  const std::string line = process_.ReadLine();
  if (line != "working") throw std::runtime_error("the neighbour has ended: " + line);
}

Neighbour::Calls Neighbour::End() {
  process_.Signal(SIGTERM);
  const std::string line = process_.ReadLine();
  Calls calls;
  std::istringstream numbers(line);
  if (process_.Wait() != 0 || !(numbers >> calls.taken >> calls.refused >> calls.failed)) {
    throw std::runtime_error("the neighbour has ended: " + line);
  }
  return calls;
}

}  // namespace pqcached::testing
