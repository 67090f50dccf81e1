// Implements the calls that write rows and build indexes.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/base/token_names.h"
#include "client/local/ingest.h"
#include "client/step/handles.h"
#include "client/step/layer_rows.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// Ingest names the rows "chunk.rows", Commit "rows[0]".
pqc_status ReportIngest(pqc_status status, const RefusalBuffer& error) {
  return Report(status, error,
                {{"chunk.rows", ""},
                 {"chunk", ""},
                 {"header.names.begin", "options.names_begin"},
                 {"names.begin", "options.names_begin"},
                 {"header.names", "options"},
                 {"names", "options"},
                 {"header", ""},
                 {"rows[0]", ""}});
}

pqc_status Ingest(pqc_sequence* sequence, uint32_t layer, uint64_t first_position,
                  const pqc_tensor* keys, const pqc_tensor* values,
                  const pqc_row_options* caller_options) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  if (!values) return Fail(PQC_INVALID_ARGUMENT, "values", "must not be NULL");
  LayerShape shape;
  RowBlock rows{.layer = layer, .keys = {}, .values = {}};
  RETURN_IF_ERROR(FindLayer(*sequence->state->cache, layer, "layer", &shape));
  if (!keys && shape.has_keys()) return Fail(PQC_INVALID_ARGUMENT, "keys", "must not be NULL");
  RETURN_IF_ERROR(ReadRows(keys ? *keys : pqc_tensor{}, *values, shape, "", &rows));
  RETURN_IF_ERROR(CheckPositions(first_position, rows.keys.shape[0]));
  pqc_row_options names;
  RETURN_IF_ERROR(ReadRowOptions(caller_options, "options", {}, &names));
  if (HasNames(names)) rows.names = &names;
  const ChangeScope changing(sequence);
  if (changing.status() != PQC_OK) return changing.status();
  SequenceState& state = *sequence->state;
  state.OpenPrefill();
  const auto report = [&](pqc_status status, const RefusalBuffer& error) {
    if (status == PQC_OK) state.AddIngested(layer, first_position + rows.keys.shape[0]);
    return ReportIngest(status, error);
  };
  if (state.local) {
    bool remote_instead = false;
    const pqc_status status =
        IngestLocally({.staging = state.local->session().staging(),
                       .remote = changing.remote(),
                       .sequence_id = state.sequence_id,
                       .timeout_ms = state.cache->client->timeout_ms,
                       .max_tensor_bytes = state.cache->client->max_message_bytes},
                      first_position, rows, &remote_instead);
    if (!remote_instead) return report(status, LastRefusal());
  }
  RefusalBuffer error;
  const pqc_status status =
      changing.remote().Ingest(state.sequence_id, first_position, rows, &error);
  return report(status, error);
}

pqc_status Append(pqc_sequence* sequence, uint64_t first_position, const pqc_layer_rows* layers,
                  uint32_t layer_count, const pqc_row_options* caller_options,
                  uint64_t* token_count) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  std::vector<RowBlock> blocks;
  RETURN_IF_ERROR(ReadLayers(*sequence->state->cache, layers, layer_count, kOnHost, &blocks));
  RETURN_IF_ERROR(CheckPositions(first_position, blocks[0].keys.shape[0]));
  pqc_row_options names;
  RETURN_IF_ERROR(ReadRowOptions(caller_options, "options", {}, &names));
  const ChangeScope changing(sequence);
  if (changing.status() != PQC_OK) return changing.status();
  SequenceState& state = *sequence->state;
  ImageBytes image;
  RefusalBuffer error;
  AppendItem item{.sequence_id = state.sequence_id,
                  .first_position = first_position,
                  .rows = blocks.data(),
                  .row_block_count = layer_count,
                  .names = HasNames(names) ? &names : nullptr,
                  .lease = state.local ? state.local->lease() : LeaseView{},
                  .image = state.local ? image.sink() : ImageSink{}};
  const pqc_status status = changing.remote().Append(&item, 1, &error);
  if (status != PQC_OK)
    return Report(status, error,
                  {{"items[0].rows", "layers"},
                   {"items[0].names.begin", "options.names_begin"},
                   {"items[0].names", "options"},
                   {"items[0]", ""}});
  state.token_count = item.token_count;
  if (token_count) *token_count = item.token_count;
  return state.local ? state.local->Install(item.lease, image) : PQC_OK;
}

pqc_status NameTokens(pqc_sequence* sequence, const pqc_row_options* caller_options) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  if (!caller_options) return Fail(PQC_INVALID_ARGUMENT, "options", "must not be NULL");
  pqc_row_options names;
  RETURN_IF_ERROR(ReadRowOptions(caller_options, "options", {}, &names));
  const ChangeScope changing(sequence);
  if (changing.status() != PQC_OK) return changing.status();
  if (!HasNames(names)) return PQC_OK;
  RefusalBuffer error;
  return ReportIngest(changing.remote().NameTokens(sequence->state->sequence_id, names, &error),
                      error);
}

