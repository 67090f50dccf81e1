#include "client/local/sequence.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "client/base/error.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {

using kvstore::LeaseWords;

namespace {

// Calls that fail although the worker lives are repeated so many times.
constexpr int kMostRepeats = 3;
constexpr std::chrono::milliseconds kRepeatPause(10);

}  // namespace

LocalSequence::LocalSequence(std::shared_ptr<LocalSession> session, uint64_t cache_id,
                             uint64_t sequence_id)
    : session_(std::move(session)),
      cache_id_(cache_id),
      sequence_id_(sequence_id),
      revoked_event_(PQC_EVENT_SEQUENCE_REVOKED, sequence_id),
      suspended_event_(PQC_EVENT_SEQUENCE_SUSPENDED, sequence_id) {
  session_->Add(*this);
}

bool LocalSequence::TryPin(std::shared_ptr<Image>* image, uint64_t* lease_epoch) const {
  const base::MutexLock lock(&mutex_);
  if (!HasValidImageLocked() || revoked()) return false;
  *image = newest_;
  *lease_epoch = this->lease_epoch();  // both under the lock: no roll-back begins in between
  return true;
}

pqc_status LocalSequence::Pin(std::shared_ptr<Image>* image, uint64_t* lease_epoch) {
  if (TryPin(image, lease_epoch)) return PQC_OK;
  return Fetch(/*force=*/false, image, lease_epoch);
}

pqc_status LocalSequence::Refresh(std::shared_ptr<Image>* image) {
  uint64_t lease_epoch = 0;
  return Fetch(/*force=*/true, image, &lease_epoch);
}

pqc_status LocalSequence::Fetch(bool force, std::shared_ptr<Image>* image, uint64_t* lease_epoch) {
  const base::MutexLock fetching(&fetch_mutex_);
  for (int repeats = 0;;) {
    // Another thread may have just fetched it.
    if (!force && TryPin(image, lease_epoch)) return PQC_OK;
    std::shared_ptr<LocalLink> link;
    RETURN_IF_ERROR(session_->Attached(&link));
    const pqc_status status = FetchOver(link, force, image, lease_epoch);
    if (status == PQC_OK) return PQC_OK;
    // The failure may be a consequence of the worker's end. Another worker may start in time.
    if (!link->CheckAlive()) continue;
    // The lease that the call has named may have been revoked since its words were read.
    if (status == PQC_FAILED_PRECONDITION && revoked() && ++repeats <= kMostRepeats) continue;
    // The call may have been made over a connection to the worker before.
    if (status != PQC_UNAVAILABLE || ++repeats > kMostRepeats) return status;
    std::this_thread::sleep_for(kRepeatPause);
  }
}

pqc_status LocalSequence::FetchOver(const std::shared_ptr<LocalLink>& link, bool force,
                                    std::shared_ptr<Image>* image, uint64_t* lease_epoch) {
  std::shared_ptr<Mapping> pool;
  RETURN_IF_ERROR(link->Pool(cache_id_, &pool));
  {
    const base::MutexLock lock(&mutex_);
    if (link_ != link) {
      ReleaseLinkLocked();
      link_ = link;
      controls_.push_back(link->control());
    }
  }
  if (revoked()) {
    AddEvents();  // before the watcher looks
    Detach();
  }
  DetachRetired();

  uint64_t epoch = 0;
  bool rolls_back = false;
  {
    const base::MutexLock lock(&mutex_);
    epoch = this->lease_epoch();
    rolls_back = active_roll_backs_ > 0;
  }
  AttachAnswer answer;
  LeaseView known = lease();
  if (force) known.known_version = 0;  // requests an image even if layers have only grown
  known.boot_word = link->boot_word();
  RETURN_IF_ERROR(link->host().Attach(sequence_id_, known, &answer));
  const LeaseWords* found = nullptr;
  pqc_status status = link->Words(answer.word_index, &found);
  if (status == PQC_OK && found->lease_id.load(std::memory_order_acquire) != answer.lease_id) {
    status = Fail(PQC_INTERNAL, "", "lease: its words belong to another lease");
  }
  std::shared_ptr<Image> fetched;
  if (status == PQC_OK && answer.image.version != 0) {
    status = Image::Parse(answer.image.image, sequence_id_, std::move(pool), &fetched);
  }
  const base::MutexLock lock(&mutex_);
  if (link_ != link)
    return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "the sidecar's worker has ended"));
  if (lease_id_ == 0) session_->CountLease(1);
  lease_id_ = answer.lease_id;
  if (status != PQC_OK) return status;
  words_.store(found, std::memory_order_release);
  // An image that another answer has overtaken names memory that may have been acknowledged.
  if (fetched && !(newest_ && newest_->version() > fetched->version())) {
    // The image may have the same version, but it is newer: it includes rows that layers have
    // gained since. Its layer counts are outdated when it may be older than a roll-back.
    layers_are_equal_ = rolls_back || epoch != this->lease_epoch();
    if (layers_are_equal_) fetched->known_tokens().Limit(0);
    ReplaceNewestLocked(std::move(fetched));
  }
  *image = newest_;
  *lease_epoch = this->lease_epoch();
  return newest_ ? PQC_OK : Fail(PQC_INTERNAL, "", "Attach: the answer has no attachment");
}

