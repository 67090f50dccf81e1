#include "tests/client/local/store_client.h"
#include "absl/time/time.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

#include "client/base/arguments.h"
#include "client/local/session.h"
#include "client/step/handles.h"
#include "kvstore/refusal.h"
#include "kvstore/share/control_memory.h"
#include "tests/client/local/no_pages_remote.h"
#include "tests/client/local/staged_rows.h"

namespace pqcached::testing {
namespace {

using namespace pqcached::client;  // NOLINT: this is its stand-in

// Fills `error` as client/rpc/refusal.cc does: UNAVAILABLE without details is worth repeating.
pqc_status FromStatus(const absl::Status& status, RefusalBuffer* error) {
  SetRefusal(error, kvstore::FieldOf(status).c_str(), kvstore::TextOf(status).c_str());
  const bool is_bare = status == absl::Status(status.code(), status.message());
  error->retry_ms =
      absl::IsUnavailable(status) && is_bare ? kRetryMemory : kvstore::RetryMsOf(status);
  return static_cast<pqc_status>(status.code());
}

pqc_status FromStatus(const absl::Status& status) {
  RefusalBuffer error;
  return Report(FromStatus(status, &error), error);
}

kvstore::LeaseState ToStore(const LeaseView& lease) {
  return {.lease_id = lease.lease_id, .known_version = lease.known_version};
}

void Give(const kvstore::VersionedImage& image, const ImageSink& sink) {
  if (sink.write && !image.image.empty()) {
    sink.write(sink.context, image.version, image.image.data(), image.image.size());
  }
}

pqc_status MapShared(const absl::StatusOr<kvstore::SharedMemory>& memory, MappingAccess access,
                     std::shared_ptr<Mapping>* mapping) {
  if (!memory.ok()) return FromStatus(memory.status());
  return Mapping::Map(dup(memory->descriptor.get()), memory->size_bytes, access, "memory", mapping);
}

absl::Status CheckBoot(const Sidecar& sidecar, uint64_t boot_word) {
  if (boot_word == 0 || boot_word == sidecar.boot_word) return absl::OkStatus();
  return absl::UnavailableError("the sidecar's worker was replaced");
}

class StoreHost final : public LocalHost {
 public:
  explicit StoreHost(Sidecar& sidecar)
      : sidecar_(sidecar), boot_word_(sidecar.boot_word), session_(sidecar.local_session()) {
    ++sidecar_.connections;
  }
  ~StoreHost() override { --sidecar_.connections; }

  pqc_status OpenPool(uint64_t cache_id, std::shared_ptr<Mapping>* pool) override {
    return MapShared(sidecar_.store->OpenPool(kTestTenant, "", cache_id), MappingAccess::kRead,
                     pool);
  }
  pqc_status HoldPool(uint64_t cache_id) override {
    return FromStatus(sidecar_.store->HoldPool(kTestTenant, session_, cache_id));
  }
  pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                         std::shared_ptr<Mapping>* ring) override {
    if (!sidecar_.reachable) return FromStatus(absl::UnavailableError("nobody answers"));
    return MapShared(sidecar_.store->OpenStaging(kTestTenant, session_, slot_bytes, slot_count),
                     MappingAccess::kReadWrite, ring);
  }
  pqc_status Attach(uint64_t sequence_id, const LeaseView& lease, AttachAnswer* answer) override {
    ++(InCall() ? sidecar_.calls : sidecar_.background_calls);
    if (!sidecar_.reachable) return FromStatus(absl::UnavailableError("nobody answers"));
    if (const absl::Status status = CheckBoot(sidecar_, lease.boot_word); !status.ok()) {
      return FromStatus(status);
    }
    const auto attached =
        sidecar_.store->Attach(kTestTenant, sequence_id, session_, ToStore(lease));
    if (!attached.ok()) return FromStatus(attached.status());
    answer->lease_id = attached->lease_id;
    answer->word_index = attached->word_index;
    Give(attached->attachment, answer->image.sink());
    return PQC_OK;
  }
  pqc_status Detach(const LeaseView& lease) override {
    ++sidecar_.calls;
    if (const absl::Status status = CheckBoot(sidecar_, lease.boot_word); !status.ok()) {
      return FromStatus(status);
    }
    return FromStatus(sidecar_.store->Detach(session_, lease.lease_id));
  }
  void End() override { sidecar_.ended = true; }
  bool HoldsConnection() override { return true; }
  bool WaitEnded(uint32_t) override { return sidecar_.ended && boot_word_ == sidecar_.boot_word; }
  void Abandon() override {}

