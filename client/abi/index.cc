// Implements pqc_index_make and pqc_client_index_make of index.h.
#include <vector>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/step/handles.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "pqcached/index.h"

namespace pqcached::client {
namespace {

// The first kRemoteVersion whose library makes indexes of plug-ins.
constexpr uint32_t kMakeIndexVersion = 18;

// `client`: whose sidecar may know more types; null = none.
pqc_status MakeIndex(const ClientState* client, const char* type,
                     const pqc_index_parameter* parameters, uint32_t count, pqc_index* index) {
  if (!type) return Fail(PQC_INVALID_ARGUMENT, "type", "must not be NULL");
  if (!index) return Fail(PQC_INVALID_ARGUMENT, "index", "must not be NULL");
  RETURN_IF_ERROR(CheckMemberSize(*index, "index"));
  std::vector<pqc_index_parameter> read(count);
  std::vector<kvstore::IndexArgument> arguments;
  for (uint32_t i = 0; i < count; ++i) {
    RETURN_IF_ERROR(ReadElement(parameters, i, "parameters", &read[i]));
    if (!read[i].name) {
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("parameters[%u].name", i),
                  "must not be NULL");
    }
    kvstore::IndexArgument argument{
        .name = read[i].name, .value_name = {}, .number = read[i].number};
    if (read[i].value_name) argument.value_name = read[i].value_name;
    arguments.push_back(argument);
  }
  if (client && !kvstore::FindIndexType(type)) {
    Remote* remote = nullptr;
    RETURN_IF_ERROR(GetRemote(*client, &remote));
    if (client->remote_version < kMakeIndexVersion) {
      return Fail(PQC_UNIMPLEMENTED, "type",
                  "libpqcached_rpc is older than indexes of plug-ins; install the library of the "
                  "client's release");
    }
    pqc_index made = PQC_INIT(pqc_index);
    RefusalBuffer error;
    const pqc_status status = remote->MakeIndex(type, read.data(), count, &made, &error);
    if (status == PQC_OK) *index = made;
    return Report(status, error);
  }
  kvstore::IndexDescriptor made;
  if (const auto refusal = kvstore::MakeIndex(type, arguments, "", &made); !refusal.ok()) {
    return Fail(refusal);
  }
  *index = ToIndex(made);
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

pqc_status pqc_index_make(const char* type, const pqc_index_parameter* parameters,
                          uint32_t parameter_count, pqc_index* index) {
  return pqcached::client::Call([&] {
    return pqcached::client::MakeIndex(nullptr, type, parameters, parameter_count, index);
  });
}

pqc_status pqc_client_index_make(pqc_client* client, const char* type,
                                 const pqc_index_parameter* parameters, uint32_t parameter_count,
                                 pqc_index* index) {
  return pqcached::client::RecordedCall(
      "pqc_client_index_make",
      [&](pqcached::client::CallRecord& call) { call.Handle("client", client); },
      [&] {
        using pqcached::client::Fail;
        if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
        return pqcached::client::MakeIndex(client->state.get(), type, parameters, parameter_count,
                                           index);
      });
}
