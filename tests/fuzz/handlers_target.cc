// Fuzz target: the calls of two tenants of one sidecar, without sockets, against a model
// (handlers/world.h). The sidecar is not restarted: that is the target `restarts`.
#include "tests/fuzz/handlers/seeds.h"
#include "tests/fuzz/handlers/world.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

struct Handlers : World {
  Handlers() : World({.is_slow = false}) {}
};

}  // namespace

std::vector<std::string> Seeds() { return CallSeeds(); }

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return pqcached::fuzz::RunOn<pqcached::fuzz::Handlers>(data, size);
}
