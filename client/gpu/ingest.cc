// Prefill of rows on a GPU: the engine's stream packs them into staging, and Offload sends them
// afterwards.
#include <algorithm>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/base/pack.h"
#include "client/base/token_names.h"
#include "client/gpu/gpu.h"
#include "client/local/ingest.h"
#include "client/step/layer_rows.h"
#include "client/step/offload.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// Bytes of a slot that are reserved for padding between its four parts.
constexpr uint64_t kPaddingBytes = 512;

pqc_status CheckDevicePart(const TensorView& view, const char* name) {
  if (view.slots) {
    return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.block_table.slots", name),
                "not supported on a GPU in this version; must be NULL");
  }
  if (view.strides[2] == 1) return PQC_OK;
  return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.strides", name),
              "dims must be contiguous on a GPU");
}

// Returns the dtype for staging: the smaller of the engine's and the cache's.
DType PackedDType(DType from, DType kept) {
  return kernels::DTypeBytes(from) < kernels::DTypeBytes(kept) ? from : kept;
}

uint64_t TokenBytes(const TensorView& view, DType kept) {
  const uint64_t elements = view.shape[1] * view.shape[2];
  const uint64_t table = view.blocks ? sizeof(int32_t) : 0;  // worst case: one block per token
  return elements * kernels::DTypeBytes(PackedDType(view.dtype, kept)) + table;
}

// Describes the tokens [begin, end) of a tensor for the device. Their part of the block table is
// copied to `table`, in the slot, because the caller may free its own when the call returns.
gpu::StepPackTensor PackOf(const TensorView& from, DType packed, uint64_t begin, uint64_t end,
                           std::byte* to, std::byte* table) {
  gpu::StepPackTensor tensor{.data = from.data,
                             .dtype = from.dtype,
                             .packed_dtype = packed,
                             .dim = static_cast<uint32_t>(from.shape[2]),
                             .first_token = static_cast<uint32_t>(begin),
                             .block_stride = from.block_stride,
                             .token_stride = from.strides[0],
                             .head_stride = from.strides[1],
                             .to = to};
  if (!from.blocks) return tensor;
  begin += from.first_token;
  end += from.first_token;
  const uint64_t first_block = begin / from.block_tokens;
  const uint64_t end_block = (end - 1) / from.block_tokens + 1;
  auto* const numbers = reinterpret_cast<int32_t*>(table);
  std::transform(from.blocks + first_block, from.blocks + end_block, numbers,
                 [](uint32_t block) { return static_cast<int32_t>(block); });
  tensor.first_token = static_cast<uint32_t>(begin % from.block_tokens);
  tensor.block_table = numbers;
  tensor.block_tokens = from.block_tokens;
  return tensor;
}

// Range of tokens that one call packs into one slot.
struct SlotPart {
  const RowBlock& rows;
  DType kept;
  uint64_t begin;
  uint64_t end;
  void* stream;
};

// Returns dtypes and shapes of the part's rows as packed in the slot.
RowBlock PackedRows(const SlotPart& part) {
  RowBlock packed{.layer = part.rows.layer, .keys = {}, .values = {}};
  const auto shape = [&](const TensorView& from, TensorView& to) {
    to.dtype = PackedDType(from.dtype, part.kept);
    to.ndim = 3;
    std::copy_n(from.shape, 3, to.shape);
  };
  shape(part.rows.keys, packed.keys);
  shape(part.rows.values, packed.values);
  return packed;
}

// Launches the packing of a part into its slot.
pqc_status Pack(GpuState& gpu, const SlotPart& part, FilledSlot& filled) {
  const RowBlock packed = PackedRows(part);
  const uint64_t tokens = part.end - part.begin;
  filled.token_count = tokens;
  filled.key_bytes = tokens * BytesPerIndex(packed.keys);
  filled.value_bytes = tokens * BytesPerIndex(packed.values);
  std::byte* const slot = filled.slot.bytes().data();
  std::byte* const values = slot + filled.values_begin();
  std::byte* const key_table = values + FilledSlot::AlignUp(filled.value_bytes);
  std::byte* const value_table = key_table + FilledSlot::AlignUp(tokens * sizeof(int32_t));
  const gpu::StepPack pack{
      .keys = PackOf(part.rows.keys, packed.keys.dtype, part.begin, part.end, slot, key_table),
      .values =
          PackOf(part.rows.values, packed.values.dtype, part.begin, part.end, values, value_table),
      .kv_heads = static_cast<uint32_t>(part.rows.keys.shape[1]),
      .token_count = static_cast<uint32_t>(tokens),
      .stream = part.stream};
  const gpu::Outcome launched = gpu.steps->Pack(pack, filled.slot.number());
  // Work that was launched before the failure may write to the slot at any time.
  if (!launched.ok() && launched.code != gpu::Code::kInvalid) filled.slot.Lose();
  return Report(launched, "gpu");
}

