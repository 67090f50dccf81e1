// DescriptorKeeper: keeps memory alive when this process dies.
//
// A process that is killed loses its mappings, but the memory behind them persists as long as
// another process or a directory holds a reference to it. A keeper is the connection to that
// holder: a supervisor, systemd's file-descriptor store, or a directory whose files outlive their
// creators.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_MEMORY_KEEPER_H_
#define PQCACHED_KVSTORE_MEMORY_KEEPER_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/local_session.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/memory/set_aside.h"

namespace pqcached::kvstore {

class DescriptorKeeper {
 public:
  static constexpr size_t kMaxNameBytes = 200;

  virtual ~DescriptorKeeper() = default;

  // Creates zeroed memory of at least `size_bytes` that can be kept: of a fixed size, with mode
  // 0600. `name`: the name under which it will be kept. The default implementation creates a memfd.
  //
  // Errors: kResourceExhausted  the kernel refuses
  virtual absl::StatusOr<FileDescriptor> CreateMemory(const char* name, size_t size_bytes);

  // Keeps a duplicate of `descriptor` until Release, even past the end of this process. The
  // duplicate is kept when the call returns. `name`: [A-Za-z0-9._-]{1,kMaxNameBytes}.
  //
  // Errors: kInvalidArgument    name
  //         kAlreadyExists      the name is in use
  //         kResourceExhausted  too many descriptors
  //         kUnavailable        the keeper does not answer
  virtual absl::Status Keep(std::string_view name, int descriptor) = 0;
  // Returns true when the keeper supports KeepMapped.
  virtual bool supports_mappings() const { return false; }
  // Does the same as Keep for memory that only mappings which exist when this returns can write
  // afterwards (WriteSeal::kFutureWrite): the keeper also keeps a mapping of it.
  //
  // REQUIRES: supports_mappings().
  virtual absl::Status KeepMapped(std::string_view name, int descriptor);
  // Returns the read-write mapping of memory that an earlier process kept by KeepMapped; empty when
  // there is none. The first caller takes it.
  virtual Mapping TakeMapping(std::string_view name);

  // Releases the descriptor. No error when the name is not in use.
  virtual absl::Status Release(std::string_view name) = 0;

  // Returns a duplicate of the descriptor kept under this name, which remains kept; invalid when
  // the name is not in use.
  virtual FileDescriptor Take(std::string_view name) const = 0;
  // Returns all names in use, sorted.
  virtual std::vector<std::string> Names() const = 0;
  // Returns the folders of files that were set aside because they could not be recovered, and the
  // bytes of memory behind them.
  virtual std::vector<SetAsideFolder> SetAsideFolders() const { return {}; }
  size_t SetAsideBytes() const;
};

// Returns true when `name` is a valid name for Keep.
bool IsKeeperName(std::string_view name);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_KEEPER_H_
