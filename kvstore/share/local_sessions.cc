#include "kvstore/share/local_sessions.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

absl::Status NoLeaseError(uint64_t lease_id) {
  return NotFound("lease_id", absl::StrCat("no lease ", lease_id));
}

absl::Status HasStagingError() { return AlreadyExists("session", "it has a staging ring already"); }

absl::StatusOr<AttachedSequence> MakeAttached(Lease& lease, uint64_t known_version) {
  if (lease.revoked()) {
    return FailedPrecondition(
        "lease_id", absl::StrCat(lease.lease_id(), " is revoked; detach, and attach again"));
  }
  ASSIGN_OR_RETURN(auto image, lease.Refresh(known_version));
  return AttachedSequence{.lease_id = lease.lease_id(),
                          .word_index = lease.word_index(),
                          .attachment = std::move(image)};
}

}  // namespace

LocalSessions::~LocalSessions() {
  const MutexLock lock(&mutex_);
  for (auto& [name, session] : sessions_) End(session);
}

absl::StatusOr<LocalSessions::Session*> LocalSessions::Find(std::string_view session) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) {
    return FailedPrecondition("session",
                              "it is not local; only sessions of the broker have memory to share");
  }
  return &found->second;
}

absl::StatusOr<SessionMemory> LocalSessions::Open(std::string_view tenant, std::string_view session,
                                                  uint64_t boot_word) {
  const size_t control_bytes = ControlMemory::SizeBytes(max_leases_);
  ASSIGN_OR_RETURN(auto promise,
                   ledger_.Promise(tenant, MemoryUse::kControl, control_bytes, "session"));
  absl::StatusOr<std::unique_ptr<ControlMemory>> created;
  RETURN_IF_ERROR(promise->Allocate(control_bytes, [&] {
    created = ControlMemory::Create(max_leases_, boot_word, keeper_);
    return true;  // its own error says more
  }));
  ASSIGN_OR_RETURN(auto control, std::move(created));
  promise->SetAllocated(control_bytes);
  ASSIGN_OR_RETURN(auto shared, control->Share());
  SessionMemory memory{.control = std::move(shared), .keeper_control = {}};
  if (keeper_ != nullptr) {
    ASSIGN_OR_RETURN(auto kept, control->ShareWithKeeper());
    memory.keeper_control = std::move(kept);
  }
  Drop(session);  // the client never received the memory of an earlier Open
  const MutexLock lock(&mutex_);
  Session& opened = sessions_[std::string(session)];
  opened.tenant = std::string(tenant);
  opened.control_promise = std::move(promise);
  opened.control = std::move(control);
  return memory;
}

absl::Status LocalSessions::NotePool(std::string_view session, uint64_t cache_id) {
  const MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const auto found, Find(session));
  found->control->NotePool(cache_id);
  return absl::OkStatus();
}

absl::Status LocalSessions::HoldPool(std::string_view session, uint64_t cache_id, PageHold hold) {
  const MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const auto found, Find(session));
  if (!found->holds.contains(cache_id)) found->holds[cache_id] = std::move(hold);
  return absl::OkStatus();
}

absl::StatusOr<SharedMemory> LocalSessions::OpenStaging(std::string_view tenant,
                                                        std::string_view session,
                                                        uint64_t slot_bytes, uint32_t slot_count) {
  const bool overflows =
      slot_count > 0 && slot_bytes > std::numeric_limits<size_t>::max() / slot_count;
  const size_t bytes = overflows ? std::numeric_limits<size_t>::max() : slot_bytes * slot_count;
  ASSIGN_OR_RETURN(auto control, BeginStaging(session, bytes));
  auto shared = MakeStaging(tenant, session, slot_bytes, slot_count, control);
  const MutexLock lock(&mutex_);
  if (const auto found = Find(session); found.ok() && (*found)->control == control) {
    (*found)->opening_bytes = 0;
  }
  return shared;
}

