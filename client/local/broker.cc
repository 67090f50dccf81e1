#include "client/local/broker.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "client/base/deadline.h"
#include "client/base/error.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using Clock = std::chrono::steady_clock;
using kvstore::BrokerCall;
using kvstore::BrokerReply;
using kvstore::BrokerRequest;

// Longest sleep between checks: a worker may end without an end of the connection.
constexpr int kLongestSleepMs = 50;

int LeftMs(Clock::time_point deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

// Limits of a wait for the broker: a deadline, and a flag that ends it earlier.
struct WaitLimit {
  Clock::time_point deadline;
  const std::atomic<bool>& abandoned;
};

// Waits until the socket may be read or written without blocking.
pqc_status WaitFor(int socket, short events, const WaitLimit& patience) {
  for (;;) {
    pollfd entry{.fd = socket, .events = events, .revents = 0};
    const int left_ms = LeftMs(patience.deadline);
    const int ready = poll(&entry, 1, std::min(left_ms, kLongestSleepMs));
    if (ready > 0) return PQC_OK;
    if (ready < 0 && errno != EINTR) {
      return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "broker: %s", std::strerror(errno)));
    }
    if (patience.abandoned)
      return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "broker: its worker has ended"));
    if (left_ms == 0)
      return Fail(PQC_DEADLINE_EXCEEDED, "", "broker: no answer within the deadline");
  }
}

pqc_status Connect(const std::string& path, Clock::time_point deadline, int* connected) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "",
                                       "broker: %s is too long for a socket path", path.c_str()));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int socket_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_fd < 0)
    return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "broker: %s", std::strerror(errno)));
  int error = 0;
  while (connect(socket_fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    error = errno;
    if (error == EINTR) continue;
    // The accept queue of the unix socket is full, which poll cannot wait for.
    if (error != EAGAIN || LeftMs(deadline) == 0) {
      close(socket_fd);
      return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "broker: %s: %s", path.c_str(),
                                         std::strerror(error)));
    }
    poll(nullptr, 0, 1);
  }
  *connected = socket_fd;
  return PQC_OK;
}

// *sent is the number of bytes sent.
pqc_status SendAll(int socket, const BrokerRequest& request, const WaitLimit& patience,
                   size_t* sent) {
  const auto* bytes = reinterpret_cast<const char*>(&request);
  while (*sent < sizeof(request)) {
    RETURN_IF_ERROR(WaitFor(socket, POLLOUT, patience));
    const ssize_t count = send(socket, bytes + *sent, sizeof(request) - *sent, MSG_NOSIGNAL);
    if (count > 0) {
      *sent += static_cast<size_t>(count);
    } else if (errno != EINTR && errno != EAGAIN) {
      return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "broker: %s", std::strerror(errno)));
    }
  }
  return PQC_OK;
}

// Keeps the first descriptor of a message and closes all others.
void TakeDescriptors(msghdr* message, int* descriptor) {
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int received;
      std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof(received));
      if (*descriptor < 0) {
        *descriptor = received;
      } else {
        close(received);
      }
    }
  }
}

// Receives the rest of an answer, of which *received bytes are already here.
pqc_status ReceiveRest(int socket, const WaitLimit& patience, BrokerReply* reply, size_t* received,
                       int* descriptor) {
  auto* bytes = reinterpret_cast<char*>(reply);
  for (;;) {
    // The head says whether the rest is what this client knows.
    const bool other =
        *received >= kvstore::kBrokerReplyHeadBytes && reply->version != kvstore::kBrokerVersion;
    if (other || *received == sizeof(*reply)) return PQC_OK;
    RETURN_IF_ERROR(WaitFor(socket, POLLIN, patience));
    iovec part{.iov_base = bytes + *received, .iov_len = sizeof(*reply) - *received};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t count = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (count > 0) {
      TakeDescriptors(&message, descriptor);
      *received += static_cast<size_t>(count);
    } else if (count == 0) {
      return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "broker: it closed the connection"));
    } else if (errno != EINTR && errno != EAGAIN) {
      return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "broker: %s", std::strerror(errno)));
    }
  }
}

// Returns true when both requests ask for the same memory.
bool IsRepeat(const BrokerRequest& before, const BrokerRequest& request) {
  return before.call == request.call && before.cache_id == request.cache_id &&
         before.slot_bytes == request.slot_bytes && before.slot_count == request.slot_count;
}

