// An index in a shared library, to copy: scalar quantization. Each dim of a key becomes a code of 4
// or 8 bits, whose range the training finds for each kv head.
//
//   c++ -std=c++20 -O3 -march=native -shared -fPIC -o sq.so sq.cc   # -I of the header's folder
//   pqcached --index-plugins FOLDER_OF_SQ_SO ...
//   python: cache = client.open_cache(..., default_index=client.make_index("sq", bits=4))
#include <algorithm>
#include <cstring>

#include "pqcached/index_plugin.h"

namespace {

using Shape = pqcached_index_plugin_shape;

constexpr uint32_t kMaxDim = 256;

// The codebook of one kv head: dim d of a key is about low[d] + code * step[d].
struct Ranges {
  float low[kMaxDim];
  float step[kMaxDim];
};

uint32_t Bits(const Shape* shape) { return shape->values[0]; }
float MaxCode(const Shape* shape) { return Bits(shape) == 4 ? 15.0f : 255.0f; }

const char* Check(const Shape* shape) {
  return Bits(shape) == 4 || Bits(shape) == 8 ? nullptr : "bits must be 4 or 8";
}

size_t CodebookBytes(const Shape*) { return sizeof(Ranges); }

size_t CodeBytes(const Shape* shape) { return size_t{shape->key_dim} * Bits(shape) / 8; }

// Finds the range of each dim.
void Train(const Shape* shape, const float* keys, uint32_t count, uint64_t /*seed*/,
           void* codebook) {
  Ranges& ranges = *static_cast<Ranges*>(codebook);
  std::memset(&ranges, 0, sizeof(ranges));
  for (uint32_t d = 0; d < shape->key_dim && count > 0; ++d) {
    float low = keys[d];
    float high = keys[d];
    for (uint32_t i = 1; i < count; ++i) {
      low = std::min(low, keys[size_t{i} * shape->key_dim + d]);
      high = std::max(high, keys[size_t{i} * shape->key_dim + d]);
    }
    ranges.low[d] = low;
    ranges.step[d] = (high - low) / MaxCode(shape);
  }
}

uint8_t CodeOf(const Shape* shape, const Ranges& ranges, const float* key, uint32_t d) {
  if (!(ranges.step[d] > 0)) return 0;
  const float code = (key[d] - ranges.low[d]) / ranges.step[d] + 0.5f;
  return static_cast<uint8_t>(std::clamp(code, 0.0f, MaxCode(shape)));
}

// Writes the codes of each key; of 4 bits, dims 2 i and 2 i + 1 share byte i.
void Encode(const Shape* shape, const void* codebook, const float* keys, uint32_t count,
            uint8_t* codes) {
  const Ranges& ranges = *static_cast<const Ranges*>(codebook);
  const size_t code_bytes = CodeBytes(shape);
  for (uint32_t i = 0; i < count; ++i, keys += shape->key_dim, codes += code_bytes) {
    for (uint32_t d = 0; d < code_bytes; ++d) {
      codes[d] = Bits(shape) == 8
                     ? CodeOf(shape, ranges, keys, d)
                     : static_cast<uint8_t>(CodeOf(shape, ranges, keys, 2 * d) |
                                            CodeOf(shape, ranges, keys, 2 * d + 1) << 4);
    }
  }
}

// Returns the product of a query with a token, but for what is the same for all tokens.
float Product(const Shape* shape, const float* weights, const uint8_t* codes) {
  float sum = 0;
  if (Bits(shape) == 8) {
    for (uint32_t d = 0; d < shape->key_dim; ++d) sum += weights[d] * codes[d];
    return sum;
  }
  for (uint32_t d = 0; d < shape->key_dim; d += 2) {
    sum += weights[d] * (codes[d / 2] & 15) + weights[d + 1] * (codes[d / 2] >> 4);
  }
  return sum;
}

// Estimates query . key = sum of query[d] * low[d] + (query[d] * step[d]) * code[d].
void Score(const Shape* shape, const void* codebook, const float* queries, uint32_t query_count,
           const uint8_t* codes, uint32_t count, float* logits, size_t stride) {
  const Ranges& ranges = *static_cast<const Ranges*>(codebook);
  const size_t code_bytes = CodeBytes(shape);
  for (uint32_t i = 0; i < query_count; ++i) {
    const float* query = queries + size_t{i} * shape->key_dim;
    float weights[kMaxDim] = {};
    float same = 0;
    for (uint32_t d = 0; d < shape->key_dim; ++d) {
      weights[d] = query[d] * ranges.step[d];
      same += query[d] * ranges.low[d];
    }
    for (uint32_t j = 0; j < count; ++j) {
      logits[i * stride + j] = same + Product(shape, weights, codes + j * code_bytes);
    }
  }
}

const pqcached_index_plugin_parameter kParameters[] = {
    {.name = "bits",
     .text = "bits of the code of a dim: 4 or 8",
     .least = 4,
     .most = 8,
     .default_value = 8},
};

const pqcached_index_plugin_description kDescription = {
    .version = PQCACHED_INDEX_PLUGIN_VERSION,
    .data_version = 1,  // higher when codebooks or codes change
    .name = "sq",
    .text = "Scalar quantization of keys, an example of a plug-in.",
    .parameters = kParameters,
    .parameter_count = 1,
    .check = Check,
    .codebook_bytes = CodebookBytes,
    .code_bytes = CodeBytes,
    .train = Train,
    .encode = Encode,
    .score = Score,
    .needs_queries = nullptr,  // it is trained on keys alone
    .train_on_queries = nullptr,
};

}  // namespace

extern "C" const pqcached_index_plugin_description* pqcached_index_plugin(void) {
  return &kDescription;
}
