// Implements model.h.
#include <deque>
#include <memory>
#include <vector>

#include "client/abi/rpc_library.h"
#include "client/base/arguments.h"
#include "client/base/error.h"
#include "kernels/base/status_macros.h"
#include "pqcached/model.h"

struct pqc_model {
  std::vector<pqc_layer_group> groups;
  std::deque<std::vector<uint32_t>> layers;  // of the groups, which point to them
};

namespace pqcached::client {
namespace {

// The first kRemoteVersion whose library reads the configurations of models.
constexpr uint32_t kModelsVersion = 16;

struct Reading {
  pqc_model* model = nullptr;
  pqc_status status = PQC_OK;  // of the groups so far
};

// Copies a group of the library, whose struct may be smaller or larger than this one's.
void AddGroup(void* context, const pqc_layer_group& group) {
  Reading& reading = *static_cast<Reading*>(context);
  if (reading.status != PQC_OK) return;
  reading.status = Call([&] {
    pqc_layer_group copy;
    RETURN_IF_ERROR(ReadStruct(&group, "config", &copy));
    reading.model->layers.emplace_back(copy.layers, copy.layers + copy.layer_count);
    copy.layers = reading.model->layers.back().data();
    reading.model->groups.push_back(copy);
    return PQC_OK;
  });
}

pqc_status ReadModel(const char* config_json, const char* rpc_library_path, pqc_model** model) {
  if (!model) return Fail(PQC_INVALID_ARGUMENT, "model", "must not be NULL");
  *model = nullptr;
  if (!config_json) return Fail(PQC_INVALID_ARGUMENT, "config_json", "must not be NULL");
  const RpcEntry* entry = nullptr;
  RETURN_IF_ERROR(LoadRpcLibrary(rpc_library_path, "rpc_library_path", &entry));
  if (entry->remote_version < kModelsVersion) {
    return Fail(PQC_FAILED_PRECONDITION, "rpc_library_path",
                "the loaded libpqcached_rpc is too old to read configurations of models");
  }
  auto read = std::make_unique<pqc_model>();
  Reading reading{.model = read.get()};
  RefusalBuffer error;
  const pqc_status status = entry->read_model_config(config_json, {&reading, &AddGroup}, &error);
  if (status != PQC_OK) return Report(status, error);
  if (reading.status != PQC_OK) return reading.status;
  *model = read.release();
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_model_read(const char* config_json, const char* rpc_library_path,
                          pqc_model** model) {
  return pqcached::client::Call(
      [&] { return pqcached::client::ReadModel(config_json, rpc_library_path, model); });
}

const pqc_layer_group* pqc_model_groups(const pqc_model* model, uint32_t* count) {
  if (count) *count = model ? static_cast<uint32_t>(model->groups.size()) : 0;
  return model ? model->groups.data() : nullptr;
}

void pqc_model_close(pqc_model* model) { delete model; }

}  // extern "C"
