#include "tests/fault/crash/engine.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace pqcached::kvstore::testing {

CrashEngine::CrashEngine(CrashWorld& world, uint32_t number)
    : world_(world),
      mine_(world.model().engines[number]),
      session_(CrashWorld::SessionOf(number)),
      random_(world.model().seed.fetch_add(1)) {}

void CrashEngine::Announce(Operation operation, uint32_t count) {
  mine_.pending_count = count;
  mine_.pending_sequence = current_;
  mine_.pending = operation;
}

void CrashEngine::Done() { mine_.pending = Operation::kNone; }

bool CrashEngine::Finish(const char* what, const absl::Status& status) {
  Done();
  if (!status.ok() && !absl::IsResourceExhausted(status)) world_.Fault(what, status);
  return status.ok();
}

void CrashEngine::Do(const Step& step) {
  ++world_.model().operations;
  current_ = step.sequence;
  SequenceModel& sequence = mine_.sequences[step.sequence];
  const bool exists = sequence.id != 0;
  const bool usable = exists && !sequence.suspended;
  switch (step.operation) {
    case Operation::kCreate:
      return exists ? void() : Create(sequence, step);
    case Operation::kCreateRanks: {
      SequenceModel& second = mine_.sequences[(step.sequence + 1) % kEngineSequences];
      return exists || second.id != 0 || !world_.spec().ranks ? void()
                                                              : CreateRanks(sequence, second);
    }
    case Operation::kFork:
      return exists ? void() : Fork(sequence, step);
    case Operation::kDrop:
      return exists ? Drop(sequence) : void();
    case Operation::kAppend:
      return usable ? Append(sequence, step) : void();
    case Operation::kIngest:
    case Operation::kCommit:
      return usable ? Ingest(sequence, step) : void();
    case Operation::kTruncate:
      return usable ? Truncate(sequence, step.amount) : void();
    case Operation::kBuild:
      return usable ? Build(sequence, step.amount) : void();
    case Operation::kIdle:
      return Idle();
    case Operation::kName:
      return usable ? Name(sequence) : void();
    case Operation::kSuspend:
    case Operation::kResume:
      return exists ? Suspend(sequence, step.operation == Operation::kSuspend) : void();
    case Operation::kPin:
      return exists ? Pin(sequence) : void();
    case Operation::kEvict:
      return exists ? Evict(sequence) : void();
    case Operation::kEvictRetained:
      return EvictRetained();
    case Operation::kAttach:
      return usable && sequence.count > 0 ? Attach(sequence, mine_.views[step.other]) : void();
    case Operation::kDetach:
      return Detach(mine_.views[step.other]);
    case Operation::kEndQuarantine:
      return EndQuarantine();
    case Operation::kPlanMove:
      return PlanMove();
    case Operation::kTakeOver:
      Announce(Operation::kTakeOver, 0);
      world_.Leave();
      return Done();
    case Operation::kNone:
    case Operation::kCount:
      return;
  }
}

Step CrashEngine::RandomStep() {
  Step step{.sequence = Random(kEngineSequences), .amount = 0, .other = 0};
  const SequenceModel& sequence = mine_.sequences[step.sequence];
  if (sequence.id == 0) {
    step.operation = Random(3) == 0 ? Operation::kFork : Operation::kCreate;
    if (world_.spec().ranks && Random(2) == 0) step.operation = Operation::kCreateRanks;
    step.other = step.operation == Operation::kFork ? Random(kEngineSequences)
                 : Random(3) == 0                   ? 1
                                                    : 0;
    step.amount = step.operation == Operation::kFork ? 1 + Random(kMaxTokens) : Random(2);
    return step;
  }
  static constexpr std::pair<Operation, uint32_t> kOdds[] = {
      {Operation::kAppend, 25},  {Operation::kIngest, 20}, {Operation::kTruncate, 8},
      {Operation::kBuild, 8},    {Operation::kIdle, 4},    {Operation::kName, 8},
      {Operation::kSuspend, 3},  {Operation::kResume, 5},  {Operation::kPin, 2},
      {Operation::kDrop, 7},     {Operation::kEvict, 3},   {Operation::kEvictRetained, 2},
      {Operation::kAttach, 6},   {Operation::kDetach, 4},  {Operation::kEndQuarantine, 1},
      {Operation::kPlanMove, 1},
  };
  uint32_t sum = 0;
  for (const auto& [operation, odds] : kOdds) sum += odds;
  uint32_t dice = Random(sum);
  for (const auto& [operation, odds] : kOdds) {
    step.operation = operation;
    if (dice < odds) break;
    dice -= odds;
  }
  step.other = Random(2);
  switch (step.operation) {
    case Operation::kAppend:
    case Operation::kIngest:
      step.amount = 1 + Random(Random(4) == 0 ? 300 : 12);
      step.other = Random(4) == 0 ? 1 : 0;
      break;
    case Operation::kTruncate:
      step.amount = Random(sequence.count + 1);
      break;
    case Operation::kBuild:
      step.amount = sequence.index_count;
      break;
    default:
      break;
  }
  return step;
}

