#include "service/wire/staging_claims.h"

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"
#include "service/wire/wire.h"

namespace pqcached::service {

absl::StatusOr<std::span<std::byte>> StagingClaims::Resolve(const v1::StagingReference& reference,
                                                            const std::string& field) {
  const kvstore::StagingReference wanted{.slot = reference.slot(),
                                         .offset_bytes = reference.offset_bytes(),
                                         .size_bytes = reference.size_bytes(),
                                         .generation = reference.generation()};
  const auto claimed = slots_.find(wanted.slot);
  if (claimed == slots_.end()) {
    absl::StatusOr<kvstore::StagedBytes> staged = store_.ClaimStaging(session_, wanted);
    if (!staged.ok()) return PrefixField(field, MoveField("session", "", staged.status()));
    const std::span<std::byte> bytes = staged->bytes;
    slots_[wanted.slot] = {wanted.generation, *std::move(staged)};
    return bytes;
  }
  if (claimed->second.generation != wanted.generation) {
    return FailedPrecondition(
        field + ".generation",
        absl::StrCat(wanted.generation, "; the call already uses slot ", wanted.slot, " as ",
                     claimed->second.generation, " already"));
  }
  const std::span<std::byte> slot = claimed->second.staged.slot;
  if (wanted.offset_bytes > slot.size() || wanted.size_bytes > slot.size() - wanted.offset_bytes) {
    return InvalidArgument(field + ".offset_bytes",
                           absl::StrCat(wanted.offset_bytes, " with ", wanted.size_bytes,
                                        " bytes; a slot has ", slot.size()));
  }
  return slot.subspan(wanted.offset_bytes, wanted.size_bytes);
}

}  // namespace pqcached::service
