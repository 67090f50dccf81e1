#include "kvstore/pages/keyed_pages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/crc32c.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/memory/free_map.h"
#include "kvstore/records/record_bytes.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

static_assert(sizeof(PageRecord) <= RecordTable::kLayerBytes);
static_assert(kMaxPageKeyBytes <= RecordTable::kLayerBytes);

std::span<const std::byte> BytesOfKey(std::string_view key) {
  return std::as_bytes(std::span(key.data(), key.size()));
}

}  // namespace

class KeyedPages::Page {
 public:
  Page(Extent extent, const PageRecord& record) : extent_(std::move(extent)), record_(record) {}

  // A page of an earlier process.
  Page(Extent extent, RecordSlot slot, const PageRecord& record)
      : extent_(std::move(extent)), slot_(std::move(slot)), record_(record) {
    checked_ = std::make_unique<const CheckedBytes>(
        std::vector<CheckedBytes::Piece>{{.bytes = bytes(), .crc = record.crc}});
  }

  std::span<const std::byte> bytes() const {
    return {extent_.data(), static_cast<size_t>(record_.size_bytes)};
  }
  const Extent& extent() const { return extent_; }
  const RecordSlot& slot() const { return slot_; }
  void set_slot(RecordSlot slot) { slot_ = std::move(slot); }
  const PageRecord& record() const { return record_; }

  // Returns false when the bytes are not those that were stored.
  bool Verify(const kernels::Exec& exec, std::atomic<uint64_t>& losses) const {
    return checked_ == nullptr || checked_->Verify(exec, losses);
  }

 private:
  Extent extent_;
  RecordSlot slot_;  // emptied before the extent is freed; not valid without a record table
  PageRecord record_;
  std::unique_ptr<const CheckedBytes> checked_;
};

absl::Status CheckPageKey(std::string_view key, const std::string& field) {
  if (key.size() >= kMinPageKeyBytes && key.size() <= kMaxPageKeyBytes) return absl::OkStatus();
  return InvalidArgument(field, absl::StrCat(key.size(), " bytes, must lie in [", kMinPageKeyBytes,
                                             ", ", kMaxPageKeyBytes, "]"));
}

absl::Status CheckPageBytes(uint64_t size_bytes, const std::string& field) {
  if (size_bytes > 0 && size_bytes <= kMaxPageBytes) return absl::OkStatus();
  return InvalidArgument(field,
                         absl::StrCat(size_bytes, " bytes, must lie in [1, ", kMaxPageBytes, "]"));
}

std::vector<PageOutcome> KeyedPages::Put(std::span<const PageSource> pages) {
  std::vector<PageOutcome> outcomes;
  std::vector<PagePointer> held;  // so that no page of this call is evicted for a later one
  outcomes.reserve(pages.size());
  for (const PageSource& page : pages) outcomes.push_back(PutOne(page, held));
  const MutexLock lock(&mutex_);
  // The last one comes first, so that the first of a chain of pages is evicted last.
  for (size_t i = pages.size(); i > 0; --i) Touch(pages[i - 1].key, SteadyTime());
  return outcomes;
}

KeyedPages::PagePointer KeyedPages::FindGood(std::string_view key) {
  PagePointer page;
  {
    const MutexLock lock(&mutex_);
    page = Touch(key, SteadyTime());
  }
  if (page == nullptr || page->Verify(exec_, losses_)) return page;
  DropBroken(key, page);
  return nullptr;
}

PageOutcome KeyedPages::PutOne(const PageSource& source, std::vector<PagePointer>& held) {
  if (auto present = FindGood(source.key)) {
    held.push_back(std::move(present));
    return PageOutcome::kPresent;
  }
  const size_t size_bytes = source.bytes.size();
  auto extents = pool_->Allocate(std::span(&size_bytes, 1));
  if (!extents.ok()) return PageOutcome::kNoRoom;
  Extent& extent = extents->front();
  PQC_CRASH_POINT();
  std::memcpy(extent.data(), source.bytes.data(), size_bytes);
  // The checksum is that of the copy: a client may change staged bytes at any time.
  const PageRecord record{.extent = extent.ref(),
                          .number = next_number_.fetch_add(1),
                          .size_bytes = size_bytes,
                          .crc = kernels::Crc32c(exec_, {extent.data(), size_bytes})};
  const auto page = std::make_shared<Page>(std::move(extent), record);
  if (records_ != nullptr) {
    const MutexLock lock(&records_->mutex());
    auto slot = records_->Take(RecordKind::kLayer);
    if (!slot.ok()) return PageOutcome::kNoRoom;
    page->set_slot(*std::move(slot));
  }
  PagePointer listed = Publish(source.key, page);
  if (listed == nullptr) return PageOutcome::kNoRoom;
  const bool is_new = listed == page;
  held.push_back(std::move(listed));
  return is_new ? PageOutcome::kStored : PageOutcome::kPresent;
}

