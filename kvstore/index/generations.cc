#include "kvstore/index/generations.h"

#include <algorithm>

namespace pqcached::kvstore {

uint32_t MinGenerationTokens(uint32_t token_count, uint32_t least) {
  constexpr uint32_t kMaxGenerations = 4;
  return std::max(least, (token_count + kMaxGenerations - 1) / kMaxGenerations);
}

std::vector<CodebookGeneration> SplitGenerations(const std::vector<uint32_t>& segment_ends,
                                                 uint32_t codebook_tokens) {
  std::vector<CodebookGeneration> generations;
  CodebookGeneration generation;
  for (size_t i = 0; i < segment_ends.size(); ++i) {
    generation.segment_end = i + 1;
    generation.tokens.end = segment_ends[i];
    if (generation.tokens.end - generation.tokens.begin < codebook_tokens) continue;
    generations.push_back(generation);
    generation.segment_begin = i + 1;
    generation.tokens.begin = generation.tokens.end;
  }
  if (generation.segment_begin == segment_ends.size()) return generations;
  if (generations.empty()) return {generation};
  generations.back().segment_end = generation.segment_end;
  generations.back().tokens.end = generation.tokens.end;
  return generations;
}

}  // namespace pqcached::kvstore
