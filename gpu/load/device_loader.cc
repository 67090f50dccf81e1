#include "gpu/load/device_loader.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/unpack.h"

namespace pqcached::gpu {
namespace {

using kernels::cuda::Stream;

constexpr size_t kRowAlignment = 16;

Status CheckShape(const LoadShape& shape) {
  if (shape.kv_heads == 0 || shape.kv_heads > kernels::cuda::kMaxUnpackHeads) {
    return OutOfRange("kv_heads", shape.kv_heads, "1 to 256");
  }
  for (const LoadTensor* tensor : {&shape.keys, &shape.values}) {
    if (reinterpret_cast<uintptr_t>(tensor->data) % kernels::DTypeBytes(tensor->dtype) == 0) {
      continue;
    }
    return {Code::kInvalid, "a pointer must be aligned to its elements"};
  }
  return {};
}

kernels::cuda::UnpackTensor TensorAt(const LoadTensor& tensor, const int64_t* offsets,
                                     uint64_t first_token) {
  kernels::cuda::UnpackTensor part{.data = static_cast<std::byte*>(tensor.data),
                                   .dtype = tensor.dtype,
                                   .token_stride = tensor.token_stride,
                                   .head_stride = tensor.head_stride,
                                   .dim_stride = tensor.dim_stride};
  if (offsets != nullptr) {
    part.token_offsets = offsets + first_token;
  } else {
    part.data += static_cast<int64_t>(first_token) * tensor.token_stride *
                 static_cast<int64_t>(kernels::DTypeBytes(tensor.dtype));
  }
  return part;
}

}  // namespace

Status DeviceLoader::Open(const void* target, std::unique_ptr<DeviceLoader>& loader) {
  const RelaxedCaptureMode beside;
  cudaPointerAttributes attributes = {};
  if (const cudaError_t error = cudaPointerGetAttributes(&attributes, target);
      error != cudaSuccess) {
    return FromCuda(error, "asking for the device of a pointer");
  }
  if (attributes.type == cudaMemoryTypeUnregistered) {
    return {Code::kInvalid, "it is pageable host memory; a device pointer is needed"};
  }
  Device device;
  RETURN_IF_ERROR(FindDevice(attributes.device, device));
  const CurrentDevice current(device.index);
  if (!current.status().ok()) return current.status();
  std::unique_ptr<DeviceLoader> made(new DeviceLoader);
  made->device_ = std::move(device);
  RETURN_IF_ERROR(made->Create());
  loader = std::move(made);
  return {};
}

DeviceLoader::~DeviceLoader() {
  if (stream_.get() != nullptr) (void)cudaStreamSynchronize(stream_.get());
}

void DeviceLoader::Close() {
  const CurrentDevice current(device_.index);
  const RelaxedCaptureMode beside;
  delete this;
}

Status DeviceLoader::Create() {
  RETURN_IF_ERROR(stream_.Create());
  RETURN_IF_ERROR(followed_.Create());
  for (OwnedEvent& copied : copied_) RETURN_IF_ERROR(copied.Create(OwnedEvent::Waiting::kSleeps));
  return done_.Create(OwnedEvent::Waiting::kSleeps);
}

Outcome DeviceLoader::CheckTarget(const void* memory) {
  return OnDevice(device_.index, [&] { return CheckDevicePointer(memory, "it", device_); });
}

Outcome DeviceLoader::Follow(void* stream) {
  return OnDevice(device_.index, [&]() -> Status {
    const RelaxedCaptureMode beside;
    const auto engine = static_cast<Stream>(stream);
    RETURN_IF_ERROR(CheckStream(engine, device_));
    CaptureId capture;
    RETURN_IF_ERROR(FindCapture(engine, capture));
    if (capture.is_capturing) {
      return {Code::kInvalid, "the stream captures; rows are loaded outside of graphs"};
    }
    RETURN_IF_ERROR(followed_.Record(engine));
    return followed_.MakeWait(stream_.get());
  });
}

Outcome DeviceLoader::SetPool(const std::byte* pool, size_t pool_bytes) {
  if (pool == pool_ && pool_bytes == pool_bytes_) {
    locks_pool_ = pool != nullptr;  // also where an earlier load was refused
    return {};
  }
  return OnDevice(device_.index, [&]() -> Status {
    const RelaxedCaptureMode beside;
    page_lock_.reset();  // the last Finish has waited for the copies
    pool_ = pool;
    pool_bytes_ = pool_bytes;
    locks_pool_ = pool != nullptr;
    if (locks_pool_) page_lock_ = std::make_unique<PageLock>(device_, pool, pool_bytes);
    return {};
  });
}

Outcome DeviceLoader::Begin(const LoadShape& shape) {
  return OnDevice(device_.index, [&]() -> Status {
    const RelaxedCaptureMode beside;
    RETURN_IF_ERROR(CheckShape(shape));
    shape_ = shape;
    key_offsets_ = value_offsets_ = nullptr;
    Status copied = CopyOffsets();
    shape_.keys.token_offsets = shape_.values.token_offsets = nullptr;  // the caller's memory
    return copied;
  });
}

// Copies the offsets of paged tensors to the device, in the order of the stream.
Status DeviceLoader::CopyOffsets() {
  const size_t count = shape_.token_count;
  const size_t tables = (shape_.keys.token_offsets != nullptr ? 1 : 0) +
                        (shape_.values.token_offsets != nullptr ? 1 : 0);
  const size_t bytes = tables * count * sizeof(int64_t);
  if (bytes == 0) return {};
  if (bytes > offsets_.size_bytes()) {
    RETURN_IF_ERROR(host_offsets_.Allocate(bytes));
    RETURN_IF_ERROR(offsets_.Allocate(bytes));
  }
  auto* host = static_cast<int64_t*>(host_offsets_.data());
  auto* device = static_cast<const int64_t*>(offsets_.data());
  const auto add = [&](const int64_t* from) -> const int64_t* {
    if (from == nullptr) return nullptr;
    std::copy_n(from, count, host);
    host += count;
    return std::exchange(device, device + count);
  };
  key_offsets_ = add(shape_.keys.token_offsets);
  value_offsets_ = add(shape_.values.token_offsets);
  return FromCuda(cudaMemcpyAsync(offsets_.data(), host_offsets_.data(), bytes,
                                  cudaMemcpyHostToDevice, stream_.get()),
                  "copying block tables");
}

Outcome DeviceLoader::Write(const LoadRows& rows) {
  return OnDevice(device_.index, [&]() -> Status {
    const RelaxedCaptureMode beside;
    if (rows.first_token > shape_.token_count ||
        rows.token_count > shape_.token_count - rows.first_token) {
      return OutOfRange("token_count", rows.token_count, "within the layer");
    }
    const std::lock_guard lock(mutex_);
    std::vector<const std::byte*> addresses(shape_.kv_heads);
    if (!FindInPool(rows, addresses)) return StageRows(rows);
    return Unpack(rows.first_token, rows.token_count, addresses);
  });
}

// Finds the device's addresses of rows in the pool. Returns false when it cannot read them there.
bool DeviceLoader::FindInPool(const LoadRows& rows, std::vector<const std::byte*>& addresses) {
  if (!locks_pool_) return false;
  const size_t size_bytes = rows.token_count * row_bytes();
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    addresses[head] = FindHeadInPool(rows.rows[head], size_bytes);
    if (addresses[head] == nullptr) return false;
  }
  return true;
}

