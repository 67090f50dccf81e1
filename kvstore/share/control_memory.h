// ControlMemory: the words of one local session that its client reads without an rpc.
//
// A memfd that holds a ControlPage, then slot words (completion counters) and LeaseWords
// (read/layout.h). Only this process writes it while the process lives. End notifies the client:
// boot_word becomes 0 and waiters wake. The rest of the first page, which clients do not read,
// lists the caches whose pools the client has received: the next process reads there which memory
// the client may still map.
//
// Thread-safe: the words are atomic; the caller orders concurrent writers of the same word.
#ifndef PQCACHED_KVSTORE_SHARE_CONTROL_MEMORY_H_
#define PQCACHED_KVSTORE_SHARE_CONTROL_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>

#include "absl/status/statusor.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

class ControlMemory {
 public:
  // Returns the size of the memory.
  static size_t SizeBytes(uint32_t word_count);

  // Creates the memory. With a keeper, it is of the keeper's kind, or a memfd where the keeper's
  // volume is full, because a client must be able to resume its session then. The supervisor can
  // keep it and call EndControlMemory after this process has ended: the memory is not sealed
  // against other writers.
  //
  // Errors: kResourceExhausted  the kernel refuses
  static absl::StatusOr<std::unique_ptr<ControlMemory>> Create(uint32_t word_count,
                                                               uint64_t boot_word,
                                                               DescriptorKeeper* keeper = nullptr);
  ~ControlMemory();
  ControlMemory(const ControlMemory&) = delete;
  ControlMemory& operator=(const ControlMemory&) = delete;

  absl::StatusOr<SharedMemory> Share() const;
  // Returns a writable descriptor of the same memory, for a keeper.
  absl::StatusOr<FileDescriptor> ShareWithKeeper() const { return Duplicate(memfd_.get()); }

  uint32_t word_count() const { return page().word_count; }
  // REQUIRES: index < word_count().
  LeaseWords& words(uint32_t index) const {
    return reinterpret_cast<LeaseWords*>(mapping_.data() + page().words_offset_bytes)[index];
  }
  // REQUIRES: slot < kMaxStagingSlots.
  std::atomic<uint64_t>& slot_word(uint32_t slot) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(mapping_.data() +
                                                    page().slot_words_offset_bytes)[slot];
  }
  // Increments wake_word and wakes all waiters. Called after the words were written.
  void Wake() const;
  // Sets boot_word to 0 and wakes waiters, after which the client uses no more results from mapped
  // memory.
  void End() const;
  // Adds a cache to the list of those whose pools the client has received. Called before it
  // receives the pool, by one thread at a time.
  void NotePool(uint64_t cache_id) const;

 private:
  ControlMemory(FileDescriptor memfd, Mapping mapping)
      : memfd_(std::move(memfd)), mapping_(std::move(mapping)) {}
  ControlPage& page() const { return *reinterpret_cast<ControlPage*>(mapping_.data()); }

  const FileDescriptor memfd_;
  const Mapping mapping_;
};

// Does the same as ControlMemory::End on the memory of a worker that has ended, and records in it
// that the worker has ended, unless the worker itself ended the session. The supervisor calls it
// with a writable descriptor that it kept. Returns false and changes nothing when the memory is no
// control memory or cannot be written. Idempotent.
bool EndControlMemory(int descriptor);
// Records in the control memory of a worker that has ended that the next worker serves from now on.
// No effect on memory that is no control memory or cannot be written.
void MarkSuccessor(int descriptor);

// The caches whose pools a client has received over one connection.
struct OpenedPools {
  bool any = true;               // the list is not known, or too long: it may be any cache
  std::set<uint64_t> cache_ids;  // when `any` is false

  bool MayInclude(uint64_t cache_id) const { return any || cache_ids.contains(cache_id); }
};

// Reads the list of NotePool from the control memory of a worker that has ended.
OpenedPools OpenedPoolsOf(int descriptor);
// Removes a cache from that list, because its pool is in other memory now.
void ForgetOpenedPool(int descriptor, uint64_t cache_id);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SHARE_CONTROL_MEMORY_H_
