// RpcRemote: creates, changes and drops sequences, and leases them.
#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "client/base/descriptor_words.h"
#include "client/rpc/rpc_remote.h"
#include "client/rpc/wire.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "proto/codec/index.h"

namespace pqcached::client {
namespace {

// Longest wait of DropSequence for a worker.
constexpr std::chrono::seconds kDropWait(2);

template <class Request>
void SetPrompt(const pqc_sequence_options& prompt, Request* request) {
  request->mutable_token_ids()->Add(prompt.token_ids, prompt.token_ids + prompt.token_id_count);
  if (prompt.content_key_count > 0) {
    request->set_content_keys(prompt.content_keys,
                              prompt.content_key_count * sizeof(pqc_content_key));
  }
  if (prompt.extra_key_bytes > 0) request->set_extra_key(prompt.extra_key, prompt.extra_key_bytes);
}

}  // namespace

pqc_status RpcRemote::CreateSequence(uint64_t cache_id, const char* model_fingerprint,
                                     const pqc_sequence_options& caller_options,
                                     uint64_t* sequence_id, uint64_t* token_count,
                                     RefusalBuffer* error) noexcept {
  return Finish("CreateSequence", error, [&] {
    pqc_sequence_options options;
    RETURN_IF_ERROR(ReadStruct(caller_options, "options", &options));
    v1::CreateSequenceRequest request;
    v1::CreateSequenceResponse response;
    request.set_cache_id(cache_id);
    request.set_model_fingerprint(model_fingerprint);
    SetPrompt(options, &request);
    if (options.group_key_bytes > 0) {
      request.set_group_key(options.group_key, options.group_key_bytes);
    }
    request.set_retention(static_cast<v1::Retention>(options.retain));
    if (options.has_live_index) {
      v1::LiveIndex* live = request.mutable_live_index();
      if (!ToWire(options.index, live->mutable_index())) live->clear_index();
      live->set_iterations(options.iterations);
      live->set_seed(options.seed);
      live->set_train_tokens(options.train_tokens);
      live->set_sink_tokens(options.sink_tokens);
    }
    grpc::Status status = Attempt(Repeat::kNever, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncCreateSequence, context, request,
                  &response);
    });
    *sequence_id = response.sequence_id();
    *token_count = response.token_count();
    return status;
  });
}

pqc_status RpcRemote::ForkSequence(uint64_t sequence_id, uint64_t token_count, uint64_t* child_id,
                                   uint64_t* child_token_count, RefusalBuffer* error) noexcept {
  return Finish("ForkSequence", error, [&] {
    v1::ForkSequenceRequest request;
    v1::ForkSequenceResponse response;
    request.set_sequence_id(sequence_id);
    request.set_token_count(token_count);
    grpc::Status status = Attempt(Repeat::kNever, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncForkSequence, context, request, &response);
    });
    *child_id = response.sequence_id();
    *child_token_count = response.token_count();
    return status;
  });
}

pqc_status RpcRemote::ForkSequences(ForkItem* items, uint32_t item_count,
                                    const uint64_t* dropped_ids, uint32_t dropped_count,
                                    RefusalBuffer* error) noexcept {
  return Finish("ForkSequences", error, [&] {
    v1::ForkSequencesRequest request;
    v1::ForkSequencesResponse response;
    for (uint32_t i = 0; i < item_count; ++i) {
      request.add_items()->set_sequence_id(items[i].parent_id);
    }
    request.mutable_dropped_sequence_ids()->Add(dropped_ids, dropped_ids + dropped_count);
    grpc::Status status = Attempt(Repeat::kNever, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncForkSequences, context, request, &response);
    });
    if (!status.ok()) return status;
    if (response.items_size() != static_cast<int>(item_count)) {
      return grpc::Status(grpc::StatusCode::INTERNAL, "the answer lacks forks");
    }
    for (uint32_t i = 0; i < item_count; ++i) {
      items[i].child_id = response.items(static_cast<int>(i)).sequence_id();
      items[i].child_token_count = response.items(static_cast<int>(i)).token_count();
    }
    return status;
  });
}

pqc_status RpcRemote::MatchPrefix(uint64_t cache_id, const pqc_sequence_options& prompt,
                                  uint64_t* token_count, RefusalBuffer* error) noexcept {
  return Finish("MatchPrefix", error, [&] {
    v1::MatchPrefixRequest request;
    v1::MatchPrefixResponse response;
    request.set_cache_id(cache_id);
    SetPrompt(prompt, &request);
    grpc::Status status = Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncMatchPrefix, context, request, &response);
    });
    *token_count = response.token_count();
    return status;
  });
}

