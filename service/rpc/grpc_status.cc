#include "service/rpc/grpc_status.h"

#include <grpcpp/support/status.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "pqcached/v1/status_details.pb.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

// gRPC sends messages as HTTP/2 headers, which peers limit to 8 KiB: the message with three bytes
// for each byte that is not printable ASCII, and again, with the field and its description, in
// base64.
constexpr size_t kMaxMessageBytes = 2048;
constexpr size_t kMaxDescriptionBytes = 512;
constexpr size_t kMaxFieldBytes = 256;  // what the client's libraries keep of a path
constexpr size_t kEscapeBytes = 3;

// Returns the longest beginning that fits, without a part of a UTF-8 character at its end.
absl::string_view Fitting(absl::string_view message, size_t max_encoded_bytes) {
  size_t encoded = 0;
  size_t end = 0;
  for (; end < message.size(); ++end) {
    const bool plain = message[end] >= ' ' && message[end] <= '~' && message[end] != '%';
    encoded += plain ? 1 : kEscapeBytes;
    if (encoded > max_encoded_bytes) break;
  }
  const auto continues = [&](size_t at) {
    return at < message.size() && (static_cast<unsigned char>(message[at]) & 0xc0) == 0x80;
  };
  while (end > 0 && continues(end)) --end;
  return message.substr(0, end);
}

constexpr char kTypePrefix[] = "type.googleapis.com/google.rpc.";

void AddDetail(absl::string_view type, const google::protobuf::Message& message,
               v1::StatusDetails* details) {
  google::protobuf::Any* detail = details->add_details();
  detail->set_type_url(absl::StrCat(kTypePrefix, type));
  detail->set_value(message.SerializeAsString());
}

// Returns a serialized google.rpc.Status.
std::string DetailsOf(const absl::Status& status, absl::string_view message) {
  const std::string field = FieldOf(status);
  const uint32_t retry_ms = RetryMsOf(status);
  v1::StatusDetails details;
  details.set_code(static_cast<int32_t>(status.code()));
  details.set_message(message.data(), message.size());
  if (!field.empty()) {
    v1::BadRequestDetail bad_request;
    auto* violation = bad_request.add_field_violations();
    const absl::string_view path = Fitting(field, kMaxFieldBytes);
    violation->set_field(path.data(), path.size());
    const std::string text = TextOf(status);
    const absl::string_view fitting = Fitting(text, kMaxDescriptionBytes);
    violation->set_description(fitting.data(), fitting.size());
    AddDetail("BadRequest", bad_request, &details);
  }
  if (retry_ms > 0) {
    v1::RetryInfoDetail retry_info;
    retry_info.mutable_retry_delay()->set_seconds(retry_ms / 1000);
    retry_info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_ms % 1000) * 1'000'000);
    AddDetail("RetryInfo", retry_info, &details);
  }
  return details.SerializeAsString();
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string whole(status.message());
  const absl::string_view message = Fitting(whole, kMaxMessageBytes);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(message),
                      DetailsOf(status, message));
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
