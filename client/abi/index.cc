// Implements pqc_index_make of index.h.
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "pqcached/index.h"

namespace pqcached::client {
namespace {

pqc_status MakeIndex(const char* type, const pqc_index_parameter* parameters, uint32_t count,
                     pqc_index* index) {
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
  return pqcached::client::Call(
      [&] { return pqcached::client::MakeIndex(type, parameters, parameter_count, index); });
}
