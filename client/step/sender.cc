#include "client/step/sender.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <utility>

#include "client/base/error.h"
#include "client/local/sequence.h"
#include "client/step/handles.h"

namespace pqcached::client {
namespace {

// Limits of the queue, in bytes and in handovers: a new step waits while it is longer.
constexpr uint64_t kMaxWaitingBytes = uint64_t{64} << 20;
constexpr uint64_t kMaxWaitingCount = 4096;
// Limit of one message: below every max_message_bytes, with room for the other fields.
constexpr uint64_t kMaxBatchBytes = uint64_t{4} << 20;
constexpr std::chrono::milliseconds kFirstPause(1);
constexpr std::chrono::milliseconds kLongestPause(200);
constexpr std::chrono::seconds kLongestBusy(10);

// Idle handovers that are kept for later steps.
constexpr size_t kMaxIdleCount = 1024;

// Withdraws a roll-back that will not be sent.
void GiveUpRollBack(const Handover& handover) {
  LocalSequence* local = handover.sequence->local.get();
  if (local && handover.roll_back_to != Handover::kNoRollBack) local->EndRollBack();
}

pqc_status FailNotStored() {
  return SetRetry(kRetryQueue,
                  Fail(PQC_DEADLINE_EXCEEDED, "", "rows of earlier steps are not stored in time"));
}

// Returns the index in the field "items[i]..." of a refused Append, or `count` when there is none.
size_t FailedItem(const RefusalBuffer& refusal, size_t count) {
  constexpr std::string_view kItems = "items[";
  const std::string_view field = refusal.field;
  if (!field.starts_with(kItems)) return count;
  size_t item = count;
  std::from_chars(field.data() + kItems.size(), field.data() + field.size(), item);
  return std::min(item, count);
}

// Returns the beginning "items[i]" of the field of a refused Append, or "" when there is none. The
// caller's items are others: the sender puts rows of several steps into one Append.
std::string ItemPath(const RefusalBuffer& refusal) {
  const std::string_view field = refusal.field;
  return field.starts_with("items[") ? std::string(field.substr(0, field.find(']') + 1)) : "";
}

// Returns whether the refused field belongs to a reference into the staging ring:
// "items[0].rows[1].keys.staging.slot".
bool IsAboutStaging(const RefusalBuffer& refusal) {
  constexpr std::string_view kStaging = ".staging";
  const std::string_view field = refusal.field;
  const size_t found = field.find(kStaging);
  if (found == std::string_view::npos) return false;
  const size_t end = found + kStaging.size();
  return end == field.size() || field[end] == '.';
}

// Changes the field of a refused Ingest of one layer to that of a Commit of all layers.
void NameLayer(size_t layer, RefusalBuffer* refusal) {
  constexpr std::string_view kRows = "chunk.rows";
  const std::string field = refusal->field;
  if (!field.starts_with(kRows)) return;
  SetRefusal(refusal, FieldPath::Of("rows[%zu]%s", layer, field.c_str() + kRows.size()).c_str(),
             std::string(refusal->text).c_str());
}

// Returns whether a repetition of the same call may succeed.
bool IsRetryable(pqc_status status, const RefusalBuffer& refusal) {
  if (status == PQC_UNAVAILABLE) return refusal.retry_ms != kNoRetry;
  // A lease that another thread has just released: the next attempt has the new one.
  const bool old_lease =
      status == PQC_NOT_FOUND && std::string_view(refusal.field).ends_with("lease_id");
  return status == PQC_ABORTED || status == PQC_DEADLINE_EXCEEDED || old_lease;
}

// Arrays to which the items of one Append refer.
struct Message {
  Message(const std::vector<std::shared_ptr<Handover>>& batch, bool staged) : images(batch.size()) {
    size_t layer_count = 0;
    for (const auto& handover : batch) layer_count += handover->layers.size();
    places.resize(layer_count);
    blocks.resize(layer_count);
    items.reserve(batch.size());
    names.reserve(batch.size());
    const auto names_of = [&](const Handover& handover) -> const pqc_row_options* {
      if (handover.names.empty()) return nullptr;
      names.push_back(handover.names.view());
      return &names.back();
    };
    size_t begin = 0;
    for (size_t i = 0; i < batch.size(); ++i) {
      const Handover& handover = *batch[i];
      const size_t count = handover.layers.size();
      const bool by_place = staged && handover.staged.IsUsable();
      handover.Describe(std::span(places).subspan(begin, by_place ? count : 0),
                        std::span(blocks).subspan(begin, count));
      const LocalSequence* local = handover.sequence->local.get();
      items.push_back({.sequence_id = handover.sequence->sequence_id,
                       .first_position = handover.first_position,
                       .rows = blocks.data() + begin,
                       .row_block_count = static_cast<uint32_t>(count),
                       .names = names_of(handover),
                       .lease = local ? local->lease() : LeaseView{},
                       .image = local ? images[i].sink() : ImageSink{}});
      begin += count;
    }
  }

