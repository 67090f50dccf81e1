#include "service/supervise/kept_sessions.h"

#include <sys/socket.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kvstore/share/control_memory.h"

namespace pqcached::service {
namespace {

constexpr absl::string_view kControl = "control.";
constexpr absl::string_view kSocket = "socket.";
constexpr absl::string_view kStaging = "staging.";

}  // namespace

std::string ControlName(absl::string_view boot_id, uint64_t session_number) {
  return absl::StrCat(kControl, boot_id, ".", session_number);
}

std::string SocketName(absl::string_view boot_id, uint64_t session_number) {
  return absl::StrCat(kSocket, boot_id, ".", session_number);
}

std::string StagingName(absl::string_view boot_id, uint64_t session_number) {
  return absl::StrCat(kStaging, boot_id, ".", session_number);
}

std::string SocketNameOfStaging(absl::string_view staging_name) {
  return absl::StrCat(kSocket, absl::StripPrefix(staging_name, kStaging));
}

std::string StagingNameOfSocket(absl::string_view socket_name) {
  return absl::StrCat(kStaging, absl::StripPrefix(socket_name, kSocket));
}

std::string SocketNameOfControl(absl::string_view control_name) {
  return absl::StrCat(kSocket, absl::StripPrefix(control_name, kControl));
}

std::string ControlNameOfSocket(absl::string_view socket_name) {
  return absl::StrCat(kControl, absl::StripPrefix(socket_name, kSocket));
}

bool SessionNumberOf(absl::string_view name, uint64_t& session_number) {
  const size_t dot = name.rfind('.');
  return dot != absl::string_view::npos && absl::SimpleAtoi(name.substr(dot + 1), &session_number);
}

bool IsControlName(absl::string_view name) { return absl::StartsWith(name, kControl); }

bool IsSocketName(absl::string_view name) { return absl::StartsWith(name, kSocket); }

bool IsStagingName(absl::string_view name) { return absl::StartsWith(name, kStaging); }

void EndKeptSession(absl::string_view name, int descriptor) {
  if (IsControlName(name)) kvstore::EndControlMemory(descriptor);
  if (IsSocketName(name)) shutdown(descriptor, SHUT_WR);
}

}  // namespace pqcached::service
