// What the tests of the store share: specs, tensors, random rows, and plain models to compare with.
#ifndef PQCACHED_TESTS_KVSTORE_FIXTURE_H_
#define PQCACHED_TESTS_KVSTORE_FIXTURE_H_

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvstore/refusal.h"
#include "kvstore/store.h"

namespace pqcached::kvstore::testing {

inline constexpr char kTenant[] = "default";

inline IndexDescriptor Pq(uint32_t subspaces, uint32_t bits) {
  return {.kind = IndexKind::kPq, .subspace_count = subspaces, .bits = bits};
}

// Small segments, so that every test works across several of them.
inline StoreOptions SmallOptions() {
  StoreOptions options;
  options.max_pool_bytes = size_t{1} << 30;
  options.segment_tokens = 128;
  options.tail_tokens = 128;
  options.codebook_tokens = 256;
  options.threads = 2;
  return options;
}

inline CacheSpec SmallSpec(const std::string& name = "cache") {
  CacheSpec spec;
  spec.name = name;
  spec.model_fingerprint = "fingerprint";
  spec.capacity_bytes = size_t{32} << 20;
  spec.default_index = Pq(2, 4);
  spec.groups.push_back({.kind = LayerKind::kSelected,
                         .layers = {1, 3},
                         .kv_heads = 2,
                         .query_heads = 4,
                         .key_dim = 32,
                         .value_dim = 40,
                         .dtype = kernels::DType::kF32});
  return spec;
}

// A float tensor that owns its elements.
struct Floats {
  std::vector<uint64_t> shape;
  std::vector<float> data;

  TensorView view() const {
    return {.data = reinterpret_cast<const std::byte*>(data.data()),
            .data_bytes = data.size() * sizeof(float),
            .dtype = kernels::DType::kF32,
            .shape = shape,
            .strides = {}};
  }
};

inline Floats RandomFloats(std::mt19937_64& random, std::vector<uint64_t> shape) {
  Floats floats{.shape = std::move(shape), .data = {}};
  size_t count = 1;
  for (const uint64_t extent : floats.shape) count *= extent;
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; ++i) floats.data.push_back(normal(random));
  return floats;
}

inline float RoundTo(kernels::DType dtype, float value) {
  std::byte bytes[4];
  kernels::StoreElement(dtype, bytes, 0, value);
  return kernels::LoadElement(dtype, bytes, 0);
}

// K and V of one layer as the store should hold them: rounded to its dtype.
struct LayerModel {
  LayerGroup group;
  uint32_t tokens = 0;
  std::vector<float> keys;    // [tokens, kv_heads, key_dim]
  std::vector<float> values;  // [tokens, kv_heads, value_dim]

  void Append(const Floats& new_keys, const Floats& new_values) {
    tokens += static_cast<uint32_t>(new_keys.shape[0]);
    for (const float value : new_keys.data) keys.push_back(RoundTo(group.dtype, value));
    for (const float value : new_values.data) values.push_back(RoundTo(group.dtype, value));
  }
  void Truncate(uint32_t count) {
    tokens = std::min(tokens, count);
    keys.resize(size_t{tokens} * group.kv_heads * group.key_dim);
    values.resize(size_t{tokens} * group.kv_heads * group.value_dim);
  }
  const float* key(uint32_t token, uint32_t kv_head) const {
    return keys.data() + (size_t{token} * group.kv_heads + kv_head) * group.key_dim;
  }
  const float* value(uint32_t token, uint32_t kv_head) const {
    return &values[(size_t{token} * group.kv_heads + kv_head) * group.value_dim];
  }
  // Rows [begin, end) as FetchBlocks gives them.
  std::vector<float> Rows(uint32_t begin, uint32_t end) const {
    std::vector<float> rows;
    for (uint32_t head = 0; head < group.kv_heads; ++head) {
      for (uint32_t token = begin; token < end; ++token) {
        rows.insert(rows.end(), key(token, head), key(token, head) + group.key_dim);
        rows.insert(rows.end(), value(token, head), value(token, head) + group.value_dim);
      }
    }
    return rows;
  }
};

inline std::vector<float> ToFloats(const Rows& rows) {
  std::vector<float> floats;
  const size_t count = rows.data.size() / kernels::DTypeBytes(rows.dtype);
  for (size_t i = 0; i < count; ++i) {
    floats.push_back(kernels::LoadElement(rows.dtype, rows.data.data(), i));
  }
  return floats;
}

