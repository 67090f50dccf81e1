// Seeds of trainings.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_SEEDS_H_
#define PQCACHED_KVSTORE_READ_INDEXES_SEEDS_H_

#include <cstdint>

namespace pqcached::kvstore {

// Returns a well-mixed 64-bit hash of a seed and a tag.
constexpr uint64_t MixSeed(uint64_t seed, uint64_t tag) {
  uint64_t mixed = seed + 0x9e3779b97f4a7c15u * (tag + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  return mixed ^ (mixed >> 31);
}

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_SEEDS_H_
