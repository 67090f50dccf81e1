// DriftKeys: synthetic keys and queries with controlled drift, for judging indexes without a model.
//
// A key before RoPE is the center of its topic, a mean of its own per channel, and noise. Topics last
// 16 to 64 tokens and are drawn from the themes of the moment; changing the theme replaces all its
// topics and means. A query asks for a topic that it draws among those of the newest theme, or of any.
// Both are turned by RoPE (base 500000, halves). Deterministic under a seed.
#ifndef PQCACHED_TESTS_BENCH_LOCAL_DRIFT_KEYS_H_
#define PQCACHED_TESTS_BENCH_LOCAL_DRIFT_KEYS_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kvstore/store.h"

namespace pqcached::bench {

struct DriftShape {
  uint32_t kv_heads = 2;
  uint32_t group_size = 4;
  uint32_t dim = 128;
};

// bf16 [tokens, heads, dim].
struct Bf16Rows {
  std::vector<std::byte> data;
  std::vector<uint64_t> shape;

  kvstore::TensorView view() const;
};

class DriftKeys {
 public:
  DriftKeys(const DriftShape& shape, uint64_t seed);

  // The next keys, from the theme of the moment.
  Bf16Rows Next(uint32_t tokens);
  Bf16Rows Values(uint32_t tokens);
  void ChangeTheme();
  // For the token at `position`. `newest`: asks for a topic of the newest theme.
  Bf16Rows Query(uint32_t position, bool newest);

 private:
  static constexpr uint32_t kTopics = 48;
  struct Theme {
    std::vector<float> centers;  // [topics, kv_heads, dim]
    std::vector<float> mean;     // [kv_heads, dim]
  };

  float Normal() { return normal_(random_); }
  void Turn(float* vector, uint32_t position) const;
  Bf16Rows Round(const std::vector<float>& numbers, uint64_t tokens, uint64_t heads) const;

  const DriftShape shape_;
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  std::vector<Theme> themes_;
  uint32_t position_ = 0;
  uint32_t topic_ = 0;
  uint32_t topic_left_ = 0;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_LOCAL_DRIFT_KEYS_H_
