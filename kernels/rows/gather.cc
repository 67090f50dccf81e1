#include "kernels/rows/gather.h"

#include <cstring>

#include "kernels/base/check.h"
#include "kernels/rows/gather_internal.h"

namespace pqcached::kernels {
namespace {

// The specification.
void GatherReference(const GatherArgs& args) {
  size_t index = 0;
  for (size_t i = 0; i < args.positions.size(); ++i) {
    const uint32_t position = args.positions[i];
    while (position - args.spans[index].first_position >= args.spans[index].token_count) ++index;
    const RowSpan& span = args.spans[index];
    const std::byte* row =
        span.rows + size_t{position - span.first_position} * args.row_stride_bytes;
    std::memcpy(args.target.data() + i * args.target_stride_bytes, row + args.part_begin_bytes,
                args.part_bytes);
  }
}

}  // namespace

void GatherRows(const Exec& exec, const GatherArgs& args) {
  if (args.positions.empty() || args.part_bytes == 0) return;
  PQC_CHECK(args.part_begin_bytes + args.part_bytes <= args.row_stride_bytes);
  PQC_CHECK(args.target_stride_bytes >= args.part_bytes);
  PQC_CHECK(args.target.size() >=
            (args.positions.size() - 1) * args.target_stride_bytes + args.part_bytes);
#ifdef PQCACHED_X86
  if (exec.level >= Level::kAvx2) {
    const internal::GatherCall call{.row_stride_bytes = args.row_stride_bytes,
                                    .part_begin_bytes = args.part_begin_bytes,
                                    .part_bytes = args.part_bytes,
                                    .spans = args.spans.data(),
                                    .positions = args.positions.data(),
                                    .position_count = args.positions.size(),
                                    .target = args.target.data(),
                                    .target_stride_bytes = args.target_stride_bytes};
    return exec.level >= Level::kAvx512 ? internal::GatherAvx512(call) : internal::GatherAvx2(call);
  }
#else
  static_cast<void>(exec);
#endif
  GatherReference(args);
}

}  // namespace pqcached::kernels
