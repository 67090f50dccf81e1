// The convenience session: a decoder goes through one sequence, token by token and layer by layer,
// with steps of one item. Built only on the public calls.
#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/base/token_names.h"
#include "client/step/handles.h"
#include "client/step/step.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "pqcached/decode.h"

struct pqc_decoder {
  using Layers = std::map<uint32_t, pqcached::client::LayerShape>;

  pqc_sequence* sequence = nullptr;
  std::shared_ptr<pqcached::client::ClientState> client;  // shared with its handle
  pqc_selection selection{};                              // refers to `excluded`
  std::vector<pqc_token_range> excluded;
  pqcached::kvstore::IndexDescriptor index;
  Layers layers;
  Layers::const_iterator next_layer;
  std::map<uint32_t, uint64_t> prefilled;  // tokens by layer
  bool decoding = false;                   // the prefill is complete
  bool indexed = false;
  uint64_t position = 0;  // of the token in progress; during the prefill, of its first token
  pqc_step* step = nullptr;
  pqcached::client::OwnedNames names;  // recorded with the token in progress
};

namespace pqcached::client {
namespace {

// Checks a tensor of one token.
pqc_status CheckToken(const pqc_tensor* tensor, const char* name, uint32_t heads, uint32_t dim) {
  if (!tensor) return Fail(PQC_INVALID_ARGUMENT, name, "must not be NULL");
  TensorView view;
  RETURN_IF_ERROR(ReadTensor(*tensor, name, &view));
  if (view.ndim == 2 && view.shape[0] == heads && view.shape[1] == dim) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape", name), "must be [%u, %u]", heads,
              dim);
}

// Returns true when there are tokens between the sink and the window.
bool Selects(const pqc_decoder& decoder) {
  const pqc_selection& selection = decoder.selection;
  const uint64_t context = decoder.position + 1;
  return context > selection.window_tokens &&
         context - selection.window_tokens > selection.sink_tokens;
}

pqc_status BuildOnce(pqc_decoder& decoder) {
  if (decoder.indexed || !kvstore::NeedsBuild(decoder.index) || decoder.position == 0 ||
      !decoder.sequence->state->cache->has_indexed_layers) {
    return PQC_OK;
  }
  pqc_build_options options = PQC_INIT(pqc_build_options);
  options.index = decoder.selection.index;
  options.sink_tokens = decoder.selection.sink_tokens;
  const pqc_status status = pqc_build_index(decoder.sequence, &options);
  // A plug-in that is switched off is not built, and its layers are searched exactly.
  const bool is_off = status == PQC_FAILED_PRECONDITION && kvstore::IsPlugin(decoder.index);
  if (status != PQC_OK && status != PQC_ALREADY_EXISTS && !is_off) return status;
  decoder.indexed = true;
  return PQC_OK;
}

// Starts decoding behind the tokens that the sequence has.
pqc_status BeginDecoding(pqc_decoder& decoder) {
  pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
  RETURN_IF_ERROR(pqc_sequence_describe(decoder.sequence, &info));
  decoder.position = info.token_count;
  decoder.decoding = true;
  return PQC_OK;
}

pqc_status BeginStep(pqc_decoder& decoder) {
  if (Selects(decoder)) {
    RETURN_IF_ERROR(BuildOnce(decoder));
  }
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = decoder.sequence;
  item.query_position = decoder.position;
  pqc_step_options options = PQC_INIT(pqc_step_options);
  // When there is nothing to select, the index need not exist.
  options.selection = Selects(decoder) ? &decoder.selection : nullptr;
  pqc_client client{decoder.client};
  return pqc_step_begin(&client, &item, 1, &options, &decoder.step);
}

pqc_status EndStep(pqc_decoder& decoder) {
  const pqc_row_options names = decoder.names.view();
  return pqc_step_end_with(std::exchange(decoder.step, nullptr), nullptr, 0, nullptr, &names);
}

// Gives a refusal of pqc_step_decode the names of the decoder's arguments.
RefusalBuffer InDecoder(RefusalBuffer refusal) {
  constexpr std::pair<std::string_view, const char*> kNames[] = {
      {"queries", "query"}, {"keys", "key"}, {"values", "value"}};
  for (const auto& [of_step, of_decoder] : kNames) {
    if (refusal.field == of_step) {
      const std::string text = refusal.text;
      SetRefusal(&refusal, of_decoder, text.c_str());
    }
  }
  return refusal;
}

pqc_status DecodeLayer(pqc_decoder& decoder, uint32_t number, const pqc_tensor* query,
                       const pqc_tensor* key, const pqc_tensor* value, float* output,
                       uint64_t output_capacity) {
  pqc_step_attention out = PQC_INIT(pqc_step_attention);
  out.output = output;
  out.output_capacity = output_capacity;
  const pqc_status status =
      pqc_step_decode(decoder.step, number, query, key, value, &decoder.selection, &out);
  return status == PQC_OK ? PQC_OK : Fail(status, InDecoder(LastRefusal()));
}

// Resets the token in progress, so that it can be decoded again from its first layer on.
void AbandonToken(pqc_decoder& decoder) {
  pqc_step_abandon(std::exchange(decoder.step, nullptr));
  decoder.next_layer = decoder.layers.begin();
  decoder.names.Clear();
}

pqc_status Open(pqc_sequence* sequence, const pqc_selection* selection, pqc_decoder** decoder) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  if (!decoder) return Fail(PQC_INVALID_ARGUMENT, "decoder", "must not be NULL");
  *decoder = nullptr;
  auto opened = std::make_unique<pqc_decoder>();
  const CacheState& cache = *sequence->state->cache;
  for (const auto& [layer, shape] : cache.stored_layers) {
    if (shape.has_keys()) continue;
    return Fail(PQC_FAILED_PRECONDITION, "sequence",
                "layer %u is of kind PQC_LAYERS_VALUES, to which a decoder cannot attend", layer);
  }
  kvstore::Selection checked;
  RETURN_IF_ERROR(ReadSelection(selection, cache.default_index, &checked));
  opened->index = checked.index;
  RETURN_IF_ERROR(ReadStruct(selection, "selection", &opened->selection));
  const pqc_selection& read = opened->selection;
  opened->excluded.assign(read.excluded, read.excluded + read.excluded_count);
  opened->selection.excluded = opened->excluded.data();
  if (read.window_tokens == 0) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.window_tokens",
                "0, must be at least 1: the token attends to itself");
  }
  opened->sequence = sequence;
  opened->client = cache.client;
  opened->layers = cache.stored_layers;
  opened->next_layer = opened->layers.begin();
  *decoder = opened.release();
  return PQC_OK;
}

