#include "client/sender.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "client/error.h"
#include "client/local/sequence.h"

namespace pqcached::client {
namespace {

// A step waits while this much is on its way.
constexpr uint64_t kMaxWaitingBytes = uint64_t{64} << 20;
constexpr uint64_t kMaxWaitingCount = 4096;
// Of one message: below every max_message_bytes, with room for the other fields.
constexpr uint64_t kMaxBatchBytes = uint64_t{4} << 20;
constexpr std::chrono::milliseconds kFirstPause(1);
constexpr std::chrono::milliseconds kLongestPause(200);
constexpr std::chrono::seconds kLongestBusy(10);

uint64_t BytesOf(const Handover& handover) {
  uint64_t bytes = 0;
  for (const KeptRows& rows : handover.layers) bytes += rows.keys.size() + rows.values.size();
  return bytes;
}

TensorView ViewOf(const std::vector<std::byte>& data, pqc_dtype dtype, uint64_t tokens,
                  uint32_t heads, uint32_t dim) {
  return {.data = data.data(),
          .dtype = dtype,
          .ndim = 3,
          .shape = {tokens, heads, dim},
          .strides = {static_cast<int64_t>(uint64_t{heads} * dim), dim, 1}};
}

std::vector<RowBlock> BlocksOf(const Handover& handover) {
  std::vector<RowBlock> blocks;
  blocks.reserve(handover.layers.size());
  for (const KeptRows& rows : handover.layers) {
    blocks.push_back({.layer = rows.layer,
                      .keys = ViewOf(rows.keys, rows.key_dtype, handover.token_count,
                                     rows.shape.kv_heads, rows.shape.key_dim),
                      .values = ViewOf(rows.values, rows.value_dtype, handover.token_count,
                                       rows.shape.kv_heads, rows.shape.value_dim)});
  }
  return blocks;
}

// A roll-back that is not asked for any more.
void GiveUpRollBack(const Handover& handover) {
  LocalSequence* local = handover.sequence->local.get();
  if (local && handover.roll_back_to != Handover::kNoRollBack) local->EndRollBack();
}

// The item that a message of Append blames, or `count`.
size_t BlamedItem(const char* text, size_t count) {
  constexpr char kPrefix[] = "items[";
  const char* found = std::strstr(text, kPrefix);
  if (!found) return count;
  size_t item = count;
  found += std::strlen(kPrefix);
  std::from_chars(found, found + std::strlen(found), item);
  return std::min(item, count);
}

}  // namespace

Sender::Sender(Remote& remote) : remote_(remote) {}

Sender::~Sender() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  done_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Sender::Add(std::vector<Handover> handovers) {
  {
    const std::lock_guard lock(mutex_);
    for (Handover& handover : handovers) {
      if (handover.roll_back_to == Handover::kNoRollBack && handover.token_count == 0) continue;
      Progress& progress = sequences_[handover.sequence.get()];
      if (progress.failure.status != PQC_OK) {  // a gap: nothing behind it can be stored
        GiveUpRollBack(handover);
        continue;
      }
      progress.end = handover.first_position + handover.token_count;
      waiting_bytes_ += BytesOf(handover);
      ++waiting_count_;
      progress.waiting.push_back(std::make_shared<Handover>(std::move(handover)));
    }
    if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  }
  work_.notify_one();
}

pqc_status Sender::ReportLocked(const Progress& progress) const {
  if (progress.failure.status == PQC_OK) return PQC_OK;
  return Fail(progress.failure.status, "rows of an earlier step: %s",
              progress.failure.text.c_str());
}

pqc_status Sender::WaitForRoom(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const bool room = done_.wait_until(lock, deadline, [this] {
    return stop_ || (waiting_bytes_ <= kMaxWaitingBytes && waiting_count_ <= kMaxWaitingCount);
  });
  if (room) return PQC_OK;
  return Fail(PQC_DEADLINE_EXCEEDED, "step: the sidecar does not keep up: %llu MiB of rows wait",
              static_cast<unsigned long long>(waiting_bytes_ >> 20));
}

pqc_status Sender::Flush(const SequenceState& sequence, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const auto found = sequences_.find(&sequence);
  if (found == sequences_.end()) return PQC_OK;
  Progress& progress = found->second;
  const bool done =
      done_.wait_until(lock, deadline, [&] { return stop_ || progress.waiting.empty(); });
  if (!done) return Fail(PQC_DEADLINE_EXCEEDED, "rows of earlier steps are not stored in time");
  const pqc_status status = ReportLocked(progress);
  progress.failure = {};
  return status;
}

pqc_status Sender::Check(const SequenceState& sequence) {
  const std::lock_guard lock(mutex_);
  const auto found = sequences_.find(&sequence);
  return found == sequences_.end() ? PQC_OK : ReportLocked(found->second);
}

pqc_status Sender::WaitStored(const SequenceState& sequence, uint64_t token_count,
                              Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const auto found = sequences_.find(&sequence);
  if (found == sequences_.end()) return PQC_OK;
  const Progress& progress = found->second;
  const bool done = done_.wait_until(lock, deadline, [&] {
    return stop_ || progress.failure.status != PQC_OK || progress.waiting.empty() ||
           (progress.waiting.front()->roll_back_to == Handover::kNoRollBack &&
            progress.waiting.front()->first_position >= token_count);
  });
  if (!done) return Fail(PQC_DEADLINE_EXCEEDED, "rows of earlier steps are not stored in time");
  return ReportLocked(progress);
}

bool Sender::HandedInEnd(const SequenceState& sequence, uint64_t* end) {
  const std::lock_guard lock(mutex_);
  const auto found = sequences_.find(&sequence);
  if (found == sequences_.end() || found->second.waiting.empty()) return false;
  *end = found->second.end;
  return true;
}

void Sender::Forget(const SequenceState& sequence) {
  const std::lock_guard lock(mutex_);
  const auto found = sequences_.find(&sequence);
  if (found == sequences_.end()) return;
  for (const auto& handover : found->second.waiting) {
    waiting_bytes_ -= BytesOf(*handover);
    --waiting_count_;
  }
  sequences_.erase(found);
  done_.notify_all();
}

void Sender::Run() {
  for (;;) {
    Batch batch;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [&] {
        if (stop_) return true;
        batch = TakeBatchLocked();
        return !batch.empty();
      });
      if (stop_) return;
    }
    try {
      RollBack(&batch);
      Send(batch);
    } catch (const std::bad_alloc&) {
      for (const auto& handover : batch) {
        Settle(*handover, PQC_RESOURCE_EXHAUSTED, "the client is out of memory");
      }
    }
  }
}

