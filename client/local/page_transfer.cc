#include "client/local/page_transfer.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "client/base/deadline.h"
#include "client/local/ingest.h"
#include "kvstore/read/pages.h"

namespace pqcached::client {
namespace {

// Fewer bytes pass as fast in a message, and need no staging ring.
constexpr uint64_t kLeastStagedBytes = 128 << 10;

uint64_t BytesOf(const PutPageItem& item) { return item.data_bytes; }
uint64_t BytesOf(const GetPageItem& item) { return item.capacity_bytes; }

// The first items of a call, and their places in a slot.
struct StagedPages {
  uint32_t count = 0;
  uint64_t bytes = 0;  // in the slot, with gaps between the pages
  std::array<uint64_t, kMaxStagedPages> offsets = {};
};

template <class Item>
StagedPages Arrange(std::span<const Item> items, uint64_t slot_bytes) {
  StagedPages pages;
  const size_t most = std::min<size_t>(items.size(), kMaxStagedPages);
  while (pages.count < most && pages.bytes <= slot_bytes &&
         BytesOf(items[pages.count]) <= slot_bytes - pages.bytes) {
    pages.offsets[pages.count] = pages.bytes;
    pages.bytes += FilledSlot::AlignUp(BytesOf(items[pages.count]));
    ++pages.count;
  }
  return pages;
}

// Takes a slot, which is not valid when the pages should be passed in messages.
Staging::Slot TakeSlot(const PageTransfer& transfer, const StagedPages& pages) {
  Staging::Slot slot;
  if (pages.bytes < kLeastStagedBytes) return slot;
  InvalidateAbandoned(transfer.staging, transfer.remote);
  if (transfer.staging.Take(CallDeadline(transfer.timeout_ms), &slot) != PQC_OK) return {};
  if (pages.bytes >= kvstore::kHugePageBytes) slot.Touch();
  return slot;
}

// Calls call(items, count, error) for the arranged items with places in the slot. Returns their
// number, or 0 after a failure.
template <class Item, class Call>
uint32_t CallWithPlaces(std::span<Item> items, const StagedPages& pages, Staging::Slot& slot,
                        const Call& call) {
  std::array<StagingPlace, kMaxStagedPages> places;
  for (uint32_t i = 0; i < pages.count; ++i) {
    places[i] = slot.Place(pages.offsets[i], BytesOf(items[i]));
    items[i].staging = &places[i];
  }
  slot.Use();
  RefusalBuffer error;
  const pqc_status status = call(items.data(), pages.count, &error);
  for (uint32_t i = 0; i < pages.count; ++i) items[i].staging = nullptr;
  if (status == PQC_OK) return pages.count;
  if (MayStillBeRead(status) && !slot.Done()) slot.Abandon();
  return 0;
}

}  // namespace

uint32_t PutThroughStaging(const PageTransfer& transfer, std::span<PutPageItem> items) {
  const StagedPages pages = Arrange<PutPageItem>(items, transfer.staging.slot_bytes());
  Staging::Slot slot = TakeSlot(transfer, pages);
  if (!slot.valid()) return 0;
  for (uint32_t i = 0; i < pages.count; ++i) {
    std::memcpy(slot.bytes().data() + pages.offsets[i], items[i].data, items[i].data_bytes);
  }
  return CallWithPlaces(items, pages, slot,
                        [&](PutPageItem* staged, uint32_t count, RefusalBuffer* error) {
                          return transfer.remote.PutPages(transfer.cache_id, staged, count, error);
                        });
}

uint32_t GetThroughStaging(const PageTransfer& transfer, std::span<GetPageItem> items) {
  const StagedPages pages = Arrange<GetPageItem>(items, transfer.staging.slot_bytes());
  Staging::Slot slot = TakeSlot(transfer, pages);
  if (!slot.valid()) return 0;
  const uint32_t count = CallWithPlaces(
      items, pages, slot, [&](GetPageItem* staged, uint32_t staged_count, RefusalBuffer* error) {
        return transfer.remote.GetPages(transfer.cache_id, staged, staged_count, error);
      });
  for (uint32_t i = 0; i < pages.count; ++i) {
    GetPageItem& item = items[i];
    if (count == 0) {
      item.answered = false;
      item.size_bytes = 0;
    } else if (item.is_staged) {
      std::memcpy(item.data, slot.bytes().data() + pages.offsets[i], item.size_bytes);
    }
  }
  return count;
}

}  // namespace pqcached::client
