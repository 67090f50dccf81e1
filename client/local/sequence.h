// LocalSequence: a sequence as one client reads it in mapped memory: its lease, and the images that
// the lease holds in place.
//
// The lease is taken at the first use. A newer image comes with answers (Install) or is fetched
// (Refresh); one that is replaced stays leased while somebody still holds it. Leases are of one worker:
// when it has ended, the next use takes one of the next worker, and what was read before fails Check.
//
// Thread-safe. Fetching excludes itself only; readers never wait for it.
#ifndef PQCACHED_CLIENT_LOCAL_SEQUENCE_H_
#define PQCACHED_CLIENT_LOCAL_SEQUENCE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "client/local/image.h"
#include "client/local/session.h"
#include "client/remote.h"
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

  // The newest image that is here; takes the lease when there is none.
  //
  // Errors: the host's; PQC_INTERNAL (what it answered does not fit); PQC_UNAVAILABLE (no worker in
  //         time)
  pqc_status Pin(std::shared_ptr<Image>* image);
  // Fetches what is newest now, whatever is here. Takes a new lease when the old one was revoked.
  pqc_status Refresh(std::shared_ptr<Image>* image);
  // What came with an answer to a call that named this lease. A wrong image is refused and changes
  // nothing; one of a lease that is not held any more is left.
  pqc_status Install(const LeaseView& lease, const ImageBytes& bytes);

  // Of Append, TruncateSequence and Attach: what the lease must keep.
  LeaseView lease() const;
  // Gives the lease back, or, while a reader still holds an image, when the next call finds that none
  // does, at the latest with the object's end.
  void Detach();

  // Tokens complete over all layers, now; those behind a roll-back under way are not counted.
  // 0 before the lease is taken.
  uint32_t token_count() const;
  // Rows of a layer that may be read by way of `image`.
  uint32_t VisibleTokens(const Image& image, uint32_t layer) const;
  // True when there is an image newer than the newest here.
  bool HasNewer() const;

  // That what was read by way of a pinned image may be used: its worker lives (PQC_UNAVAILABLE), the
  // lease stands (PQC_ABORTED: another holder shortened or dropped the sequence), the sequence is
  // not suspended (PQC_FAILED_PRECONDITION), and nothing was rolled back since `epoch`
  // (PQC_ABORTED).
  pqc_status Check(uint64_t epoch) const;
  // To be taken before anything is read.
  uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }

  // Tokens whose rows and codes are what they were at an earlier epoch(): rolled back since, or read by way of another
  // worker, means fewer.
  uint32_t UnchangedSince(uint64_t epoch) const;

  // There is another link than the one that the lease came over, whose memory is let go of.
  void LetGo(const LocalLink& present);

  // Around a roll-back to `token_count`: rows from there on mean nothing until EndRollBack. They may
  // overlap.
  void BeginRollBack(uint32_t token_count);
  void EndRollBack();

 private:
  // A lease that is to be given back when nobody holds its images.
  struct Retired {
    uint64_t lease_id = 0;
    std::vector<std::weak_ptr<Image>> images;
  };
  // In epoch_: roll-backs count below, workers from here on.
  static constexpr uint64_t kWorker = uint64_t{1} << 32;

  pqc_status Fetch(bool force, std::shared_ptr<Image>* image);
  // Over a link that stands.
  pqc_status FetchOver(const std::shared_ptr<LocalLink>& link, bool force,
                       std::shared_ptr<Image>* image);
  void KeepLocked(std::shared_ptr<Image> image);
  void LetGoLocked();
  bool StandsLocked() const { return newest_ && link_->Stands(); }
  void GiveBackRetired();
  const kvstore::LeaseWords* words() const { return words_.load(std::memory_order_acquire); }
  bool revoked() const;

  const std::shared_ptr<LocalSession> session_;  // shared with the client and other sequences
  const uint64_t cache_id_;
  const uint64_t sequence_id_;
  std::mutex fetch_mutex_;  // of one Attach at a time; before mutex_
  std::atomic<const kvstore::LeaseWords*> words_ = nullptr;
  std::atomic<uint64_t> epoch_ = 0;
  std::atomic<uint32_t> visible_limit_ = UINT32_MAX;
  std::atomic<bool> layers_are_equal_ = false;  // since a roll-back: layer counts of images are old

  mutable std::mutex mutex_;
  std::shared_ptr<LocalLink> link_;  // that the lease came over; shared with the session
  // Of all links so far: a reader may still be looking at words there.
  std::vector<std::shared_ptr<Mapping>> controls_;
  uint64_t lease_id_ = 0;
  std::shared_ptr<Image> newest_;               // shared with readers
  std::vector<std::weak_ptr<Image>> replaced_;  // that somebody may still hold
  std::vector<Retired> retired_;
  uint32_t roll_backs_under_way_ = 0;
  std::array<uint32_t, 16> roll_back_ends_ = {};  // of the last ones, by the epoch that each began
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_SEQUENCE_H_
