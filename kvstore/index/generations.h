// Codebook generations: the ranges of segments that share codebooks.
#ifndef PQCACHED_KVSTORE_INDEX_GENERATIONS_H_
#define PQCACHED_KVSTORE_INDEX_GENERATIONS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

// Codebook generation: a range of segments that share one codebook per layer and index.
struct CodebookGeneration {
  size_t segment_begin = 0;
  size_t segment_end = 0;
  PositionRange tokens;
};

// Returns the minimum number of tokens of a codebook generation for a build that covers
// `token_count` tokens: a quarter of them, and at least `least`. A selection computes score tables
// and a threshold per codebook, so generations of a fixed length would slow selection down as the
// context grows, and shorter ones did not improve quality (tests/FIGURES.md).
uint32_t MinGenerationTokens(uint32_t token_count, uint32_t least);

// Cuts segments into codebook generations of at least `codebook_tokens`; the remainder at the end
// joins the last one. `segment_ends` holds the end position (exclusive) of each segment.
std::vector<CodebookGeneration> SplitGenerations(const std::vector<uint32_t>& segment_ends,
                                                 uint32_t codebook_tokens);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INDEX_GENERATIONS_H_
