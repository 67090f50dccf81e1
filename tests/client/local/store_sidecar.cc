// What tests steer of the sidecar of a store client.
#include <stdexcept>
#include <utility>

#include "kvstore/share/control_memory.h"
#include "tests/client/local/store_client.h"

namespace pqcached::testing {

Sidecar::Sidecar(const kvstore::StoreOptions& options) {
  auto made = kvstore::Store::Create(options);
  if (!made.ok()) throw std::runtime_error(std::string(made.status().message()));
  store = *std::move(made);
}

void Sidecar::CloseGate() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

void Sidecar::OpenGate() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = false;
  }
  opened_.notify_all();
}

void Sidecar::PassGate() {
  std::unique_lock lock(mutex_);
  opened_.wait(lock, [this] { return !closed_; });
}

void Sidecar::HoldSlots(std::vector<kvstore::StagedBytes> slots) {
  const std::lock_guard lock(mutex_);
  for (kvstore::StagedBytes& slot : slots) held_.push_back(std::move(slot));
}

std::vector<std::vector<std::byte>> Sidecar::LetGoOfSlots() {
  const std::lock_guard lock(mutex_);
  std::vector<std::vector<std::byte>> bytes;
  for (const kvstore::StagedBytes& slot : held_) {
    bytes.emplace_back(slot.slot.begin(), slot.slot.end());
  }
  held_.clear();
  return bytes;
}

kvstore::StoreOptions SmallSegments() {
  kvstore::StoreOptions options;
  options.max_pool_bytes = size_t{256} << 20;
  options.segment_tokens = 256;
  options.tail_tokens = 128;
  options.codebook_tokens = 512;
  return options;
}

void Sidecar::EndWorker() {
  reachable = false;
  // The end of a worker does not free the ring, and that of a session does not while a slot is
  // claimed.
  for (uint32_t slot = 0; slot < kvstore::kMaxStagingSlots; ++slot) {
    auto claim = store->ClaimStaging(local_session(), {.slot = slot, .generation = 1u << 30});
    if (!claim.ok()) continue;
    ended_rings_.push_back(*std::move(claim));
    break;
  }
  store->DropSession(local_session());
}

void Sidecar::KeepControl(kvstore::FileDescriptor control) {
  const std::lock_guard lock(mutex_);
  control_ = std::move(control);
}

void Sidecar::KillWorker() {
  reachable = false;
  const std::lock_guard lock(mutex_);
  kvstore::EndControlMemory(control_.get());
}

void Sidecar::StartWorker() {
  {
    const std::lock_guard lock(mutex_);
    if (control_.valid()) kvstore::MarkSuccessor(control_.get());
  }
  ++boot_word;
  reachable = true;
}

}  // namespace pqcached::testing