// The first of each sequence, as many as fit into one message; the sequences take turns.
Sender::Batch Sender::TakeBatchLocked() {
  Batch batch;
  uint64_t bytes = 0;
  auto next = sequences_.upper_bound(last_taken_);
  for (size_t i = 0; i < sequences_.size(); ++i, ++next) {
    if (next == sequences_.end()) next = sequences_.begin();
    const Progress& progress = next->second;
    if (progress.waiting.empty()) continue;
    const uint64_t more = BytesOf(*progress.waiting.front());
    if (!batch.empty() && (bytes + more > kMaxBatchBytes || batch.size() == kMaxBatchItems)) break;
    batch.push_back(progress.waiting.front());
    bytes += more;
    last_taken_ = next->first;
  }
  return batch;
}

void Sender::RollBack(Batch* batch) {
  Batch left;
  for (const auto& handover : *batch) {
    if (handover->roll_back_to == Handover::kNoRollBack) {
      left.push_back(handover);
      continue;
    }
    LocalSequence* local = handover->sequence->local.get();
    ImageBytes image;
    ErrorText error;
    pqc_status status =
        remote_.TruncateSequence(handover->sequence->sequence_id, handover->roll_back_to,
                                 local ? local->lease() : LeaseView{},
                                 local ? image.sink() : ImageSink{}, Waiting::kNobody, &error);
    if (status == PQC_OK) handover->sequence->token_count = handover->roll_back_to;
    if (local) {
      if (status == PQC_OK) status = local->Install(image);
      local->EndRollBack();
    }
    if (status != PQC_OK || handover->token_count == 0) {
      Settle(*handover, status, error.text);
    } else {
      left.push_back(handover);
    }
  }
  *batch = std::move(left);
}