void CrashEngine::Begin(SequenceModel& sequence, uint64_t id, uint32_t count, uint32_t named) {
  world_.NoteId(id);
  sequence.count = count;
  sequence.named = named;
  sequence.index_count = 0;
  sequence.suspended = false;
  sequence.pinned = false;
  sequence.is_live = false;
  sequence.group = 0;
  sequence.rank = 0;
  sequence.id = id;
}

void CrashEngine::Create(SequenceModel& sequence, const Step& step) {
  SequenceSpec spec{.session = session_};
  if (step.other == 1) spec.live_index = LiveIndex{.index = kWorldIndexes[0], .iterations = 1};
  uint32_t named = 0;
  if (step.amount == 1) {
    const Ghost& ghost = mine_.ghosts[Random(static_cast<uint32_t>(mine_.ghosts.size()))];
    sequence.content = ghost.content;
    sequence.token_ids = ghost.token_ids;
    named = ghost.named;
  }
  spec.token_ids.assign(sequence.token_ids.begin(), sequence.token_ids.begin() + named);
  mine_.creates_live = step.other == 1;
  mine_.may_have_created = 1;
  Announce(Operation::kCreate, 0);
  const auto created = world_.store().CreateSequence(kTenant, world_.cache_id(0), spec);
  if (!created.ok()) {
    mine_.may_have_created = 0;
    return static_cast<void>(Finish("CreateSequence", created.status()));
  }
  if (created->token_count > named) world_.Fault("more tokens were found than are named");
  Begin(sequence, created->sequence_id, static_cast<uint32_t>(created->token_count), named);
  sequence.is_live = step.other == 1;
  mine_.may_have_created = 0;
  Done();
}

void CrashEngine::CreateRanks(SequenceModel& first, SequenceModel& second) {
  const uint32_t group = ++world_.model().group_keys;
  mine_.creates_live = false;
  mine_.may_have_created = 2;
  Announce(Operation::kCreateRanks, 0);
  uint64_t ids[2] = {};
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto created = world_.store().CreateSequence(
        kTenant, world_.cache_id(rank),
        {.session = session_, .group_key = absl::StrCat("key-", group)});
    if (!created.ok())
      return static_cast<void>(Finish("CreateSequence of a rank", created.status()));
    ids[rank] = created->sequence_id;
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    SequenceModel& sequence = rank == 0 ? first : second;
    Begin(sequence, ids[rank], 0, 0);
    sequence.group = group;
    sequence.rank = rank;
  }
  mine_.may_have_created = 0;
  Done();
}

void CrashEngine::Fork(SequenceModel& sequence, const Step& step) {
  const SequenceModel& parent = mine_.sequences[step.other];
  if (parent.id == 0 || parent.count == 0 || parent.suspended || parent.group != 0) return;
  const uint32_t count = std::min(step.amount, parent.count.load());
  sequence.content = parent.content;
  sequence.token_ids = parent.token_ids;
  mine_.creates_live = parent.is_live.load();
  mine_.may_have_created = 1;
  Announce(Operation::kFork, count);
  const auto created = world_.store().ForkSequence(kTenant, parent.id, count, session_);
  if (created.ok()) {
    Begin(sequence, created->sequence_id, count, std::min(parent.named.load(), count));
    sequence.is_live = parent.is_live.load();
    // An incremental index that covers the parent may have to be finished behind the cut.
    sequence.index_count = parent.is_live ? 0 : parent.index_count.load();
  }
  mine_.may_have_created = 0;
  Finish("ForkSequence", created.status());
}

