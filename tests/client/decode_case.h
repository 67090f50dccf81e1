// Decode steps over made-up layers with complete attention, and what is right about them.
#ifndef PQCACHED_TESTS_CLIENT_DECODE_CASE_H_
#define PQCACHED_TESTS_CLIENT_DECODE_CASE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/base/dtype.h"
#include "tests/client/layer.h"
#include "tests/client/range_case.h"

namespace pqcached::testing {

// The layers of one sequence, each with other rows.
using Model = std::vector<Layer>;

inline Model MakeModel(uint64_t tokens, uint32_t seed, uint32_t layer_count = 2) {
  Model model;
  for (uint32_t number = 0; number < layer_count; ++number) {
    model.emplace_back(tokens, seed + number);
  }
  return model;
}

inline Sequence FillModel(Cache& cache, const Model& model, uint64_t tokens, uint64_t sink_tokens) {
  Sequence sequence = Must(cache.CreateSequence());
  for (uint32_t number = 0; tokens > 0 && number < model.size(); ++number) {
    MustBeOk(
        sequence.Ingest(number, 0, model[number].keys(0, tokens), model[number].values(0, tokens)));
  }
  if (tokens > 0) {
    MustBeOk(sequence.BuildIndex({.iterations = 3, .seed = 1, .sink_tokens = sink_tokens}));
  }
  return sequence;
}

// One sequence of a batch.
struct DecodeItem {
  Sequence* sequence;
  const Model* model;
  uint64_t position;
  uint32_t length = 1;
};

inline std::vector<StepItem> ItemsOf(const std::vector<DecodeItem>& batch) {
  std::vector<StepItem> items;
  for (const DecodeItem& item : batch) items.push_back({item.sequence, item.position, item.length});
  return items;
}

// Arguments of one layer's decode call: the packed tensors of all items.
struct DecodeArguments {
  DecodeArguments(const std::vector<DecodeItem>& batch, uint32_t layer) {
    for (const DecodeItem& item : batch) {
      cases.emplace_back(item.length, item.position, static_cast<uint32_t>(item.position) + layer);
      const std::vector<float>& part = cases.back().queries;
      queries.insert(queries.end(), part.begin(), part.end());
      const Layer& rows = (*item.model)[layer];
      const float* key = rows.key(item.position, 0);
      keys.insert(keys.end(), key, key + item.length * Layer::kKvHeads * Layer::kKeyDim);
      const float* value = rows.value(item.position, 0);
      values.insert(values.end(), value, value + item.length * Layer::kKvHeads * Layer::kValueDim);
      tokens += item.length;
    }
  }

  Tensor query_tensor() const { return {queries, {tokens, Layer::kQueryHeads, Layer::kKeyDim}}; }
  Tensor key_tensor() const { return {keys, {tokens, Layer::kKvHeads, Layer::kKeyDim}}; }
  Tensor value_tensor() const { return {values, {tokens, Layer::kKvHeads, Layer::kValueDim}}; }

  std::vector<RangeCase> cases;  // per item
  std::vector<float> queries, keys, values;
  uint64_t tokens = 0;
};

inline void Append(const Attention& part, Attention* all) {
  all->output.insert(all->output.end(), part.output.begin(), part.output.end());
  all->lse.insert(all->lse.end(), part.lse.begin(), part.lse.end());
}

// Full causal attention of all items.
inline Attention FullAttention(const std::vector<DecodeItem>& batch, const DecodeArguments& from,
                               uint32_t layer) {
  Attention full;
  for (size_t i = 0; i < batch.size(); ++i) {
    const DecodeItem& item = batch[i];
    Append(from.cases[i].Expected((*item.model)[layer], {0, item.position + item.length}), &full);
  }
  return full;
}

// Decodes a layer into contiguous floats.
inline Status DecodeLayer(Step& step, uint32_t layer, const DecodeArguments& from,
                          Attention* attention, const Selection* selection = nullptr) {
  attention->output.assign(from.tokens * Layer::kQueryHeads * Layer::kValueDim, NAN);
  attention->lse.assign(from.tokens * Layer::kQueryHeads, NAN);
  return step.Decode(layer, from.query_tensor(), from.key_tensor(), from.value_tensor(),
                     attention->output, attention->lse, selection);
}

// A step of a batch whose selection has all candidates: full attention in every layer.
inline void ExpectFullStep(Client& client, const std::vector<DecodeItem>& batch,
                           const Selection& selection, bool with_step = true,
                           const std::vector<uint32_t>& accepted = {}) {
  Step step = Must(client.BeginStep(ItemsOf(batch), with_step ? &selection : nullptr));
  for (uint32_t layer = 0; layer < batch[0].model->size(); ++layer) {
    const DecodeArguments from(batch, layer);
    Attention attention;
    MustBeOk(DecodeLayer(step, layer, from, &attention, with_step ? nullptr : &selection));
    ExpectAttention(attention, FullAttention(batch, from, layer));
    if (::testing::Test::HasFatalFailure()) return;
  }
  MustBeOk(step.End({}, accepted));
}

// Memory of an engine in any dtype.
struct TypedPlace {
  TypedPlace(uint64_t token_count, pqc_dtype element)
      : tokens(token_count),
        dtype(element),
        size(element == PQC_F32 ? 4 : 2),
        output(tokens * Layer::kQueryHeads * Layer::kValueDim * size),
        lse(tokens * Layer::kQueryHeads * size) {}

  AttentionMemory memory() {
    return {{output.data(), dtype, {tokens, Layer::kQueryHeads, Layer::kValueDim}},
            {lse.data(), dtype, {tokens, Layer::kQueryHeads}}};
  }
  Attention Contents() const {
    Attention attention;
    const auto type = static_cast<kernels::DType>(dtype);
    for (size_t i = 0; i < output.size() / size; ++i) {
      attention.output.push_back(kernels::LoadElement(type, output.data(), i));
    }
    for (size_t i = 0; i < lse.size() / size; ++i) {
      attention.lse.push_back(kernels::LoadElement(type, lse.data(), i));
    }
    return attention;
  }
  float tolerance() const { return dtype == PQC_F32 ? 1e-4f : dtype == PQC_F16 ? 6e-3f : 5e-2f; }

  uint64_t tokens;
  pqc_dtype dtype;
  size_t size;
  std::vector<std::byte> output, lse;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_DECODE_CASE_H_
