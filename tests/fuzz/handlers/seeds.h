// Inputs to begin with, for the targets that call handlers.
#ifndef PQCACHED_TESTS_FUZZ_HANDLERS_SEEDS_H_
#define PQCACHED_TESTS_FUZZ_HANDLERS_SEEDS_H_

#include <string>
#include <vector>

namespace pqcached::fuzz {

std::vector<std::string> CallSeeds();

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_HANDLERS_SEEDS_H_
