// Types of local access: the memory that a client on the same host maps, and the leases that it
// holds.
//
// A *local session* has control memory (read-only to the client) and at most one staging ring. A
// *lease* keeps the bytes of a sequence in place for its session: everything that an attachment
// named stays unchanged until the client acknowledges a newer version, detaches, or its session
// ends. A revoked lease is only marked and listed; its bytes are not reused before one of these
// events.
//
// Plain values; descriptors close themselves.
#ifndef PQCACHED_KVSTORE_LOCAL_SESSION_H_
#define PQCACHED_KVSTORE_LOCAL_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace pqcached::kvstore {

// Owns a file descriptor. Movable.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int descriptor) : descriptor_(descriptor) {}
  FileDescriptor(FileDescriptor&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~FileDescriptor();

  int get() const { return descriptor_; }
  bool valid() const { return descriptor_ >= 0; }
  // Returns the descriptor and gives up its ownership; the caller closes it.
  int Release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_ = -1;
};

struct SharedMemory {
  FileDescriptor descriptor;
  size_t size_bytes = 0;
};

struct SessionMemory {
  SharedMemory control;
  // Descriptor of the control memory for StoreOptions::keeper; invalid without a keeper. The caller
  // keeps it under a name.
  FileDescriptor keeper_control;
};

struct StagingReference {
  uint32_t slot = 0;
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
  // Higher than the generation of the last claim of the slot. A call that is repeated late, after
  // the client has written other bytes to the slot, is therefore refused.
  uint64_t generation = 0;
};

// Bytes of a claimed staging slot; the claim is released with this object. The client may write
// them concurrently: read each byte once, and check the bytes that were read.
struct StagedBytes {
  std::span<std::byte> bytes;
  std::span<std::byte> slot;  // the whole slot; other references of the call may use it
  std::shared_ptr<const void> claim;
};

struct LeaseState {
  uint64_t lease_id = 0;
  uint64_t known_version = 0;
};

// An encoded attachment (kvstore/read/attachment.h); empty = nothing newer.
struct VersionedImage {
  uint64_t version = 0;
  std::vector<std::byte> image;
};

struct AttachedSequence {
  uint64_t lease_id = 0;
  uint32_t word_index = 0;
  VersionedImage attachment;
};

struct LeaseInfo {
  uint64_t lease_id = 0;
  uint64_t sequence_id = 0;
  std::string session;
  double age_seconds = 0;
  size_t bytes = 0;  // size of the extents that the lease keeps in place
  uint32_t version_count = 0;
  bool revoked = false;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LOCAL_SESSION_H_
