// The convenience session: a decoder keeps the rows of the sink and the window, and merges its
// attention over them with the attention over the selected tokens. Built only on the public calls.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/base/pack.h"
#include "client/base/token_names.h"
#include "client/step/handles.h"
#include "client/step/step.h"
#include "kernels/attend/attend.h"
#include "kernels/attend/merge.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {

// Rows of consecutive tokens as floats, [kv_heads][tokens][key | value].
struct OwnRows {
  uint64_t first_position = 0;
  uint64_t token_count = 0;
  std::vector<std::vector<float>> heads;

  uint64_t end() const { return first_position + token_count; }
};

// One layer of a decoder.
struct OwnLayer {
  LayerShape shape;
  OwnRows sink;
  OwnRows recent;
  std::vector<float> key, value;  // of the token in progress
};

}  // namespace pqcached::client

struct pqc_decoder {
  pqc_sequence* sequence = nullptr;
  std::shared_ptr<pqcached::client::ClientState> client;  // shared with its handle
  pqc_selection selection{};                              // refers to `excluded`
  std::vector<pqc_token_range> excluded;
  pqcached::kvstore::IndexDescriptor index;
  std::map<uint32_t, pqcached::client::OwnLayer> layers;
  std::map<uint32_t, pqcached::client::OwnLayer>::iterator next_layer;
  std::map<uint32_t, uint64_t> prefilled;  // tokens by layer
  bool decoding = false;                   // the prefill is complete
  bool indexed = false;
  uint64_t position = 0;  // of the token in progress; during the prefill, of its first token
  pqc_step* step = nullptr;
  pqcached::client::OwnedNames names;  // recorded with the token in progress
  pqcached::kvstore::ReadScratch scratch;
  std::vector<float> queries, output, lse, own_lse;
  std::vector<uint32_t> positions;
};

namespace pqcached::client {
namespace {

// Reads a tensor of one token with the given shape, as floats.
pqc_status ReadToken(const pqc_tensor* tensor, const char* name, uint32_t heads, uint32_t dim,
                     std::vector<float>* numbers) {
  if (!tensor) return Fail(PQC_INVALID_ARGUMENT, name, "must not be NULL");
  TensorView view;
  RETURN_IF_ERROR(ReadTensor(*tensor, name, &view));
  if (view.ndim != 2 || view.shape[0] != heads || view.shape[1] != dim) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape", name), "must be [%u, %u]", heads,
                dim);
  }
  std::vector<std::byte> packed(heads * BytesPerIndex(view));
  Pack(view, 0, heads, packed.data());
  numbers->resize(size_t{heads} * dim);
  kernels::ConvertElements(view.dtype, packed.data(), kernels::DType::kF32,
                           reinterpret_cast<std::byte*>(numbers->data()), numbers->size());
  return PQC_OK;
}

uint32_t RowFloats(const LayerShape& shape) { return shape.key_dim + shape.value_dim; }

// Fetches the sequence's stored rows [begin, end).
pqc_status FetchOwn(pqc_sequence* sequence, uint32_t layer, const LayerShape& shape, uint64_t begin,
                    uint64_t end, OwnRows* rows) {
  rows->first_position = begin;
  rows->token_count = end - begin;
  rows->heads.assign(shape.kv_heads, {});
  if (begin == end) return PQC_OK;
  const uint64_t numbers = (end - begin) * RowFloats(shape);
  std::vector<std::byte> bytes(numbers * shape.kv_heads * kernels::DTypeBytes(shape.dtype));
  RETURN_IF_ERROR(
      pqc_fetch_blocks(sequence, layer, {begin, end}, PQC_ROW, bytes.data(), bytes.size()));
  for (uint32_t head = 0; head < shape.kv_heads; ++head) {
    rows->heads[head].resize(numbers);
    kernels::ConvertElements(
        shape.dtype, bytes.data() + head * numbers * kernels::DTypeBytes(shape.dtype),
        kernels::DType::kF32, reinterpret_cast<std::byte*>(rows->heads[head].data()), numbers);
  }
  return PQC_OK;
}

