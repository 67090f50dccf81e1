// RowsAnswer is an answer of FetchBlocks with one block, as gRPC has received it. Its rows are
// copied from there to where the caller wants them: a protobuf message would copy them once more.
//
// Single-thread.
#ifndef PQCACHED_CLIENT_RPC_ROWS_ANSWER_H_
#define PQCACHED_CLIENT_RPC_ROWS_ANSWER_H_

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/base/dtype.h"

namespace pqcached::client {

class RowsAnswer {
 public:
  struct Shape {
    kernels::DType dtype = kernels::DType::kF16;
    uint64_t kv_heads = 0;
    uint64_t tokens = 0;
    uint64_t dim = 0;

    uint64_t row_bytes() const { return dim * kernels::DTypeBytes(dtype); }
  };

  // Takes the message out of `received`. INTERNAL when it has anything but one block of this shape.
  grpc::Status Take(grpc::ByteBuffer* received, const Shape& shape);

  uint64_t rows_epoch() const { return rows_epoch_; }
  // Copies the rows of head i to `out` + i * `head_stride_bytes`.
  void CopyTo(std::byte* out, size_t head_stride_bytes) const;
  // Passes the rows on where they are, in runs of tokens; `heads` [kv_heads] are the rows of the
  // token. Returns false when `visit` has, which ends the visit.
  bool VisitRuns(const std::function<bool(uint64_t token, uint64_t count,
                                          const std::byte* const* heads)>& visit) const;

 private:
  // Place in the message.
  struct Place {
    size_t slice = 0;
    size_t offset = 0;

    // Skips bytes, and slices that have none left.
    void Skip(const std::vector<grpc::Slice>& slices, size_t bytes);
  };
  // Copies the row that begins at a place.
  void CopyRow(Place place, std::byte* out) const;

  Shape shape_;
  uint64_t rows_epoch_ = 0;
  std::vector<grpc::Slice> slices_;
  size_t rows_begin_ = 0;  // in the message
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_ROWS_ANSWER_H_
