#include "kvstore/index/live_index.h"

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "kvstore/index/live_sequence.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kMaxIterations = 1000;
constexpr absl::Duration kPoll = absl::Milliseconds(10);  // for cancellation and drop

using Purpose = LiveSequence::Purpose;

// Returns true when the index is ready in all layers of all segments, the active one included.
bool IsFinished(const SegmentList& list, const IndexDescriptor& index) {
  const size_t ordinal = list.Find(index);
  return ordinal < list.indexes.size() && list.index_ready(ordinal);
}

BuildProgress ReportOf(const Cache& cache, const Snapshot& snapshot, size_t ordinal,
                       uint32_t layer_slot) {
  const SegmentList& list = *snapshot.list;
  const StoredLayers::Layer& layer = cache.layers.layers[layer_slot];
  const Codebook* last = nullptr;
  BuildProgress report{.layer = layer.layer, .layer_count = cache.layers.indexed_count};
  for (const SegmentEntry& entry : list.segments) {
    const auto& codebook = entry.indexes[ordinal]->codebook(layer_slot);
    const uint32_t first = entry.rows->first_position();
    const uint32_t end = entry.closed ? entry.token_end : snapshot.layer_tokens[layer_slot];
    report.index_bytes +=
        IndexContentBytes(layer.shape, list.indexes[ordinal], entry.rows->slot_capacity(),
                          std::max(end, first) - first);
    if (codebook.get() == last) continue;
    last = codebook.get();
    ++report.codebook_generation_count;
    report.codebook_bytes += codebook->content_bytes();
    report.iterations = codebook->header().iteration_count;
    report.inertia = codebook->header().inertia;
  }
  report.codebook_generation = report.codebook_generation_count - 1;
  return report;
}

}  // namespace

struct IncrementalIndexer::Entry {
  std::shared_ptr<LiveSequence> work;
  LiveIndex spec;
  bool wanted[2] = {true, true};  // per Purpose: there may be work
  bool running = false;
  uint32_t pauses[2] = {0, 0};  // per Purpose
  uint64_t published = 0;       // number of publications of the sequence
  absl::Status status;

  bool idle() const { return !wanted[0] && !wanted[1] && !running; }
};

struct IncrementalIndexer::WorkItem {
  uint64_t sequence_id = 0;
  std::shared_ptr<LiveSequence> work;
  Purpose purpose = Purpose::kDecode;
  uint64_t published = 0;
};

class IncrementalIndexer::Watcher : public SequenceWatcher {
 public:
  Watcher(std::shared_ptr<Inbox> inbox, uint64_t sequence_id)
      : inbox_(std::move(inbox)), sequence_id_(sequence_id) {}

  void OnPublish(const Snapshot&) override { Wake(); }
  // A full segment is coded while it is still active, so its slots must not be written again.
  bool OnTruncate(uint32_t, uint64_t) override { return true; }
  void OnSuspend(bool suspended) override {
    if (!suspended) Wake();
  }
  void OnDrop() override {
    std::shared_ptr<LiveSequence> work;  // freed after the lock is released
    const MutexLock lock(&inbox_->mutex);
    const auto it = inbox_->entries.find(sequence_id_);
    if (it == inbox_->entries.end()) return;
    work = std::move(it->second.work);
    inbox_->entries.erase(it);
    inbox_->changed.SignalAll();
  }

 private:
  void Wake() {
    const MutexLock lock(&inbox_->mutex);
    const auto it = inbox_->entries.find(sequence_id_);
    if (it == inbox_->entries.end()) return;
    ++it->second.published;
    it->second.wanted[0] = it->second.wanted[1] = true;
    inbox_->Wake();
  }

  const std::shared_ptr<Inbox> inbox_;
  const uint64_t sequence_id_;
};

absl::Status CheckLiveIndex(const Cache& cache, const LiveIndex& spec) {
  RETURN_IF_ERROR(CheckNeedsBuild(spec.index, "live_index.index"));
  RETURN_IF_ERROR(CheckIndexOf(cache, spec.index, "live_index.index"));
  if (spec.iterations > kMaxIterations) {
    return InvalidArgument(
        "live_index.iterations",
        absl::StrCat(spec.iterations, ", must lie in [0, ", kMaxIterations, "]"));
  }
  return absl::OkStatus();
}

IncrementalIndexer::IncrementalIndexer(Failed failed)
    : failed_(std::move(failed)), inbox_(std::make_shared<Inbox>()) {
  inbox_->indexer = this;
}

void IncrementalIndexer::Inbox::Wake() {
  changed.SignalAll();
  if (stop || scheduled) return;
  try {
    worker.Run([this] { indexer->Work(); });
    scheduled = true;
  } catch (const std::exception&) {
    // No memory, or no thread: the work waits until the next publication.
  }
}

void IncrementalIndexer::Stop() {
  stop_.store(true);
  {
    const MutexLock lock(&inbox_->mutex);
    inbox_->stop = true;
    inbox_->changed.SignalAll();
  }
  inbox_->worker.Stop();
}