// Page-locks the slot's ring if it is a new one: at the first call, and after a new worker has
// started.
pqc_status LockRing(GpuState& gpu, Offload& offload, const Staging::Slot& slot, uint32_t slot_count)
    PQCACHED_REQUIRES(gpu.ingest_mutex) {
  if (gpu.ring == slot.ring()) return PQC_OK;
  offload.Drain(gpu.steps.get());
  const gpu::Outcome locked =
      gpu.steps->LockStaging(slot.ring()->data(), slot.ring()->size_bytes(), slot_count);
  gpu.ring = locked.ok() ? slot.ring() : nullptr;
  return Report(locked, "staging");
}

// Packs a part, and queues it before another call can look for jobs of the ring.
pqc_status PackAndQueue(GpuState& gpu, const std::shared_ptr<SequenceState>& sequence,
                        const SlotPart& part, uint64_t first_position, Staging::Slot slot,
                        uint32_t slot_count) {
  Offload::Job job{.sequence = sequence,
                   .steps = gpu.steps.get(),
                   .filled = {},
                   .rows = PackedRows(part),
                   .names = {}};
  job.filled.slot = std::move(slot);
  job.filled.first_position = first_position + part.begin;
  const bool is_last = part.end == part.rows.keys.shape[0];
  if (part.rows.names && is_last) job.names.Assign(*part.rows.names);
  Offload& offload = *sequence->cache->client->offload;
  const base::MutexLock lock(&gpu.ingest_mutex);
  RETURN_IF_ERROR(LockRing(gpu, offload, job.filled.slot, slot_count));
  RETURN_IF_ERROR(Pack(gpu, part, job.filled));
  offload.Add(std::move(job));
  return PQC_OK;
}

pqc_status IngestParts(GpuState& gpu, const std::shared_ptr<SequenceState>& sequence,
                       uint64_t first_position, const RowBlock& rows, void* stream) {
  const ClientState& client = *sequence->cache->client;
  const DType kept = gpu.shape.dtype;
  Staging& staging = sequence->local->session().staging();
  const uint64_t token_bytes = TokenBytes(rows.keys, kept) + TokenBytes(rows.values, kept);
  uint64_t most = (staging.slot_bytes() - kPaddingBytes - 2 * sizeof(int32_t)) / token_bytes;
  if (client.max_message_bytes != 0) {
    most = std::min(most, client.max_message_bytes / token_bytes);
  }
  if (most == 0) return Fail(PQC_UNIMPLEMENTED, "keys", "a token does not fit into a staging slot");
  const auto deadline = CallDeadline(client.timeout_ms);
  const uint64_t token_count = rows.keys.shape[0];
  for (uint64_t begin = 0; begin < token_count;) {
    const SlotPart part{rows, kept, begin, std::min(begin + most, token_count), stream};
    Staging::Slot slot;
    if (const pqc_status status = staging.Take(deadline, &slot); status != PQC_OK) {
      // The error of a failed commit says more than the timeout that it caused.
      const pqc_status failed = client.offload->Check(*sequence);
      return failed != PQC_OK ? failed : status;
    }
    RETURN_IF_ERROR(
        PackAndQueue(gpu, sequence, part, first_position, std::move(slot), staging.slot_count()));
    begin = part.end;
  }
  return PQC_OK;
}

pqc_status CheckOwner(const GpuState& gpu, const SequenceState& state) {
  if (state.cache->client == gpu.cache->client && state.cache->cache_id == gpu.cache->cache_id) {
    return PQC_OK;
  }
  return Fail(PQC_INVALID_ARGUMENT, "sequence", "it belongs to another cache than the GPU");
}

// Packs positions [begin, end) of queries into a slot, waits for the stream, and appends them to
// `to`, contiguously.
pqc_status CopyQueries(GpuState& gpu, SequenceState& state, const TensorView& queries,
                       uint64_t begin, uint64_t end, void* stream, std::vector<std::byte>* to) {
  Staging& staging = state.local->session().staging();
  Staging::Slot slot;
  RETURN_IF_ERROR(staging.Take(CallDeadline(state.cache->client->timeout_ms), &slot));
  const uint64_t bytes = (end - begin) * BytesPerIndex(queries);
  std::byte* const memory = slot.bytes().data();
  const gpu::StepPack pack{.keys = PackOf(queries, queries.dtype, begin, end, memory,
                                          memory + FilledSlot::AlignUp(bytes)),
                           .values = {},
                           .kv_heads = static_cast<uint32_t>(queries.shape[1]),
                           .token_count = static_cast<uint32_t>(end - begin),
                           .stream = stream};
  {
    const base::MutexLock lock(&gpu.ingest_mutex);
    RETURN_IF_ERROR(LockRing(gpu, *state.cache->client->offload, slot, staging.slot_count()));
    const gpu::Outcome launched = gpu.steps->Pack(pack, slot.number());
    // Work that was launched before the failure may write to the slot at any time.
    if (!launched.ok() && launched.code != gpu::Code::kInvalid) slot.Lose();
    RETURN_IF_ERROR(Report(launched, "gpu"));
  }
  const gpu::Outcome packed = gpu.steps->WaitPacked(slot.number());
  if (!packed.ok()) slot.Lose();
  RETURN_IF_ERROR(Report(packed, "gpu"));
  to->insert(to->end(), memory, memory + bytes);
  return PQC_OK;
}

