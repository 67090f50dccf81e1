#include "kernels/base/sample_load.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/sample_convert.h"

namespace pqcached::kernels {
namespace {

#if defined(PQCACHED_X86)
constexpr size_t kChunk = 256;  // elements converted at a time from fp16 through fp32 to bf16

void WidenAvx2(DType source_type, const std::byte* source, size_t count, float* target) {
  const auto* halves = reinterpret_cast<const uint16_t*>(source);
  if (source_type == DType::kF16) {
    WidenF16Avx2(halves, count, target);
  } else {
    WidenBf16Avx2(halves, count, target);
  }
}

void LoadRunAvx2(const SampleLoadArgs& args, const std::byte* row, std::byte* sample,
                 uint32_t dim) {
  if (args.source_type == args.sample_type) {
    ConvertElements(args.source_type, row, args.sample_type, sample, dim);
  } else if (args.sample_type == DType::kF32) {
    WidenAvx2(args.source_type, row, dim, reinterpret_cast<float*>(sample));
  } else if (args.source_type == DType::kF32) {
    NarrowBf16Avx2(reinterpret_cast<const float*>(row), dim, reinterpret_cast<uint16_t*>(sample));
  } else {
    float wide[kChunk];
    for (size_t first = 0; first < dim; first += kChunk) {
      const size_t count = std::min(kChunk, dim - first);
      WidenAvx2(args.source_type, row + first * sizeof(uint16_t), count, wide);
      NarrowBf16Avx2(wide, count, reinterpret_cast<uint16_t*>(sample) + first);
    }
  }
}
#endif

// Converts `dim` consecutive numbers.
void LoadRun(const Exec& exec, const SampleLoadArgs& args, const std::byte* source,
             std::byte* target, uint32_t dim) {
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx2) return LoadRunAvx2(args, source, target, dim);
#endif
  (void)exec;
  ConvertElements(args.source_type, source, args.sample_type, target, dim);
}

}  // namespace

void LoadSamples(const Exec& exec, const SampleLoadArgs& args) {
  PQC_CHECK(args.sample_type == DType::kF32 || args.sample_type == DType::kBf16);
  PQC_CHECK(args.pair_offset_bytes == 0 || args.dim % 2 == 0);
  const size_t sample_bytes = args.dim * DTypeBytes(args.sample_type);
  const uint32_t half = args.dim / 2;
  for (uint32_t row = 0; row < args.row_count; ++row) {
    const std::byte* source = args.rows + row * args.row_stride;
    std::byte* target = args.samples + row * sample_bytes;
    if (args.pair_offset_bytes == 0) {
      LoadRun(exec, args, source, target, args.dim);
      continue;
    }
    LoadRun(exec, args, source, target, half);
    LoadRun(exec, args, source + args.pair_offset_bytes, target + sample_bytes / 2, half);
  }
}

}  // namespace pqcached::kernels