IncrementalIndexer::~IncrementalIndexer() {
  Stop();
  std::map<uint64_t, Entry> entries;  // freed after the lock is released
  const MutexLock lock(&inbox_->mutex);
  entries.swap(inbox_->entries);
}

absl::Status IncrementalIndexer::Add(std::shared_ptr<const Cache> cache,
                                     const std::shared_ptr<Sequence>& sequence,
                                     const LiveIndex& spec) {
  const uint64_t sequence_id = sequence->sequence_id();
  {
    auto work = std::make_shared<LiveSequence>(std::move(cache), sequence, spec);
    const MutexLock lock(&inbox_->mutex);
    Entry& entry = inbox_->entries[sequence_id];
    entry.work = std::move(work);
    entry.spec = spec;
  }
  auto watcher = std::make_shared<Watcher>(inbox_, sequence_id);
  if (auto watched = sequence->Watch(watcher); !watched.ok()) {
    watcher->OnDrop();
    return watched.status();
  }
  watcher->OnPublish(**sequence->Peek());  // processes earlier publications
  return absl::OkStatus();
}

std::optional<LiveIndex> IncrementalIndexer::SpecOf(uint64_t sequence_id) const {
  const MutexLock lock(&inbox_->mutex);
  const auto it = inbox_->entries.find(sequence_id);
  if (it == inbox_->entries.end()) return std::nullopt;
  return it->second.spec;
}

absl::Status IncrementalIndexer::StatusOf(uint64_t sequence_id) const {
  const MutexLock lock(&inbox_->mutex);
  const auto it = inbox_->entries.find(sequence_id);
  return it == inbox_->entries.end() ? absl::OkStatus() : it->second.status;
}

absl::Status IncrementalIndexer::Retry(uint64_t sequence_id) {
  const MutexLock lock(&inbox_->mutex);
  const auto it = inbox_->entries.find(sequence_id);
  if (it == inbox_->entries.end() || it->second.status.ok()) return absl::OkStatus();
  it->second.wanted[0] = it->second.wanted[1] = true;
  inbox_->Wake();
  return it->second.status;
}

bool IncrementalIndexer::IsIdle(uint64_t sequence_id) const {
  const MutexLock lock(&inbox_->mutex);
  const auto it = inbox_->entries.find(sequence_id);
  return it == inbox_->entries.end() || it->second.idle();
}

uint32_t IncrementalIndexer::CountBusySequences() const {
  const MutexLock lock(&inbox_->mutex);
  return static_cast<uint32_t>(
      std::count_if(inbox_->entries.begin(), inbox_->entries.end(),
                    [](const auto& entry) { return !entry.second.idle(); }));
}

bool IncrementalIndexer::WaitIdle(SteadyTime deadline) const {
  while (CountBusySequences() > 0) {
    if (SteadyTime::Now() >= deadline) return false;
    const MutexLock lock(&inbox_->mutex);
    inbox_->changed.WaitUntil(&inbox_->mutex, std::min(deadline, SteadyTime::Now() + kPoll));
  }
  return true;
}

// Prefers segments without codes; among equals, the sequence after the last one.
std::optional<IncrementalIndexer::WorkItem> IncrementalIndexer::PickNext(uint64_t last) {
  for (const Purpose purpose : {Purpose::kDecode, Purpose::kUpkeep}) {
    auto& entries = inbox_->entries;
    auto it = entries.upper_bound(last);
    for (size_t i = 0; i < entries.size(); ++i, ++it) {
      if (it == entries.end()) it = entries.begin();
      Entry& entry = it->second;
      if (!entry.wanted[static_cast<size_t>(purpose)] ||
          entry.pauses[static_cast<size_t>(purpose)] > 0)
        continue;
      entry.running = true;
      return WorkItem{it->first, entry.work, purpose, entry.published};
    }
  }
  return std::nullopt;
}

void IncrementalIndexer::Work() {
  for (;;) {
    std::optional<WorkItem> pick;
    {
      const MutexLock lock(&inbox_->mutex);
      if (!inbox_->stop) pick = PickNext(last_);
      if (!pick.has_value()) {
        inbox_->scheduled = false;
        return;
      }
    }
    last_ = pick->sequence_id;
    const absl::StatusOr<bool> worked =
        pick->work->Step(pick->purpose, [this] { return !stop_.load(); });
    // A suspended sequence has not failed: its resumption starts the work again.
    const bool suspended = absl::IsFailedPrecondition(worked.status());
    const absl::Status status = suspended ? absl::OkStatus() : worked.status();
    Settle(*pick, status, worked.ok() && *worked);
    if (!status.ok() && !absl::IsNotFound(status) && failed_) failed_(pick->sequence_id, status);
  }
}