void Sender::Send(Batch batch) {
  const auto give_up = Clock::now() + kLongestBusy;
  std::chrono::milliseconds pause = kFirstPause;
  while (!batch.empty()) {
    std::vector<std::vector<RowBlock>> blocks;
    std::vector<ImageBytes> images(batch.size());
    std::vector<AppendItem> items;
    for (size_t i = 0; i < batch.size(); ++i) {
      blocks.push_back(BlocksOf(*batch[i]));
      const LocalSequence* local = batch[i]->sequence->local.get();
      items.push_back({.sequence_id = batch[i]->sequence->sequence_id,
                       .first_position = batch[i]->first_position,
                       .rows = blocks[i].data(),
                       .row_block_count = static_cast<uint32_t>(blocks[i].size()),
                       .lease = local ? local->lease() : LeaseView{},
                       .image = local ? images[i].sink() : ImageSink{}});
    }
    ErrorText error;
    const pqc_status status =
        remote_.Append(items.data(), static_cast<uint32_t>(items.size()), Waiting::kNobody, &error);
    // When one fails, those before it are stored; so are all when none does.
    const size_t blamed = status == PQC_OK ? batch.size() : BlamedItem(error.text, batch.size());
    for (size_t i = 0; status == PQC_OK && i < batch.size(); ++i) {
      batch[i]->sequence->token_count = items[i].token_count;
      if (LocalSequence* local = batch[i]->sequence->local.get()) {
        // A wrong image does no harm here: the next step asks for one and tells what is wrong.
        local->Install(images[i]);
      }
    }
    if (status == PQC_OK) {
      for (const auto& handover : batch) Settle(*handover, PQC_OK, "");
      return;
    }
    const bool session_lost =
        status == PQC_UNAVAILABLE && std::strstr(error.text, "session is lost") != nullptr;
    // A lease that another thread has just given back: the next attempt has the new one.
    const bool old_lease = status == PQC_NOT_FOUND && std::strstr(error.text, "lease") != nullptr;
    const bool again = (status == PQC_UNAVAILABLE && !session_lost) || status == PQC_ABORTED ||
                       status == PQC_DEADLINE_EXCEEDED || old_lease;
    if (again && Clock::now() < give_up) {
      std::unique_lock lock(mutex_);
      if (work_.wait_for(lock, pause, [this] { return stop_; })) return;
      pause = std::min(2 * pause, kLongestPause);
      continue;
    }
    if (blamed < batch.size() && batch.size() > 1) {
      // The others are sent again, those that were stored as repeats.
      Settle(*batch[blamed], status, error.text);
      batch.erase(batch.begin() + static_cast<ptrdiff_t>(blamed));
      continue;
    }
    if (batch.size() > 1) {  // nobody is blamed: alone, it is clear who fails
      for (const auto& handover : batch) Send({handover});
      return;
    }
    Settle(*batch[0], status, error.text);
    return;
  }
}

void Sender::Settle(const Handover& handover, pqc_status status, const char* text) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = sequences_.find(handover.sequence.get());
    if (found == sequences_.end()) return;  // forgotten meanwhile
    Progress& progress = found->second;
    const auto drop_first = [&] {
      waiting_bytes_ -= BytesOf(*progress.waiting.front());
      --waiting_count_;
      progress.waiting.pop_front();
    };
    if (status == PQC_OK) {
      drop_first();
    } else {
      progress.failure = {status, text};
      while (!progress.waiting.empty()) {
        // The failed one's roll-back, when it had one, is over.
        if (progress.waiting.front().get() != &handover) GiveUpRollBack(*progress.waiting.front());
        drop_first();
      }
    }
  }
  done_.notify_all();
}

}  // namespace pqcached::client
