#include "kvstore/sequence/sequence.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "kvstore/refusal.h"
#include "kvstore/sequence/sequence_record.h"

namespace pqcached::kvstore {
namespace {

bool ShowsMore(const std::vector<uint32_t>& shown, const std::vector<uint32_t>& than) {
  for (size_t i = 0; i < shown.size(); ++i) {
    if (shown[i] > than[i]) return true;
  }
  return false;
}

// Returns a number that no snapshot had before, also of earlier processes since the boot: the
// numbers begin with the time, which they do not overtake.
uint64_t NewRowsEpoch() {
  static std::atomic<uint64_t> last =
      static_cast<uint64_t>(SteadyTime::Now().ToChrono().time_since_epoch().count());
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Pins the visible rows of an open segment for a sequence that shares it.
struct TailPin {
  std::shared_ptr<ActiveSegmentView> view;

  explicit TailPin(std::shared_ptr<ActiveSegmentView> shown) : view(std::move(shown)) {}
  ~TailPin() { view->drained.store(true, std::memory_order_release); }
  TailPin(const TailPin&) = delete;
  TailPin& operator=(const TailPin&) = delete;
};

std::shared_ptr<ActiveSegmentView> MakeView(std::vector<uint32_t> layer_tokens,
                                            const SegmentRows* tail) {
  auto view = std::make_shared<ActiveSegmentView>();
  view->layer_tokens = std::move(layer_tokens);
  view->tail = tail;
  return view;
}

// Reorders the indexes of an entry to the order of the list; missing indexes are null.
void OrderIndexes(const std::vector<IndexDescriptor>& order, SegmentEntry& entry) {
  const auto has_index = [](const std::shared_ptr<const SegmentIndex>& index,
                            const IndexDescriptor& wanted) {
    return index != nullptr && index->index() == wanted;
  };
  bool ordered = entry.indexes.size() == order.size();
  for (size_t i = 0; ordered && i < order.size(); ++i) {
    ordered = entry.indexes[i] == nullptr || has_index(entry.indexes[i], order[i]);
  }
  if (ordered) return;
  std::vector<std::shared_ptr<const SegmentIndex>> indexes(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    for (const auto& index : entry.indexes) {
      if (has_index(index, order[i])) indexes[i] = index;
    }
  }
  entry.indexes = std::move(indexes);
}

bool ReadyInAll(const std::vector<SegmentEntry>& segments, size_t index, uint32_t layer_slot) {
  return std::all_of(segments.begin(), segments.end(), [&](const SegmentEntry& entry) {
    return entry.indexes[index] != nullptr && entry.indexes[index]->complete(layer_slot);
  });
}

// Fills in the fields that are derived from the rest of a list.
void Complete(const std::vector<uint32_t>& layer_tokens, SegmentList& list) {
  if (list.segments.empty()) {  // the codebooks were removed with the last segment
    list.indexes.clear();
    list.prefill_closed = false;
  }
  for (uint32_t slot = 0; slot < list.samples.size(); ++slot) {
    list.samples[slot] = QuerySamples::Below(std::move(list.samples[slot]), layer_tokens[slot]);
  }
  for (size_t i = 0; i < list.segments.size(); ++i) {
    SegmentEntry& entry = list.segments[i];
    OrderIndexes(list.indexes, entry);
    if (entry.use == nullptr) entry.use = std::make_shared<SegmentUse>(entry.rows, nullptr);
    if (!entry.closed || entry.token_end > 0) continue;
    entry.token_end = i + 1 < list.segments.size()
                          ? list.segments[i + 1].rows->first_position()
                          : *std::max_element(layer_tokens.begin(), layer_tokens.end());
  }
  list.ready.assign(list.indexes.size(), std::vector<bool>(layer_tokens.size()));
  for (size_t index = 0; index < list.indexes.size(); ++index) {
    for (uint32_t slot = 0; slot < layer_tokens.size(); ++slot) {
      list.ready[index][slot] = ReadyInAll(list.segments, index, slot);
    }
  }
}

// Removes the entries after `token_end`, and shortens the closed one that holds it. An open segment
// stays open.
void CutAt(uint32_t token_end, std::vector<SegmentEntry>& segments) {
  while (!segments.empty() && segments.back().rows->first_position() >= token_end) {
    segments.pop_back();
  }
  if (segments.empty() || !segments.back().closed) return;
  segments.back().token_end = std::min(segments.back().token_end, token_end);
}

std::vector<SegmentEntry>::iterator FindSegment(std::vector<SegmentEntry>& segments, uint64_t id) {
  return std::find_if(segments.begin(), segments.end(),
                      [id](const SegmentEntry& entry) { return entry.rows->segment_id() == id; });
}

// Error for a segment that is no longer in the list, or that has changed.
absl::Status SegmentChangedError(uint64_t segment_id) {
  return Aborted("", absl::StrCat("segment ", segment_id, " is gone or has changed"),
                 kRetryConflict);
}

// Checks that all segments are closed and contiguous. Errors: kInvalidArgument.
absl::Status CheckReplacement(const std::vector<SegmentEntry>& entries) {
  if (entries.empty()) return InvalidArgument("replacement", "empty");
  for (size_t i = 0; i < entries.size(); ++i) {
    const SegmentEntry& entry = entries[i];
    const uint32_t begin = entry.rows->first_position();
    const bool joined = i == 0 || entries[i - 1].token_end == begin;
    if (entry.closed && joined && entry.token_end > begin &&
        entry.token_end <= entry.rows->end_capacity()) {
      continue;
    }
    return InvalidArgument("replacement",
                           absl::StrCat("segment ", i, " is open, or its tokens [", begin, ", ",
                                        entry.token_end, ") do not follow those before it"));
  }
  return absl::OkStatus();
}

}  // namespace

SegmentUse::SegmentUse(std::shared_ptr<const SegmentRows> rows, std::shared_ptr<const void> tail)
    : rows_(std::move(rows)), tail_(std::move(tail)) {
  rows_->user_count_.fetch_add(1, std::memory_order_relaxed);
}

SegmentUse::~SegmentUse() { rows_->user_count_.fetch_sub(1, std::memory_order_relaxed); }

bool SegmentList::index_ready(size_t index) const {
  return std::find(ready[index].begin(), ready[index].end(), false) == ready[index].end();
}

size_t SegmentList::Find(const IndexDescriptor& index) const {
  return static_cast<size_t>(std::find(indexes.begin(), indexes.end(), index) - indexes.begin());
}

Snapshot::Snapshot(std::shared_ptr<const SegmentList> segments, std::vector<uint32_t> tokens)
    : list(std::move(segments)),
      view(MakeView(std::move(tokens), list->tail())),
      layer_tokens(view->layer_tokens),
      rows_epoch(NewRowsEpoch()) {}

uint32_t Snapshot::token_count() const {
  return *std::min_element(layer_tokens.begin(), layer_tokens.end());
}

uint32_t Snapshot::active_begin() const {
  return list->has_active_segment() ? list->segments.back().rows->first_position() : token_count();
}

PinnedActiveSegment PinActiveSegment(std::vector<uint32_t> layer_tokens, const SegmentRows* tail) {
  auto view = MakeView(std::move(layer_tokens), tail);
  auto pin = std::make_shared<TailPin>(view);
  return {.view = std::move(view), .pin = std::move(pin)};
}

std::shared_ptr<const Snapshot> CompleteSnapshot(SegmentList list,
                                                 std::vector<uint32_t> layer_tokens) {
  Complete(layer_tokens, list);
  return std::make_shared<const Snapshot>(std::make_shared<const SegmentList>(std::move(list)),
                                          std::move(layer_tokens));
}

Sequence::Sequence(uint64_t sequence_id, std::string session, uint32_t layer_count)
    : Sequence(sequence_id, std::move(session),
               Start{.first = CompleteSnapshot({}, std::vector<uint32_t>(layer_count, 0)),
                     .record = nullptr,
                     .views = {}}) {}

Sequence::Sequence(uint64_t sequence_id, std::string session, Start start)
    : sequence_id_(sequence_id),
      session_(std::move(session)),
      group_key_(std::move(start.group_key)),
      retention_(start.retention),
      suspended_(start.suspended),
      record_(std::move(start.record)),
      current_(std::move(start.first)),
      views_(std::move(start.views)),
      watchers_(std::make_shared<Watchers>()) {}

Sequence::~Sequence() = default;

absl::Status Sequence::DroppedError() const {
  return NotFound("sequence_id", absl::StrCat("sequence ", sequence_id_, " was dropped"));
}

absl::Status Sequence::SuspendedError() const {
  return FailedPrecondition("sequence_id",
                            absl::StrCat("sequence ", sequence_id_, " is suspended"));
}

absl::Status Sequence::CheckRunning() const {
  if (current_ == nullptr) return DroppedError();
  return suspended() ? SuspendedError() : absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Snapshot>> Sequence::Read() const {
  const MutexLock lock(&mutex_);
  RETURN_IF_ERROR(CheckRunning());
  return current_;
}

absl::StatusOr<std::shared_ptr<const Snapshot>> Sequence::Peek() const {
  const MutexLock lock(&mutex_);
  if (current_ == nullptr) return DroppedError();
  return current_;
}

absl::Status Sequence::BeginWrite() {
  return AcquireWriter(/*is_short=*/false, SteadyTime::InfinitePast());
}

absl::Status Sequence::BeginShortWrite(SteadyTime deadline) {
  return AcquireWriter(/*is_short=*/true, deadline);
}

absl::Status Sequence::AcquireWriter(bool is_short, SteadyTime deadline) {
  const MutexLock lock(&mutex_);
  const SteadyTime limit =
      writing_ ? std::max(deadline, SteadyTime::Now() + kShortWriteLimit) : deadline;
  for (;;) {
    RETURN_IF_ERROR(CheckRunning());
    if (!writing_) break;
    const SteadyTime until = short_ ? limit : is_short ? deadline : SteadyTime::InfinitePast();
    if (SteadyTime::Now() < until) {
      writer_done_.WaitUntil(&mutex_, until);
    } else {
      return Aborted("sequence_id",
                     absl::StrCat("another writer of sequence ", sequence_id_, " is in progress"),
                     kRetryConflict);
    }
  }
  if (!holds_.Acquire()) return DroppedError();  // claimed by the evictor
  writing_ = true;
  short_ = is_short;
  return absl::OkStatus();
}

void Sequence::EndWrite() {
  const MutexLock lock(&mutex_);
  writing_ = false;
  holds_.Release();
  writer_done_.SignalAll();
}

void Sequence::Prune() const {
  const SegmentRows* tail = current_->list->tail();
  std::erase_if(views_, [tail](const std::shared_ptr<const ActiveSegmentView>& view) {
    return view->tail != tail || view->drained.load(std::memory_order_acquire);
  });
}

bool Sequence::HasReadersBeyond(const std::vector<uint32_t>& layer_tokens) const {
  const MutexLock lock(&mutex_);
  if (current_ == nullptr) return false;
  Prune();
  return std::any_of(views_.begin(), views_.end(),
                     [&](const auto& view) { return ShowsMore(view->layer_tokens, layer_tokens); });
}

std::shared_ptr<const Sequence::Watchers> Sequence::watchers() const {
  const MutexLock lock(&mutex_);
  return watchers_;
}

absl::Status Sequence::Install(std::shared_ptr<Snapshot> next) {
  const Snapshot& shown = *next;
  if (record_ != nullptr) {
    RETURN_IF_ERROR(record_->Write(shown.list, shown.layer_tokens, suspended()));
  }
  std::shared_ptr<const Watchers> watchers;
  std::shared_ptr<const Snapshot> replaced;  // freed after the lock is released
  {
    const MutexLock lock(&mutex_);
    views_.push_back(current_->view);
    if (!ShowsMore(current_->layer_tokens, next->layer_tokens)) {
      next->rows_epoch = current_->rows_epoch;
    }
    replaced = std::exchange(current_, std::move(next));
    Prune();
    watchers = watchers_;
  }
  for (const auto& watcher : *watchers) watcher->OnPublish(shown);
  return absl::OkStatus();
}

absl::Status Sequence::ChangeList(const Snapshot& base, std::vector<uint32_t> layer_tokens,
                                  const std::function<absl::Status(SegmentList&)>& change) {
  auto list = std::make_shared<SegmentList>(*base.list);
  RETURN_IF_ERROR(change(*list));
  Complete(layer_tokens, *list);
  return Install(std::make_shared<Snapshot>(std::move(list), std::move(layer_tokens)));
}

absl::Status Sequence::PublishRows(std::vector<uint32_t> layer_tokens) {
  const MutexLock lock(&events_mutex_);
  ASSIGN_OR_RETURN(auto base, Read());
  return Install(std::make_shared<Snapshot>(base->list, std::move(layer_tokens)));
}

absl::Status Sequence::PublishRows(std::vector<uint32_t> layer_tokens, ListEdit edit) {
  const MutexLock lock(&events_mutex_);
  ASSIGN_OR_RETURN(auto base, Read());
  return ChangeList(*base, std::move(layer_tokens), [&](SegmentList& list) {
    std::vector<SegmentEntry>& segments = list.segments;
    for (SegmentEntry& entry : edit.entries) {  // background work may have added codes concurrently
      const auto same = FindSegment(segments, entry.rows->segment_id());
      if (same != segments.end()) entry.indexes = same->indexes;
    }
    while (!segments.empty() && segments.back().rows->first_position() >= edit.begin) {
      segments.pop_back();
    }
    std::move(edit.entries.begin(), edit.entries.end(), std::back_inserter(segments));
    if (edit.closes_prefill) list.prefill_closed = true;
    if (!edit.samples.empty()) list.samples = std::move(edit.samples);
    return absl::OkStatus();
  });
}

absl::Status Sequence::CloseActiveSegment() {
  const MutexLock lock(&events_mutex_);
  ASSIGN_OR_RETURN(auto base, Read());
  return ChangeList(*base, base->layer_tokens, [](SegmentList& list) {
    if (list.has_active_segment()) list.segments.back().closed = true;  // Complete sets token_end
    list.prefill_closed = true;
    return absl::OkStatus();
  });
}

absl::Status Sequence::Truncate(uint32_t token_count, uint64_t own_lease) {
  const MutexLock lock(&events_mutex_);
  ASSIGN_OR_RETURN(auto base, Read());
  std::vector<uint32_t> layer_tokens(base->layer_tokens.size(), token_count);
  if (layer_tokens == base->layer_tokens) return absl::OkStatus();
  {
    const MutexLock state_lock(&mutex_);
    for (BuiltIndex& built : built_) {
      built.tokens = std::min(built.tokens, token_count);
      built.building = std::min(built.building, token_count);
    }
  }
  bool left = false;
  for (const auto& watcher : *watchers()) {
    if (watcher->OnTruncate(token_count, own_lease)) left = true;
  }
  const std::vector<SegmentEntry>& segments = base->list->segments;
  if (left && base->list->has_active_segment()) {  // until another segment is the active one
    const MutexLock state_lock(&mutex_);
    views_.push_back(MakeView(base->layer_tokens, base->list->tail()));
  }
  const auto& samples = base->list->samples;
  const bool cuts_samples = std::any_of(samples.begin(), samples.end(), [&](const auto& each) {
    return each != nullptr && each->positions().back() >= token_count;
  });
  const bool list_stays = !segments.empty() && base->list->has_active_segment() &&
                          segments.back().rows->first_position() < token_count && !cuts_samples;
  if (list_stays) {
    return Install(std::make_shared<Snapshot>(base->list, std::move(layer_tokens)));
  }
  return ChangeList(*base, std::move(layer_tokens), [token_count](SegmentList& list) {
    CutAt(token_count, list.segments);
    return absl::OkStatus();
  });
}

Sequence::BuiltIndex& Sequence::BuiltOf(const IndexDescriptor& index) {
  const auto found = std::find_if(built_.begin(), built_.end(),
                                  [&](const BuiltIndex& built) { return built.index == index; });
  return found != built_.end() ? *found : built_.emplace_back(BuiltIndex{.index = index});
}

void Sequence::BeginBuild(const IndexDescriptor& index, uint32_t token_count) {
  const MutexLock lock(&mutex_);
  BuiltOf(index).building = token_count;
}

void Sequence::EndBuild(const IndexDescriptor& index, bool is_done) {
  const MutexLock lock(&mutex_);
  BuiltIndex& built = BuiltOf(index);
  if (is_done) built.tokens = built.building;
  built.building = 0;
}

uint32_t Sequence::BuiltTokens(const IndexDescriptor& index) const {
  const MutexLock lock(&mutex_);
  for (const BuiltIndex& built : built_) {
    if (built.index == index) return built.tokens;
  }
  return 0;
}

absl::Status Sequence::ReplaceSegments(std::span<const uint64_t> segment_ids,
                                       std::vector<SegmentEntry> replacement) {
  RETURN_IF_ERROR(CheckReplacement(replacement));
  if (segment_ids.empty()) return InvalidArgument("segment_ids", "empty");
  const MutexLock lock(&events_mutex_);
  ASSIGN_OR_RETURN(auto base, Peek());
  const uint32_t complete = base->token_count();
  return ChangeList(*base, base->layer_tokens, [&](SegmentList& list) -> absl::Status {
    const auto first = FindSegment(list.segments, segment_ids.front());
    const auto left = static_cast<size_t>(list.segments.end() - first);
    if (segment_ids.size() > left) return SegmentChangedError(segment_ids.front());
    const auto end = first + static_cast<ptrdiff_t>(segment_ids.size());
    for (auto entry = first; entry != end; ++entry) {
      const uint64_t id = segment_ids[static_cast<size_t>(entry - first)];
      if (entry->rows->segment_id() != id || !entry->closed) return SegmentChangedError(id);
    }
    const uint32_t token_end = (end - 1)->token_end;
    if (token_end > complete || token_end != replacement.back().token_end ||
        first->rows->first_position() != replacement.front().rows->first_position()) {
      return SegmentChangedError(segment_ids.back());
    }
    const auto place = list.segments.erase(first, end);
    list.segments.insert(place, std::make_move_iterator(replacement.begin()),
                         std::make_move_iterator(replacement.end()));
    return absl::OkStatus();
  });
}

absl::Status Sequence::PublishIndex(const IndexDescriptor& index,
                                    std::span<const IndexedSegment> segments) {
  const MutexLock lock(&events_mutex_);
  ASSIGN_OR_RETURN(auto base, Peek());
  if (segments.empty() && base->list->Find(index) < base->list->indexes.size()) {
    return absl::OkStatus();
  }
  return ChangeList(*base, base->layer_tokens, [&](SegmentList& list) -> absl::Status {
    const size_t ordinal = list.Find(index);
    if (ordinal == list.indexes.size()) {
      if (ordinal >= kMaxIndexes) {
        return ResourceExhausted(
            "index", absl::StrCat("a sequence has at most ", kMaxIndexes, " indexes"), kNoRetry);
      }
      list.indexes.push_back(index);
      for (SegmentEntry& entry : list.segments) entry.indexes.resize(ordinal + 1);
    }
    for (const IndexedSegment& indexed : segments) {
      const auto entry = FindSegment(list.segments, indexed.segment_id);
      if (entry == list.segments.end()) return SegmentChangedError(indexed.segment_id);
      entry->indexes[ordinal] = indexed.index;
    }
    return absl::OkStatus();
  });
}

absl::Status Sequence::RemoveIndex(const IndexDescriptor& index) {
  const MutexLock lock(&events_mutex_);
  ASSIGN_OR_RETURN(auto base, Peek());
  if (base->list->Find(index) == base->list->indexes.size()) return absl::OkStatus();
  return ChangeList(*base, base->layer_tokens, [&](SegmentList& list) {
    std::erase(list.indexes, index);  // Complete removes it from the entries
    return absl::OkStatus();
  });
}

absl::StatusOr<std::shared_ptr<const Snapshot>> Sequence::Share(uint32_t token_count,
                                                                bool partial_indexes) {
  auto base = Peek();  // held until the pin below exists
  if (!base.ok()) return base.status();
  if (token_count > (*base)->token_count()) {
    return OutOfRange("token_count", absl::StrCat(token_count, "; sequence ", sequence_id_, " has ",
                                                  (*base)->token_count()));
  }
  std::vector<uint32_t> layer_tokens((*base)->layer_tokens.size(), token_count);
  auto list = std::make_shared<SegmentList>(*(*base)->list);
  while (!list->segments.empty() && list->segments.back().rows->first_position() >= token_count) {
    list->segments.pop_back();
  }
  for (SegmentEntry& entry : list->segments) {
    std::shared_ptr<const void> tail = entry.use->tail();
    if (!entry.closed) {
      PinnedActiveSegment pinned = PinActiveSegment(layer_tokens, entry.rows.get());
      tail = std::move(pinned.pin);
      const MutexLock lock(&mutex_);
      views_.push_back(std::move(pinned.view));
    } else if (tail == nullptr && entry.token_end > (*base)->token_count()) {
      tail = entry.rows;  // some layers of this sequence still write it
    }
    entry.token_end = std::min(entry.closed ? entry.token_end : token_count, token_count);
    entry.closed = true;
    entry.use = std::make_shared<SegmentUse>(entry.rows, std::move(tail));
  }
  Complete(layer_tokens, *list);
  if (!partial_indexes) {
    std::vector<IndexDescriptor> ready;
    for (size_t i = 0; i < list->indexes.size(); ++i) {
      if (list->index_ready(i)) ready.push_back(list->indexes[i]);
    }
    list->indexes = std::move(ready);
    Complete(layer_tokens, *list);
  }
  return std::make_shared<const Snapshot>(std::move(list), std::move(layer_tokens));
}

absl::StatusOr<std::shared_ptr<const Snapshot>> Sequence::Watch(
    std::shared_ptr<SequenceWatcher> watcher) {
  const MutexLock lock(&mutex_);
  if (current_ == nullptr) return DroppedError();
  auto watchers = std::make_shared<Watchers>(*watchers_);
  watchers->push_back(std::move(watcher));
  watchers_ = std::move(watchers);
  return current_;
}

void Sequence::Unwatch(const SequenceWatcher* watcher) {
  std::shared_ptr<const Watchers> old;  // destroyed after the lock is released
  const MutexLock lock(&mutex_);
  auto watchers = std::make_shared<Watchers>(*watchers_);
  std::erase_if(*watchers, [watcher](const auto& other) { return other.get() == watcher; });
  old = std::exchange(watchers_, std::move(watchers));
}

absl::StatusOr<uint32_t> Sequence::Suspend(bool suspended) {
  const MutexLock lock(&events_mutex_);
  std::shared_ptr<const Snapshot> shown;
  std::shared_ptr<const Watchers> watchers;
  {
    const MutexLock state_lock(&mutex_);
    if (current_ == nullptr) return DroppedError();
    shown = current_;
    watchers = watchers_;
    if (suspended_.load() == suspended) return shown->token_count();
  }
  if (record_ != nullptr) {
    RETURN_IF_ERROR(record_->Write(shown->list, shown->layer_tokens, suspended));
  }
  {
    const MutexLock state_lock(&mutex_);
    suspended_.store(suspended, std::memory_order_release);
  }
  for (const auto& watcher : *watchers) watcher->OnSuspend(suspended);
  return shown->token_count();
}

absl::Status Sequence::PinUntil(int64_t boot_nanos) {
  const MutexLock lock(&events_mutex_);
  std::shared_ptr<const Snapshot> shown;
  {
    const MutexLock state_lock(&mutex_);
    if (current_ == nullptr) return DroppedError();
    shown = current_;
  }
  if (record_ != nullptr) {
    RETURN_IF_ERROR(record_->Write(shown->list, shown->layer_tokens, suspended(), boot_nanos));
  }
  holds_.PinUntil(boot_nanos);
  return absl::OkStatus();
}

void Sequence::Drop() {
  dropped_.store(true, std::memory_order_release);
  std::shared_ptr<const Snapshot> last;  // destroyed after the locks are released
  std::shared_ptr<const Watchers> watchers;
  const MutexLock lock(&events_mutex_);
  {
    const MutexLock state_lock(&mutex_);
    if (current_ == nullptr) return;
    if (record_ != nullptr) record_->Remove();
    last.swap(current_);
    views_.clear();
    watchers = std::exchange(watchers_, std::make_shared<const Watchers>());
  }
  for (const auto& watcher : *watchers) watcher->OnDrop();
  record_.reset();
}

absl::StatusOr<WriteLease> WriteLease::Acquire(std::shared_ptr<Sequence> sequence) {
  RETURN_IF_ERROR(sequence->BeginWrite());
  return WriteLease(std::move(sequence));
}

absl::StatusOr<WriteLease> WriteLease::TakeShort(std::shared_ptr<Sequence> sequence,
                                                 SteadyTime deadline) {
  RETURN_IF_ERROR(sequence->BeginShortWrite(deadline));
  return WriteLease(std::move(sequence));
}

}  // namespace pqcached::kvstore
