// Credentials secure the connections of one client: TLS, and the token of each call.
//
// Files are read again when they change: the CA, the certificate and the key within seconds, for
// the next connection, the token at the next call. Thread-safe.
#ifndef PQCACHED_CLIENT_RPC_SECURE_CREDENTIALS_H_
#define PQCACHED_CLIENT_RPC_SECURE_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "client/base/remote.h"

namespace pqcached::client {

class Credentials {
 public:
  // REQUIRES: options.tls_ca
  //
  // Errors: INVALID_ARGUMENT  a file that cannot be read; fields as in pqc_client_options
  static grpc::Status Make(const SecurityOptions& options,
                           std::shared_ptr<const Credentials>* made);

  const std::shared_ptr<grpc::ChannelCredentials>& channel() const { return channel_; }
  // Sets the name that the sidecar's certificate must have, where it is not the endpoint's host.
  void SetName(grpc::ChannelArguments* arguments) const;
  // Adds the token to a call.
  void AddToken(grpc::ClientContext* context) const;

 private:
  explicit Credentials(const SecurityOptions& options);

  const std::string server_name_;  // empty = the endpoint's host
  const std::string token_file_;   // empty = no token
  const std::shared_ptr<grpc::ChannelCredentials> channel_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_SECURE_CREDENTIALS_H_