 private:
  Sidecar& sidecar_;
  const uint64_t boot_word_;
  const std::string session_;
};

class StoreRemote final : public NoPagesRemote {
 public:
  explicit StoreRemote(Sidecar& sidecar) : sidecar_(sidecar) {}
  void Close() noexcept override { delete this; }

  pqc_status OpenCache(const pqc_cache_spec& spec, uint64_t* cache_id,
                       RefusalBuffer* error) noexcept override {
    kvstore::CacheSpec cache;
    cache.name = spec.name;
    cache.model_fingerprint = spec.model_fingerprint;
    cache.capacity_bytes = spec.capacity_bytes;
    cache.default_index = {kvstore::IndexKind::kPq, 2, 6};
    for (uint32_t i = 0; i < spec.group_count; ++i) {
      const pqc_layer_group& from = spec.groups[i];
      kvstore::LayerGroup group;
      group.kind = static_cast<kvstore::LayerKind>(from.kind);
      group.window_tokens = from.window_tokens;
      group.layers.assign(from.layers, from.layers + from.layer_count);
      group.kv_heads = from.kv_heads;
      group.query_heads = from.query_heads;
      group.key_dim = from.key_dim;
      group.value_dim = from.value_dim;
      group.dtype = static_cast<kernels::DType>(from.dtype);
      cache.groups.push_back(group);
    }
    const auto opened = Counted().OpenCache(kTestTenant, cache);
    if (opened.ok()) *cache_id = opened->cache_id;
    return FromStatus(opened.status(), error);
  }
  pqc_status CreateSequence(uint64_t cache_id, const char*, const pqc_sequence_options& options,
                            uint64_t* sequence_id, uint64_t* token_count,
                            RefusalBuffer* error) noexcept override {
    kvstore::SequenceSpec spec;
    spec.session = sidecar_.session;
    spec.token_ids.assign(options.token_ids, options.token_ids + options.token_id_count);
    spec.group_key.assign(static_cast<const char*>(options.group_key), options.group_key_bytes);
    if (options.has_live_index) {
      spec.live_index = kvstore::LiveIndex{.index = ToDescriptor(options.index)};
    }
    return Created(Counted().CreateSequence(kTestTenant, cache_id, spec), sequence_id, token_count,
                   error);
  }
  pqc_status ForkSequence(uint64_t sequence_id, uint64_t token_count, uint64_t* child_id,
                          uint64_t* child_token_count, RefusalBuffer* error) noexcept override {
    return Created(Counted().ForkSequence(kTestTenant, sequence_id, token_count, sidecar_.session),
                   child_id, child_token_count, error);
  }
  pqc_status ForkSequences(ForkItem*, uint32_t, const uint64_t*, uint32_t,
                           RefusalBuffer* error) noexcept override {
    return Not("ForkSequences", error);
  }
  pqc_status PrefixKeys(uint64_t, const pqc_sequence_options&, pqc_prefix_key*, pqc_prefix_key*,
                        uint64_t, uint64_t*, RefusalBuffer* error) noexcept override {
    return Not("PrefixKeys", error);
  }
  pqc_status WatchEvents(uint64_t, uint64_t, uint64_t, uint64_t*,
                         RefusalBuffer* error) noexcept override {
    return Not("WatchEvents", error);
  }
  pqc_status NextEvents(uint64_t, uint32_t, pqc_cache_event*, uint32_t, uint32_t*,
                        RefusalBuffer* error) noexcept override {
    return Not("WatchEvents", error);
  }
  void EndWatch(uint64_t) noexcept override {}
  pqc_status FindSequence(uint64_t, uint64_t, uint64_t*, pqc_index*,
                          RefusalBuffer* error) noexcept override {
    return Not("FindSequence", error);
  }
  pqc_status MatchPrefix(uint64_t cache_id, const pqc_sequence_options& prompt,
                         uint64_t* token_count, RefusalBuffer* error) noexcept override {
    const auto matched = Counted().MatchPrefix(
        kTestTenant, cache_id, std::span(prompt.token_ids, prompt.token_id_count), "");
    if (matched.ok()) *token_count = *matched;
    return FromStatus(matched.status(), error);
  }
  pqc_status Admit(uint64_t cache_id, uint64_t token_count, uint64_t output_token_count,
                   pqc_admission* admission, RefusalBuffer* error) noexcept override {
    const pqc_index default_index = {sizeof(pqc_index), PQC_INDEX_PQ, 2, 6, {}};
    return AdmitIndexed(cache_id, token_count, output_token_count, default_index, admission, error);
  }
  pqc_status AdmitIndexed(uint64_t cache_id, uint64_t token_count, uint64_t output_token_count,
                          const pqc_index& index, pqc_admission* admission,
                          RefusalBuffer* error) noexcept override {
    kvstore::IndexDescriptor asked;
    if (index.kind == PQC_INDEX_PQ) asked = ToDescriptor(index);
    const auto fits = Counted().Admit(
        kTestTenant, cache_id,
        {.prefill_tokens = token_count, .output_tokens = output_token_count, .index = asked});
    if (fits.ok()) admission->verdict = static_cast<pqc_verdict>(fits->verdict);
    return FromStatus(fits.status(), error);
  }
  pqc_status PinSequence(uint64_t sequence_id, uint64_t ttl_ms,
                         RefusalBuffer* error) noexcept override {
    return FromStatus(Counted().PinSequence(kTestTenant, sequence_id,
                                            absl::Milliseconds(static_cast<int64_t>(ttl_ms))),
                      error);
  }
  pqc_status SuspendSequence(uint64_t sequence_id, RefusalBuffer* error) noexcept override {
    return FromStatus(Counted().SuspendSequence(kTestTenant, sequence_id).status(), error);
  }
  pqc_status ResumeSequence(uint64_t sequence_id, uint64_t* token_count,
                            RefusalBuffer* error) noexcept override {
    const auto resumed = Counted().ResumeSequence(kTestTenant, sequence_id);
    if (resumed.ok()) *token_count = *resumed;
    return FromStatus(resumed.status(), error);
  }
  pqc_status DropSequence(uint64_t sequence_id, RefusalBuffer* error) noexcept override {
    return FromStatus(Counted().DropSequence(kTestTenant, sequence_id), error);
  }
  pqc_status TruncateSequence(uint64_t sequence_id, uint64_t token_count, const LeaseView& lease,
                              const ImageSink& image, RefusalBuffer* error) noexcept override {
    CountCall();
    if (!sidecar_.reachable) return FromStatus(absl::UnavailableError("nobody answers"), error);
    const absl::Status boot = CheckBoot(sidecar_, lease.boot_word);
    if (!boot.ok()) return FromStatus(boot, error);
    const auto truncated =
        sidecar_.store->TruncateSequence(kTestTenant, sequence_id, token_count, lease.lease_id);
    if (truncated.ok()) Refresh(lease, image);
    return FromStatus(truncated.status(), error);
  }
  pqc_status DescribeSequence(uint64_t sequence_id, pqc_sequence_info* info,
                              RefusalBuffer* error) noexcept override {
    const auto described = Counted().DescribeSequence(kTestTenant, sequence_id);
    if (described.ok()) info->token_count = described->token_count;
    return FromStatus(described.status(), error);
  }
  pqc_status Ingest(uint64_t sequence_id, uint64_t first_position, const RowBlock& rows,
                    RefusalBuffer* error) noexcept override {
    uint64_t token_count = 0;
    return IngestLayers(sequence_id, first_position, {&rows, 1}, &token_count, error);
  }
  pqc_status IngestStaged(uint64_t sequence_id, const StagedRows& source,
                          RefusalBuffer* error) noexcept override {
    const absl::Status boot = CheckBoot(sidecar_, source.boot_word);
    if (!boot.ok()) return FromStatus(boot, error);
    if (!InCall()) sidecar_.PassGate();
    auto transaction = Counted().BeginIngest(kTestTenant, sequence_id);
    if (!transaction.ok()) return FromStatus(transaction.status(), error);
    const StagedRows::Probe probe{.in_progress = [](void*) { return true; }};
    for (;;) {
      uint64_t first_position = 0;
      RowBlock rows;
      const StagedRows::Next next = source.next(source.context, probe, &first_position, &rows);
      if (next == StagedRows::Next::kGiveUp) {
        return FromStatus(absl::CancelledError("given up"), error);
      }
      if (next == StagedRows::Next::kEnd) break;
      ++sidecar_.commits;
      Claims claims(sidecar_);
      const absl::Status written = WriteStaged(**transaction, first_position, rows, claims);
      if (!written.ok()) return FromStatus(written, error);
    }
    const absl::Status committed = (*transaction)->Commit().status();
    return FromStatus(committed.ok() ? Name(sequence_id, source.names) : committed, error);
  }
  pqc_status NameTokens(uint64_t sequence_id, const pqc_row_options& names,
                        RefusalBuffer* error) noexcept override {
    return FromStatus(Name(sequence_id, &names), error);
  }
  pqc_status Commit(uint64_t sequence_id, uint64_t first_position, const RowBlock* rows,
                    uint32_t row_block_count, uint64_t* token_count,
                    RefusalBuffer* error) noexcept override {
    ++sidecar_.commits;
    return IngestLayers(sequence_id, first_position, {rows, row_block_count}, token_count, error);
  }
  pqc_status Append(AppendItem* items, uint32_t item_count,
                    RefusalBuffer* error) noexcept override {
    CountCall();
    sidecar_.PassGate();
    if (!sidecar_.reachable) return FromStatus(absl::UnavailableError("nobody answers"), error);
    if (sidecar_.unavailable_appends > 0) {
      --sidecar_.unavailable_appends;
      return FromStatus(absl::UnavailableError("for now"), error);
    }
    Claims claims(sidecar_);
    for (uint32_t i = 0; i < item_count; ++i) {
      const absl::Status boot = CheckBoot(sidecar_, items[i].lease.boot_word);
      if (!boot.ok()) return FromStatus(boot, error);
      for (uint32_t j = 0; j < items[i].row_block_count; ++j) {
        const StagingPlace* place = items[i].rows[j].keys.staging;
        const absl::Status ring = CheckBoot(sidecar_, place ? place->boot_word : 0);
        if (!ring.ok()) return FromStatus(ring, error);
      }
    }
    for (uint32_t i = 0; i < item_count; ++i) {
      auto appended = AppendOne(items[i], claims);
      if (appended.ok()) {
        const absl::Status named = Name(items[i].sequence_id, items[i].names);
        if (!named.ok()) appended = named;
      }
      if (!appended.ok()) {
        return FromStatus(
            kvstore::PrefixField("items[" + std::to_string(i) + "]", appended.status()), error);
      }
      items[i].token_count = *appended;
      Refresh(items[i].lease, items[i].image);
    }
    if (sidecar_.unanswered_appends > 0) {
      --sidecar_.unanswered_appends;
      sidecar_.HoldSlots(claims.TakeSlots());
      return FromStatus(absl::UnavailableError("no answer"), error);
    }
    if (sidecar_.lost_answers > 0) {
      --sidecar_.lost_answers;
      return FromStatus(absl::UnavailableError("the answer was lost"), error);
    }
    return PQC_OK;
  }
  pqc_status ClosePrefill(uint64_t sequence_id, RefusalBuffer* error) noexcept override {
    ++sidecar_.closed_prefills;
    return FromStatus(Counted().ClosePrefill(kTestTenant, sequence_id), error);
  }
  pqc_status BuildIndex(uint64_t sequence_id, const pqc_build_options& options,
                        RefusalBuffer* error) noexcept override {
    kvstore::IndexDescriptor index = {kvstore::IndexKind::kPq, 2, 6};
    if (options.index.kind == PQC_INDEX_PQ) index = ToDescriptor(options.index);
    const kvstore::BuildSpec spec{.index = index,
                                  .iterations = 3,
                                  .seed = 1,
                                  .sink_tokens = static_cast<uint32_t>(options.sink_tokens)};
    const auto keep_going = [&options](const kvstore::BuildProgress& done) {
      pqc_build_progress progress = PQC_INIT(pqc_build_progress);
      progress.layers_done = done.layers_done;
      return !options.callback || options.callback(options.callback_context, &progress) != 0;
    };
    ++sidecar_.builds;
    if (!InCall()) sidecar_.PassGate();
    return FromStatus(Counted().BuildIndex(kTestTenant, sequence_id, spec, keep_going), error);
  }
  pqc_status TopK(const TopKItem*, uint32_t, RefusalBuffer* error) noexcept override {
    return Not("TopK", error);
  }
  pqc_status Score(const QueryView&, const kvstore::IndexDescriptor&, kvstore::TokenRange,
                   const ScoresOut&, RefusalBuffer* error) noexcept override {
    return Not("Score", error);
  }
  pqc_status FetchBlocks(const FetchView&, kvstore::TokenRange, std::byte*,
                         RefusalBuffer* error) noexcept override {
    return Not("FetchBlocks", error);
  }
  pqc_status FetchTokens(const FetchView&, const PositionsView&, std::byte*,
                         RefusalBuffer* error) noexcept override {
    return Not("FetchTokens", error);
  }
  pqc_status Attend(const AttendItem*, uint32_t, RefusalBuffer* error) noexcept override {
    return Not("Attend", error);
  }
  pqc_status AttendRange(const AttendRangeItem*, uint32_t, RefusalBuffer* error) noexcept override {
    return Not("AttendRange", error);
  }
  pqc_status CheckConnected(RefusalBuffer* error) noexcept override {
    return Not("CheckConnected", error);
  }
  pqc_status TopPages(const TopPagesItem*, uint32_t, RefusalBuffer* error) noexcept override {
    return Not("TopPages", error);
  }
  pqc_status Attach(uint64_t, const LeaseView&, uint64_t*, uint32_t*, const ImageSink&,
                    RefusalBuffer* error) noexcept override {
    return Not("Attach", error);
  }
  pqc_status Detach(const LeaseView&, RefusalBuffer* error) noexcept override {
    return Not("Detach", error);
  }
  void Count(uint64_t* rpcs, uint64_t* background_rpcs) noexcept override {
    *rpcs = sidecar_.calls;
    *background_rpcs = sidecar_.background_calls;
  }
  pqc_status AdminJson(const char*, const char*, const TextSink&,
                       RefusalBuffer* error) noexcept override {
    return Not("Admin", error);
  }

