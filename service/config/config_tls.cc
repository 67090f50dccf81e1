#include "service/config/config_tls.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "service/config/config_values.h"

namespace pqcached::service {
namespace {

bool IsLoopback(absl::string_view host) {
  if (host == "localhost" || host == "[::1]") return true;
  const std::vector<absl::string_view> parts = absl::StrSplit(host, '.');
  const auto is_octet = [](absl::string_view part) {
    int octet = 0;
    return absl::SimpleAtoi(part, &octet) && octet >= 0 && octet <= 255;
  };
  return parts.size() == 4 && parts[0] == "127" &&
         std::all_of(parts.begin(), parts.end(), is_octet);
}

absl::string_view HostIn(absl::string_view host_port) {
  return host_port.substr(0, host_port.rfind(':'));
}

absl::Status SetTcpListen(absl::string_view value, Config& config) {
  int port = -1;
  const size_t colon = value.rfind(':');
  if (!value.empty() &&
      (colon == absl::string_view::npos || colon == 0 ||
       !absl::SimpleAtoi(value.substr(colon + 1), &port) || port < 0 || port > 65535)) {
    return Invalid("must be host:port with a port in 0..65535, for example 127.0.0.1:7070");
  }
  config.tcp_listen = std::string(value);
  return absl::OkStatus();
}

// Returns a key whose value is the path of a file.
ConfigKey FileKey(absl::string_view name, absl::string_view text, std::string Config::*member) {
  return {name, "PATH", text,
          [=](absl::string_view value, Config& config) -> absl::Status {
            if (!value.empty() && value.front() != '/') return Invalid("must be an absolute path");
            config.*member = std::string(value);
            return absl::OkStatus();
          },
          [=](const Config& config) { return config.*member; }};
}

}  // namespace

void AddTlsKeys(std::vector<ConfigKey>& keys) {
  keys.push_back({"tcp_listen", "HOST:PORT",
                  "Also serve TCP: with TLS (tls_certificate), or on the loopback without "
                  "(plain_tcp). Port 0 = any free port. Empty = none.",
                  SetTcpListen, [](const Config& c) { return c.tcp_listen; }});
  keys.push_back(FileKey("tls_certificate",
                         "Certificate of the sidecar for tcp_listen (PEM), followed by those "
                         "between it and its CA. This file and the next three are read again when "
                         "they change. Empty = no TLS.",
                         &Config::tls_certificate));
  keys.push_back(
      FileKey("tls_key", "Key of tls_certificate (PEM), without a passphrase.", &Config::tls_key));
  keys.push_back(FileKey("tls_client_ca",
                         "CA of the certificates of clients (PEM). An alternative name of each "
                         "says what its client is: URI:pqcached://tenant/NAME, "
                         "pqcached://operator or pqcached://peer/NAME. Without token_file, "
                         "clients without a certificate are refused. Empty = no certificates.",
                         &Config::tls_client_ca));
  keys.push_back(
      FileKey("token_file",
              "Tokens of clients on TLS connections: in each line a token of 16 bytes or "
              "more, and what its client is, as in tls_client_ca. Empty = none.",
              &Config::token_file));
}

absl::Status CheckTls(const Config& config) {
  if (config.tls_certificate.empty() != config.tls_key.empty()) {
    return Invalid("tls_certificate: needs tls_key, and tls_key needs tls_certificate");
  }
  if (!UsesTls(config)) {
    if (!config.tls_client_ca.empty()) return Invalid("tls_client_ca: needs tls_certificate");
    if (!config.token_file.empty()) return Invalid("token_file: needs tls_certificate");
    if (config.tcp_listen.empty()) return absl::OkStatus();
    const absl::string_view host = HostIn(config.tcp_listen);
    if (!IsLoopback(host)) {
      return Invalid(absl::StrCat("tcp_listen: host '", host,
                                  "' is not a loopback address (127.x.x.x, [::1], localhost): set "
                                  "tls_certificate and tls_key"));
    }
    if (!config.plain_tcp) {
      return Invalid(
          "tcp_listen: set tls_certificate and tls_key, or plain_tcp to serve the loopback without "
          "encryption");
    }
    return absl::OkStatus();
  }
  if (config.plain_tcp) return Invalid("plain_tcp: must be false with tls_certificate");
  if (config.tls_client_ca.empty() && config.token_file.empty()) {
    return Invalid("tls_certificate: set tls_client_ca or token_file, which identify clients");
  }
  return absl::OkStatus();
}

}  // namespace pqcached::service
