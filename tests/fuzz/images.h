// Segment maps, which may have been changed, and the pool that they name: the input of the targets
// `attachment` and `image`.
#ifndef PQCACHED_TESTS_FUZZ_IMAGES_H_
#define PQCACHED_TESTS_FUZZ_IMAGES_H_

#include <cstddef>
#include <string>
#include <vector>

#include "kvstore/read/attachment.h"
#include "tests/fuzz/bytes.h"

namespace pqcached::fuzz {

inline constexpr size_t kImagePoolBytes = 8 * kvstore::kMinExtentBytes;
inline constexpr uint32_t kImageLayer = 3;

kvstore::LayerShape ImageShape();

// Returns an encoded attachment of two segments of one layer, with a pq index and a flat one, that
// the input has changed, or bytes of the input. Writes the headers of its extents into the pool,
// and changes them, too.
std::vector<std::byte> ImageOf(Bytes& bytes, std::byte* pool);

// Reads all that a view of the layer leads to, which must lie inside the pool.
void ReadAll(kvstore::MappedLayer& mapped, const std::byte* pool, uint32_t tokens);

std::vector<std::string> ImageSeeds();

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_IMAGES_H_