// Copies queries to `to`, to which the block refers then.
pqc_status CopyToHost(GpuState& gpu, SequenceState& state, void* stream, SampleBlock* block,
                      std::vector<std::byte>* to) {
  TensorView& queries = block->queries;
  RETURN_IF_ERROR(CheckDevicePart(queries, "samples.queries"));
  const uint64_t room = state.local->session().staging().slot_bytes() - kPaddingBytes;
  const uint64_t most = room / (BytesPerIndex(queries) + sizeof(int32_t));
  if (most == 0) {
    return Fail(PQC_UNIMPLEMENTED, "samples.queries",
                "the queries of a token do not fit into a staging slot");
  }
  for (uint64_t begin = 0; begin < queries.shape[0]; begin += most) {
    const uint64_t end = std::min(begin + most, queries.shape[0]);
    RETURN_IF_ERROR(CopyQueries(gpu, state, queries, begin, end, stream, to));
  }
  TensorView host{.data = to->data(), .dtype = queries.dtype, .ndim = 3};
  std::copy_n(queries.shape, 3, host.shape);
  host.strides[2] = 1;
  host.strides[1] = static_cast<int64_t>(host.shape[2]);
  host.strides[0] = static_cast<int64_t>(host.shape[1] * host.shape[2]);
  queries = host;
  return PQC_OK;
}

}  // namespace

pqc_status AddSamplesOnGpu(pqc_gpu* handle, pqc_sequence* sequence,
                           const pqc_query_samples* samples, uint32_t sample_count, void* stream) {
  if (!handle) return Fail(PQC_INVALID_ARGUMENT, "gpu", "must not be NULL");
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  GpuState& gpu = *handle->state;
  SequenceState& state = *sequence->state;
  RETURN_IF_ERROR(CheckOwner(gpu, state));
  std::vector<SampleBlock> blocks;
  RETURN_IF_ERROR(ReadSamples(*state.cache, samples, sample_count, {PQC_CUDA, stream}, &blocks));
  const ChangeScope changing(sequence);
  if (changing.status() != PQC_OK) return changing.status();
  std::vector<std::vector<std::byte>> copies(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    RETURN_IF_ERROR(CopyToHost(gpu, state, stream, &blocks[i], &copies[i]));
  }
  return SendSamples(changing, state.sequence_id, blocks);
}

pqc_status IngestOnGpu(pqc_gpu* handle, pqc_sequence* sequence, uint32_t layer,
                       uint64_t first_position, const pqc_tensor* keys, const pqc_tensor* values,
                       const pqc_row_options* caller_options, void* stream) {
  if (!handle) return Fail(PQC_INVALID_ARGUMENT, "gpu", "must not be NULL");
  if (!sequence) return Fail(PQC_INVALID_ARGUMENT, "sequence", "must not be NULL");
  if (!keys) return Fail(PQC_INVALID_ARGUMENT, "keys", "must not be NULL");
  if (!values) return Fail(PQC_INVALID_ARGUMENT, "values", "must not be NULL");
  GpuState& gpu = *handle->state;
  SequenceState& state = *sequence->state;
  RETURN_IF_ERROR(CheckOwner(gpu, state));
  LayerShape shape;
  RowBlock rows{.layer = layer, .keys = {}, .values = {}};
  pqc_status status = FindLayer(*state.cache, layer, "layer", &shape);
  if (status == PQC_OK) status = ReadRows(*keys, *values, shape, "", &rows, {PQC_CUDA, stream});
  if (status == PQC_OK) status = CheckDevicePart(rows.keys, "keys");
  if (status == PQC_OK) status = CheckDevicePart(rows.values, "values");
  if (status == PQC_OK) status = CheckPositions(first_position, rows.keys.shape[0]);
  pqc_row_options names;
  if (status == PQC_OK) status = ReadRowOptions(caller_options, "options", {}, &names);
  if (status != PQC_OK) return status;
  if (HasNames(names)) rows.names = &names;
  const ChangeScope changing(sequence, ChangeScope::Packed::kMayBePending);
  if (changing.status() != PQC_OK) return changing.status();
  state.OpenPrefill();
  return IngestParts(gpu, sequence->state, first_position, rows, stream);
}

}  // namespace pqcached::client