  std::vector<SentRows> places;
  std::vector<RowBlock> blocks;
  std::vector<ImageBytes> images;
  std::vector<pqc_row_options> names;  // never reallocated
  std::vector<AppendItem> items;
};

}  // namespace

Sender::Sender(Remote& remote, Staging* staging) : remote_(remote), slots_(staging) {
  idle_.reserve(kMaxIdleCount);
}

Sender::~Sender() {
  {
    const base::MutexLock lock(&mutex_);
    stop_ = true;
  }
  stopping_.SignalAll();
  done_.SignalAll();
  worker_.Stop();
}

std::shared_ptr<Handover> Sender::Lend() {
  {
    const base::MutexLock lock(&mutex_);
    if (!idle_.empty()) {
      std::shared_ptr<Handover> lent = std::move(idle_.back());
      idle_.pop_back();
      return lent;
    }
  }
  return std::make_shared<Handover>();
}

void Sender::ReturnHandover(std::shared_ptr<Handover> handover) {
  {
    const base::MutexLock lock(&mutex_);
    // the last holder also calls this function
    if (handover.use_count() > 1) return handover.reset();
  }
  handover->Clear();  // this may destroy a sequence's state
  const base::MutexLock lock(&mutex_);
  if (idle_.size() < kMaxIdleCount) idle_.push_back(std::move(handover));
}

void Sender::Add(std::span<std::shared_ptr<Handover>> handovers) {
  {
    const base::MutexLock lock(&mutex_);
    for (std::shared_ptr<Handover>& handover : handovers) {
      if (!handover->rolls_back() && handover->token_count == 0) continue;
      Progress& progress = sequences_[handover->sequence.get()];
      if (progress.failure.status != PQC_OK) {  // a gap: no later rows can be stored
        GiveUpRollBack(*handover);
        continue;
      }
      const uint64_t end = handover->first_position + handover->token_count;
      // Rows of a prefill replace nothing: those that are enqueued again are the same ones.
      const bool replaces = progress.waiting.empty() || !handover->is_prefill;
      progress.end = replaces ? end : std::max(progress.end, end);
      waiting_bytes_ += handover->row_bytes;
      ++waiting_count_;
      progress.waiting.Push(std::move(handover));
    }
  }
  worker_.Run([this] { SendQueued(); });
  for (std::shared_ptr<Handover>& handover : handovers) {
    if (handover) ReturnHandover(std::move(handover));
  }
}

std::shared_ptr<Handover> Sender::DropFirstLocked(Progress& progress) {
  std::shared_ptr<Handover> first = progress.waiting.Pop();
  waiting_bytes_ -= first->row_bytes;
  --waiting_count_;
  return first;
}

pqc_status Sender::ReportLocked(const Progress& progress) const {
  if (progress.failure.status == PQC_OK) return PQC_OK;
  const RefusalBuffer& refusal = progress.failure.refusal;
  return PrefixText("rows of an earlier step",
                    Report(progress.failure.status, refusal,
                           {{"rows", "layers"},
                            {"header.names.begin", "options.names_begin"},
                            {"header.names", "options"},
                            {"names.begin", "options.names_begin"},
                            {"names", "options"},
                            {ItemPath(refusal) + ".rows", "layers"},
                            {ItemPath(refusal) + ".names.begin", "options.names_begin"},
                            {ItemPath(refusal) + ".names", "options"},
                            {ItemPath(refusal), ""}}));
}

pqc_status Sender::WaitForRoom(Clock::time_point deadline) {
  const base::MutexLock lock(&mutex_);
  const bool room = done_.WaitUntil(&mutex_, deadline, [this]() PQCACHED_REQUIRES(mutex_) {
    return stop_ || (waiting_bytes_ <= kMaxWaitingBytes && waiting_count_ <= kMaxWaitingCount);
  });
  if (room) return PQC_OK;
  return SetRetry(kRetryQueue,
                  Fail(PQC_DEADLINE_EXCEEDED, "step",
                       "the sidecar is slower than the engine: %llu MiB of rows wait to be sent",
                       static_cast<unsigned long long>(waiting_bytes_ >> 20)));
}

pqc_status Sender::Flush(const SequenceState& sequence, Clock::time_point deadline) {
  const base::MutexLock lock(&mutex_);
  auto found = sequences_.end();
  // Finds it again after each wait: an operation may flush a sequence that is dropped concurrently.
  const bool done = done_.WaitUntil(&mutex_, deadline, [&]() PQCACHED_REQUIRES(mutex_) {
    found = sequences_.find(&sequence);
    return stop_ || found == sequences_.end() || found->second.waiting.empty();
  });
  if (!done) return FailNotStored();
  if (found == sequences_.end()) return PQC_OK;
  const pqc_status status = ReportLocked(found->second);
  found->second.failure = {};
  return status;
}

pqc_status Sender::Check(const SequenceState& sequence) {
  const base::MutexLock lock(&mutex_);
  const auto found = sequences_.find(&sequence);
  return found == sequences_.end() ? PQC_OK : ReportLocked(found->second);
}

pqc_status Sender::WaitStored(const SequenceState& sequence, uint64_t token_count,
                              Clock::time_point deadline) {
  const base::MutexLock lock(&mutex_);
  const auto found = sequences_.find(&sequence);
  if (found == sequences_.end()) return PQC_OK;
  const Progress& progress = found->second;
  const bool done = done_.WaitUntil(&mutex_, deadline, [&]() PQCACHED_REQUIRES(mutex_) {
    return stop_ || progress.failure.status != PQC_OK || progress.waiting.empty() ||
           (!progress.waiting.front()->rolls_back() &&
            progress.waiting.front()->first_position >= token_count);
  });
  if (!done) return FailNotStored();
  return ReportLocked(progress);
}

bool Sender::QueuedEnd(const SequenceState& sequence, uint64_t* end) {
  const base::MutexLock lock(&mutex_);
  const auto found = sequences_.find(&sequence);
  if (found == sequences_.end() || found->second.waiting.empty()) return false;
  *end = found->second.end;
  return true;
}

pqc_status Sender::Hold(const SequenceState& sequence,
                        std::vector<std::shared_ptr<Handover>>* queued) {
  const base::MutexLock lock(&mutex_);
  const auto found = sequences_.find(&sequence);
  if (found == sequences_.end()) return PQC_OK;
  for (std::shared_ptr<Handover> next = found->second.waiting.front(); next; next = next->next) {
    queued->push_back(next);
  }
  return ReportLocked(found->second);
}

void Sender::RemoveSequence(const SequenceState& sequence) {
  Batch forgotten;
  {
    const base::MutexLock lock(&mutex_);
    const auto found = sequences_.find(&sequence);
    if (found == sequences_.end()) return;
    Progress& progress = found->second;
    while (!progress.waiting.empty()) forgotten.push_back(DropFirstLocked(progress));
    sequences_.erase(found);
  }
  done_.SignalAll();
  for (auto& handover : forgotten) ReturnHandover(std::move(handover));
}

void Sender::SendQueued() {
  for (;;) {
    Batch batch;
    {
      const base::MutexLock lock(&mutex_);
      if (stop_) return;
      batch = TakeBatchLocked();
      if (batch.empty()) return;
    }
    // Steps before the ring is open, and all steps when there is no ring, are sent inline.
    if (const uint64_t worker = slots_.boot_word(); worker != opened_at_) {
      opened_at_ = worker;
      slots_.Open();
    }
    try {
      Batch left = batch;
      RollBack(&left);
      Send(std::move(left));
    } catch (const std::bad_alloc&) {
      RefusalBuffer refusal;
      SetRefusal(&refusal, "", "the client is out of memory");
      for (const auto& handover : batch) CompleteFirst(*handover, PQC_RESOURCE_EXHAUSTED, refusal);
    }
    for (auto& handover : batch) ReturnHandover(std::move(handover));
  }
}

// Takes the first handover of each sequence, as many as fit into one message; the sequences take
// turns.
Sender::Batch Sender::TakeBatchLocked() {
  Batch batch;
  uint64_t bytes = 0;
  auto next = sequences_.upper_bound(last_taken_);
  for (size_t i = 0; i < sequences_.size(); ++i, ++next) {
    if (next == sequences_.end()) next = sequences_.begin();
    const Progress& progress = next->second;
    if (progress.waiting.empty()) continue;
    const Handover& first = *progress.waiting.front();
    if (first.is_prefill && !batch.empty()) continue;  // has a message of its own
    const uint64_t more = first.row_bytes + first.names.size_bytes();
    if (!batch.empty() && (bytes + more > kMaxBatchBytes || batch.size() == kMaxBatchItems)) break;
    batch.push_back(progress.waiting.front());
    bytes += more;
    last_taken_ = next->first;
    if (first.is_prefill) break;
  }
  return batch;
}

bool Sender::stop_requested() {
  const base::MutexLock lock(&mutex_);
  return stop_;
}

bool Sender::PauseBeforeRepeat(pqc_status status, const RefusalBuffer& refusal,
                               Clock::time_point give_up, std::chrono::milliseconds* pause) {
  // A session that may resume will have a worker again that accepts the rows.
  const bool in_time = status == PQC_UNAVAILABLE || Clock::now() < give_up;
  if (!IsRetryable(status, refusal) || !in_time) return false;
  const base::MutexLock lock(&mutex_);
  const bool stopped =
      stopping_.WaitFor(&mutex_, *pause, [this]() PQCACHED_REQUIRES(mutex_) { return stop_; });
  *pause = std::min(2 * *pause, kLongestPause);
  return !stopped;
}

void Sender::RollBack(Batch* batch) {
  Batch left;
  for (const auto& handover : *batch) {
    if (!handover->rolls_back()) {
      left.push_back(handover);
      continue;
    }
    LocalSequence* local = handover->sequence->local.get();
    ImageBytes image;
    RefusalBuffer error;
    LeaseView lease;
    const auto give_up = Clock::now() + kLongestBusy;
    std::chrono::milliseconds pause = kFirstPause;
    pqc_status status = PQC_OK;
    do {
      lease = local ? local->lease() : LeaseView{};
      status = remote_.TruncateSequence(handover->sequence->sequence_id, handover->roll_back_to,
                                        lease, local ? image.sink() : ImageSink{}, &error);
    } while (status != PQC_OK && PauseBeforeRepeat(status, error, give_up, &pause));
    if (status == PQC_OK) handover->sequence->SetTruncated(handover->roll_back_to);
    if (local) {
      if (status == PQC_OK) status = local->Install(lease, image);
      local->EndRollBack();
    }
    if (status != PQC_OK || handover->token_count == 0) {
      CompleteFirst(*handover, status, error);
    } else {
      left.push_back(handover);
    }
  }
  *batch = std::move(left);
}

pqc_status Sender::IngestOnce(Handover& handover, bool staged, RefusalBuffer* error) {
  const bool by_place = staged && handover.staged.IsUsable();
  std::vector<SentRows> places(by_place ? handover.layers.size() : 0);
  std::vector<RowBlock> blocks(handover.layers.size());
  handover.Describe(places, blocks);
  const pqc_row_options names = handover.names.view();
  SequenceState& sequence = *handover.sequence;
  pqc_status status = PQC_OK;
  if (by_place) {
    if (!handover.names.empty()) blocks.front().names = &names;
    slots_.Use();
    uint64_t token_count = 0;
    status = remote_.Commit(sequence.sequence_id, handover.first_position, blocks.data(),
                            static_cast<uint32_t>(blocks.size()), &token_count, error);
    if (status == PQC_OK || MayStillBeRead(status)) {
      handover.staged.SetMayBeRead(status != PQC_OK);
    }
  } else {
    if (!handover.names.empty()) blocks.back().names = &names;
    for (size_t i = 0; status == PQC_OK && i < blocks.size(); ++i) {
      status = remote_.Ingest(sequence.sequence_id, handover.first_position, blocks[i], error);
      if (status != PQC_OK) NameLayer(i, error);
    }
  }
  if (status != PQC_OK) return status;
  for (const RowBlock& block : blocks) {
    sequence.AddIngested(block.layer, handover.first_position + handover.token_count);
  }
  return PQC_OK;
}

pqc_status Sender::SendOnce(const Batch& batch, bool staged, RefusalBuffer* error) {
  if (batch.front()->is_prefill) return IngestOnce(*batch.front(), staged, error);
  Message message(batch, staged);
  slots_.Use();
  const pqc_status status =
      remote_.Append(message.items.data(), static_cast<uint32_t>(message.items.size()), error);
  for (const auto& handover : batch) {
    if (staged && (status == PQC_OK || MayStillBeRead(status))) {
      handover->staged.SetMayBeRead(status != PQC_OK);
    }
  }
  if (status != PQC_OK) return status;
  for (size_t i = 0; i < batch.size(); ++i) {
    batch[i]->sequence->token_count = message.items[i].token_count;
    if (LocalSequence* local = batch[i]->sequence->local.get()) {
      // An invalid image does no harm here: the next step requests one and reports the error.
      local->Install(message.items[i].lease, message.images[i]);
      local->KnowStored();
    }
  }
  return PQC_OK;
}

void Sender::Send(Batch batch) {
  const auto give_up = Clock::now() + kLongestBusy;
  std::chrono::milliseconds pause = kFirstPause;
  bool staged = true;
  while (!batch.empty()) {
    RefusalBuffer error;
    const pqc_status status = SendOnce(batch, staged, &error);
    if (status == PQC_OK) {
      for (const auto& handover : batch) CompleteFirst(*handover, PQC_OK, {});
      return;
    }
    if (staged && !MayStillBeRead(status) && IsAboutStaging(error)) {
      staged = false;  // an earlier attempt still uses the slot, or the ring is gone
      continue;
    }
    // When an item fails, the items before it are stored.
    const size_t blamed = FailedItem(error, batch.size());
    if (PauseBeforeRepeat(status, error, give_up, &pause)) continue;
    if (stop_requested()) return;
    if (blamed < batch.size() && batch.size() > 1) {
      // The others are sent again; those that are already stored are harmless repeats.
      CompleteFirst(*batch[blamed], status, error);
      batch.erase(batch.begin() + static_cast<ptrdiff_t>(blamed));
      continue;
    }
    if (batch.size() > 1) {  // no item is named: sent alone, the failing one is identified
      for (const auto& handover : batch) Send({handover});
      return;
    }
    CompleteFirst(*batch[0], status, error);
    return;
  }
}

void Sender::CompleteFirst(const Handover& handover, pqc_status status,
                           const RefusalBuffer& refusal) {
  Batch settled;
  {
    const base::MutexLock lock(&mutex_);
    const auto found = sequences_.find(handover.sequence.get());
    if (found == sequences_.end()) return;  // forgotten concurrently
    Progress& progress = found->second;
    if (progress.waiting.front().get() != &handover) return;  // already settled
    settled.push_back(DropFirstLocked(progress));
    if (status != PQC_OK) {
      progress.failure = {status, refusal};
      while (!progress.waiting.empty()) {
        // The failed handover's own roll-back, if it had one, has ended.
        GiveUpRollBack(*progress.waiting.front());
        settled.push_back(DropFirstLocked(progress));
      }
    }
  }
  for (auto& dropped : settled) ReturnHandover(std::move(dropped));
  done_.SignalAll();
}

}  // namespace pqcached::client