pqc_status Prefill(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* keys,
                   const pqc_tensor* values, const pqc_row_options* options) {
  if (!decoder) return Fail(PQC_INVALID_ARGUMENT, "decoder", "must not be NULL");
  if (decoder->decoding) {
    return Fail(PQC_FAILED_PRECONDITION, "decoder", "the prefill is over; decode token by token");
  }
  if (decoder->prefilled.empty()) {  // the sequence may already have tokens
    pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
    RETURN_IF_ERROR(pqc_sequence_describe(decoder->sequence, &info));
    decoder->position = info.token_count;
  }
  uint64_t& first = decoder->prefilled.try_emplace(layer, decoder->position).first->second;
  RETURN_IF_ERROR(pqc_ingest_with(decoder->sequence, layer, first, keys, values, options));
  first += keys->block_table ? keys->block_table->token_count : keys->shape[0];
  return PQC_OK;
}

pqc_status Decode(pqc_decoder* decoder, uint32_t number, const pqc_tensor* query,
                  const pqc_tensor* key, const pqc_tensor* value, const pqc_row_options* options,
                  float* output, uint64_t output_capacity) {
  if (!decoder) return Fail(PQC_INVALID_ARGUMENT, "decoder", "must not be NULL");
  if (!output) return Fail(PQC_INVALID_ARGUMENT, "output", "must not be NULL");
  if (decoder->next_layer->first != number) {
    return Fail(PQC_INVALID_ARGUMENT, "layer", "%u, but layer %u of position %llu is next", number,
                decoder->next_layer->first, static_cast<unsigned long long>(decoder->position));
  }
  const LayerShape& shape = decoder->next_layer->second;
  RETURN_IF_ERROR(CheckToken(query, "query", shape.query_heads, shape.key_dim));
  RETURN_IF_ERROR(CheckToken(key, "key", shape.kv_heads, shape.key_dim));
  RETURN_IF_ERROR(CheckToken(value, "value", shape.kv_heads, shape.value_dim));
  const uint64_t needed = uint64_t{shape.query_heads} * shape.value_dim;
  if (output_capacity < needed) {
    return Fail(PQC_OUT_OF_RANGE, "output_capacity", "%llu, but %llu are needed",
                static_cast<unsigned long long>(output_capacity),
                static_cast<unsigned long long>(needed));
  }
  pqc_row_options names;
  RETURN_IF_ERROR(ReadRowOptions(options, "options", kStepNames, &names));
  if (HasNames(names)) decoder->names.Assign(names);
  pqc_status status = decoder->decoding ? PQC_OK : BeginDecoding(*decoder);
  if (status == PQC_OK && !decoder->step) status = BeginStep(*decoder);
  if (status == PQC_OK) {
    status = DecodeLayer(*decoder, number, query, key, value, output, output_capacity);
  }
  const bool last = std::next(decoder->next_layer) == decoder->layers.end();
  if (status == PQC_OK && last) status = EndStep(*decoder);
  if (status != PQC_OK) {
    const RefusalBuffer reason = LastRefusal();
    AbandonToken(*decoder);
    return Fail(status, reason);
  }
  if (last) {
    ++decoder->position;
    decoder->names.Clear();
    decoder->next_layer = decoder->layers.begin();
  } else {
    ++decoder->next_layer;
  }
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

using pqcached::client::CallRecord;
using pqcached::client::RecordedCall;
using pqcached::client::RecordedClose;

extern "C" {

pqc_status pqc_decoder_open(pqc_sequence* sequence, const pqc_selection* selection,
                            pqc_decoder** decoder) {
  return RecordedCall(
      "pqc_decoder_open",
      [&](CallRecord& call) { call.Handle("sequence", sequence).Opens("decoder", decoder); },
      [&] { return pqcached::client::Open(sequence, selection, decoder); });
}

void pqc_decoder_close(pqc_decoder* decoder) {
  if (!decoder) return;
  RecordedClose("pqc_decoder_close", "decoder", decoder, [&] {
    pqc_step_abandon(decoder->step);
    delete decoder;
  });
}

pqc_status pqc_decoder_prefill(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* keys,
                               const pqc_tensor* values) {
  return RecordedCall(
      "pqc_decoder_prefill",
      [&](CallRecord& call) {
        call.Handle("decoder", decoder).Number("layer", layer).Tokens(keys);
      },
      [&] { return pqcached::client::Prefill(decoder, layer, keys, values, nullptr); });
}

pqc_status pqc_decoder_prefill_with(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* keys,
                                    const pqc_tensor* values, const pqc_row_options* options) {
  return RecordedCall(
      "pqc_decoder_prefill_with",
      [&](CallRecord& call) {
        call.Handle("decoder", decoder).Number("layer", layer).Tokens(keys);
      },
      [&] { return pqcached::client::Prefill(decoder, layer, keys, values, options); });
}

pqc_status pqc_decoder_decode(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* query,
                              const pqc_tensor* key, const pqc_tensor* value, float* output,
                              uint64_t output_capacity) {
  return RecordedCall(
      "pqc_decoder_decode",
      [&](CallRecord& call) {
        call.Handle("decoder", decoder).Number("layer", layer).Number("capacity", output_capacity);
      },
      [&] {
        return pqcached::client::Decode(decoder, layer, query, key, value, nullptr, output,
                                        output_capacity);
      });
}

pqc_status pqc_decoder_decode_with(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* query,
                                   const pqc_tensor* key, const pqc_tensor* value,
                                   const pqc_row_options* options, float* output,
                                   uint64_t output_capacity) {
  return RecordedCall(
      "pqc_decoder_decode_with",
      [&](CallRecord& call) {
        call.Handle("decoder", decoder).Number("layer", layer).Number("capacity", output_capacity);
      },
      [&] {
        return pqcached::client::Decode(decoder, layer, query, key, value, options, output,
                                        output_capacity);
      });
}

}  // extern "C"
