#include "service/handlers/rpcs.h"

namespace pqcached::service {
namespace {

// A call of an engine on the data of its tenant.
constexpr RpcRule Data(Rpc rpc, absl::string_view name) {
  return {.rpc = rpc, .name = name, .scope = Scope::kTenant, .tenant = true, .tcp = true};
}

// A call of an engine that a drain refuses.
constexpr RpcRule NewWork(Rpc rpc, absl::string_view name) {
  RpcRule rule = Data(rpc, name);
  rule.starts_work = true;
  return rule;
}

// A call on sequences of the tenant, or of all tenants by an operator.
constexpr RpcRule Shared(Rpc rpc, absl::string_view name) {
  return {.rpc = rpc, .name = name, .scope = Scope::kTenant, .tenant = true, .operators = true};
}

constexpr RpcRule Operators(Rpc rpc, absl::string_view name) {
  return {.rpc = rpc, .name = name, .scope = Scope::kSidecar, .operators = true};
}

// TCP carries the calls of service Admin that an engine makes on its own sequences.
constexpr RpcRule OverTcp(RpcRule rule) {
  rule.tcp = true;
  return rule;
}

constexpr RpcRule Audited(RpcRule rule) {
  rule.audited = true;
  return rule;
}

constexpr RpcRule ForOperatorsToo(RpcRule rule) {
  rule.operators = true;
  return rule;
}

constexpr std::array<RpcRule, kRpcCount> kRules = {
    RpcRule{.rpc = Rpc::kSession, .name = "Session", .anyone = true, .tcp = true},
    NewWork(Rpc::kOpenCache, "OpenCache"),
    NewWork(Rpc::kCreateSequence, "CreateSequence"),
    Data(Rpc::kDropSequence, "DropSequence"),
    Data(Rpc::kTruncateSequence, "TruncateSequence"),
    NewWork(Rpc::kForkSequence, "ForkSequence"),
    NewWork(Rpc::kForkSequences, "ForkSequences"),
    Data(Rpc::kSuspendSequence, "SuspendSequence"),
    Data(Rpc::kResumeSequence, "ResumeSequence"),
    Data(Rpc::kMatchPrefix, "MatchPrefix"),
    Data(Rpc::kWatchEvents, "WatchEvents"),
    NewWork(Rpc::kIngest, "Ingest"),
    NewWork(Rpc::kCommit, "Commit"),
    Data(Rpc::kAppend, "Append"),
    Data(Rpc::kClosePrefill, "ClosePrefill"),
    Data(Rpc::kBuildIndex, "BuildIndex"),
    Data(Rpc::kTopK, "TopK"),
    Data(Rpc::kScore, "Score"),
    Data(Rpc::kFetchBlocks, "FetchBlocks"),
    Data(Rpc::kFetchTokens, "FetchTokens"),
    Data(Rpc::kAttend, "Attend"),
    Data(Rpc::kAttendRange, "AttendRange"),
    Data(Rpc::kAttach, "Attach"),
    Data(Rpc::kDetach, "Detach"),
    NewWork(Rpc::kOpenPageCache, "OpenPageCache"),
    Data(Rpc::kPutPages, "PutPages"),
    Data(Rpc::kGetPages, "GetPages"),
    Data(Rpc::kFindPages, "FindPages"),
    ForOperatorsToo(NewWork(Rpc::kAdmit, "Admit")),
    RpcRule{.rpc = Rpc::kGetServerInfo,
            .name = "GetServerInfo",
            .anyone = true,
            .tenant = true,
            .operators = true,
            .peers = true,
            .tcp = true},
    Shared(Rpc::kListCaches, "ListCaches"),
    Shared(Rpc::kListSequences, "ListSequences"),
    OverTcp(Shared(Rpc::kDescribeSequence, "DescribeSequence")),
    Shared(Rpc::kStats, "Stats"),
    Audited(Operators(Rpc::kSetLogLevel, "SetLogLevel")),
    Shared(Rpc::kListLeases, "ListLeases"),
    Audited(Shared(Rpc::kEvict, "Evict")),
    Audited(OverTcp(Shared(Rpc::kPin, "Pin"))),
    Audited(Operators(Rpc::kDrain, "Drain")),
    Audited(Operators(Rpc::kSelfTest, "SelfTest")),
    Audited(Operators(Rpc::kEraseTenant, "EraseTenant")),
    Audited(Shared(Rpc::kDropCache, "DropCache")),
    Shared(Rpc::kListSessions, "ListSessions"),
    Audited(Shared(Rpc::kEndSession, "EndSession")),
    Shared(Rpc::kListTenantLimits, "ListTenantLimits"),
    Audited(Operators(Rpc::kSetTenantLimits, "SetTenantLimits")),
    Audited(Operators(Rpc::kEndQuarantine, "EndQuarantine")),
    OverTcp(Shared(Rpc::kListIndexTypes, "ListIndexTypes")),
    Audited(Operators(Rpc::kExportSequence, "ExportSequence")),
    Audited(Operators(Rpc::kImportSequence, "ImportSequence")),
};

// Each row is at the index of its rpc.
constexpr bool IsInOrder() {
  for (size_t i = 0; i < kRpcCount; ++i) {
    if (static_cast<size_t>(kRules[i].rpc) != i) return false;
  }
  return true;
}
static_assert(IsInOrder());

}  // namespace

const RpcRule& RuleOf(Rpc rpc) { return kRules[static_cast<size_t>(rpc)]; }

absl::string_view RpcName(Rpc rpc) { return RuleOf(rpc).name; }

absl::string_view RoleName(Role role) {
  switch (role) {
    case Role::kAnyone:
      return "anyone";
    case Role::kTenant:
      return "tenant";
    case Role::kOperator:
      return "operator";
    case Role::kPeer:
      break;
  }
  return "peer";
}

}  // namespace pqcached::service