 private:
  ~StoreRemote() = default;

  kvstore::Store& Counted() {
    CountCall();
    return *sidecar_.store;
  }
  // Names tokens as the sidecar does, after their rows are stored.
  absl::Status Name(uint64_t sequence_id, const pqc_row_options* names) {
    if (!names) return absl::OkStatus();
    std::vector<kvstore::ContentKey> keys(names->content_key_count);
    if (!keys.empty()) {
      std::memcpy(keys.data(), names->content_keys, keys.size() * sizeof(kvstore::ContentKey));
    }
    return kvstore::PrefixField(
        "names", kvstore::MoveField("first_position", "begin",
                                    sidecar_.store->NameTokens(
                                        kTestTenant, sequence_id, names->names_begin,
                                        {{names->token_ids, names->token_id_count}, keys})));
  }
  void CountCall() { ++(InCall() ? sidecar_.calls : sidecar_.background_calls); }
  static pqc_status Not(const char* call, RefusalBuffer* error) {
    std::snprintf(error->text, sizeof(error->text), "%s is not of the local path", call);
    return PQC_INTERNAL;
  }
  static pqc_status Created(const absl::StatusOr<kvstore::CreatedSequence>& created, uint64_t* id,
                            uint64_t* token_count, RefusalBuffer* error) {
    if (created.ok()) {
      *id = created->sequence_id;
      *token_count = created->token_count;
    }
    return FromStatus(created.status(), error);
  }
  void Refresh(const LeaseView& lease, const ImageSink& image) {
    if (lease.lease_id == 0) return;
    const auto newer = sidecar_.store->RefreshLease(sidecar_.local_session(), ToStore(lease));
    if (newer.ok()) Give(*newer, image);
  }
  static absl::Status Resolve(const RowBlock& rows, Claims& claims, Packed* keys, Packed* values) {
    const absl::Status resolved = keys->Resolve(rows.keys, claims);
    if (!resolved.ok()) return kvstore::PrefixField("keys.staging", resolved);
    return kvstore::PrefixField("values.staging", values->Resolve(rows.values, claims));
  }
  // Stores the rows, staged or inline, in one transaction.
  pqc_status IngestLayers(uint64_t sequence_id, uint64_t first_position,
                          std::span<const RowBlock> rows, uint64_t* token_count,
                          RefusalBuffer* error) {
    if (!InCall()) sidecar_.PassGate();
    if (!sidecar_.reachable) return FromStatus(absl::UnavailableError("nobody answers"), error);
    auto transaction = Counted().BeginIngest(kTestTenant, sequence_id);
    if (!transaction.ok()) return FromStatus(transaction.status(), error);
    Claims claims(sidecar_);
    for (const RowBlock& block : rows) {
      const StagingPlace* place = block.keys.staging;
      absl::Status written = CheckBoot(sidecar_, place ? place->boot_word : 0);
      if (written.ok()) written = WriteStaged(**transaction, first_position, block, claims);
      if (!written.ok()) return FromStatus(written, error);
    }
    const auto committed = (*transaction)->Commit();
    if (!committed.ok()) return FromStatus(committed.status(), error);
    *token_count = *committed;
    return FromStatus(Name(sequence_id, rows.empty() ? nullptr : rows.front().names), error);
  }

