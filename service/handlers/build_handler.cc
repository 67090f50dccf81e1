#include "service/handlers/build_handler.h"

#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "kvstore/read/indexes/index_types.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/handlers/rpc_stats.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;

// Share of the time until the deadline that the store may use: the response must arrive before the
// deadline.
constexpr double kDeadlineShare = 0.95;

}  // namespace

absl::StatusOr<kvstore::BuildSpec> BuildHandler::SpecOf(const Caller& caller,
                                                        const v1::BuildIndexRequest& request) {
  absl::StatusOr<kvstore::BuildSpec> spec = BuildSpecOf(request);
  if (!spec.ok()) return spec.status();
  ASSIGN_OR_RETURN(const kvstore::IndexDescriptor index,
                   specs_.IndexOrDefault(caller, "sequence_id", request.sequence_id(),
                                         request.has_index(), request.index(), "index"));
  const kvstore::IndexType* const type = kvstore::FindIndexType(index);
  if (type != nullptr && type->built() == nullptr) {
    const std::string field = absl::StrCat("index.", std::string(type->info().name));
    const std::string why(kvstore::WhyNotBuilt(*type));
    return type->info().switched_off.empty() ? InvalidArgument(field, why)
                                             : FailedPrecondition(field, why);
  }
  spec->index = index;
  return spec;
}

absl::Status BuildHandler::BuildIndex(const Caller& caller, const v1::BuildIndexRequest& request,
                                      const Report& report) {
  ASSIGN_OR_RETURN(kvstore::BuildSpec spec, SpecOf(caller, request));
  RETURN_IF_ERROR(caller.Check());
  const SteadyTime now = SteadyTime::Now();
  spec.is_cancelled = caller.is_cancelled;
  spec.deadline = now + (caller.deadline - now) * kDeadlineShare;
  absl::Status status = store_.BuildIndex(caller.session.tenant, request.sequence_id(), spec,
                                          [&](const kvstore::BuildProgress& progress) {
                                            if (!caller.Check().ok()) return false;
                                            report(progress);
                                            return true;
                                          });
  log_.Info("index_build", {{"sequence_id", request.sequence_id()},
                            {"session", caller.session.id},
                            {"status", StatusName(status.code())},
                            {"seconds", absl::ToDoubleSeconds(SteadyTime::Now() - now)}});
  return status;
}

}  // namespace pqcached::service
