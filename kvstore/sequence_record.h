// SequenceRecord: writes down what a sequence is, change by change (record_table.h).
//
// The state of a sequence (token counts, suspended, pinned, where its list of segments stands) is written in
// turn into two slots; the word that makes the newer one whole is the commit point of every change. A
// change of the list first writes a new list, and frees the old one last. Rows and layers of indexes get
// their own slots with the first list that names them.
//
// Thread-compatible: calls come with the sequence's events_mutex_ held. The table's mutex is taken
// inside, when the list has changed.
#ifndef PQCACHED_KVSTORE_SEQUENCE_RECORD_H_
#define PQCACHED_KVSTORE_SEQUENCE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/prefix.h"
#include "kvstore/record_table.h"
#include "kvstore/sequence.h"
#include "kvstore/store.h"

namespace pqcached::kvstore {

// What does not change.
struct SequenceIdentity {
  static constexpr size_t kMaxSessionBytes = 240;
  uint64_t sequence_id = 0;
  std::string session;  // at most kMaxSessionBytes
  PrefixKey root = {};
  std::optional<LiveIndex> live_index;
  std::string group_key =
      {};  // at most kMaxGroupKeyBytes; written behind the rest unless it is empty
};

// ---- What stands in the slots and blocks.

struct StateRecord {  // then uint32_t[layer_count], the tokens per layer
  uint64_t generation = 0;
  int64_t pinned_until = 0;  // of BootNanos
  uint32_t suspended = 0;
  HeapBlock list = {};  // none: empty
  uint32_t list_bytes = 0;
  uint32_t list_crc = 0;
  uint32_t layer_count = 0;
};
struct ListRecord {  // then IndexDescriptor[index_count], then the entries
  uint32_t entry_count = 0;
  uint32_t index_count = 0;
  uint32_t prefill_closed = 0;
  uint32_t reserved = 0;
};
struct
    EntryRecord {  // then uint32_t[index_count][layer_count]: layer records, kNoLayer where not ready
  static constexpr uint32_t kNoLayer = ~0u;
  uint64_t segment_id = 0;
  uint32_t rows = 0;  // number of the rows' record
  uint32_t token_end = 0;
  uint32_t closed = 0;
  uint32_t reserved = 0;
};
struct RowsRecord {  // then ExtentRef[head_count]
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

// Nothing when the bytes are no identity.
std::optional<SequenceIdentity> ReadIdentity(std::span<const std::byte> bytes);

class SequenceRecord {
 public:
  // Writes a new sequence down. Errors: kResourceExhausted naming what is full; kInvalidArgument
  // (session).
  static absl::StatusOr<std::unique_ptr<SequenceRecord>> Create(
      const std::shared_ptr<RecordTable>& table, const SequenceIdentity& identity,
      const Snapshot& first);

  // One that stands there: `known` is its list, null when that is to be written again.
  struct Standing {
    std::shared_ptr<RecordTable> table;
    std::shared_ptr<const RecordSlot> slot;
    StateRecord state;
    std::shared_ptr<const SegmentList> known;
  };
  explicit SequenceRecord(Standing standing);
  ~SequenceRecord();

  // Shared with what else is written down of the sequence.
  const std::shared_ptr<const RecordSlot>& slot() const { return slot_; }

  // Writes a change down before it is shown. Without `pinned_until` a pin stays as it is. Errors:
  // kResourceExhausted; then nothing has changed.
  absl::Status Write(const std::shared_ptr<const SegmentList>& list,
                     const std::vector<uint32_t>& layer_tokens, bool suspended,
                     std::optional<int64_t> pinned_until = {});
  // The sequence is no more.
  void Remove();

 private:
  absl::Status WriteList(const SegmentList& list, StateRecord& state);
  void WriteState(const StateRecord& state, const std::vector<uint32_t>& layer_tokens);

  const std::shared_ptr<RecordTable> table_;
  const std::shared_ptr<const RecordSlot> slot_;  // shared with NamesRecord
  StateRecord state_;                             // the newest
  std::shared_ptr<const SegmentList> known_;      // that the newest names
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_RECORD_H_
