#include "tests/rdma/ends.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/crc32c.h"
#include "service/base/refusal.h"

namespace pqcached::service::rdma {
namespace {

constexpr const char* kEndOption = "--rdma-end";

struct FrameHeader {
  FrameKind kind = FrameKind::kOffer;
  uint32_t bytes = 0;
};

struct OfferFrame {
  Token token = {};
  uint32_t connection_count = 0;
  uint32_t rail_count = 0;
  std::array<std::array<char, 64>, kMaxRails> addresses = {};
  std::array<uint16_t, kMaxRails> ports = {};
};

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
  std::_Exit(1);
}

// Asio makes the descriptor one that does not block, so these wait.
bool ReadAll(int control, void* content, size_t bytes) {
  auto* to = static_cast<std::byte*>(content);
  while (bytes > 0) {
    const ssize_t count = recv(control, to, bytes, 0);
    if (count == 0 || (count < 0 && errno != EAGAIN)) return false;
    if (count < 0) {
      pollfd readable = {.fd = control, .events = POLLIN, .revents = 0};
      poll(&readable, 1, -1);
      continue;
    }
    to += count;
    bytes -= static_cast<size_t>(count);
  }
  return true;
}

void WriteAll(int control, const void* content, size_t bytes) {
  const auto* from = static_cast<const std::byte*>(content);
  while (bytes > 0) {
    const ssize_t count = send(control, from, bytes, MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN) return;
    if (count < 0) {
      pollfd writable = {.fd = control, .events = POLLOUT, .revents = 0};
      poll(&writable, 1, -1);
      continue;
    }
    from += count;
    bytes -= static_cast<size_t>(count);
  }
}

}  // namespace

std::vector<std::byte> BytesOfExtent(size_t index, size_t size) {
  std::vector<std::byte> bytes(size);
  uint32_t state = static_cast<uint32_t>(index + 1) * 2654435761u;
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((state = state * 1664525 + 1) >> 24);
  return bytes;
}

void SendFrame(int control, FrameKind kind, const void* content, size_t bytes) {
  const FrameHeader header = {kind, static_cast<uint32_t>(bytes)};
  WriteAll(control, &header, sizeof(header));
  WriteAll(control, content, bytes);
}

SourceEnd::SourceEnd(boost::asio::io_context& io, Verbs& verbs, int control, const Plan& plan)
    : control_(control) {
  GrantRequest request = {.peer = "puller", .extents = {}, .lease = lease_};
  for (const size_t size : plan.sizes) bytes_.push_back(BytesOfExtent(bytes_.size(), size));
  for (const auto& bytes : bytes_) request.extents.push_back(bytes);
  request.connection_count = plan.connection_count;
  request.deadline = kvstore::SteadyTime::Now() + absl::Minutes(2);
  request.granted = [this](std::span<const Key> keys) {
    keys_sent_ += keys.size();
    SendFrame(control_, FrameKind::kKeys, keys.data(), keys.size_bytes());
  };
  request.ended = [this](const absl::Status& status) {
    end_ = status;
    if (!status.ok()) std::fprintf(stderr, "the source: %s\n", status.ToString().c_str());
  };
  source_ = Must(Source::Create(
      verbs, io, {.addresses = plan.source_addresses, .use_windows = plan.use_windows}));
  const Offer offer = Must(source_->Open(std::move(request)));
  token_ = offer.token;
  OfferFrame frame = {.token = offer.token, .connection_count = offer.connection_count};
  for (const Rail& rail : offer.rails) {
    std::snprintf(frame.addresses[frame.rail_count].data(), 64, "%s", rail.address.c_str());
    frame.ports[frame.rail_count++] = rail.port;
  }
  SendFrame(control_, FrameKind::kOffer, &frame, sizeof(frame));
  watch_.emplace(io, control_, [this] {
    FrameHeader header;
    if (ReadAll(control_, &header, sizeof(header)) && header.kind == FrameKind::kRevoke) {
      source_->Revoke(token_, Aborted("sequence", "was evicted", kNoRetry));
    } else {
      watch_.reset();
    }
  });
}

PullEnd::PullEnd(boost::asio::io_context& io, Verbs& verbs, int control, const Plan& plan)
    : io_(io), verbs_(verbs), control_(control), plan_(plan) {
  for (const size_t size : plan.sizes) bytes_.emplace_back(size);
  watch_.emplace(io, control_, [this] { TakeFrame(); });
}

