// RPCs for clients on this host: Commit (writes rows from the staging ring), Attach and Detach
// (leases on mapped sequences).
#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "service/rpc/kv_cache_service.h"
#include "service/wire/staging_claims.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

constexpr char kSessionField[] = "pqcached-session";  // the metadata that names the session
constexpr int kMaxCommitRows = static_cast<int>(kvstore::kMaxLayers);

// Returns an error about a lease with its path in a request that has the message `lease`.
absl::Status PrefixLease(const absl::Status& status) {
  return MoveField(
      "known_version", "lease.known_version",
      MoveField("lease_id", "lease.lease_id", MoveField("session", kSessionField, status)));
}

}  // namespace

absl::Status KvCacheService::CommitRows(const Call& call, const v1::CommitRequest& request,
                                        v1::CommitResponse* response) {
  absl::flat_hash_set<uint32_t> seen;
  for (int i = 0; i < request.rows_size(); ++i) {
    if (!seen.insert(request.rows(i).layer()).second) {
      return InvalidArgument(absl::StrCat("rows[", i, "].layer"),
                             absl::StrCat(request.rows(i).layer(), " is listed twice"));
    }
  }
  StagingClaims claims(store_, call.session.id);
  std::vector<kvstore::LayerRows> layers;
  for (int i = 0; i < request.rows_size(); ++i) {
    absl::StatusOr<kvstore::LayerRows> rows = LayerRowsOf(
        request.rows(i), absl::StrCat("rows[", i, "]"), config_.max_message_bytes, &claims);
    if (!rows.ok()) return rows.status();
    layers.push_back(*std::move(rows));
  }
  auto transaction = store_.BeginIngest(call.session.tenant, request.sequence_id());
  if (!transaction.ok()) return transaction.status();
  for (size_t i = 0; i < layers.size(); ++i) {
    if (absl::Status status = call.Check(); !status.ok()) return status;
    if (absl::Status status = (*transaction)->Write(request.first_position(), layers[i]);
        !status.ok()) {
      return MoveField("rows", absl::StrCat("rows[", i, "]"), status);
    }
  }
  if (absl::Status status = call.Check(); !status.ok()) return status;
  const absl::StatusOr<uint64_t> token_count = (*transaction)->Commit();
  if (token_count.ok()) response->set_token_count(*token_count);
  return token_count.status();
}

KvCacheService::Reactor* KvCacheService::Commit(Context* context, const v1::CommitRequest* request,
                                                v1::CommitResponse* response) {
  return calls_.Unary(
      context, Rpc::kCommit, Access::kSession, [=, this](const Call& call) -> absl::Status {
        if (absl::Status status = CheckCount("rows", request->rows_size(), kMaxCommitRows);
            !status.ok()) {
          return status;
        }
        return CommitRows(call, *request, response);
      });
}

absl::Status KvCacheService::CheckLease(const Call& call, const v1::LeaseState& lease,
                                        const std::string& field) {
  if (lease.lease_id() == 0) return absl::OkStatus();
  const absl::Status status = store_.RefreshLease(call.session.id, LeaseStateOf(lease)).status();
  return PrefixField(field, MoveField("session", "", status));
}

absl::Status KvCacheService::FillAttachment(const Call& call, const v1::LeaseState& lease,
                                            v1::Attachment* attachment) {
  if (lease.lease_id() == 0) return absl::OkStatus();
  absl::StatusOr<kvstore::VersionedImage> image =
      store_.RefreshLease(call.session.id, LeaseStateOf(lease));
  // A failed refresh is not an error of the call, which has done its work; the lease words show the
  // client the state of its lease.
  if (image.ok() && image->image.size() <= config_.max_message_bytes) {
    ToWire(*std::move(image), attachment);
  }
  return absl::OkStatus();
}

KvCacheService::Reactor* KvCacheService::Attach(Context* context, const v1::AttachRequest* request,
                                                v1::AttachResponse* response) {
  return calls_.Unary(context, Rpc::kAttach, Access::kSession,
                      [=, this](const Call& call) -> absl::Status {
                        absl::StatusOr<kvstore::AttachedSequence> attached =
                            store_.Attach(call.session.tenant, request->sequence_id(),
                                          call.session.id, LeaseStateOf(request->lease()));
                        if (!attached.ok()) return PrefixLease(attached.status());
                        const bool made = request->lease().lease_id() == 0;
                        absl::Status status = CheckResponseBytes(attached->attachment.image.size());
                        if (status.ok()) status = call.Check();
                        if (!status.ok()) {  // the client does not receive the new lease
                          if (made)
                            store_.Detach(call.session.id, attached->lease_id).IgnoreError();
                          return status;
                        }
                        response->set_lease_id(attached->lease_id);
                        response->set_word_index(attached->word_index);
                        ToWire(std::move(attached->attachment), response->mutable_attachment());
                        return absl::OkStatus();
                      });
}

KvCacheService::Reactor* KvCacheService::Detach(Context* context, const v1::DetachRequest* request,
                                                v1::DetachResponse*) {
  return calls_.Unary(context, Rpc::kDetach, Access::kSession, [=, this](const Call& call) {
    return MoveField("session", kSessionField, store_.Detach(call.session.id, request->lease_id()));
  });
}

}  // namespace pqcached::service
