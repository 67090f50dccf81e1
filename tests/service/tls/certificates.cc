#include "tests/service/tls/certificates.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace pqcached::testing_tls {
namespace {

using KeyPointer = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using CertificatePointer = std::unique_ptr<X509, decltype(&X509_free)>;

constexpr long kSecondsOfADay = 24 * 3600;  // NOLINT(google-runtime-int): OpenSSL's type

KeyPointer NewKey() { return {EVP_EC_gen("P-256"), &EVP_PKEY_free}; }

void Write(const std::string& path, const EVP_PKEY* key, X509* certificate) {
  const std::unique_ptr<FILE, decltype(&std::fclose)> file(std::fopen(path.c_str(), "w"),
                                                           &std::fclose);
  if (file == nullptr) throw std::runtime_error("cannot write " + path);
  if (key != nullptr) {
    PEM_write_PrivateKey(file.get(), key, nullptr, nullptr, 0, nullptr, nullptr);
  }
  if (certificate != nullptr) PEM_write_X509(file.get(), certificate);
}

// Returns an unsigned certificate of `key`.
CertificatePointer Describe(EVP_PKEY* key, const std::string& name, Validity validity) {
  static std::atomic<long> serial = 1;  // NOLINT(google-runtime-int)
  CertificatePointer made(X509_new(), &X509_free);
  X509_set_version(made.get(), X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(made.get()), serial++);
  X509_gmtime_adj(X509_getm_notBefore(made.get()), validity.from_days * kSecondsOfADay);
  X509_gmtime_adj(X509_getm_notAfter(made.get()), validity.until_days * kSecondsOfADay);
  X509_set_pubkey(made.get(), key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(made.get()), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  return made;
}

void Extend(X509* certificate, X509* issuer, int kind, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* made = X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str());
  if (made == nullptr) throw std::runtime_error("no extension: " + value);
  X509_add_ext(certificate, made, -1);
  X509_EXTENSION_free(made);
}

}  // namespace

struct TestCa::Keys {
  KeyPointer key = NewKey();
  CertificatePointer certificate = {nullptr, &X509_free};
};

TestCa::TestCa(std::filesystem::path directory, std::string name)
    : directory_(std::move(directory)), name_(std::move(name)), keys_(std::make_unique<Keys>()) {
  keys_->certificate = Describe(keys_->key.get(), name_, {});
  X509* own = keys_->certificate.get();
  X509_set_issuer_name(own, X509_get_subject_name(own));
  Extend(own, own, NID_basic_constraints, "critical,CA:TRUE");
  Extend(own, own, NID_subject_key_identifier, "hash");
  X509_sign(own, keys_->key.get(), EVP_sha256());
  Write(certificate(), nullptr, own);
}

TestCa::~TestCa() = default;

CertificateFiles TestCa::Issue(const std::string& name, const std::string& names,
                               Validity validity) const {
  const KeyPointer key = NewKey();
  const CertificatePointer made = Describe(key.get(), name, validity);
  X509* own = keys_->certificate.get();
  X509_set_issuer_name(made.get(), X509_get_subject_name(own));
  if (!names.empty()) Extend(made.get(), own, NID_subject_alt_name, names);
  X509_sign(made.get(), keys_->key.get(), EVP_sha256());
  const CertificateFiles files = {directory_ / (name + ".pem"), directory_ / (name + ".key")};
  Write(files.certificate, nullptr, made.get());
  Write(files.key, key.get(), nullptr);
  return files;
}

std::string TextOfFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void ReplaceFile(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new") << text;
  std::filesystem::rename(path + ".new", path);
}

}  // namespace pqcached::testing_tls