// The names of the sequence, by which a later one may find what is retained of it.
void CrashEngine::Remember(const SequenceModel& sequence) {
  const uint32_t named = std::min(sequence.named.load(), sequence.count.load());
  if (named < 128) return;  // a step of names
  Ghost& ghost = mine_.ghosts[Random(static_cast<uint32_t>(mine_.ghosts.size()))];
  ghost.named = 0;  // while it is written
  ghost.content = sequence.content;
  ghost.token_ids = sequence.token_ids;
  ghost.named = named;
}

void CrashEngine::Drop(SequenceModel& sequence) {
  Remember(sequence);
  Announce(Operation::kDrop, 0);
  const absl::Status status = world_.store().DropSequence(kTenant, sequence.id);
  if (status.ok()) sequence.id = 0;
  Finish("DropSequence", status);
}

// Chooses the content of new tokens; names that are there already determine theirs.
uint32_t CrashEngine::NewEnd(SequenceModel& sequence, uint32_t wanted) {
  const uint32_t end = std::min(sequence.count + wanted, kMaxTokens);
  for (uint32_t i = std::max(sequence.count.load(), sequence.named.load()); i < end; ++i) {
    sequence.content[i] = Mix(random_(), i);
  }
  return end;
}

void CrashEngine::Append(SequenceModel& sequence, const Step& step) {
  const uint32_t begin = sequence.count;
  const uint32_t end = NewEnd(sequence, step.amount);
  if (begin == end) return;
  Announce(Operation::kAppend, end);
  const auto count =
      AppendContent(world_.store(), sequence.id, world_.group(sequence.rank), begin,
                    std::span<const uint64_t>(sequence.content).subspan(begin, end - begin));
  if (count.ok()) sequence.count = end;
  Finish("Append", count.status());
}

// Ingests layer by layer, as a prefill does. Rows that are not committed never become visible.
void CrashEngine::Ingest(SequenceModel& sequence, const Step& step) {
  const uint32_t begin = sequence.count;
  const uint32_t end = NewEnd(sequence, step.amount);
  if (begin == end) return;
  const ContentRows rows(std::span<const uint64_t>(sequence.content).subspan(begin, end - begin),
                         world_.group(sequence.rank));
  Announce(Operation::kIngest, begin);
  auto ingest = world_.store().BeginIngest(kTenant, sequence.id);
  if (!ingest.ok()) return static_cast<void>(Finish("BeginIngest", ingest.status()));
  absl::Status status;
  for (const LayerRows& layer : rows.layers) {
    if (status.ok()) status = (*ingest)->Write(begin, layer);
  }
  if (!Finish("Write", status) || step.other == 1) return;
  Announce(Operation::kCommit, end);
  const auto count = (*ingest)->Commit();
  if (count.ok()) sequence.count = end;
  Finish("Commit", count.status());
}

void CrashEngine::Truncate(SequenceModel& sequence, uint32_t count) {
  // Names of tokens that are not stored yet: whether they have gone would not be known after a kill.
  if (count > sequence.count || sequence.named > sequence.count) return;
  Announce(Operation::kTruncate, count);
  const auto truncated = world_.store().TruncateSequence(kTenant, sequence.id, count);
  if (truncated.ok()) {
    sequence.named = std::min(sequence.named.load(), count);
    if (count == 0) sequence.index_count = 0;
    sequence.count = count;
  }
  Finish("TruncateSequence", truncated.status());
}

void CrashEngine::Build(SequenceModel& sequence, uint32_t ordinal) {
  if (sequence.is_live) ordinal = 0;
  if (sequence.count == 0 || ordinal >= std::size(kWorldIndexes)) return;
  Announce(Operation::kBuild, sequence.count);
  if (sequence.is_live && Random(2) == 0) {
    const absl::Status closed = world_.store().ClosePrefill(kTenant, sequence.id);
    if (!closed.ok() && !absl::IsResourceExhausted(closed)) world_.Fault("ClosePrefill", closed);
  }
  const absl::Status status = world_.Build(sequence, ordinal, /*rebuild=*/Random(2) == 0);
  if (status.ok()) sequence.index_count = std::max(sequence.index_count.load(), ordinal + 1);
  Finish("BuildIndex", status);
}

void CrashEngine::Idle() {
  Announce(Operation::kIdle, 0);
  const bool idle = world_.store().WaitIdle(SteadyTime::Now() + absl::Seconds(60));
  Finish("WaitIdle", idle ? absl::OkStatus() : absl::DeadlineExceededError("60 s"));
}

