// LocalSequence is a sequence as one client reads it in mapped memory: its lease, and the images
// whose memory the lease protects.
//
// The lease is acquired at the first use. A newer image is part of an answer (Install) or is
// fetched (Refresh); a replaced image stays leased while it has a holder. A lease belongs to one
// worker: after that worker's end, the next use acquires a lease of the next worker, and data that
// was read before fails Check.
//
// Thread-safe. Fetches exclude each other; readers never wait for them.
#ifndef PQCACHED_CLIENT_LOCAL_SEQUENCE_H_
#define PQCACHED_CLIENT_LOCAL_SEQUENCE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "client/base/remote.h"
#include "client/local/image.h"
#include "client/local/session.h"
#include "kernels/base/mutex.h"
#include "kvstore/read/layout.h"
#include "pqcached/client.h"

namespace pqcached::client {

class LocalSequence {
 public:
  LocalSequence(std::shared_ptr<LocalSession> session, uint64_t cache_id, uint64_t sequence_id);
  ~LocalSequence();
  LocalSequence(const LocalSequence&) = delete;
  LocalSequence& operator=(const LocalSequence&) = delete;

  LocalSession& session() const { return *session_; }

  // Returns the newest image that the client has, with the lease epoch in which it may be read;
  // acquires the lease when there is none.
  //
  // Errors: the host's; PQC_INTERNAL (its answer is invalid); PQC_UNAVAILABLE (no worker in time)
  pqc_status Pin(std::shared_ptr<Image>* image, uint64_t* lease_epoch);
  // Like Pin, but without waiting: returns false when there is no image that may be read.
  bool TryPin(std::shared_ptr<Image>* image, uint64_t* lease_epoch) const;
  // Fetches the sidecar's newest image unconditionally. Acquires a new lease when the old one was
  // revoked, which ends the lease epoch.
  pqc_status Refresh(std::shared_ptr<Image>* image);
  // Installs an image from an answer to a call that named this lease. An invalid image is refused
  // and changes nothing; an image of a lease that is not held any more is ignored.
  pqc_status Install(const LeaseView& lease, const ImageBytes& bytes);

  // Returns the lease for Append, TruncateSequence and Attach, with the oldest image version in
  // use.
  LeaseView lease() const;
  // Releases the lease. While an image of it has a reader, the release is delayed until a later
  // call finds no reader, at the latest until the object's end.
  void Detach();

  // Returns the present number of tokens complete over all layers, without tokens beyond a
  // roll-back in progress. 0 before the lease is acquired.
  uint32_t token_count() const;
  // Returns the number of tokens, complete over all layers, that may be read through `image`. When
  // the sidecar has a newer image, that one may place later tokens elsewhere: for example behind a
  // segment that was closed before it was full.
  uint32_t ReadableTokens(Image& image) const;
  // Lets the newest image show the rows that are stored by now, also after the sidecar has made a
  // newer one. Called when rows are acknowledged, so that the next step need not fetch that one.
  void KnowStored();
  // Returns the number of a layer's rows that may be read through `image`.
  uint32_t VisibleTokens(Image& image, uint32_t layer) const;
  // Returns whether the present lease was revoked, or the sequence suspended.
  bool revoked() const { return HasFlag(kvstore::LeaseWords::kRevoked); }
  bool suspended() const { return HasFlag(kvstore::LeaseWords::kSuspended); }
  // Returns true when the sidecar has a newer image than the newest one here.
  bool HasNewer() const;

  // Checks that data read through a pinned image may be used: its worker lives (PQC_UNAVAILABLE),
  // the lease is valid (PQC_ABORTED: another holder shortened or dropped the sequence), the
  // sequence is not suspended (PQC_FAILED_PRECONDITION), and since `lease_epoch` nothing was rolled
  // back and no lease was replaced (PQC_ABORTED).
  pqc_status Check(uint64_t lease_epoch) const;
  // Like Check, for what a step has read: passes also when the worker of that epoch has ended and
  // its memory stays as it was. Sets *confirmed to false when the next worker serves, and this
  // client has no lease of it yet: only that lease shows that the sequence is still there, so a
  // check that sets true has to follow before results are used.
  //
  // REQUIRES: the sequence is in a step, so that this client changes none of its rows.
  pqc_status CheckInStep(uint64_t lease_epoch, bool* confirmed) const;
  // Returns the present lease epoch: a count of workers, leases and roll-backs.
  uint64_t lease_epoch() const { return lease_epoch_.load(std::memory_order_acquire); }

  // Returns the number of leading tokens whose rows and codes are unchanged since an earlier
  // lease_epoch(): a roll-back since then reduces it, another worker or lease makes it 0.
  uint32_t UnchangedSince(uint64_t lease_epoch) const;

  // Adds an event when the lease was revoked, or the sequence suspended, since the last call.
  void AddEvents();
  // Notes that this client suspends the sequence, or has resumed it: that is no event.
  void SetOwnSuspension(bool suspended);

