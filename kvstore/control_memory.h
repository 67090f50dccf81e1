// ControlMemory: the words of one local session that its client reads without an rpc.
//
// A memfd with a ControlPage, slot words and LeaseWords (read/layout.h) behind it. Nobody but this process writes
// it while it lives. Its end tells the client: boot_word becomes 0 and waiters wake.
//
// Thread-safe: the words are atomic; who writes which is the caller's to order.
#ifndef PQCACHED_KVSTORE_CONTROL_MEMORY_H_
#define PQCACHED_KVSTORE_CONTROL_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kvstore/keeper.h"
#include "kvstore/memfd.h"
#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

class ControlMemory {
 public:
  // With a keeper its memory can be kept, and then EndControlMemory be called by whoever keeps it; so
  // it is not sealed against other writers.
  //
  // Errors: kResourceExhausted  the kernel refuses
  static absl::StatusOr<std::unique_ptr<ControlMemory>> Create(uint32_t word_count,
                                                               uint64_t boot_word,
                                                               DescriptorKeeper* keeper = nullptr);
  ~ControlMemory();
  ControlMemory(const ControlMemory&) = delete;
  ControlMemory& operator=(const ControlMemory&) = delete;

  absl::StatusOr<SharedMemory> Share() const;
  // Of the same memory, for a keeper.
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
  // Raises wake_word and wakes who waits for it; after the words were written.
  void Wake() const;
  // From now on the client takes nothing more from what it mapped.
  void End() const;

 private:
  ControlMemory(FileDescriptor memfd, Mapping mapping)
      : memfd_(std::move(memfd)), mapping_(std::move(mapping)) {}
  ControlPage& page() const { return *reinterpret_cast<ControlPage*>(mapping_.data()); }

  const FileDescriptor memfd_;
  const Mapping mapping_;
};

// As ControlMemory::End, on memory whose worker has ended, by whoever kept a descriptor that may write.
// False when it is no control memory, or may not be written; then nothing is changed. May be done again.
bool EndControlMemory(int descriptor);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_CONTROL_MEMORY_H_
