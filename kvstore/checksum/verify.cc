#include "kvstore/checksum/verify.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvstore/checksum/checksum_record.h"
#include "kvstore/memory/checked_bytes.h"
#include "kvstore/records/record_bytes.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

absl::Status LossError(const Cache& cache, uint64_t segment_id, uint32_t layer_slot) {
  return DataLoss(absl::StrCat("layer ", cache.layers.layers[layer_slot].layer, " of segment ",
                               segment_id, " is not what was written: its checksum differs"));
}

}  // namespace

bool LoadRowChecksums(const Cache& cache, uint32_t number, const SegmentRows& rows) {
  const SlotArray::Content content = cache.records->row_checksums().Read(number);
  if (content.state == SlotArray::State::kEmpty) return true;
  RecordReader reader(content.bytes);
  const auto record = reader.Get<RowChecksumsRecord>();
  const auto sums = reader.GetAll<uint32_t>(cache.layers.head_count);
  if (!reader.done() || record.segment_id != rows.segment_id() ||
      record.slot_count > rows.slot_capacity()) {
    return false;
  }
  for (const StoredLayers::Layer& layer : cache.layers.layers) {
    std::vector<CheckedBytes::Piece> pieces;
    for (uint32_t head = layer.first_head; head < layer.first_head + layer.shape.kv_heads; ++head) {
      pieces.push_back({RowBytes(cache, rows, head, record.slot_count), sums[head]});
    }
    rows.SetExpectedChecksums(std::make_unique<CheckedBytes>(std::move(pieces)));
  }
  return true;
}

bool LoadLayerChecksums(const Cache& cache, uint32_t number, uint64_t segment_id,
                        uint32_t layer_slot, const SegmentIndex::Layer& layer) {
  const SlotArray::Content content = cache.records->layer_checksums().Read(number);
  if (content.state == SlotArray::State::kEmpty) return true;
  RecordReader reader(content.bytes);
  const auto record = reader.Get<LayerChecksumsRecord>();
  if (!reader.done() || record.segment_id != segment_id) return false;
  layer.data->SetExpectedChecksums(std::make_unique<CheckedBytes>(std::vector<CheckedBytes::Piece>{
      {DataBytes(cache, layer, layer_slot), record.data},
      {CodebookBytes(cache, layer, layer_slot), record.codebook}}));
  return true;
}

absl::Status VerifyRows(const Cache& cache, const SegmentRows& rows, uint32_t layer_slot) {
  const CheckedBytes* expected = rows.expected(layer_slot);
  if (expected == nullptr || expected->Verify(cache.compute.exec, cache.counters.data_loss_count)) {
    return absl::OkStatus();
  }
  return LossError(cache, rows.segment_id(), layer_slot);
}

absl::Status VerifyIndex(const Cache& cache, const SegmentRows& rows, const SegmentIndex& index,
                         uint32_t layer_slot) {
  const CheckedBytes* expected = index.layer(layer_slot).data->expected();
  if (expected == nullptr || expected->Verify(cache.compute.exec, cache.counters.data_loss_count)) {
    return absl::OkStatus();
  }
  return LossError(cache, rows.segment_id(), layer_slot);
}

absl::Status VerifyList(const Cache& cache, const SegmentList& list) {
  const auto pieces = static_cast<uint32_t>(list.segments.size()) * cache.layers.size();
  const bool is_checked =
      std::none_of(list.segments.begin(), list.segments.end(), [](const SegmentEntry& entry) {
        return entry.rows->expected(0) != nullptr ||
               std::any_of(entry.indexes.begin(), entry.indexes.end(), [](const auto& index) {
                 return index != nullptr && index->recovered();
               });
      });
  if (is_checked) return absl::OkStatus();  // this process wrote all of it
  std::vector<absl::Status> found(pieces);
  cache.compute.serving.parallel_for().run(pieces, [&](uint32_t piece, uint32_t) {
    const SegmentEntry& entry = list.segments[piece / cache.layers.size()];
    const uint32_t slot = piece % cache.layers.size();
    found[piece] = VerifyRows(cache, *entry.rows, slot);
    for (const auto& index : entry.indexes) {
      if (index == nullptr || !index->ready(slot)) continue;
      found[piece].Update(VerifyIndex(cache, *entry.rows, *index, slot));
    }
  });
  for (absl::Status& status : found) {
    if (!status.ok()) return std::move(status);
  }
  return absl::OkStatus();
}

}  // namespace pqcached::kvstore
