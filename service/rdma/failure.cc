#include "service/rdma/failure.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"

namespace pqcached::service::rdma {
namespace {

absl::Status Rejected(const Rejection& rejection, uint32_t mtu_bytes) {
  switch (rejection.reason) {
    case RejectionReason::kVersion:
      return FailedPrecondition(
          "offer.version", absl::StrCat(kProtocolVersion, ", the source has ", rejection.value));
    case RejectionReason::kUnknown:
      return PermissionDenied("offer.token", "the source has no such pull");
    case RejectionReason::kDuplicate:
      return InvalidArgument("offer.token",
                             "the source has no such connection to offer, or not any more");
    case RejectionReason::kMtu:
      return FailedPrecondition("offer.rails.mtu", absl::StrCat(mtu_bytes, " bytes here, at most ",
                                                                rejection.value, " at the source"));
    case RejectionReason::kResources:
      return ResourceExhausted("offer.rails", "the source has no queue pair left", kRetryPeer);
    case RejectionReason::kNone:
      break;
  }
  return Unavailable("offer.rails", "the source refuses the connection", kRetryPeer);
}

}  // namespace

absl::Status CallFailed(absl::string_view call, int error) {
  const std::string text = absl::StrCat(call, ": ", std::strerror(error));
  if (error == ENOMEM || error == ENOSPC || error == EAGAIN) {
    return ShortOf(Shortage::kMemory, "rdma", text, kRetryMemory);
  }
  if (error == EMFILE || error == ENFILE) {
    return ShortOf(Shortage::kDescriptors, "rdma", text, kRetryMemory);
  }
  return Unavailable("rdma", text, kRetryPeer);
}

absl::Status CompletionFailed(const ibv_wc& completion) {
  switch (completion.status) {
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
      return Aborted("keys", "the source refuses a key: it was revoked, or never granted",
                     kNoRetry);
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
    case IBV_WC_REM_ABORT_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_WR_FLUSH_ERR:
      return Unavailable(
          "peer",
          absl::StrCat("does not answer (completion ", static_cast<int>(completion.status), ")"),
          kRetryPeer);
    default:
      return Internal(absl::StrCat("the RDMA device refuses work (completion ",
                                   static_cast<int>(completion.status), ")"));
  }
}

absl::Status ConnectionFailed(const ConnectionEvent& event, uint32_t mtu_bytes) {
  if (event.type == RDMA_CM_EVENT_DISCONNECTED) {
    return Unavailable("peer", "has closed the connection", kRetryPeer);
  }
  Rejection rejection;
  if (event.type == RDMA_CM_EVENT_REJECTED && event.private_bytes >= sizeof(rejection)) {
    std::memcpy(&rejection, event.private_data.data(), sizeof(rejection));
    if (rejection.magic == kHelloMagic) return Rejected(rejection, mtu_bytes);
  }
  return Unavailable("offer.rails",
                     absl::StrCat("no connection (event ", static_cast<int>(event.type),
                                  ", status ", event.status, ")"),
                     kRetryPeer);
}

}  // namespace pqcached::service::rdma