void CrashEngine::Name(SequenceModel& sequence) {
  const uint32_t begin = sequence.named;
  const uint32_t end = sequence.count;
  if (begin >= end) return;
  // Names follow content, as tokens and their rows do.
  for (uint32_t i = begin; i < end; ++i) {
    sequence.token_ids[i] = static_cast<uint32_t>(sequence.content[i] >> 40);
  }
  Announce(Operation::kName, end);
  const absl::Status status = world_.store().NameTokens(
      kTenant, sequence.id, begin,
      std::span<const uint32_t>(sequence.token_ids).subspan(begin, end - begin));
  if (status.ok()) sequence.named = end;
  Finish("NameTokens", status);
}

void CrashEngine::Suspend(SequenceModel& sequence, bool suspended) {
  Announce(suspended ? Operation::kSuspend : Operation::kResume, 0);
  const auto count = suspended ? world_.store().SuspendSequence(kTenant, sequence.id)
                               : world_.store().ResumeSequence(kTenant, sequence.id);
  if (count.ok()) sequence.suspended = suspended;
  Finish(suspended ? "SuspendSequence" : "ResumeSequence", count.status());
}

void CrashEngine::Pin(SequenceModel& sequence) {
  Announce(Operation::kPin, 0);
  const bool pinned = !sequence.pinned;
  const absl::Status status = world_.store().PinSequence(
      kTenant, sequence.id, pinned ? absl::Hours(1) : absl::ZeroDuration());
  if (status.ok()) {
    for (SequenceModel& other : mine_.sequences) {
      const bool same_group = sequence.group != 0 && other.group == sequence.group;
      if (&other == &sequence || (other.id != 0 && same_group)) other.pinned = pinned;
    }
  }
  Finish("PinSequence", status);
}

// Evicts all members of a group, or none. Nothing of them is retained.
void CrashEngine::Evict(SequenceModel& sequence) {
  Announce(Operation::kEvict, 0);
  const absl::Status status = world_.store().EvictSequence(kAllTenants, sequence.id);
  if (status.ok()) {
    if (sequence.pinned) world_.Fault("a pinned sequence was evicted");
    for (SequenceModel& other : mine_.sequences) {
      if (&other != &sequence && sequence.group != 0 && other.group == sequence.group) other.id = 0;
    }
    sequence.id = 0;
  }
  // A lease, a pin or work on its incremental index may hold it.
  Finish("EvictSequence", absl::IsFailedPrecondition(status) ? absl::OkStatus() : status);
}

void CrashEngine::EvictRetained() {
  const auto found = world_.store().ListSequences(kTenant, world_.cache_id(0));
  if (!found.ok()) return world_.Fault("ListSequences", found.status());
  for (const SequenceInfo& info : *found) {
    if (!info.is_cached_prefix) continue;
    Announce(Operation::kEvictRetained, 0);
    const absl::Status status = world_.store().EvictSequence(kAllTenants, info.sequence_id);
    // Another thread may have evicted it, or is sharing it.
    const bool expected = absl::IsNotFound(status) || absl::IsFailedPrecondition(status);
    Finish("EvictSequence of a retained one", expected ? absl::OkStatus() : status);
  }
}

void CrashEngine::Attach(const SequenceModel& sequence, ViewModel& view) {
  if (view.process != 0) return;
  Announce(Operation::kAttach, 0);
  Finish("Attach", world_.TakeView(sequence, session_, view));
}

void CrashEngine::Detach(ViewModel& view) {
  if (view.process == 0) return;
  Announce(Operation::kDetach, 0);
  const bool is_own = view.process == world_.model().process;
  view.process = 0;
  Finish("Detach", is_own ? world_.store().Detach(session_, view.lease_id) : absl::OkStatus());
}

// The store may use all memory again that clients of earlier processes map: they have ended.
void CrashEngine::EndQuarantine() {
  Announce(Operation::kEndQuarantine, 0);
  for (EngineModel& engine : world_.model().engines) {
    for (ViewModel& view : engine.views) {
      if (view.process < world_.model().process) view.process = 0;
    }
  }
  world_.store().EndQuarantine();
  Done();
}

void CrashEngine::PlanMove() {
  if (world_.spec().strict) return;  // such pools stay where they are
  Announce(Operation::kPlanMove, 0);
  absl::Status status;
  for (const CacheInfo& cache : world_.store().ListCaches(kAllTenants)) {
    status.Update(world_.store().PlanPoolMove(cache.cache_id));
  }
  Finish("PlanPoolMove", status);
}

}  // namespace pqcached::kvstore::testing