void PullEnd::TakeFrame() {
  FrameHeader header;
  if (!ReadAll(control_, &header, sizeof(header))) return watch_.reset();  // the source is gone
  if (header.kind == FrameKind::kKeys) {
    std::vector<Key> keys(header.bytes / sizeof(Key));
    ReadAll(control_, keys.data(), header.bytes);
    on_keys(keys);
    (void)pull_->AddKeys(keys);
    return;
  }
  OfferFrame frame;
  ReadAll(control_, &frame, sizeof(frame));
  PullRequest request = {
      .offer = {.token = frame.token, .connection_count = frame.connection_count},
      .targets = {},
      .memory = memory_,
      .deadline = kvstore::SteadyTime::Now() + absl::Seconds(45)};
  for (uint32_t rail = 0; rail < frame.rail_count; ++rail) {
    request.offer.rails.push_back({frame.addresses[rail].data(), frame.ports[rail]});
  }
  for (uint32_t index = 0; index < bytes_.size(); ++index) {
    const std::vector<std::byte> expected = BytesOfExtent(index, bytes_[index].size());
    request.targets.push_back({bytes_[index], kernels::Crc32c({}, expected), index});
  }
  request.arrived = [this](uint32_t part) { arrived_.push_back(part); };
  request.ended = [this](const absl::Status& status) { end_ = status; };
  pull_ = Must(Pull::Start(verbs_, io_, {.addresses = plan_.pull_addresses}, std::move(request)));
}

bool PullEnd::has_all_bytes() const {
  for (size_t index = 0; index < bytes_.size(); ++index) {
    if (bytes_[index] != BytesOfExtent(index, bytes_[index].size())) return false;
  }
  return true;
}

Child::Child(Role role, const Plan& plan) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) std::abort();
  fcntl(ends[0], F_SETFD, FD_CLOEXEC);
  const auto join = [](const std::vector<std::string>& texts) { return absl::StrJoin(texts, ","); };
  std::vector<std::string> arguments = {"rdma-end",
                                        kEndOption,
                                        role == Role::kSource ? "source" : "pull",
                                        std::to_string(ends[1]),
                                        plan.use_windows ? "1" : "0",
                                        std::to_string(plan.connection_count),
                                        join(plan.source_addresses),
                                        join(plan.pull_addresses),
                                        absl::StrJoin(plan.sizes, ",")};
  process_ = fork();
  if (process_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    execv("/proc/self/exe", pointers.data());
    std::_Exit(127);
  }
  close(ends[1]);
  control_ = ends[0];
}

void RunIfChild(int argc, char** argv) {
  if (argc != 9 || argv[1] != std::string(kEndOption)) return;
  const int control = std::atoi(argv[3]);
  Plan plan = {.sizes = {},
               .source_addresses = absl::StrSplit(argv[6], ','),
               .pull_addresses = absl::StrSplit(argv[7], ','),
               .use_windows = argv[4] == std::string("1"),
               .connection_count = static_cast<uint32_t>(std::atoi(argv[5]))};
  for (const absl::string_view size : absl::StrSplit(argv[8], ',')) {
    plan.sizes.push_back(std::stoul(std::string(size)));
  }
  const std::unique_ptr<Verbs> verbs = Must(LoadVerbs());
  boost::asio::io_context io;
  if (argv[2] == std::string("source")) {
    SourceEnd source(io, *verbs, control, plan);
    RunUntil(io, [&source] { return source.end().has_value(); });
  } else {
    PullEnd pull(io, *verbs, control, plan);
    RunUntil(io, [&pull] { return pull.end().has_value(); });
  }
  std::exit(0);
}

Child::~Child() {
  Kill();
  close(control_);
}

void Child::Kill() {
  if (process_ <= 0) return;
  kill(process_, SIGKILL);
  waitpid(process_, nullptr, 0);
  process_ = -1;
}

bool RunUntil(boost::asio::io_context& io, const std::function<bool()>& is_done) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!is_done()) {
    io.restart();
    io.run_one_for(std::chrono::milliseconds(200));
    if (std::chrono::steady_clock::now() > until) return false;
  }
  return true;
}

}  // namespace pqcached::service::rdma