pqc_status CheckRebuild(const pqc_build_options& options) {
  if (options.rebuild > 1) {
    return Fail(PQC_INVALID_ARGUMENT, "options.rebuild", "%u, must be 0 or 1", options.rebuild);
  }
  if (options.rebuild == 0 && options.rebuild_drift != 0) {
    return Fail(PQC_INVALID_ARGUMENT, "options.rebuild_drift", "only with rebuild");
  }
  if (options.rebuild == 0 && options.rebuild_tokens != 0) {
    return Fail(PQC_INVALID_ARGUMENT, "options.rebuild_tokens", "only with rebuild");
  }
  return PQC_OK;
}

// Maps the index that has replaced another one. Without an answer, steps use the earlier one until
// the next row brings its successor.
void UseNewest(const SequenceState& state) {
  std::shared_ptr<Image> image;
  if (state.local && state.local->lease().lease_id != 0 && state.local->HasNewer() &&
      state.local->Refresh(&image) != PQC_OK) {
    ClearLastError();
  }
}

pqc_status Build(pqc_sequence* sequence, const pqc_build_options* caller_options) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  pqc_build_options options;
  RETURN_IF_ERROR(ReadStruct(caller_options, "options", &options));
  RETURN_IF_ERROR(CheckIndex(options.index, "options.index"));
  RETURN_IF_ERROR(CheckRebuild(options));
  if (options.index.kind == PQC_INDEX_DEFAULT) {
    options.index = ToIndex(sequence->state->cache->default_index);
  }
  RETURN_IF_ERROR(CheckSendable(ToDescriptor(options.index), "options.index",
                                sequence->state->cache->client->remote_version));
  const auto begun = DeadlineClock::now();
  Remote* remote = nullptr;
  {
    // Rows may be written, and steps made, during the build: the sidecar codes new rows at its end.
    const ChangeScope changing(sequence);
    if (changing.status() != PQC_OK) return changing.status();
    remote = &changing.remote();
  }
  if (options.timeout_ms != 0) {  // the wait has used some of it
    const auto waited = std::chrono::floor<std::chrono::milliseconds>(DeadlineClock::now() - begun);
    options.timeout_ms =
        static_cast<uint32_t>(std::max<int64_t>(1, int64_t{options.timeout_ms} - waited.count()));
  }
  RefusalBuffer error;
  const pqc_status status = remote->BuildIndex(sequence->state->sequence_id, options, &error);
  if (status == PQC_OK && options.rebuild) UseNewest(*sequence->state);
  return Report(status, error,
                {{"index", "options.index"},
                 {"iterations", "options.iterations"},
                 {"rebuild.drift_ratio", "options.rebuild_drift"},
                 {"rebuild.new_tokens", "options.rebuild_tokens"},
                 {"rebuild", "options.rebuild"},
                 {"train_tokens", "options.train_tokens"},
                 {"sink_tokens", "options.sink_tokens"}});
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_ingest(pqc_sequence* sequence, uint32_t layer, uint64_t first_position,
                      const pqc_tensor* keys, const pqc_tensor* values) {
  return pqcached::client::RecordedCall(
      "pqc_ingest",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("layer", layer)
            .Number("first_position", first_position)
            .Tokens(keys && keys->ndim > 0 ? keys : values);
      },
      [&] {
        return pqcached::client::Ingest(sequence, layer, first_position, keys, values, nullptr);
      });
}

pqc_status pqc_ingest_with(pqc_sequence* sequence, uint32_t layer, uint64_t first_position,
                           const pqc_tensor* keys, const pqc_tensor* values,
                           const pqc_row_options* options) {
  return pqcached::client::RecordedCall(
      "pqc_ingest_with",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("layer", layer)
            .Number("first_position", first_position)
            .Tokens(keys && keys->ndim > 0 ? keys : values);
      },
      [&] {
        return pqcached::client::Ingest(sequence, layer, first_position, keys, values, options);
      });
}

pqc_status pqc_sequence_name_tokens(pqc_sequence* sequence, const pqc_row_options* options) {
  return pqcached::client::RecordedCall(
      "pqc_sequence_name_tokens",
      [&](pqcached::client::CallRecord& call) { call.Handle("sequence", sequence); },
      [&] { return pqcached::client::NameTokens(sequence, options); });
}

pqc_status pqc_append(pqc_sequence* sequence, uint64_t first_position, const pqc_layer_rows* layers,
                      uint32_t layer_count, uint64_t* token_count) {
  return pqcached::client::RecordedCall(
      "pqc_append",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("first_position", first_position)
            .Layers(layers, layer_count);
      },
      [&] {
        return pqcached::client::Append(sequence, first_position, layers, layer_count, nullptr,
                                        token_count);
      });
}

pqc_status pqc_append_with(pqc_sequence* sequence, uint64_t first_position,
                           const pqc_layer_rows* layers, uint32_t layer_count,
                           const pqc_row_options* options, uint64_t* token_count) {
  return pqcached::client::RecordedCall(
      "pqc_append_with",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("sequence", sequence)
            .Number("first_position", first_position)
            .Layers(layers, layer_count);
      },
      [&] {
        return pqcached::client::Append(sequence, first_position, layers, layer_count, options,
                                        token_count);
      });
}

pqc_status pqc_build_index(pqc_sequence* sequence, const pqc_build_options* options) {
  return pqcached::client::RecordedCall(
      "pqc_build_index",
      [&](pqcached::client::CallRecord& call) { call.Handle("sequence", sequence); },
      [&] { return pqcached::client::Build(sequence, options); });
}

}  // extern "C"