KeyedPages::PagePointer KeyedPages::Touch(std::string_view key, SteadyTime leased_until) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  Entry& entry = entries_.front();
  entry.leased_until = std::max(entry.leased_until, leased_until);
  leased_until_ = std::max(leased_until_, leased_until);
  return entry.page;
}

KeyedPages::PagePointer KeyedPages::Publish(std::string_view key, PagePointer page) {
  const MutexLock lock(&mutex_);
  if (closed_) return nullptr;
  if (auto listed = Touch(key, SteadyTime())) return listed;  // another call was faster
  WriteRecord(key, *page);
  entries_.push_front({.key = std::string(key), .page = page, .leased_until = {}});
  by_key_.emplace(entries_.front().key, entries_.begin());
  ++counts_.page_count;
  counts_.bytes += page->bytes().size();
  return page;
}

void KeyedPages::WriteRecord(std::string_view key, const Page& page) {
  if (records_ == nullptr) return;
  DurableFence();  // after the bytes of the page
  const uint32_t number = page.slot().number();
  records_->layer_checksums().Put(number, BytesOfKey(key));
  records_->layers().Put(number, std::as_bytes(std::span(&page.record(), 1)));
}

std::vector<FoundPage> KeyedPages::Find(std::span<const std::string_view> keys,
                                        absl::Duration lease) {
  std::vector<PagePointer> pages;
  pages.reserve(keys.size());
  const SteadyTime leased_until =
      lease > absl::ZeroDuration() ? SteadyTime::Now() + lease : SteadyTime();
  {
    const MutexLock lock(&mutex_);
    // The last one comes first, so that the first of a chain of pages is evicted last.
    for (size_t i = keys.size(); i > 0; --i) pages.push_back(Touch(keys[i - 1], leased_until));
  }
  std::reverse(pages.begin(), pages.end());
  std::vector<FoundPage> found(keys.size());
  uint64_t hits = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (pages[i] == nullptr) continue;
    if (!pages[i]->Verify(exec_, losses_)) {
      DropBroken(keys[i], pages[i]);
      continue;
    }
    found[i].bytes = pages[i]->bytes();
    found[i].hold = std::move(pages[i]);
    ++hits;
  }
  const MutexLock lock(&mutex_);
  counts_.hits += hits;
  counts_.misses += keys.size() - hits;
  return found;
}

KeyedPages::Entry KeyedPages::Unlist(Entries::iterator entry) {
  by_key_.erase(entry->key);
  --counts_.page_count;
  counts_.bytes -= entry->page->bytes().size();
  Entry unlisted = std::move(*entry);
  entries_.erase(entry);
  return unlisted;
}

void KeyedPages::DropBroken(std::string_view key, const PagePointer& page) {
  Entry dropped;  // destroyed without the lock
  const MutexLock lock(&mutex_);
  const auto found = by_key_.find(key);
  if (found == by_key_.end() || found->second->page != page) return;
  dropped = Unlist(found->second);
}

bool KeyedPages::MakeRoom(std::span<const size_t> sizes_bytes) {
  const ExtentDemand demand(sizes_bytes);
  std::vector<Entry> evicted;  // destroyed without the lock
  const SteadyTime now = SteadyTime::Now();
  FreeMap free = pool_->free_map();
  // Fits copies the map of the pool, so it is asked only when the longest extent finds a run.
  const size_t longest_bytes =
      demand.counts().empty() ? 0 : size_t{demand.counts().begin()->first} << kExtentUnitShift;
  const auto fits = [&] { return free.largest_free_bytes() >= longest_bytes && free.Fits(demand); };
  const MutexLock lock(&mutex_);
  std::vector<Entries::iterator> victims;
  for (auto entry = entries_.end(); !fits() && entry != entries_.begin();) {
    --entry;
    if (IsEvictable(*entry, now) && free.Free(entry->page->extent().units())) {
      victims.push_back(entry);
    }
  }
  if (!fits()) return false;
  for (const auto victim : victims) {
    ++counts_.evicted_pages;
    counts_.evicted_bytes += victim->page->bytes().size();
    evicted.push_back(Unlist(victim));
  }
  return true;
}

