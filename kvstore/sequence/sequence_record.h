// SequenceRecord: records the state of a sequence, change by change (records/record_table.h).
//
// The state of a sequence (token counts, suspended, pinned, location of its list of segments) is
// written alternately into two slots. The word that completes the newer slot is the commit point of
// every change. A change of the list first writes a new list, and frees the old one last. Rows and
// layers of indexes get their own slots with the first list that contains them.
//
// Thread-compatible: calls are made with the sequence's events_mutex_ held. The table's mutex is
// acquired inside, when the list has changed.
#ifndef PQCACHED_KVSTORE_SEQUENCE_SEQUENCE_RECORD_H_
#define PQCACHED_KVSTORE_SEQUENCE_SEQUENCE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/records/record_table.h"
#include "kvstore/sequence/prefix.h"
#include "kvstore/sequence/sequence.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

// Immutable part of a sequence's record.
struct SequenceIdentity {
  static constexpr size_t kMaxSessionBytes = 240;
  uint64_t sequence_id = 0;
  std::string session;  // at most kMaxSessionBytes
  PrefixKey root = {};
  std::optional<LiveIndex> live_index;
  // Limited to kMaxGroupKeyBytes; written after the other fields, and only if it or `retention` is.
  std::string group_key = {};
  Retention retention = Retention::kByOption;  // written after group_key, unless kByOption
};

// ---- Content of the slots and blocks.

struct StateRecord {  // followed by uint32_t[layer_count], the tokens per layer
  uint64_t generation = 0;
  int64_t pinned_until = 0;  // a time of BootNanos
  uint32_t suspended = 0;
  HeapBlock list = {};  // invalid: the list is empty
  uint32_t list_bytes = 0;
  uint32_t list_crc = 0;
  uint32_t layer_count = 0;
};
struct ListRecord {  // followed by IndexDescriptor[index_count], then the entries
  uint32_t entry_count = 0;
  uint32_t index_count = 0;
  uint32_t prefill_closed = 0;
  uint32_t reserved = 0;
};
// Followed by uint32_t[index_count][layer_count]: numbers of layer records, kNoLayer where not
// ready.
struct EntryRecord {
  static constexpr uint32_t kNoLayer = ~0u;
  uint64_t segment_id = 0;
  uint32_t rows = 0;  // number of the rows' record
  uint32_t token_end = 0;
  uint32_t closed = 0;
  uint32_t reserved = 0;
};
struct RowsRecord {  // followed by ExtentRef[head_count]
  uint64_t segment_id = 0;
  uint32_t first_position = 0;
  uint32_t slot_capacity = 0;
  uint32_t head_count = 0;
  uint32_t reserved = 0;
};
struct LayerRecord {
  uint64_t segment_id = 0;
  IndexDescriptor index;
  uint32_t layer_slot = 0;
  uint32_t slot_capacity = 0;
  ExtentRef data;
  ExtentRef codebook;
};
static_assert(sizeof(StateRecord) <= RecordTable::kStateHeadBytes);
static_assert(sizeof(RowsRecord) <= RecordTable::kRowsHeadBytes);
static_assert(sizeof(LayerRecord) <= RecordTable::kLayerBytes);

// Parses an identity; returns nothing if the bytes are not one.
std::optional<SequenceIdentity> ReadIdentity(std::span<const std::byte> bytes);

class SequenceRecord {
 public:
  // Records a new sequence. Errors: kResourceExhausted naming the part of the table that is full;
  // kInvalidArgument (session).
  static absl::StatusOr<std::unique_ptr<SequenceRecord>> Create(
      const std::shared_ptr<RecordTable>& table, const SequenceIdentity& identity,
      const Snapshot& first);

  // A record that already exists. `known` is its list; null: the next Write writes the list again.
  // `unlisted`: indexes that the recorded list names and the next one does not. Their records stay
  // until the next list is written.
  struct Existing {
    std::shared_ptr<RecordTable> table;
    std::shared_ptr<const RecordSlot> slot;
    StateRecord state;
    std::shared_ptr<const SegmentList> known;
    std::vector<std::shared_ptr<const SegmentIndex>> unlisted = {};
  };
  explicit SequenceRecord(Existing standing);
  ~SequenceRecord();

  // Slot of the sequence, shared with its other records.
  const std::shared_ptr<const RecordSlot>& slot() const { return slot_; }

  // Records a change before it is published. Without `pinned_until` the pin stays as it is. Errors:
  // kResourceExhausted; the record is then unchanged.
  absl::Status Write(const std::shared_ptr<const SegmentList>& list,
                     const std::vector<uint32_t>& layer_tokens, bool suspended,
                     std::optional<int64_t> pinned_until = {});
  // Removes the record of a sequence that was dropped.
  void Remove();

 private:
  absl::Status WriteList(const SegmentList& list, StateRecord& state);
  void WriteState(const StateRecord& state, const std::vector<uint32_t>& layer_tokens);

  const std::shared_ptr<RecordTable> table_;
  const std::shared_ptr<const RecordSlot> slot_;      // shared with NamesRecord
  StateRecord state_;                                 // newest written state
  std::shared_ptr<const SegmentList> recorded_list_;  // list that the newest state refers to
  std::vector<std::shared_ptr<const SegmentIndex>> unlisted_;  // see Existing
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_SEQUENCE_RECORD_H_