// Adds the token in progress, and drops rows that no later window needs.
void Remember(OwnLayer& layer, uint64_t sink_tokens, uint64_t window_tokens) {
  const LayerShape& shape = layer.shape;
  OwnRows& recent = layer.recent;
  const size_t row = RowFloats(shape);
  const bool trim = recent.token_count >= 2 * window_tokens + 64;
  const uint64_t forget = trim ? recent.token_count - window_tokens : 0;
  // If the sink was not full when decoding began, rows move to it as they leave the window.
  OwnRows& sink = layer.sink;
  const bool grows = sink.end() == recent.first_position && sink.token_count < sink_tokens;
  const uint64_t moved = grows ? std::min(forget, sink_tokens - sink.token_count) : 0;
  for (uint32_t head = 0; head < shape.kv_heads; ++head) {
    std::vector<float>& rows = recent.heads[head];
    sink.heads[head].insert(sink.heads[head].end(), rows.begin(),
                            rows.begin() + static_cast<ptrdiff_t>(moved * row));
    rows.erase(rows.begin(), rows.begin() + static_cast<ptrdiff_t>(forget * row));
    const float* key = &layer.key[size_t{head} * shape.key_dim];
    const float* value = &layer.value[size_t{head} * shape.value_dim];
    rows.insert(rows.end(), key, key + shape.key_dim);
    rows.insert(rows.end(), value, value + shape.value_dim);
  }
  sink.token_count += moved;
  recent.first_position += forget;
  recent.token_count += 1 - forget;
}

void ForgetNewest(OwnLayer& layer) {
  const size_t row = RowFloats(layer.shape);
  for (std::vector<float>& rows : layer.recent.heads) rows.resize(rows.size() - row);
  --layer.recent.token_count;
}

// Adds the positions [begin, end) that are not excluded.
void AddPositions(std::span<const pqc_token_range> excluded_ranges, uint64_t begin, uint64_t end,
                  std::vector<uint32_t>* positions) {
  for (uint64_t position = begin; position < end; ++position) {
    const bool excluded = std::any_of(excluded_ranges.begin(), excluded_ranges.end(),
                                      [&](const pqc_token_range& range) {
                                        return range.begin <= position && position < range.end;
                                      });
    if (!excluded) positions->push_back(static_cast<uint32_t>(position));
  }
}

// Merges attention over the sink and the window, the token in progress included, into *output and
// *lse.
void MergeOwn(pqc_decoder& decoder, OwnLayer& layer) {
  const LayerShape& shape = layer.shape;
  const uint32_t group = shape.query_heads / shape.kv_heads;
  const uint64_t context = decoder.position + 1;
  const uint64_t sink_end = std::min(decoder.selection.sink_tokens, context);
  const uint64_t window = std::min(decoder.selection.window_tokens, context);
  decoder.positions.clear();
  AddPositions(decoder.excluded, 0, sink_end, &decoder.positions);
  AddPositions(decoder.excluded, std::max(sink_end, context - window), context, &decoder.positions);
  const kernels::AttendShape attend{.dtype = kernels::DType::kF32,
                                    .key_dim = shape.key_dim,
                                    .value_dim = shape.value_dim,
                                    .row_stride_bytes = RowFloats(shape) * sizeof(float),
                                    .group_size = group,
                                    .query_length = 1};
  std::vector<float> own(decoder.output.size());
  decoder.own_lse.resize(decoder.lse.size());
  for (uint32_t head = 0; head < shape.kv_heads; ++head) {
    std::vector<kernels::RowSpan> spans;
    const OwnRows& sink = layer.sink;
    // Sink rows that are also in `recent` are read from `recent`.
    const uint64_t sink_rows = std::min(sink.token_count, layer.recent.first_position);
    if (sink_rows > 0) {
      spans.push_back({.rows = reinterpret_cast<const std::byte*>(sink.heads[head].data()),
                       .token_count = static_cast<uint32_t>(sink_rows),
                       .first_position = 0});
    }
    spans.push_back({.rows = reinterpret_cast<const std::byte*>(layer.recent.heads[head].data()),
                     .token_count = static_cast<uint32_t>(layer.recent.token_count),
                     .first_position = static_cast<uint32_t>(layer.recent.first_position)});
    const size_t queries = size_t{head} * group;
    kernels::AttendRows(
        kernels::Exec{},
        {.shape = attend,
         .scale = shape.scale,
         .softcap = shape.softcap,
         .queries = {&decoder.queries[queries * shape.key_dim], size_t{group} * shape.key_dim},
         .spans = spans,
         .positions = decoder.positions,
         .output = {&own[queries * shape.value_dim], size_t{group} * shape.value_dim},
         .lse = {&decoder.own_lse[queries], group},
         .scratch = decoder.scratch.Bytes(kernels::AttendScratchBytes(attend))});
  }
  const kernels::Partial partials[] = {{decoder.output.data(), decoder.lse.data()},
                                       {own.data(), decoder.own_lse.data()}};
  kernels::MergePartials(kernels::Exec{}, {.query_count = shape.query_heads,
                                           .value_dim = shape.value_dim,
                                           .partials = partials,
                                           .output = decoder.output,
                                           .lse = decoder.lse});
}

