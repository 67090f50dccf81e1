// Handlers answers all rpcs: the one object that the gRPC services, tests and fuzz targets call.
//
// Thread-safe. What it is made from must outlive it.
#ifndef PQCACHED_SERVICE_HANDLERS_HANDLERS_H_
#define PQCACHED_SERVICE_HANDLERS_HANDLERS_H_

#include <functional>
#include <string>

#include "kvstore/store.h"
#include "service/config/config.h"
#include "service/handlers/admin_handlers.h"
#include "service/handlers/build_handler.h"
#include "service/handlers/cache_specs.h"
#include "service/handlers/call_gate.h"
#include "service/handlers/lease_handlers.h"
#include "service/handlers/pages/page_handlers.h"
#include "service/handlers/query_handlers.h"
#include "service/handlers/row_handlers.h"
#include "service/handlers/sequence_handlers.h"
#include "service/handlers/session_handlers.h"
#include "service/session/detached_sessions.h"

namespace pqcached::service {

struct Handlers {
  struct Parts {
    const Config& config;
    const std::string& boot_id;
    kvstore::Store& store;
    Sessions& sessions;
    TenantLimitTable& limits;
    DetachedSessions& detached;
    RpcStats& stats;
    CallGate& gate;
    Log& log;
    std::function<void(bool)> set_serving;  // sets the status that the health service reports
    // As in AdminHandlers::Parts.
    std::function<void(const SessionFilter& filter)> end_sessions;
    std::function<WorkCounts(const std::string& tenant)> count_work;
  };

  explicit Handlers(const Parts& from)
      : specs(from.store),
        leases(from.store, from.config.max_message_bytes),
        sequences(from.store, from.sessions, specs, leases, from.log),
        rows(from.store, leases, from.config.max_message_bytes),
        pages(from.store, from.config.max_message_bytes),
        queries(from.store, specs, from.config.max_message_bytes),
        builds(from.store, specs, from.log),
        sessions(from.config, from.store, from.sessions, from.detached, from.log),
        admin({from.config, from.boot_id, from.store, from.sessions, from.limits, from.stats,
               from.gate, from.log, from.set_serving, from.end_sessions, from.count_work,
               from.detached}) {}

  CacheSpecs specs;
  LeaseHandlers leases;
  SequenceHandlers sequences;
  RowHandlers rows;
  PageHandlers pages;
  QueryHandlers queries;
  BuildHandler builds;
  SessionHandlers sessions;
  AdminHandlers admin;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_HANDLERS_H_
