#include "kvstore/checksum/checksums.h"

#include <atomic>
#include <exception>
#include <optional>
#include <span>
#include <utility>

#include "kernels/base/crc32c.h"
#include "kvstore/checksum/checksum_record.h"
#include "kvstore/records/record_bytes.h"

namespace pqcached::kvstore {
namespace {

// Returns the record number when the record exists and has no checksums yet.
std::optional<uint32_t> NumberOf(RecordTable& table, RecordSlot& record, const SlotArray& sums) {
  const MutexLock lock(&table.mutex());
  if (!record.valid()) return std::nullopt;
  if (sums.Read(record.number()).state != SlotArray::State::kEmpty) return std::nullopt;
  return record.number();
}

void SumRows(const Cache& cache, const SegmentEntry& entry) {
  RecordTable& table = *cache.records;
  const SegmentRows& rows = *entry.rows;
  const auto number = NumberOf(table, rows.record(), table.row_checksums());
  if (!number.has_value()) return;
  const uint32_t slot_count = entry.token_end - rows.first_position();
  std::vector<uint32_t> sums(cache.layers.head_count);
  for (uint32_t head = 0; head < sums.size(); ++head) {
    sums[head] = kernels::Crc32c(table.exec(), RowBytes(cache, rows, head, slot_count));
  }
  const MutexLock lock(&table.mutex());
  if (table.detached()) return;
  RecordWriter writer(table.row_checksums().Open(*number));
  writer.Add(RowChecksumsRecord{.segment_id = rows.segment_id(), .slot_count = slot_count});
  writer.AddAll(std::span<const uint32_t>(sums));
  table.row_checksums().Commit(*number, writer.size_bytes());
}

void SumLayer(const Cache& cache, const SegmentRows& rows, const SegmentIndex::Layer& layer,
              uint32_t layer_slot) {
  const IndexDataHeader& header = layer.header();
  if (header.cell_count > 0 && header.counted_end.load(std::memory_order_acquire) == 0) return;
  RecordTable& table = *cache.records;
  const auto number = NumberOf(table, layer.data->record(), table.layer_checksums());
  if (!number.has_value()) return;
  const LayerChecksumsRecord record{
      .segment_id = rows.segment_id(),
      .data = kernels::Crc32c(table.exec(), DataBytes(cache, layer, layer_slot)),
      .codebook = kernels::Crc32c(table.exec(), CodebookBytes(cache, layer, layer_slot))};
  const MutexLock lock(&table.mutex());
  if (table.detached()) return;
  table.layer_checksums().Put(*number, std::as_bytes(std::span(&record, 1)));
}

}  // namespace

// Queues a job when a sequence may have new final bytes.
class Checksums::Watcher final : public SequenceWatcher,
                                 public std::enable_shared_from_this<Checksums::Watcher> {
 public:
  Watcher(std::shared_ptr<Inbox> inbox, std::shared_ptr<const Cache> cache,
          std::weak_ptr<Sequence> sequence)
      : inbox_(std::move(inbox)), cache_(std::move(cache)), sequence_(std::move(sequence)) {}

  void OnPublish(const Snapshot& next) override {
    if (next.list.get() == last_.load() && !incomplete_.load(std::memory_order_relaxed)) return;
    last_.store(next.list.get());
    if (queued_.exchange(true)) return;
    AddPending(1);
    try {
      inbox_->worker.RunAt((SteadyTime::Now() + kDelay).ToChrono(),
                           [self = shared_from_this()] { self->Run(); });
    } catch (const std::exception&) {
      // No memory, or no thread. The bytes stay without a checksum until the next publication.
      queued_ = false;
      AddPending(-1);
    }
  }
  bool OnTruncate(uint32_t, uint64_t) override { return false; }
  void OnSuspend(bool) override {}
  void OnDrop() override {}

 private:
  // Runs on the worker.
  void Run();
  void AddPending(int count) {
    const MutexLock lock(&inbox_->mutex);
    inbox_->pending += count;
    inbox_->changed.SignalAll();
  }
  void Sum(const Snapshot& snapshot);

  const std::shared_ptr<Inbox> inbox_;
  const std::shared_ptr<const Cache> cache_;
  const std::weak_ptr<Sequence> sequence_;
  // Compared only, never dereferenced: another list may later have this address.
  std::atomic<const SegmentList*> last_ = nullptr;
  std::atomic<bool> incomplete_ = false;  // a closed segment still misses rows
  std::atomic<bool> queued_ = false;
};

void Checksums::Watcher::Run() {
  queued_ = false;  // before the snapshot is read, so that later changes queue another task
  if (const auto sequence = sequence_.lock(); sequence != nullptr) {
    const auto snapshot = sequence->Peek();
    if (snapshot.ok()) Sum(**snapshot);
  }
  AddPending(-1);
}

void Checksums::Watcher::Sum(const Snapshot& snapshot) {
  const uint32_t complete = snapshot.token_count();
  bool incomplete = false;
  for (const SegmentEntry& entry : snapshot.list->segments) {
    // Rows shared from the active segment of another sequence are final only while they are shared.
    if (!entry.closed || entry.use->tail() != nullptr) continue;
    if (entry.token_end > complete) {
      incomplete = true;
      continue;
    }
    if (inbox_->stop) return;
    SumRows(*cache_, entry);
    for (const auto& index : entry.indexes) {
      for (uint32_t slot = 0; index != nullptr && slot < cache_->layers.size(); ++slot) {
        if (inbox_->stop) return;
        if (index->ready(slot)) SumLayer(*cache_, *entry.rows, index->layer(slot), slot);
      }
    }
  }
  incomplete_.store(incomplete, std::memory_order_relaxed);
}

void Checksums::Stop() {
  inbox_->stop = true;
  inbox_->worker.Stop();
}

void Checksums::Add(std::shared_ptr<const Cache> cache, const std::shared_ptr<Sequence>& sequence) {
  auto watcher = std::make_shared<Watcher>(inbox_, std::move(cache), sequence);
  const auto first = sequence->Watch(watcher);
  if (first.ok()) watcher->OnPublish(**first);
}

bool Checksums::WaitIdle(SteadyTime deadline) {
  const MutexLock lock(&inbox_->mutex);
  while (inbox_->pending > 0) {
    if (SteadyTime::Now() >= deadline) return false;
    inbox_->changed.WaitUntil(&inbox_->mutex, deadline);
  }
  return true;
}

}  // namespace pqcached::kvstore
