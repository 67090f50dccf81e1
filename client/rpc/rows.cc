// RpcRemote: writes rows and builds indexes.
#include <algorithm>
#include <new>

#include "client/rpc/ingest_call.h"
#include "client/rpc/refusal.h"
#include "client/rpc/rpc_remote.h"
#include "client/rpc/wire.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// Row bytes in one message: large enough that the per-message cost is small, small enough that
// packing and sending overlap.
constexpr uint64_t kIngestPayloadBytes = 1 << 20;
constexpr std::chrono::hours kLongestBuild(24);

pqc_build_progress FromWire(const v1::BuildProgress& progress) {
  return {.struct_size = sizeof(pqc_build_progress),
          .layer = progress.layer(),
          .layers_done = progress.layers_done(),
          .layer_count = progress.layer_count(),
          .codebook_generation = progress.codebook_generation(),
          .codebook_generation_count = progress.codebook_generation_count(),
          .iterations = progress.iterations(),
          .inertia = progress.inertia(),
          .seconds = progress.seconds(),
          .index_bytes = progress.index_bytes(),
          .codebook_bytes = progress.codebook_bytes()};
}

// Worker to which the arguments of a call belong.
struct BootWord {
  uint64_t word = 0;  // 0 = no worker
  bool several = false;

  void Add(uint64_t other) {
    if (other == 0) return;
    several = several || (word != 0 && word != other);
    word = other;
  }
  void AddRows(const RowBlock& rows) {
    if (rows.keys.staging) Add(rows.keys.staging->boot_word);
    if (rows.values.staging) Add(rows.values.staging->boot_word);
  }
};

}  // namespace

grpc::Status RpcRemote::IngestOnce(const Context& context, Deadline deadline, uint64_t sequence_id,
                                   uint64_t first_position, const RowBlock& rows) {
  RETURN_IF_ERROR(Connect(*bulk_channel_, deadline));
  IngestCall call(bulk_channel_, context, sequence_id, rows.names, &abandoned_calls_);
  const uint64_t token_count = rows.keys.shape[0];
  const uint64_t token_bytes = BytesPerIndex(rows.keys) + BytesPerIndex(rows.values);
  const uint64_t step = std::max<uint64_t>(1, PayloadBytes(kIngestPayloadBytes) / token_bytes);
  for (uint64_t token = 0; token < token_count; token += step) {
    const uint64_t end = std::min(token_count, token + step);
    if (!call.Write(IngestRequestOf(rows, token, end, first_position + token))) break;
  }
  return call.Finish();
}

pqc_status RpcRemote::Ingest(uint64_t sequence_id, uint64_t first_position, const RowBlock& rows,
                             RefusalBuffer* error) noexcept {
  return Finish("Ingest", error, [&] {
    const Deadline deadline = CallDeadline();
    return Attempt(Repeat::kHarmless, deadline, [&](const Context& context) {
      return IngestOnce(context, deadline, sequence_id, first_position, rows);
    });
  });
}

grpc::Status RpcRemote::IngestStagedOnce(const Context& context, uint64_t sequence_id,
                                         const StagedRows& rows) {
  IngestCall call(channel_, context, sequence_id, rows.names, &abandoned_calls_);
  const StagedRows::Probe probe{.context = &call, .in_progress = [](void* stream) {
                                  return static_cast<IngestCall*>(stream)->IsInProgress();
                                }};
  for (;;) {
    uint64_t first_position = 0;
    RowBlock part;
    const StagedRows::Next next = rows.next(rows.context, probe, &first_position, &part);
    if (next == StagedRows::Next::kGiveUp && call.IsInProgress()) {
      return {grpc::StatusCode::CANCELLED, "Ingest: given up"};
    }
    if (next != StagedRows::Next::kPart) return call.Finish();
    if (!call.Write(StagedRequestOf(part, first_position))) return call.Finish();
  }
}

pqc_status RpcRemote::IngestStaged(uint64_t sequence_id, const StagedRows& rows,
                                   RefusalBuffer* error) noexcept {
  return Finish("Ingest", error, [&] {
    return Attempt(
        Repeat::kNever, CallDeadline(),
        [&](const Context& context) -> grpc::Status {
          try {
            return IngestStagedOnce(context, sequence_id, rows);
            // not the sidecar's answer, so the sidecar may still be reading
          } catch (const std::bad_alloc&) {
            return {grpc::StatusCode::CANCELLED, "the client is out of memory"};
          }
        },
        rows.boot_word);
  });
}

