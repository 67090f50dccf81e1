#include "kernels/train/rotate.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/sample_load.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/train/rotate_internal.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kRotateRows = 48;  // of one block; a multiple of the tiles' rows

// The specification.
void RotateReference(const RotateBlock& block) {
  for (uint32_t row = 0; row < block.row_count; ++row) {
    for (uint32_t o = 0; o < block.output_count; ++o) {
      double sum = 0.0;
      for (uint32_t i = 0; i < block.dim; ++i) {
        sum += double{block.rows[size_t{row} * block.dim + i]} *
               block.map[size_t{i} * block.dim + block.first_output + o];
      }
      block.outputs[size_t{row} * block.output_count + o] = static_cast<float>(sum);
    }
  }
}

RotateFn RotateFor(const Exec& exec) {
  if (exec.level == Level::kReference) return RotateReference;
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512) return kRotateAvx512;
  if (exec.level >= Level::kAvx2) return kRotateAvx2;
#endif
  return kRotatePortable;
}

}  // namespace

size_t RotateScratchBytes(uint32_t dim) {
  return ScratchAligned(size_t{kRotateRows} * dim * sizeof(float));
}

void RotateRows(const Exec& exec, const RotateArgs& args) {
  PQC_CHECK(args.dim >= 32 && args.map.size() == size_t{args.dim} * args.dim);
  PQC_CHECK(args.first_output + args.output_count <= args.dim);
  PQC_CHECK(args.scratch.size() >= RotateScratchBytes(args.dim));
  const RotateFn rotate = RotateFor(exec);
  auto* const rows = reinterpret_cast<float*>(args.scratch.data());
  for (uint32_t first = 0; first < args.row_count; first += kRotateRows) {
    const uint32_t count = std::min(kRotateRows, args.row_count - first);
    LoadSamples(exec, {.source_type = args.dtype,
                       .rows = args.rows + first * args.row_stride,
                       .row_stride = args.row_stride,
                       .row_count = count,
                       .dim = args.dim,
                       .sample_type = DType::kF32,
                       .samples = args.scratch.data()});
    rotate({.map = args.map.data(),
            .rows = rows,
            .row_count = count,
            .dim = args.dim,
            .first_output = args.first_output,
            .output_count = args.output_count,
            .outputs = args.outputs + size_t{first} * args.output_count});
  }
}

}  // namespace pqcached::kernels