void LocalSequence::ReleaseOldLink(const LocalLink& present) {
  const base::MutexLock lock(&mutex_);
  if (link_ && link_.get() != &present) ReleaseLinkLocked();
}

void LocalSequence::ReleaseLinkLocked() {
  if (!link_) return;
  if (lease_id_ != 0) session_->CountLease(-1);
  lease_id_ = 0;  // the lease ended with its worker
  if (newest_) KeepKnownLocked(*newest_);
  for (const std::weak_ptr<Image>& old : replaced_) {
    if (const std::shared_ptr<Image> held = old.lock()) KeepKnownLocked(*held);
  }
  former_ = {.link = link_, .lease_epoch = lease_epoch(), .words = words()};
  newest_.reset();
  replaced_.clear();
  retired_.clear();
  words_.store(nullptr, std::memory_order_release);
  link_.reset();
  lease_epoch_.fetch_add(kWorker, std::memory_order_acq_rel);
  if (active_roll_backs_ == 0) visible_limit_.store(UINT32_MAX, std::memory_order_release);
}

void LocalSequence::KeepKnownLocked(Image& image) {
  ReadableTokens(image);
  image.SetFormer();
}

void LocalSequence::ReplaceNewestLocked(std::shared_ptr<Image> image) {
  if (newest_) replaced_.push_back(newest_);
  newest_ = std::move(image);
  std::erase_if(replaced_, [](const std::weak_ptr<Image>& old) { return old.expired(); });
}

pqc_status LocalSequence::Install(const LeaseView& lease, const ImageBytes& bytes) {
  if (bytes.version == 0) return PQC_OK;
  std::shared_ptr<LocalLink> link;
  {
    const base::MutexLock lock(&mutex_);
    if (newest_ && newest_->version() >= bytes.version) return PQC_OK;
    link = link_;
  }
  if (!link || link->boot_word() != lease.boot_word) return PQC_OK;
  std::shared_ptr<Mapping> pool;
  RETURN_IF_ERROR(link->Pool(cache_id_, &pool));
  std::shared_ptr<Image> image;
  RETURN_IF_ERROR(Image::Parse(bytes.image, sequence_id_, std::move(pool), &image));
  const base::MutexLock lock(&mutex_);
  if (link_ != link || lease_id_ != lease.lease_id) return PQC_OK;
  if (newest_ && newest_->version() >= image->version()) return PQC_OK;
  layers_are_equal_ = active_roll_backs_ > 0;  // the answer may be older than the roll-back
  if (layers_are_equal_) image->known_tokens().Limit(0);
  ReplaceNewestLocked(std::move(image));
  return PQC_OK;
}

LeaseView LocalSequence::lease() const {
  const base::MutexLock lock(&mutex_);
  if (!link_ || !link_->IsValid()) return {};
  const uint64_t boot_word = link_->boot_word();
  if (!newest_) return {.lease_id = lease_id_, .known_version = 0, .boot_word = boot_word};
  uint64_t oldest = newest_->version();
  for (const std::weak_ptr<Image>& old : replaced_) {
    if (const std::shared_ptr<Image> held = old.lock()) oldest = std::min(oldest, held->version());
  }
  return {.lease_id = lease_id_, .known_version = oldest, .boot_word = boot_word};
}

