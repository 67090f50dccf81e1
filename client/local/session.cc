#include "client/local/session.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "client/error.h"

namespace pqcached::client {
namespace {

using kvstore::ControlPage;
using kvstore::LeaseWords;

// A sleeper looks this often whether the session still lives: a killed sidecar wakes nobody.
constexpr std::chrono::milliseconds kLongestSleep(50);

pqc_status CheckControl(const Mapping& control) {
  if (control.size_bytes() < sizeof(ControlPage)) {
    return Fail(PQC_INTERNAL, "control memory: %zu bytes", control.size_bytes());
  }
  const auto& page = *reinterpret_cast<const ControlPage*>(control.data());
  if (page.magic != ControlPage::kMagic) return Fail(PQC_INTERNAL, "control memory: magic");
  if (page.layout_version != kvstore::kLayoutVersion) {
    return Fail(PQC_FAILED_PRECONDITION,
                "control memory: layout_version is %u; this client reads %u", page.layout_version,
                kvstore::kLayoutVersion);
  }
  const uint64_t offset = page.words_offset_bytes;
  if (offset % alignof(LeaseWords) != 0 || offset > control.size_bytes() ||
      page.word_count > (control.size_bytes() - offset) / sizeof(LeaseWords)) {
    return Fail(PQC_INTERNAL, "control memory: words lie beyond its end");
  }
  return PQC_OK;
}

}  // namespace

LocalSession::LocalSession(std::unique_ptr<LocalHost> host, std::shared_ptr<Mapping> control,
                           uint64_t boot_word, const Options& options)
    : host_(std::move(host)),
      control_(std::move(control)),
      boot_word_(boot_word),
      workers_(options.workers) {
  staging_ =
      std::make_unique<Staging>(*host_, options.staging_slot_bytes, options.staging_slot_count);
}

pqc_status LocalSession::Open(std::unique_ptr<LocalHost> host, std::shared_ptr<Mapping> control,
                              uint64_t boot_word, const Options& options,
                              std::shared_ptr<LocalSession>* session) {
  if (const pqc_status status = CheckControl(*control); status != PQC_OK) return status;
  std::shared_ptr<LocalSession> opened(
      new LocalSession(std::move(host), std::move(control), boot_word, options));
  if (const pqc_status status = opened->Check(); status != PQC_OK) return status;
  *session = std::move(opened);
  return PQC_OK;
}

void LocalSession::Close() {
  if (!closed_.exchange(true)) host_->End();  // sequences that outlive the client keep this object
}

pqc_status LocalSession::Check() const {
  const bool same = page().boot_word.load(std::memory_order_acquire) == boot_word_;
  if (!closed_ && same && !host_->Ended(0)) return PQC_OK;
  if (closed_) return Fail(PQC_FAILED_PRECONDITION, "client: it is closed");
  return Fail(PQC_UNAVAILABLE, "the session is lost, and its sequences with it: %s",
              same ? "the broker's connection ended" : "the sidecar's worker is another one");
}

pqc_status LocalSession::Host(LocalHost** host) const {
  *host = host_.get();
  return closed_ ? Fail(PQC_FAILED_PRECONDITION, "client: it is closed") : PQC_OK;
}

pqc_status LocalSession::Pool(uint64_t cache_id, std::shared_ptr<Mapping>* pool) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Mapping>& mapped = pools_[cache_id];
  if (!mapped) {
    LocalHost* host = nullptr;
    if (const pqc_status status = Host(&host); status != PQC_OK) return status;
    if (const pqc_status status = host->OpenPool(cache_id, &mapped); status != PQC_OK) {
      return status;
    }
    mapped_bytes_ += mapped->size_bytes();
  }
  *pool = mapped;
  return PQC_OK;
}

pqc_status LocalSession::Words(uint32_t index, const LeaseWords** words) const {
  if (index >= page().word_count) {
    return Fail(PQC_INTERNAL, "lease: word_index is %u; there are %u", index, page().word_count);
  }
  *words =
      reinterpret_cast<const LeaseWords*>(control_->data() + page().words_offset_bytes) + index;
  return PQC_OK;
}

void LocalSession::Wait(uint32_t seen, LocalClock::time_point deadline) const {
  const auto left = std::min<LocalClock::duration>(deadline - LocalClock::now(), kLongestSleep);
  if (left <= LocalClock::duration::zero()) return;
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  const timespec timeout{.tv_sec = static_cast<time_t>(nanoseconds / 1000000000),
                         .tv_nsec = static_cast<long>(nanoseconds % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&page().wake_word), FUTEX_WAIT, seen,
          &timeout, nullptr, 0);
}

}  // namespace pqcached::client
