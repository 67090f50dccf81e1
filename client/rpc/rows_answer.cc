#include "client/rpc/rows_answer.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>

#include "client/rpc/refusal.h"
#include "client/rpc/wire.h"
#include "pqcached/v1/kv_cache.pb.h"

namespace pqcached::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::io::StringOutputStream;

// Place of bytes in a message.
struct BytesPlace {
  uint64_t begin = 0;
  uint64_t size = 0;
};

// Reads a message, and all that it contains, up to the present limit. Its fields of `number`, which
// are length-delimited, are passed to `take`, and the others are copied to `*rest`.
template <typename Take>
bool ReadFields(CodedInputStream& input, int number, std::string* rest, const Take& take) {
  StringOutputStream stream(rest);
  CodedOutputStream copy(&stream);
  const uint32_t taken = WireFormatLite::MakeTag(number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  for (uint32_t tag = input.ReadTag(); tag != 0; tag = input.ReadTag()) {
    int size = 0;
    const bool is_read = tag == taken ? input.ReadVarintSizeAsInt(&size) && take(size)
                                      : WireFormatLite::SkipField(&input, tag, &copy);
    if (!is_read) return false;
  }
  return input.ConsumedEntireMessage();
}

// Reads an answer of FetchBlocks. Of the data of its blocks, only their places are read.
bool ReadAnswer(CodedInputStream& input, v1::FetchBlocksResponse* answer, BytesPlace* data) {
  std::string rest;
  std::string block;
  int block_count = 0;
  const auto skip_data = [&](int size) {
    *data = {static_cast<uint64_t>(input.CurrentPosition()), static_cast<uint64_t>(size)};
    return input.Skip(size);
  };
  const auto read_block = [&](int size) {
    const CodedInputStream::Limit limit = input.PushLimit(size);
    ++block_count;
    block.clear();
    const bool is_read =
        ReadFields(input, v1::Tensor::kInlineDataFieldNumber, &block, skip_data) &&
        input.BytesUntilLimit() == 0;  // not the end of a message that is too short
    input.PopLimit(limit);
    return is_read;
  };
  if (!ReadFields(input, v1::FetchBlocksResponse::kBlocksFieldNumber, &rest, read_block) ||
      !answer->ParseFromString(rest)) {
    return false;
  }
  for (int i = 0; i < block_count; ++i) answer->add_blocks();
  return block_count != 1 || answer->mutable_blocks(0)->ParseFromString(block);
}

grpc::Status BadRows(const std::string& what) {
  return {grpc::StatusCode::INTERNAL, "the sidecar's answer is invalid: " + what};
}

}  // namespace

grpc::Status RowsAnswer::Take(grpc::ByteBuffer* received, const Shape& shape) {
  v1::FetchBlocksResponse answer;
  BytesPlace data;
  {
    grpc::ProtoBufferReader reader(received);
    CodedInputStream input(&reader);
    input.SetTotalBytesLimit(INT_MAX);
    if (!reader.status().ok() || !ReadAnswer(input, &answer, &data)) {
      return BadRows("is not a FetchBlocksResponse");
    }
  }
  if (answer.blocks_size() != 1) return BadRows("blocks: must be one");
  std::string reason;
  if (!IsTensorOf(answer.blocks(0), data.size, shape.dtype,
                  {shape.kv_heads, shape.tokens, shape.dim}, &reason)) {
    return BadRows("blocks[0]: " + reason);
  }
  slices_.clear();
  if (!received->Dump(&slices_).ok()) return BadRows("is not there");
  received->Clear();
  shape_ = shape;
  rows_epoch_ = answer.rows_epoch();
  rows_begin_ = data.begin;
  return grpc::Status::OK;
}

void RowsAnswer::CopyTo(std::byte* out, size_t head_stride_bytes) const {
  const size_t head_bytes = shape_.tokens * shape_.row_bytes();
  size_t skipped = rows_begin_;  // still to be skipped
  size_t head = 0;
  size_t copied = 0;  // of the head
  for (const grpc::Slice& slice : slices_) {
    size_t at = std::min(skipped, slice.size());
    skipped -= at;
    while (at < slice.size() && head < shape_.kv_heads) {
      const size_t bytes = std::min(slice.size() - at, head_bytes - copied);
      std::memcpy(out + head * head_stride_bytes + copied, slice.begin() + at, bytes);
      at += bytes;
      copied += bytes;
      if (copied < head_bytes) continue;
      ++head;
      copied = 0;
    }
  }
}

void RowsAnswer::Place::Skip(const std::vector<grpc::Slice>& slices, size_t bytes) {
  offset += bytes;
  while (slice < slices.size() && offset >= slices[slice].size()) {
    offset -= slices[slice].size();
    ++slice;
  }
}

void RowsAnswer::CopyRow(Place place, std::byte* out) const {
  for (size_t left = shape_.row_bytes(); left > 0;) {
    const grpc::Slice& slice = slices_[place.slice];
    const size_t bytes = std::min(left, slice.size() - place.offset);
    std::memcpy(out, slice.begin() + place.offset, bytes);
    out += bytes;
    left -= bytes;
    place.Skip(slices_, bytes);
  }
}

bool RowsAnswer::VisitRuns(const std::function<bool(uint64_t token, uint64_t count,
                                                    const std::byte* const* heads)>& visit) const {
  const size_t row_bytes = shape_.row_bytes();
  std::vector<Place> places(shape_.kv_heads);
  std::vector<const std::byte*> heads(shape_.kv_heads);
  std::vector<std::byte> split(shape_.kv_heads * row_bytes);  // rows in more than one slice
  Place place;
  place.Skip(slices_, rows_begin_);
  for (Place& head : places) {
    head = place;
    place.Skip(slices_, shape_.tokens * row_bytes);
  }
  for (uint64_t token = 0; token < shape_.tokens;) {
    size_t count = shape_.tokens - token;
    for (size_t head = 0; head < places.size(); ++head) {
      const grpc::Slice& slice = slices_[places[head].slice];
      const size_t whole = (slice.size() - places[head].offset) / row_bytes;
      heads[head] = reinterpret_cast<const std::byte*>(slice.begin()) + places[head].offset;
      if (whole == 0) {
        heads[head] = split.data() + head * row_bytes;
        CopyRow(places[head], split.data() + head * row_bytes);
      }
      count = std::min(count, std::max<size_t>(1, whole));
    }
    if (!visit(token, count, heads.data())) return false;
    for (Place& head : places) head.Skip(slices_, count * row_bytes);
    token += count;
  }
  return true;
}

}  // namespace pqcached::client