// Partial attention in double precision: of one query head over given tokens.
struct Partial {
  std::vector<double> output;
  double lse = -std::numeric_limits<double>::infinity();
};

inline Partial AttendExactly(const LayerModel& model, const float* query, uint32_t kv_head,
                             std::span<const uint32_t> tokens) {
  std::vector<double> logits;
  double max = -std::numeric_limits<double>::infinity();
  for (const uint32_t token : tokens) {
    double dot = 0;
    for (uint32_t i = 0; i < model.group.key_dim; ++i) {
      dot += static_cast<double>(query[i]) * model.key(token, kv_head)[i];
    }
    double logit = dot * model.group.scale();
    if (model.group.softcap > 0) {
      logit = model.group.softcap * std::tanh(logit / model.group.softcap);
    }
    logits.push_back(logit);
    max = std::max(max, logit);
  }
  Partial partial;
  partial.output.assign(model.group.value_dim, 0.0);
  if (tokens.empty()) return partial;
  double sum = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const double weight = std::exp(logits[i] - max);
    sum += weight;
    for (uint32_t j = 0; j < model.group.value_dim; ++j) {
      partial.output[j] += weight * model.value(tokens[i], kv_head)[j];
    }
  }
  for (double& element : partial.output) element /= sum;
  partial.lse = max + std::log(sum);
  return partial;
}

// A store with one cache and one sequence, and what it should hold.
class TestSequence {
 public:
  explicit TestSequence(const CacheSpec& spec = SmallSpec(),
                        const StoreOptions& options = SmallOptions(), uint64_t seed = 1)
      : random_(seed) {
    auto created = Store::Create(options);
    EXPECT_TRUE(created.ok()) << created.status();
    store_ = *std::move(created);
    const auto cache = store_->OpenCache(kTenant, spec);
    EXPECT_TRUE(cache.ok()) << cache.status();
    cache_id_ = cache->cache_id;
    spec_ = spec;
    NewSequence();
  }

  Store& store() { return *store_; }
  std::mt19937_64& random() { return random_; }
  uint64_t id() const { return id_; }
  uint64_t cache_id() const { return cache_id_; }
  LayerModel& layer(uint32_t layer) {
    for (LayerModel& model : layers_) {
      if (model.group.layers.front() == layer) return model;
    }
    ADD_FAILURE() << "no layer " << layer;
    return layers_.front();
  }
  std::vector<LayerModel>& layers() { return layers_; }
  uint32_t tokens() const { return layers_.front().tokens; }

  void NewSequence(const SequenceSpec& sequence_spec = {.session = "session"}) {
    const auto id = store_->CreateSequence(kTenant, cache_id_, sequence_spec);
    ASSERT_TRUE(id.ok()) << id.status();
    id_ = id->sequence_id;
    layers_.clear();
    for (const LayerGroup& group : spec_.groups) {
      if (group.kind == LayerKind::kNone) continue;
      for (const uint32_t layer : group.layers) {
        LayerModel model{.group = group, .tokens = 0, .keys = {}, .values = {}};
        model.group.layers = {layer};
        layers_.push_back(std::move(model));
      }
    }
  }

  Floats RandomKeys(const LayerModel& model, uint32_t tokens) {
    return RandomFloats(random_, {tokens, model.group.kv_heads, model.group.key_dim});
  }
  Floats RandomValues(const LayerModel& model, uint32_t tokens) {
    return RandomFloats(random_, {tokens, model.group.kv_heads, model.group.value_dim});
  }

  // Ingests random rows into every layer, in one transaction.
  void Ingest(uint32_t tokens) {
    auto ingest = store_->BeginIngest(kTenant, id_);
    ASSERT_TRUE(ingest.ok()) << ingest.status();
    for (LayerModel& model : layers_) {
      const Floats keys = RandomKeys(model, tokens);
      const Floats values = RandomValues(model, tokens);
      const absl::Status status = (*ingest)->Write(
          model.tokens,
          {.layer = model.group.layers.front(), .keys = keys.view(), .values = values.view()});
      ASSERT_TRUE(status.ok()) << status;
      model.Append(keys, values);
    }
    const auto count = (*ingest)->Commit();
    ASSERT_TRUE(count.ok()) << count.status();
    ASSERT_EQ(*count, this->tokens());
  }