  static absl::Status WriteStaged(kvstore::IngestTransaction& transaction, uint64_t first_position,
                                  const RowBlock& rows, Claims& claims) {
    Packed keys(rows.keys), values(rows.values);
    const absl::Status resolved = Resolve(rows, claims, &keys, &values);
    if (!resolved.ok()) return kvstore::PrefixField("rows", resolved);
    return transaction.Write(first_position,
                             {.layer = rows.layer, .keys = keys.view, .values = values.view});
  }
  absl::StatusOr<uint64_t> AppendOne(const AppendItem& item, Claims& claims) {
    const bool staged = item.row_block_count > 0 && item.rows[0].keys.staging != nullptr;
    if (staged && sidecar_.refuse_staging) {
      return kvstore::FailedPrecondition("rows[0].keys.staging", "refused");
    }
    ++(staged ? sidecar_.staged_appends : sidecar_.inline_appends);
    std::vector<Packed> packed;
    packed.reserve(size_t{2} * item.row_block_count);
    std::vector<kvstore::LayerRows> layers;
    for (uint32_t i = 0; i < item.row_block_count; ++i) {
      Packed& keys = packed.emplace_back(item.rows[i].keys);
      Packed& values = packed.emplace_back(item.rows[i].values);
      const absl::Status resolved = Resolve(item.rows[i], claims, &keys, &values);
      if (!resolved.ok()) return kvstore::PrefixField("rows[" + std::to_string(i) + "]", resolved);
      layers.push_back({.layer = item.rows[i].layer, .keys = keys.view, .values = values.view});
    }
    return sidecar_.store->Append(kTestTenant, item.sequence_id, item.first_position, layers);
  }

