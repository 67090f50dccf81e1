// tinylm_rank: one rank of a model in several processes. Started by RankProcess, not by hand.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>

#include "tests/tinylm/ranked_attention.h"

namespace tinylm {
namespace {

constexpr int kFixedArguments = 9;

uint32_t Number(const char* word) { return static_cast<uint32_t>(std::stoul(word)); }

void Main(int argc, char** argv) {
  if (argc < kFixedArguments || (argc - kFixedArguments) % 2 != 0) {
    throw std::runtime_error("is started by the test engine");
  }
  PqcachedAttention::Options options;
  options.endpoint = argv[2];
  options.cache_name = argv[3];
  options.capacity_bytes = std::stoull(argv[4]);
  options.dtype = static_cast<pqc_dtype>(Number(argv[5]));
  options.path = static_cast<pqc_path_choice>(Number(argv[6]));
  options.rank = Number(argv[7]);
  options.rank_count = Number(argv[8]);
  for (int i = kFixedArguments; i < argc; i += 2) {
    options.indexes.push_back(PqIndex(Number(argv[i]), Number(argv[i + 1])));
  }
  ServeRank(kRankSocket, LoadModel(argv[1]), options);
}

}  // namespace
}  // namespace tinylm

int main(int argc, char** argv) {
  try {
    tinylm::Main(argc, argv);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tinylm_rank: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
