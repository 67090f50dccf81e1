// TlsContext holds the certificate, the key and the client CA of TLS connections, as OpenSSL uses
// them, and reads their files again when they change.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_TLS_TLS_CONTEXT_H_
#define PQCACHED_SERVICE_TLS_TLS_CONTEXT_H_

#include <openssl/ssl.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "service/base/log.h"
#include "service/base/watched_file.h"

namespace pqcached::service {

struct TlsFiles {
  std::string certificate;  // PEM: the certificate of the sidecar, then those between it and its CA
  std::string key;
  std::string client_ca;              // empty: clients have no certificates
  bool certificate_required = false;  // clients without one are refused
};

class TlsContext {
 public:
  // `log` outlives the object.
  //
  // Errors: kFailedPrecondition  a file cannot be read or is not valid (tls_certificate, tls_key,
  //                              tls_client_ca)
  static absl::StatusOr<std::unique_ptr<TlsContext>> Load(TlsFiles files, const Log& log);

  // Returns the context for the next handshake. Files that have changed are read first; when they
  // are not valid, the log says so and the context is the last valid one.
  SSL_CTX* Current();

 private:
  struct Deleter {
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };
  using Pointer = std::unique_ptr<SSL_CTX, Deleter>;

  TlsContext(TlsFiles files, const Log& log);
  static absl::StatusOr<Pointer> Make(const TlsFiles& files);
  std::vector<std::string> ReadFiles() const;

  const TlsFiles files_;
  const Log& log_;
  std::vector<WatchedFile> watched_;
  std::vector<std::string> texts_;  // of the files when they were last read
  std::string failure_;             // why they were not valid; empty: they are in context_
  Pointer context_;
};

// Returns the oldest error of OpenSSL on this thread, as text, and removes all.
std::string TakeTlsError();

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_TLS_TLS_CONTEXT_H_