absl::StatusOr<std::shared_ptr<const ControlMemory>> LocalSessions::BeginStaging(
    std::string_view session, size_t bytes) {
  const MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const auto found, Find(session));
  if (found->staging != nullptr || found->opening_bytes > 0) return HasStagingError();
  if (bytes > max_staging_bytes_) return found->control;  // StagingRing::Create refuses it
  size_t others_bytes = 0;
  for (const auto& [name, other] : sessions_) {
    if (other.tenant == found->tenant) others_bytes += other.all_staging_bytes();
  }
  const size_t most = quotas_.Of(found->tenant).max_staging_bytes;
  const size_t left = most - std::min(most, others_bytes);
  if (bytes > left) {
    return ResourceExhausted(
        "tenant_limits.staging",
        absl::StrCat(bytes, "; tenant ", found->tenant, " may have ", most, " bytes and has ",
                     others_bytes, ", ", bytes - left, " bytes short"),
        kRetryMemory);
  }
  found->opening_bytes = bytes;
  return found->control;
}

absl::StatusOr<SharedMemory> LocalSessions::MakeStaging(
    std::string_view tenant, std::string_view session, uint64_t slot_bytes, uint32_t slot_count,
    const std::shared_ptr<const ControlMemory>& control) {
  ASSIGN_OR_RETURN(auto ring, StagingRing::Create(slot_bytes, slot_count, max_staging_bytes_,
                                                  control, &ledger_, tenant));
  auto shared = ring->Share();
  if (!shared.ok()) return shared.status();
  const MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const auto found, Find(session));
  if (found->control != control) {  // the session was closed and opened again concurrently
    return FailedPrecondition("session", "the sidecar has replaced it");
  }
  if (found->staging != nullptr) return HasStagingError();
  found->staging = std::move(ring);
  return shared;
}

absl::StatusOr<StagedBytes> LocalSessions::ClaimStaging(std::string_view session,
                                                        const StagingReference& reference) {
  std::shared_ptr<StagingRing> ring;
  {
    const MutexLock lock(&mutex_);
    ASSIGN_OR_RETURN(const auto found, Find(session));
    ring = found->staging;
  }
  if (ring == nullptr) {
    return FailedPrecondition("session", "it has no staging ring");
  }
  return ring->Claim(reference);
}

absl::StatusOr<Lease::Parts> LocalSessions::Reserve(std::string_view session) {
  const MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const auto found, Find(session));
  Session& mine = *found;
  Lease::Parts parts;
  if (!mine.free_words.empty()) {
    parts.word_index = mine.free_words.back();
    mine.free_words.pop_back();
  } else if (mine.used_words < max_leases_) {
    parts.word_index = mine.used_words++;
  } else {
    return ResourceExhausted("max_leases", absl::StrCat("the session has ", max_leases_, " leases"),
                             kRetryMemory);
  }
  parts.lease_id = next_lease_id_++;
  parts.session = std::string(session);
  parts.control = mine.control;
  return parts;
}

void LocalSessions::FreeWords(std::string_view session, uint32_t word_index) {
  const MutexLock lock(&mutex_);
  const auto found = Find(session);
  if (found.ok()) (*found)->free_words.push_back(word_index);
}

absl::StatusOr<std::shared_ptr<Lease>> LocalSessions::Begin(std::shared_ptr<const Cache> cache,
                                                            std::shared_ptr<Sequence> sequence,
                                                            std::string_view session) {
  ASSIGN_OR_RETURN(Lease::Parts parts, Reserve(session));
  parts.cache = std::move(cache);
  parts.sequence = std::move(sequence);
  const auto lease = std::make_shared<Lease>(std::move(parts));
  if (absl::Status status = lease->Begin(); !status.ok()) {
    FreeWords(session, lease->word_index());
    return status;
  }
  absl::Status ended;
  {
    const MutexLock lock(&mutex_);
    const auto found = Find(session);
    if (found.ok()) {
      (*found)->leases.emplace(lease->lease_id(), lease);
      return lease;
    }
    ended = found.status();
  }
  lease->End();
  return ended;
}

