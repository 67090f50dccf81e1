// Fuzz target: as `handlers`, with restarts: the next sidecar continues with what the last one left
// to its keeper. Restarts start threads, so this target is slower.
#include "tests/fuzz/handlers/seeds.h"
#include "tests/fuzz/handlers/world.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

struct Restarts : World {
  Restarts() : World({.is_slow = true}) {}
};

}  // namespace

std::vector<std::string> Seeds() { return CallSeeds(); }

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return pqcached::fuzz::RunOn<pqcached::fuzz::Restarts>(data, size);
}
