// Implements the calls that create, change and drop sequences.
#include <memory>
#include <string>

#include "client/abi/sequence_handles.h"
#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/base/operations.h"
#include "client/local/sequence.h"
#include "client/step/handles.h"
#include "client/step/offload.h"
#include "client/step/preparer.h"
#include "client/step/sender.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {

std::unique_ptr<pqc_sequence> NewHandle(const std::shared_ptr<const CacheState>& cache) {
  auto handle = std::make_unique<pqc_sequence>();
  handle->state = std::make_shared<SequenceState>();
  handle->state->cache = cache;
  return handle;
}

void Adopt(uint64_t sequence_id, uint64_t token_count, pqc_sequence& handle) {
  SequenceState& state = *handle.state;
  state.sequence_id = sequence_id;
  state.token_count = token_count;
  const std::shared_ptr<LocalSession>& local = state.cache->client->local;
  if (!local) return;
  state.local = std::make_unique<LocalSequence>(local, state.cache->cache_id, sequence_id);
}

void Forget(std::unique_ptr<pqc_sequence> sequence) {
  const std::shared_ptr<SequenceState>& state = sequence->state;
  const ClientState& client = *state->cache->client;
  if (client.operations) client.operations->CancelOf(state.get());
  // Before the state is freed: another sequence may later have the same address.
  if (client.sender) client.sender->RemoveSequence(*state);
  if (client.offload) client.offload->RemoveSequence(*state);
  if (state->local && client.preparer) client.preparer->Release(state);
}

namespace {

constexpr uint32_t kAdmitIndexedVersion = 12;  // of Remote

pqc_status Create(pqc_cache* cache, const pqc_sequence_options& options, pqc_sequence** sequence,
                  uint64_t* token_count) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  *sequence = nullptr;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*cache->state->client, &remote));
  if (options.has_live_index) {
    RETURN_IF_ERROR(CheckSendable(ToDescriptor(options.index), "options.index",
                                  cache->state->client->remote_version));
  }
  std::unique_ptr<pqc_sequence> created = NewHandle(cache->state);
  uint64_t id = 0, tokens = 0;
  RefusalBuffer error;
  const pqc_status status =
      remote->CreateSequence(cache->state->cache_id, cache->state->model_fingerprint.c_str(),
                             options, &id, &tokens, &error);
  if (status != PQC_OK) {
    return Report(status, error,
                  {{"cache_id", "cache"},
                   {"live_index", "options"},
                   {"token_ids", "options.token_ids"},
                   {"content_keys", "options.content_keys"},
                   {"extra_key", "options.extra_key"},
                   {"group_key", "options.group_key"}});
  }
  if (tokens < options.at_least_tokens) {
    RefusalBuffer ignored;
    remote->DropSequence(id, &ignored);  // else it ends with the session
    return Fail(PQC_NOT_FOUND, "options.at_least_tokens", "%llu, but %llu tokens are stored",
                static_cast<unsigned long long>(options.at_least_tokens),
                static_cast<unsigned long long>(tokens));
  }
  Adopt(id, tokens, *created);
  if (options.has_live_index) {
    created->state->live_index = ToDescriptor(options.index);
    created->state->OpenPrefill();  // also for a prefix that it shares
  }
  if (token_count) *token_count = tokens;
  *sequence = created.release();
  return PQC_OK;
}

pqc_status CreateWith(pqc_cache* cache, const pqc_sequence_options* caller_options,
                      pqc_sequence** sequence, uint64_t* token_count) {
  pqc_sequence_options options = PQC_INIT(pqc_sequence_options);
  if (caller_options) {
    RETURN_IF_ERROR(ReadSequenceOptions(caller_options, &options));
  }
  if (cache && options.has_live_index && options.index.kind == PQC_INDEX_DEFAULT) {
    options.index = ToIndex(cache->state->default_index);
  }
  return Create(cache, options, sequence, token_count);
}

pqc_status Fork(pqc_sequence* parent, uint64_t token_count, pqc_sequence** child) {
  if (!parent) return Fail(PQC_INVALID_ARGUMENT, "parent", "must not be NULL");
  if (!child) return Fail(PQC_INVALID_ARGUMENT, "child", "must not be NULL");
  *child = nullptr;
  const ChangeScope changing(parent);
  if (changing.status() != PQC_OK) return changing.status();
  std::unique_ptr<pqc_sequence> forked = NewHandle(parent->state->cache);
  uint64_t id = 0, tokens = 0;
  RefusalBuffer error;
  const pqc_status status =
      changing.remote().ForkSequence(parent->state->sequence_id, token_count, &id, &tokens, &error);
  if (status != PQC_OK) return Report(status, error, {{"sequence_id", "parent"}});
  Adopt(id, tokens, *forked);
  forked->state->live_index = parent->state->live_index;
  forked->state->prefill_open = parent->state->prefill_open.load();
  *child = forked.release();
  return PQC_OK;
}

