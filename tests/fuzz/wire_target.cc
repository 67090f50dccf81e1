// Fuzz target: messages of the wire contract, as sidecar and client read them, and the values that
// both make of them. An input chooses a reader and gives it a message that fits and was then
// changed, or bytes that are none.
#include <google/protobuf/stubs/logging.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "client/base/pack.h"
#include "client/rpc/wire.h"
#include "kvstore/records/cache_image.h"
#include "proto/codec/selection.h"
#include "service/wire/ingest_message.h"
#include "service/wire/wire.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/messages.h"
#include "tests/fuzz/target.h"
#include "tests/service/handlers/requests.h"

namespace pqcached::fuzz {
namespace {

using google::protobuf::Message;

constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 20;

// Fills the message from the input: as it fits, and changed; or from bytes.
void Choose(Bytes& bytes, Message* message) {
  const uint8_t kind = bytes.Byte();
  if (kind % 4 == 3) {
    if (!message->ParsePartialFromString(bytes.Text(4096))) message->Clear();
    return;
  }
  for (uint8_t i = 0; i < kind / 4 % 8; ++i) Mutate(*message, bytes);
}

// A refusal names the field that is refused.
void CheckRefusal(const absl::Status& status) {
  const bool is_refusal = absl::IsInvalidArgument(status) || absl::IsUnimplemented(status);
  if (!status.ok() && (!is_refusal || kvstore::FieldOf(status).empty())) {
    Found("a refusal without its field: " + status.ToString());
  }
}

bool SameBytes(const kvstore::TensorView& view, const std::string& data) {
  return view.data_bytes == data.size() &&
         (data.empty() || std::memcmp(view.data, data.data(), data.size()) == 0);
}

// The reader of Ingest, which leaves rows where they are, finds what protobuf finds.
void ReadIngest(Bytes& bytes) {
  v1::IngestRequest fitting;
  v1::IngestChunk* chunk = fitting.mutable_chunk();
  chunk->set_first_position(3);
  *chunk->mutable_rows() = service::RowsOf(1, 0, 1);
  const uint8_t kind = bytes.Byte();
  for (uint8_t i = 0; i < kind % 8; ++i) Mutate(fitting, bytes);
  std::string received = fitting.SerializePartialAsString();
  if (kind >= 192) received = bytes.Text(4096);
  for (uint8_t i = 0; i < kind / 8 % 8 && !received.empty(); ++i) {  // also in lengths and tags
    received[bytes.Number() % received.size()] = static_cast<char>(bytes.Byte());
  }
  service::IngestMessage message;
  const absl::Status parsed = message.Parse(std::as_bytes(std::span<const char>(received)));
  v1::IngestRequest expected;
  if (parsed.ok() != expected.ParseFromString(received)) Found("Ingest: another opinion");
  if (!parsed.ok()) return;
  if (message.request().request_case() != expected.request_case()) Found("Ingest: another case");
  if (!expected.has_chunk()) return;
  const auto rows = message.Rows(kMaxMessageBytes, nullptr);
  const auto expected_rows =
      service::LayerRowsOf(expected.chunk().rows(), "chunk.rows", kMaxMessageBytes);
  CheckRefusal(rows.status());
  if (rows.status() != expected_rows.status()) Found("Ingest: another refusal");
  if (!rows.ok()) return;
  const v1::LayerRows& wanted = expected.chunk().rows();
  if (!SameBytes(rows->keys, wanted.keys().inline_data()) ||
      !SameBytes(rows->values, wanted.values().inline_data()) ||
      rows->keys.shape != expected_rows->keys.shape ||
      rows->values.strides != expected_rows->values.strides || rows->layer != wanted.layer()) {
    Found("Ingest: other rows");
  }
}

// A spec that is valid reads the same from the records that the next process finds.
void ReadCacheSpec(Bytes& bytes) {
  v1::OpenCacheRequest request = service::CacheRequest();
  Choose(bytes, &request);
  const auto spec = service::CacheSpecOf(request);
  CheckRefusal(spec.status());
  if (!spec.ok()) return;
  const absl::Status valid = kvstore::ValidateCacheSpec(*spec);
  CheckRefusal(valid);
  if (!valid.ok()) return;
  const kvstore::CacheSpec made = kvstore::ResolveCapacity(*spec, size_t{1} << 30);
  std::vector<std::byte> record(size_t{1} << 16);
  kvstore::RecordWriter writer(record);
  kvstore::WriteSpec(made, writer);
  if (!writer.ok()) return;
  const std::span<const std::byte> written(record.data(), writer.size_bytes());
  kvstore::RecordReader reader(written);
  const auto read = kvstore::ReadSpec(reader);
  if (!read.has_value() || read->name != spec->name || read->groups.size() != spec->groups.size() ||
      read->default_index != spec->default_index || read->rank != spec->rank ||
      read->quota_bytes != made.quota_bytes || read->capacity_bytes != made.capacity_bytes ||
      read->grows != made.grows) {
    Found("a valid spec does not survive its record");
  }
}

bool Same(const kvstore::Selection& a, const kvstore::Selection& b) {
  return a.group_rule == b.group_rule && a.sink_tokens == b.sink_tokens &&
         a.window_tokens == b.window_tokens && a.budget_kind == b.budget_kind &&
         a.budget_count == b.budget_count &&
         (a.budget_ratio == b.budget_ratio || std::isnan(a.budget_ratio)) &&
         std::equal(a.excluded.begin(), a.excluded.end(), b.excluded.begin(), b.excluded.end());
}

// What the sidecar has read, the client would send.
void ReadSelection(Bytes& bytes) {
  v1::Selection message = service::TokenCountSelection(service::Pq(2, 4), 1, 2, 3);
  Choose(bytes, &message);
  kvstore::Selection selection;
  const kvstore::Refusal refusal = codec::Decode(message, "selection", &selection);
  if (!refusal.ok()) {
    if (refusal.field.empty()) Found("a refusal of a selection without its field");
    return;
  }
  v1::Selection again;
  codec::Encode(selection, &again);
  kvstore::Selection decoded;
  if (!codec::Decode(again, "selection", &decoded).ok() || !Same(selection, decoded)) {
    Found("a selection changes on its way");
  }
}

void ReadOtherRequests(Bytes& bytes) {
  v1::BuildIndexRequest build;
  Choose(bytes, &build);
  CheckRefusal(service::BuildSpecOf(build).status());
  v1::CreateSequenceRequest create;
  *create.mutable_live_index()->mutable_index() = service::Pq(2, 4);
  Choose(bytes, &create);
  CheckRefusal(service::LiveIndexOf(create.live_index(), "live_index").status());
  v1::AdmitRequest admit;
  Choose(bytes, &admit);
  CheckRefusal(service::AdmitSpecOf(admit).status());
  v1::FetchBlocksRequest fetch;
  fetch.add_ranges()->set_end(1);
  Choose(bytes, &fetch);
  CheckRefusal(service::RowPartOf(fetch.part(), "part").status());
  for (const v1::TokenRange& range : fetch.ranges()) {
    CheckRefusal(service::TokenRangeOf(true, range, "range").status());
  }
  v1::TokenPositions positions;
  Choose(bytes, &positions);
  CheckRefusal(
      service::PositionsOf(positions.count(), positions.positions(), "positions").status());
  v1::Query query = service::QueryAt(1, 1, 1);
  Choose(bytes, &query);
  const auto read = service::QueryOf(query, "query", kMaxMessageBytes);
  CheckRefusal(read.status());
  if (read.ok() && !SameBytes(read->queries, query.queries().inline_data())) Found("other queries");
  v1::AttendItem attend;
  *attend.mutable_query() = service::QueryAt(1, 1, 1);
  attend.mutable_positions()->mutable_logits()->Swap(attend.mutable_query()->mutable_queries());
  attend.mutable_query()->clear_queries();
  Choose(bytes, &attend);
  const auto scored = service::QueryOverPositions(attend, "items[0]", kMaxMessageBytes);
  CheckRefusal(scored.status());
  if (scored.ok() && scored->has_logits &&
      !SameBytes(scored->queries, attend.positions().logits().inline_data())) {
    Found("other logits");
  }
}

// A tensor that the client packs is what the sidecar reads, element by element.
void PackTensor(Bytes& bytes) {
  static const std::string elements = service::RowsOf(1, 0, 64).keys().inline_data();
  client::TensorView tensor{.data = reinterpret_cast<const std::byte*>(elements.data()),
                            .dtype = client::DType::kF32,
                            .ndim = 3};
  const uint64_t element_count = elements.size() / sizeof(float);
  uint64_t last = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    tensor.shape[i] = 1 + bytes.Below(7);
    tensor.strides[i] = static_cast<int64_t>(bytes.Below(150));
    last += (tensor.shape[i] - 1) * static_cast<uint64_t>(tensor.strides[i]);
  }
  if (last >= element_count) return;
  v1::Tensor message;
  client::ToWire(tensor, 0, tensor.shape[0], &message);
  const auto read = service::TensorOf(message, "tensor", kMaxMessageBytes);
  if (!read.ok()) Found("the client packs a tensor that is refused: " + read.status().ToString());
  size_t at = 0;
  for (uint64_t i = 0; i < tensor.shape[0]; ++i) {
    for (uint64_t j = 0; j < tensor.shape[1]; ++j) {
      for (uint64_t k = 0; k < tensor.shape[2]; ++k, ++at) {
        const auto from = i * static_cast<uint64_t>(tensor.strides[0]) +
                          j * static_cast<uint64_t>(tensor.strides[1]) +
                          k * static_cast<uint64_t>(tensor.strides[2]);
        if (std::memcmp(read->data + at * sizeof(float), tensor.data + from * sizeof(float),
                        sizeof(float)) != 0) {
          Found("the client packs other elements");
        }
      }
    }
  }
  if (at * sizeof(float) != read->data_bytes) Found("the client packs another count of elements");
}

// The client takes an answer's tensor only when it is all that it asked for.
void ReadAnswer(Bytes& bytes) {
  v1::Tensor tensor = service::FloatTensor({2, 3, 4}, 1);
  Choose(bytes, &tensor);
  std::string reason;
  const std::byte* data = client::TensorBytes(tensor, client::DType::kF32,
                                              {uint64_t{2}, uint64_t{3}, uint64_t{4}}, &reason);
  if ((data == nullptr) == reason.empty()) Found("an answer is refused without a reason");
  if (data != nullptr && tensor.inline_data().size() != 2 * 3 * 4 * sizeof(float)) {
    Found("the client takes a tensor of another size");
  }
  v1::Attachment attachment;
  attachment.set_image("image");
  Choose(bytes, &attachment);
  size_t taken = 0;
  client::WriteImage(
      attachment,
      {.context = &taken, .write = [](void* context, uint64_t, const std::byte*, size_t size) {
         *static_cast<size_t*>(context) = size;
       }});
  if (taken != attachment.image().size()) Found("the client takes another image");
}

constexpr void (*kReaders[])(Bytes&) = {ReadIngest,        ReadCacheSpec, ReadSelection,
                                        ReadOtherRequests, PackTensor,    ReadAnswer};

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (size_t reader = 0; reader < std::size(kReaders); ++reader) {
    const std::string number(1, static_cast<char>(reader));
    seeds.push_back(number + std::string(4, '\0'));
    seeds.push_back(number + std::string("\x09\x01\x00\x01\x05\x02\x03", 7));
    seeds.push_back(number + "\x07" + service::CacheRequest().SerializeAsString().substr(0, 60));
  }
  v1::IngestRequest request;
  request.mutable_chunk()->mutable_rows()->mutable_keys()->set_inline_data("keys");
  seeds.push_back(std::string("\0\xc0", 2) + request.SerializeAsString() +
                  request.SerializeAsString());
  return seeds;
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pqcached::fuzz;  // NOLINT: a target's one function
  // protobuf would write a line for each text that is no UTF-8.
  static auto* const before = google::protobuf::SetLogHandler(nullptr);
  static_cast<void>(before);
  Bytes bytes(data, size);
  kReaders[bytes.Below(std::size(kReaders))](bytes);
  return 0;
}