const std::byte* DeviceLoader::FindHeadInPool(const std::byte* rows, size_t size_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(rows) - reinterpret_cast<uintptr_t>(pool_);
  if (begin >= pool_bytes_ || size_bytes > pool_bytes_ - begin || size_bytes == 0) return nullptr;
  if (!page_lock_->Lock(begin, size_bytes).ok()) {
    locks_pool_ = false;
    return nullptr;
  }
  const std::byte* const first = page_lock_->DeviceAddress(begin);
  if (reinterpret_cast<uintptr_t>(first) % kRowAlignment != 0) return nullptr;
  // Pieces that are adjacent in the pool need not be adjacent on the device.
  const size_t piece = page_lock_->piece_bytes();
  for (size_t next = (begin / piece + 1) * piece; next < begin + size_bytes; next += piece) {
    if (page_lock_->DeviceAddress(next) != first + (next - begin)) return nullptr;
  }
  return first;
}

// Copies rows to page-locked memory, as many as fit at once, while the device unpacks the previous
// ones.
Status DeviceLoader::StageRows(const LoadRows& rows) {
  if (staging_.data() == nullptr) RETURN_IF_ERROR(staging_.Allocate(kSlots * kSlotBytes));
  const size_t token_bytes = shape_.kv_heads * row_bytes();
  const auto most = static_cast<uint32_t>(kSlotBytes / token_bytes);
  if (most == 0) return OutOfRange("bytes of a token", token_bytes, "at most 4 MiB");
  std::vector<const std::byte*> addresses(shape_.kv_heads);
  for (uint32_t begin = 0; begin < rows.token_count;) {
    const uint32_t count = std::min(most, rows.token_count - begin);
    OwnedEvent& copied = copied_[next_slot_];
    RETURN_IF_ERROR(copied.Wait());
    auto* to = static_cast<std::byte*>(staging_.data()) + next_slot_ * kSlotBytes;
    for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
      std::memcpy(to, rows.rows[head] + begin * row_bytes(), count * row_bytes());
      addresses[head] = to;
      to += count * row_bytes();
    }
    RETURN_IF_ERROR(Unpack(rows.first_token + begin, count, addresses));
    RETURN_IF_ERROR(copied.Record(stream_.get()));
    next_slot_ = (next_slot_ + 1) % kSlots;
    begin += count;
  }
  return {};
}

Status DeviceLoader::Unpack(uint64_t first_token, uint32_t token_count,
                            const std::vector<const std::byte*>& addresses) {
  kernels::cuda::UnpackRowsArgs args{.token_count = token_count,
                                     .head_count = shape_.kv_heads,
                                     .key_dim = shape_.key_dim,
                                     .value_dim = shape_.value_dim,
                                     .row_dtype = shape_.row_dtype,
                                     .row_stride_bytes = row_bytes(),
                                     .key = TensorAt(shape_.keys, key_offsets_, first_token),
                                     .value = TensorAt(shape_.values, value_offsets_, first_token)};
  std::copy(addresses.begin(), addresses.end(), args.rows);
  return FromKernel(kernels::cuda::UnpackRows(args, stream_.get()), "unpacking rows");
}

Outcome DeviceLoader::Finish() {
  return OnDevice(device_.index, [&]() -> Status {
    const RelaxedCaptureMode beside;
    RETURN_IF_ERROR(done_.Record(stream_.get()));
    return done_.Wait();
  });
}

}  // namespace pqcached::gpu
