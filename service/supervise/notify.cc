#include "service/supervise/notify.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "kvstore/memory/memfd.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

using kvstore::FileDescriptor;

constexpr int kMaxListenDescriptors = 1 << 20;

absl::string_view Get(const Environment& environment, const char* name) {
  const char* value = environment(name);
  return value == nullptr ? absl::string_view() : absl::string_view(value);
}

// Returns whether the variable `name` holds this process's pid. Such variables address one process,
// but its children inherit them.
bool IsForThisProcess(const Environment& environment, const char* name, bool when_missing) {
  const absl::string_view text = Get(environment, name);
  int64_t pid = 0;
  return text.empty() ? when_missing : absl::SimpleAtoi(text, &pid) && pid == getpid();
}

bool AddressOf(absl::string_view socket, sockaddr_un& address, socklen_t& size) {
  if (socket.size() < 2 || socket.size() >= sizeof(address.sun_path) ||
      (socket[0] != '/' && socket[0] != '@')) {
    return false;
  }
  address = {};
  address.sun_family = AF_UNIX;
  socket.copy(address.sun_path, socket.size());
  if (socket[0] == '@') address.sun_path[0] = '\0';
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket.size());
  return true;
}

absl::StatusOr<KeptDescriptors> Inherited(const Environment& environment) {
  KeptDescriptors kept;
  const absl::string_view text = Get(environment, "LISTEN_FDS");
  if (text.empty() || !IsForThisProcess(environment, "LISTEN_PID", false)) return kept;
  int count = 0;
  if (!absl::SimpleAtoi(text, &count) || count < 0 || count > kMaxListenDescriptors) {
    return InvalidArgument("LISTEN_FDS", absl::StrCat("'", text, "' is not a count"));
  }
  const std::vector<std::string> names = absl::StrSplit(Get(environment, "LISTEN_FDNAMES"), ':');
  for (int i = 0; i < count; ++i) {
    FileDescriptor descriptor(kFirstListenDescriptor + i);
    const size_t index = static_cast<size_t>(i);
    if (fcntl(descriptor.get(), F_SETFD, FD_CLOEXEC) != 0) {
      descriptor.Release();  // no such descriptor is open
    } else if (index < names.size() && kvstore::IsKeeperName(names[index])) {
      kept.try_emplace(names[index], std::move(descriptor));
    }
  }
  return kept;
}

absl::Status SendError(int error) {
  const std::string message = absl::StrCat("notify: ", std::strerror(error));
  if (error == ETOOMANYREFS || error == EMFILE || error == ENFILE) {
    return ShortOf(Shortage::kDescriptors, "", message, kRetryMemory);
  }
  return Unavailable("", message, kNoRetry);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Notifier>> Notifier::FromEnvironment(const Environment& environment,
                                                                    absl::Duration timeout) {
  Options options;
  options.timeout = timeout;
  options.socket = std::string(Get(environment, "NOTIFY_SOCKET"));
  options.confirms = Get(environment, kConfirmsVariable) == "1";
  if (options.socket.empty()) return std::unique_ptr<Notifier>();
  sockaddr_un address;
  socklen_t size = 0;
  if (!AddressOf(options.socket, address, size)) {
    return InvalidArgument("NOTIFY_SOCKET",
                           absl::StrCat("'", options.socket, "' is not the path of a unix socket"));
  }
  ASSIGN_OR_RETURN(KeptDescriptors kept, Inherited(environment));
  options.kept = std::move(kept);
  uint64_t limit = 0;
  if (absl::SimpleAtoi(Get(environment, "FDSTORE"), &limit)) options.max_kept = limit;
  return std::make_unique<Notifier>(std::move(options));
}

Notifier::Notifier(Options options)
    : options_{options.socket,  {}, options.max_kept, options.max_name_bytes, options.timeout,
               options.confirms},
      socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)),
      kept_(std::move(options.kept)) {
  const timeval timeout = absl::ToTimeval(options_.timeout);
  setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  for (const auto& [name, descriptor] : kept_) name_bytes_ += name.size() + 1;
}

absl::Status Notifier::Send(absl::string_view message) const { return SendWith(message, -1); }

absl::Status Notifier::SendWith(absl::string_view message, int descriptor) const {
  sockaddr_un address;
  msghdr header = {};
  if (!AddressOf(options_.socket, address, header.msg_namelen)) return SendError(EINVAL);
  iovec part = {const_cast<char*>(message.data()), message.size()};
  header.msg_name = &address;
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(socket_.get(), &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? SendError(errno) : absl::OkStatus();
}

absl::Status Notifier::Barrier(absl::string_view name) const {
  int ends[2] = {};
  // A confirmation is sent to a socket, because a write to a pipe without a reader is a SIGPIPE.
  const int made = options_.confirms ? socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)
                                     : pipe2(ends, O_CLOEXEC);
  if (made != 0) return SendError(errno);
  const FileDescriptor reading(ends[0]);
  {
    const FileDescriptor writing(ends[1]);
    // Other receivers want the field alone.
    const std::string message =
        options_.confirms ? absl::StrCat("BARRIER=1\nFDNAME=", name) : "BARRIER=1";
    RETURN_IF_ERROR(SendWith(message, writing.get()));
  }
  // The receiver closes its copy of the write end when it processes the message.
  pollfd end = {.fd = reading.get(), .events = 0, .revents = 0};
  const kvstore::SteadyTime until = kvstore::SteadyTime::Now() + options_.timeout;
  int ready = 0;
  do {
    const int64_t left = absl::ToInt64Milliseconds(until - kvstore::SteadyTime::Now());
    ready = poll(&end, 1, static_cast<int>(std::max<int64_t>(left, 0)));
  } while (ready < 0 && errno == EINTR);
  char confirmed = 0;
  const bool holds = ready > 0 && read(reading.get(), &confirmed, 1) == 1;
  if (ready > 0 && options_.confirms && !holds) {
    return ShortOf(Shortage::kDescriptors, "notify",
                   absl::StrCat("the supervisor has not kept '", name, "'"), kRetryMemory);
  }
  if (ready > 0) return absl::OkStatus();
  return Unavailable("notify",
                     absl::StrCat("no answer within ", absl::FormatDuration(options_.timeout)),
                     kNoRetry);
}

