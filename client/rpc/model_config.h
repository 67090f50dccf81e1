// ReadModelConfig makes layer groups of a model's config.json.
//
// It is part of libpqcached_rpc because protobuf, which reads the JSON, is. Thread-safe.
#ifndef PQCACHED_CLIENT_RPC_MODEL_CONFIG_H_
#define PQCACHED_CLIENT_RPC_MODEL_CONFIG_H_

#include "client/base/remote.h"

namespace pqcached::client {

// Passes the groups to the sink, by the rules of pqc_model_read. Errors: PQC_INVALID_ARGUMENT.
pqc_status ReadModelConfig(const char* config_json, const GroupSink& sink,
                           RefusalBuffer* error) noexcept;

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_MODEL_CONFIG_H_
