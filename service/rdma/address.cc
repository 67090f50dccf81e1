#include "service/rdma/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"

namespace pqcached::service::rdma {

absl::StatusOr<sockaddr_storage> ParseAddress(absl::string_view field, const std::string& text,
                                              uint16_t port) {
  sockaddr_storage address = {};
  sockaddr_in v4 = {};
  sockaddr_in6 v6 = {};
  if (inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    std::memcpy(&address, &v4, sizeof(v4));
  } else if (inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    std::memcpy(&address, &v6, sizeof(v6));
  } else {
    return InvalidArgument(field, absl::StrCat("\"", text, "\", must be an IP address"));
  }
  return address;
}

}  // namespace pqcached::service::rdma
