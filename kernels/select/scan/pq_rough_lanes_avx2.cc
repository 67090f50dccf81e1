// Lists of tokens by the scores of a group of heads, eight tokens at a time.
#include "kernels/base/simd/compress_avx2.h"
#include "kernels/base/simd/simd_avx2.h"
#include "kernels/select/scan/pq_rough_lanes_simd.h"
#include "kernels/select/scan/pq_rough_lanes_x86.h"
#include "kernels/select/scan/pq_rough_lists_simd.h"

namespace pqcached::kernels {
namespace {

struct Machine : MachineX86 {
  using Lanes16 = TwiceLanes<Lanes8>;

  static void Append(const float* scores, uint32_t count, uint32_t first_position, float least,
                     RoughList& list) {
    AppendScores(scores, count, first_position, least, list);
  }
};

}  // namespace

const LaneOps kLaneOpsAvx2 = {
    .list = ListByLanes<Machine>, .list_band = ListBand, .take_above = TakeAbove};

}  // namespace pqcached::kernels
