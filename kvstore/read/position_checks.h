// Checks of positions that callers pass.
#ifndef PQCACHED_KVSTORE_READ_POSITION_CHECKS_H_
#define PQCACHED_KVSTORE_READ_POSITION_CHECKS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvstore/read/layer_view.h"
#include "kvstore/read/refusal.h"

namespace pqcached::kvstore {

// Checks positions [kv_heads, count]: stored, and with `ascending` in order within a set. Errors:
// kInvalidArgument, kOutOfRange (positions[i])
Refusal CheckPositions(const LayerView& view, std::span<const uint32_t> positions, bool ascending);
// Checks the ascending list of one head. Errors: likewise, with fields "lists[head][i]"
Refusal CheckList(std::span<const uint32_t> list, size_t head, uint32_t stored);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_POSITION_CHECKS_H_
