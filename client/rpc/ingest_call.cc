#include "client/rpc/ingest_call.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstring>
#include <string>

#include "client/pack.h"
#include "client/rpc/wire.h"
#include "pqcached/v1/kv_cache.grpc.pb.h"

namespace pqcached::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

// The head of a length-delimited field whose `bytes` follow.
std::string Head(int field, uint64_t bytes) {
  uint8_t head[2 * 10];
  uint8_t* end =
      WireFormatLite::WriteTagToArray(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED, head);
  end = CodedOutputStream::WriteVarint64ToArray(bytes, end);
  return {reinterpret_cast<const char*>(head), static_cast<size_t>(end - head)};
}

// A Tensor up to its inline data, behind its own head as `field` of LayerRows.
std::string TensorHead(int field, const TensorView& tensor, uint64_t token_count,
                       uint64_t data_bytes) {
  v1::Tensor message;
  message.set_dtype(ToWire(tensor.dtype));
  message.add_shape(token_count);
  for (uint32_t dim = 1; dim < tensor.ndim; ++dim) message.add_shape(tensor.shape[dim]);
  const std::string fields =
      message.SerializeAsString() + Head(v1::Tensor::kInlineDataFieldNumber, data_bytes);
  return Head(field, fields.size() + data_bytes) + fields;
}

}  // namespace

grpc::ByteBuffer StagedRequestOf(const RowBlock& rows, uint64_t first_position) {
  v1::IngestRequest request;
  v1::IngestChunk* chunk = request.mutable_chunk();
  chunk->set_first_position(first_position);
  ToWire(rows, chunk->mutable_rows());
  const grpc::Slice slice(request.SerializeAsString());
  return {&slice, 1};
}

grpc::ByteBuffer IngestRequestOf(const RowBlock& rows, uint64_t begin, uint64_t end,
                                 uint64_t first_position) {
  const uint64_t key_bytes = (end - begin) * BytesPerIndex(rows.keys);
  const uint64_t value_bytes = (end - begin) * BytesPerIndex(rows.values);
  v1::IngestChunk chunk;
  chunk.set_first_position(first_position);
  v1::LayerRows layer;
  layer.set_layer(rows.layer);

  // From the innermost message outwards: each head tells the size of all that follows.
  const std::string between =
      TensorHead(v1::LayerRows::kValuesFieldNumber, rows.values, end - begin, value_bytes);
  const uint64_t rest_bytes = key_bytes + between.size() + value_bytes;
  std::string before = layer.SerializeAsString() + TensorHead(v1::LayerRows::kKeysFieldNumber,
                                                              rows.keys, end - begin, key_bytes);
  before = chunk.SerializeAsString() +
           Head(v1::IngestChunk::kRowsFieldNumber, before.size() + rest_bytes) + before;
  before = Head(v1::IngestRequest::kChunkFieldNumber, before.size() + rest_bytes) + before;

  const grpc::Slice slice(before.size() + rest_bytes);
  // It is nobody else's yet.
  auto* at = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(slice.begin()));
  std::memcpy(at, before.data(), before.size());
  at += before.size();
  Pack(rows.keys, begin, end, at);
  at += key_bytes;
  std::memcpy(at, between.data(), between.size());
  Pack(rows.values, begin, end, at + between.size());
  return {&slice, 1};
}

IngestCall::IngestCall(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                       uint64_t sequence_id)
    : context_(context), stub_(channel) {
  const std::string method = std::string("/") + v1::KvCache::service_full_name() + "/Ingest";
  v1::IngestRequest request;
  request.mutable_header()->set_sequence_id(sequence_id);
  const grpc::Slice header(request.SerializeAsString());
  call_ = stub_.PrepareCall(context, method, &queue_);
  call_->StartCall(this);
  under_way_ = true;
  // The answer is waited for from the beginning: it comes early when the call fails.
  if (Settle()) {
    call_->Read(&answer_, &answer_);
    reading_ = true;
  }
  Write({&header, 1});
}

IngestCall::~IngestCall() {
  if (!finished_) {
    context_->TryCancel();
    TakeStatus();
  }
  queue_.Shutdown();
  void* tag = nullptr;
  for (bool ok = false; queue_.Next(&tag, &ok);) {
  }
}

void IngestCall::Note(const void* tag, bool ok) {
  if (tag == &answer_) {
    reading_ = false;
    answered_ = ok;
  } else {
    under_way_ = false;
    broken_ = broken_ || !ok;
  }
}

bool IngestCall::Settle() {
  void* tag = nullptr;
  bool ok = false;
  while (under_way_ && queue_.Next(&tag, &ok)) Note(tag, ok);
  return !broken_;
}

bool IngestCall::Stands() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_.AsyncNext(&tag, &ok, gpr_time_0(GPR_CLOCK_MONOTONIC)) ==
         grpc::CompletionQueue::GOT_EVENT) {
    Note(tag, ok);
  }
  return reading_ && !broken_;
}

bool IngestCall::Write(const grpc::ByteBuffer& message) {
  if (!Settle()) return false;
  call_->Write(message, this);
  under_way_ = true;
  return true;
}

grpc::Status IngestCall::Finish() {
  if (Settle()) {
    call_->WritesDone(this);
    under_way_ = true;
  }
  grpc::Status status = TakeStatus();
  if (status.ok() && !answered_) return {grpc::StatusCode::INTERNAL, "Ingest: no answer"};
  return status;
}

// The call is over when the answer, or none, has come.
grpc::Status IngestCall::TakeStatus() {
  Settle();
  void* tag = nullptr;
  bool ok = false;
  while (reading_ && queue_.Next(&tag, &ok)) Note(tag, ok);
  grpc::Status status;
  call_->Finish(&status, this);
  under_way_ = true;
  Settle();
  finished_ = true;
  return status;
}

}  // namespace pqcached::client
