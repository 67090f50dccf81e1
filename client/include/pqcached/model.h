/* pqcached client: the layer groups of a model from its config.json. A part of client.h, which
 * includes it and whose conventions hold.
 *
 * Example, which opens a cache for a model:
 *
 *     static pqc_status open_for_model(pqc_client* client, const char* config_json,
 *                                      pqc_cache** cache) {
 *       pqc_model* model;
 *       pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
 *       pqc_status status = pqc_model_read(config_json, NULL, &model);
 *       if (status != PQC_OK) return status;
 *       spec.name = "chat";
 *       spec.model_fingerprint = "my-model@main";
 *       spec.groups = pqc_model_groups(model, &spec.group_count);
 *       status = pqc_cache_open(client, &spec, cache);
 *       pqc_model_close(model);
 *       return status;
 *     }
 */
/* Before the guard: client.h includes this header at its end, with the types that it needs. */
#include "pqcached/client.h"

#ifndef PQCACHED_MODEL_H_
#define PQCACHED_MODEL_H_

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pqc_model pqc_model;

/* Reads a model's config.json, as Transformers writes it: its content, not its path. The result
 * holds the layers with full attention as a group of kind PQC_LAYERS_SELECTED, and those with a
 * sliding window as one of kind PQC_LAYERS_WINDOW. Layers without attention (linear attention,
 * convolutions) are in no group. Rows are stored in the model's dtype, float32 as float16. The
 * layout of rotary pairs is the one that Transformers has for the model_type: an engine that
 * permutes its projections, as llama.cpp does, changes rope_layout in a copy of the groups. No RPC,
 * and no client is needed; rpc_library_path is that of pqc_client_options. *model is NULL on
 * errors.
 *
 * Errors: PQC_INVALID_ARGUMENT     no JSON object; or a field that is missing, or that pqcached
 *                                  cannot serve (latent attention, unknown kinds of layers), as
 *                                  "config.num_hidden_layers"
 *         PQC_FAILED_PRECONDITION  libpqcached_rpc cannot be loaded, or is older than 0.2 */
PQC_API pqc_status pqc_model_read(const char* config_json, const char* rpc_library_path,
                                  pqc_model** model);
/* Returns the groups, [*count], which are valid until the model is closed. */
PQC_API const pqc_layer_group* pqc_model_groups(const pqc_model* model, uint32_t* count);
/* Frees the model and its groups; caches that were opened with them stay. NULL does nothing. */
PQC_API void pqc_model_close(pqc_model* model);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_MODEL_H_ */
