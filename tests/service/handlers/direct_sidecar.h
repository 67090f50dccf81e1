// The handlers over a real store, called without a server, a socket or gRPC.
//
// A call goes the way of one that arrives by gRPC: the gate admits it, the handler answers it, the
// gate counts its status. It runs on the thread of its caller, so sanitizers see all of it.
#ifndef PQCACHED_TESTS_SERVICE_HANDLERS_DIRECT_SIDECAR_H_
#define PQCACHED_TESTS_SERVICE_HANDLERS_DIRECT_SIDECAR_H_

#include <google/protobuf/message.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvstore/store.h"
#include "service/base/executor.h"
#include "service/base/log.h"
#include "service/config/config.h"
#include "service/handlers/call_gate.h"
#include "service/handlers/handlers.h"
#include "service/handlers/rpc_stats.h"
#include "service/session/detached_sessions.h"
#include "service/session/sessions.h"
#include "tests/service/handlers/requests.h"
#include "tests/service/handlers/shared_mapping.h"

namespace pqcached::service {

// A client as the gate knows it.
struct Client {
  std::string token;
  Session session;
  Door door = Door::kSocket;
  kvstore::SteadyTime deadline = kvstore::SteadyTime::InfiniteFuture();
  std::function<bool()> is_cancelled = {};
};

// A client of the admin socket.
inline Client Operator() { return {.token = {}, .session = {}, .door = Door::kAdminSocket}; }

// One unary rpc; BuildIndex, whose response is its last progress; or WatchEvents, whose response is
// its first message.
struct RpcEntry {
  const google::protobuf::Message& request;  // of its type
  const google::protobuf::Message& response;
  Rpc rpc;
  absl::Status (*answer)(Handlers& handlers, const Call& call,
                         const google::protobuf::Message& request,
                         google::protobuf::Message* response);
};

// All of them; the streams Session and Ingest are none of them.
const std::vector<RpcEntry>& RpcEntries();
// The rpc with this type of request.
const RpcEntry& EntryOf(const google::protobuf::Descriptor& request);

// What a sidecar finds where it starts.
struct Surroundings {
  // The sidecar continues with the store and the sessions that an earlier one left there.
  kvstore::DescriptorKeeper* keeper = nullptr;
  std::string memory_root = {};  // as in StoreOptions
};

class DirectSidecar {
 public:
  explicit DirectSidecar(const Config& config = SmallConfig(),
                         const Surroundings& surroundings = {});

  // Opens a session, which is local when it is `mapped`: it may have staging and leases then.
  Client Open(const std::string& name, bool mapped = false, const std::string& tenant = "");
  // Resumes a session of an earlier sidecar.
  Client Resume(const Client& earlier, bool mapped = false);
  void Close(const Client& client);
  // Staging for the client; empty when it is refused.
  SharedMapping OpenStaging(const Client& client, uint64_t slot_bytes, uint32_t slots);

  absl::Status Call(const Client& client, const google::protobuf::Message& request,
                    google::protobuf::Message* response);
  // A whole stream of messages, which are bytes as gRPC delivers them.
  absl::Status Ingest(const Client& client, const std::vector<std::string>& messages,
                      v1::IngestResponse* response);

  const Config config;
  const std::string boot_id = "boot";
  const std::unique_ptr<Log> log;
  const std::unique_ptr<kvstore::Store> store;
  std::atomic<bool> serving = true;
  TenantLimitTable limits;
  Sessions sessions;
  RpcStats stats;
  Executor cleanups;
  DetachedSessions detached;
  CallGate gate;
  Handlers handlers;

 private:
  Client OpenSession(const v1::SessionOpen& open, bool mapped);
  void EndSessionsIf(const SessionFilter& filter);
  absl::StatusOr<service::Call> Begin(const Client& client, Rpc rpc);

  kvstore::Mutex mutex_;
  std::vector<OpenedSession> opened_ ABSL_GUARDED_BY(mutex_);  // since the start
};

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_HANDLERS_DIRECT_SIDECAR_H_
