// DescriptorKeeper: who holds memory when this process dies.
//
// A process that is killed loses its mappings, not the memory behind them, as long as somebody else
// holds a descriptor of it. A keeper is the line to that somebody: a supervisor, systemd's
// file-descriptor store, or a directory whose files outlive their makers.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_KEEPER_H_
#define PQCACHED_KVSTORE_KEEPER_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/local_session.h"
#include "kvstore/memfd.h"

namespace pqcached::kvstore {

class DescriptorKeeper {
 public:
  static constexpr size_t kMaxNameBytes = 200;

  virtual ~DescriptorKeeper() = default;

  // Makes zeroed memory of at least `size_bytes` that may be kept: of a fixed size, with mode 0600.
  // `name`: that it is going to be kept under. Here a memfd.
  //
  // Errors: kResourceExhausted  the kernel refuses
  virtual absl::StatusOr<FileDescriptor> CreateMemory(const char* name, size_t size_bytes);

  // Keeps a duplicate of `descriptor` until Release, also beyond the end of this process. It is kept
  // when this returns. `name`: [A-Za-z0-9._-]{1,kMaxNameBytes}.
  //
  // Errors: kInvalidArgument    name
  //         kAlreadyExists      something is kept under this name
  //         kResourceExhausted  too many descriptors
  //         kUnavailable        whoever keeps does not answer
  virtual absl::Status Keep(std::string_view name, int descriptor) = 0;
  // Whether KeepMapped can.
  virtual bool keeps_mappings() const { return false; }
  // As Keep, of memory that only mappings which exist when this returns may write afterwards
  // (LaterWriters::kNever): a mapping of it is kept, too.
  //
  // REQUIRES: keeps_mappings().
  virtual absl::Status KeepMapped(std::string_view name, int descriptor);
  // The mapping of what an earlier process kept so, for reading and writing; whoever asks first gets
  // it. Empty: there is none.
  virtual Mapping TakeMapping(std::string_view name);

  // Lets go of it. No error when nothing is kept under this name.
  virtual absl::Status Release(std::string_view name) = 0;

  // A duplicate of what is kept under this name, which stays kept; invalid when there is nothing.
  virtual FileDescriptor Take(std::string_view name) const = 0;
  // Of everything that is kept, sorted.
  virtual std::vector<std::string> Names() const = 0;
};

// Whether something may be kept under this name.
bool IsKeeperName(std::string_view name);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_KEEPER_H_
