// Words of local access: what a client on the same host gets to map, and what it holds.
//
// A *local session* has control memory (read-only to it) and at most one staging ring. A *lease*
// keeps the bytes of a sequence in place for its session: everything that an attachment named stays
// as it is until the client acknowledges a newer version, detaches, or its session ends. A lease that
// is revoked is only marked and listed; its bytes are not reused before that.
//
// Plain values; descriptors close by themselves.
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
  // The caller's to close.
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
  // The same, for StoreOptions::keeper; invalid without one. The caller keeps it under a name.
  FileDescriptor kept_control;
};

struct StagingReference {
  uint32_t slot = 0;
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
  // Higher than that of the last claim of the slot: so a call that is repeated late, when the client
  // has put other bytes there, is refused.
  uint64_t generation = 0;
};

// Bytes of a staging slot. A claim lives as long as this. The client may write them meanwhile: read each
// byte once, check what was read.
struct StagedBytes {
  std::span<const std::byte> bytes;
  std::span<const std::byte> slot;  // all of it: what other references of the call to it mean
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
  size_t bytes = 0;  // of the extents that it keeps in place
  uint32_t version_count = 0;
  bool revoked = false;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LOCAL_SESSION_H_
