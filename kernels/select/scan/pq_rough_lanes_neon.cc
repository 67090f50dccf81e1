// Lists of tokens by the scores of a group of heads in NEON.
#include <arm_neon.h>

#include "kernels/base/simd/compress_neon.h"
#include "kernels/base/simd/simd_neon.h"
#include "kernels/select/scan/pq_rough_lanes_simd.h"
#include "kernels/select/scan/pq_rough_lists_simd.h"

namespace pqcached::kernels {
namespace {

struct Machine {
  using Four = float32x4_t;

  struct Lanes4 {
    using Vector = float32x4_t;
    static constexpr uint32_t kCount = 4;
    static Vector Load(const float* at) { return vld1q_f32(at); }
    static void Store(float* at, Vector x) { vst1q_f32(at, x); }
    static Vector Larger(Vector a, Vector b) { return vmaxq_f32(a, b); }
    static Four Sum(Vector x) { return x; }
    static Four Largest(Vector x) { return x; }
  };
  using Lanes8 = TwiceLanes<Lanes4>;
  using Lanes16 = TwiceLanes<Lanes8>;

  // One instruction extracts the byte, and loads of four floats multiply it.
  template <uint32_t kFactor>
  static uint64_t ByteTimes(uint64_t word, uint32_t i) {
    return (word >> (8 * i) & 255u) * kFactor;
  }

  static void Store(float* at, Four x) { vst1q_f32(at, x); }

  static Four JoinSums(Four a, Four b, Four c, Four d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
  }
  static Four JoinLargest(Four a, Four b, Four c, Four d) {
    return vpmaxq_f32(vpmaxq_f32(a, b), vpmaxq_f32(c, d));
  }

  static void Append(const float* scores, uint32_t count, uint32_t first_position, float least,
                     RoughList& list) {
    AppendScores(scores, count, first_position, least, list);
  }
};

}  // namespace

const LaneOps kLaneOpsNeon = {
    .list = ListByLanes<Machine>, .list_band = ListBand, .take_above = TakeAbove};

}  // namespace pqcached::kernels
