#include "client/base/events.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>

#include "client/base/error.h"

namespace pqcached::client {

pqc_status Events::Open(int* fd) {
  const base::MutexLock lock(&mutex_);
  if (closed_) return Fail(PQC_FAILED_PRECONDITION, "client", "it is closed");
  if (fd_ < 0) {
    fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd_ < 0) return Fail(PQC_RESOURCE_EXHAUSTED, "fd", "%s", std::strerror(errno));
    SetReadableLocked(!pending_.empty());
  }
  wanted_.store(true, std::memory_order_release);
  *fd = fd_;
  return PQC_OK;
}

void Events::SetReadableLocked(bool readable) {
  if (fd_ < 0) return;
  // Neither call fails: the counter is 0 or 1, and the descriptor does not block.
  eventfd_t count = 0;
  static_cast<void>(readable ? eventfd_write(fd_, 1) : eventfd_read(fd_, &count));
}

void Events::Add(Entry& entry) {
  const base::MutexLock lock(&mutex_);
  if (closed_ || entry.node_.empty()) return;
  pending_.splice(pending_.end(), entry.node_);
  if (pending_.size() == 1) SetReadableLocked(true);
}

void Events::TakeBackLocked(Entry& entry) {
  entry.node_.splice(entry.node_.begin(), pending_, entry.place_);
  if (pending_.empty()) SetReadableLocked(false);
}

void Events::Remove(Entry& entry) {
  const base::MutexLock lock(&mutex_);
  if (entry.node_.empty()) TakeBackLocked(entry);
}

bool Events::Take(pqc_event* event) {
  const base::MutexLock lock(&mutex_);
  if (pending_.empty()) return false;
  Entry& first = *pending_.front();
  *event = first.event_;
  TakeBackLocked(first);
  return true;
}

void Events::Close() {
  const base::MutexLock lock(&mutex_);
  closed_ = true;
  while (!pending_.empty()) TakeBackLocked(*pending_.front());
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

}  // namespace pqcached::client