template <size_t kSize>
bool Terminated(const char (&text)[kSize]) {
  return std::memchr(text, '\0', kSize) != nullptr;
}

pqc_status CheckReply(const BrokerReply& reply, BrokerCall call) {
  if (reply.magic != BrokerReply::kMagic || reply.version != kvstore::kBrokerVersion) {
    return Fail(PQC_FAILED_PRECONDITION, "", "broker: its protocol version is %u, this client's %u",
                reply.version, kvstore::kBrokerVersion);
  }
  if (reply.call != call || !Terminated(reply.message) || !Terminated(reply.field) ||
      !Terminated(reply.session_token) || !Terminated(reply.boot_id) || !Terminated(reply.tenant)) {
    return Fail(PQC_INTERNAL, "", "broker: the answer does not match the request");
  }
  if (reply.status == 0) return PQC_OK;
  RefusalBuffer refusal;
  SetRefusal(&refusal, reply.field, reply.message);
  refusal.retry_ms = reply.retry_ms;
  // The broker refuses to resume a session whose client is still connected, until it notices the
  // end of the former connection.
  if (call == BrokerCall::kResume && reply.status == PQC_FAILED_PRECONDITION) {
    refusal.retry_ms = kRetryMemory;
    return PrefixText("broker", Fail(PQC_UNAVAILABLE, refusal));
  }
  const bool known = reply.status <= PQC_UNAUTHENTICATED;
  return PrefixText("broker",
                    Fail(known ? static_cast<pqc_status>(reply.status) : PQC_UNKNOWN, refusal));
}

template <size_t kSize>
pqc_status CopyText(const std::string& text, const char* field, char (&to)[kSize]) {
  if (text.size() >= kSize) {
    return Fail(PQC_INVALID_ARGUMENT, field, "must be at most %zu bytes", kSize - 1);
  }
  std::memcpy(to, text.c_str(), text.size() + 1);
  return PQC_OK;
}

pqc_status FillRequest(const BrokerOptions& options, BrokerRequest* request) {
  if (!options.resume_token.empty()) {
    request->call = BrokerCall::kResume;
    return CopyText(options.resume_token, "resume_token", request->resume_token);
  }
  request->call = BrokerCall::kHello;
  RETURN_IF_ERROR(CopyText(options.tenant, "options.tenant", request->tenant));
  return CopyText(options.client_name, "options.client_name", request->client_name);
}

}  // namespace

pqc_status Broker::Open(const BrokerOptions& options, std::unique_ptr<Broker>* broker,
                        std::shared_ptr<Mapping>* control) {
  BrokerRequest request;
  RETURN_IF_ERROR(FillRequest(options, &request));
  int connected = -1;
  const auto deadline = Clock::now() + std::chrono::milliseconds(options.open_timeout_ms != 0
                                                                     ? options.open_timeout_ms
                                                                     : options.timeout_ms);
  RETURN_IF_ERROR(Connect(options.socket_path + kvstore::kBrokerSuffix, deadline, &connected));
  std::unique_ptr<Broker> opened(new Broker(connected, options.timeout_ms));
  RETURN_IF_ERROR(opened->Exchange(request, deadline, MappingAccess::kRead, "control memory",
                                   &opened->hello_, control));
  *broker = std::move(opened);
  return PQC_OK;
}

Broker::~Broker() {
  close(socket_);
  if (incoming_.descriptor >= 0) close(incoming_.descriptor);
}

pqc_status Broker::ReceivePending(Clock::time_point deadline, BrokerReply* reply, int* descriptor) {
  const WaitLimit patience{deadline, abandoned_};
  const pqc_status status =
      ReceiveRest(socket_, patience, &incoming_.reply, &incoming_.received, &incoming_.descriptor);
  if (status == PQC_DEADLINE_EXCEEDED) return status;
  broken_ = status != PQC_OK;
  *reply = incoming_.reply;
  *descriptor = incoming_.descriptor;
  incoming_ = {};
  pending_request_.reset();
  return status;
}

