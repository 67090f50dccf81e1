// NamesRecord records the names of a sequence's tokens (record_table.h), so that a restarted
// process can find shared prefixes.
//
// Names are words: one per token id, four per content key. The words are stored in a heap block.
// Two slots, written alternately, hold the kind of the names, the location of the block and the
// number of valid words. When the heap is full, fewer words are recorded, and a restarted process
// finds shorter prefixes.
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

enum class NameKind : uint32_t { kTokenIds = 0, kContentKeys = 1 };

// Names in one kind.
struct NameWords {
  NameKind kind = NameKind::kTokenIds;
  std::vector<uint32_t> words = {};
};

class NamesRecord {
 public:
  // Starts with no names. `slot` is the sequence's; it stays taken while this object lives.
  NamesRecord(std::shared_ptr<RecordTable> table, std::shared_ptr<const RecordSlot> slot);
  ~NamesRecord();
  NamesRecord(const NamesRecord&) = delete;
  NamesRecord& operator=(const NamesRecord&) = delete;

  // Reads the recorded names; called at most once, before Write. If the record is broken, sets
  // `broken` and returns none.
  NameWords Recover(bool& broken);

  // Records the sequence's current names. Compared with the previous call, words were either
  // appended or removed at the end; the kind changes only while there are no words.
  void Write(NameKind kind, std::span<const uint32_t> words);

 private:
  struct Names {
    uint64_t generation = 0;
    HeapBlock block;
    uint32_t count = 0;
    uint32_t crc = 0;
    NameKind kind = NameKind::kTokenIds;
    uint32_t reserved = 0;
  };

  bool Grow(std::span<const uint32_t> words, Names& next);

  const std::shared_ptr<RecordTable> table_;
  const std::shared_ptr<const RecordSlot> slot_;  // shared with SequenceRecord
  Names names_;                                   // newest written state
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_RECORDS_NAMES_RECORD_H_