pqc_status RpcRemote::Commit(uint64_t sequence_id, uint64_t first_position, const RowBlock* rows,
                             uint32_t row_block_count, uint64_t* token_count,
                             RefusalBuffer* error) noexcept {
  return Finish("Commit", error, [&]() -> grpc::Status {
    v1::CommitRequest request;
    v1::CommitResponse response;
    request.set_sequence_id(sequence_id);
    request.set_first_position(first_position);
    if (row_block_count > 0 && rows[0].names) ToWire(*rows[0].names, request.mutable_names());
    BootWord boot;
    for (uint32_t i = 0; i < row_block_count; ++i) {
      ToWire(rows[i], request.add_rows());
      boot.AddRows(rows[i]);
    }
    if (boot.several) return WorkerReplaced();
    // Not repeated after UNAVAILABLE: the sidecar may still be reading the slot.
    grpc::Status status = Attempt(
        Repeat::kNever, CallDeadline(),
        [&](const Context& context) {
          return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncCommit, context, request, &response);
        },
        boot.word);
    if (status.ok()) *token_count = response.token_count();
    return status;
  });
}

grpc::Status RpcRemote::AddSamplesOnce(const Context& context, uint64_t sequence_id,
                                       const SampleBlock* samples, uint32_t sample_count) {
  IngestCall call(bulk_channel_, context, sequence_id, nullptr, &abandoned_calls_);
  for (uint32_t i = 0; i < sample_count; ++i) {
    const SampleBlock& block = samples[i];
    const uint64_t step =
        std::max<uint64_t>(1, PayloadBytes(kIngestPayloadBytes) / BytesPerIndex(block.queries));
    for (uint64_t begin = 0; begin < block.queries.shape[0]; begin += step) {
      const uint64_t end = std::min(block.queries.shape[0], begin + step);
      if (!call.Write(SampleRequestOf(block, begin, end))) return call.Finish();
    }
  }
  return call.Finish();
}

pqc_status RpcRemote::AddSamples(uint64_t sequence_id, const SampleBlock* samples,
                                 uint32_t sample_count, RefusalBuffer* error) noexcept {
  return Finish("Ingest", error, [&] {
    const Deadline deadline = CallDeadline();
    return Attempt(Repeat::kHarmless, deadline, [&](const Context& context) -> grpc::Status {
      RETURN_IF_ERROR(Connect(*bulk_channel_, deadline));
      return AddSamplesOnce(context, sequence_id, samples, sample_count);
    });
  });
}

pqc_status RpcRemote::NameTokens(uint64_t sequence_id, const pqc_row_options& names,
                                 RefusalBuffer* error) noexcept {
  return Finish("Ingest", error, [&] {
    const Deadline deadline = CallDeadline();
    return Attempt(Repeat::kHarmless, deadline, [&](const Context& context) -> grpc::Status {
      RETURN_IF_ERROR(Connect(*bulk_channel_, deadline));
      return IngestCall(bulk_channel_, context, sequence_id, &names, &abandoned_calls_).Finish();
    });
  });
}