absl::StatusOr<std::shared_ptr<Lease>> LocalSessions::FindLease(std::string_view session,
                                                                uint64_t lease_id) {
  const MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const auto found, Find(session));
  const auto lease = found->leases.find(lease_id);
  if (lease == found->leases.end()) return NoLeaseError(lease_id);
  return lease->second;
}

absl::StatusOr<AttachedSequence> LocalSessions::Attach(std::shared_ptr<const Cache> cache,
                                                       std::shared_ptr<Sequence> sequence,
                                                       std::string_view session,
                                                       const LeaseState& state) {
  const uint64_t sequence_id = sequence->sequence_id();
  if (state.lease_id == 0) {
    ASSIGN_OR_RETURN(const auto lease, Begin(std::move(cache), std::move(sequence), session));
    auto attached = MakeAttached(*lease, 0);
    // The client has not received the lease yet.
    if (!attached.ok()) Detach(session, lease->lease_id()).IgnoreError();
    return attached;
  }
  ASSIGN_OR_RETURN(const auto lease, FindLease(session, state.lease_id));
  if (lease->sequence_id() != sequence_id) {
    return InvalidArgument("lease_id", absl::StrCat(state.lease_id, " is of sequence ",
                                                    lease->sequence_id(), ", not ", sequence_id));
  }
  return MakeAttached(*lease, state.known_version);
}

absl::StatusOr<VersionedImage> LocalSessions::Refresh(std::string_view session,
                                                      const LeaseState& state) {
  ASSIGN_OR_RETURN(const auto lease, FindLease(session, state.lease_id));
  return lease->Refresh(state.known_version);
}

absl::Status LocalSessions::Detach(std::string_view session, uint64_t lease_id) {
  std::shared_ptr<Lease> lease;
  {
    const MutexLock lock(&mutex_);
    ASSIGN_OR_RETURN(const auto found, Find(session));
    auto node = found->leases.extract(lease_id);
    if (node.empty()) return NoLeaseError(lease_id);
    lease = std::move(node.mapped());
  }
  lease->End();  // before another lease reuses its words
  FreeWords(session, lease->word_index());
  return absl::OkStatus();
}

std::vector<LeaseInfo> LocalSessions::ListLeases(std::string_view tenant) const {
  std::vector<std::shared_ptr<Lease>> leases;
  {
    const MutexLock lock(&mutex_);
    for (const auto& [name, session] : sessions_) {
      if (!session.IsOf(tenant)) continue;
      for (const auto& [id, lease] : session.leases) leases.push_back(lease);
    }
  }
  std::vector<LeaseInfo> infos;
  infos.reserve(leases.size());
  std::map<std::string, uint32_t> expired;  // by session
  for (const auto& lease : leases) {
    const bool revoked = lease->RevokeIfExpired(lease_timeout_);
    infos.push_back(lease->Describe());
    if (revoked) ++expired[infos.back().session];
  }
  for (const auto& [session, count] : expired) {
    if (on_expired_leases_) on_expired_leases_(session, count);
  }
  std::sort(infos.begin(), infos.end(),
            [](const LeaseInfo& a, const LeaseInfo& b) { return a.lease_id < b.lease_id; });
  return infos;
}

// Clears boot_word before it frees memory, so that a client that still runs uses no more results.
void LocalSessions::End(Session& session) {
  session.control->End();
  for (auto& [id, lease] : session.leases) lease->End();
}

void LocalSessions::Drop(std::string_view session) {
  Session ended;
  {
    const MutexLock lock(&mutex_);
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) return;
    ended = std::move(found->second);
    sessions_.erase(found);
  }
  if (ended.staging != nullptr) ended.staging->FreeAtEnd();
  End(ended);
}

void LocalSessions::SetQuotas(TenantQuotas quotas) {
  const MutexLock lock(&mutex_);
  quotas_ = std::move(quotas);
}

size_t LocalSessions::staging_bytes(std::string_view tenant) const {
  const MutexLock lock(&mutex_);
  size_t bytes = 0;
  for (const auto& [name, session] : sessions_) {
    if (session.IsOf(tenant)) bytes += session.staging_bytes();
  }
  return bytes;
}

}  // namespace pqcached::kvstore
