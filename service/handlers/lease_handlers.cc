#include "service/handlers/lease_handlers.h"

#include <utility>

#include "service/base/refusal.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

constexpr char kSessionField[] = "pqcached-session";  // the metadata that names the session

// Returns an error about a lease with its path in a request that has the message `lease`.
absl::Status PrefixLease(const absl::Status& status) {
  return MoveField(
      "known_version", "lease.known_version",
      MoveField("lease_id", "lease.lease_id", MoveField("session", kSessionField, status)));
}

}  // namespace

absl::Status LeaseHandlers::Attach(const Caller& caller, const v1::AttachRequest& request,
                                   v1::AttachResponse* response) {
  absl::StatusOr<kvstore::AttachedSequence> attached =
      store_.Attach(caller.session.tenant, request.sequence_id(), caller.session.id,
                    LeaseStateOf(request.lease()));
  if (!attached.ok()) return PrefixLease(attached.status());
  const bool made = request.lease().lease_id() == 0;
  absl::Status status = CheckResponseBytes(attached->attachment.image.size(), max_message_bytes_);
  if (status.ok()) status = caller.Check();
  if (!status.ok()) {  // the client does not receive the new lease
    if (made) store_.Detach(caller.session.id, attached->lease_id).IgnoreError();
    return status;
  }
  response->set_lease_id(attached->lease_id);
  response->set_word_index(attached->word_index);
  ToWire(std::move(attached->attachment), response->mutable_attachment());
  return absl::OkStatus();
}

absl::Status LeaseHandlers::Detach(const Caller& caller, const v1::DetachRequest& request,
                                   v1::DetachResponse*) {
  return MoveField("session", kSessionField, store_.Detach(caller.session.id, request.lease_id()));
}

absl::Status LeaseHandlers::Check(const Caller& caller, const v1::LeaseState& lease,
                                  const std::string& field) {
  if (lease.lease_id() == 0) return absl::OkStatus();
  const absl::Status status = store_.RefreshLease(caller.session.id, LeaseStateOf(lease)).status();
  return PrefixField(field, MoveField("session", "", status));
}

void LeaseHandlers::Fill(const Caller& caller, const v1::LeaseState& lease,
                         v1::Attachment* attachment) {
  if (lease.lease_id() == 0) return;
  absl::StatusOr<kvstore::VersionedImage> image =
      store_.RefreshLease(caller.session.id, LeaseStateOf(lease));
  // A failed refresh is not an error of the call, which has done its work; the lease words show the
  // client the state of its lease.
  if (image.ok() && image->image.size() <= max_message_bytes_) {
    ToWire(*std::move(image), attachment);
  }
}

}  // namespace pqcached::service