  // Releases the lease and memory of an older link than `present`.
  void ReleaseOldLink(const LocalLink& present);

  // Bracket a roll-back to `token_count`: rows from there on are invalid until EndRollBack.
  // Roll-backs may overlap.
  void BeginRollBack(uint32_t token_count);
  void EndRollBack();

 private:
  // A lease to release when its images have no holders.
  struct Retired {
    uint64_t lease_id = 0;
    std::vector<std::weak_ptr<Image>> images;
  };
  // Step of lease_epoch_ for a new worker; leases and roll-backs count in the lower bits.
  static constexpr uint64_t kWorker = uint64_t{1} << 32;

  // What is known of the lease of the worker before the present one.
  struct Former {
    std::weak_ptr<LocalLink> link;  // which readers of its memory keep
    uint64_t lease_epoch = 0;       // at its end
    const kvstore::LeaseWords* words = nullptr;
  };

  pqc_status Fetch(bool force, std::shared_ptr<Image>* image, uint64_t* lease_epoch);
  // Fetches over a valid link.
  pqc_status FetchOver(const std::shared_ptr<LocalLink>& link, bool force,
                       std::shared_ptr<Image>* image, uint64_t* lease_epoch)
      PQCACHED_REQUIRES(fetch_mutex_);
  // Begins a lease epoch in which only the first `unchanged_tokens` are those of the last one.
  void BeginEpochLocked(uint32_t unchanged_tokens) PQCACHED_REQUIRES(mutex_);
  void ReplaceNewestLocked(std::shared_ptr<Image> image) PQCACHED_REQUIRES(mutex_);
  void ReleaseLinkLocked() PQCACHED_REQUIRES(mutex_);
  // Fixes the number of tokens that may be read through an image whose worker has ended.
  void KeepKnownLocked(Image& image) PQCACHED_REQUIRES(mutex_);
  // Returns whether what a step has read is as it was (CheckInStep).
  bool IsKeptLocked(uint64_t lease_epoch, bool* confirmed) const PQCACHED_REQUIRES(mutex_);
  bool HasValidImageLocked() const PQCACHED_REQUIRES(mutex_) { return newest_ && link_->IsValid(); }
  void DetachRetired();
  // Returns the lease's flags that have been set since the last call.
  uint32_t TakeNewFlags();
  bool HasFlag(uint32_t flag) const {
    const kvstore::LeaseWords* now = words();
    return now && (now->flags.load(std::memory_order_acquire) & flag) != 0;
  }
  const kvstore::LeaseWords* words() const { return words_.load(std::memory_order_acquire); }

  const std::shared_ptr<LocalSession> session_;  // shared with the client and other sequences
  const uint64_t cache_id_;
  const uint64_t sequence_id_;
  // Held for one Attach at a time.
  base::Mutex fetch_mutex_ PQCACHED_ACQUIRED_BEFORE(mutex_);
  std::atomic<const kvstore::LeaseWords*> words_ = nullptr;
  std::atomic<uint64_t> lease_epoch_ = 0;
  Events::Entry revoked_event_, suspended_event_;
  std::atomic<uint32_t> visible_limit_ = UINT32_MAX;
  // after a roll-back, the layer counts of images are outdated
  std::atomic<bool> layers_are_equal_ = false;

  mutable base::Mutex mutex_;
  uint64_t reported_lease_id_ PQCACHED_GUARDED_BY(mutex_) = 0;
  // The lease's flags that need no event any more.
  uint32_t reported_flags_ PQCACHED_GUARDED_BY(mutex_) = 0;
  bool own_suspension_ PQCACHED_GUARDED_BY(mutex_) = false;
  // Link of the lease; shared with the session.
  std::shared_ptr<LocalLink> link_ PQCACHED_GUARDED_BY(mutex_);
  // Control memory of all links so far: a reader may still be reading words there.
  std::vector<std::shared_ptr<Mapping>> controls_ PQCACHED_GUARDED_BY(mutex_);
  uint64_t lease_id_ PQCACHED_GUARDED_BY(mutex_) = 0;
  Former former_ PQCACHED_GUARDED_BY(mutex_);
  // Shared with readers.
  std::shared_ptr<Image> newest_ PQCACHED_GUARDED_BY(mutex_);
  // Images that may still have holders.
  std::vector<std::weak_ptr<Image>> replaced_ PQCACHED_GUARDED_BY(mutex_);
  std::vector<Retired> retired_ PQCACHED_GUARDED_BY(mutex_);
  uint32_t active_roll_backs_ PQCACHED_GUARDED_BY(mutex_) = 0;
  // tokens that the beginning of each of the latest lease epochs left unchanged, by epoch
  std::array<uint32_t, 16> unchanged_tokens_ PQCACHED_GUARDED_BY(mutex_) = {};
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_SEQUENCE_H_
