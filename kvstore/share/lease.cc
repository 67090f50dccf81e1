#include "kvstore/share/lease.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvstore/refusal.h"
#include "kvstore/share/attach.h"

namespace pqcached::kvstore {

absl::Status Lease::Begin() {
  if (!parts_.sequence->holds().Acquire()) {
    return NotFound("sequence_id", absl::StrCat("sequence ", sequence_id(), " was evicted"));
  }
  {
    // Locked before Watch, so that no publication overtakes the snapshot that Watch returns.
    const MutexLock lock(&mutex_);
    auto first = parts_.sequence->Watch(shared_from_this());
    if (!first.ok()) {
      parts_.sequence->holds().Release();
      state_ = State::kEnded;
      return first.status();
    }
    words().lease_id.store(parts_.lease_id, std::memory_order_release);
    Follow(**first);
  }
  // Watch reports suspensions only from now on; an earlier one is found here.
  if (!parts_.sequence->suspended()) return absl::OkStatus();
  End();
  return FailedPrecondition("sequence_id",
                            absl::StrCat("sequence ", sequence_id(), " is suspended"));
}

void Lease::Follow(const Snapshot& next) {
  if (newest_.list != next.list) {
    newest_.list = next.list;
    words().version.store(++newest_.version, std::memory_order_release);
  }
  layer_tokens_ = next.layer_tokens;
  words().token_count.store(next.token_count(), std::memory_order_release);
}

absl::StatusOr<VersionedImage> Lease::Refresh(uint64_t known_version) {
  std::vector<Version> old;  // freed after the lock is released
  Version newest;
  std::vector<uint32_t> layer_tokens;
  {
    const MutexLock lock(&mutex_);
    if (state_ == State::kEnded) {
      return NotFound("lease_id", absl::StrCat("no lease ", parts_.lease_id));
    }
    refreshed_ = SteadyTime::Now();
    const uint64_t last = delivered_.empty() ? 0 : delivered_.back().version;
    if (known_version > last) {
      return InvalidArgument("known_version",
                             absl::StrCat(known_version, "; the newest attachment is ", last));
    }
    const auto kept =
        std::find_if(delivered_.begin(), delivered_.end(),
                     [&](const Version& version) { return version.version >= known_version; });
    std::move(delivered_.begin(), kept, std::back_inserter(old));
    delivered_.erase(delivered_.begin(), kept);
    if (state_ == State::kRevoked || newest_.version == known_version) return VersionedImage{};
    if (newest_.version != last) {
      if (delivered_.size() >= kMaxVersions) {
        return ResourceExhausted("known_version",
                                 absl::StrCat(known_version, "; ", delivered_.size(),
                                              " attachments are not acknowledged"),
                                 kNoRetry);
      }
      delivered_.push_back(newest_);
    }
    newest = newest_;
    layer_tokens = layer_tokens_;
  }
  const Attachment attachment =
      MakeAttachment(*parts_.cache, sequence_id(), newest.version, *newest.list, layer_tokens);
  return VersionedImage{.version = newest.version, .image = EncodeAttachment(attachment)};
}

void Lease::End() {
  std::vector<Version> held;  // freed after the lock is released
  {
    const MutexLock lock(&mutex_);
    if (state_ == State::kEnded) return;
    state_ = State::kEnded;
    held.swap(delivered_);
    held.push_back(std::exchange(newest_, {}));
    LeaseWords& mine = words();
    mine.lease_id.store(0, std::memory_order_release);
    mine.version.store(0, std::memory_order_release);
    mine.token_count.store(0, std::memory_order_release);
    mine.flags.store(0, std::memory_order_release);
  }
  parts_.sequence->Unwatch(this);
  parts_.sequence->holds().Release();
}

bool Lease::RevokeIfExpired(absl::Duration timeout) {
  {
    const MutexLock lock(&mutex_);
    if (state_ != State::kFollowing || SteadyTime::Now() - refreshed_ <= timeout) return false;
    Revoke();
  }
  parts_.control->Wake();
  return true;
}

void Lease::Revoke() {
  if (state_ != State::kFollowing) return;
  state_ = State::kRevoked;
  newest_.list.reset();  // no version is delivered any more
  words().flags.fetch_or(LeaseWords::kRevoked, std::memory_order_release);
}

void Lease::OnPublish(const Snapshot& next) {
  {
    const MutexLock lock(&mutex_);
    if (state_ != State::kFollowing) return;
    Follow(next);
  }
  parts_.control->Wake();
}

bool Lease::OnTruncate(uint32_t token_count, uint64_t own_lease) {
  {
    const MutexLock lock(&mutex_);
    const bool shortened =
        *std::max_element(layer_tokens_.begin(), layer_tokens_.end()) > token_count;
    if (state_ == State::kEnded || own_lease == parts_.lease_id || !shortened || tail_preserved_) {
      return false;
    }
    tail_preserved_ = true;
    Revoke();
  }
  parts_.control->Wake();
  return true;
}

void Lease::OnSuspend(bool suspended) {
  {
    const MutexLock lock(&mutex_);
    if (state_ == State::kEnded) return;
    if (suspended) {
      words().flags.fetch_or(LeaseWords::kSuspended, std::memory_order_release);
      Revoke();
    } else {
      words().flags.fetch_and(~LeaseWords::kSuspended, std::memory_order_release);
    }
  }
  parts_.control->Wake();
}

void Lease::OnDrop() {
  {
    const MutexLock lock(&mutex_);
    if (state_ == State::kEnded) return;
    Revoke();
  }
  parts_.control->Wake();
}

bool Lease::revoked() const {
  const MutexLock lock(&mutex_);
  return state_ == State::kRevoked;
}

LeaseInfo Lease::Describe() const {
  LeaseInfo info{.lease_id = parts_.lease_id,
                 .sequence_id = sequence_id(),
                 .session = parts_.session,
                 .age_seconds = absl::ToDoubleSeconds(SteadyTime::Now() - started_)};
  std::vector<std::shared_ptr<const SegmentList>> lists;
  {
    const MutexLock lock(&mutex_);
    for (const Version& version : delivered_) lists.push_back(version.list);
    if (newest_.list != nullptr) lists.push_back(newest_.list);
    info.version_count = static_cast<uint32_t>(delivered_.size());
    info.revoked = state_ == State::kRevoked;
  }
  info.bytes = HeldBytes(lists);
  return info;
}

}  // namespace pqcached::kvstore
