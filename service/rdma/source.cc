#include "service/rdma/source.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"
#include "service/rdma/address.h"
#include "service/rdma/failure.h"

namespace pqcached::service::rdma {
namespace {

constexpr int kBacklog = 128;

absl::Status CheckSourceOptions(const Source::Options& options) {
  if (options.addresses.empty() || options.addresses.size() > kMaxRails) {
    return InvalidArgument("addresses",
                           absl::StrCat(options.addresses.size(), ", must be 1 to ", kMaxRails));
  }
  if (options.key_bytes == 0 || options.key_bytes % kMinKeyBytes != 0 ||
      options.key_bytes > UINT32_MAX / 2) {
    return InvalidArgument("key_bytes", absl::StrCat(options.key_bytes, ", must be a multiple of ",
                                                     kMinKeyBytes, " below 2^31"));
  }
  return absl::OkStatus();
}

absl::Status CheckGrantRequest(const GrantRequest& request, uint32_t max_extents) {
  if (request.peer.empty()) {
    return Unauthenticated("peer", "memory is granted only to peers with an identity");
  }
  if (request.extents.empty() || request.extents.size() > max_extents) {
    return InvalidArgument("extents",
                           absl::StrCat(request.extents.size(), ", must be 1 to ", max_extents));
  }
  for (size_t index = 0; index < request.extents.size(); ++index) {
    if (request.extents[index].empty()) {
      return InvalidArgument(absl::StrCat("extents[", index, "]"), "has no bytes");
    }
  }
  if (request.connection_count == 0 || request.connection_count > kMaxConnections) {
    return InvalidArgument("connection_count", absl::StrCat(request.connection_count,
                                                            ", must be 1 to ", kMaxConnections));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Source>> Source::Create(Verbs& verbs, boost::asio::io_context& io,
                                                       Options options) {
  if (absl::Status status = CheckSourceOptions(options); !status.ok()) return status;
  std::unique_ptr<Source> source(new Source(verbs, io, std::move(options)));
  if (absl::Status status = source->Start(); !status.ok()) return status;
  return source;
}

Source::~Source() {
  watch_.reset();
  for (const auto& [token, grant] : grants_) grant->TearDown();
}

absl::Status Source::Start() {
  channel_ = {verbs_.CreateEventChannel(), Destroyer{&verbs_}};
  if (channel_ == nullptr) return CallFailed("rdma_create_event_channel", errno);
  for (size_t index = 0; index < options_.addresses.size(); ++index) {
    const std::string field = absl::StrCat("addresses[", index, "]");
    absl::Status status = Listen(field, options_.addresses[index]);
    if (!status.ok()) return ReplaceField(field, status);
  }
  watch_.emplace(io_, channel_->fd, [this] { TakeEvents(); });
  return absl::OkStatus();
}

absl::Status Source::Listen(const std::string& field, const std::string& address) {
  absl::StatusOr<sockaddr_storage> parsed = ParseAddress(field, address, 0);
  if (!parsed.ok()) return parsed.status();
  rdma_cm_id* made = nullptr;
  int error = verbs_.CreateId(channel_.get(), &made, nullptr);
  if (error != 0) return CallFailed("rdma_create_id", error);
  Owned<rdma_cm_id> id(made, Destroyer{&verbs_});
  error = verbs_.BindAddress(id.get(), reinterpret_cast<sockaddr*>(&*parsed));
  if (error != 0) return CallFailed("rdma_bind_addr", error);
  if (id->verbs == nullptr) {
    return Unavailable(field, absl::StrCat(address, ", belongs to no RDMA device"), kNoRetry);
  }
  absl::StatusOr<std::shared_ptr<Device>> device;
  for (const Listener& listener : listeners_) {
    if (listener.id->verbs == id->verbs) device = listener.device;
  }
  if (!device.ok()) device = Device::Open(verbs_, *id, options_.use_windows);
  if (!device.ok()) return device.status();
  error = verbs_.Listen(id.get(), kBacklog);
  if (error != 0) return CallFailed("rdma_listen", error);
  rails_.push_back({address, verbs_.PortOf(id.get())});
  listeners_.push_back({*std::move(device), std::move(id)});
  return absl::OkStatus();
}

absl::StatusOr<Offer> Source::Open(GrantRequest request) {
  absl::Status status = CheckGrantRequest(request, options_.max_extents);
  if (!status.ok()) return status;
  if (grants_.size() >= options_.max_pulls) {
    return ResourceExhausted("max_pulls", absl::StrCat(grants_.size(), " pulls run"), kRetryQueue);
  }
  Offer offer = {.token = {}, .connection_count = request.connection_count, .rails = rails_};
  if (getrandom(offer.token.data(), offer.token.size(), 0) !=
      static_cast<ssize_t>(offer.token.size())) {
    return Internal(absl::StrCat("getrandom: ", std::strerror(errno)));
  }
  const Token token = offer.token;
  grants_[token] =
      std::make_shared<Grant>(verbs_, io_, std::move(request),
                              Grant::Options{.key_bytes = options_.key_bytes,
                                             .step_bytes = options_.step_bytes,
                                             .gone = [this, token] { grants_.erase(token); }});
  grants_[token]->Start();
  return offer;
}

void Source::Revoke(const Token& token, absl::Status why) {
  const auto found = grants_.find(token);
  if (found != grants_.end()) found->second->Revoke(std::move(why));
}

void Source::TakeEvents() {
  ConnectionEvent event;
  while (verbs_.GetEvent(channel_.get(), &event) == 0) {
    if (event.type == RDMA_CM_EVENT_CONNECT_REQUEST) {
      Admit(event);
    } else if (event.id->context != nullptr) {  // else of a listener
      static_cast<Grant*>(event.id->context)->Handle(event);
    }
  }
}

void Source::Admit(const ConnectionEvent& event) {
  Owned<rdma_cm_id> id(event.id, Destroyer{&verbs_});
  const Rejection rejection = TryAccept(id, event);
  if (rejection.reason == RejectionReason::kNone || id == nullptr) return;
  verbs_.Reject(id.get(), std::as_bytes(std::span(&rejection, 1)));
}

Rejection Source::TryAccept(Owned<rdma_cm_id>& id, const ConnectionEvent& event) {
  Hello hello;
  if (event.private_bytes < sizeof(hello)) return {.reason = RejectionReason::kUnknown};
  std::memcpy(&hello, event.private_data.data(), sizeof(hello));
  if (hello.magic != kHelloMagic) return {.reason = RejectionReason::kUnknown};
  if (hello.version != kProtocolVersion) {
    return {.reason = RejectionReason::kVersion, .value = kProtocolVersion};
  }
  const auto found = grants_.find(hello.token);
  if (found == grants_.end()) return {.reason = RejectionReason::kUnknown};
  std::shared_ptr<Device> device;
  for (const Listener& listener : listeners_) {
    if (listener.id->verbs == id->verbs) device = listener.device;
  }
  if (device == nullptr) return {.reason = RejectionReason::kResources};
  if (hello.mtu_bytes > device->limits().mtu_bytes) {
    return {.reason = RejectionReason::kMtu, .value = device->limits().mtu_bytes};
  }
  const absl::Status status = found->second->Accept(id, hello, event, device);
  if (status.ok()) return {};
  if (status.code() == absl::StatusCode::kAlreadyExists ||
      status.code() == absl::StatusCode::kOutOfRange) {
    return {.reason = RejectionReason::kDuplicate};
  }
  return {.reason = RejectionReason::kResources};
}

}  // namespace pqcached::service::rdma
