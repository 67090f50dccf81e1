// The table of all rpcs: which roles may make each call, and what the call reaches.
//
// CallGate enforces it before a handler runs. A role follows from the socket and the session:
//
//   anyone    a call without a session, on the socket of clients or on loopback TCP
//   tenant    a call with the token of a session: it reaches the data of the session's tenant
//   operator  a call on the admin socket, which needs no session: it reaches all tenants
//   peer      a call of another sidecar, over TLS
//
// Over TLS the role follows from the identity of the client (session/identity.h), and a session has
// to be of the identity's tenant.
//
// Thread-safe: constants.
#ifndef PQCACHED_SERVICE_HANDLERS_RPCS_H_
#define PQCACHED_SERVICE_HANDLERS_RPCS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace pqcached::service {

enum class Rpc : uint8_t {
  kSession,
  kOpenCache,
  kCreateSequence,
  kDropSequence,
  kTruncateSequence,
  kForkSequence,
  kForkSequences,
  kSuspendSequence,
  kResumeSequence,
  kMatchPrefix,
  kWatchEvents,
  kIngest,
  kCommit,
  kAppend,
  kClosePrefill,
  kBuildIndex,
  kTopK,
  kScore,
  kFetchBlocks,
  kFetchTokens,
  kAttend,
  kAttendRange,
  kAttach,
  kDetach,
  kOpenPageCache,
  kPutPages,
  kGetPages,
  kFindPages,
  kAdmit,
  kGetServerInfo,
  kListCaches,
  kListSequences,
  kDescribeSequence,
  kStats,
  kSetLogLevel,
  kListLeases,
  kEvict,
  kPin,
  kDrain,
  kSelfTest,
  kEraseTenant,
  kDropCache,
  kListSessions,
  kEndSession,
  kListTenantLimits,
  kSetTenantLimits,
  kEndQuarantine,
  kListIndexTypes,
  kExportSequence,
  kImportSequence,
};
inline constexpr size_t kRpcCount = static_cast<size_t>(Rpc::kImportSequence) + 1;

enum class Role : uint8_t { kAnyone, kTenant, kOperator, kPeer };

// The way on which a call arrives.
enum class Door : uint8_t { kSocket, kTcp, kTls, kAdminSocket };

// Data that a call reaches.
enum class Scope : uint8_t {
  kNone,     // none: what every client may know
  kTenant,   // that of the caller's tenant; for operators that of all tenants
  kSidecar,  // the sidecar itself
};

struct RpcRule {
  Rpc rpc = Rpc::kSession;
  absl::string_view name;  // in the proto: "CreateSequence"
  Scope scope = Scope::kNone;
  bool anyone = false;
  bool tenant = false;
  bool operators = false;
  bool peers = false;        // other sidecars
  bool tcp = false;          // TCP without TLS carries it
  bool starts_work = false;  // a drain refuses it
  bool audited = false;      // it changes what others see: each call is in the audit log
};

const RpcRule& RuleOf(Rpc rpc);
// Returns the name in the proto: "CreateSequence".
absl::string_view RpcName(Rpc rpc);
absl::string_view RoleName(Role role);  // "anyone", "tenant", "operator", "peer"

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_RPCS_H_
