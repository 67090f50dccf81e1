#include <grpcpp/support/status.h>

#include <algorithm>
#include <array>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/wire.h"

namespace pqcached::service {
namespace {

// gRPC sends messages as HTTP/2 headers, which peers limit to 8 KiB, and all but printable ASCII as
// three bytes each.
constexpr size_t kMaxEncodedBytes = 4096;
constexpr size_t kEscapeBytes = 3;

// Returns the longest prefix that fits, without a partial UTF-8 character at its end.
absl::string_view Fitting(absl::string_view message) {
  size_t encoded = 0;
  size_t end = 0;
  for (; end < message.size(); ++end) {
    const bool plain = message[end] >= ' ' && message[end] <= '~' && message[end] != '%';
    encoded += plain ? 1 : kEscapeBytes;
    if (encoded > kMaxEncodedBytes) break;
  }
  const auto continues = [&](size_t at) {
    return at < message.size() && (static_cast<unsigned char>(message[at]) & 0xc0) == 0x80;
  };
  while (end > 0 && continues(end)) --end;
  return message.substr(0, end);
}

// First words of store messages that are proto fields, so that the path of their message is joined
// to them by a dot.
constexpr std::array<absl::string_view, 29> kFields = {
    "budget",         "count",       "default_index", "excluded",   "extra_key",
    "first_position", "generation",  "index",         "iterations", "keys",
    "known_version",  "layer",       "layers",        "lease",      "live_index",
    "offset_bytes",   "positions",   "queries",       "query",      "query_position",
    "rows",           "selection",   "sink_tokens",   "slot",       "token_count",
    "token_ids",      "token_ratio", "tokens",        "values"};

bool BeginsWithField(absl::string_view message) {
  const size_t length =
      std::min(message.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"), message.size());
  if (std::find(kFields.begin(), kFields.end(), message.substr(0, length)) == kFields.end())
    return false;
  const absl::string_view rest = message.substr(length);
  return rest.empty() || rest.front() == ':' || rest.front() == '.' || rest.front() == '[' ||
         absl::StartsWith(rest, " is ");
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      std::string(Fitting(status.message())));
}

absl::Duration RetryAfter(const absl::Status& status) {
  const bool queue = absl::StartsWith(status.message(), "max_pending_calls");
  return queue ? absl::Milliseconds(10) : absl::Seconds(1);
}

absl::Status Under(absl::string_view field, const absl::Status& status) {
  if (status.ok() || field.empty()) return status;
  const absl::string_view separator = BeginsWithField(status.message()) ? "." : ": ";
  return absl::Status(status.code(), absl::StrCat(field, separator, status.message()));
}

absl::Status NamingId(absl::string_view id_field, const absl::Status& status) {
  return status.code() == absl::StatusCode::kNotFound ? Under(id_field, status) : status;
}

absl::Status Invalid(absl::string_view field, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", what));
}

absl::Status Unimplemented(absl::string_view field) {
  return absl::UnimplementedError(absl::StrCat(field, ": not implemented in this version"));
}

absl::Status CheckCount(absl::string_view field, int count, int limit) {
  if (count >= 1 && count <= limit) return absl::OkStatus();
  return Invalid(field, absl::StrCat(count, " of them, must be 1..", limit));
}

kvstore::SteadyTime SteadyTimeOf(gpr_timespec time) {
  const gpr_timespec steady = gpr_convert_clock_type(time, GPR_CLOCK_MONOTONIC);
  if (gpr_time_cmp(steady, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0) {
    return kvstore::SteadyTime::InfiniteFuture();
  }
  const gpr_timespec left = gpr_time_sub(steady, gpr_now(GPR_CLOCK_MONOTONIC));
  return kvstore::SteadyTime::Now() + absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

gpr_timespec ToGrpc(kvstore::SteadyTime time) {
  const int64_t left = absl::ToInt64Nanoseconds(time - kvstore::SteadyTime::Now());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(left, GPR_TIMESPAN));
}

}  // namespace pqcached::service