pqc_status RpcRemote::PrefixKeys(uint64_t cache_id, const pqc_sequence_options& prompt,
                                 pqc_prefix_key* root, pqc_prefix_key* keys, uint64_t capacity,
                                 uint64_t* count, RefusalBuffer* error) noexcept {
  return Finish("MatchPrefix", error, [&]() -> grpc::Status {
    v1::MatchPrefixRequest request;
    v1::MatchPrefixResponse response;
    request.set_cache_id(cache_id);
    request.set_want_keys(true);
    SetPrompt(prompt, &request);
    RETURN_IF_ERROR(Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncMatchPrefix, context, request, &response);
    }));
    if (response.root().empty()) {
      return Refuse(grpc::StatusCode::UNIMPLEMENTED, "", "the sidecar is older, and names no keys");
    }
    *count = static_cast<uint64_t>(response.keys_size());
    if (*count > capacity) {
      return Refuse(grpc::StatusCode::OUT_OF_RANGE, "capacity",
                    std::to_string(capacity) + ", must be at least " + std::to_string(*count));
    }
    RETURN_IF_ERROR(CopyKey(response.root(), "root", root));
    for (int i = 0; i < response.keys_size(); ++i) {
      RETURN_IF_ERROR(CopyKey(response.keys(i), "keys", &keys[i]));
    }
    return grpc::Status::OK;
  });
}

pqc_status RpcRemote::Admit(uint64_t cache_id, uint64_t token_count, uint64_t output_token_count,
                            pqc_admission* admission, RefusalBuffer* error) noexcept {
  return AdmitIndexed(cache_id, token_count, output_token_count, {}, admission, error);
}

pqc_status RpcRemote::AdmitIndexed(uint64_t cache_id, uint64_t token_count,
                                   uint64_t output_token_count, const pqc_index& index,
                                   pqc_admission* admission, RefusalBuffer* error) noexcept {
  return Finish("Admit", error, [&] {
    v1::AdmitRequest request;
    v1::AdmitResponse response;
    request.set_cache_id(cache_id);
    request.set_token_count(token_count);
    request.set_output_token_count(output_token_count);
    if (!ToWire(index, request.mutable_index())) request.clear_index();
    grpc::Status status = Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncAdmit, context, request, &response);
    });
    WriteStruct(pqc_admission{.struct_size = sizeof(pqc_admission),
                              .verdict = static_cast<pqc_verdict>(response.verdict()),
                              .needed_bytes = response.needed_bytes(),
                              .bytes_to_evict = response.bytes_to_evict(),
                              .shortfall_bytes = response.shortfall_bytes(),
                              .limit_bytes = response.limit_bytes(),
                              .retry_after_ms = response.retry_after_ms()},
                admission);
    return status;
  });
}

pqc_status RpcRemote::PinSequence(uint64_t sequence_id, uint64_t ttl_ms,
                                  RefusalBuffer* error) noexcept {
  return Finish("Pin", error, [&] {
    v1::PinRequest request;
    v1::PinResponse response;
    request.set_sequence_id(sequence_id);
    request.set_ttl_ms(ttl_ms);
    return Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*admin_, &v1::Admin::Stub::PrepareAsyncPin, context, request, &response);
    });
  });
}

pqc_status RpcRemote::SuspendSequence(uint64_t sequence_id, RefusalBuffer* error) noexcept {
  return Finish("SuspendSequence", error, [&] {
    v1::SuspendSequenceRequest request;
    v1::SuspendSequenceResponse response;
    request.set_sequence_id(sequence_id);
    return Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncSuspendSequence, context, request,
                  &response);
    });
  });
}

pqc_status RpcRemote::ResumeSequence(uint64_t sequence_id, uint64_t* token_count,
                                     RefusalBuffer* error) noexcept {
  return Finish("ResumeSequence", error, [&] {
    v1::ResumeSequenceRequest request;
    v1::ResumeSequenceResponse response;
    request.set_sequence_id(sequence_id);
    grpc::Status status = Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncResumeSequence, context, request,
                  &response);
    });
    *token_count = response.token_count();
    return status;
  });
}

pqc_status RpcRemote::DropSequence(uint64_t sequence_id, RefusalBuffer* error) noexcept {
  return Finish("DropSequence", error, [&] {
    v1::DropSequenceRequest request;
    v1::DropSequenceResponse response;
    request.set_sequence_id(sequence_id);
    // Without a worker the sequence ends with its session, and closing a handle must not take long.
    const auto soon = std::chrono::steady_clock::now() + kDropWait;
    if (!session_.WaitOpen(std::min<Deadline>(soon, CallDeadline()))) {
      return grpc::Status(
          grpc::StatusCode::UNAVAILABLE,
          endpoint_ + ": the sidecar's worker has ended; the sequence ends with its session");
    }
    return Attempt(Repeat::kNever, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncDropSequence, context, request, &response);
    });
  });
}

