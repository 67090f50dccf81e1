#include "kernels/base/stream.h"

#include <cstring>

#include "kernels/base/check.h"
#include "kernels/base/stream_internal.h"

namespace pqcached::kernels {
namespace {

// The specification.
void StreamReference(const StreamArgs& args) {
  for (size_t i = 0; i < args.row_count; ++i) {
    std::memcpy(args.target.data() + i * args.row_bytes,
                args.rows + static_cast<ptrdiff_t>(i) * args.row_stride_bytes, args.row_bytes);
  }
}

}  // namespace

void StreamRows(const Exec& exec, const StreamArgs& args) {
  if (args.row_count == 0 || args.row_bytes == 0) return;
  PQC_CHECK(args.row_count <= args.target.size() / args.row_bytes);
#ifdef PQCACHED_X86
  if (exec.level >= Level::kAvx2) {
    const internal::StreamCall call{.source = args.rows,
                                    .source_stride_bytes = args.row_stride_bytes,
                                    .row_bytes = args.row_bytes,
                                    .row_count = args.row_count,
                                    .target = args.target.data(),
                                    .target_stride_bytes = args.row_bytes};
    if (exec.level >= Level::kAvx512) {
      internal::StreamRowsAvx512(call);
      internal::FenceStreamsAvx512();
    } else {
      internal::StreamRowsAvx2(call);
      internal::FenceStreamsAvx2();
    }
    return;
  }
#else
  static_cast<void>(exec);
#endif
  StreamReference(args);
}

}  // namespace pqcached::kernels
