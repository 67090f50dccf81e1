#include "client/rpc/ingest_call.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstring>
#include <string>
#include <utility>

#include "client/base/pack.h"
#include "client/rpc/wire.h"
#include "pqcached/v1/kv_cache.grpc.pb.h"

namespace pqcached::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

// Returns the head of a length-delimited field, which `bytes` bytes follow.
std::string Head(int field, uint64_t bytes) {
  uint8_t head[2 * 10];
  uint8_t* end =
      WireFormatLite::WriteTagToArray(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED, head);
  end = CodedOutputStream::WriteVarint64ToArray(bytes, end);
  return {reinterpret_cast<const char*>(head), static_cast<size_t>(end - head)};
}

// Returns a Tensor up to its inline data, preceded by its own head as `field` of LayerRows.
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

  // Built from the innermost message outwards: each head contains the size of all that follows.
  const std::string between =
      TensorHead(v1::LayerRows::kValuesFieldNumber, rows.values, end - begin, value_bytes);
  const uint64_t rest_bytes = key_bytes + between.size() + value_bytes;
  std::string before = layer.SerializeAsString() + TensorHead(v1::LayerRows::kKeysFieldNumber,
                                                              rows.keys, end - begin, key_bytes);
  before = chunk.SerializeAsString() +
           Head(v1::IngestChunk::kRowsFieldNumber, before.size() + rest_bytes) + before;
  before = Head(v1::IngestRequest::kChunkFieldNumber, before.size() + rest_bytes) + before;

  const grpc::Slice slice(before.size() + rest_bytes);
  // The slice is not shared yet, so it may be written.
  auto* at = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(slice.begin()));
  std::memcpy(at, before.data(), before.size());
  at += before.size();
  Pack(rows.keys, begin, end, at);
  at += key_bytes;
  std::memcpy(at, between.data(), between.size());
  Pack(rows.values, begin, end, at + between.size());
  return {&slice, 1};
}

grpc::ByteBuffer SampleRequestOf(const SampleBlock& samples, uint64_t begin, uint64_t end) {
  v1::IngestRequest request;
  v1::QuerySamples* const message = request.mutable_chunk()->add_query_samples();
  message->set_layer(samples.layer);
  message->mutable_positions()->Assign(samples.positions + begin, samples.positions + end);
  v1::Tensor* const queries = message->mutable_queries();
  queries->set_dtype(ToWire(samples.queries.dtype));
  queries->add_shape(end - begin);
  for (uint32_t dim = 1; dim < samples.queries.ndim; ++dim) {
    queries->add_shape(samples.queries.shape[dim]);
  }
  queries->mutable_inline_data()->resize((end - begin) * BytesPerIndex(samples.queries));
  Pack(samples.queries, begin, end,
       reinterpret_cast<std::byte*>(queries->mutable_inline_data()->data()));
  const grpc::Slice slice(request.SerializeAsString());
  return {&slice, 1};
}

IngestCall::IngestCall(const std::shared_ptr<grpc::Channel>& channel,
                       std::shared_ptr<grpc::ClientContext> context, uint64_t sequence_id,
                       const pqc_row_options* names, AbandonedCalls* left_behind)
    : abandoned_calls_(left_behind),
      stub_(channel),
      held_(std::make_unique<Held>(std::move(context))) {
  const std::string method = std::string("/") + v1::KvCache::service_full_name() + "/Ingest";
  v1::IngestRequest request;
  request.mutable_header()->set_sequence_id(sequence_id);
  if (names) ToWire(*names, request.mutable_header()->mutable_names());
  const grpc::Slice header(request.SerializeAsString());
  held_->stream = stub_.PrepareCall(held_->context(), method, held_->queue());
  Begin();
  held_->stream->StartCall(this);
  // The read of the answer begins early, because a failing call is answered early.
  if (WaitForWrite()) {
    held_->Begin();
    reading_ = true;
    held_->stream->Read(&held_->answer, held_.get());
  }
  Write({&header, 1});
}

IngestCall::~IngestCall() {
  if (!finished_) {
    held_->context()->TryCancel();
    TakeStatus();
  }
  if (held_->has_pending_operations()) abandoned_calls_->Add(std::move(held_));
}

void IngestCall::Begin() {
  held_->Begin();
  writing_ = true;
}

void IngestCall::Note(const void* tag, bool ok) {
  if (tag == held_.get()) {
    reading_ = false;
    answered_ = ok;
  } else {
    writing_ = false;
    broken_ = broken_ || !ok;
  }
}

bool IngestCall::WaitForWrite() {
  void* tag = nullptr;
  bool ok = false;
  while (writing_ && held_->Next(&tag, &ok)) Note(tag, ok);
  broken_ = broken_ || held_->overdue();
  return !broken_;
}

bool IngestCall::IsInProgress() {
  void* tag = nullptr;
  bool ok = false;
  while (held_->TryNext(&tag, &ok)) Note(tag, ok);
  return reading_ && !broken_;
}

bool IngestCall::Write(const grpc::ByteBuffer& message) {
  if (!WaitForWrite()) return false;
  Begin();
  held_->stream->Write(message, this);
  return true;
}

grpc::Status IngestCall::Finish() {
  if (WaitForWrite()) {
    Begin();
    held_->stream->WritesDone(this);
  }
  grpc::Status status = TakeStatus();
  if (status.ok() && !answered_) return {grpc::StatusCode::INTERNAL, "Ingest: no answer"};
  return status;
}

// Waits for the answer, or for its absence, then finishes the call.
grpc::Status IngestCall::TakeStatus() {
  WaitForWrite();
  void* tag = nullptr;
  bool ok = false;
  while (reading_ && held_->Next(&tag, &ok)) Note(tag, ok);
  finished_ = true;
  if (held_->overdue()) return Overdue();
  Begin();
  held_->stream->Finish(&held_->status, this);
  WaitForWrite();
  return held_->overdue() ? Overdue() : held_->status;
}

}  // namespace pqcached::client
