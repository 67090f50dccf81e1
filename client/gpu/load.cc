#include "client/gpu/load.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "client/base/error.h"
#include "client/base/pack.h"
#include "client/gpu/gpu.h"
#include "client/local/session.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// Lists where the tokens of a paged tensor begin, in elements; none where it is not paged.
void ListOffsets(const TensorView& tensor, std::vector<int64_t>* offsets) {
  offsets->clear();
  if (!tensor.paged()) return;
  const uint64_t token_count = tensor.shape[0];
  const auto element_bytes = static_cast<ptrdiff_t>(kernels::DTypeBytes(tensor.dtype));
  offsets->reserve(token_count);
  for (uint64_t index = 0; index < token_count;) {
    const PackRun run = RunAt(tensor, index, token_count);
    int64_t offset = (run.data - tensor.data) / element_bytes;
    for (uint64_t i = 0; i < run.count; ++i, offset += tensor.strides[0]) {
      offsets->push_back(offset);
    }
    index += run.count;
  }
}

gpu::LoadTensor LoadTensorOf(const TensorView& tensor, const std::vector<int64_t>& offsets) {
  return {.data = const_cast<std::byte*>(tensor.data),
          .dtype = tensor.dtype,
          .token_offsets = offsets.empty() ? nullptr : offsets.data(),
          .token_stride = tensor.strides[0],
          .head_stride = tensor.strides[1],
          .dim_stride = tensor.strides[2]};
}

class DeviceSink final : public LoadSink {
 public:
  DeviceSink(std::shared_ptr<DeviceLoads> loads, HeldLoader held)
      : loads_(std::move(loads)), held_(std::move(held)) {}
  ~DeviceSink() override {
    // A loader with copies in flight, or one whose device has failed, is not used again.
    if (is_finished_ && failure_.ok()) loads_->Return(std::move(held_));
  }

  pqc_status Begin(const LoadLayer& layer, uint64_t first_position) override {
    first_position_ = first_position;
    {
      const base::MutexLock lock(&mutex_);
      is_finished_ = false;  // the block tables are copied from here on
    }
    ListOffsets(layer.to.keys, &key_offsets_);
    ListOffsets(layer.to.values, &value_offsets_);
    return Note(held_.loader->Begin({.keys = LoadTensorOf(layer.to.keys, key_offsets_),
                                     .values = LoadTensorOf(layer.to.values, value_offsets_),
                                     .token_count = layer.to.keys.shape[0],
                                     .kv_heads = layer.shape.kv_heads,
                                     .key_dim = layer.shape.key_dim,
                                     .value_dim = layer.shape.value_dim,
                                     .row_dtype = layer.shape.dtype}));
  }

  pqc_status SetPool(const std::shared_ptr<Mapping>& pool) override {
    const bool is_held = pool->HoldPages() == PQC_OK;
    if (!is_held) ClearLastError();  // the host reads the rows
    const gpu::Outcome set =
        held_.loader->SetPool(is_held ? pool->data() : nullptr, is_held ? pool->size_bytes() : 0);
    if (set.ok()) held_.pool = is_held ? pool : nullptr;
    return Note(set);
  }

  bool needs_long_runs() const override { return true; }

  void Write(const kvstore::RowRun& run) override {
    {
      const base::MutexLock lock(&mutex_);
      if (!failure_.ok()) return;
    }
    const gpu::Outcome written =
        held_.loader->Write({.first_token = run.first_position - first_position_,
                             .token_count = run.token_count,
                             .rows = run.rows.data()});
    if (written.ok()) return;
    const base::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = written;
  }

  pqc_status Finish() override {
    const gpu::Outcome finished = held_.loader->Finish();
    {
      const base::MutexLock lock(&mutex_);
      is_finished_ = finished.ok();
    }
    return Note(finished);
  }

 private:
  // Reports the first failure of the sink, this outcome included.
  pqc_status Note(const gpu::Outcome& outcome) {
    const base::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = outcome;
    return Report(failure_, "layers");
  }

  const std::shared_ptr<DeviceLoads> loads_;  // shared with the client
  HeldLoader held_;
  uint64_t first_position_ = 0;
  std::vector<int64_t> key_offsets_;
  std::vector<int64_t> value_offsets_;
  base::Mutex mutex_;
  gpu::Outcome failure_ PQCACHED_GUARDED_BY(mutex_);  // the first one
  bool is_finished_ PQCACHED_GUARDED_BY(mutex_) = true;
};

