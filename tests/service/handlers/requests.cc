#include "tests/service/handlers/requests.h"

#include <random>

namespace pqcached::service {

Config SmallConfig() {
  Config config;
  config.max_pool_bytes = size_t{256} << 20;
  config.max_message_bytes = size_t{1} << 20;
  config.segment_tokens = 128;
  config.tail_tokens = 128;
  config.codebook_tokens = 256;
  config.call_threads = 4;
  config.threads = 2;
  config.shutdown_timeout = absl::Seconds(5);
  config.log_level = "off";
  return config;
}

v1::Tensor FloatTensor(const std::vector<uint64_t>& shape, uint64_t seed) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_FLOAT32);
  uint64_t count = 1;
  for (const uint64_t extent : shape) {
    tensor.add_shape(extent);
    count *= extent;
  }
  std::minstd_rand random(static_cast<uint32_t>(seed + 1));
  std::uniform_real_distribution<float> values(-1, 1);
  std::vector<float> data(count);
  for (float& value : data) value = values(random);
  tensor.set_inline_data(data.data(), data.size() * sizeof(float));
  return tensor;
}

v1::LayerRows RowsOf(uint32_t layer, uint64_t first, uint64_t tokens) {
  const auto of_positions = [&](uint32_t dim, uint64_t salt) {
    std::string data;
    for (uint64_t position = first; position < first + tokens; ++position) {
      data += FloatTensor({kKvHeads, dim}, position * 64 + layer * 2 + salt).inline_data();
    }
    v1::Tensor tensor;
    tensor.set_dtype(v1::DTYPE_FLOAT32);
    for (const uint64_t extent : {tokens, uint64_t{kKvHeads}, uint64_t{dim}})
      tensor.add_shape(extent);
    tensor.set_inline_data(std::move(data));
    return tensor;
  };
  v1::LayerRows rows;
  rows.set_layer(layer);
  *rows.mutable_keys() = of_positions(kKeyDim, 0);
  *rows.mutable_values() = of_positions(kValueDim, 1);
  return rows;
}

v1::OpenCacheRequest CacheRequest(const std::string& name) {
  v1::OpenCacheRequest request;
  request.set_name(name);
  request.set_model_fingerprint("model-1");
  request.set_capacity_bytes(size_t{32} << 20);
  v1::LayerGroup* group = request.add_layer_groups();
  group->set_kind(v1::LAYER_KIND_SELECTED);
  for (const uint32_t layer : kLayers) group->add_layers(layer);
  group->set_kv_heads(kKvHeads);
  group->set_query_heads(kQueryHeads);
  group->set_key_dim(kKeyDim);
  group->set_value_dim(kValueDim);
  group->set_dtype(v1::DTYPE_FLOAT32);
  v1::LayerGroup* own = request.add_layer_groups();
  own->set_kind(v1::LAYER_KIND_NONE);
  own->add_layers(2);
  *request.mutable_default_index() = Flat();
  return request;
}

v1::Query QueryAt(uint64_t sequence_id, uint32_t layer, uint64_t position) {
  v1::Query query;
  query.set_sequence_id(sequence_id);
  query.set_layer(layer);
  query.set_query_position(position);
  *query.mutable_queries() = FloatTensor({1, kQueryHeads, kKeyDim}, position + 7);
  return query;
}

v1::IndexSpec Pq(uint32_t subspaces, uint32_t bits) {
  v1::IndexSpec index;
  index.mutable_pq()->set_subspaces(subspaces);
  index.mutable_pq()->set_bits(bits);
  return index;
}

v1::IndexSpec Flat() {
  v1::IndexSpec index;
  index.mutable_flat();
  return index;
}

v1::Selection TokenCountSelection(const v1::IndexSpec& index, uint64_t sink, uint64_t window,
                                  uint64_t count) {
  v1::Selection selection;
  *selection.mutable_index() = index;
  selection.set_sink_tokens(sink);
  selection.set_window_tokens(window);
  selection.set_token_count(sink + window + count);
  return selection;
}

}  // namespace pqcached::service
