// What a fuzz target gives: one input's run, and inputs to begin with.
//
// libFuzzer calls the run with inputs of its own (build preset `asan`); replay.cc calls it with the seeds
// and with inputs that once were findings, in every build.
#ifndef PQCACHED_TESTS_FUZZ_TARGET_H_
#define PQCACHED_TESTS_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// libFuzzer's name. Ends the process when something is wrong.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace pqcached::fuzz {

std::vector<std::string> Seeds();

// Prints why and ends the process: a finding.
[[noreturn]] void Found(const std::string& what);

// Runs the input on a sidecar that serves many of them, until it is worn.
template <class Sidecar>
int RunOn(const uint8_t* data, size_t size) {
  static std::unique_ptr<Sidecar> sidecar;
  if (sidecar == nullptr || sidecar->worn()) {
    sidecar.reset();
    sidecar = std::make_unique<Sidecar>();
  }
  sidecar->Run({data, size});
  return 0;
}

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_TARGET_H_