size_t KeyedPages::Evict(size_t bytes) {
  std::vector<Entry> evicted;  // destroyed without the lock
  const SteadyTime now = SteadyTime::Now();
  size_t freed_bytes = 0;
  const MutexLock lock(&mutex_);
  for (auto entry = entries_.end(); freed_bytes < bytes && entry != entries_.begin();) {
    --entry;
    if (!IsEvictable(*entry, now)) continue;
    const auto victim = entry++;
    freed_bytes += victim->page->extent().size_bytes();
    ++counts_.evicted_pages;
    counts_.evicted_bytes += victim->page->bytes().size();
    evicted.push_back(Unlist(victim));
  }
  return freed_bytes;
}

bool KeyedPages::HasLease() const {
  const MutexLock lock(&mutex_);
  return leased_until_ > SteadyTime::Now();
}

absl::Status KeyedPages::Close(bool force) {
  {
    const MutexLock lock(&mutex_);
    if (!force && leased_until_ > SteadyTime::Now()) {
      return FailedPrecondition("cache_id", "a page of the cache is leased");
    }
    closed_ = true;
  }
  Clear();
  return absl::OkStatus();
}

void KeyedPages::Clear() {
  Entries cleared;  // destroyed without the lock
  const MutexLock lock(&mutex_);
  by_key_.clear();
  cleared.swap(entries_);
  leased_until_ = {};
  counts_.page_count = 0;
  counts_.bytes = 0;
}

std::shared_ptr<KeyedPages::Page> KeyedPages::ReadPage(uint32_t number, std::string& key,
                                                       std::vector<std::string>& dropped) const {
  const auto drop = [&](absl::string_view what) {
    dropped.push_back(absl::StrCat("page record ", number, ": ", what));
    return nullptr;
  };
  const SlotArray::Content content = records_->layers().Read(number);
  if (content.state == SlotArray::State::kEmpty) return nullptr;
  const SlotArray::Content key_content = records_->layer_checksums().Read(number);
  if (content.state != SlotArray::State::kFull || key_content.state != SlotArray::State::kFull) {
    return drop("it is corrupt");
  }
  RecordReader reader(content.bytes);
  const auto record = reader.Get<PageRecord>();
  key.assign(reinterpret_cast<const char*>(key_content.bytes.data()), key_content.bytes.size());
  if (!reader.done() || !CheckPageKey(key, "").ok() ||
      !CheckPageBytes(record.size_bytes, "").ok()) {
    return drop("it cannot be read");
  }
  auto extent = pool_->Claim(record.extent, record.size_bytes);
  if (!extent.has_value()) return drop("its memory belongs to another page");
  auto slot = records_->Claim(RecordKind::kLayer, number);
  if (!slot.has_value()) return drop("its number is in use");
  return std::make_shared<Page>(*std::move(extent), *std::move(slot), record);
}

uint32_t KeyedPages::Recover(std::vector<std::string>& dropped) {
  struct Recovered {
    std::string key;
    std::shared_ptr<Page> page;
  };
  std::vector<Recovered> recovered;
  for (uint32_t number = 0; number < records_->end(RecordKind::kLayer); ++number) {
    Recovered each;
    each.page = ReadPage(number, each.key, dropped);
    if (each.page != nullptr) recovered.push_back(std::move(each));
  }
  std::sort(recovered.begin(), recovered.end(), [](const Recovered& a, const Recovered& b) {
    return a.page->record().number > b.page->record().number;
  });
  {
    const MutexLock lock(&mutex_);
    if (!recovered.empty()) next_number_ = recovered.front().page->record().number + 1;
    // Of two pages with one key, the one that was stored last counts.
    for (Recovered& each : recovered) {
      if (by_key_.contains(each.key)) {
        dropped.push_back("a page: another one has its key");
        continue;
      }
      ++counts_.page_count;
      counts_.bytes += each.page->bytes().size();
      entries_.push_back(
          {.key = std::move(each.key), .page = std::move(each.page), .leased_until = {}});
      by_key_.emplace(entries_.back().key, std::prev(entries_.end()));
    }
  }
  recovered.clear();
  records_->EndRecovery();
  pool_->BeginQuarantine();
  const MutexLock lock(&mutex_);
  return static_cast<uint32_t>(counts_.page_count);
}

PageCounts KeyedPages::counts() const {
  const MutexLock lock(&mutex_);
  return counts_;
}

}  // namespace pqcached::kvstore
