#include "service/wire/token_names.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "service/base/refusal.h"

namespace pqcached::service {

absl::StatusOr<std::vector<kvstore::ContentKey>> ContentKeysOf(const std::string& bytes) {
  if (bytes.size() % sizeof(kvstore::ContentKey) != 0) {
    return InvalidArgument(
        "content_keys",
        absl::StrCat(bytes.size(), " bytes, must be a multiple of ", sizeof(kvstore::ContentKey)));
  }
  std::vector<kvstore::ContentKey> keys(bytes.size() / sizeof(kvstore::ContentKey));
  if (!keys.empty()) std::memcpy(keys.data(), bytes.data(), bytes.size());
  return keys;
}

absl::StatusOr<ReceivedNames> ReceivedNames::Of(const v1::TokenNames& names) {
  ReceivedNames received(names.begin(), "begin",
                         {names.token_ids().begin(), names.token_ids().end()});
  ASSIGN_OR_RETURN(received.content_keys_, ContentKeysOf(names.content_keys()));
  return received;
}

absl::Status ReceivedNames::Check(const NamedSequence& sequence) const {
  if (empty()) return absl::OkStatus();
  return MoveField(
      "first_position", begin_field_,
      sequence.store.CheckNames(sequence.tenant, sequence.sequence_id, begin_, view()));
}

absl::Status ReceivedNames::Name(const NamedSequence& sequence) const {
  if (empty()) return absl::OkStatus();
  return MoveField(
      "first_position", begin_field_,
      sequence.store.NameTokens(sequence.tenant, sequence.sequence_id, begin_, view()));
}

}  // namespace pqcached::service
