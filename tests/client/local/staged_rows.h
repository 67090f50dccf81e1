// Rows of a call to the sidecar's stand-in: in the staging ring, or with the call.
#ifndef PQCACHED_TESTS_CLIENT_LOCAL_STAGED_ROWS_H_
#define PQCACHED_TESTS_CLIENT_LOCAL_STAGED_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/base/pack.h"
#include "client/base/remote.h"
#include "kvstore/store.h"
#include "tests/client/local/store_client.h"

namespace pqcached::testing {

// The slots of staging that one call uses.
class Claims {
 public:
  explicit Claims(Sidecar& sidecar) : sidecar_(sidecar) {}

  absl::StatusOr<std::span<const std::byte>> Resolve(const client::StagingPlace& place) {
    auto found = slots_.find(place.slot);
    if (found == slots_.end()) {
      auto claimed = sidecar_.store->ClaimStaging(sidecar_.local_session(),
                                                  {.slot = place.slot,
                                                   .offset_bytes = place.offset_bytes,
                                                   .size_bytes = place.size_bytes,
                                                   .generation = place.generation});
      if (!claimed.ok()) return claimed.status();
      found = slots_.emplace(place.slot, *std::move(claimed)).first;
    }
    return found->second.slot.subspan(place.offset_bytes, place.size_bytes);
  }

  std::vector<kvstore::StagedBytes> TakeSlots() {
    std::vector<kvstore::StagedBytes> slots;
    for (auto& [number, staged] : slots_) slots.push_back(std::move(staged));
    slots_.clear();
    return slots;
  }

 private:
  Sidecar& sidecar_;
  std::map<uint32_t, kvstore::StagedBytes> slots_;
};

// A tensor's elements, packed.
struct Packed {
  explicit Packed(const client::TensorView& from)
      : bytes(from.staging ? 0 : from.shape[0] * client::BytesPerIndex(from)) {
    view.dtype = static_cast<kernels::DType>(from.dtype);
    view.shape.assign(from.shape, from.shape + from.ndim);
    if (from.staging) return;
    client::Pack(from, 0, from.shape[0], bytes.data());
    view.data = bytes.data();
    view.data_bytes = bytes.size();
  }

  absl::Status Resolve(const client::TensorView& from, Claims& claims) {
    if (!from.staging) return absl::OkStatus();
    const auto staged = claims.Resolve(*from.staging);
    if (!staged.ok()) return staged.status();
    view.data = staged->data();
    view.data_bytes = staged->size();
    return absl::OkStatus();
  }

  std::vector<std::byte> bytes;
  kvstore::TensorView view;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_LOCAL_STAGED_ROWS_H_
