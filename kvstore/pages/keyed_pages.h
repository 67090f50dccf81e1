// KeyedPages: the pages of one page cache. A *page* is a number of bytes whose meaning only the
// caller knows, stored under a key that the caller chooses, usually a hash of the content.
//
// Each page is one extent of the cache's pool. Its bytes never change: a page is copied and
// checksummed before its key is listed, so no reader sees a part of it. When the pool is full, the
// pages that were used longest ago are evicted, except those that are leased or being read.
//
// Recovery: with a record table, a page has a number of RecordKind::kLayer, whose slots a page
// cache uses for nothing else. The key is in the number's slot of checksums. The page's own record
// is written last, so a kill leaves the whole page, or none. Pages of an earlier process are
// verified before their first use. Leases end with the process.
//
// Thread-safe. One lock, held for operations on lists and while a record of some 150 bytes is
// written, never while the bytes of a page are copied or read.
#ifndef PQCACHED_KVSTORE_PAGES_KEYED_PAGES_H_
#define PQCACHED_KVSTORE_PAGES_KEYED_PAGES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/exec.h"
#include "kvstore/clock.h"
#include "kvstore/memory/checked_bytes.h"
#include "kvstore/memory/pool.h"
#include "kvstore/mutex.h"
#include "kvstore/records/record_table.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

// Record of a page, in a slot of RecordTable::layers().
struct PageRecord {
  ExtentRef extent;
  uint64_t number = 0;  // pages that were stored later have higher ones
  uint64_t size_bytes = 0;
  uint32_t crc = 0;  // of the bytes
  uint32_t reserved = 0;
};

class KeyedPages {
 public:
  // An immutable page. A holder may read its bytes, also when it is no longer listed.
  class Page;
  using PagePointer = std::shared_ptr<const Page>;

  // `records`: null when the pages end with the process. `losses` counts the pages that fail their
  // checksum, and outlives this object.
  KeyedPages(const kernels::Exec& exec, std::shared_ptr<Pool> pool,
             std::shared_ptr<RecordTable> records, std::atomic<uint64_t>& losses)
      : exec_(exec), pool_(std::move(pool)), records_(std::move(records)), losses_(losses) {}

  // Stores the pages, in their order, and returns an outcome for each. A page of this call is not
  // evicted for a later one.
  //
  // REQUIRES: keys and sizes are within the limits of values.h.
  std::vector<PageOutcome> Put(std::span<const PageSource> pages);

  // Finds the pages of the keys, and makes them those that were used last. None of those that are
  // found is evicted within `lease`; the longest lease of a page counts.
  std::vector<FoundPage> Find(std::span<const std::string_view> keys, absl::Duration lease);

  // Evicts pages so that extents of these sizes can be allocated. Returns false, and evicts
  // nothing, when that is not possible.
  bool MakeRoom(std::span<const size_t> sizes_bytes);
  // Evicts pages that hold about `bytes`; returns the number of bytes that are freed.
  size_t Evict(size_t bytes);
  // Returns whether a page is leased, or was before it was found broken.
  bool HasLease() const;
  // Removes all pages, leased ones too. After Close no page is stored.
  //
  // Errors: kFailedPrecondition  a page is leased, and not `force`; nothing was removed
  absl::Status Close(bool force);
  void Clear();

  // Recovers the pages of an earlier process; called once, before all other calls. Adds a text for
  // each broken record to `dropped`; returns the number of pages.
  //
  // REQUIRES: the table was opened, and nothing was allocated from the pool yet.
  uint32_t Recover(std::vector<std::string>& dropped);

  PageCounts counts() const;

 private:
  struct Entry {
    std::string key;
    PagePointer page;
    SteadyTime leased_until = {};
  };
  using Entries = std::list<Entry>;

  // Stores one page, and adds it to `held`, as it adds a page that was there before.
  PageOutcome PutOne(const PageSource& source, std::vector<PagePointer>& held);
  // Returns the listed page, if it passes its checksum; drops it otherwise.
  PagePointer FindGood(std::string_view key);
  // Returns the listed page, and makes it the one that was used last; null when there is none.
  PagePointer Touch(std::string_view key, SteadyTime leased_until)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lists the page and writes its record, unless the key is listed already. Returns the page that
  // is listed under the key; null when the cache is closed.
  PagePointer Publish(std::string_view key, PagePointer page);
  void WriteRecord(std::string_view key, const Page& page);
  // Takes the entry off the lists; the caller destroys it without the lock.
  Entry Unlist(Entries::iterator entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops a page that fails its checksum.
  void DropBroken(std::string_view key, const PagePointer& page);
  bool IsEvictable(const Entry& entry, SteadyTime now) const {
    return entry.page.use_count() == 1 && entry.leased_until <= now;
  }
  // Reads the record of one number. Returns null, after noting why, when it is broken.
  std::shared_ptr<Page> ReadPage(uint32_t number, std::string& key,
                                 std::vector<std::string>& dropped) const;

  const kernels::Exec exec_;
  const std::shared_ptr<Pool> pool_;
  const std::shared_ptr<RecordTable> records_;
  std::atomic<uint64_t>& losses_;
  std::atomic<uint64_t> next_number_ = 1;

  mutable Mutex mutex_;
  Entries entries_ ABSL_GUARDED_BY(mutex_);  // the one that was used last comes first
  std::unordered_map<std::string_view, Entries::iterator> by_key_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  SteadyTime leased_until_ ABSL_GUARDED_BY(mutex_) = {};  // end of the last lease of a page
  PageCounts counts_ ABSL_GUARDED_BY(mutex_);
};

// Checks a key. Errors: kInvalidArgument naming `field` and the limits.
absl::Status CheckPageKey(std::string_view key, const std::string& field);
// Checks the number of bytes of a page. Errors: kInvalidArgument naming `field` and the limits.
absl::Status CheckPageBytes(uint64_t size_bytes, const std::string& field);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_PAGES_KEYED_PAGES_H_
