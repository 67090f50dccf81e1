// The stand-in for a model, and the end of a program that fails, for the examples in C++.
#ifndef PQCACHED_CLIENT_EXAMPLES_MODEL_HPP_
#define PQCACHED_CLIENT_EXAMPLES_MODEL_HPP_

#include <cstdio>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

#include "client/examples/model.h"
#include "pqcached/client.hpp"

// Returns rows [tokens, heads, kDim] of these tokens in a layer.
inline std::vector<float> Project(std::span<const uint32_t> tokens, uint32_t layer,
                                  uint32_t heads) {
  std::vector<float> rows(tokens.size() * heads * kDim);
  Project(tokens.data(), tokens.size(), layer, heads, rows.data());
  return rows;
}

// Appends `length` tokens that a user has written.
inline std::vector<uint32_t>& AddText(std::vector<uint32_t>& tokens, uint32_t length) {
  for (uint32_t i = 0; i < length; ++i) tokens.push_back(TextToken(i));
  return tokens;
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

#endif  // PQCACHED_CLIENT_EXAMPLES_MODEL_HPP_