pqc_status RpcRemote::TruncateSequence(uint64_t sequence_id, uint64_t token_count,
                                       const LeaseView& lease, const ImageSink& image,
                                       RefusalBuffer* error) noexcept {
  return Finish("TruncateSequence", error, [&] {
    v1::TruncateSequenceRequest request;
    v1::TruncateSequenceResponse response;
    request.set_sequence_id(sequence_id);
    request.set_token_count(token_count);
    ToWire(lease, [&] { return request.mutable_lease(); });
    grpc::Status status = Attempt(
        Repeat::kNever, CallDeadline(),
        [&](const Context& context) {
          return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncTruncateSequence, context, request,
                      &response);
        },
        lease.boot_word);
    if (status.ok()) WriteImage(response.attachment(), image);
    return status;
  });
}

pqc_status RpcRemote::FindSequence(uint64_t cache_id, uint64_t sequence_id, uint64_t* token_count,
                                   pqc_index* live_index, RefusalBuffer* error) noexcept {
  return Finish("DescribeSequence", error, [&]() -> grpc::Status {
    v1::DescribeSequenceRequest request;
    v1::DescribeSequenceResponse response;
    request.set_sequence_id(sequence_id);
    grpc::Status status = Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*admin_, &v1::Admin::Stub::PrepareAsyncDescribeSequence, context, request,
                  &response);
    });
    if (!status.ok()) return status;
    const v1::SequenceDescription& found = response.sequence();
    if (found.cache_id() != cache_id) {
      return Refuse(grpc::StatusCode::NOT_FOUND, "sequence_id",
                    absl::StrCat(sequence_id, " is of another cache"));
    }
    if (found.is_cached_prefix()) {
      return Refuse(grpc::StatusCode::NOT_FOUND, "sequence_id",
                    absl::StrCat(sequence_id, " has ended; its prefix is cached"));
    }
    if (!found.has_live_index()) {
      return Refuse(grpc::StatusCode::UNIMPLEMENTED, "sequence_id",
                    "the sidecar is too old to say whether the sequence has a live index");
    }
    *token_count = found.token_count();
    const v1::IndexSpec& index = found.live_index().index();
    *live_index = {};
    if (index.has_pq()) {
      live_index->kind = PQC_INDEX_PQ;
      live_index->subspaces = index.pq().subspaces();
      live_index->bits = index.pq().bits();
      live_index->reserved[PQC_INDEX_LAYOUT] = static_cast<uint32_t>(index.pq().layout());
    }
    kvstore::IndexDescriptor typed;
    bool has_words = index.has_typed() && codec::Decode(index, "live_index", &typed).ok() &&
                     HasDescriptorWords(typed);
    if (!has_words && !kvstore::FindIndexType(index.typed().type())) {
      has_words = codec::DecodePlugin(index, &typed);
    }
    if (has_words) SetDescriptorWords(typed, live_index);
    return status;
  });
}

pqc_status RpcRemote::Attach(uint64_t sequence_id, const LeaseView& lease, uint64_t* lease_id,
                             uint32_t* word_index, const ImageSink& image,
                             RefusalBuffer* error) noexcept {
  return Finish("Attach", error, [&] {
    v1::AttachRequest request;
    v1::AttachResponse response;
    request.set_sequence_id(sequence_id);
    ToWire(lease, [&] { return request.mutable_lease(); });
    grpc::Status status = Attempt(
        Repeat::kNever, CallDeadline(),
        [&](const Context& context) {
          return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncAttach, context, request, &response);
        },
        lease.boot_word);
    if (!status.ok()) return status;
    *lease_id = response.lease_id();
    *word_index = response.word_index();
    WriteImage(response.attachment(), image);
    return status;
  });
}

pqc_status RpcRemote::Detach(const LeaseView& lease, RefusalBuffer* error) noexcept {
  return Finish("Detach", error, [&] {
    v1::DetachRequest request;
    v1::DetachResponse response;
    request.set_lease_id(lease.lease_id);
    return Attempt(
        Repeat::kHarmless, CallDeadline(),
        [&](const Context& context) {
          return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncDetach, context, request, &response);
        },
        lease.boot_word);
  });
}

}  // namespace pqcached::client
