#include "kvstore/checksum/checksum_record.h"

namespace pqcached::kvstore {

std::span<const std::byte> RowBytes(const Cache& cache, const SegmentRows& rows, uint32_t head,
                                    uint32_t slot_count) {
  const LayerShape& shape = cache.layers.layers[cache.layers.SlotOfHead(head)].shape;
  return {rows.rows(head), size_t{slot_count} * shape.row_bytes};
}

std::span<const std::byte> DataBytes(const Cache& cache, const SegmentIndex::Layer& layer,
                                     uint32_t layer_slot) {
  const LayerShape& shape = cache.layers.layers[layer_slot].shape;
  const IndexDataHeader& header = layer.header();
  return {layer.data->data(), SegmentIndex::LayerBytes(header.index, shape, header.slot_capacity)};
}

std::span<const std::byte> CodebookBytes(const Cache& cache, const SegmentIndex::Layer& layer,
                                         uint32_t layer_slot) {
  const LayerShape& shape = cache.layers.layers[layer_slot].shape;
  const CodebookHeader& header = layer.codebook->header();
  return {reinterpret_cast<const std::byte*>(&header), Codebook::SizeBytes(header.index, shape)};
}

}  // namespace pqcached::kvstore