// `prefix`: precedes the names of the prompt's fields in errors.
pqc_status MatchPrefix(pqc_cache* cache, const pqc_sequence_options& prompt, const char* prefix,
                       uint64_t* token_count) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  if (!token_count) return Fail(PQC_INVALID_ARGUMENT, "token_count", "must not be NULL");
  RETURN_IF_ERROR(CheckPrompt(prompt, prefix));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*cache->state->client, &remote));
  RefusalBuffer error;
  return Report(remote->MatchPrefix(cache->state->cache_id, prompt, token_count, &error), error,
                {{"cache_id", "cache"},
                 {"token_ids", std::string(prefix) + "token_ids"},
                 {"content_keys", std::string(prefix) + "content_keys"},
                 {"extra_key", std::string(prefix) + "extra_key"}});
}

pqc_status MatchPrefixWith(pqc_cache* cache, const pqc_sequence_options* caller_prompt,
                           uint64_t* token_count) {
  pqc_sequence_options prompt;
  RETURN_IF_ERROR(ReadPrompt(caller_prompt, &prompt));
  return MatchPrefix(cache, prompt, "prompt.", token_count);
}

pqc_status Admit(pqc_cache* cache, uint64_t token_count, uint64_t output_token_count,
                 pqc_admission* admission) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  pqc_admission answer;
  RETURN_IF_ERROR(ReadStruct(admission, "admission", &answer));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*cache->state->client, &remote));
  const CacheState& state = *cache->state;
  RefusalBuffer error;
  const pqc_status status =
      state.client->remote_version < kAdmitIndexedVersion
          ? remote->Admit(state.cache_id, token_count, output_token_count, &answer, &error)
          : remote->AdmitIndexed(state.cache_id, token_count, output_token_count,
                                 ToIndex(state.default_index), &answer, &error);
  if (status != PQC_OK) return Report(status, error, {{"cache_id", "cache"}});
  WriteStruct(answer, admission);
  return PQC_OK;
}

pqc_status Pin(pqc_sequence* sequence, uint64_t ttl_ms) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*sequence->state->cache->client, &remote));
  RefusalBuffer error;
  return Report(remote->PinSequence(sequence->state->sequence_id, ttl_ms, &error), error);
}

pqc_status Suspend(pqc_sequence* sequence) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  const ChangeScope changing(sequence);
  if (changing.status() != PQC_OK) return changing.status();
  SequenceState& state = *sequence->state;
  RefusalBuffer error;
  if (state.local) state.local->SetOwnSuspension(true);
  const pqc_status status = changing.remote().SuspendSequence(state.sequence_id, &error);
  if (status == PQC_OK) state.suspended = true;
  if (status != PQC_OK && state.local) state.local->SetOwnSuspension(state.suspended);
  return Report(status, error);
}

pqc_status Resume(pqc_sequence* sequence, uint64_t* token_count) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  const ChangeScope changing(sequence);
  if (changing.status() != PQC_OK) return changing.status();
  uint64_t tokens = 0;
  RefusalBuffer error;
  const pqc_status status =
      changing.remote().ResumeSequence(sequence->state->sequence_id, &tokens, &error);
  if (status != PQC_OK) return Report(status, error);
  sequence->state->suspended = false;
  if (sequence->state->local) sequence->state->local->SetOwnSuspension(false);
  sequence->state->token_count = tokens;
  if (token_count) *token_count = tokens;
  return PQC_OK;
}

pqc_status Drop(pqc_sequence* sequence) {
  if (!sequence) return PQC_OK;
  const std::unique_ptr<pqc_sequence> owned(sequence);
  SequenceState& state = *owned->state;
  ClientState& client = *state.cache->client;
  if (client.operations) client.operations->CancelOf(&state);
  // Before the state is freed: another sequence may later have the same address.
  if (client.sender) client.sender->RemoveSequence(state);
  if (client.offload) client.offload->RemoveSequence(state);
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(client, &remote));
  if (state.local) state.local->Detach();
  RefusalBuffer error;
  return Report(remote->DropSequence(state.sequence_id, &error), error);
}

pqc_status Truncate(pqc_sequence* sequence, uint64_t token_count) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  if (token_count > kMaxSequenceTokens) {
    return Fail(PQC_INVALID_ARGUMENT, "token_count", "%llu, must be at most 2^30",
                static_cast<unsigned long long>(token_count));
  }
  const ChangeScope changing(sequence);
  if (changing.status() != PQC_OK) return changing.status();
  SequenceState& state = *sequence->state;
  LocalSequence* local = state.local.get();
  if (local) local->BeginRollBack(static_cast<uint32_t>(token_count));
  ImageBytes image;
  RefusalBuffer error;
  const LeaseView lease = local ? local->lease() : LeaseView{};
  pqc_status status = changing.remote().TruncateSequence(
      state.sequence_id, token_count, lease, local ? image.sink() : ImageSink{}, &error);
  if (local) local->EndRollBack();
  if (status != PQC_OK) return Report(status, error);
  state.SetTruncated(token_count);
  return local ? local->Install(lease, image) : PQC_OK;
}

