// Store's calls for clients that read mapped memory.
#include "kvstore/store_impl.h"

namespace pqcached::kvstore {

absl::StatusOr<SessionMemory> StoreImpl::OpenLocalSession(std::string_view, uint64_t) {
  return absl::UnimplementedError("OpenLocalSession");
}

absl::StatusOr<SharedMemory> StoreImpl::OpenPool(std::string_view, uint64_t) {
  return absl::UnimplementedError("OpenPool");
}

absl::StatusOr<SharedMemory> StoreImpl::OpenStaging(std::string_view, uint64_t, uint32_t) {
  return absl::UnimplementedError("OpenStaging");
}

absl::StatusOr<StagedBytes> StoreImpl::ClaimStaging(std::string_view, const StagingReference&) {
  return absl::UnimplementedError("staging");
}

absl::StatusOr<AttachedSequence> StoreImpl::Attach(std::string_view, uint64_t, std::string_view,
                                                   const LeaseState&) {
  return absl::UnimplementedError("Attach");
}

absl::StatusOr<VersionedImage> StoreImpl::RefreshLease(std::string_view, const LeaseState&) {
  return absl::UnimplementedError("Attach");
}

absl::Status StoreImpl::Detach(std::string_view, uint64_t) {
  return absl::UnimplementedError("Detach");
}

std::vector<LeaseInfo> StoreImpl::ListLeases() { return {}; }

}  // namespace pqcached::kvstore
