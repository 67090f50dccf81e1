// HeadRule defines how the values of a token under the kv heads of a layer are joined, where one
// list serves all kv heads.
#ifndef PQCACHED_KERNELS_SELECT_HEAD_RULE_H_
#define PQCACHED_KERNELS_SELECT_HEAD_RULE_H_

#include <cstdint>

namespace pqcached::kernels {

enum class HeadRule : uint8_t {
  kEach = 0,  // not joined: one list for each kv head
  kMax = 1,   // the maximum over the kv heads
  kSum = 2,   // the sum over the kv heads, in their order
};

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_HEAD_RULE_H_