// Returns true when there are tokens between the sink and the window.
bool Selects(const pqc_decoder& decoder) {
  const pqc_selection& selection = decoder.selection;
  const uint64_t context = decoder.position + 1;
  return context > selection.window_tokens &&
         context - selection.window_tokens > selection.sink_tokens;
}

pqc_status BuildOnce(pqc_decoder& decoder) {
  if (decoder.indexed || decoder.index.kind == kvstore::IndexKind::kFlat || decoder.position == 0) {
    return PQC_OK;
  }
  pqc_build_options options = PQC_INIT(pqc_build_options);
  options.index = decoder.selection.index;
  options.sink_tokens = decoder.selection.sink_tokens;
  const pqc_status status = pqc_build_index(decoder.sequence, &options);
  if (status != PQC_OK && status != PQC_ALREADY_EXISTS) return status;
  decoder.indexed = true;
  return PQC_OK;
}

// Starts decoding: builds the index, and fetches the stored rows of the sink and the window.
pqc_status BeginDecoding(pqc_decoder& decoder) {
  pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
  RETURN_IF_ERROR(pqc_sequence_describe(decoder.sequence, &info));
  decoder.position = info.token_count;
  const pqc_selection& selection = decoder.selection;
  const uint64_t tokens = info.token_count;
  for (auto& [number, layer] : decoder.layers) {
    const uint64_t sink_end = std::min(selection.sink_tokens, tokens);
    const uint64_t recent = tokens - std::min(selection.window_tokens, tokens);
    pqc_status status =
        FetchOwn(decoder.sequence, number, layer.shape, 0, std::min(sink_end, recent), &layer.sink);
    if (status == PQC_OK) {
      status = FetchOwn(decoder.sequence, number, layer.shape, recent, tokens, &layer.recent);
    }
    if (status != PQC_OK) return status;
  }
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
  std::vector<pqc_layer_rows> rows;
  std::vector<uint64_t> shapes(6 * decoder.layers.size());
  uint64_t* shape = shapes.data();
  for (auto& [number, layer] : decoder.layers) {
    pqc_layer_rows of_layer = PQC_INIT(pqc_layer_rows);
    of_layer.layer = number;
    const uint32_t kv_heads = layer.shape.kv_heads;
    const auto fill = [&](std::vector<float>& numbers, uint32_t dim, pqc_tensor* tensor) {
      shape[0] = 1;
      shape[1] = kv_heads;
      shape[2] = dim;
      tensor->ptr = numbers.data();
      tensor->dtype = PQC_F32;
      tensor->ndim = 3;
      tensor->shape = shape;
      shape += 3;
    };
    fill(layer.key, layer.shape.key_dim, &of_layer.keys);
    fill(layer.value, layer.shape.value_dim, &of_layer.values);
    rows.push_back(of_layer);
  }
  const pqc_row_options names = decoder.names.view();
  return pqc_step_end_with(std::exchange(decoder.step, nullptr), rows.data(),
                           static_cast<uint32_t>(rows.size()), nullptr, &names);
}

// Computes the selected tokens' attention, then merges the decoder's own part.
pqc_status DecodeLayer(pqc_decoder& decoder, uint32_t number, OwnLayer& layer) {
  const LayerShape& shape = layer.shape;
  decoder.output.assign(size_t{shape.query_heads} * shape.value_dim, 0);
  decoder.lse.assign(shape.query_heads, -INFINITY);
  if (Selects(decoder)) {
    const uint64_t dims[] = {1, shape.query_heads, shape.key_dim};
    pqc_tensor queries{};
    queries.ptr = decoder.queries.data();
    queries.dtype = PQC_F32;
    queries.ndim = 3;
    queries.shape = dims;
    pqc_step_attention out = PQC_INIT(pqc_step_attention);
    out.output = decoder.output.data();
    out.output_capacity = decoder.output.size();
    out.lse = decoder.lse.data();
    out.lse_capacity = decoder.lse.size();
    RETURN_IF_ERROR(pqc_step_attend(decoder.step, number, &queries, nullptr, &out));
  }
  Remember(layer, decoder.selection.sink_tokens, decoder.selection.window_tokens);
  MergeOwn(decoder, layer);
  return PQC_OK;
}

