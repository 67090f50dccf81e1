// Every struct that another process reads has the layout that its version says.
//
// A struct may only grow at its end, or name a reserved field, with a higher version. The rows below
// are the layouts of all versions so far. Rows are added, never changed: what they describe is in
// memory that clients have mapped, or that an earlier process of the sidecar has left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvstore/pages/keyed_pages.h"
#include "kvstore/read/attachment.h"
#include "kvstore/read/broker_protocol.h"
#include "kvstore/read/layout.h"
#include "kvstore/records/record_table.h"
#include "kvstore/sequence/sequence_record.h"

namespace pqcached::kvstore {
namespace {

using ::testing::HasSubstr;

// The layout of a struct since a version.
struct Row {
  std::string_view version_name;
  uint32_t since = 0;
  std::string_view name;
  size_t size_bytes = 0;
  size_t alignment = 0;
  std::string fields;  // "name offset", in the order of the offsets
};

// One row per struct and change.
// clang-format off
const std::vector<Row>& Rows() {
  static const std::vector<Row> rows = {
      {"kLayoutVersion", 1, "ExtentRef", 8, 4,
       "unit 0, order 4"},
      {"kLayoutVersion", 1, "IndexDescriptor", 16, 4,
       "kind 0, subspace_count 4, bits 8, reserved 12"},
      {"kLayoutVersion", 4, "IndexDescriptor", 16, 4,
       "kind 0, subspace_count 4, bits 8, layout 12"},
      {"kLayoutVersion", 1, "IndexDataHeader", 88, 8,
       "magic 0, layout_version 4, index 8, kv_head_count 24, slot_capacity 28, "
       "plane_offset_bytes 32, head_stride_bytes 40, plane_stride_bytes 48, "
       "counts_offset_bytes 56, counts_stride_bytes 64, cell_count 72, counted_begin 76, "
       "counted_end 80, codebook_generation 84"},
      {"kLayoutVersion", 2, "IndexDataHeader", 120, 8,
       "magic 0, layout_version 4, index 8, kv_head_count 24, slot_capacity 28, "
       "plane_offset_bytes 32, head_stride_bytes 40, plane_stride_bytes 48, "
       "counts_offset_bytes 56, counts_stride_bytes 64, cell_count 72, counted_begin 76, "
       "counted_end 80, codebook_generation 84, posting_begins_offset_bytes 88, "
       "posting_begins_stride_bytes 96, posting_slots_offset_bytes 104, "
       "posting_slots_stride_bytes 112"},
      {"kLayoutVersion", 1, "CodebookHeader", 72, 8,
       "magic 0, layout_version 4, index 8, kv_head_count 24, key_dim 28, "
       "centroid_offset_bytes 32, head_stride_bytes 40, codebook_generation 48, "
       "trained_token_count 52, iteration_count 56, reserved 60, inertia 64"},
      {"kLayoutVersion", 4, "CodebookHeader", 72, 8,
       "magic 0, layout_version 4, index 8, kv_head_count 24, key_dim 28, "
       "centroid_offset_bytes 32, head_stride_bytes 40, codebook_generation 48, "
       "trained_token_count 52, iteration_count 56, paired_dims 60, inertia 64"},
      {"kLayoutVersion", 1, "LayerDescriptor", 112, 4,
       "layer 0, row_order 4, row_bytes 8, kv_head_count 12, row_extent_begin 16, reserved "
       "20, order 24, index_data 32, codebook 64, state 96"},
      {"kLayoutVersion", 1, "SegmentDescriptor", 24, 8,
       "segment_id 0, first_position 8, slot_capacity 12, token_end 16, reserved 20"},
      {"kLayoutVersion", 1, "LeaseWords", 64, 8,
       "lease_id 0, version 8, token_count 16, flags 20, reserved 24"},
      {"kLayoutVersion", 1, "ControlPage", 32, 8,
       "magic 0, layout_version 4, boot_word 8, wake_word 16, word_count 20, "
       "words_offset_bytes 24"},
      {"kLayoutVersion", 3, "ControlPage", 48, 8,
       "magic 0, layout_version 4, boot_word 8, wake_word 16, word_count 20, "
       "words_offset_bytes 24, slot_word_count 32, reserved 36, slot_words_offset_bytes 40"},
      {"kLayoutVersion", 3, "WorkerEnd", 16, 8,
       "boot_word 0, has_successor 8, reserved 12"},
      {"kLayoutVersion", 1, "AttachmentHeader", 112, 8,
       "magic 0, layout_version 4, sequence_id 8, version 16, token_count 24, layer_count "
       "28, segment_count 32, row_extent_count 36, index_count 40, reserved 44, indexes 48"},
      {"kBrokerVersion", 1, "BrokerRequest", 248, 8,
       "magic 0, version 4, call 8, reserved 12, tenant 16, client_name 88, cache_id 224, "
       "slot_bytes 232, slot_count 240, reserved2 244"},
      {"kBrokerVersion", 1, "BrokerReply", 768, 8,
       "magic 0, version 4, call 8, status 12, message 16, session_token 528, boot_id 600, "
       "tenant 672, boot_word 744, max_message_bytes 752, size_bytes 760"},
      {"kBrokerVersion", 2, "BrokerReply", 896, 8,
       "magic 0, version 4, call 8, status 12, message 16, session_token 528, boot_id 600, "
       "tenant 672, boot_word 744, max_message_bytes 752, size_bytes 760, field 768, "
       "retry_ms 888, reserved 892"},
      {"kRecordVersion", 1, "StateRecord", 40, 8,
       "generation 0, pinned_until 8, suspended 16, list 20, list_bytes 28, list_crc 32, "
       "layer_count 36"},
      {"kRecordVersion", 1, "ListRecord", 16, 4,
       "entry_count 0, index_count 4, prefill_closed 8, reserved 12"},
      {"kRecordVersion", 1, "EntryRecord", 24, 8,
       "segment_id 0, rows 8, token_end 12, closed 16, reserved 20"},
      {"kRecordVersion", 1, "RowsRecord", 24, 8,
       "segment_id 0, first_position 8, slot_capacity 12, head_count 16, reserved 20"},
      {"kRecordVersion", 1, "LayerRecord", 48, 8,
       "segment_id 0, index 8, layer_slot 24, slot_capacity 28, data 32, codebook 40"},
      {"kRecordVersion", 4, "PageRecord", 32, 8,
       "extent 0, number 8, size_bytes 16, crc 24, reserved 28"},
  };
  return rows;
}
// clang-format on

struct Field {
  std::string_view name;
  size_t offset = 0;
  size_t size_bytes = 0;
};
#define FIELD(type, name) \
  Field { #name, offsetof(type, name), sizeof(type::name) }

// A struct as it is compiled.
struct Compiled {
  std::string_view version_name;
  uint32_t version = 0;
  std::string_view name;
  size_t size_bytes = 0;
  size_t alignment = 0;
  std::vector<Field> fields;
};

template <typename T>
Compiled Make(std::string_view version_name, uint32_t version, std::string_view name,
              std::vector<Field> fields) {
  return {version_name, version, name, sizeof(T), alignof(T), std::move(fields)};
}

#define LAYOUT(type, ...) Make<type>("kLayoutVersion", kLayoutVersion, #type, {__VA_ARGS__})
#define BROKER(type, ...) Make<type>("kBrokerVersion", kBrokerVersion, #type, {__VA_ARGS__})
#define RECORD(type, ...) Make<type>("kRecordVersion", kRecordVersion, #type, {__VA_ARGS__})

std::vector<Compiled> AllCompiled() {
  return {
      LAYOUT(ExtentRef, FIELD(ExtentRef, unit), FIELD(ExtentRef, order)),
      LAYOUT(IndexDescriptor, FIELD(IndexDescriptor, kind), FIELD(IndexDescriptor, subspace_count),
             FIELD(IndexDescriptor, bits), FIELD(IndexDescriptor, layout)),
      LAYOUT(IndexDataHeader, FIELD(IndexDataHeader, magic), FIELD(IndexDataHeader, layout_version),
             FIELD(IndexDataHeader, index), FIELD(IndexDataHeader, kv_head_count),
             FIELD(IndexDataHeader, slot_capacity), FIELD(IndexDataHeader, plane_offset_bytes),
             FIELD(IndexDataHeader, head_stride_bytes), FIELD(IndexDataHeader, plane_stride_bytes),
             FIELD(IndexDataHeader, counts_offset_bytes),
             FIELD(IndexDataHeader, counts_stride_bytes), FIELD(IndexDataHeader, cell_count),
             FIELD(IndexDataHeader, counted_begin), FIELD(IndexDataHeader, counted_end),
             FIELD(IndexDataHeader, codebook_generation),
             FIELD(IndexDataHeader, posting_begins_offset_bytes),
             FIELD(IndexDataHeader, posting_begins_stride_bytes),
             FIELD(IndexDataHeader, posting_slots_offset_bytes),
             FIELD(IndexDataHeader, posting_slots_stride_bytes)),
      LAYOUT(CodebookHeader, FIELD(CodebookHeader, magic), FIELD(CodebookHeader, layout_version),
             FIELD(CodebookHeader, index), FIELD(CodebookHeader, kv_head_count),
             FIELD(CodebookHeader, key_dim), FIELD(CodebookHeader, centroid_offset_bytes),
             FIELD(CodebookHeader, head_stride_bytes), FIELD(CodebookHeader, codebook_generation),
             FIELD(CodebookHeader, trained_token_count), FIELD(CodebookHeader, iteration_count),
             FIELD(CodebookHeader, paired_dims), FIELD(CodebookHeader, inertia)),
      LAYOUT(LayerDescriptor, FIELD(LayerDescriptor, layer), FIELD(LayerDescriptor, row_order),
             FIELD(LayerDescriptor, row_bytes), FIELD(LayerDescriptor, kv_head_count),
             FIELD(LayerDescriptor, row_extent_begin), FIELD(LayerDescriptor, reserved),
             FIELD(LayerDescriptor, order), FIELD(LayerDescriptor, index_data),
             FIELD(LayerDescriptor, codebook), FIELD(LayerDescriptor, state)),
      LAYOUT(SegmentDescriptor, FIELD(SegmentDescriptor, segment_id),
             FIELD(SegmentDescriptor, first_position), FIELD(SegmentDescriptor, slot_capacity),
             FIELD(SegmentDescriptor, token_end), FIELD(SegmentDescriptor, reserved)),
      LAYOUT(LeaseWords, FIELD(LeaseWords, lease_id), FIELD(LeaseWords, version),
             FIELD(LeaseWords, token_count), FIELD(LeaseWords, flags), FIELD(LeaseWords, reserved)),
      LAYOUT(ControlPage, FIELD(ControlPage, magic), FIELD(ControlPage, layout_version),
             FIELD(ControlPage, boot_word), FIELD(ControlPage, wake_word),
             FIELD(ControlPage, word_count), FIELD(ControlPage, words_offset_bytes),
             FIELD(ControlPage, slot_word_count), FIELD(ControlPage, reserved),
             FIELD(ControlPage, slot_words_offset_bytes)),
      LAYOUT(WorkerEnd, FIELD(WorkerEnd, boot_word), FIELD(WorkerEnd, has_successor),
             FIELD(WorkerEnd, reserved)),
      LAYOUT(AttachmentHeader, FIELD(AttachmentHeader, magic),
             FIELD(AttachmentHeader, layout_version), FIELD(AttachmentHeader, sequence_id),
             FIELD(AttachmentHeader, version), FIELD(AttachmentHeader, token_count),
             FIELD(AttachmentHeader, layer_count), FIELD(AttachmentHeader, segment_count),
             FIELD(AttachmentHeader, row_extent_count), FIELD(AttachmentHeader, index_count),
             FIELD(AttachmentHeader, reserved), FIELD(AttachmentHeader, indexes)),
      BROKER(BrokerRequest, FIELD(BrokerRequest, magic), FIELD(BrokerRequest, version),
             FIELD(BrokerRequest, call), FIELD(BrokerRequest, reserved),
             FIELD(BrokerRequest, tenant), FIELD(BrokerRequest, client_name),
             FIELD(BrokerRequest, cache_id), FIELD(BrokerRequest, slot_bytes),
             FIELD(BrokerRequest, slot_count), FIELD(BrokerRequest, reserved2)),
      BROKER(BrokerReply, FIELD(BrokerReply, magic), FIELD(BrokerReply, version),
             FIELD(BrokerReply, call), FIELD(BrokerReply, status), FIELD(BrokerReply, message),
             FIELD(BrokerReply, session_token), FIELD(BrokerReply, boot_id),
             FIELD(BrokerReply, tenant), FIELD(BrokerReply, boot_word),
             FIELD(BrokerReply, max_message_bytes), FIELD(BrokerReply, size_bytes),
             FIELD(BrokerReply, field), FIELD(BrokerReply, retry_ms), FIELD(BrokerReply, reserved)),
      RECORD(StateRecord, FIELD(StateRecord, generation), FIELD(StateRecord, pinned_until),
             FIELD(StateRecord, suspended), FIELD(StateRecord, list),
             FIELD(StateRecord, list_bytes), FIELD(StateRecord, list_crc),
             FIELD(StateRecord, layer_count)),
      RECORD(ListRecord, FIELD(ListRecord, entry_count), FIELD(ListRecord, index_count),
             FIELD(ListRecord, prefill_closed), FIELD(ListRecord, reserved)),
      RECORD(EntryRecord, FIELD(EntryRecord, segment_id), FIELD(EntryRecord, rows),
             FIELD(EntryRecord, token_end), FIELD(EntryRecord, closed),
             FIELD(EntryRecord, reserved)),
      RECORD(RowsRecord, FIELD(RowsRecord, segment_id), FIELD(RowsRecord, first_position),
             FIELD(RowsRecord, slot_capacity), FIELD(RowsRecord, head_count),
             FIELD(RowsRecord, reserved)),
      RECORD(LayerRecord, FIELD(LayerRecord, segment_id), FIELD(LayerRecord, index),
             FIELD(LayerRecord, layer_slot), FIELD(LayerRecord, slot_capacity),
             FIELD(LayerRecord, data), FIELD(LayerRecord, codebook)),
      RECORD(PageRecord, FIELD(PageRecord, extent), FIELD(PageRecord, number),
             FIELD(PageRecord, size_bytes), FIELD(PageRecord, crc), FIELD(PageRecord, reserved)),
  };
}

std::string FieldText(const std::vector<Field>& fields) {
  std::string text;
  for (const Field& field : fields) {
    text +=
        (text.empty() ? "" : ", ") + std::string(field.name) + " " + std::to_string(field.offset);
  }
  return text;
}

// The row that a struct would have.
std::string RowText(const Compiled& compiled, uint32_t since) {
  return "{\"" + std::string(compiled.version_name) + "\", " + std::to_string(since) + ", \"" +
         std::string(compiled.name) + "\", " + std::to_string(compiled.size_bytes) + ", " +
         std::to_string(compiled.alignment) + ", \"" + FieldText(compiled.fields) + "\"},";
}

// The row that holds for the struct's version; null: there is none.
const Row* RowOf(const Compiled& compiled, const std::vector<Row>& rows) {
  const Row* newest = nullptr;
  for (const Row& row : rows) {
    const bool holds = row.version_name == compiled.version_name && row.name == compiled.name &&
                       row.since <= compiled.version;
    if (holds && (newest == nullptr || row.since > newest->since)) newest = &row;
  }
  return newest;
}

// Returns "" or what is wrong with the struct.
std::string Wrong(const Compiled& compiled, const std::vector<Row>& rows) {
  size_t field_bytes = 0;
  for (const Field& field : compiled.fields) field_bytes += field.size_bytes;
  if (field_bytes != compiled.size_bytes) {
    return std::string(compiled.name) + ": the fields of this test have " +
           std::to_string(field_bytes) + " bytes, the struct has " +
           std::to_string(compiled.size_bytes) + "; add the new fields to AllCompiled, raise " +
           std::string(compiled.version_name) + " and add a row";
  }
  const Row* row = RowOf(compiled, rows);
  if (row != nullptr && row->size_bytes == compiled.size_bytes &&
      row->alignment == compiled.alignment && row->fields == FieldText(compiled.fields)) {
    return {};
  }
  return std::string(compiled.name) + " is not what its row of " +
         std::string(compiled.version_name) + " " + std::to_string(compiled.version) +
         " says. Raise " + std::string(compiled.version_name) +
         " and add this row, without changing the rows that there are:\n" +
         RowText(compiled, compiled.version + 1);
}

std::vector<std::string> FieldsOf(const std::string& fields) {
  std::vector<std::string> all;
  for (size_t begin = 0; begin < fields.size();) {
    const size_t end = std::min(fields.find(", ", begin), fields.size());
    all.push_back(fields.substr(begin, end - begin));
    begin = end + 2;
  }
  return all;
}

// Returns whether all fields of `earlier` are the first ones of `later`. A reserved field, which is
// zero in all memory of its version, may have a name later.
bool Continues(const std::string& earlier, const std::string& later) {
  const std::vector<std::string> before = FieldsOf(earlier), after = FieldsOf(later);
  if (before == after || before.size() > after.size()) return false;
  for (size_t i = 0; i < before.size(); ++i) {
    const std::string reserved = "reserved ";
    const bool named = before[i].starts_with(reserved) &&
                       after[i].ends_with(" " + before[i].substr(reserved.size()));
    if (before[i] != after[i] && !named) return false;
  }
  return true;
}

// Returns "" or what is wrong with the rows of one struct, which ascend.
std::string WrongRows(const std::vector<Row>& rows) {
  for (size_t later = 0; later < rows.size(); ++later) {
    for (size_t earlier = 0; earlier < later; ++earlier) {
      const Row& a = rows[earlier];
      const Row& b = rows[later];
      if (a.version_name != b.version_name || a.name != b.name) continue;
      if (a.since >= b.since) return std::string(b.name) + ": rows must ascend by version";
      if (a.size_bytes > b.size_bytes || !Continues(a.fields, b.fields)) {
        return std::string(b.name) + ": may only grow at its end";
      }
    }
  }
  return {};
}

TEST(LayoutVersionTest, StructsHaveTheLayoutOfTheirVersion) {
  for (const Compiled& compiled : AllCompiled()) EXPECT_EQ(Wrong(compiled, Rows()), "");
}

TEST(LayoutVersionTest, RowsAscendAndStructsOnlyGrow) { EXPECT_EQ(WrongRows(Rows()), ""); }

TEST(LayoutVersionTest, EveryRowIsOfAStructAndAVersionThatThereWas) {
  const std::vector<Compiled> all = AllCompiled();
  for (const Row& row : Rows()) {
    const bool known = std::any_of(all.begin(), all.end(), [&row](const Compiled& compiled) {
      return compiled.version_name == row.version_name && compiled.name == row.name &&
             row.since <= compiled.version;
    });
    EXPECT_TRUE(known) << row.name << " since " << row.version_name << " " << row.since;
  }
}

TEST(LayoutVersionTest, OnlyReservedFieldsGetAName) {
  EXPECT_TRUE(Continues("a 0, reserved 4", "a 0, b 4"));
  EXPECT_TRUE(Continues("a 0, reserved 4", "a 0, b 4, c 8"));
  EXPECT_TRUE(Continues("a 0, reserved 4, b 8", "a 0, c 4, b 8"));
  EXPECT_FALSE(Continues("a 0, b 4", "a 0, c 4"));
  EXPECT_FALSE(Continues("a 0, b 4", "a 0, reserved 4"));
  EXPECT_FALSE(Continues("a 0, reserved 4", "a 0, b 8"));
  EXPECT_FALSE(Continues("a 0, reserved 4", "a 0"));
  EXPECT_FALSE(Continues("a 0, reserved 14", "a 0, b 4"));
  EXPECT_FALSE(Continues("a 0, reserved 4", "a 0, b 14"));
  EXPECT_FALSE(Continues("a 0, b 4", "a 0, b 4"));
}

struct Grown {
  uint32_t magic = 0;
  uint32_t count = 0;
  uint64_t bytes = 0;
};

TEST(LayoutVersionTest, AChangeUnderTheSameVersionIsFound) {
  const auto grown = [](uint32_t version) {
    return Make<Grown>("kVersion", version, "Grown",
                       {FIELD(Grown, magic), FIELD(Grown, count), FIELD(Grown, bytes)});
  };
  const std::vector<Row> before = {{"kVersion", 1, "Grown", 8, 4, "magic 0, count 4"}};
  EXPECT_THAT(Wrong(grown(1), before), HasSubstr("Raise kVersion and add this row"));
  EXPECT_THAT(Wrong(grown(1), before),
              HasSubstr("{\"kVersion\", 2, \"Grown\", 16, 8, \"magic 0, count 4, bytes 8\"},"));
  EXPECT_THAT(Wrong(grown(2), before), HasSubstr("Raise kVersion"));  // its row is missing
  std::vector<Row> both = before;
  both.push_back({"kVersion", 2, "Grown", 16, 8, "magic 0, count 4, bytes 8"});
  EXPECT_THAT(Wrong(grown(1), both), HasSubstr("Raise kVersion"));  // a row alone is not enough
  EXPECT_EQ(Wrong(grown(2), both), "");
  EXPECT_EQ(WrongRows(both), "");
  // Fields that change places, another alignment, a field that no row has.
  both[1].fields = "count 0, magic 4, bytes 8";
  EXPECT_NE(Wrong(grown(2), both), "");
  EXPECT_THAT(WrongRows(both), HasSubstr("only grow at its end"));
  both[1] = {"kVersion", 2, "Grown", 16, 4, "magic 0, count 4, bytes 8"};
  EXPECT_NE(Wrong(grown(2), both), "");
  both[1] = {"kVersion", 1, "Grown", 16, 8, "magic 0, count 4, bytes 8"};
  EXPECT_THAT(WrongRows(both), HasSubstr("ascend"));
  const Compiled short_list =
      Make<Grown>("kVersion", 2, "Grown", {FIELD(Grown, magic), FIELD(Grown, count)});
  EXPECT_THAT(Wrong(short_list, before), HasSubstr("add the new fields"));
}

}  // namespace
}  // namespace pqcached::kvstore
