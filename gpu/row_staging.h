// RowStaging lets the host copy rows that the device cannot read in place, as part of a stream's
// work.
//
// It serves devices that cannot page-lock a read-only mapping, and pieces of the mapping that are
// not locked: the spans with `host_only` set (kernels/cuda/rows.h). LocateRows lists their rows;
// StageMissedRows makes the host copy them into page-locked memory and replaces their addresses.
// The caller's thread does not wait: a thread of the CUDA runtime copies the rows when the stream
// reaches that point. A step with these copies can be captured in a graph.
//
// Thread-compatible; one stream at a time. A fallback: far slower than reads in place.
#ifndef PQCACHED_GPU_ROW_STAGING_H_
#define PQCACHED_GPU_ROW_STAGING_H_

#include <cstddef>
#include <cstdint>

#include "gpu/device.h"
#include "gpu/status.h"
#include "kernels/cuda/rows.h"

namespace pqcached::gpu {

class RowStaging {
 public:
  struct Options {
    uint32_t lane_capacity = 0;   // sequences times kv heads, 1 to 65535
    uint32_t rows_per_lane = 0;   // LocateRowsArgs::address_stride, at least 1
    size_t row_stride_bytes = 0;  // a multiple of 16, at most 4096
  };

  RowStaging() = default;
  RowStaging(const RowStaging&) = delete;
  RowStaging& operator=(const RowStaging&) = delete;

  // Allocates lane_capacity * rows_per_lane rows of page-locked memory. Called once.
  //
  // Errors: kInvalid      an option is out of range (the message names it and the range)
  //         kOutOfMemory  too little device memory, or page-locking was refused
  Status Create(const Options& options, kernels::cuda::Stream stream);

  // Tables for LocateRowsArgs. Every LocateRows that receives them must be followed by
  // StageMissedRows.
  uint32_t* missed_rows() const { return missed_rows_; }
  uint32_t* missed_counts() const { return missed_counts_; }

  // Enqueues the copies of the missed rows on `stream`. Work enqueued afterwards can read all of
  // `addresses` ([lane, rows_per_lane], as written by LocateRows) on the device, until the next
  // StageMissedRows. The spans' memory must stay mapped until then.
  Status StageMissedRows(kernels::cuda::Stream stream, const std::byte** addresses);

 private:
  static void CopyRows(void* staging);

  Options options_;
  DeviceBuffer device_;
  uint32_t* missed_rows_ = nullptr;    // in device_
  uint32_t* missed_counts_ = nullptr;  // likewise
  PinnedBuffer pinned_;
  std::byte* rows_ = nullptr;            // [lane, rows_per_lane, row_stride_bytes], in pinned_
  const std::byte** sources_ = nullptr;  // [lane, rows_per_lane], likewise
  uint32_t* source_counts_ = nullptr;    // [lane], likewise
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_ROW_STAGING_H_
