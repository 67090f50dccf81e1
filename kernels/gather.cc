#include "kernels/gather.h"

#include <cstring>

#include "kernels/check.h"

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
  static_cast<void>(exec);
  if (args.positions.empty() || args.part_bytes == 0) return;
  PQC_CHECK(args.part_begin_bytes + args.part_bytes <= args.row_stride_bytes);
  PQC_CHECK(args.target_stride_bytes >= args.part_bytes);
  PQC_CHECK(args.target.size() >=
            (args.positions.size() - 1) * args.target_stride_bytes + args.part_bytes);
  GatherReference(args);
}

}  // namespace pqcached::kernels
