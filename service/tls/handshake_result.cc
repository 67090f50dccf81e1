#include "service/tls/handshake_result.h"

#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/base/status_macros.h"
#include "service/base/refusal.h"
#include "service/tls/tls_context.h"

namespace pqcached::service {
namespace {

const char* ReasonOf(long verified) {  // NOLINT(google-runtime-int): OpenSSL's type
  switch (verified) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return "certificate_expired";
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
      return "unknown_ca";
    default:
      return "certificate_refused";
  }
}

struct NamesDeleter {
  void operator()(GENERAL_NAMES* names) const { GENERAL_NAMES_free(names); }
};

}  // namespace

HandshakeFailure FailureOf(const SSL* ssl) {
  if (const auto verified = SSL_get_verify_result(ssl); verified != X509_V_OK) {
    ERR_clear_error();
    return {ReasonOf(verified), X509_verify_cert_error_string(verified)};
  }
  const unsigned long error = ERR_peek_error();  // NOLINT(google-runtime-int): OpenSSL's type
  const char* reason = "protocol_error";
  if (error == 0 || ERR_GET_REASON(error) == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
    reason = "closed_by_client";
  }
  if (ERR_GET_REASON(error) == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) reason = "no_certificate";
  return {reason, TakeTlsError()};
}

absl::StatusOr<std::optional<Identity>> IdentityOf(const SSL* ssl) {
  const X509* certificate = SSL_get0_peer_certificate(ssl);
  std::optional<Identity> identity;
  if (certificate == nullptr) return identity;
  const std::unique_ptr<GENERAL_NAMES, NamesDeleter> names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  const int count = names == nullptr ? 0 : sk_GENERAL_NAME_num(names.get());
  for (int i = 0; i < count; ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const ASN1_IA5STRING* uri = name->d.uniformResourceIdentifier;
    const std::string text(ASN1_STRING_get0_data(uri),  // NOLINT
                           ASN1_STRING_get0_data(uri) + ASN1_STRING_length(uri));
    if (!HasIdentityScheme(text)) continue;
    if (identity.has_value()) {
      return InvalidArgument("", "the certificate has several pqcached:// identities");
    }
    ASSIGN_OR_RETURN(identity, ParseIdentity(text));
  }
  if (identity.has_value()) return identity;
  return InvalidArgument("", "the certificate has no pqcached:// URI among its alternative names");
}

}  // namespace pqcached::service
