#include "service/wire/ingest_message.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include "service/base/refusal.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

using Bytes = std::span<const std::byte>;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t LengthDelimited(int field) {
  return static_cast<uint32_t>(field) << WireFormatLite::kTagTypeBits |
         WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
}

// Calls visit(tag, field, value) for each field of `message`: `field` holds all its bytes, `value`
// those of its value when it is length-delimited (otherwise it is empty). Returns false when
// `message` is malformed, and as soon as `visit` returns false.
template <class Visit>
bool ForEachField(Bytes message, const Visit& visit) {
  CodedInputStream in(reinterpret_cast<const uint8_t*>(message.data()),
                      static_cast<int>(message.size()));
  for (;;) {
    const int begin = in.CurrentPosition();
    const uint32_t tag = in.ReadTag();
    if (tag == 0) return in.ConsumedEntireMessage();
    int value_begin = 0;
    if (WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      int length = 0;
      if (!in.ReadVarintSizeAsInt(&length)) return false;
      value_begin = in.CurrentPosition();
      if (!in.Skip(length)) return false;
    } else if (!WireFormatLite::SkipField(&in, tag)) {
      return false;
    } else {
      value_begin = in.CurrentPosition();
    }
    const auto end = static_cast<size_t>(in.CurrentPosition());
    const auto field_begin = static_cast<size_t>(begin),
               value_at = static_cast<size_t>(value_begin);
    if (!visit(tag, message.subspan(field_begin, end - field_begin),
               message.subspan(value_at, end - value_at))) {
      return false;
    }
  }
}

void AppendField(uint32_t tag, const std::string& value, std::string* to) {
  uint8_t head[2 * 5];
  uint8_t* end = CodedOutputStream::WriteVarint32ToArray(tag, head);
  end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(value.size()), end);
  to->append(reinterpret_cast<const char*>(head), static_cast<size_t>(end - head));
  to->append(value);
}

// The Strip functions append a message to `to` without its inline data, which they return as a
// view. A field that occurs twice is left to protobuf: the last occurrence of the data counts here
// as it does there.
bool StripTensor(Bytes tensor, std::string* to, Bytes* data) {
  return ForEachField(tensor, [&](uint32_t tag, Bytes field, Bytes value) {
    if (tag == LengthDelimited(v1::Tensor::kInlineDataFieldNumber)) {
      *data = value;
      AppendField(tag, "", to);
    } else {
      to->append(reinterpret_cast<const char*>(field.data()), field.size());
    }
    return true;
  });
}

// Result of strip(tag, value, &stripped): kYes when `stripped` replaces the value, kUnchanged when
// the field stays as it is, kBad when the value is malformed.
enum class Stripped { kYes, kUnchanged, kBad };

// Appends `message` to `to`, with `strip` applied to each of its fields.
template <class Strip>
bool StripFields(Bytes message, std::string* to, const Strip& strip) {
  return ForEachField(message, [&](uint32_t tag, Bytes field, Bytes value) {
    std::string stripped;
    switch (strip(tag, value, &stripped)) {
      case Stripped::kYes:
        AppendField(tag, stripped, to);
        return true;
      case Stripped::kUnchanged:
        to->append(reinterpret_cast<const char*>(field.data()), field.size());
        return true;
      case Stripped::kBad:
        break;
    }
    return false;
  });
}

Stripped ToStripped(bool stripped) { return stripped ? Stripped::kYes : Stripped::kBad; }

bool StripRows(Bytes rows, std::string* to, Bytes* keys, Bytes* values) {
  return StripFields(rows, to, [&](uint32_t tag, Bytes value, std::string* stripped) {
    if (tag == LengthDelimited(v1::LayerRows::kKeysFieldNumber)) {
      return ToStripped(StripTensor(value, stripped, keys));
    }
    if (tag == LengthDelimited(v1::LayerRows::kValuesFieldNumber)) {
      return ToStripped(StripTensor(value, stripped, values));
    }
    return Stripped::kUnchanged;
  });
}

bool StripRequest(Bytes request, std::string* to, Bytes* keys, Bytes* values) {
  const auto strip_chunk = [&](uint32_t tag, Bytes value, std::string* stripped) {
    if (tag != LengthDelimited(v1::IngestChunk::kRowsFieldNumber)) return Stripped::kUnchanged;
    return ToStripped(StripRows(value, stripped, keys, values));
  };
  return StripFields(request, to, [&](uint32_t tag, Bytes value, std::string* stripped) {
    if (tag != LengthDelimited(v1::IngestRequest::kChunkFieldNumber)) return Stripped::kUnchanged;
    return ToStripped(StripFields(value, stripped, strip_chunk));
  });
}

void Place(Bytes bytes, kvstore::TensorView* view) {
  view->data = bytes.data();
  view->data_bytes = bytes.size();
}

}  // namespace

absl::Status IngestMessage::Parse(Bytes received) {
  stripped_.clear();
  keys_ = values_ = {};
  if (!StripRequest(received, &stripped_, &keys_, &values_) ||
      !request_.ParseFromString(stripped_)) {
    return InvalidArgument("request", "is not an IngestRequest");
  }
  return absl::OkStatus();
}

absl::StatusOr<kvstore::LayerRows> IngestMessage::Rows(uint64_t max_bytes,
                                                       StagingClaims* staging) const {
  const v1::LayerRows& from = request_.chunk().rows();
  absl::StatusOr<kvstore::LayerRows> rows = LayerRowsOf(from, "chunk.rows", max_bytes, staging);
  if (!rows.ok()) return rows;
  if (from.keys().has_inline_data()) Place(keys_, &rows->keys);
  if (from.values().has_inline_data()) Place(values_, &rows->values);
  return rows;
}

}  // namespace pqcached::service
