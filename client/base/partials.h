// Reads the two partial attentions that a caller merges: pqc_partial, in host memory or on a GPU.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_BASE_PARTIALS_H_
#define PQCACHED_CLIENT_BASE_PARTIALS_H_

#include <cstdint>

#include "client/base/arguments.h"

namespace pqcached::client {

struct PartialView {
  uint32_t tokens() const { return static_cast<uint32_t>(output.shape[0]); }
  uint32_t heads() const { return static_cast<uint32_t>(output.shape[1]); }
  uint32_t dim() const { return static_cast<uint32_t>(output.shape[2]); }

  TensorView output;  // [tokens, heads, dim], each at most 2^30
  TensorView lse;     // [tokens, heads]
  kvstore::LogBase lse_base = kvstore::LogBase::kNatural;
  bool has_sinks = false;
  TensorView sinks;  // [heads]
};

// Reads the arguments `a` and `b` of a merge: two partials of one shape, all tensors at `place`,
// sinks in `a` only.
pqc_status ReadPartials(const pqc_partial* from_a, const pqc_partial* from_b,
                        const TensorPlace& place, PartialView* a, PartialView* b);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_PARTIALS_H_