void LocalSequence::Detach() {
  {
    const base::MutexLock lock(&mutex_);
    if (lease_id_ != 0) {
      Retired retired{.lease_id = lease_id_, .images = std::move(replaced_)};
      if (newest_) retired.images.push_back(newest_);
      retired_.push_back(std::move(retired));
      BeginEpochLocked(0);
      session_->CountLease(-1);
    }
    lease_id_ = 0;
    newest_.reset();
    replaced_.clear();
    words_.store(nullptr, std::memory_order_release);
  }
  DetachRetired();
}

void LocalSequence::DetachRetired() {
  std::vector<uint64_t> unused;
  std::shared_ptr<LocalLink> link;
  {
    const base::MutexLock lock(&mutex_);
    link = link_;
    std::erase_if(retired_, [&](const Retired& retired) {
      const bool held = std::any_of(retired.images.begin(), retired.images.end(),
                                    [](const auto& image) { return !image.expired(); });
      if (!held) unused.push_back(retired.lease_id);
      return !held;
    });
  }
  // A lease that is not released here ends with the session or its worker.
  for (const uint64_t lease_id : unused) {
    if (link && link->IsValid() && !session_->closed()) {
      link->host().Detach({.lease_id = lease_id, .boot_word = link->boot_word()});
    }
  }
}

LocalSequence::~LocalSequence() {
  session_->Remove(*this);
  session_->events()->Remove(revoked_event_);
  session_->events()->Remove(suspended_event_);
  Detach();
}

uint32_t LocalSequence::TakeNewFlags() {
  const base::MutexLock lock(&mutex_);
  if (reported_lease_id_ != lease_id_) reported_flags_ = 0;
  reported_lease_id_ = lease_id_;
  const LeaseWords* now = words();
  const uint32_t flags = now ? now->flags.load(std::memory_order_acquire) : 0;
  const uint32_t added = own_suspension_ ? 0 : flags & ~reported_flags_;
  reported_flags_ = flags;
  return added;
}

void LocalSequence::AddEvents() {
  const uint32_t added = TakeNewFlags();
  if (added & LeaseWords::kSuspended) {  // which has revoked the lease, too
    session_->events()->AddIfWanted(suspended_event_);
  } else if (added & LeaseWords::kRevoked) {
    session_->events()->AddIfWanted(revoked_event_);
  }
}

void LocalSequence::SetOwnSuspension(bool suspended) {
  AddEvents();  // of what happened before
  const base::MutexLock lock(&mutex_);
  own_suspension_ = suspended;
}

uint32_t LocalSequence::token_count() const {
  for (const LeaseWords* now = words(); now;) {
    // The order matters: if the limit is already gone, the words are newer than the roll-back.
    const uint32_t limit = visible_limit_.load(std::memory_order_acquire);
    const uint32_t count = now->token_count.load(std::memory_order_acquire);
    const LeaseWords* const read = std::exchange(now, words());
    if (now == read) return std::min(count, limit);
  }
  return 0;
}

uint32_t LocalSequence::ReadableTokens(Image& image) const {
  const KnownTokens::Value known = image.known_tokens().Load();
  const LeaseWords* now = words();
  const uint32_t stored = std::min(token_count(), image.capacity_tokens());
  // The order matters: an image is marked before the words of its worker are released.
  if (image.is_former()) return image.known_tokens().Load().tokens;
  // The order matters: the sidecar writes a version before the first count that belongs to it.
  if (!now || now->version.load(std::memory_order_acquire) > image.version()) {
    return std::min(stored, known.tokens);
  }
  image.known_tokens().Raise(known, stored);
  return stored;
}

void LocalSequence::KnowStored() {
  std::shared_ptr<Image> image;
  {
    const base::MutexLock lock(&mutex_);
    image = newest_;
  }
  if (image) ReadableTokens(*image);
}

uint32_t LocalSequence::VisibleTokens(Image& image, uint32_t layer) const {
  uint32_t tokens = ReadableTokens(image);
  if (image.is_former()) return tokens;
  if (!layers_are_equal_.load(std::memory_order_acquire)) {
    const uint32_t limit = visible_limit_.load(std::memory_order_acquire);
    tokens = std::max(tokens, std::min({image.LayerTokens(layer), limit, image.capacity_tokens()}));
  }
  return tokens;
}

bool LocalSequence::HasNewer() const {
  const LeaseWords* now = words();
  if (!now) return true;
  const uint64_t version = now->version.load(std::memory_order_acquire);
  const base::MutexLock lock(&mutex_);
  return !newest_ || newest_->version() < version;
}

