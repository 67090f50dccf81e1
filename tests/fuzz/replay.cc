// Runs a fuzz target without a fuzzer.
//
//   PROGRAM [FILE...]        runs the seeds, then the inputs in the files
//   PROGRAM --write FOLDER   writes the seeds there, one file each
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "tests/fuzz/target.h"

namespace {

void Run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> seeds = pqcached::fuzz::Seeds();
  if (argc == 3 && std::strcmp(argv[1], "--write") == 0) {
    for (size_t i = 0; i < seeds.size(); ++i) {
      std::ofstream file(std::string(argv[2]) + "/seed-" + std::to_string(i), std::ios::binary);
      if (!file.write(seeds[i].data(), static_cast<std::streamsize>(seeds[i].size()))) return 1;
    }
    return 0;
  }
  for (const std::string& seed : seeds) Run(seed);
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "%s cannot be read\n", argv[i]);
      return 1;
    }
    Run({std::istreambuf_iterator<char>(file), {}});
  }
  std::printf("%zu seeds, %d files\n", seeds.size(), argc - 1);
  return 0;
}
