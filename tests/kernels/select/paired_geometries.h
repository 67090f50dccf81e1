// Geometries beside the usual ones. Paired: halves of all sizes around the vectors', keys that are
// paired in part, and planes of nibbles. Rare: all that PqSelect does not know.
#ifndef PQCACHED_TESTS_KERNELS_SELECT_PAIRED_GEOMETRIES_H_
#define PQCACHED_TESTS_KERNELS_SELECT_PAIRED_GEOMETRIES_H_

#include <vector>

#include "kernels/select/pq.h"

namespace pqcached::kernels {

inline std::vector<PqGeometry> PairedGeometries() {
  return {{64, 2, 6, 64},  {128, 4, 8, 128}, {64, 4, 4, 32},   {128, 8, 5, 64},
          {32, 16, 4, 32}, {32, 16, 4, 4},   {72, 4, 6, 72},   {136, 4, 5, 136},
          {56, 4, 8, 28},  {256, 2, 4, 256}, {240, 8, 7, 120}, {48, 8, 6, 36}};
}

inline std::vector<PqGeometry> RareGeometries() {
  return {{32, 1, 1}, {32, 16, 1}, {64, 32, 2},   {32, 2, 3},  {128, 64, 1},
          {96, 3, 8}, {48, 24, 4}, {256, 128, 3}, {120, 5, 6}, {32, 4, 2, 32}};
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_TESTS_KERNELS_SELECT_PAIRED_GEOMETRIES_H_
