#include "tests/service/handlers/direct_sidecar.h"

#include <sys/mman.h>

#include <cstdlib>
#include <span>
#include <utility>

#include "service/base/guarded.h"
#include "service/wire/ingest_message.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

using google::protobuf::Message;

constexpr uint64_t kBootWord = 1;

template <auto kGroup, auto kMethod>
struct Bound;

template <class Group, Group Handlers::*kGroup, class Request, class Response,
          absl::Status (Group::*kMethod)(const Caller&, const Request&, Response*)>
struct Bound<kGroup, kMethod> {
  static absl::Status Answer(Handlers& handlers, const Call& call, const Message& request,
                             Message* response) {
    return ((handlers.*kGroup).*kMethod)(call, static_cast<const Request&>(request),
                                         static_cast<Response*>(response));
  }
  static RpcEntry Entry(Rpc rpc) {
    return {Request::default_instance(), Response::default_instance(), rpc, &Answer};
  }
};

absl::Status Build(Handlers& handlers, const Call& call, const Message& request,
                   Message* response) {
  return handlers.builds.BuildIndex(call, static_cast<const v1::BuildIndexRequest&>(request),
                                    [response](const kvstore::BuildProgress& progress) {
                                      ToWire(progress, static_cast<v1::BuildProgress*>(response));
                                    });
}

absl::Status Watch(Handlers& handlers, const Call& call, const Message& request,
                   Message* response) {
  auto watch =
      handlers.sequences.BeginWatch(call, static_cast<const v1::WatchEventsRequest&>(request));
  if (!watch.ok()) return watch.status();
  return handlers.sequences.ReadEvents(call, *watch, static_cast<v1::CacheEvents*>(response));
}

// A method of a group of handlers, as the rpc of the same name.
#define PQCACHED_ENTRY(group, type, name) Bound<&Handlers::group, &type::name>::Entry(Rpc::k##name)

std::vector<RpcEntry> MakeEntries() {
  return {
      PQCACHED_ENTRY(sequences, SequenceHandlers, OpenCache),
      PQCACHED_ENTRY(sequences, SequenceHandlers, CreateSequence),
      PQCACHED_ENTRY(sequences, SequenceHandlers, DropSequence),
      PQCACHED_ENTRY(sequences, SequenceHandlers, TruncateSequence),
      PQCACHED_ENTRY(sequences, SequenceHandlers, ForkSequence),
      PQCACHED_ENTRY(sequences, SequenceHandlers, ForkSequences),
      PQCACHED_ENTRY(sequences, SequenceHandlers, SuspendSequence),
      PQCACHED_ENTRY(sequences, SequenceHandlers, ResumeSequence),
      PQCACHED_ENTRY(sequences, SequenceHandlers, MatchPrefix),
      PQCACHED_ENTRY(sequences, SequenceHandlers, ClosePrefill),
      PQCACHED_ENTRY(sequences, SequenceHandlers, Admit),
      PQCACHED_ENTRY(rows, RowHandlers, Append),
      PQCACHED_ENTRY(rows, RowHandlers, Commit),
      PQCACHED_ENTRY(queries, QueryHandlers, TopK),
      PQCACHED_ENTRY(queries, QueryHandlers, Score),
      PQCACHED_ENTRY(queries, QueryHandlers, FetchBlocks),
      PQCACHED_ENTRY(queries, QueryHandlers, FetchTokens),
      PQCACHED_ENTRY(queries, QueryHandlers, Attend),
      PQCACHED_ENTRY(queries, QueryHandlers, AttendRange),
      PQCACHED_ENTRY(leases, LeaseHandlers, Attach),
      PQCACHED_ENTRY(leases, LeaseHandlers, Detach),
      PQCACHED_ENTRY(sequences, SequenceHandlers, OpenPageCache),
      PQCACHED_ENTRY(pages, PageHandlers, PutPages),
      PQCACHED_ENTRY(pages, PageHandlers, GetPages),
      PQCACHED_ENTRY(pages, PageHandlers, FindPages),
      {v1::BuildIndexRequest::default_instance(), v1::BuildProgress::default_instance(),
       Rpc::kBuildIndex, &Build},
      {v1::WatchEventsRequest::default_instance(), v1::CacheEvents::default_instance(),
       Rpc::kWatchEvents, &Watch},
      PQCACHED_ENTRY(admin, AdminHandlers, GetServerInfo),
      PQCACHED_ENTRY(admin, AdminHandlers, ListCaches),
      PQCACHED_ENTRY(admin, AdminHandlers, ListSequences),
      PQCACHED_ENTRY(admin, AdminHandlers, DescribeSequence),
      PQCACHED_ENTRY(admin, AdminHandlers, Stats),
      PQCACHED_ENTRY(admin, AdminHandlers, SetLogLevel),
      PQCACHED_ENTRY(admin, AdminHandlers, ListLeases),
      PQCACHED_ENTRY(admin, AdminHandlers, Evict),
      PQCACHED_ENTRY(admin, AdminHandlers, Pin),
      PQCACHED_ENTRY(admin, AdminHandlers, Drain),
      PQCACHED_ENTRY(admin, AdminHandlers, SelfTest),
      PQCACHED_ENTRY(admin, AdminHandlers, EraseTenant),
      PQCACHED_ENTRY(admin, AdminHandlers, DropCache),
      PQCACHED_ENTRY(admin, AdminHandlers, ListSessions),
      PQCACHED_ENTRY(admin, AdminHandlers, ListIndexTypes),
      PQCACHED_ENTRY(admin, AdminHandlers, EndSession),
      PQCACHED_ENTRY(admin, AdminHandlers, ListTenantLimits),
      PQCACHED_ENTRY(admin, AdminHandlers, SetTenantLimits),
      PQCACHED_ENTRY(admin, AdminHandlers, EndQuarantine),
      PQCACHED_ENTRY(admin, AdminHandlers, ExportSequence),
      PQCACHED_ENTRY(admin, AdminHandlers, ImportSequence),
  };
}