// Resets the token in progress, so that it can be decoded again from its first layer on.
void AbandonToken(pqc_decoder& decoder) {
  pqc_step_abandon(std::exchange(decoder.step, nullptr));
  for (auto& [number, layer] : decoder.layers) {
    if (layer.recent.end() == decoder.position + 1) ForgetNewest(layer);
  }
  decoder.next_layer = decoder.layers.begin();
  decoder.names.Clear();
}

pqc_status Open(pqc_sequence* sequence, const pqc_selection* selection, pqc_decoder** decoder) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  if (!decoder) return Fail(PQC_INVALID_ARGUMENT, "decoder", "must not be NULL");
  *decoder = nullptr;
  auto opened = std::make_unique<pqc_decoder>();
  const CacheState& cache = *sequence->state->cache;
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
  for (const auto& [number, shape] : cache.stored_layers) {
    opened->layers[number].shape = shape;
  }
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
  OwnLayer& layer = decoder->next_layer->second;
  const LayerShape& shape = layer.shape;
  pqc_status status =
      ReadToken(query, "query", shape.query_heads, shape.key_dim, &decoder->queries);
  if (status == PQC_OK) status = ReadToken(key, "key", shape.kv_heads, shape.key_dim, &layer.key);
  if (status == PQC_OK) {
    status = ReadToken(value, "value", shape.kv_heads, shape.value_dim, &layer.value);
  }
  if (status != PQC_OK) return status;
  const uint64_t needed = uint64_t{shape.query_heads} * shape.value_dim;
  if (output_capacity < needed) {
    return Fail(PQC_OUT_OF_RANGE, "output_capacity", "%llu, but %llu are needed",
                static_cast<unsigned long long>(output_capacity),
                static_cast<unsigned long long>(needed));
  }
  pqc_row_options names;
  RETURN_IF_ERROR(ReadRowOptions(options, "options", kStepNames, &names));
  if (HasNames(names)) decoder->names.Assign(names);
  if (!decoder->decoding) status = BeginDecoding(*decoder);
  if (status == PQC_OK && !decoder->step) status = BeginStep(*decoder);
  if (status == PQC_OK) status = DecodeLayer(*decoder, number, layer);
  const bool last = std::next(decoder->next_layer) == decoder->layers.end();
  if (status == PQC_OK && last) status = EndStep(*decoder);
  if (status != PQC_OK) {
    const RefusalBuffer reason = LastRefusal();
    AbandonToken(*decoder);
    return Fail(status, reason);
  }
  std::copy(decoder->output.begin(), decoder->output.end(), output);
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

using pqcached::client::Call;

extern "C" {

pqc_status pqc_decoder_open(pqc_sequence* sequence, const pqc_selection* selection,
                            pqc_decoder** decoder) {
  return Call([&] { return pqcached::client::Open(sequence, selection, decoder); });
}

void pqc_decoder_close(pqc_decoder* decoder) {
  if (!decoder) return;
  pqc_step_abandon(decoder->step);
  delete decoder;
}

pqc_status pqc_decoder_prefill(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* keys,
                               const pqc_tensor* values) {
  return pqc_decoder_prefill_with(decoder, layer, keys, values, nullptr);
}

pqc_status pqc_decoder_prefill_with(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* keys,
                                    const pqc_tensor* values, const pqc_row_options* options) {
  return Call([&] { return pqcached::client::Prefill(decoder, layer, keys, values, options); });
}

pqc_status pqc_decoder_decode(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* query,
                              const pqc_tensor* key, const pqc_tensor* value, float* output,
                              uint64_t output_capacity) {
  return pqc_decoder_decode_with(decoder, layer, query, key, value, nullptr, output,
                                 output_capacity);
}

pqc_status pqc_decoder_decode_with(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* query,
                                   const pqc_tensor* key, const pqc_tensor* value,
                                   const pqc_row_options* options, float* output,
                                   uint64_t output_capacity) {
  return Call([&] {
    return pqcached::client::Decode(decoder, layer, query, key, value, options, output,
                                    output_capacity);
  });
}

}  // extern "C"