// After a stall, the broker answers the requests that it received before. So a repeat of a request
// takes the late answer to it, and a different request first receives and discards that answer.
pqc_status Broker::RequestAndReceive(const BrokerRequest& request, Clock::time_point deadline,
                                     BrokerReply* reply, int* descriptor) {
  if (!mutex_.TryLockUntil(deadline)) {
    return Fail(PQC_DEADLINE_EXCEEDED, "", "broker: busy with other requests");
  }
  const base::HeldLock lock(&mutex_);
  if (broken_)
    return SetRetry(kRetryMemory,
                    Fail(PQC_UNAVAILABLE, "", "broker: an earlier request was sent only in part"));
  if (pending_request_ && !IsRepeat(*pending_request_, request)) {
    RETURN_IF_ERROR(ReceivePending(deadline, reply, descriptor));
    if (*descriptor >= 0) close(std::exchange(*descriptor, -1));
  }
  if (!pending_request_) {
    size_t sent = 0;
    const pqc_status status = SendAll(socket_, request, {deadline, abandoned_}, &sent);
    broken_ = status != PQC_OK && sent > 0;
    if (status != PQC_OK) return status;
    pending_request_ = request;
  }
  return ReceivePending(deadline, reply, descriptor);
}

pqc_status Broker::Ask(const BrokerRequest& request, Clock::time_point deadline, BrokerReply* reply,
                       int* descriptor) {
  pqc_status status = RequestAndReceive(request, deadline, reply, descriptor);
  if (status == PQC_OK) status = CheckReply(*reply, request.call);
  if (status != PQC_OK && *descriptor >= 0) close(std::exchange(*descriptor, -1));
  return status;
}

pqc_status Broker::Exchange(const BrokerRequest& request, Clock::time_point deadline,
                            MappingAccess access, const char* name, BrokerReply* reply,
                            std::shared_ptr<Mapping>* memory) {
  int descriptor = -1;
  RETURN_IF_ERROR(Ask(request, deadline, reply, &descriptor));
  return Mapping::Map(descriptor, reply->size_bytes, access, name, memory);
}

pqc_status Broker::OpenPool(uint64_t cache_id, std::shared_ptr<Mapping>* pool) {
  BrokerRequest request;
  request.call = BrokerCall::kOpenPool;
  request.cache_id = cache_id;
  BrokerReply reply;
  return Exchange(request, CallDeadline(timeout_ms_), MappingAccess::kRead, "pool", &reply, pool);
}

pqc_status Broker::HoldPool(uint64_t cache_id) {
  BrokerRequest request;
  request.call = BrokerCall::kHoldPool;
  request.cache_id = cache_id;
  BrokerReply reply;
  int descriptor = -1;
  const pqc_status status = Ask(request, CallDeadline(timeout_ms_), &reply, &descriptor);
  if (descriptor >= 0) close(descriptor);
  return status;
}

pqc_status Broker::OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                               std::shared_ptr<Mapping>* ring) {
  BrokerRequest request;
  request.call = BrokerCall::kOpenStaging;
  request.slot_bytes = slot_bytes;
  request.slot_count = slot_count;
  BrokerReply reply;
  std::shared_ptr<Mapping> mapped;
  RETURN_IF_ERROR(Exchange(request, CallDeadline(timeout_ms_), MappingAccess::kReadWrite,
                           "staging ring", &reply, &mapped));
  if (mapped->size_bytes() / slot_count < slot_bytes) {
    return Fail(PQC_INTERNAL, "",
                "broker: the staging ring has %zu bytes for %u slots of %llu bytes",
                mapped->size_bytes(), slot_count, static_cast<unsigned long long>(slot_bytes));
  }
  *ring = std::move(mapped);
  return PQC_OK;
}

void Broker::End() { shutdown(socket_, SHUT_RDWR); }

bool Broker::WaitEnded(uint32_t wait_ms) const {
  // POLLIN is left out: an answer to another thread's request is no end.
  pollfd entry{.fd = socket_, .events = POLLRDHUP, .revents = 0};
  return poll(&entry, 1, static_cast<int>(std::min<uint32_t>(wait_ms, 1 << 30))) > 0;
}

bool Broker::HoldsConnection() const {
  pollfd entry{.fd = socket_, .events = POLLRDHUP, .revents = 0};
  // The sidecar ends one direction when a worker ends, and both when it closes the connection.
  return poll(&entry, 1, 0) == 0 || (entry.revents & (POLLHUP | POLLERR | POLLNVAL)) == 0;
}

}  // namespace pqcached::client