absl::Status Notifier::Keep(std::string_view name, int descriptor) {
  return Store(name, descriptor, "", /*wait=*/true);
}

absl::Status Notifier::KeepMapped(std::string_view name, int descriptor) {
  return Store(name, descriptor, absl::StrCat(kMapField, "=1\n"), /*wait=*/true);
}

void Notifier::Inherit(KeptMappings mappings) {
  const kvstore::MutexLock lock(&mutex_);
  keeps_mappings_ = true;
  mappings_ = std::move(mappings);
}

kvstore::Mapping Notifier::TakeMapping(std::string_view name) {
  const kvstore::MutexLock lock(&mutex_);
  auto node = mappings_.extract(std::string(name));
  return node.empty() ? kvstore::Mapping() : std::move(node.mapped());
}

absl::Status Notifier::Forward(std::string_view name, int descriptor) {
  return Store(name, descriptor, "", /*wait=*/false);
}

absl::Status Notifier::Store(std::string_view name, int descriptor, absl::string_view fields,
                             bool wait) {
  if (!kvstore::IsKeeperName(name)) {
    return InvalidArgument("name", "must be 1..200 bytes of [A-Za-z0-9._-]");
  }
  const std::string key(name);
  ASSIGN_OR_RETURN(FileDescriptor copy, kvstore::Duplicate(descriptor));
  {
    const kvstore::MutexLock lock(&mutex_);
    if (kept_.count(key) != 0) {
      return AlreadyExists("name", absl::StrCat("'", key, "' is already in use"));
    }
    // The receiver would silently drop a descriptor beyond its limits.
    if (kept_.size() >= options_.max_kept ||
        name_bytes_ + key.size() + 1 > options_.max_name_bytes) {
      return ResourceExhausted(
          "descriptors",
          absl::StrCat(kept_.size(), " are kept, of at most ", options_.max_kept,
                       ", with names of ", options_.max_name_bytes, " bytes"),
          kRetryMemory);
    }
    kept_.emplace(key, std::move(copy));
    name_bytes_ += key.size() + 1;
  }
  absl::Status status =
      SendWith(absl::StrCat("FDSTORE=1\n", fields, "FDNAME=", key, "\nFDPOLL=0"), descriptor);
  if (status.ok() && wait) status = Barrier(key);
  if (!status.ok()) Release(key).IgnoreError();
  return status;
}

absl::Status Notifier::Release(std::string_view name) {
  FileDescriptor held;
  const std::string key(name);
  {
    const kvstore::MutexLock lock(&mutex_);
    auto node = kept_.extract(key);
    if (node.empty()) return absl::OkStatus();
    held = std::move(node.mapped());
    name_bytes_ -= key.size() + 1;
    mappings_.erase(key);
  }
  return Send(absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", key));
}

FileDescriptor Notifier::Take(std::string_view name) const {
  const kvstore::MutexLock lock(&mutex_);
  const auto found = kept_.find(name);
  if (found == kept_.end()) return {};
  absl::StatusOr<FileDescriptor> copy = kvstore::Duplicate(found->second.get());
  return copy.ok() ? *std::move(copy) : FileDescriptor();
}

std::vector<std::string> Notifier::Names() const {
  const kvstore::MutexLock lock(&mutex_);
  std::vector<std::string> names;
  names.reserve(kept_.size());
  for (const auto& [name, descriptor] : kept_) names.push_back(name);
  return names;
}

KeptDescriptors Notifier::DuplicateAll() {
  const kvstore::MutexLock lock(&mutex_);
  KeptDescriptors copies;
  for (const auto& [name, descriptor] : kept_) {
    absl::StatusOr<FileDescriptor> copy = kvstore::Duplicate(descriptor.get());
    if (copy.ok()) copies.emplace(name, *std::move(copy));
  }
  return copies;
}

absl::Duration WatchdogTimeout(const Environment& environment) {
  int64_t microseconds = 0;
  if (!absl::SimpleAtoi(Get(environment, "WATCHDOG_USEC"), &microseconds) || microseconds <= 0 ||
      !IsForThisProcess(environment, "WATCHDOG_PID", true)) {
    return absl::ZeroDuration();
  }
  return absl::Microseconds(microseconds);
}

}  // namespace pqcached::service
