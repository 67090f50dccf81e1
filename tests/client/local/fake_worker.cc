#include "tests/client/local/fake_worker.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "client/base/error.h"
#include "kvstore/read/attachment.h"

namespace pqcached::testing {
namespace {

using namespace pqcached::client;  // NOLINT: this is its other side
using kvstore::ControlPage;
using kvstore::LeaseWords;

constexpr uint64_t kWordsOffset = 64;
constexpr size_t kControlBytes = 4096;
constexpr size_t kPoolBytes = 16 * kvstore::kMinExtentBytes;
constexpr uint32_t kRowBytes = 128;

std::shared_ptr<Mapping> MapNew(size_t size_bytes) {
  const int descriptor = memfd_create("fake", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(size_bytes)) != 0) {
    throw std::runtime_error("memfd");
  }
  std::shared_ptr<Mapping> mapping;
  if (Mapping::Map(descriptor, size_bytes, MappingAccess::kReadWrite, "fake", &mapping) != PQC_OK) {
    throw std::runtime_error(pqc_last_error());
  }
  return mapping;
}

}  // namespace

ImageBytes EncodeFakeImage(uint64_t version, std::vector<uint32_t> layer_tokens,
                           uint64_t sequence_id) {
  kvstore::Attachment attachment;
  attachment.header.sequence_id = sequence_id;
  attachment.header.version = version;
  attachment.header.token_count = *std::min_element(layer_tokens.begin(), layer_tokens.end());
  attachment.segments.push_back(
      {.segment_id = 1, .first_position = 0, .slot_capacity = kFakeSlots});
  for (uint32_t layer = 0; layer < layer_tokens.size(); ++layer) {
    kvstore::LayerDescriptor descriptor;
    descriptor.layer = layer;
    descriptor.row_bytes = kRowBytes;
    descriptor.kv_head_count = 1;
    descriptor.row_extent_begin = layer;
    attachment.layers.push_back(descriptor);
    attachment.row_extents.push_back({.unit = layer, .order = 0});
  }
  attachment.layer_tokens = std::move(layer_tokens);
  return {.version = version, .image = kvstore::EncodeAttachment(attachment)};
}

class FakeWorker::Host final : public LocalHost {
 public:
  explicit Host(FakeWorker& worker) : worker_(worker) { ++worker_.connections; }
  ~Host() override { --worker_.connections; }

  pqc_status OpenPool(uint64_t cache_id, std::shared_ptr<Mapping>* pool) override {
    if (cache_id != kFakeCache) return Fail(PQC_NOT_FOUND, "cache_id", "no such cache");
    *pool = worker_.pool_;
    return PQC_OK;
  }
  pqc_status HoldPool(uint64_t) override { return PQC_UNIMPLEMENTED; }
  pqc_status OpenStaging(uint64_t, uint32_t, std::shared_ptr<Mapping>*) override {
    return Fail(PQC_UNIMPLEMENTED, "", "no staging");
  }
  pqc_status Attach(uint64_t, const LeaseView& lease, AttachAnswer* result) override {
    worker_.attached.push_back(lease);
    if (worker_.unavailable_attaches > 0) {
      --worker_.unavailable_attaches;
      return Fail(PQC_UNAVAILABLE, "", "the connection has broken");
    }
    if (const auto script = std::exchange(worker_.before_refusal, nullptr)) {
      script();
      return Fail(PQC_FAILED_PRECONDITION, "lease.lease_id", "it is revoked");
    }
    *result = worker_.answer;
    if (const auto script = std::exchange(worker_.during_attach, nullptr)) script();
    return PQC_OK;
  }
  pqc_status Detach(const LeaseView& lease) override {
    worker_.detached.push_back(lease);
    return PQC_OK;
  }
  void End() override {}
  bool WaitEnded(uint32_t) override { return worker_.connection_ended; }
  bool HoldsConnection() override { return worker_.holds_connection; }
  void Abandon() override {}

 private:
  FakeWorker& worker_;
};

FakeWorker::FakeWorker(uint64_t boot_word)
    : boot_word_(boot_word), control_(MapNew(kControlBytes)), pool_(MapNew(kPoolBytes)) {
  auto* page = new (control_->data()) ControlPage;
  page->boot_word = boot_word;
  page->word_count = kFakeWordCount;
  page->words_offset_bytes = kWordsOffset;
  for (uint32_t i = 0; i < kFakeWordCount; ++i) new (&words(i)) LeaseWords;
}

LeaseWords& FakeWorker::words(uint32_t index) const {
  return reinterpret_cast<LeaseWords*>(control_->data() + kWordsOffset)[index];
}

void FakeWorker::Grant(uint64_t lease_id, uint32_t word_index, uint32_t token_count,
                       ImageBytes image) {
  LeaseWords& granted = words(word_index);
  granted.lease_id = lease_id;
  granted.version = image.version;
  granted.token_count = token_count;
  granted.flags = 0;
  answer = {.lease_id = lease_id, .word_index = word_index, .image = std::move(image)};
}

void FakeWorker::End() { reinterpret_cast<ControlPage*>(control_->data())->boot_word = 0; }

void FakeWorker::Die() {
  auto* const end =
      reinterpret_cast<kvstore::WorkerEnd*>(control_->data() + kvstore::WorkerEnd::kOffsetBytes);
  // As EndControlMemory does.
  end->boot_word =
      reinterpret_cast<ControlPage*>(control_->data())->boot_word != 0 ? boot_word_ : 0;
  End();
  connection_ended = true;
}

void FakeWorker::SetSucceeded() {
  reinterpret_cast<kvstore::WorkerEnd*>(control_->data() + kvstore::WorkerEnd::kOffsetBytes)
      ->has_successor = 1;
}

LocalLink::Parts FakeWorker::Connect() {
  return {.host = std::make_unique<Host>(*this), .control = control_, .boot_word = boot_word_};
}

std::shared_ptr<LocalSession> OpenFakeSession(FakeWorker& first,
                                              const std::atomic<FakeWorker*>& next) {
  const auto resume = [&next](uint32_t, LocalLink::Parts* parts) {
    FakeWorker* const worker = next;
    if (!worker) return Fail(PQC_UNAVAILABLE, "", "there is no worker");
    *parts = worker->Connect();
    return PQC_OK;
  };
  std::shared_ptr<LocalSession> session;
  if (LocalSession::Open(
          first.Connect(), resume,
          {.workers = {.thread_count = 1}, .phase = std::make_shared<SessionPhase>()},
          &session) != PQC_OK) {
    throw std::runtime_error(pqc_last_error());
  }
  return session;
}

}  // namespace pqcached::testing
