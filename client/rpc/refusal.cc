#include "client/rpc/refusal.h"

#include <charconv>
#include <cstdio>
#include <string_view>

#include "pqcached/v1/status_details.pb.h"

namespace pqcached::client {
namespace {

constexpr char kBadRequest[] = "type.googleapis.com/google.rpc.BadRequest";
constexpr char kRetryInfo[] = "type.googleapis.com/google.rpc.RetryInfo";
constexpr uint32_t kMsPerSecond = 1000;
constexpr int32_t kNsPerMs = 1'000'000;

struct Details {
  std::string field;
  std::string text;
  uint32_t retry_ms = kNoRetry;
};

// Returns the details of a status; a detail that cannot be parsed is left out.
Details DetailsOf(const grpc::Status& status) {
  Details details;
  details.text = status.error_message();
  v1::StatusDetails message;
  if (status.error_details().empty() || !message.ParseFromString(status.error_details())) {
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE) details.retry_ms = kRetryMemory;
    return details;
  }
  for (const google::protobuf::Any& detail : message.details()) {
    v1::BadRequestDetail bad_request;
    v1::RetryInfoDetail retry_info;
    if (detail.type_url() == kBadRequest && bad_request.ParseFromString(detail.value()) &&
        bad_request.field_violations_size() > 0) {
      details.field = bad_request.field_violations(0).field();
      details.text = bad_request.field_violations(0).description();
    } else if (detail.type_url() == kRetryInfo && retry_info.ParseFromString(detail.value())) {
      details.retry_ms = static_cast<uint32_t>(retry_info.retry_delay().seconds()) * kMsPerSecond +
                         static_cast<uint32_t>(retry_info.retry_delay().nanos() / kNsPerMs);
    }
  }
  return details;
}

template <size_t kSize>
void Copy(const std::string& from, char (&to)[kSize]) {
  std::snprintf(to, kSize, "%s", from.c_str());
}

}  // namespace

grpc::Status Refuse(grpc::StatusCode code, const std::string& field, const std::string& text,
                    uint32_t retry_ms) {
  v1::StatusDetails details;
  details.set_code(code);
  details.set_message(kvstore::MessageOf(field, text));
  if (!field.empty()) {
    v1::BadRequestDetail bad_request;
    auto* violation = bad_request.add_field_violations();
    violation->set_field(field);
    violation->set_description(text);
    google::protobuf::Any* detail = details.add_details();
    detail->set_type_url(kBadRequest);
    detail->set_value(bad_request.SerializeAsString());
  }
  if (retry_ms > 0) {
    v1::RetryInfoDetail retry_info;
    retry_info.mutable_retry_delay()->set_seconds(retry_ms / kMsPerSecond);
    retry_info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_ms % kMsPerSecond) *
                                                kNsPerMs);
    google::protobuf::Any* detail = details.add_details();
    detail->set_type_url(kRetryInfo);
    detail->set_value(retry_info.SerializeAsString());
  }
  return {code, details.message(), details.SerializeAsString()};
}

void ToRefusal(const grpc::Status& status, RefusalBuffer* refusal) {
  const Details details = DetailsOf(status);
  Copy(details.field, refusal->field);
  Copy(details.text, refusal->text);
  refusal->retry_ms = details.retry_ms;
}

grpc::Status WorkerReplaced() {
  return Refuse(grpc::StatusCode::UNAVAILABLE, "", "the sidecar's worker was replaced",
                kRetryMemory);
}

grpc::Status PrefixText(const std::string& text, const grpc::Status& status) {
  const Details details = DetailsOf(status);
  return Refuse(status.error_code(), details.field, text + ": " + details.text, details.retry_ms);
}

grpc::Status RenumberItem(const grpc::Status& status,
                          const std::function<uint32_t(uint32_t)>& number_of,
                          const std::string& list) {
  const std::string begin = list + "[";
  const Details details = DetailsOf(status);
  const char* const end = details.field.data() + details.field.size();
  if (status.ok() || !details.field.starts_with(begin)) return status;
  uint32_t item = 0;
  const auto [rest, error] = std::from_chars(details.field.data() + begin.size(), end, item);
  if (error != std::errc() || rest == end || *rest != ']') return status;
  return Refuse(status.error_code(),
                begin + std::to_string(number_of(item)) + std::string(rest, end), details.text,
                details.retry_ms);
}

uint32_t RetryMsOf(const grpc::Status& status) { return DetailsOf(status).retry_ms; }

std::string FieldOf(const grpc::Status& status) { return DetailsOf(status).field; }

}  // namespace pqcached::client
