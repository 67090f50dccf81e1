// IngestMessage against protobuf's own parser: whatever comes, both say the same.
#include "service/wire/ingest_message.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

constexpr uint64_t kMaxBytes = 1 << 20;

class Requests {
 public:
  explicit Requests(uint32_t seed) : random_(seed) {}

  v1::IngestRequest Next() {
    v1::IngestRequest request;
    switch (Below(8)) {
      case 0:
        break;
      case 1:
        request.mutable_header()->set_sequence_id(random_());
        for (uint32_t i = Below(4); i > 0; --i) request.mutable_header()->add_token_ids(i);
        break;
      default:
        FillChunk(request.mutable_chunk());
    }
    return request;
  }

  uint32_t Below(uint32_t end) { return static_cast<uint32_t>(random_() % end); }

 private:
  void FillChunk(v1::IngestChunk* chunk) {
    chunk->set_first_position(random_());
    if (Below(8) == 0) return;
    chunk->mutable_rows()->set_layer(Below(3));
    if (Below(8) != 0) FillTensor(chunk->mutable_rows()->mutable_keys());
    if (Below(8) != 0) FillTensor(chunk->mutable_rows()->mutable_values());
    if (Below(8) == 0) FillTensor(chunk->add_query_samples()->mutable_queries());
  }

  // Its data fits its shape mostly, and is no smaller than its head sometimes.
  void FillTensor(v1::Tensor* tensor) {
    const uint32_t elements = Below(4) == 0 ? Below(3) : Below(300);
    tensor->set_dtype(Below(16) == 0 ? v1::DTYPE_UNSPECIFIED : v1::DTYPE_BFLOAT16);
    tensor->add_shape(elements);
    if (Below(4) == 0) tensor->add_strides(1);
    if (Below(16) == 0) {
      tensor->mutable_staging()->set_slot(1);
      return;
    }
    std::string data(elements * 2 + (Below(16) == 0 ? 1 : 0), '\0');
    for (char& byte : data) byte = static_cast<char>(random_());
    if (Below(16) != 0) tensor->set_inline_data(data);
  }

  std::minstd_rand random_;
};

std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string Text(const std::byte* data, size_t size) {
  return size == 0 ? std::string() : std::string(reinterpret_cast<const char*>(data), size);
}

void ExpectSame(const IngestMessage& message, v1::IngestRequest expected) {
  if (expected.has_chunk()) {
    const auto rows = message.Rows(kMaxBytes, nullptr);
    const auto wanted = LayerRowsOf(expected.chunk().rows(), "chunk.rows", kMaxBytes);
    ASSERT_EQ(rows.status(), wanted.status());
    if (rows.ok()) {
      EXPECT_EQ(rows->layer, wanted->layer);
      EXPECT_EQ(Text(rows->keys.data, rows->keys.data_bytes),
                Text(wanted->keys.data, wanted->keys.data_bytes));
      EXPECT_EQ(Text(rows->values.data, rows->values.data_bytes),
                Text(wanted->values.data, wanted->values.data_bytes));
    }
    if (expected.chunk().has_rows()) {
      v1::LayerRows& left = *expected.mutable_chunk()->mutable_rows();
      if (left.keys().has_inline_data()) left.mutable_keys()->set_inline_data("");
      if (left.values().has_inline_data()) left.mutable_values()->set_inline_data("");
    }
  }
  EXPECT_EQ(message.request().SerializeAsString(), expected.SerializeAsString());
}

TEST(IngestMessageTest, SaysWhatProtobufSays) {
  Requests requests(1);
  IngestMessage message;  // one for all: nothing of one message shows in the next
  for (int i = 0; i < 2000; ++i) {
    SCOPED_TRACE(i);
    const std::string bytes = requests.Next().SerializeAsString();
    v1::IngestRequest expected;
    ASSERT_TRUE(expected.ParseFromString(bytes));
    ASSERT_TRUE(message.Parse(BytesOf(bytes)).ok());
    ExpectSame(message, expected);
  }
}

// Protobuf merges what comes twice; of a oneof, the last one counts.
TEST(IngestMessageTest, MergesAsProtobufDoes) {
  Requests requests(2);
  IngestMessage message;
  for (int i = 0; i < 2000; ++i) {
    SCOPED_TRACE(i);
    std::string bytes;
    for (uint32_t parts = 2 + requests.Below(2); parts > 0; --parts) {
      bytes += requests.Next().SerializeAsString();
    }
    v1::IngestRequest expected;
    ASSERT_TRUE(expected.ParseFromString(bytes));
    ASSERT_TRUE(message.Parse(BytesOf(bytes)).ok());
    ExpectSame(message, expected);
  }
}

TEST(IngestMessageTest, RefusesWhatProtobufRefuses) {
  Requests requests(3);
  IngestMessage message;
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    SCOPED_TRACE(i);
    std::string bytes = requests.Next().SerializeAsString();
    if (bytes.empty()) continue;
    if (i % 2 == 0) bytes.resize(requests.Below(static_cast<uint32_t>(bytes.size())));
    for (uint32_t flips = i % 2; flips > 0; --flips) {  // at its head, where the fields are
      const uint32_t at =
          requests.Below(std::min<uint32_t>(24, static_cast<uint32_t>(bytes.size())));
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << requests.Below(8)));
    }
    v1::IngestRequest expected;
    const bool good = expected.ParseFromString(bytes);
    const absl::Status status = message.Parse(BytesOf(bytes));
    ASSERT_EQ(status.ok(), good) << status;
    if (good) {
      ExpectSame(message, expected);
      continue;
    }
    ++refused;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_GT(refused, 500);
}

}  // namespace
}  // namespace pqcached::service
