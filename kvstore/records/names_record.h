// NamesRecord records the token ids of a sequence (record_table.h), so that a restarted process can
// find shared prefixes.
//
// The ids are stored in a heap block. Two slots, written alternately, hold the location of the
// block and the number of valid ids. When the heap is full, fewer ids are recorded, and a restarted
// process finds shorter prefixes.
//
// Thread-compatible.
#ifndef PQCACHED_KVSTORE_RECORDS_NAMES_RECORD_H_
#define PQCACHED_KVSTORE_RECORDS_NAMES_RECORD_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvstore/records/record_table.h"

namespace pqcached::kvstore {

class NamesRecord {
 public:
  // Starts with no ids. `slot` is the sequence's; it stays taken while this object lives.
  NamesRecord(std::shared_ptr<RecordTable> table, std::shared_ptr<const RecordSlot> slot);
  ~NamesRecord();
  NamesRecord(const NamesRecord&) = delete;
  NamesRecord& operator=(const NamesRecord&) = delete;

  // Reads the recorded ids; called at most once, before Write. If the record is broken, sets
  // `broken` and returns no ids.
  std::vector<uint32_t> Recover(bool& broken);

  // Records the sequence's current ids. Compared with the previous call, ids were either appended
  // or removed at the end.
  void Write(std::span<const uint32_t> ids);

 private:
  struct Names {
    uint64_t generation = 0;
    HeapBlock block;
    uint32_t count = 0;
    uint32_t crc = 0;
  };

  bool Grow(std::span<const uint32_t> ids, Names& next);

  const std::shared_ptr<RecordTable> table_;
  const std::shared_ptr<const RecordSlot> slot_;  // shared with SequenceRecord
  Names names_;                                   // newest written state
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_RECORDS_NAMES_RECORD_H_
