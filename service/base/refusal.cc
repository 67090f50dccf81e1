#include "service/base/refusal.h"

#include "absl/strings/str_cat.h"

namespace pqcached::service {

absl::Status UnimplementedField(absl::string_view field) {
  return Unimplemented(field, "not implemented in this version");
}

absl::Status CheckCount(absl::string_view field, int count, int limit) {
  if (count >= 1 && count <= limit) return absl::OkStatus();
  return InvalidArgument(field, absl::StrCat(count, " of them, must be 1..", limit));
}

}  // namespace pqcached::service