pqc_status LocalSequence::Check(uint64_t lease_epoch) const {
  RETURN_IF_ERROR(session_->Check());
  const uint64_t present = this->lease_epoch();
  if (present / kWorker != lease_epoch / kWorker) {
    return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "the sidecar's worker was replaced"));
  }
  const LeaseWords* now = words();
  if (!now) return SetRetry(kRetryConflict, Fail(PQC_ABORTED, "sequence", "its lease has ended"));
  const uint32_t flags = now->flags.load(std::memory_order_acquire);
  if (flags & LeaseWords::kSuspended) {
    return Fail(PQC_FAILED_PRECONDITION, "sequence", "it is suspended; resume it first");
  }
  if (flags & LeaseWords::kRevoked) {
    return SetRetry(kRetryConflict, Fail(PQC_ABORTED, "sequence",
                                         "its lease was revoked: it was shortened or dropped"));
  }
  if (present != lease_epoch) {
    return SetRetry(kRetryConflict,
                    Fail(PQC_ABORTED, "sequence",
                         "it was rolled back, or its lease replaced, during the call"));
  }
  return PQC_OK;
}

bool LocalSequence::IsKeptLocked(uint64_t lease_epoch, bool* confirmed) const {
  using Memory = LocalLink::Memory;
  const uint64_t present = this->lease_epoch();
  const bool is_former = present == lease_epoch + kWorker && former_.lease_epoch == lease_epoch;
  if (present != lease_epoch && !is_former) return false;
  const LeaseWords* const read = is_former ? former_.words : words();
  const std::shared_ptr<LocalLink> link = is_former ? former_.link.lock() : link_;
  if (!link || !read || read->flags.load(std::memory_order_acquire) != 0) return false;
  const Memory memory = link->CheckMemory();
  if (memory == Memory::kGone) return false;
  if (!is_former) {
    *confirmed = memory != Memory::kSucceeded;
    return true;
  }
  const LeaseWords* const next = words();
  *confirmed = next != nullptr;
  if (!next) return true;
  const Memory next_memory = link_->CheckMemory();
  return next->flags.load(std::memory_order_acquire) == 0 &&
         (next_memory == Memory::kServed || next_memory == Memory::kKept);
}

pqc_status LocalSequence::CheckInStep(uint64_t lease_epoch, bool* confirmed) const {
  *confirmed = true;
  const pqc_status status = Check(lease_epoch);
  if (status != PQC_UNAVAILABLE || session_->lost()) return status;
  const base::MutexLock lock(&mutex_);
  if (!IsKeptLocked(lease_epoch, confirmed)) return status;
  ClearLastError();
  return PQC_OK;
}

void LocalSequence::BeginRollBack(uint32_t token_count) {
  const base::MutexLock lock(&mutex_);
  ++active_roll_backs_;
  visible_limit_.store(std::min(visible_limit_.load(), token_count), std::memory_order_release);
  layers_are_equal_.store(true, std::memory_order_release);
  if (newest_) newest_->known_tokens().Limit(token_count);
  BeginEpochLocked(token_count);
}

void LocalSequence::BeginEpochLocked(uint32_t unchanged_tokens) {
  const uint64_t begun = lease_epoch_.fetch_add(1, std::memory_order_acq_rel) + 1;
  unchanged_tokens_[begun % unchanged_tokens_.size()] = unchanged_tokens;
}

uint32_t LocalSequence::UnchangedSince(uint64_t lease_epoch) const {
  const base::MutexLock lock(&mutex_);
  const uint64_t present = this->lease_epoch();
  if (present / kWorker != lease_epoch / kWorker ||
      present - lease_epoch > unchanged_tokens_.size())
    return 0;
  uint32_t unchanged = UINT32_MAX;
  for (uint64_t begun = lease_epoch + 1; begun <= present; ++begun) {
    unchanged = std::min(unchanged, unchanged_tokens_[begun % unchanged_tokens_.size()]);
  }
  return unchanged;
}

void LocalSequence::EndRollBack() {
  const base::MutexLock lock(&mutex_);
  if (--active_roll_backs_ > 0) return;
  // The words of a worker that has ended do not show a roll-back that the next one has made: the
  // limit stays until they are released.
  if (link_ && !link_->CheckAlive()) return;
  visible_limit_.store(UINT32_MAX, std::memory_order_release);
}

}  // namespace pqcached::client