void IncrementalIndexer::Settle(const WorkItem& pick, const absl::Status& status, bool worked) {
  const MutexLock lock(&inbox_->mutex);
  inbox_->changed.SignalAll();
  const auto it = inbox_->entries.find(pick.sequence_id);
  if (it == inbox_->entries.end()) return;
  Entry& entry = it->second;
  entry.running = false;
  const bool news = entry.published != pick.published;
  const auto purpose = static_cast<size_t>(pick.purpose);
  if (!status.ok()) {
    entry.status = status;
    if (!news) entry.wanted[0] = entry.wanted[1] = false;  // until it publishes next
    return;
  }
  if (worked) {
    entry.status = absl::OkStatus();
  } else if (!news) {
    entry.wanted[purpose] = false;
  }
}

absl::Status IncrementalIndexer::Finish(const Cache& cache, Sequence& sequence,
                                        const BuildSpec& spec,
                                        const std::function<bool(const BuildProgress&)>& progress) {
  const SteadyTime began = SteadyTime::Now();
  const uint64_t sequence_id = sequence.sequence_id();
  {
    const MutexLock lock(&inbox_->mutex);
    const auto it = inbox_->entries.find(sequence_id);
    if (it == inbox_->entries.end()) return NotFound("sequence_id", "the sequence was dropped");
    it->second.status = absl::OkStatus();
    it->second.wanted[0] = it->second.wanted[1] = true;
    inbox_->Wake();
  }
  uint32_t reported = 0;  // layer slots
  uint32_t layers_done = 0;
  for (;;) {
    ASSIGN_OR_RETURN(const auto snapshot, sequence.Read());
    const SegmentList& list = *snapshot->list;
    const size_t ordinal = list.Find(spec.index);
    const bool known = ordinal < list.indexes.size();
    for (; known && reported < cache.layers.size() && list.index_ready(ordinal, reported);
         ++reported) {
      if (!cache.layers.layers[reported].shape.has_index()) continue;
      ++layers_done;
      if (!progress) continue;
      BuildProgress report = ReportOf(cache, *snapshot, ordinal, reported);
      report.layers_done = layers_done;
      report.seconds = absl::ToDoubleSeconds(SteadyTime::Now() - began);
      if (!progress(report)) return Cancelled("the build was cancelled");
    }
    if (IsFinished(list, spec.index)) return absl::OkStatus();
    RETURN_IF_ERROR(StatusOf(sequence_id));
    // A truncation may have removed them.
    RETURN_IF_ERROR(CheckSamples(cache, *snapshot, spec.index, /*has_first=*/true, "index"));
    if (spec.is_cancelled && spec.is_cancelled()) return Cancelled("the build was cancelled");
    if (SteadyTime::Now() >= spec.deadline) {
      return DeadlineExceeded("", "the deadline passed before every layer was indexed");
    }
    const MutexLock lock(&inbox_->mutex);
    inbox_->changed.WaitUntil(&inbox_->mutex, std::min(spec.deadline, SteadyTime::Now() + kPoll));
  }
}

void IncrementalIndexer::Restart(uint64_t sequence_id) {
  std::shared_ptr<LiveSequence> work;
  {
    const MutexLock lock(&inbox_->mutex);
    const auto it = inbox_->entries.find(sequence_id);
    if (it == inbox_->entries.end()) return;
    work = it->second.work;
  }
  work = work->Renewed();
  const MutexLock lock(&inbox_->mutex);
  const auto it = inbox_->entries.find(sequence_id);
  if (it == inbox_->entries.end()) return;
  work.swap(it->second.work);  // the earlier one is freed after the lock is released
  it->second.wanted[0] = it->second.wanted[1] = true;
}

IncrementalIndexer::Pause::Pause(IncrementalIndexer& indexes, uint64_t sequence_id,
                                 SteadyTime deadline, Of of)
    : of_(of), indexes_(indexes), sequence_id_(sequence_id) {
  Inbox& inbox = *indexes_.inbox_;
  const MutexLock lock(&inbox.mutex);
  if (const auto it = inbox.entries.find(sequence_id_); it != inbox.entries.end()) {
    Count(it->second, 1);
  }
  for (;;) {
    const auto it = inbox.entries.find(sequence_id_);
    if (it == inbox.entries.end() || !it->second.running) return;
    if (SteadyTime::Now() >= deadline) {
      holds_ = false;
      return;
    }
    inbox.changed.WaitUntil(&inbox.mutex, deadline);
  }
}

IncrementalIndexer::Pause::~Pause() {
  Inbox& inbox = *indexes_.inbox_;
  const MutexLock lock(&inbox.mutex);
  const auto it = inbox.entries.find(sequence_id_);
  if (it != inbox.entries.end()) Count(it->second, -1);
  inbox.Wake();
}

void IncrementalIndexer::Pause::Count(Entry& entry, int change) const {
  entry.pauses[static_cast<size_t>(Purpose::kUpkeep)] += static_cast<uint32_t>(change);
  if (of_ == Of::kUpkeep) return;
  entry.pauses[static_cast<size_t>(Purpose::kDecode)] += static_cast<uint32_t>(change);
}

}  // namespace pqcached::kvstore