kvstore::StoreOptions OptionsOf(const Config& config, const Surroundings& surroundings) {
  kvstore::StoreOptions options = StoreOptionsOf(config);
  options.keeper = surroundings.keeper;
  options.memory_root = surroundings.memory_root;
  return options;
}

}  // namespace

const std::vector<RpcEntry>& RpcEntries() {
  static const std::vector<RpcEntry>* const entries = new std::vector<RpcEntry>(MakeEntries());
  return *entries;
}

const RpcEntry& EntryOf(const google::protobuf::Descriptor& request) {
  for (const RpcEntry& entry : RpcEntries()) {
    if (entry.request.GetDescriptor() == &request) return entry;
  }
  std::abort();
}

DirectSidecar::DirectSidecar(const Config& with, const Surroundings& surroundings)
    : config(with),
      log(*Log::Open(config.log_level, config.log_file)),
      store(*kvstore::Store::Create(OptionsOf(config, surroundings))),
      limits(config),
      sessions(config.max_sessions, &limits),
      cleanups({.threads = 1, .queue = {.max_waiting = config.max_pending_calls}}),
      detached({config, *store, sessions, cleanups, *log, {.memory = surroundings.keeper}}),
      gate(config, boot_id, sessions, stats, *log),
      handlers({config, boot_id, *store, sessions, limits, detached, stats, gate, *log,
                [this](bool is_serving) { serving = is_serving; },
                [this](const SessionFilter& filter) { EndSessionsIf(filter); },
                [](const std::string&) { return WorkCounts{}; }}) {
  store->SetTenantQuotas(limits.Quotas());
  if (surroundings.keeper != nullptr) detached.Start();
  // protobuf makes the descriptors at their first use, by locks that ThreadSanitizer does not see.
  for (const RpcEntry& entry : RpcEntries()) {
    entry.request.GetDescriptor();
    entry.response.GetDescriptor();
  }
}

Client DirectSidecar::Open(const std::string& name, bool mapped, const std::string& tenant) {
  v1::SessionOpen open;
  open.set_client_name(name);
  open.set_tenant(tenant);
  open.set_protocol_version(1);
  return OpenSession(open, mapped);
}

Client DirectSidecar::Resume(const Client& earlier, bool mapped) {
  v1::SessionOpen open;
  open.set_resume_token(earlier.token);
  open.set_protocol_version(1);
  return OpenSession(open, mapped);
}

Client DirectSidecar::OpenSession(const v1::SessionOpen& open, bool mapped) {
  const absl::StatusOr<OpenedSession> opened = handlers.sessions.Open(open);
  if (!opened.ok()) std::abort();
  if (mapped &&
      !store->OpenLocalSession(opened->session.tenant, opened->session.id, kBootWord).ok())
    std::abort();
  {
    const kvstore::MutexLock lock(&mutex_);
    opened_.push_back(*opened);
  }
  return {opened->token, opened->session};
}

void DirectSidecar::Close(const Client& client) {
  handlers.sessions.Close({client.token, client.session});
}

void DirectSidecar::EndSessionsIf(const SessionFilter& filter) {
  std::vector<OpenedSession> all;
  {
    const kvstore::MutexLock lock(&mutex_);
    all = opened_;
  }
  for (const OpenedSession& each : all) {
    if (filter(each.session)) handlers.sessions.Close(each);
  }
}

SharedMapping DirectSidecar::OpenStaging(const Client& client, uint64_t slot_bytes,
                                         uint32_t slots) {
  absl::StatusOr<kvstore::SharedMemory> memory =
      store->OpenStaging(client.session.tenant, client.session.id, slot_bytes, slots);
  if (!memory.ok()) return {};
  return SharedMapping(std::move(memory->descriptor), memory->size_bytes, PROT_READ | PROT_WRITE);
}

absl::StatusOr<Call> DirectSidecar::Begin(const Client& client, Rpc rpc) {
  return gate.Begin(rpc, {.door = client.door,
                          .session_token = client.token,
                          .boot_id = boot_id,
                          .deadline = client.deadline,
                          .is_cancelled = client.is_cancelled});
}

absl::Status DirectSidecar::Call(const Client& client, const Message& request, Message* response) {
  const RpcEntry& entry = EntryOf(*request.GetDescriptor());
  const absl::StatusOr<service::Call> call = Begin(client, entry.rpc);
  if (!call.ok()) return call.status();
  return gate.Run(*call, [&](const service::Call& begun) {
    return entry.answer(handlers, begun, request, response);
  });
}

absl::Status DirectSidecar::Ingest(const Client& client, const std::vector<std::string>& messages,
                                   v1::IngestResponse* response) {
  const absl::StatusOr<service::Call> call = Begin(client, Rpc::kIngest);
  if (!call.ok()) return call.status();
  return gate.Run(*call, [&](const service::Call& begun) -> absl::Status {
    IngestRows rows = handlers.rows.BeginIngest();
    for (const std::string& bytes : messages) {
      if (absl::Status status = begun.Check(); !status.ok()) return status;
      IngestMessage message;
      absl::Status status = message.Parse(std::as_bytes(std::span(bytes)));
      if (status.ok()) status = rows.Take(begun, message);
      if (!status.ok()) return status;
    }
    if (absl::Status status = begun.Check(); !status.ok()) return status;
    return rows.Commit(begun, response);
  });
}

}  // namespace pqcached::service
