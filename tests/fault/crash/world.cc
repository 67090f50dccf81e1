#include "tests/fault/crash/world.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/memory/unit_range.h"
#include "kvstore/sequence/segment.h"
#include "tests/fault/crash/index_check.h"

namespace pqcached::kvstore::testing {
namespace {

constexpr char kAuditor[] = "auditor";  // the session by which the test maps sequences
constexpr size_t kMachineBytes = size_t{8} << 30;

SteadyTime Deadline() { return SteadyTime::Now() + absl::Seconds(60); }

// Returns the extents that an attachment names: first unit -> number of units.
std::map<uint32_t, size_t> ExtentsOf(const Attachment& attachment, const StoredLayers& layers) {
  std::map<uint32_t, size_t> extents;
  const auto add = [&](const ExtentRef& extent, size_t size_bytes) {
    if (extent.valid()) extents[extent.unit] = UnitsFor(size_bytes);
  };
  for (size_t i = 0; i < attachment.layers.size(); ++i) {
    const LayerDescriptor& layer = attachment.layers[i];
    const LayerShape& shape = layers.layers[i % layers.size()].shape;
    const uint32_t slots = attachment.segments[i / layers.size()].slot_capacity;
    for (uint32_t head = 0; head < layer.kv_head_count; ++head) {
      add(attachment.row_extents[layer.row_extent_begin + head], size_t{slots} * shape.row_bytes);
    }
    for (uint32_t index = 0; index < attachment.header.index_count; ++index) {
      if (layer.state[index] != LayerState::kReady) continue;
      const IndexDescriptor& descriptor = attachment.header.indexes[index];
      add(layer.index_data[index], SegmentIndex::LayerBytes(descriptor, shape, slots));
      add(layer.codebook[index], Codebook::SizeBytes(descriptor, shape));
    }
  }
  return extents;
}

}  // namespace

const char* NameOf(Operation operation) {
  static constexpr const char* kNames[] = {
      "none",    "create",         "create ranks", "fork",     "drop",           "append",
      "ingest",  "commit",         "truncate",     "build",    "idle",           "name",
      "suspend", "resume",         "pin",          "evict",    "evict retained", "attach",
      "detach",  "end quarantine", "plan move",    "take-over"};
  static_assert(std::size(kNames) == static_cast<size_t>(Operation::kCount));
  return kNames[static_cast<size_t>(operation)];
}

CrashWorld::CrashWorld(WorldModel& model, DescriptorKeeper& keeper, std::string machine,
                       const WorldSpec& spec)
    : model_(model),
      keeper_(keeper),
      machine_(std::move(machine)),
      spec_(spec),
      random_(model.seed.fetch_add(1)) {}

void CrashWorld::SetAvailable(size_t bytes) {
  std::filesystem::create_directories(machine_ + "/proc");
  std::ofstream(machine_ + "/proc/meminfo") << "MemAvailable: " << (bytes >> 10) << " kB\n";
}

StoreOptions CrashWorld::Options() const {
  StoreOptions options = SmallOptions();
  options.max_sequences = 64;
  options.segment_tokens = options.tail_tokens = spec_.tail_tokens;
  options.merge_segments = 3;
  options.keeper = &keeper_;
  options.memory_root = machine_;
  options.strict_memory = spec_.strict;
  options.retain = true;
  options.max_retained_share = 1;                   // until other sequences need the room
  options.evict_idle_after = absl::ZeroDuration();  // no acknowledged sequence is evicted
  return options;
}

CacheSpec CrashWorld::SpecOf(uint32_t rank) const {
  CacheSpec spec = SmallSpec("world");
  spec.capacity_bytes = spec_.capacity_bytes;
  if (!spec_.ranks) return spec;
  spec.groups[0].kv_heads = 1;
  spec.groups[0].query_heads = 2;
  spec.rank = {.group = "group", .rank = rank, .rank_count = 2, .kv_head_begin = rank};
  return spec;
}

void CrashWorld::Fault(const std::string& what, const absl::Status& status) {
  std::string pending;
  for (const EngineModel& engine : model_.engines) {
    if (engine.pending == Operation::kNone) continue;
    absl::StrAppend(&pending, " ", NameOf(engine.pending), " of sequence ",
                    engine.pending_sequence.load());
  }
  std::fprintf(stderr, "FAULT: %s: %s (process %u; pending:%s)\n", what.c_str(),
               std::string(status.message()).c_str(), model_.process.load(), pending.c_str());
  ++model_.faults;
}

void CrashWorld::Recover(bool may_be_short) {
  SetAvailable(may_be_short && random_() % 2 == 0 ? 0 : kMachineBytes);
  auto created = Store::Create(Options());
  SetAvailable(kMachineBytes);
  if (!created.ok()) return Fault("the store does not recover", created.status());
  store_ = *std::move(created);
  ++model_.process;
  ++model_.recoveries;
  ids_of_earlier_processes_ = model_.highest_id;
  const RecoveryReport report = store_->Recovery();
  if (report.dropped_records > 0)
    Fault("records were dropped: " + absl::StrJoin(report.dropped, "; "));
  const uint64_t idle_used_bytes = model_.idle_used_bytes.exchange(~uint64_t{0});
  const uint64_t used_bytes = report.bytes + report.quarantined_bytes;
  if (report.recovered && idle_used_bytes != ~uint64_t{0} && used_bytes != idle_used_bytes) {
    Fault(absl::StrCat(idle_used_bytes, " bytes were in use, now ", used_bytes));
  }
  OpenCaches();
}

void CrashWorld::OpenCaches() {
  cache_ids_.clear();
  groups_.clear();
  pools_.clear();
  for (uint32_t rank = 0; rank < (spec_.ranks ? 2 : 1); ++rank) {
    const auto cache = store_->OpenCache(kTenant, SpecOf(rank));
    if (!cache.ok()) return Fault("OpenCache", cache.status());
    const auto shared = store_->OpenPool(kTenant, "", cache->cache_id);
    auto mapped = shared.ok()
                      ? Mapping::Map(shared->descriptor, shared->size_bytes, Mapping::Access::kRead)
                      : shared.status();
    if (!mapped.ok()) return Fault("OpenPool", mapped.status());
    cache_ids_.push_back(cache->cache_id);
    groups_.push_back(SpecOf(rank).groups[0]);
    pools_.push_back(*std::move(mapped));
  }
  std::vector<std::string> sessions = {kAuditor};
  for (uint32_t i = 0; i < spec_.engines; ++i) sessions.push_back(SessionOf(i));
  for (const std::string& session : sessions) {
    const auto opened = store_->OpenLocalSession("tenant", session, model_.process);
    if (!opened.ok()) Fault("OpenLocalSession", opened.status());
  }
}

void CrashWorld::Leave() { store_.reset(); }

CrashWorld::Found CrashWorld::AllSequences() {
  Found found;
  for (const uint64_t cache_id : cache_ids_) {
    const auto listed = store_->ListSequences(kTenant, cache_id);
    if (!listed.ok()) Fault("ListSequences", listed.status());
    for (const SequenceInfo& info : *listed) found.emplace(info.sequence_id, info);
  }
  return found;
}

bool CrashWorld::any_live() const {
  for (const EngineModel& engine : model_.engines) {
    if (engine.may_have_created > 0 && engine.creates_live) return true;
    for (const SequenceModel& sequence : engine.sequences) {
      if (sequence.is_live) return true;
    }
  }
  return false;
}

void CrashWorld::Check() {
  const Found found = AllSequences();
  CheckMemory(found);
  CheckViews();
  for (EngineModel& engine : model_.engines) Settle(engine, found);
  DropUnknown(found);
  CheckSequences();
}

void CrashWorld::CheckSequences() {
  const Found found = AllSequences();
  for (EngineModel& engine : model_.engines) {
    for (SequenceModel& sequence : engine.sequences) {
      if (sequence.id == 0) continue;
      const auto info = found.find(sequence.id);
      CheckSequence(sequence, info == found.end() ? nullptr : &info->second);
    }
  }
}

absl::StatusOr<Attachment> CrashWorld::Attach(uint64_t sequence_id, uint32_t rank,
                                              const std::string& session, uint64_t& lease_id) {
  ASSIGN_OR_RETURN(const AttachedSequence attached,
                   store_->Attach(kTenant, sequence_id, session, {}));
  lease_id = attached.lease_id;
  Attachment attachment;
  const std::string wrong =
      ParseAttachment(attached.attachment.image, pool(rank).size(), &attachment);
  if (!wrong.empty()) return absl::InternalError(wrong);
  return attachment;
}

// The recovered bytes are those of the sequences' extents, each counted once. While incremental indexes change, the
// extents of the report are not known any more.
void CrashWorld::CheckMemory(const Found& found) {
  if (any_live()) return;
  std::set<std::pair<uint32_t, uint32_t>> extents;
  size_t bytes = 0;
  for (const auto& [id, info] : found) {
    const uint32_t rank = info.cache_id == cache_ids_[0] ? 0 : 1;
    uint64_t lease_id = 0;
    const auto attachment = Attach(id, rank, kAuditor, lease_id);
    if (absl::IsFailedPrecondition(attachment.status())) return;  // suspended
    if (!attachment.ok()) return Fault("Attach of a recovered sequence", attachment.status());
    for (const auto& [unit, count] : ExtentsOf(*attachment, StoredLayers(SpecOf(rank)))) {
      if (extents.emplace(rank, unit).second) bytes += count << kExtentUnitShift;
    }
    if (!store_->Detach(kAuditor, lease_id).ok()) Fault("Detach");
  }
  const RecoveryReport report = store_->Recovery();
  if (report.recovered && report.bytes != bytes) {
    Fault(absl::StrCat("the sequences have ", bytes, " bytes, and ", report.bytes, " are in use"));
  }
}

void CrashWorld::NoteId(uint64_t sequence_id) {
  if (sequence_id <= ids_of_earlier_processes_) {
    Fault(absl::StrCat("the id ", sequence_id, " is used again"));
  }
  uint64_t highest = model_.highest_id;
  while (highest < sequence_id && !model_.highest_id.compare_exchange_weak(highest, sequence_id)) {
  }
}

// Only sequences of one session share segments here. A segment stays active when it is full, until the next token comes.
std::optional<std::set<uint32_t>> CrashWorld::ActiveUnits(uint32_t rank,
                                                          const std::string& session) {
  std::set<uint32_t> units;
  const auto listed = store_->ListSequences(kTenant, cache_ids_[rank]);
  if (!listed.ok()) Fault("ListSequences", listed.status());
  for (const SequenceInfo& info : *listed) {
    if (info.session != session) continue;
    uint64_t lease_id = 0;
    const auto attachment = Attach(info.sequence_id, rank, kAuditor, lease_id);
    if (absl::IsFailedPrecondition(attachment.status())) return std::nullopt;  // suspended
    if (!attachment.ok()) Fault("Attach", attachment.status());
    const size_t count = attachment->segments.size();
    const auto& layers = attachment->layers;
    if (count > 0 && attachment->segments.back().token_end == 0) {
      for (size_t i = layers.size() - layers.size() / count; i < layers.size(); ++i) {
        units.insert(attachment->row_extents[layers[i].row_extent_begin].unit);
      }
    }
    if (!store_->Detach(kAuditor, lease_id).ok()) Fault("Detach");
  }
  return units;
}

absl::Status CrashWorld::TakeView(const SequenceModel& sequence, const std::string& session,
                                  ViewModel& view) {
  ASSIGN_OR_RETURN(const Attachment attachment,
                   Attach(sequence.id, sequence.rank, session, view.lease_id));
  view.rank = sequence.rank;
  view.piece_count = 0;
  const uint32_t layer_count = attachment.header.layer_count;
  const uint32_t row_bytes = group(view.rank).row_bytes();
  const auto active_units = ActiveUnits(view.rank, session);
  for (size_t i = 0; i < attachment.segments.size(); ++i) {
    const SegmentDescriptor& segment = attachment.segments[i];
    for (uint32_t slot = 0; slot < layer_count; ++slot) {
      const LayerDescriptor& layer = attachment.layers[i * layer_count + slot];
      const uint32_t end =
          segment.token_end == 0 ? attachment.layer_tokens[slot] : segment.token_end;
      const uint32_t tokens = std::max(end, segment.first_position) - segment.first_position;
      // A forked sequence shows the rows of another one's active segment as those of a closed one.
      const bool is_active =
          !active_units ||
          active_units->contains(attachment.row_extents[layer.row_extent_begin].unit);
      for (uint32_t head = 0; head < layer.kv_head_count && tokens > 0; ++head) {
        const ExtentRef rows = attachment.row_extents[layer.row_extent_begin + head];
        view.Add({.offset_bytes = rows.offset_bytes(),
                  .size_bytes = size_t{tokens} * row_bytes,
                  .is_active = is_active});
      }
      for (uint32_t index = 0; index < attachment.header.index_count; ++index) {
        if (layer.state[index] != LayerState::kReady) continue;
        view.Add({.offset_bytes = layer.codebook[index].offset_bytes(),
                  .size_bytes = layer.codebook[index].size_bytes()});
      }
    }
  }
  for (uint32_t i = 0; i < view.piece_count; ++i) {
    ViewModel::Piece& piece = view.pieces[i];
    piece.crc = kernels::Crc32c({}, pool(view.rank).subspan(piece.offset_bytes, piece.size_bytes));
  }
  view.process = model_.process.load();
  return absl::OkStatus();
}

void CrashWorld::CheckViews() {
  for (const EngineModel& engine : model_.engines) {
    for (const ViewModel& view : engine.views) {
      if (view.process == 0) continue;
      ++model_.checked_views;
      for (uint32_t i = 0; i < view.piece_count; ++i) {
        const ViewModel::Piece& piece = view.pieces[i];
        if (piece.is_active && view.process != model_.process) continue;
        if (kernels::Crc32c({}, pool(view.rank).subspan(piece.offset_bytes, piece.size_bytes)) ==
            piece.crc)
          continue;
        ++model_.wrong_rows;
        Fault(absl::StrCat("bytes changed that a client of process ", view.process.load(),
                           " maps: ", piece.size_bytes, " at ", piece.offset_bytes,
                           piece.is_active ? " of an active segment" : ""));
        break;
      }
    }
  }
}

// A call that was in progress when the process was killed has happened or not.
void CrashWorld::Settle(EngineModel& engine, const Found& found) {
  const Operation pending = engine.pending;
  ++model_.hits[static_cast<size_t>(pending)];
  for (uint32_t i = 0; i < kEngineSequences; ++i) {
    const bool both = pending == Operation::kEvict || pending == Operation::kPin;
    SequenceModel& sequence = engine.sequences[i];
    const bool same_group =
        sequence.group != 0 && sequence.group == engine.sequences[engine.pending_sequence].group;
    if (i != engine.pending_sequence && !(both && same_group)) continue;
    const auto info = found.find(sequence.id);
    SettleOne(pending, engine.pending_count, sequence,
              info == found.end() ? nullptr : &info->second);
  }
  engine.pending = Operation::kNone;
}

void CrashWorld::SettleOne(Operation pending, uint32_t count, SequenceModel& sequence,
                           const SequenceInfo* info) {
  switch (pending) {
    case Operation::kCreate:
    case Operation::kCreateRanks:
    case Operation::kFork:
      sequence.id = 0;  // one that exists is dropped as unknown
      return;
    case Operation::kDrop:
    case Operation::kEvict:
      if (info == nullptr) sequence.id = 0;
      return;
    case Operation::kTruncate:  // names go first
      sequence.named = std::min(sequence.named.load(), count);
      [[fallthrough]];
    case Operation::kAppend:
    case Operation::kCommit:
      if (info == nullptr || info->token_count != count) return;
      sequence.count = count;
      if (count == 0) sequence.index_count = 0;
      return;
    case Operation::kName:
      sequence.named = 0;  // either is right
      return;
    case Operation::kSuspend:
    case Operation::kResume:
      if (info == nullptr) return;
      if (!store_->ResumeSequence(kTenant, sequence.id).ok()) Fault("ResumeSequence");
      sequence.suspended = false;
      return;
    case Operation::kPin:
      if (info != nullptr) sequence.pinned = info->pin_left > absl::ZeroDuration();
      return;
    default:  // changes nothing that is acknowledged
      return;
  }
}

// Drops sequences whose creation was not acknowledged: at most one of each engine and rank.
void CrashWorld::DropUnknown(const Found& found) {
  std::set<uint64_t> known;
  for (const EngineModel& engine : model_.engines) {
    for (const SequenceModel& sequence : engine.sequences) known.insert(sequence.id);
  }
  for (const auto& [id, info] : found) {
    if (info.is_cached_prefix || known.contains(id)) continue;
    bool was_created = false;
    for (uint32_t i = 0; i < spec_.engines; ++i) {
      was_created =
          was_created || (info.session == SessionOf(i) && model_.engines[i].may_have_created > 0 &&
                          model_.engines[i].may_have_created-- > 0);
    }
    if (!was_created) Fault(absl::StrCat("sequence ", id, " was dropped, or never created"));
    if (!store_->DropSequence(kTenant, id).ok()) Fault("DropSequence");
  }
}

void CrashWorld::CheckSequence(SequenceModel& sequence, const SequenceInfo* info) {
  const LayerGroup& group = groups_[sequence.rank];
  const size_t token_bytes = size_t{group.row_bytes()} * group.kv_heads * group.layers.size();
  if (info == nullptr) {
    model_.lost_bytes += sequence.count * token_bytes;
    Fault(absl::StrCat("sequence ", sequence.id.load(), " is lost"));
    sequence.id = 0;
    return;
  }
  if (info->token_count != sequence.count) {
    if (info->token_count < sequence.count) {
      model_.lost_bytes += (sequence.count - info->token_count) * token_bytes;
    }
    return Fault(absl::StrCat("sequence ", sequence.id.load(), " has ", info->token_count,
                              " tokens, not ", sequence.count.load()));
  }
  if ((info->pin_left > absl::ZeroDuration()) != sequence.pinned)
    Fault("a pin is lost, or came by itself");
  if (info->group_key != (sequence.group == 0 ? "" : absl::StrCat("key-", sequence.group.load()))) {
    Fault("the group key is another");
  }
  if (sequence.suspended) {
    const auto rows =
        store_->FetchBlocks(kTenant, sequence.id, group.layers[0], {0, 0}, RowPart::kRow);
    if (!absl::IsFailedPrecondition(rows.status()))
      Fault("a sequence is no longer suspended", rows.status());
    if (!store_->ResumeSequence(kTenant, sequence.id).ok()) Fault("ResumeSequence");
    sequence.suspended = false;
  }
  CheckRows(sequence);
  CheckIndexes(sequence);
  CheckNames(sequence);
}

void CrashWorld::CheckRows(const SequenceModel& sequence) {
  const LayerGroup& group = groups_[sequence.rank];
  const uint32_t count = sequence.count;
  if (count == 0) return;
  const std::span<const uint64_t> content(sequence.content.data(), count);
  const uint32_t dims = group.key_dim + group.value_dim;
  for (const uint32_t layer : group.layers) {
    const auto rows = store_->FetchBlocks(kTenant, sequence.id, layer, {0, count}, RowPart::kRow);
    if (!rows.ok()) return Fault("FetchBlocks", rows.status());
    const std::vector<float> found = ToFloats(*rows);
    const std::vector<float> wanted = RowsOf(content, group, layer);
    uint64_t wrong = 0;
    for (size_t i = 0; i < wanted.size(); i += dims) {
      const auto begin = static_cast<ptrdiff_t>(i);
      wrong +=
          std::equal(found.begin() + begin, found.begin() + begin + dims, wanted.begin() + begin)
              ? 0
              : 1;
    }
    model_.checked_rows += wanted.size() / dims;
    model_.wrong_rows += wrong;
    if (wrong > 0)
      Fault(absl::StrCat(wrong, " rows of sequence ", sequence.id.load(), " are wrong"));
  }
}

absl::Status CrashWorld::Build(const SequenceModel& sequence, uint32_t ordinal, bool rebuild) {
  absl::Status status = store_->BuildIndex(kTenant, sequence.id,
                                           {.index = kWorldIndexes[ordinal],
                                            .iterations = 1,
                                            .rebuild = rebuild,
                                            .deadline = Deadline()},
                                           {});
  return absl::IsAlreadyExists(status) ? absl::OkStatus() : status;
}

void CrashWorld::CheckIndexes(const SequenceModel& sequence) {
  if (sequence.count == 0 || sequence.index_count == 0) return;
  if (sequence.is_live) {  // it may have rows to catch up with
    const absl::Status status = Build(sequence, 0);
    if (absl::IsResourceExhausted(status)) return;
    if (!status.ok()) return Fault("BuildIndex of an incremental index", status);
    if (!store_->WaitIdle(Deadline())) Fault("WaitIdle");
  }
  uint64_t lease_id = 0;
  const auto attachment = Attach(sequence.id, sequence.rank, kAuditor, lease_id);
  if (!attachment.ok()) return Fault("Attach", attachment.status());
  const LayerGroup& group = groups_[sequence.rank];
  const std::span<const uint64_t> content(sequence.content.data(), sequence.count.load());
  for (uint32_t i = 0; i < sequence.index_count; ++i) {
    for (uint32_t slot = 0; slot < group.layers.size(); ++slot) {
      LayerModel layer{.group = group, .tokens = 0, .keys = {}, .values = {}};
      layer.group.layers = {group.layers[slot]};
      layer.Append(PartOf(content, group, group.layers[slot], 0, group.key_dim),
                   PartOf(content, group, group.layers[slot], group.key_dim, group.key_dim));
      layer.tokens = sequence.count;
      DecodedKeys decoded;
      std::string wrong =
          CheckCodes(*attachment, pool(sequence.rank), slot, kWorldIndexes[i], layer, &decoded);
      model_.checked_codes += layer.tokens;
      if (wrong.empty())
        wrong = CheckTopK(*store_, sequence.id, kWorldIndexes[i], layer, decoded, random_);
      if (!wrong.empty())
        Fault(absl::StrCat("index ", i, " of sequence ", sequence.id.load(), ": ", wrong));
    }
  }
  if (!store_->Detach(kAuditor, lease_id).ok()) Fault("Detach");
}

void CrashWorld::CheckNames(const SequenceModel& sequence) {
  const uint32_t named = std::min(sequence.named.load(), sequence.count.load());
  if (sequence.group != 0) return;  // the count is the least over the ranks
  const auto match =
      store_->MatchPrefix(kTenant, cache_ids_[sequence.rank],
                          std::span<const uint32_t>(sequence.token_ids.data(), named), "");
  if (!match.ok()) return Fault("MatchPrefix", match.status());
  if (*match < named / 128 * 128 && !spec_.ranks) Fault("names are lost");
}

void CrashWorld::GoIdle() {
  if (store_ == nullptr) return;  // it has left
  if (!store_->WaitIdle(Deadline())) return Fault("WaitIdle");
  model_.idle_used_bytes = UsedBytes();
}

size_t CrashWorld::UsedBytes() {
  size_t used_bytes = 0;
  for (const CacheInfo& cache : store_->ListCaches("")) used_bytes += cache.used_bytes;
  return used_bytes;
}

void CrashWorld::DropAll() {
  for (uint32_t i = 0; i < spec_.engines; ++i) {
    EngineModel& engine = model_.engines[i];
    for (ViewModel& view : engine.views) {
      if (view.process != model_.process) continue;
      if (!store_->Detach(SessionOf(i), view.lease_id).ok()) Fault("Detach");
      view.process = 0;
    }
    for (SequenceModel& sequence : engine.sequences) {
      if (sequence.id != 0 && !store_->DropSequence(kTenant, sequence.id).ok())
        Fault("DropSequence");
      sequence.id = 0;
    }
  }
  for (const auto& [id, info] : AllSequences()) {
    // A pin protects what is retained of its sequence, too.
    absl::Status status = store_->PinSequence("", id, absl::ZeroDuration());
    if (status.ok()) status = store_->EvictSequence(kAllTenants, id);
    if (!status.ok() && !absl::IsNotFound(status)) Fault("EvictSequence of a retained one", status);
  }
  if (!store_->WaitIdle(Deadline())) Fault("WaitIdle");
  // Memory that earlier processes used may be in quarantine; all other memory is free.
  const RecoveryReport report = store_->Recovery();
  const size_t earlier_bytes = report.bytes + report.quarantined_bytes;
  size_t used_bytes = UsedBytes();
  // A thread that computes checksums, or the like, may still read what was dropped.
  for (int i = 0; i < 1000 && used_bytes > earlier_bytes; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
    used_bytes = UsedBytes();
  }
  if (used_bytes > earlier_bytes) {
    model_.leaked_extents += (used_bytes - earlier_bytes) / kMinExtentBytes;
    Fault("extents have leaked");
  }
}

}  // namespace pqcached::kvstore::testing
