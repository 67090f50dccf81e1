#include "gpu/row_staging.h"

#include <cuda_runtime.h>

#include <cstring>

#include "gpu/limits.h"
#include "kernels/base/status_macros.h"

namespace pqcached::gpu {
namespace {

Status Check(const RowStaging::Options& options) {
  if (options.lane_capacity < 1 || options.lane_capacity > kMaxLanes) {
    return {Code::kInvalid, "lane_capacity must be 1 to 65535"};
  }
  if (options.rows_per_lane < 1) return {Code::kInvalid, "rows_per_lane must be at least 1"};
  if (options.row_stride_bytes == 0 || options.row_stride_bytes % 16 != 0 ||
      options.row_stride_bytes > kMaxRowBytes) {
    return {Code::kInvalid, "row_stride_bytes must be a multiple of 16, at most 4096"};
  }
  return {};
}

}  // namespace

Status RowStaging::Create(const Options& options, kernels::cuda::Stream stream) {
  RETURN_IF_ERROR(Check(options));
  options_ = options;
  const size_t lanes = options.lane_capacity;
  const size_t rows = lanes * options.rows_per_lane;
  RETURN_IF_ERROR(device_.Allocate((rows + lanes) * sizeof(uint32_t)));
  missed_rows_ = static_cast<uint32_t*>(device_.data());
  missed_counts_ = missed_rows_ + rows;
  const size_t row_bytes = rows * options.row_stride_bytes;
  const size_t source_bytes = rows * sizeof(const std::byte*);
  RETURN_IF_ERROR(pinned_.Allocate(row_bytes + source_bytes + lanes * sizeof(uint32_t)));
  rows_ = static_cast<std::byte*>(pinned_.data());
  sources_ = reinterpret_cast<const std::byte**>(rows_ + row_bytes);
  source_counts_ = reinterpret_cast<uint32_t*>(rows_ + row_bytes + source_bytes);
  return FromCuda(cudaMemsetAsync(missed_counts_, 0, lanes * sizeof(uint32_t), stream),
                  "clearing the counts of missed rows");
}

Status RowStaging::StageMissedRows(kernels::cuda::Stream stream, const std::byte** addresses) {
  const kernels::cuda::KernelStatus turned =
      kernels::cuda::StageRows({.lane_capacity = options_.lane_capacity,
                                .addresses = addresses,
                                .address_stride = options_.rows_per_lane,
                                .missed_rows = missed_rows_,
                                .missed_counts = missed_counts_,
                                .sources = sources_,
                                .source_counts = source_counts_,
                                .staging = rows_,
                                .row_stride_bytes = options_.row_stride_bytes},
                               stream);
  if (!turned.ok()) return FromKernel(turned, "listing missed rows for the host");
  return FromCuda(cudaLaunchHostFunc(stream, &RowStaging::CopyRows, this),
                  "having the host copy missed rows");
}

// Runs on a thread of the CUDA runtime, which runs one host function at a time.
void RowStaging::CopyRows(void* staging) {
  const auto& self = *static_cast<const RowStaging*>(staging);
  const size_t row_bytes = self.options_.row_stride_bytes;
  for (size_t lane = 0; lane < self.options_.lane_capacity; ++lane) {
    const size_t first = lane * self.options_.rows_per_lane;
    for (size_t i = 0; i < self.source_counts_[lane]; ++i) {
      std::memcpy(self.rows_ + (first + i) * row_bytes, self.sources_[first + i], row_bytes);
    }
  }
}

}  // namespace pqcached::gpu
