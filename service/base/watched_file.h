// WatchedFile finds out whether a small file has been replaced or written since it was last read.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_BASE_WATCHED_FILE_H_
#define PQCACHED_SERVICE_BASE_WATCHED_FILE_H_

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/clock.h"

namespace pqcached::service {

class WatchedFile {
 public:
  // Reads of larger files are refused.
  static constexpr size_t kMaxBytes = size_t{1} << 20;

  explicit WatchedFile(std::string path) : path_(std::move(path)) {}

  // Returns true when the file differs from the one at the last call that returned true, or may
  // differ: the clock of the file system is coarse, so a file that was just written counts as
  // changed for a moment, and once more after that.
  bool MayHaveChanged();

  // Makes the next MayHaveChanged return true: what was read is of no use.
  void Forget() { stamp_ = {-1}; }

  // Errors: kFailedPrecondition  the file cannot be read, or is larger than kMaxBytes
  absl::StatusOr<std::string> Read() const;

  const std::string& path() const { return path_; }

 private:
  using Stamp = std::array<int64_t, 7>;  // device, number, size and times; all 0: there is no file

  Stamp StampOf() const;

  std::string path_;
  Stamp stamp_ = {-1};           // that of no file
  kvstore::SteadyTime settled_;  // the stamp is reliable from this time on
  bool read_settled_ = false;    // MayHaveChanged has returned true since then
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_WATCHED_FILE_H_
