#include "client/base/load.h"

#include <algorithm>
#include <array>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/base/pack.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/unpack.h"

namespace pqcached::client {
namespace {

// Results of at least this size are not read from the caches afterwards.
constexpr uint64_t kStreamBytes = uint64_t{1} << 20;

// Bytes of rows that are fetched at once.
constexpr uint64_t kFetchBytes = uint64_t{16} << 20;

FetchView FetchOf(uint64_t sequence_id, const LoadLayer& layer) {
  return {.sequence_id = sequence_id,
          .layer = layer.to.layer,
          .shape = layer.shape,
          .part = RowPart::kRow};
}

constexpr uint32_t kFetchRowsVersion = 17;  // of Remote
constexpr uint32_t kReadRowsVersion = 18;   // of Remote

// The rows that an RPC has fetched last, all of the same state of the sequence.
class FetchedRows {
 public:
  FetchedRows(Remote& remote, uint32_t remote_version)
      : remote_(remote), has_fetch_rows_(remote_version >= kFetchRowsVersion) {}

  pqc_status Fetch(const FetchView& fetch, kvstore::TokenRange tokens) {
    rows_.resize((tokens.end - tokens.begin) * fetch.shape.kv_heads * fetch.shape.row_bytes);
    RefusalBuffer error;
    const pqc_status status =
        has_fetch_rows_ ? remote_.FetchRows(fetch, tokens, rows_.data(), &rows_epoch_, &error)
                        : remote_.FetchBlocks(fetch, tokens, rows_.data(), &error);
    return Report(status, error, {{"ranges[0]", "tokens"}});
  }
  const std::byte* data() const { return rows_.data(); }
  uint64_t rows_epoch() const { return rows_epoch_; }

 private:
  Remote& remote_;
  const bool has_fetch_rows_;
  uint64_t rows_epoch_ = 0;
  std::vector<std::byte> rows_;
};

// Loads one layer by fetches of many rows, one after the other.
pqc_status LoadLayerByFetches(FetchedRows& rows, uint64_t sequence_id, const LoadItem& item,
                              const LoadLayer& layer, bool* has_begun) {
  const uint32_t row_bytes = layer.shape.row_bytes;
  const uint64_t step =
      std::max<uint64_t>(1, kFetchBytes / (uint64_t{layer.shape.kv_heads} * row_bytes));
  for (uint64_t end = item.tokens.end; end > item.tokens.begin;) {
    const uint64_t begin = end - std::min(step, end - item.tokens.begin);
    const pqc_status fetched = rows.Fetch(FetchOf(sequence_id, layer), {begin, end});
    if (fetched != PQC_OK) return *has_begun ? FailBegunLoad(fetched) : fetched;
    // Not before rows are there: without them nothing is written.
    if (end == item.tokens.end) RETURN_IF_ERROR(item.sink.Begin(layer, item.tokens.begin));
    *has_begun = true;
    std::array<const std::byte*, kvstore::kMaxKvHeads> heads;
    for (uint32_t head = 0; head < layer.shape.kv_heads; ++head) {
      heads[head] = rows.data() + head * (end - begin) * row_bytes;
    }
    item.sink.Write({.first_position = static_cast<uint32_t>(begin),
                     .token_count = static_cast<uint32_t>(end - begin),
                     .rows = {heads.data(), layer.shape.kv_heads}});
    end = begin;
  }
  RETURN_IF_ERROR(item.sink.Finish());
  return item.layer_done();
}

// Writes the rows of all layers while they are received.
class LayersWriter {
 public:
  explicit LayersWriter(const LoadItem& item) : item_(item) {}

  // `rows_epoch`: that of rows that were fetched before; 0 = none.
  pqc_status Read(Remote& remote, uint64_t sequence_id, uint64_t rows_epoch) {
    std::vector<FetchView> layers;
    layers.reserve(item_.layers.size());
    for (const LoadLayer& layer : item_.layers) layers.push_back(FetchOf(sequence_id, layer));
    RefusalBuffer error;
    const pqc_status status =
        Report(remote.ReadRows(layers.data(), static_cast<uint32_t>(layers.size()), item_.tokens,
                               {.context = this, .take = &Take}, &rows_epoch, &error),
               error, {{"ranges[0]", "tokens"}});
    if (status_ != PQC_OK) return status_;
    return begun_layers_ > 0 ? FailBegunLoad(status) : status;
  }

