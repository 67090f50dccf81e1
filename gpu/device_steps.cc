#include "gpu/device_steps.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>

#include "gpu/arena.h"
#include "gpu/limits.h"
#include "kernels/base/status_macros.h"

namespace pqcached::gpu {
namespace {

using kernels::cuda::Stream;

constexpr uint32_t kMaxQueryLength = 8;
constexpr uint32_t kMaxGroupQueries = 64;
constexpr uint32_t kMaxTokens = uint32_t{1} << 30;
constexpr uint32_t kMaxSegments = uint32_t{1} << 22;

bool IsDim(uint32_t dim) { return dim >= 32 && dim <= 256 && dim % 8 == 0; }

Status Check(const StepsOptions& options) {
  const uint64_t lanes = uint64_t{options.sequence_capacity} * options.kv_heads;
  if (options.layer_count == 0) return OutOfRange("layer_count", 0, "at least 1");
  if (!kernels::IsDType(static_cast<uint8_t>(options.dtype))) {
    return OutOfRange("dtype", static_cast<uint8_t>(options.dtype), "f16, bf16 or f32");
  }
  if (!IsDim(options.key_dim))
    return OutOfRange("key_dim", options.key_dim, "32 to 256, a multiple of 8");
  if (!IsDim(options.value_dim)) {
    return OutOfRange("value_dim", options.value_dim, "32 to 256, a multiple of 8");
  }
  if (options.kv_heads == 0) return OutOfRange("kv_heads", 0, "at least 1");
  if (lanes == 0 || lanes > kMaxLanes) {
    return OutOfRange("sequence_capacity times kv_heads", lanes, "1 to 65535");
  }
  if (options.query_length == 0 || options.query_length > kMaxQueryLength) {
    return OutOfRange("query_length", options.query_length, "1 to 8");
  }
  const uint64_t queries = uint64_t{options.group_size} * options.query_length;
  if (queries == 0 || queries > kMaxGroupQueries) {
    return OutOfRange("query_length times query heads of a kv head", queries, "1 to 64");
  }
  if (!kernels::IsValid(options.geometry) || options.geometry.key_dim != options.key_dim) {
    return {Code::kInvalid, "geometry: not one of product quantization of keys of this length"};
  }
  if (options.token_capacity == 0 || options.token_capacity > kMaxTokens) {
    return OutOfRange("token_capacity", options.token_capacity, "1 to 2^30");
  }
  if (options.selected_capacity == 0 || options.selected_capacity > options.token_capacity) {
    return OutOfRange("selected_capacity", options.selected_capacity, "1 to token_capacity");
  }
  if (options.span_capacity == 0 || options.span_capacity > kMaxSegments) {
    return OutOfRange("segment_capacity", options.span_capacity, "1 to 2^22");
  }
  if (options.max_loads > kernels::cuda::kMaxLoads) {
    return OutOfRange("max_block_loads", options.max_loads, "at most 128");
  }
  if (options.codebook_capacity == 0 || options.codebook_capacity * lanes > kMaxLanes) {
    return OutOfRange("codebook_capacity", options.codebook_capacity,
                      "at least 1, and 65535 with all sequences and kv heads");
  }
  for (uint32_t i = 0; options.layer_windows != nullptr && i < options.layer_count; ++i) {
    if (options.layer_windows[i] <= kMaxTokens) continue;
    return OutOfRange("layer_windows", options.layer_windows[i], "at most 2^30");
  }
  if (options.range_capacity == 0) return OutOfRange("range_capacity", 0, "at least 1");
  const uint64_t planes = lanes * kernels::PlaneCount(options.geometry);
  if (options.codes_bytes != 0 && planes > kMaxLanes) {
    return OutOfRange("sequence_capacity times kv_heads times planes of codes", planes,
                      "at most 65535 with codes_bytes");
  }
  return {};
}

}  // namespace

Status DeviceSteps::Open(const StepsOptions& options, std::unique_ptr<DeviceSteps>& steps) {
  RETURN_IF_ERROR(Check(options));
  std::unique_ptr<DeviceSteps> made(new DeviceSteps);
  RETURN_IF_ERROR(FindDevice(options.device, made->device_));
  const CurrentDevice current(options.device);
  if (!current.status().ok()) return current.status();
  RETURN_IF_ERROR(made->Create(options));
  steps = std::move(made);
  return {};
}

DeviceSteps::~DeviceSteps() {
  const CurrentDevice current(options_.device);
  if (current.status().ok()) (void)cudaDeviceSynchronize();  // kernels may still be reading
}

size_t DeviceSteps::PlaceScratch(void* base) {
  Arena arena(base);
  const size_t lanes = lane_capacity_;
  const size_t queries = lanes * options_.query_length * options_.group_size;
  arena.Place(lane_queries_, queries * options_.key_dim);
  arena.Place(score_tables_,
              queries * options_.codebook_capacity * kernels::TableFloats(options_.geometry));
  arena.Place(select_scratch_, select_scratch_bytes_);
  arena.Place(page_scratch_, page_scratch_bytes_);
  arena.Place(positions_, lanes * options_.selected_capacity);
  arena.Place(counts_, lanes);
  arena.Place(own_counts_, lanes);
  arena.Place(row_ranges_, lanes * options_.query_length * 2);
  arena.Place(list_bits_, lanes * kernels::cuda::ListBitWords(options_.token_capacity));
  arena.Place(addresses_, lanes * options_.selected_capacity);
  arena.Place(row_counts_, lanes);
  arena.Place(attend_scratch_, attend_scratch_bytes_);
  arena.Place(lane_output_, queries * options_.value_dim);
  arena.Place(lane_lse_, queries);
  arena.Place(part_output_, queries * options_.value_dim);
  arena.Place(part_lse_, queries);
  return arena.size_bytes();
}

Status DeviceSteps::Create(const StepsOptions& options) {
  options_ = options;
  options_.layer_kinds = nullptr;  // the caller's memory
  kinds_.assign(options.layer_count, StepLayerKind::kSelected);
  if (options.layer_kinds != nullptr) {
    kinds_.assign(options.layer_kinds, options.layer_kinds + options.layer_count);
  }
  windows_.assign(options.layer_count, 0);
  if (options.layer_windows != nullptr) {
    windows_.assign(options.layer_windows, options.layer_windows + options.layer_count);
  }
  options_.layer_windows = nullptr;  // likewise
  lane_capacity_ = options.sequence_capacity * options.kv_heads;
  row_bytes_ = (size_t{options.key_dim} + options.value_dim) * kernels::DTypeBytes(options.dtype);
  updated_.assign(options.layer_count, false);
  attend_scratch_bytes_ = kernels::cuda::AttendScratchBytes(attend_shape(options.query_length));
  // Sizes are needed before the tables exist: the tables count the chunks, but Create needs the
  // address of lane_queries_, which lies in this scratch memory.
  const uint32_t chunk_capacity =
      (options.token_capacity + kernels::cuda::kChunkTokens - 1) / kernels::cuda::kChunkTokens +
      options.codebook_capacity + options.range_capacity;
  select_scratch_bytes_ = kernels::cuda::PqSelectScratchBytes(
      {.geometry = options.geometry,
       .group_size = options.query_length * options.group_size,
       .lane_capacity = lane_capacity_,
       .chunk_capacity = lane_capacity_ * chunk_capacity,
       .table_capacity = lane_capacity_ * options.codebook_capacity});
  page_scratch_bytes_ =
      kernels::cuda::PageScratchBytes({.group_size = options.query_length * options.group_size,
                                       .lane_capacity = lane_capacity_,
                                       .chunk_capacity = lane_capacity_ * chunk_capacity,
                                       .token_capacity = options.token_capacity});
  RETURN_IF_ERROR(scratch_.Allocate(PlaceScratch(nullptr)));
  PlaceScratch(scratch_.data());
  if (std::ranges::count(kinds_, StepLayerKind::kSelected) > 0) {
    RETURN_IF_ERROR(codes_.Create(StepTables::CodesOptions(options)));
  }
  RETURN_IF_ERROR(tables_.Create(options, codes_, lane_queries_));
  RETURN_IF_ERROR(step_done_.Create());
  const size_t fetched = size_t{options.layer_count} * lane_capacity_ * options.query_length;
  RETURN_IF_ERROR(fetched_.Allocate(fetched * row_bytes_));
  RETURN_IF_ERROR(refused_.Allocate(kRefusedArguments * sizeof(unsigned long long)));
  ClearRefused();
  RETURN_IF_ERROR(ClearListBits());
  if (!device_.registers_read_only) {
    RETURN_IF_ERROR(CreateStaging());
  }
  return options.cache_tokens == 0 ? Status{} : CreateCaches();
}

Status DeviceSteps::ClearListBits() {
  const size_t words = lane_capacity_ * kernels::cuda::ListBitWords(options_.token_capacity);
  const cudaError_t error = cudaMemsetAsync(list_bits_, 0, words * sizeof(uint32_t), nullptr);
  if (error != cudaSuccess) return FromCuda(error, "clearing the bits of lists");
  // Engine streams do not wait for the default stream, so the host does.
  return FromCuda(cudaStreamSynchronize(nullptr), "clearing the bits of lists");
}

Status DeviceSteps::CreateCaches() {
  caches_ = std::make_unique<BlockCache[]>(options_.layer_count);
  const BlockCache::Options cache{
      .lane_capacity = lane_capacity_,
      .block_capacity =
          options_.token_capacity / kernels::cuda::kBlockSlots + options_.span_capacity + 1,
      .cache_tokens = options_.cache_tokens,
      .row_stride_bytes = row_bytes_,
      .policy = options_.policy,
      .max_loads = options_.max_loads};
  for (uint32_t layer = 0; layer < options_.layer_count; ++layer) {
    RETURN_IF_ERROR(caches_[layer].Create(cache, nullptr));
  }
  // Engine streams do not wait for the default stream, so the host does.
  return FromCuda(cudaStreamSynchronize(nullptr), "emptying the block caches");
}

Status DeviceSteps::CreateStaging() {
  auto staging = std::make_unique<RowStaging>();
  const RowStaging::Options options{.lane_capacity = lane_capacity_,
                                    .rows_per_lane = options_.selected_capacity,
                                    .row_stride_bytes = row_bytes_};
  RETURN_IF_ERROR(staging->Create(options, nullptr));
  if (const cudaError_t error = cudaStreamSynchronize(nullptr); error != cudaSuccess) {
    return FromCuda(error, "making room for staged rows");
  }
  staging_ = std::move(staging);
  is_staged_ = true;
  ++generation_;
  return {};
}

kernels::cuda::SeatShape DeviceSteps::seat_shape(uint32_t query_length) const {
  return {.seat_capacity = options_.sequence_capacity,
          .kv_heads = options_.kv_heads,
          .group_size = options_.group_size,
          .query_length = query_length};
}

kernels::cuda::AttendShape DeviceSteps::attend_shape(uint32_t query_length) const {
  return {.dtype = options_.dtype,
          .key_dim = options_.key_dim,
          .value_dim = options_.value_dim,
          .group_size = options_.group_size,
          .query_length = query_length,
          .lane_capacity = lane_capacity_,
          .row_capacity = options_.selected_capacity,
          .split_count = kernels::cuda::ChooseSplitCount(
              device_.multiprocessor_count, lane_capacity_, options_.selected_capacity)};
}

Status DeviceSteps::CheckBatch(const StepBatch& batch) const {
  if (batch.query_length == 0 || batch.query_length > options_.query_length) {
    return OutOfRange("query_length", batch.query_length,
                      "1 to " + std::to_string(options_.query_length));
  }
  return CheckStreamTakesWork(static_cast<Stream>(batch.stream));
}

Status DeviceSteps::CheckStreamTakesWork(Stream stream) const {
  RETURN_IF_ERROR(CheckStream(stream, device_));
  CaptureId capture;
  RETURN_IF_ERROR(FindCapture(stream, capture));
  if (!capture.is_capturing) return {};
  return {Code::kInvalid,
          "the stream captures; a step begins and ends, and rows are packed, outside of graphs"};
}

Status DeviceSteps::BeginCaches(Stream stream) {
  if (!caches_) return {};
  for (uint32_t layer = 0; layer < options_.layer_count; ++layer) {
    RETURN_IF_ERROR(caches_[layer].BeginStep(stream));
  }
  return {};
}

// Waits for the device when an earlier Begin or End failed: no event covers the work that it left.
Status DeviceSteps::WaitUnfinishedStep() {
  if (has_no_unfinished_step_) return {};
  const cudaError_t error = cudaDeviceSynchronize();
  has_no_unfinished_step_ = error == cudaSuccess;
  return FromCuda(error, "waiting for a step that was not ended");
}

Status DeviceSteps::BeginBatch(const StepBatch& batch) {
  RETURN_IF_ERROR(WaitUnfinishedStep());
  has_no_unfinished_step_ = false;
  ClearRefused();
  stream_ = static_cast<Stream>(batch.stream);
  // The previous step may have run on another stream; it uses the same tables and scratch.
  RETURN_IF_ERROR(step_done_.MakeWait(stream_));
  RETURN_IF_ERROR(BeginCaches(stream_));
  if (!all_codes_resident()) {  // the previous step may still read codes that the update overwrites
    RETURN_IF_ERROR(step_done_.Wait());
  }
  if (batch.decodes) RETURN_IF_ERROR(ReserveRecent());
  if (!page_lock_) {
    Device device = device_;
    device.registers_read_only = device.registers_read_only && batch.locks_pool;
    page_lock_ = std::make_unique<PageLock>(device, batch.pool, batch.pool_bytes);
  }
  Status status = tables_.Update(
      batch, {.page_lock = page_lock_.get(), .pool = batch.pool, .caches = caches_.get()}, stream_);
  locked_bytes_ = page_lock_->locked_bytes();
  if (status.ok() && batch.decodes) CopyRecent(batch);
  if (status.ok()) status = codes_.BeginStep(tables_.code_ranges());
  if (!status.ok() || staging_ || !tables_.has_host_only_rows()) return status;
  return CreateStaging();
}

Outcome DeviceSteps::Begin(const StepBatch& batch) {
  return OnDevice(options_.device, [&]() -> Status {
    const RelaxedCaptureMode beside;
    query_length_ = 0;
    RETURN_IF_ERROR(CheckBatch(batch));
    if (batch.pool != pool_ || batch.pool_bytes != pool_bytes_) {
      RETURN_IF_ERROR(UnlockPool());
      pool_ = batch.pool;
      pool_bytes_ = batch.pool_bytes;
    }
    RETURN_IF_ERROR(BeginBatch(batch));
    query_length_ = batch.query_length;
    selects_per_token_ = batch.selects_per_token;
    decodes_ = batch.decodes;
    row_end_ = 0;
    for (uint32_t i = 0; i < batch.count; ++i) {
      row_end_ = std::max(row_end_, batch.sequences[i].row_end);
    }
    updated_.assign(options_.layer_count, false);
    return {};
  });
}

Status DeviceSteps::UnlockPool() {
  query_length_ = 0;
  if (pool_ == nullptr) return {};
  const cudaError_t error = cudaDeviceSynchronize();
  page_lock_.reset();
  locked_bytes_ = 0;
  tables_.InvalidateAll();
  pool_ = nullptr;
  pool_bytes_ = 0;
  return FromCuda(error, "waiting for the device");
}

Outcome DeviceSteps::ReleasePool() {
  return OnDevice(options_.device, [&] {
    const RelaxedCaptureMode beside;
    return UnlockPool();
  });
}

std::byte* DeviceSteps::HostRows(uint32_t layer) const {
  return static_cast<std::byte*>(fetched_.data()) +
         size_t{layer} * token_room() * options_.kv_heads * row_bytes_;
}

Outcome DeviceSteps::Fetch(uint32_t layer, const StepRows& from, const void** rows) {
  return OnDevice(options_.device, [&]() -> Status {
    if (query_length_ == 0) return {Code::kInvalid, "no step is under way"};
    if (layer >= options_.layer_count || from.token_count > token_room()) {
      return OutOfRange("token_count", from.token_count, "at most " + std::to_string(token_room()));
    }
    RETURN_IF_ERROR(CheckStreamTakesWork(stream_));
    for (const auto& [memory, name] : {std::pair{from.keys, "keys"}, {from.values, "values"}}) {
      RETURN_IF_ERROR(CheckDevicePointer(memory, name, device_));
    }
    std::byte* const target = HostRows(layer);
    *rows = target;
    return FromKernel(
        kernels::cuda::PackRows({.token_count = from.token_count,
                                 .head_count = options_.kv_heads,
                                 .key_dim = options_.key_dim,
                                 .value_dim = options_.value_dim,
                                 .key = {.data = static_cast<const std::byte*>(from.keys),
                                         .dtype = from.key_dtype,
                                         .token_stride = from.key_strides[0],
                                         .head_stride = from.key_strides[1]},
                                 .value = {.data = static_cast<const std::byte*>(from.values),
                                           .dtype = from.value_dtype,
                                           .token_stride = from.value_strides[0],
                                           .head_stride = from.value_strides[1]},
                                 .row_dtype = options_.dtype,
                                 .rows = target,
                                 .head_stride_bytes = from.token_count * row_bytes_,
                                 .row_stride_bytes = row_bytes_},
                                stream_),
        "fetching rows");
  });
}

Outcome DeviceSteps::End() {
  return OnDevice(options_.device, [&]() -> Status {
    if (query_length_ == 0) return {Code::kInvalid, "no step is under way"};
    query_length_ = 0;
    // An event recorded by a capture could not be waited for outside of the graph.
    RETURN_IF_ERROR(CheckStreamTakesWork(stream_));
    for (uint32_t layer = 0; caches_ && layer < options_.layer_count; ++layer) {
      if (updated_[layer]) continue;
      RETURN_IF_ERROR(UpdateCache(layer));
    }
    RETURN_IF_ERROR(codes_.EndStep(stream_));
    Status status = step_done_.Record(stream_);
    has_no_unfinished_step_ = status.ok();
    return status;
  });
}

Outcome DeviceSteps::Wait() {
  return OnDevice(options_.device, [&] {
    const RelaxedCaptureMode beside;
    return step_done_.Wait();
  });
}

Outcome DeviceSteps::LockStaging(std::byte* ring, size_t size_bytes, uint32_t slot_count) {
  return OnDevice(options_.device, [&] { return packer_.Lock(ring, size_bytes, slot_count); });
}

Outcome DeviceSteps::Pack(const StepPack& pack, uint32_t slot) {
  return OnDevice(options_.device, [&]() -> Status {
    RETURN_IF_ERROR(CheckStreamTakesWork(static_cast<Stream>(pack.stream)));
    for (const auto& [part, name] : {std::pair{&pack.keys, "keys"}, {&pack.values, "values"}}) {
      if (part->to != nullptr) RETURN_IF_ERROR(CheckDevicePointer(part->data, name, device_));
    }
    return packer_.Pack(pack, slot);
  });
}

Outcome DeviceSteps::WaitPacked(uint32_t slot) {
  return OnDevice(options_.device, [&] { return packer_.Wait(slot); });
}

Outcome DeviceSteps::Merge(const kernels::cuda::MergeTensorsArgs& merge, void* stream,
                           const char** field) {
  return OnDevice(options_.device, [&]() -> Status {
    if (merge.token_count == 0 || merge.head_count == 0) return {};
    *field = "stream";
    RETURN_IF_ERROR(CheckStream(static_cast<Stream>(stream), device_));
    const std::pair<const void*, const char*> tensors[] = {
        {merge.a.lse, "a.lse.ptr"},
        {merge.b.lse, "b.lse.ptr"},
        {merge.a.output, "a.output.ptr"},
        {merge.b.output, "b.output.ptr"},
        {merge.sink_logits, "a.sink_logits.ptr"}};
    for (const auto& [memory, name] : tensors) {
      // Outputs without elements and absent sinks have no memory.
      if (memory == nullptr) continue;
      *field = name;
      RETURN_IF_ERROR(CheckDevicePointer(memory, "it", device_));
    }
    *field = "gpu";
    return FromKernel(kernels::cuda::MergeTensors(merge, static_cast<Stream>(stream)),
                      "merging partial attentions");
  });
}

Outcome DeviceSteps::Count(StepsCounts* counts) {
  return OnDevice(options_.device, [&]() -> Status {
    const RelaxedCaptureMode beside;
    *counts = {
        .device_bytes = tables_.device_bytes() + codes_.device_bytes() + scratch_.size_bytes(),
        .locked_bytes = locked_bytes_,
        .generation = generation_,
        .has_staged_rows = is_staged_,
        .resident_layers = codes_.resident_layer_count()};
    for (uint32_t layer = 0; caches_ && layer < options_.layer_count; ++layer) {
      BlockCache::Counters counters;
      RETURN_IF_ERROR(caches_[layer].Read(counters));
      counts->hits += counters.hits;
      counts->misses += counters.misses;
      counts->loaded += counters.loaded;
      counts->evicted += counters.evicted;
      counts->device_bytes += caches_[layer].device_bytes();
    }
    return {};
  });
}

}  // namespace pqcached::gpu