pqc_status Describe(pqc_sequence* sequence, pqc_sequence_info* info) {
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  pqc_sequence_info described;
  RETURN_IF_ERROR(ReadStruct(info, "info", &described));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*sequence->state->cache->client, &remote));
  RefusalBuffer error;
  const pqc_status status =
      remote->DescribeSequence(sequence->state->sequence_id, &described, &error);
  if (status != PQC_OK) return Report(status, error);
  WriteStruct(described, info);
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

using pqcached::client::CallRecord;
using pqcached::client::RecordedCall;

extern "C" {

pqc_status pqc_sequence_create(pqc_cache* cache, pqc_sequence** sequence) {
  return RecordedCall(
      "pqc_sequence_create",
      [&](CallRecord& call) { call.Handle("cache", cache).Opens("sequence", sequence); },
      [&] { return pqcached::client::Create(cache, {}, sequence, nullptr); });
}

pqc_status pqc_sequence_create_with(pqc_cache* cache, const pqc_sequence_options* options,
                                    pqc_sequence** sequence, uint64_t* token_count) {
  return RecordedCall(
      "pqc_sequence_create_with",
      [&](CallRecord& call) {
        call.Handle("cache", cache).Opens("sequence", sequence).Gives("token_count", token_count);
      },
      [&] { return pqcached::client::CreateWith(cache, options, sequence, token_count); });
}

pqc_status pqc_sequence_fork(pqc_sequence* parent, uint64_t token_count, pqc_sequence** child) {
  return RecordedCall(
      "pqc_sequence_fork",
      [&](CallRecord& call) {
        call.Handle("parent", parent).Number("token_count", token_count).Opens("child", child);
      },
      [&] { return pqcached::client::Fork(parent, token_count, child); });
}

pqc_status pqc_match_prefix(pqc_cache* cache, const uint32_t* token_ids, uint64_t token_id_count,
                            const void* extra_key, uint64_t extra_key_bytes,
                            uint64_t* token_count) {
  return RecordedCall(
      "pqc_match_prefix",
      [&](CallRecord& call) {
        call.Handle("cache", cache).Number("token_id_count", token_id_count);
      },
      [&] {
        pqc_sequence_options prompt = PQC_INIT(pqc_sequence_options);
        prompt.token_ids = token_ids;
        prompt.token_id_count = token_id_count;
        prompt.extra_key = extra_key;
        prompt.extra_key_bytes = extra_key_bytes;
        return pqcached::client::MatchPrefix(cache, prompt, "", token_count);
      });
}

pqc_status pqc_match_prefix_with(pqc_cache* cache, const pqc_sequence_options* prompt,
                                 uint64_t* token_count) {
  return RecordedCall(
      "pqc_match_prefix_with", [&](CallRecord& call) { call.Handle("cache", cache); },
      [&] { return pqcached::client::MatchPrefixWith(cache, prompt, token_count); });
}

pqc_status pqc_admit(pqc_cache* cache, uint64_t token_count, uint64_t output_token_count,
                     pqc_admission* admission) {
  return RecordedCall(
      "pqc_admit",
      [&](CallRecord& call) {
        call.Handle("cache", cache)
            .Number("token_count", token_count)
            .Number("output_token_count", output_token_count);
      },
      [&] { return pqcached::client::Admit(cache, token_count, output_token_count, admission); });
}

pqc_status pqc_sequence_pin(pqc_sequence* sequence, uint64_t ttl_ms) {
  return RecordedCall(
      "pqc_sequence_pin",
      [&](CallRecord& call) { call.Handle("sequence", sequence).Number("ttl_ms", ttl_ms); },
      [&] { return pqcached::client::Pin(sequence, ttl_ms); });
}

pqc_status pqc_sequence_suspend(pqc_sequence* sequence) {
  return RecordedCall(
      "pqc_sequence_suspend", [&](CallRecord& call) { call.Handle("sequence", sequence); },
      [&] { return pqcached::client::Suspend(sequence); });
}

pqc_status pqc_sequence_resume(pqc_sequence* sequence, uint64_t* token_count) {
  return RecordedCall(
      "pqc_sequence_resume",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence).Gives("token_count", token_count);
      },
      [&] { return pqcached::client::Resume(sequence, token_count); });
}

pqc_status pqc_sequence_drop(pqc_sequence* sequence) {
  return RecordedCall(
      "pqc_sequence_drop", [&](CallRecord& call) { call.Closes("sequence", sequence); },
      [&] { return pqcached::client::Drop(sequence); });
}

uint64_t pqc_sequence_id(const pqc_sequence* sequence) {
  return sequence ? sequence->state->sequence_id : 0;
}

pqc_status pqc_sequence_truncate(pqc_sequence* sequence, uint64_t token_count) {
  return RecordedCall(
      "pqc_sequence_truncate",
      [&](CallRecord& call) {
        call.Handle("sequence", sequence).Number("token_count", token_count);
      },
      [&] { return pqcached::client::Truncate(sequence, token_count); });
}

pqc_status pqc_sequence_describe(pqc_sequence* sequence, pqc_sequence_info* info) {
  return RecordedCall(
      "pqc_sequence_describe", [&](CallRecord& call) { call.Handle("sequence", sequence); },
      [&] { return pqcached::client::Describe(sequence, info); });
}

}  // extern "C"