  // Appends random rows to every layer.
  void Append(uint32_t tokens) {
    std::vector<Floats> keys;
    std::vector<Floats> values;
    std::vector<LayerRows> rows;
    for (const LayerModel& model : layers_) {
      keys.push_back(RandomKeys(model, tokens));
      values.push_back(RandomValues(model, tokens));
      rows.push_back({.layer = model.group.layers.front(),
                      .keys = keys.back().view(),
                      .values = values.back().view()});
    }
    const auto count = store_->Append(kTenant, id_, this->tokens(), rows);
    ASSERT_TRUE(count.ok()) << count.status();
    for (size_t i = 0; i < layers_.size(); ++i) layers_[i].Append(keys[i], values[i]);
    ASSERT_EQ(*count, this->tokens());
  }

  void Truncate(uint32_t token_count) {
    const auto count = store_->TruncateSequence(kTenant, id_, token_count);
    ASSERT_TRUE(count.ok()) << count.status();
    ASSERT_EQ(*count, token_count);
    for (LayerModel& model : layers_) model.Truncate(token_count);
  }

  void Build(const IndexDescriptor& index, uint32_t iterations = 4, uint32_t sink_tokens = 0) {
    const absl::Status status = store_->BuildIndex(
        kTenant, id_, {.index = index, .iterations = iterations, .sink_tokens = sink_tokens}, {});
    ASSERT_TRUE(status.ok()) << status;
  }

  // Checks every visible row of every layer.
  void ExpectRowsMatch() {
    for (const LayerModel& model : layers_) {
      if (model.tokens == 0) continue;
      const auto rows = store_->FetchBlocks(kTenant, id_, model.group.layers.front(),
                                            {0, model.tokens}, RowPart::kRow);
      ASSERT_TRUE(rows.ok()) << rows.status();
      ASSERT_EQ(ToFloats(*rows), model.Rows(0, model.tokens));
    }
  }

  Floats RandomQuery(const LayerModel& model) {
    return RandomFloats(random_, {1, model.group.query_heads, model.group.key_dim});
  }

 private:
  std::mt19937_64 random_;
  std::unique_ptr<Store> store_;
  CacheSpec spec_;
  uint64_t cache_id_ = 0;
  uint64_t id_ = 0;
  std::vector<LayerModel> layers_;
};

// Everything that can be seen of a store, as text: equal before and after a call that fails.
inline std::string Dump(Store& store) {
  std::string text;
  for (const CacheInfo& cache : store.ListCaches("")) {
    text += "cache " + std::to_string(cache.cache_id) + " used " +
            std::to_string(cache.used_bytes) + " free " + std::to_string(cache.free_bytes) +
            " largest " + std::to_string(cache.largest_free_bytes) + "\n";
    const auto sequences = store.ListSequences("", cache.cache_id);
    EXPECT_TRUE(sequences.ok());
    for (const SequenceInfo& sequence : *sequences) {
      text += "sequence " + std::to_string(sequence.sequence_id) + " " +
              std::to_string(sequence.token_count) + " " + std::to_string(sequence.row_bytes) +
              " " + std::to_string(sequence.index_bytes) + " " +
              std::to_string(sequence.codebook_bytes) + " " + std::to_string(sequence.used_bytes) +
              " " + std::to_string(sequence.indexes.size()) + "\n";
      for (const SegmentInfo& segment : sequence.segments) {
        text += " segment " + std::to_string(segment.segment_id) + " " +
                std::to_string(segment.tokens.begin) + " " + std::to_string(segment.tokens.end) +
                " " + std::to_string(static_cast<uint32_t>(segment.state)) + "\n";
      }
      for (const LayerInfo& layer : sequence.layers) {
        text += " layer " + std::to_string(layer.layer) + " " + std::to_string(layer.row_count);
        if (layer.row_count > 0) {
          const auto rows = store.FetchBlocks(cache.tenant, sequence.sequence_id, layer.layer,
                                              {0, layer.row_count}, RowPart::kRow);
          EXPECT_TRUE(rows.ok()) << rows.status();
          text.append(reinterpret_cast<const char*>(rows->data.data()), rows->data.size());
        }
        text += "\n";
      }
    }
  }
  return text;
}

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_FIXTURE_H_