pqc_status CheckLoadPointers(gpu::RowLoader& loader, std::span<const LoadLayer> layers) {
  for (size_t i = 0; i < layers.size(); ++i) {
    for (const bool is_key : {true, false}) {
      const TensorView& tensor = is_key ? layers[i].to.keys : layers[i].to.values;
      const FieldPath field = FieldPath::Of("layers[%zu].%s.ptr", i, is_key ? "keys" : "values");
      if (reinterpret_cast<uintptr_t>(tensor.data) % kernels::DTypeBytes(tensor.dtype) != 0) {
        return Fail(PQC_INVALID_ARGUMENT, field, "must be aligned to its elements");
      }
      const gpu::Outcome checked = loader.CheckTarget(tensor.data);
      if (checked.code == gpu::Code::kInvalid) {
        return Fail(PQC_INVALID_ARGUMENT, field, "%s", checked.text);
      }
      RETURN_IF_ERROR(Report(checked, "layers"));
    }
  }
  return PQC_OK;
}

// Returns whether the worker has ended whose memory the loader has locked.
bool IsEnded(const HeldLoader& loader) {
  const bool is_ended = loader.pool != nullptr && loader.pool->HoldPages() != PQC_OK;
  if (is_ended) ClearLastError();
  return is_ended;
}

}  // namespace

void DeviceLoads::SetEntry(const gpu::GpuEntry& entry) {
  const base::MutexLock lock(&mutex_);
  if (!entry_) entry_ = &entry;
}

pqc_status DeviceLoads::FindEntry(const gpu::GpuEntry** entry) {
  const base::MutexLock lock(&mutex_);
  if (!entry_) RETURN_IF_ERROR(LoadGpuLibrary(nullptr, &entry_));
  *entry = entry_;
  return PQC_OK;
}

pqc_status DeviceLoads::Take(const void* target, const char* name, HeldLoader* loader) {
  {
    const base::MutexLock lock(&mutex_);
    for (auto held = idle_.rbegin(); held != idle_.rend(); ++held) {
      if (!held->loader->CheckTarget(target).ok()) continue;  // of another device
      *loader = std::move(*held);
      idle_.erase(std::next(held).base());
      return PQC_OK;
    }
  }
  const gpu::GpuEntry* entry = nullptr;
  RETURN_IF_ERROR(FindEntry(&entry));
  gpu::RowLoader* opened = nullptr;
  RETURN_IF_ERROR(Report(entry->open_loader(target, &opened), name));
  loader->loader.reset(opened);
  return PQC_OK;
}

void DeviceLoads::Return(HeldLoader loader) {
  const base::MutexLock lock(&mutex_);
  if (IsEnded(loader)) return;  // it is closed
  try {
    idle_.push_back(std::move(loader));
  } catch (const std::bad_alloc&) {  // it is closed
  }
}

void DeviceLoads::CloseEnded() {
  std::vector<HeldLoader> ended;  // closed without the lock
  const base::MutexLock lock(&mutex_);
  const auto first = std::stable_partition(
      idle_.begin(), idle_.end(), [](const HeldLoader& loader) { return !IsEnded(loader); });
  ended.assign(std::make_move_iterator(first), std::make_move_iterator(idle_.end()));
  idle_.erase(first, idle_.end());
}

std::shared_ptr<DeviceLoads> DeviceLoadsOf(ClientState& client) {
  const base::MutexLock lock(&client.device_loads_mutex);
  if (client.device_loads) return client.device_loads;
  client.device_loads = std::make_shared<DeviceLoads>();
  if (client.local) {
    client.local->OnReplaced([loads = std::weak_ptr(client.device_loads)] {
      if (const auto present = loads.lock()) present->CloseEnded();
    });
  }
  return client.device_loads;
}

pqc_status OpenDeviceSink(ClientState& client, std::span<const LoadLayer> layers, void* stream,
                          std::shared_ptr<LoadSink>* sink) {
  std::shared_ptr<DeviceLoads> loads = DeviceLoadsOf(client);
  HeldLoader held;
  RETURN_IF_ERROR(loads->Take(layers.front().to.keys.data, "layers[0].keys.ptr", &held));
  gpu::RowLoader& loader = *held.loader;
  *sink = std::make_shared<DeviceSink>(std::move(loads), std::move(held));
  RETURN_IF_ERROR(CheckLoadPointers(loader, layers));
  return Report(loader.Follow(stream), "layers[0].keys.stream");
}

}  // namespace pqcached::client
