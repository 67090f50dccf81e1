#include "service/rpc/fetched_rows.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/slice.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

// Rows of fewer bytes are copied: a slice of their own costs more.
constexpr size_t kSmallestSlice = size_t{16} << 10;

// Appends the head of a length-delimited field, which `bytes` bytes follow.
void AppendHead(int field, uint64_t bytes, std::string* message) {
  uint8_t head[2 * 10];
  uint8_t* end =
      WireFormatLite::WriteTagToArray(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED, head);
  end = CodedOutputStream::WriteVarint64ToArray(bytes, end);
  message->append(reinterpret_cast<const char*>(head), static_cast<size_t>(end - head));
}

// Appends a block up to its data.
void AppendBlockHead(const kvstore::Rows& rows, std::string* message) {
  v1::Tensor tensor;
  ToWireWithoutData(rows, &tensor);
  std::string fields = tensor.SerializeAsString();
  AppendHead(v1::Tensor::kInlineDataFieldNumber, rows.data.size(), &fields);
  AppendHead(v1::FetchBlocksResponse::kBlocksFieldNumber, fields.size() + rows.data.size(),
             message);
  message->append(fields);
}

// Returns a slice that keeps the rows.
grpc::Slice SliceOf(kvstore::FetchedBytes data) {
  auto kept = std::make_unique<kvstore::FetchedBytes>(std::move(data));
  kvstore::FetchedBytes* const rows = kept.release();
  return {rows->data(), rows->size(),
          [](void* held) { delete static_cast<kvstore::FetchedBytes*>(held); }, rows};
}

}  // namespace

grpc::ByteBuffer ToBuffer(FetchedBlocks fetched) {
  std::vector<grpc::Slice> slices;
  std::string message;  // what follows the last slice
  for (kvstore::Rows& rows : fetched.blocks) {
    AppendBlockHead(rows, &message);
    if (rows.data.size() < kSmallestSlice) {
      message.append(reinterpret_cast<const char*>(rows.data.data()), rows.data.size());
      continue;
    }
    slices.emplace_back(std::exchange(message, {}));
    slices.push_back(SliceOf(std::move(rows.data)));
  }
  v1::FetchBlocksResponse rest;
  rest.set_rows_epoch(fetched.rows_epoch);
  slices.emplace_back(message + rest.SerializeAsString());
  return {slices.data(), slices.size()};
}

}  // namespace pqcached::service
