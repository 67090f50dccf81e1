/* The example of model.h, compiled as C99. */
#include "pqcached/client.h"

pqc_status model_h_example(pqc_client* client, const char* config_json, pqc_cache** cache);

// clang-format off
// [example]
static pqc_status open_for_model(pqc_client* client, const char* config_json,
                                 pqc_cache** cache) {
  pqc_model* model;
  pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
  pqc_status status = pqc_model_read(config_json, NULL, &model);
  if (status != PQC_OK) return status;
  spec.name = "chat";
  spec.model_fingerprint = "my-model@main";
  spec.groups = pqc_model_groups(model, &spec.group_count);
  status = pqc_cache_open(client, &spec, cache);
  pqc_model_close(model);
  return status;
}
// [/example]
// clang-format on

pqc_status model_h_example(pqc_client* client, const char* config_json, pqc_cache** cache) {
  return open_for_model(client, config_json, cache);
}
