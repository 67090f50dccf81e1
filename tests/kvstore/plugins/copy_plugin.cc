// A plug-in for tests, whose codes are the keys: its logits are exact. Its parameters make it fail.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "pqcached/index_plugin.h"

#ifndef PQCACHED_COPY_NUMBERS
#define PQCACHED_COPY_NUMBERS 65535
#endif
#ifndef PQCACHED_COPY_VERSION
#define PQCACHED_COPY_VERSION PQCACHED_INDEX_PLUGIN_VERSION
#endif

namespace {

using Shape = pqcached_index_plugin_shape;

// Values of the parameter `fault`.
enum Fault : uint32_t {
  kNone,
  kCrashInTrain,
  kCrashInEncode,
  kCrashInScore,
  kNotANumber,
  kLongCodes,
  kNoCodes,
  kLongCodebook,
  kThrowInEncode
};

bool Has(const Shape* shape, Fault fault) { return shape->values[0] == fault; }

const char* Check(const Shape* shape) {
  return shape->values[1] == 13 ? "number must not be 13" : nullptr;
}

size_t CodebookBytes(const Shape* shape) {
  return Has(shape, kLongCodebook) ? PQCACHED_INDEX_PLUGIN_CODEBOOK_BYTES + size_t{1} : 4;
}

size_t CodeBytes(const Shape* shape) {
  if (Has(shape, kNoCodes)) return 0;
  return Has(shape, kLongCodes) ? PQCACHED_INDEX_PLUGIN_CODE_BYTES + size_t{1}
                                : shape->key_dim * sizeof(float);
}

void Train(const Shape* shape, const float*, uint32_t count, uint64_t, void* codebook) {
  if (Has(shape, kCrashInTrain)) std::abort();
  std::memcpy(codebook, &count, sizeof(count));
}

// The number whose indexes are trained on queries: the codebook has the sum of their first numbers,
// which is added to each logit.
constexpr uint32_t kQueriesNumber = 99;
constexpr bool kHasQueries = PQCACHED_COPY_VERSION >= 2;

uint32_t NeedsQueries(const Shape* shape) { return shape->values[1] == kQueriesNumber ? 1 : 0; }

void TrainOnQueries(const Shape* shape, const float*, uint32_t, const float* queries,
                    uint32_t query_count, uint64_t, void* codebook) {
  if (!kHasQueries) std::abort();  // a sidecar must not read the field
  float sum = 0;
  for (uint32_t i = 0; i < query_count; ++i) sum += queries[i * shape->key_dim];
  std::memcpy(codebook, &sum, sizeof(sum));
}

void Encode(const Shape* shape, const void*, const float* keys, uint32_t count, uint8_t* codes) {
  if (Has(shape, kCrashInEncode)) std::abort();
  if (Has(shape, kThrowInEncode)) throw std::runtime_error("encode");
  std::memcpy(codes, keys, count * CodeBytes(shape));
}

void Score(const Shape* shape, const void* codebook, const float* queries, uint32_t query_count,
           const uint8_t* codes, uint32_t count, float* logits, size_t stride) {
  if (Has(shape, kCrashInScore)) std::abort();
  float added = 0;
  if (kHasQueries && NeedsQueries(shape) != 0) std::memcpy(&added, codebook, sizeof(added));
  for (uint32_t i = 0; i < query_count; ++i) {
    for (uint32_t j = 0; j < count; ++j) {
      double sum = added;
      for (uint32_t d = 0; d < shape->key_dim; ++d) {
        float key = 0;
        std::memcpy(&key, codes + j * CodeBytes(shape) + d * sizeof(float), sizeof(float));
        sum += static_cast<double>(queries[i * shape->key_dim + d]) * key;
      }
      logits[i * stride + j] = Has(shape, kNotANumber) ? std::nanf("") : static_cast<float>(sum);
    }
  }
}

const pqcached_index_plugin_parameter kParameters[] = {
    {.name = "fault", .text = "the failure", .least = 0, .most = 8, .default_value = 0},
    {.name = "number",
     .text = "another index",
     .least = 1,
     .most = PQCACHED_COPY_NUMBERS,
     .default_value = 7},
};

const pqcached_index_plugin_description kDescription = {
    .version = PQCACHED_COPY_VERSION,
    .data_version = 1,
    .name = "copy",
    .text = "A copy of the keys.",
    .parameters = kParameters,
    .parameter_count = 2,
    .check = Check,
    .codebook_bytes = CodebookBytes,
    .code_bytes = CodeBytes,
    .train = Train,
    .encode = Encode,
    .score = Score,
    .needs_queries = NeedsQueries,
    .train_on_queries = TrainOnQueries,
};

}  // namespace

extern "C" const pqcached_index_plugin_description* pqcached_index_plugin(void) {
  return &kDescription;
}
