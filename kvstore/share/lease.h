// Lease: the guarantee to one session that the bytes of one sequence stay in place.
//
// A lease follows its sequence. Each change of the sequence's segment list is a *version*, which
// the client receives as an attachment. Everything that a delivered version names stays in place
// until the client acknowledges a later version, or the lease ends. Between deliveries, the lease's
// words in the control memory state what the client may read: token_count is stored after version,
// so a client that loads token_count and then finds its own version has descriptors for all of
// these tokens.
//
// A *revoked* lease (another holder truncated the sequence, the sequence was dropped or suspended,
// or the lease expired because its holder did not refresh it) no longer follows the sequence, but
// keeps the delivered versions until it ends.
//
// Thread-safe. Its lock may be held while the sequence's newest snapshot is read; watcher calls are
// made with the sequence's events_mutex_ held.
#ifndef PQCACHED_KVSTORE_SHARE_LEASE_H_
#define PQCACHED_KVSTORE_SHARE_LEASE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/local_session.h"
#include "kvstore/mutex.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"
#include "kvstore/share/control_memory.h"

namespace pqcached::kvstore {

class Lease final : public SequenceWatcher, public std::enable_shared_from_this<Lease> {
 public:
  // Maximum number of attachments that are delivered but not acknowledged.
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

  // Begins to follow the sequence. Called once, before all other functions. Errors: kNotFound,
  // kFailedPrecondition (suspended).
  absl::Status Begin();

  // Releases the versions delivered before `known_version`, and returns the newest version if it
  // differs from `known_version`. A revoked lease has no newer version.
  //
  // Errors: kInvalidArgument    known_version was never delivered
  //         kResourceExhausted  kMaxVersions
  //         kNotFound           the lease has ended
  absl::StatusOr<VersionedImage> Refresh(uint64_t known_version);

  // Revokes the lease when its holder has not refreshed it for longer than `timeout`. Returns
  // whether it has done so now.
  bool RevokeIfExpired(absl::Duration timeout);

  // Releases all versions and clears the words; the client no longer reads. Idempotent.
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
  Version newest_ ABSL_GUARDED_BY(mutex_);                  // no list when revoked
  std::vector<Version> delivered_ ABSL_GUARDED_BY(mutex_);  // ascending, not acknowledged
  std::vector<uint32_t> layer_tokens_ ABSL_GUARDED_BY(mutex_);
  // True after a truncation that left the client its slots of the active segment, which are then
  // not written again.
  bool tail_preserved_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SHARE_LEASE_H_