 private:
  static bool Take(void* context, uint32_t layer, uint32_t first_position, uint32_t token_count,
                   const std::byte* const* rows) {
    auto& self = *static_cast<LayersWriter*>(context);
    const LoadLayer& of = self.item_.layers[layer];
    self.status_ = self.Write(layer, {.first_position = first_position,
                                      .token_count = token_count,
                                      .rows = {rows, of.shape.kv_heads}});
    return self.status_ == PQC_OK;
  }

  pqc_status Write(uint32_t layer, const kvstore::RowRun& run) {
    // Not before rows are there: without them nothing is written.
    if (begun_layers_ == layer) {
      ++begun_layers_;
      missing_tokens_ = item_.tokens.end - item_.tokens.begin;
      RETURN_IF_ERROR(item_.sink.Begin(item_.layers[layer], item_.tokens.begin));
    }
    item_.sink.Write(run);
    missing_tokens_ -= run.token_count;
    if (missing_tokens_ > 0) return PQC_OK;
    RETURN_IF_ERROR(item_.sink.Finish());
    return item_.layer_done();
  }

  const LoadItem& item_;
  uint32_t begun_layers_ = 0;
  uint64_t missing_tokens_ = 0;  // of the last layer that has begun
  pqc_status status_ = PQC_OK;   // of the sink and of layer_done
};

// The target of a run of tokens, which ReadLoadLayers has checked.
kernels::UnpackTarget TargetOf(const TensorView& tensor, const PackRun& run) {
  return {.data = const_cast<std::byte*>(run.data),
          .dtype = tensor.dtype,
          .token_stride_bytes = StrideBytes(tensor, 0),
          .head_stride_bytes = StrideBytes(tensor, 1),
          .element_stride_bytes = StrideBytes(tensor, 2)};
}

}  // namespace

pqc_status HostSink::Begin(const LoadLayer& layer, uint64_t first_position) {
  layer_ = &layer;
  first_position_ = first_position;
  return PQC_OK;
}

void HostSink::Write(const kvstore::RowRun& run) {
  const LoadLayer& layer = *layer_;
  const TensorView& keys = layer.to.keys;
  const TensorView& values = layer.to.values;
  const uint64_t layer_bytes = keys.shape[0] * (BytesPerIndex(keys) + BytesPerIndex(values));
  std::array<const std::byte*, kvstore::kMaxKvHeads> rows;
  std::copy(run.rows.begin(), run.rows.end(), rows.begin());
  uint64_t index = run.first_position - first_position_;
  const uint64_t end = index + run.token_count;
  while (index < end) {
    const PackRun key = RunAt(keys, index, end), value = RunAt(values, index, end);
    const uint64_t count = std::min(key.count, value.count);
    kernels::UnpackHeads(kernels::Exec{}, {.token_count = static_cast<uint32_t>(count),
                                           .key_dim = layer.shape.key_dim,
                                           .value_dim = layer.shape.value_dim,
                                           .row_dtype = layer.shape.dtype,
                                           .row_stride_bytes = layer.shape.row_bytes,
                                           .rows = {rows.data(), run.rows.size()},
                                           .key = TargetOf(keys, key),
                                           .value = TargetOf(values, value),
                                           .stream = layer_bytes >= kStreamBytes});
    for (size_t head = 0; head < run.rows.size(); ++head) {
      rows[head] += count * layer.shape.row_bytes;
    }
    index += count;
  }
}

pqc_status FailBegunLoad(pqc_status status) {
  if (status != PQC_OUT_OF_RANGE) return status;
  return SetRetry(kRetryConflict,
                  Fail(PQC_ABORTED, "sequence", "it was truncated during the call"));
}

pqc_status LoadByRpc(Remote& remote, uint32_t remote_version, uint64_t sequence_id,
                     const LoadItem& item) {
  FetchedRows rows(remote, remote_version);
  // Rows are stored without gaps, so the last one shows whether all are. Of the first layer, the
  // last rows are the first to be fetched.
  for (const LoadLayer& layer : item.layers.subspan(1)) {
    RETURN_IF_ERROR(
        rows.Fetch(FetchOf(sequence_id, layer), {item.tokens.end - 1, item.tokens.end}));
  }
  if (remote_version >= kReadRowsVersion && !item.sink.needs_long_runs()) {
    return LayersWriter(item).Read(remote, sequence_id, rows.rows_epoch());
  }
  bool has_begun = false;
  for (const LoadLayer& layer : item.layers) {
    RETURN_IF_ERROR(LoadLayerByFetches(rows, sequence_id, item, layer, &has_begun));
  }
  return PQC_OK;
}

}  // namespace pqcached::client
