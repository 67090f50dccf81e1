// NamesRecord: writes down the token ids of a sequence (record_table.h), for shared prefixes in the next
// process.
//
// Ids stand in a block of the heap, and in turn in two slots where it is and how many of them count. When
// the heap is full, fewer ids are written: then less is found again.
//
// Thread-compatible.
#ifndef PQCACHED_KVSTORE_NAMES_RECORD_H_
#define PQCACHED_KVSTORE_NAMES_RECORD_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvstore/record_table.h"

namespace pqcached::kvstore {

class NamesRecord {
 public:
  // No ids yet. `slot`: of the sequence; kept for as long as this lives.
  NamesRecord(std::shared_ptr<RecordTable> table, std::shared_ptr<const RecordSlot> slot);
  ~NamesRecord();
  NamesRecord(const NamesRecord&) = delete;
  NamesRecord& operator=(const NamesRecord&) = delete;

  // Reads what stands there; once, before Write. Broken: none, and `broken` is set.
  std::vector<uint32_t> Recover(bool& broken);

  // The ids are these now. Either the first ones are what they were, and others follow, or fewer are
  // left.
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
  Names names_;                                   // the newest
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_NAMES_RECORD_H_