pqc_status RpcRemote::Append(AppendItem* items, uint32_t item_count,
                             RefusalBuffer* error) noexcept {
  return Finish("Append", error, [&]() -> grpc::Status {
    v1::AppendRequest request;
    v1::AppendResponse response;
    Repeat repeat = Repeat::kHarmless;
    BootWord boot;
    for (uint32_t i = 0; i < item_count; ++i) {
      v1::SequenceAppend* item = request.add_items();
      item->set_sequence_id(items[i].sequence_id);
      item->set_first_position(items[i].first_position);
      if (items[i].names) ToWire(*items[i].names, item->mutable_names());
      for (uint32_t j = 0; j < items[i].row_block_count; ++j) {
        ToWire(items[i].rows[j], item->add_rows());
        // The first attempt uses up the generation of a slot.
        if (items[i].rows[j].keys.staging) repeat = Repeat::kNever;
        boot.AddRows(items[i].rows[j]);
      }
      ToWire(items[i].lease, [&] { return item->mutable_lease(); });
      boot.Add(items[i].lease.boot_word);
    }
    if (boot.several) return WorkerReplaced();
    const uint64_t limit = session_.max_message_bytes();
    if (limit != 0 && request.ByteSizeLong() > limit) {
      return Refuse(grpc::StatusCode::INVALID_ARGUMENT, "layers",
                    "a message of " + std::to_string(request.ByteSizeLong()) +
                        " bytes, must be at most max_message_bytes " + std::to_string(limit) +
                        "; append fewer tokens at once");
    }
    grpc::Status status = Attempt(
        repeat, CallDeadline(),
        [&](const Context& context) {
          return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncAppend, context, request, &response);
        },
        boot.word);
    if (!status.ok()) return status;
    if (static_cast<uint32_t>(response.token_counts_size()) != item_count) {
      return {grpc::StatusCode::INTERNAL, "AppendResponse.token_counts: must be one per item"};
    }
    for (uint32_t i = 0; i < item_count; ++i) {
      const int at = static_cast<int>(i);
      items[i].token_count = response.token_counts(at);
      if (at < response.attachments_size()) WriteImage(response.attachments(at), items[i].image);
    }
    return status;
  });
}

pqc_status RpcRemote::ClosePrefill(uint64_t sequence_id, RefusalBuffer* error) noexcept {
  return Finish("ClosePrefill", error, [&] {
    v1::ClosePrefillRequest request;
    v1::ClosePrefillResponse response;
    request.set_sequence_id(sequence_id);
    return Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncClosePrefill, context, request, &response);
    });
  });
}

pqc_status RpcRemote::BuildIndex(uint64_t sequence_id, const pqc_build_options& caller_options,
                                 RefusalBuffer* error) noexcept {
  return Finish("BuildIndex", error, [&]() -> grpc::Status {
    pqc_build_options options;
    RETURN_IF_ERROR(ReadStruct(caller_options, "options", &options));
    v1::BuildIndexRequest request;
    request.set_sequence_id(sequence_id);
    if (!ToWire(options.index, request.mutable_index())) request.clear_index();
    request.set_iterations(options.iterations);
    request.set_seed(options.seed);
    request.set_train_tokens(options.train_tokens);
    request.set_sink_tokens(options.sink_tokens);
    if (options.rebuild) {
      request.mutable_rebuild()->set_drift_ratio(options.rebuild_drift);
      request.mutable_rebuild()->set_new_tokens(options.rebuild_tokens);
    }

    const std::chrono::milliseconds timeout =
        options.timeout_ms ? std::chrono::milliseconds(options.timeout_ms) : kLongestBuild;
    grpc::ClientContext context;
    RETURN_IF_ERROR(Connect(*channel_, CallDeadline()));
    Prepare(&context, std::chrono::steady_clock::now() + timeout);
    const auto stream = kv_->BuildIndex(&context, request);
    v1::BuildProgress message;
    bool cancelled = false;
    bool knows_rebuild = !options.rebuild;
    bool reported = false;
    while (stream->Read(&message)) {
      reported = true;
      knows_rebuild |= message.rebuild();
      if (!options.callback || cancelled) continue;
      const pqc_build_progress progress = FromWire(message);
      const bool last = progress.layers_done == progress.layer_count;
      if (options.callback(options.callback_context, &progress) || last) continue;
      cancelled = true;
      context.TryCancel();
    }
    grpc::Status status = stream->Finish();
    if (cancelled && status.error_code() == grpc::StatusCode::CANCELLED) {
      return {status.error_code(), "the progress callback cancelled the build"};
    }
    // A sidecar that knows rebuilds names the condition in its refusal.
    const bool exists =
        status.error_code() == grpc::StatusCode::ALREADY_EXISTS && FieldOf(status) == "index";
    if (!knows_rebuild && (exists || (status.ok() && reported))) {
      return Refuse(grpc::StatusCode::UNIMPLEMENTED, "rebuild",
                    "the sidecar is of an earlier release, which does not rebuild an index");
    }
    return status;
  });
}

}  // namespace pqcached::client
