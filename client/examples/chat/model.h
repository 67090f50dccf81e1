// Stands for the parts of an engine that chat does not show: a model of two layers, its tokens, and
// the end of the program on an error.
#ifndef PQCACHED_CLIENT_EXAMPLES_CHAT_MODEL_H_
#define PQCACHED_CLIENT_EXAMPLES_CHAT_MODEL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

#include "pqcached/client.hpp"

inline constexpr uint32_t kLayers = 2, kHeads = 2, kQueryHeads = 4, kDim = 64;
// The model's config.json; an engine reads the file that comes with the weights.
inline constexpr char kConfig[] =
    R"({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "dtype": "float16"})";

// Returns the rows [tokens, heads, kDim] of these tokens in a layer; a model projects them.
inline std::vector<float> Project(std::span<const uint32_t> tokens, uint32_t layer,
                                  uint32_t heads) {
  std::vector<float> rows;
  for (const uint32_t token : tokens) {
    for (uint32_t column = 0; column < heads * kDim; ++column) {
      rows.push_back(static_cast<float>(std::sin((token * 31 + column * 7 + layer) % 997)));
    }
  }
  return rows;
}

// Returns the token that follows; a model samples it from its logits.
inline uint32_t NextToken(uint32_t token) { return (token * 5 + 1) % 997; }

// Appends `length` tokens that a user has written. Returns the number of tokens.
inline uint64_t AddText(std::vector<uint32_t>& tokens, uint32_t length) {
  for (uint32_t i = 0; i < length; ++i) tokens.push_back(i * i % 997);
  return tokens.size();
}

// Ends the program on an error: an example has no caller to report it to.
inline void Must(const pqcached::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

template <class T>
T Must(pqcached::Result<T> result) {
  Must(result.status());
  return std::move(*result);
}

#endif  // PQCACHED_CLIENT_EXAMPLES_CHAT_MODEL_H_
