// TokenFile maps the tokens of clients to their identities. Its file has a line for each token, and
// comments:
//
//   # of the engines of team a
//   3f9a61c0b7d84e25 pqcached://tenant/team-a
//
// A change of the file takes effect with the next Find. While the file is missing or malformed no
// token is valid, because the withdrawn ones cannot be known.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_SESSION_TOKEN_FILE_H_
#define PQCACHED_SERVICE_SESSION_TOKEN_FILE_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/mutex.h"
#include "service/base/log.h"
#include "service/base/watched_file.h"
#include "service/session/identity.h"

namespace pqcached::service {

using TokenMap = absl::flat_hash_map<std::string, Identity>;

// Errors: kInvalidArgument  a line is malformed (the message has its number, and no token)
absl::StatusOr<TokenMap> ParseTokens(absl::string_view text);

class TokenFile {
 public:
  // `log` outlives the object.
  //
  // Errors: kFailedPrecondition  the file cannot be read, or is malformed
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(std::string path, const Log& log);

  // Returns the identity of a token, by the file as it is now.
  //
  // Errors: kUnauthenticated  the token is unknown, or was withdrawn
  absl::StatusOr<Identity> Find(absl::string_view token);

 private:
  TokenFile(std::string path, const Log& log) : log_(log), file_(std::move(path)) {}
  // Reads the file again. Returns whether it is another one than before.
  bool Reload() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Log& log_;
  kvstore::Mutex mutex_;
  WatchedFile file_ ABSL_GUARDED_BY(mutex_);
  std::optional<std::string> text_ ABSL_GUARDED_BY(mutex_);  // none: it could not be read
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  TokenMap tokens_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_TOKEN_FILE_H_
