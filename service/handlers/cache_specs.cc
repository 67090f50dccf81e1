#include "service/handlers/cache_specs.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "service/base/refusal.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

using kvstore::MutexLock;

constexpr size_t kMaxRememberedSpecs = 8192;

}  // namespace

absl::StatusOr<CacheSpecs::SharedSpec> CacheSpecs::Of(const Caller& caller, uint64_t sequence_id) {
  const std::string& tenant = caller.session.tenant;
  {
    const MutexLock lock(&mutex_);
    const auto found = specs_.find(sequence_id);
    if (found != specs_.end() && found->second.tenant == tenant) return found->second.spec;
  }
  ASSIGN_OR_RETURN(const kvstore::SequenceInfo sequence,
                   store_.DescribeSequence(tenant, sequence_id));
  for (const kvstore::CacheInfo& cache : store_.ListCaches(tenant)) {
    if (cache.cache_id != sequence.cache_id) continue;
    const auto spec = std::make_shared<const kvstore::CacheSpec>(cache.spec);
    const MutexLock lock(&mutex_);
    if (specs_.size() >= kMaxRememberedSpecs) specs_.clear();
    specs_[sequence_id] = {tenant, spec};
    return spec;
  }
  return NotFound("sequence_id", absl::StrCat("no sequence ", sequence_id));
}

absl::StatusOr<kvstore::IndexDescriptor> CacheSpecs::IndexOrDefault(
    const Caller& caller, absl::string_view id_field, uint64_t sequence_id, bool present,
    const v1::IndexSpec& spec, const std::string& field) {
  ASSIGN_OR_RETURN(const std::optional<kvstore::IndexDescriptor> index,
                   IndexOf(present, spec, field));
  if (index.has_value()) return *index;
  const absl::StatusOr<SharedSpec> cache = Of(caller, sequence_id);
  if (!cache.ok()) return MoveField("sequence_id", id_field, cache.status());
  return (*cache)->default_index;
}

void CacheSpecs::Forget(uint64_t sequence_id) {
  const MutexLock lock(&mutex_);
  specs_.erase(sequence_id);
}

}  // namespace pqcached::service
