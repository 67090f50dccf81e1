#include "tests/fault/kill_world.h"

#include <signal.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <string>

#include "absl/time/clock.h"
#include "kvstore/clock.h"
#include "kvstore/sequence/holds.h"

namespace pqcached::kvstore::testing {
namespace {

const IndexDescriptor kIndexes[] = {Pq(2, 4), Pq(1, 6)};

CacheSpec WorldSpec() {
  CacheSpec spec = SmallSpec("world");
  spec.capacity_bytes = size_t{48} << 20;
  return spec;
}

StoreOptions WorldOptions(DescriptorKeeper& keeper) {
  StoreOptions options = SmallOptions();
  options.merge_segments = 3;
  options.keeper = &keeper;
  options.retain = true;
  options.max_retained_share = 1;                   // until others need the room
  options.evict_idle_after = absl::ZeroDuration();  // nothing else goes that is known
  return options;
}

void KillSelfAfter(int64_t nanoseconds) {
  sigevent event = {};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer;
  if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) std::abort();
  const itimerspec once = {.it_interval = {},
                           .it_value = {.tv_sec = nanoseconds / 1'000'000'000,
                                        .tv_nsec = 1 + nanoseconds % 1'000'000'000}};
  if (timer_settime(timer, 0, &once, nullptr) != 0) std::abort();
}

}  // namespace

const char* NameOf(Operation operation) {
  static constexpr const char* kNames[kOperations] = {
      "none",   "create",   "fork",  "drop",  "append", "close",   "ingest", "make room",
      "commit", "truncate", "build", "merge", "name",   "suspend", "evict",  "recover"};
  return kNames[static_cast<size_t>(operation)];
}

KillWorld::KillWorld(WorldState& state, SharedKeeper& keeper)
    : state_(state), keeper_(keeper), random_(state.seed.fetch_add(1)), spec_(WorldSpec()) {
  keeper_.Begin();
}

void KillWorld::Fault(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "FAULT: %s: %s (pending %u of sequence %u)\n", what,
               std::string(status.message()).c_str(), static_cast<uint32_t>(state_.pending.load()),
               state_.pending_sequence.load());
  ++state_.other_faults;
}

void KillWorld::Begin() {
  state_.phase = Phase::kRecovering;
  Arm(Operation::kRecover);
  const int64_t began = SteadyNanos();
  auto created = Store::Create(WorldOptions(keeper_));
  state_.nanoseconds[static_cast<size_t>(Operation::kRecover)] = SteadyNanos() - began;
  state_.phase = Phase::kChecking;
  if (!created.ok()) return Fault("the store does not recover", created.status());
  store_ = *std::move(created);
  const RecoveryReport report = store_->Recovery();
  ++state_.recoveries;
  state_.recovery_seconds = state_.recovery_seconds + report.seconds;
  state_.recovered_bytes = state_.recovered_bytes + static_cast<double>(report.bytes);
  if (report.dropped_records > 0) Fault("records were dropped");
  const auto cache = store_->OpenCache(kTenant, spec_);
  if (!cache.ok()) return Fault("OpenCache", cache.status());
  cache_id_ = cache->cache_id;
  const auto found = store_->ListSequences(kTenant, cache_id_);
  if (!found.ok()) return Fault("ListSequences", found.status());
  Settle(*found);
  for (SequenceModel& sequence : state_.sequences) {
    const auto info = std::find_if(found->begin(), found->end(), [&](const SequenceInfo& other) {
      return other.sequence_id == sequence.id;
    });
    Check(sequence, info == found->end() ? nullptr : &*info);
  }
  if (Random(2) == 0) store_->EndQuarantine();
  state_.phase = Phase::kWorking;
}

void KillWorld::Arm(Operation operation) {
  Target& target = state_.target;
  if (target.operation != operation || target.countdown-- != 1) return;
  const int64_t usual = state_.nanoseconds[static_cast<size_t>(operation)];
  KillSelfAfter(usual * target.after_permille / 1000);
}

void KillWorld::Done() {
  const Operation operation = state_.pending.exchange(Operation::kNone);
  state_.nanoseconds[static_cast<size_t>(operation)] = SteadyNanos() - began_;
  const uint64_t evictions = store_->Stats().evicted_sequences;
  state_.evictions += evictions - evictions_;
  evictions_ = evictions;
}

// What was on its way when the last process was killed has happened or not.
void KillWorld::Settle(const std::vector<SequenceInfo>& found) {
  std::set<uint64_t> known;
  for (const SequenceModel& sequence : state_.sequences) known.insert(sequence.id);
  const Operation pending = state_.pending;
  uint32_t unknown = 0;
  for (const SequenceInfo& info : found) {
    if (info.is_cached_prefix || known.contains(info.sequence_id)) continue;
    ++unknown;  // nobody was told of it
    const absl::Status status = store_->DropSequence(kTenant, info.sequence_id);
    if (!status.ok()) Fault("DropSequence", status);
  }
  const bool may_be_new = pending == Operation::kCreate || pending == Operation::kFork;
  if (unknown > (may_be_new ? 1 : 0)) Fault("a sequence that nobody made, or that was dropped");
  SequenceModel& sequence = state_.sequences[state_.pending_sequence];
  const auto info = std::find_if(found.begin(), found.end(), [&](const SequenceInfo& other) {
    return other.sequence_id == sequence.id;
  });
  SettleOne(sequence, info == found.end() ? nullptr : &*info);
  Done();
}

void KillWorld::SettleOne(SequenceModel& sequence, const SequenceInfo* info) {
  switch (state_.pending.load()) {
    case Operation::kNone:
    case Operation::kIngest:
    case Operation::kMakeRoom:
    case Operation::kBuild:  // what was not acknowledged is asked for again
    case Operation::kMerge:
    case Operation::kRecover:
    case Operation::kCount:
      return;
    case Operation::kCreate:
    case Operation::kFork:
      sequence.id = 0;
      return;
    case Operation::kDrop:
    case Operation::kEvict:
      if (info == nullptr) sequence.id = 0;
      return;
    case Operation::kTruncate:  // names go first
      sequence.named = std::min(sequence.named.load(), state_.pending_count.load());
      [[fallthrough]];
    case Operation::kAppend:
    case Operation::kClose:
    case Operation::kCommit:
      if (info == nullptr || info->token_count != state_.pending_count) return;
      sequence.count = state_.pending_count.load();
      if (sequence.count == 0) sequence.index_count = 0;
      return;
    case Operation::kName:
      sequence.named = 0;  // either is right
      return;
    case Operation::kSuspend:
      if (info != nullptr) {
        sequence.suspended =
            !store_->FetchBlocks(kTenant, sequence.id, 1, {0, 0}, RowPart::kRow).ok();
        const auto resumed = store_->ResumeSequence(kTenant, sequence.id);
        if (!resumed.ok()) Fault("ResumeSequence", resumed.status());
        sequence.suspended = false;
      }
      return;
  }
}

void KillWorld::Check(SequenceModel& sequence, const SequenceInfo* info) {
  if (sequence.id == 0) return;
  const size_t row_bytes = size_t{spec_.groups[0].row_bytes()} * spec_.groups[0].kv_heads *
                           spec_.groups[0].layers.size();
  if (info == nullptr) {
    state_.lost_bytes += sequence.count * row_bytes;
    Fault("a sequence is lost");
    sequence.id = 0;
    return;
  }
  if (info->token_count != sequence.count) {
    std::fprintf(stderr, "sequence %lu has %lu tokens, not %u\n",
                 static_cast<unsigned long>(sequence.id.load()),
                 static_cast<unsigned long>(info->token_count), sequence.count.load());
    if (info->token_count < sequence.count) {
      state_.lost_bytes += (sequence.count - info->token_count) * row_bytes;
    }
    return Fault("another token count");
  }
  if (sequence.suspended) {
    const auto rows = store_->FetchBlocks(kTenant, sequence.id, 1, {0, 0}, RowPart::kRow);
    if (rows.status().code() != absl::StatusCode::kFailedPrecondition) {
      Fault("a sequence is not suspended any more", rows.status());
    }
    const auto resumed = store_->ResumeSequence(kTenant, sequence.id);
    if (!resumed.ok()) Fault("ResumeSequence", resumed.status());
    sequence.suspended = false;
  }
  CheckRows(sequence);
  CheckIndexes(sequence);
  CheckNames(sequence);
}

void KillWorld::CheckRows(SequenceModel& sequence) {
  const LayerGroup& group = spec_.groups[0];
  const uint32_t count = sequence.count;
  if (count == 0) return;
  const std::span<const uint64_t> content(sequence.content.data(), count);
  for (const uint32_t layer : group.layers) {
    const auto rows = store_->FetchBlocks(kTenant, sequence.id, layer, {0, count}, RowPart::kRow);
    if (!rows.ok()) return Fault("FetchBlocks", rows.status());
    const std::vector<float> found = ToFloats(*rows);
    const std::vector<float> wanted = RowsOf(content, group, layer);
    const uint32_t dims = group.key_dim + group.value_dim;
    for (size_t row = 0; row < wanted.size() / dims; ++row) {
      const auto begin = static_cast<ptrdiff_t>(row * dims);
      if (!std::equal(found.begin() + begin, found.begin() + begin + dims,
                      wanted.begin() + begin)) {
        ++state_.wrong_rows;
      }
    }
    state_.checked_rows += wanted.size() / dims;
  }
}

void KillWorld::CheckIndexes(SequenceModel& sequence) {
  const LayerGroup& group = spec_.groups[0];
  if (sequence.count == 0) return;
  if (sequence.is_live && sequence.index_count > 0) {  // it may have rows to catch up with
    const absl::Status status = Build(sequence, 0);
    if (absl::IsResourceExhausted(status)) return;
    if (!status.ok()) return Fault("BuildIndex of a live index", status);
  }
  for (uint32_t i = 0; i < sequence.index_count; ++i) {
    for (const uint32_t layer : group.layers) {
      const Floats query = RandomFloats(random_, {1, group.query_heads, group.key_dim});
      const auto selected = store_->TopK(
          kTenant, sequence.id,
          {.layer = layer, .query_position = sequence.count - 1, .queries = query.view()},
          {.index = kIndexes[i], .sink_tokens = 4, .window_tokens = 4, .budget_ratio = 0.2});
      if (!selected.ok()) return Fault("TopK with an index that was built", selected.status());
    }
  }
}

void KillWorld::CheckNames(SequenceModel& sequence) {
  const uint32_t named = std::min(sequence.named.load(), sequence.count.load());
  const auto match = store_->MatchPrefix(
      kTenant, cache_id_, std::span<const uint32_t>(sequence.token_ids.data(), named), "");
  if (!match.ok()) return Fault("MatchPrefix", match.status());
  if (*match < named / 128 * 128) Fault("names are lost");
}

void KillWorld::Announce(Operation operation, const SequenceModel& sequence, uint32_t count) {
  state_.pending_count = count;
  state_.pending_sequence = static_cast<uint32_t>(&sequence - state_.sequences.data());
  began_ = SteadyNanos();
  state_.pending = operation;
  Arm(operation);
}

void KillWorld::Step() {
  ++state_.operations;
  SequenceModel& sequence = PickAny();
  if (sequence.id == 0) return Random(3) == 0 ? Fork(sequence) : Create(sequence);
  const uint32_t dice = Random(100);
  if (dice < 55) return Grow(sequence);
  if (dice < 64) return Truncate(sequence);
  if (dice < 70) return Build(sequence);
  if (dice < 74) return Merge(sequence);
  if (dice < 82) return Name(sequence);
  if (dice < 86) return Suspend(sequence);
  if (dice < 92) return Drop(sequence);
  if (dice < 95) return Evict(sequence);
  if (dice < 97) return EvictRetained();
  if (dice < 98) store_->EndQuarantine();
}

void KillWorld::Create(SequenceModel& sequence) {
  SequenceSpec spec{.session = "session"};
  if (Random(3) == 0) spec.live_index = LiveIndex{.index = kIndexes[0], .iterations = 1};
  const uint32_t named = Random(2) == 0 ? TakeNames(sequence) : 0;
  spec.token_ids.assign(sequence.token_ids.begin(), sequence.token_ids.begin() + named);
  Announce(Operation::kCreate, sequence, 0);
  const auto created = store_->CreateSequence(kTenant, cache_id_, spec);
  if (!created.ok()) return Fault("CreateSequence", created.status());
  if (created->token_count > named) return Fault("more was found than there are names");
  sequence.count = static_cast<uint32_t>(created->token_count);
  sequence.index_count = 0;
  sequence.named = named;
  sequence.is_live = spec.live_index.has_value();
  sequence.id = created->sequence_id;
  Done();
  if (sequence.count > 0) ++state_.found_again;
  CheckRows(sequence);
}

uint32_t KillWorld::TakeNames(SequenceModel& sequence) {
  const Ghost& ghost = state_.ghosts[Random(static_cast<uint32_t>(state_.ghosts.size()))];
  sequence.content = ghost.content;
  sequence.token_ids = ghost.token_ids;
  return ghost.named;
}

void KillWorld::Remember(const SequenceModel& sequence) {
  const uint32_t named = std::min(sequence.named.load(), sequence.count.load());
  if (named < 128) return;  // a step of names
  Ghost& ghost = state_.ghosts[Random(static_cast<uint32_t>(state_.ghosts.size()))];
  ghost.named = 0;  // while it is being written
  ghost.content = sequence.content;
  ghost.token_ids = sequence.token_ids;
  ghost.named = named;
}

void KillWorld::Fork(SequenceModel& sequence) {
  const SequenceModel& parent = PickAny();
  if (parent.id == 0 || parent.count == 0) return;
  const uint32_t count = 1 + Random(parent.count);
  sequence.content = parent.content;
  sequence.token_ids = parent.token_ids;
  Announce(Operation::kFork, sequence, count);
  const auto created = store_->ForkSequence(kTenant, parent.id, count, "session");
  if (!created.ok()) return Fault("ForkSequence", created.status());
  sequence.count = count;
  sequence.named = std::min(parent.named.load(), count);
  sequence.is_live = parent.is_live.load();
  // A live index that covers the parent may have to be finished behind the cut.
  sequence.index_count = parent.is_live ? 0 : parent.index_count.load();
  sequence.id = created->sequence_id;
  Done();
}

void KillWorld::Drop(SequenceModel& sequence) {
  Remember(sequence);
  Announce(Operation::kDrop, sequence, 0);
  const absl::Status status = store_->DropSequence(kTenant, sequence.id);
  if (!status.ok()) return Fault("DropSequence", status);
  sequence.id = 0;
  Done();
}

void KillWorld::Grow(SequenceModel& sequence) {
  const uint32_t wanted = 1 + Random(Random(4) == 0 ? 300 : 12);
  const uint32_t end = std::min(sequence.count + wanted, kWorldTokens);
  if (end == sequence.count) return Truncate(sequence);
  // Names that stand there already say what comes.
  for (uint32_t i = std::max(sequence.count.load(), sequence.named.load()); i < end; ++i) {
    sequence.content[i] = Mix(random_(), i);
  }
  if (Random(2) == 0) return Append(sequence, end);
  Ingest(sequence, end, /*commits=*/Random(4) != 0);
}

void KillWorld::Append(SequenceModel& sequence, uint32_t end) {
  const uint32_t begin = sequence.count;
  const uint32_t tail_tokens = WorldOptions(keeper_).tail_tokens;
  const bool closes = begin / tail_tokens != end / tail_tokens;
  Announce(closes ? Operation::kClose : Operation::kAppend, sequence, end);
  Grown(sequence, end,
        AppendContent(*store_, sequence.id, spec_.groups[0], begin,
                      std::span<const uint64_t>(sequence.content).subspan(begin, end - begin)));
  Done();
}

// As a prefill does: layer by layer; what is not committed was never there.
void KillWorld::Ingest(SequenceModel& sequence, uint32_t end, bool commits) {
  const uint32_t begin = sequence.count;
  const ContentRows rows(std::span<const uint64_t>(sequence.content).subspan(begin, end - begin),
                         spec_.groups[0]);
  const auto room = store_->Admit(
      kTenant, cache_id_,
      {.prefill_tokens = end - begin, .index = IndexDescriptor{.kind = IndexKind::kFlat}});
  if (!room.ok()) return Fault("Admit", room.status());
  const bool is_short = room->verdict == Verdict::kFitsAfterEviction;
  Announce(is_short ? Operation::kMakeRoom : Operation::kIngest, sequence, begin);
  auto ingest = store_->BeginIngest(kTenant, sequence.id);
  if (!ingest.ok()) return Fault("BeginIngest", ingest.status());
  absl::Status status;
  for (const LayerRows& layer : rows.layers) {
    if (status.ok()) status = (*ingest)->Write(begin, layer);
  }
  Done();
  if (!status.ok()) return Grown(sequence, end, status);
  if (!commits) return;
  Announce(Operation::kCommit, sequence, end);
  Grown(sequence, end, (*ingest)->Commit());
  Done();
}

void KillWorld::Grown(SequenceModel& sequence, uint32_t end,
                      const absl::StatusOr<uint64_t>& count) {
  if (count.ok()) {
    if (*count != end) Fault("another token count was acknowledged");
    sequence.count = end;
  } else if (!absl::IsResourceExhausted(count.status())) {
    Fault("rows were refused", count.status());
  }
}

void KillWorld::Truncate(SequenceModel& sequence) {
  // Not where names stand before their rows: whether those have gone would not be known.
  if (sequence.named > sequence.count) return Append(sequence, sequence.named);
  const uint32_t count = Random(sequence.count + 1);
  Announce(Operation::kTruncate, sequence, count);
  const auto truncated = store_->TruncateSequence(kTenant, sequence.id, count);
  if (!truncated.ok()) return Fault("TruncateSequence", truncated.status());
  sequence.named = std::min(sequence.named.load(), count);
  if (count == 0) sequence.index_count = 0;
  sequence.count = count;
  Done();
}

void KillWorld::Build(SequenceModel& sequence) {
  const uint32_t ordinal = sequence.is_live ? 0 : sequence.index_count.load();
  if (sequence.count == 0 || ordinal >= std::size(kIndexes)) return;
  Announce(Operation::kBuild, sequence, sequence.count);
  if (sequence.is_live && Random(2) == 0) {
    const absl::Status closed = store_->ClosePrefill(kTenant, sequence.id);
    if (!closed.ok() && !absl::IsResourceExhausted(closed)) Fault("ClosePrefill", closed);
  }
  const absl::Status status = Build(sequence, ordinal);
  if (status.ok()) {
    sequence.index_count = std::max(sequence.index_count.load(), ordinal + 1);
  } else if (!absl::IsResourceExhausted(status)) {
    Fault("BuildIndex", status);
  }
  Done();
}

// Tails that close one after the other: the store merges them while this waits.
void KillWorld::Merge(SequenceModel& sequence) {
  if (!sequence.is_live) return Build(sequence);
  const uint32_t tail_tokens = WorldOptions(keeper_).tail_tokens;
  const uint32_t end = sequence.count / tail_tokens * tail_tokens + 3 * tail_tokens + 1;
  if (end > kWorldTokens) return Truncate(sequence);
  for (uint32_t i = std::max(sequence.count.load(), sequence.named.load()); i < end; ++i) {
    sequence.content[i] = Mix(random_(), i);
  }
  const auto segment_count = [&] {
    const auto info = store_->DescribeSequence(kTenant, sequence.id);
    if (!info.ok()) Fault("DescribeSequence", info.status());
    return info.ok() ? info->segments.size() : 0;
  };
  Append(sequence, end);
  if (sequence.count != end) return;  // the pool is full
  const size_t before = segment_count();
  Announce(Operation::kMerge, sequence, end);
  const SteadyTime deadline = SteadyTime::Now() + absl::Seconds(60);
  while (store_->Stats().live_work_count > 0 && SteadyTime::Now() < deadline) {
    absl::SleepFor(absl::Microseconds(50));
  }
  Done();
  if (SteadyTime::Now() >= deadline) Fault("the store does not get done with live indexes");
  if (segment_count() < before) ++state_.merges;
}

// That it is there already is as good.
absl::Status KillWorld::Build(const SequenceModel& sequence, uint32_t ordinal) {
  absl::Status status = store_->BuildIndex(kTenant, sequence.id,
                                           {.index = kIndexes[ordinal],
                                            .iterations = 2,
                                            .deadline = SteadyTime::Now() + absl::Seconds(60)},
                                           {});
  return absl::IsAlreadyExists(status) ? absl::OkStatus() : status;
}

void KillWorld::Name(SequenceModel& sequence) {
  const uint32_t begin = sequence.named;
  const uint32_t end = sequence.count;
  if (begin >= end) return;
  // Names follow content, as with tokens and their rows.
  for (uint32_t i = begin; i < end; ++i) {
    sequence.token_ids[i] = static_cast<uint32_t>(sequence.content[i] >> 40);
  }
  Announce(Operation::kName, sequence, end);
  const absl::Status status =
      store_->NameTokens(kTenant, sequence.id, begin,
                         std::span<const uint32_t>(sequence.token_ids).subspan(begin, end - begin));
  if (!status.ok()) return Fault("NameTokens", status);
  sequence.named = end;
  Done();
}

void KillWorld::Suspend(SequenceModel& sequence) {
  Announce(Operation::kSuspend, sequence, 0);
  const auto suspended = store_->SuspendSequence(kTenant, sequence.id);
  if (!suspended.ok()) return Fault("SuspendSequence", suspended.status());
  sequence.suspended = true;
  Done();
  if (Random(2) == 0) {
    const auto rows = store_->FetchBlocks(kTenant, sequence.id, 1, {0, 0}, RowPart::kRow);
    if (rows.ok()) Fault("a suspended sequence was read");
  }
  Announce(Operation::kSuspend, sequence, 0);
  const auto resumed = store_->ResumeSequence(kTenant, sequence.id);
  if (!resumed.ok()) return Fault("ResumeSequence", resumed.status());
  sequence.suspended = false;
  Done();
}

// Nothing of it is retained.
void KillWorld::Evict(SequenceModel& sequence) {
  Remember(sequence);
  Announce(Operation::kEvict, sequence, 0);
  const absl::Status status = store_->EvictSequence(sequence.id);
  if (status.ok()) {
    sequence.id = 0;
  } else if (!absl::IsFailedPrecondition(status)) {  // its live index is being worked on
    Fault("EvictSequence", status);
  }
  Done();
}

void KillWorld::EvictRetained() {
  const auto found = store_->ListSequences(kTenant, cache_id_);
  if (!found.ok()) return Fault("ListSequences", found.status());
  for (const SequenceInfo& info : *found) {
    if (!info.is_cached_prefix) continue;
    Announce(Operation::kMakeRoom, state_.sequences[0], 0);
    const absl::Status status = store_->EvictSequence(info.sequence_id);
    // A thread of the store may have made room for its own work meanwhile.
    if (!status.ok() && !absl::IsNotFound(status)) Fault("EvictSequence of a retained one", status);
    Done();
  }
}

void KillWorld::DropAll() {
  for (SequenceModel& sequence : state_.sequences) {
    if (sequence.id != 0) Drop(sequence);
  }
  EvictRetained();
  store_->EndQuarantine();
  // Threads of the store may be at work on what was dropped a moment ago.
  const SteadyTime deadline = SteadyTime::Now() + absl::Seconds(30);
  size_t used_bytes = 0;
  do {
    used_bytes = store_->ListCaches("").front().used_bytes;
    if (used_bytes > 0) absl::SleepFor(absl::Milliseconds(1));
  } while (used_bytes > 0 && SteadyTime::Now() < deadline);
  state_.leaked_extents += used_bytes / kMinExtentBytes;
  if (used_bytes > 0) Fault("extents have leaked");
}

}  // namespace pqcached::kvstore::testing
