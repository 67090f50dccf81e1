// Lease: the promise to one session that the bytes of one sequence stay in place.
//
// A lease follows its sequence. Each change of the sequence's list is a *version*; the client gets to
// know one by its attachment, and what a version names that was handed out stays in place until the
// client acknowledges a later one, or the lease ends. In between, the lease's words in the control
// memory say what a client may read: token_count is stored after version, so a client that loads
// token_count and then finds its own version has descriptors for all of these tokens.
//
// A lease that is *revoked* (somebody else rolled the sequence back, it was dropped or suspended, or
// the holder let it expire) follows no more, but holds what was handed out, until it ends.
//
// Thread-safe. Its lock may be held while the sequence's newest snapshot is read; watcher calls come
// with the sequence's events_mutex_ held.
#ifndef PQCACHED_KVSTORE_LEASE_H_
#define PQCACHED_KVSTORE_LEASE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/cache.h"
#include "kvstore/clock.h"
#include "kvstore/control_memory.h"
#include "kvstore/local_session.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence.h"

namespace pqcached::kvstore {

class Lease final : public SequenceWatcher, public std::enable_shared_from_this<Lease> {
 public:
  // Attachments that may be handed out and not be acknowledged.
  static constexpr size_t kMaxVersions = 64;

  struct Parts {
    uint64_t lease_id = 0;
    uint32_t word_index = 0;
    std::string session;
    std::shared_ptr<const ControlMemory> control;
    std::shared_ptr<const Cache> cache;
    std::shared_ptr<Sequence> sequence;
  };
  explicit Lease(Parts parts) : parts_(std::move(parts)) {}

  // Begins to follow; once, before anything else. Errors: kNotFound, kFailedPrecondition (suspended).
  absl::Status Begin();

  // Lets go of what was handed out before `known_version`, and hands out the newest version when it is
  // another one. A revoked lease has nothing newer.
  //
  // Errors: kInvalidArgument    known_version was never handed out
  //         kResourceExhausted  kMaxVersions
  absl::StatusOr<VersionedImage> Refresh(uint64_t known_version);

  // Revokes the lease when its holder has not refreshed it for longer than this.
  void RevokeIdle(absl::Duration timeout);

  // Lets go of everything and frees the words; the client reads no more. Later calls change nothing.
  void End();

  LeaseInfo Describe() const;
  uint64_t lease_id() const { return parts_.lease_id; }
  uint64_t sequence_id() const { return parts_.sequence->sequence_id(); }
  const std::string& session() const { return parts_.session; }
  uint32_t word_index() const { return parts_.word_index; }
  bool revoked() const;

  void OnPublish(const Snapshot& next) override;
  bool OnTruncate(uint32_t token_count, uint64_t own_lease) override;
  void OnSuspend(bool suspended) override;
  void OnDrop() override;

 private:
  enum class State : uint8_t { kFollowing, kRevoked, kEnded };
  struct Version {
    uint64_t version = 0;
    std::shared_ptr<const SegmentList> list;
  };

  void Follow(const Snapshot& next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Revoke() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  LeaseWords& words() const { return parts_.control->words(parts_.word_index); }

  const Parts parts_;
  const SteadyTime started_ = SteadyTime::Now();
  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kFollowing;
  SteadyTime refreshed_ ABSL_GUARDED_BY(mutex_) = started_;
  Version newest_ ABSL_GUARDED_BY(mutex_);                   // no list when revoked
  std::vector<Version> handed_out_ ABSL_GUARDED_BY(mutex_);  // ascending, not acknowledged away
  std::vector<uint32_t> layer_tokens_ ABSL_GUARDED_BY(mutex_);
  bool tail_left_ ABSL_GUARDED_BY(mutex_) = false;  // slots that it may look at are kept
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LEASE_H_
