#include "service/session/detached_sessions.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/supervise/kept_sessions.h"

namespace pqcached::service {
namespace {

using kvstore::FileDescriptor;

void Wake(int eventfd) {
  const uint64_t one = 1;
  if (write(eventfd, &one, sizeof(one)) < 0) return;  // counter is full: the thread wakes anyway
}

}  // namespace

DetachedSessions::DetachedSessions(Parts parts)
    : parts_(std::move(parts)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

DetachedSessions::~DetachedSessions() { Stop(); }

void DetachedSessions::Start() {
  ForgetMovedPools(parts_.keepers.connections);
  EndKeptSessions(parts_.keepers.connections);
  if (parts_.keepers.memory != parts_.keepers.connections) EndKeptSessions(parts_.keepers.memory);
  Restore();
  bool needed = !connections_.empty();
  {
    const kvstore::MutexLock lock(&mutex_);
    needed = needed || !waiting_.empty();
  }
  EndQuarantines();
  if (!connections_.empty() && parts_.config.quarantine_timeout > absl::ZeroDuration()) {
    move_at_ = Clock::now() + absl::ToChronoNanoseconds(parts_.config.quarantine_timeout);
  }
  if (needed) thread_ = std::thread([this] { Run(); });
}

void DetachedSessions::Stop() {
  if (!thread_.joinable()) return;
  {
    const kvstore::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  Wake(wake_.get());
  thread_.join();
}

// Clients of earlier workers map the old memory of the pools that were moved.
void DetachedSessions::ForgetMovedPools(kvstore::DescriptorKeeper* keeper) const {
  const std::vector<uint64_t> moved = parts_.store.Recovery().moved_caches;
  if (keeper == nullptr || moved.empty()) return;
  for (const std::string& name : keeper->Names()) {
    if (!IsControlName(name)) continue;
    const FileDescriptor control = keeper->Take(name);
    for (const uint64_t cache_id : moved) kvstore::ForgetOpenedPool(control.get(), cache_id);
  }
}

// Marks the kept sessions of earlier workers as ended. The connections are held until the clients
// close them. Control memory lists the pools that its client has received over its connection, so
// it is kept as long; control memory without a connection is released.
void DetachedSessions::EndKeptSessions(kvstore::DescriptorKeeper* keeper) {
  if (keeper == nullptr) return;
  std::map<std::string, kvstore::OpenedPools> pools;  // by the name of the connection
  for (const std::string& name : keeper->Names()) {
    const FileDescriptor descriptor = IsControlName(name) ? keeper->Take(name) : FileDescriptor();
    if (!descriptor.valid()) continue;
    EndKeptSession(name, descriptor.get());
    kvstore::MarkSuccessor(descriptor.get());  // this worker does not serve yet
    pools[SocketNameOfControl(name)] = kvstore::OpenedPoolsOf(descriptor.get());
  }
  for (const std::string& name : keeper->Names()) {
    FileDescriptor descriptor = IsSocketName(name) ? keeper->Take(name) : FileDescriptor();
    uint64_t number = 0;
    if (!descriptor.valid() || !SessionNumberOf(name, number)) continue;
    EndKeptSession(name, descriptor.get());
    connections_[name] = {std::move(descriptor), number, pools[name]};
  }
  for (const std::string& name : keeper->Names()) {
    const bool unused = IsControlName(name) ? connections_.count(SocketNameOfControl(name)) == 0
                                            : IsSocketName(name) && connections_.count(name) == 0;
    if (unused) keeper->Release(name).IgnoreError();
  }
}

// Frees the memory of earlier workers that no client can map any more.
void DetachedSessions::EndQuarantines() {
  const uint32_t caches = parts_.store.EndQuarantineExcept([this](uint64_t cache_id) {
    return std::any_of(connections_.begin(), connections_.end(),
                       [&](const auto& each) { return each.second.pools.MayInclude(cache_id); });
  });
  if (caches == 0) return;
  parts_.log.Info("quarantine_ended",
                  {{"caches", caches}, {"connections_left", connections_.size()}});
}

absl::StatusOr<uint32_t> DetachedSessions::MovePools(uint64_t cache_id) {
  uint32_t pools = 0;
  bool found = cache_id == 0;
  for (const kvstore::CacheInfo& cache : parts_.store.ListCaches(kvstore::kAllTenants)) {
    if (cache_id != 0 && cache.cache_id != cache_id) continue;
    found = true;
    if (cache.quarantined_bytes == 0) continue;
    if (parts_.request_restart == nullptr) {
      return FailedPrecondition("cache_id", "without a supervisor no worker can move its pool");
    }
    RETURN_IF_ERROR(parts_.store.PlanPoolMove(cache.cache_id));
    ++pools;
  }
  if (!found) return NotFound("cache_id", absl::StrCat("no cache ", cache_id));
  if (pools == 0) return pools;
  parts_.log.Info("moving_pools", {{"count", pools}});
  RETURN_IF_ERROR(parts_.request_restart());
  return pools;
}

// Moves the memory that is still in quarantine after quarantine_timeout. What is refused is tried
// again after another one.
void DetachedSessions::MoveHeldPools() {
  if (Clock::now() < move_at_) return;
  move_at_ = Clock::now() + absl::ToChronoNanoseconds(parts_.config.quarantine_timeout);
  const absl::StatusOr<uint32_t> moved = MovePools(0);
  if (!moved.ok()) parts_.log.Warning("move_refused", {{"message", moved.status().message()}});
}

void DetachedSessions::Restore() {
  std::set<uint64_t> connected;
  for (const auto& [name, connection] : connections_) connected.insert(connection.session_number);
  std::set<std::string> known;
  std::map<uint64_t, std::string> tenants;  // by session number
  const std::vector<kvstore::KeptSession> kept = parts_.store.KeptSessions();
  for (const kvstore::KeptSession& each : kept) {
    const Session session = parts_.sessions.Restore(each);
    known.insert(session.id);
    tenants[session.number] = session.tenant;
    const kvstore::MutexLock lock(&mutex_);
    waiting_[each.token] = {session, connected.count(session.number) != 0 ? Clock::time_point::max()
                                                                          : ResumeDeadline()};
  }
  AdoptRings(tenants);
  DropOrphans(known);
  if (!kept.empty()) {
    parts_.log.Info("sessions_detached",
                    {{"count", kept.size()}, {"connections", connections_.size()}});
  }
}

// Takes the staging rings that earlier workers have kept. Those whose connection has ended are
// freed at once.
void DetachedSessions::AdoptRings(const std::map<uint64_t, std::string>& tenants) {
  kvstore::DescriptorKeeper* keeper = parts_.keepers.connections;
  if (keeper == nullptr) return;
  for (const std::string& name : keeper->Names()) {
    if (!IsStagingName(name)) continue;
    uint64_t number = 0;
    const auto tenant = SessionNumberOf(name, number) ? tenants.find(number) : tenants.end();
    auto ring = parts_.store.AdoptStaging(tenant == tenants.end() ? "" : tenant->second,
                                          keeper->Take(name));
    const std::string connection = SocketNameOfStaging(name);
    if (connections_.count(connection) != 0) {
      rings_[connection] = std::move(ring);
    } else {
      keeper->Release(name).IgnoreError();
    }
  }
}

// Drops the sequences whose session an earlier worker ended without living to drop them.
void DetachedSessions::DropOrphans(const std::set<std::string>& known) {
  std::set<std::string> orphaned;
  for (const kvstore::CacheInfo& cache : parts_.store.ListCaches("")) {
    const auto sequences = parts_.store.ListSequences(cache.tenant, cache.cache_id);
    if (!sequences.ok()) continue;
    for (const kvstore::SequenceInfo& sequence : *sequences) {
      if (sequence.is_cached_prefix) continue;  // a cached prefix: belongs to no session by design
      if (known.count(sequence.session) == 0) orphaned.insert(sequence.session);
    }
  }
  for (const std::string& session : orphaned) {
    const uint32_t dropped = parts_.store.DropSession(session);
    parts_.log.Info("orphans_dropped", {{"session", session}, {"sequences_dropped", dropped}});
  }
}

DetachedSessions::Clock::time_point DetachedSessions::ResumeDeadline() const {
  return Clock::now() + absl::ToChronoNanoseconds(parts_.config.resume_timeout);
}

void DetachedSessions::AwaitResume(const OpenedSession& session) {
  {
    const kvstore::MutexLock lock(&mutex_);
    waiting_[session.token] = {session.session, ResumeDeadline()};
  }
  Wake(wake_.get());
}

void DetachedSessions::EndSessionsIf(const SessionFilter& filter) {
  {
    const kvstore::MutexLock lock(&mutex_);
    for (auto& [token, waiting] : waiting_) {
      if (filter(waiting.session)) waiting.until = Clock::now();
    }
  }
  Wake(wake_.get());
}

void DetachedSessions::Run() {
  while (true) {
    {
      const kvstore::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    Poll();
    DropOverdue();
    if (!connections_.empty()) MoveHeldPools();
  }
}

void DetachedSessions::Poll() {
  Clock::time_point until = connections_.empty() ? Clock::time_point::max() : move_at_;
  {
    const kvstore::MutexLock lock(&mutex_);
    for (const auto& [token, waiting] : waiting_) until = std::min(until, waiting.until);
  }
  int milliseconds = -1;
  if (until != Clock::time_point::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    milliseconds = static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
  }
  std::vector<pollfd> sockets = {{wake_.get(), POLLIN, 0}};
  std::vector<std::string> names = {""};
  for (const auto& [name, connection] : connections_) {
    sockets.push_back({connection.socket.get(), POLLIN, 0});
    names.push_back(name);
  }
  if (poll(sockets.data(), sockets.size(), milliseconds) <= 0) return;
  uint64_t ignored = 0;
  if (read(wake_.get(), &ignored, sizeof(ignored)) < 0 && errno != EAGAIN) return;
  for (size_t i = 1; i < sockets.size(); ++i) {
    if (sockets[i].revents != 0 && HasEnded(connections_[names[i]])) OnEnded(names[i]);
  }
}

// Returns whether the client has closed the connection. Discards what it reads: requests on this
// connection were meant for a worker that has ended.
bool DetachedSessions::HasEnded(const Connection& connection) {
  std::array<char, 4096> discarded_bytes;
  const ssize_t got =
      recv(connection.socket.get(), discarded_bytes.data(), discarded_bytes.size(), MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

void DetachedSessions::OnEnded(const std::string& name) {
  const uint64_t number = connections_[name].session_number;
  connections_.erase(name);
  parts_.keepers.connections->Release(name).IgnoreError();
  parts_.keepers.connections->Release(ControlNameOfSocket(name)).IgnoreError();
  if (rings_.erase(name) != 0) {
    parts_.keepers.connections->Release(StagingNameOfSocket(name)).IgnoreError();
  }
  const bool others = std::any_of(connections_.begin(), connections_.end(), [&](const auto& each) {
    return each.second.session_number == number;
  });
  if (!others) {
    const kvstore::MutexLock lock(&mutex_);
    for (auto& [token, waiting] : waiting_) {
      if (waiting.session.number == number) waiting.until = ResumeDeadline();
    }
  }
  EndQuarantines();
}

void DetachedSessions::DropOverdue() {
  std::vector<OpenedSession> overdue;
  {
    const kvstore::MutexLock lock(&mutex_);
    const Clock::time_point now = Clock::now();
    for (auto each = waiting_.begin(); each != waiting_.end();) {
      if (each->second.until > now) {
        ++each;
        continue;
      }
      overdue.push_back({each->first, each->second.session});
      each = waiting_.erase(each);
    }
  }
  for (const OpenedSession& session : overdue) {
    if (!parts_.sessions.CloseDetached(session.token)) continue;  // its client has resumed it
    const auto drop = [&store = parts_.store, &log = parts_.log, session = session.session] {
      const uint32_t dropped = store.DropSession(session.id);
      log.Info(
          "session_not_resumed",
          {{"session", session.id}, {"tenant", session.tenant}, {"sequences_dropped", dropped}});
    };
    parts_.cleanups.Run({.tenant = session.session.tenant, .lane = Lane::kBrief, .run = drop});
  }
}

}  // namespace pqcached::service