  Sidecar& sidecar_;
};

pqc_status Connect(Sidecar& sidecar, LocalLink::Parts* parts) {
  if (!sidecar.reachable) return FromStatus(absl::UnavailableError("nobody answers"));
  if (!sidecar.knows_session) return FromStatus(kvstore::NotFound("resume_token", "no session"));
  if (sidecar.has_other_version) {
    return FromStatus(kvstore::FailedPrecondition("", "its protocol version is another one"));
  }
  parts->boot_word = sidecar.boot_word;
  auto memory =
      sidecar.store->OpenLocalSession("tenant", sidecar.local_session(), parts->boot_word);
  if (!memory.ok()) return FromStatus(memory.status());
  sidecar.KeepControl(std::move(memory->keeper_control));
  const absl::StatusOr<kvstore::SharedMemory> shared = std::move(memory->control);
  parts->host = std::make_unique<StoreHost>(sidecar);
  return MapShared(shared, MappingAccess::kRead, &parts->control);
}

}  // namespace

pqc_client* OpenStoreHandle(Sidecar& sidecar, const Workers::Options& workers,
                            uint32_t timeout_ms) {
  auto state = std::make_shared<ClientState>();
  state->timeout_ms = timeout_ms;
  state->remote.reset(new StoreRemote(sidecar));
  LocalLink::Parts parts;
  pqc_status status = Connect(sidecar, &parts);
  if (status == PQC_OK) {
    status = LocalSession::Open(
        std::move(parts),
        [&sidecar](uint32_t, LocalLink::Parts* resumed) { return Connect(sidecar, resumed); },
        {.workers = workers,
         .staging_slot_bytes = 1 << 20,
         .staging_slot_count = 3,
         .timeout_ms = timeout_ms,
         .phase = std::make_shared<SessionPhase>()},
        &state->local);
  }
  if (status != PQC_OK) throw std::runtime_error(pqc_last_error());
  state->Start();
  return new pqc_client{std::move(state)};
}

Client OpenStoreClient(Sidecar& sidecar, const Workers::Options& workers, uint32_t timeout_ms) {
  return Client::Adopt(OpenStoreHandle(sidecar, workers, timeout_ms));
}

}  // namespace pqcached::testing
