// CAs and certificates for tests, written as PEM files.
#ifndef PQCACHED_TESTS_SERVICE_TLS_CERTIFICATES_H_
#define PQCACHED_TESTS_SERVICE_TLS_CERTIFICATES_H_

#include <filesystem>
#include <memory>
#include <string>

namespace pqcached::testing_tls {

struct CertificateFiles {
  std::string certificate;
  std::string key;
};

// Days relative to now; a certificate is valid between them.
struct Validity {
  int from_days = -1;
  int until_days = 1;
};

class TestCa {
 public:
  // Files are written to `directory`, which exists.
  TestCa(std::filesystem::path directory, std::string name);
  ~TestCa();

  std::string certificate() const { return directory_ / (name_ + ".pem"); }
  // `names`: the alternative names in OpenSSL's form, "URI:pqcached://tenant/a,IP:127.0.0.1";
  // empty = none.
  CertificateFiles Issue(const std::string& name, const std::string& names,
                         Validity validity = {}) const;

 private:
  struct Keys;

  const std::filesystem::path directory_;
  const std::string name_;
  const std::unique_ptr<Keys> keys_;
};

std::string TextOfFile(const std::string& path);
// Replaces a file by rename, as an operator should.
void ReplaceFile(const std::string& path, const std::string& text);

}  // namespace pqcached::testing_tls

#endif  // PQCACHED_TESTS_SERVICE_TLS_CERTIFICATES_H_
