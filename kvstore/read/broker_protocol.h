// Broker protocol: how a client on the same host opens a session and receives descriptors.
//
// The broker listens on a unix stream socket next to the gRPC one; its path is the gRPC path with
// the suffix ".broker". The client sends one BrokerRequest at a time and receives one BrokerReply.
// A descriptor, if the reply has one, is passed by SCM_RIGHTS with the reply's first byte. The
// first request must be kHello or kResume. The connection is the session: closing it ends the
// session, and the client has to do nothing else.
//
// Sessions outlive a worker of the sidecar that dies. The client detects the death when
// ControlPage::boot_word differs from the reply's, and when its connection is closed. It then opens
// another connection, sends kResume instead of kHello, and receives the same session: the same
// token and tenant, new control memory, another boot_id. Leases, staging and unanswered calls are
// lost. The client closes the old connection only after it has unmapped all memory received over
// it, because that memory is not used for anything else until the connection is closed. A sidecar
// that does not know kResume, or no longer has the session (NOT_FOUND), answers with an error
// status; the client can then send kHello.
//
// All messages have fixed sizes, so that neither side ever reads a length from the other. Texts are
// zero-terminated; reserved bytes are zero.
#ifndef PQCACHED_KVSTORE_READ_BROKER_PROTOCOL_H_
#define PQCACHED_KVSTORE_READ_BROKER_PROTOCOL_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pqcached::kvstore {

inline constexpr char kBrokerSuffix[] = ".broker";
// Version of these structs, and of the rules for extents in attachments.
//   2  BrokerReply has field and retry_ms
//   3  extents are not aligned to their size
inline constexpr uint32_t kBrokerVersion = 3;

enum class BrokerCall : uint32_t {
  kHello = 1,        // opens a session; descriptor: the control memory, read-only
  kOpenPool = 2,     // descriptor: the pool of a cache that the session's tenant owns, read-only
  kOpenStaging = 3,  // once; descriptor: the staging ring, created and size-sealed by the sidecar
  kResume = 4,       // reopens a session; sent instead of kHello and answered in the same way
  kHoldPool = 5,     // keeps the pages of a pool in place until the session ends; no descriptor.
                     // Sent before the client page-locks them. UNIMPLEMENTED: an older sidecar
};

struct BrokerRequest {
  static constexpr uint32_t kMagic = 0x51524250;  // "PBRQ"
  uint32_t magic = kMagic;
  uint32_t version = kBrokerVersion;
  BrokerCall call = BrokerCall::kHello;
  uint32_t reserved = 0;
  char tenant[72] = {};  // kHello: "" = the tenant of the peer's uid, or "default"
  union {
    char client_name[136] = {};  // kHello: human-readable
    char resume_token[72];       // kResume: BrokerReply::session_token of the session
  };
  uint64_t cache_id = 0;    // kOpenPool, kHoldPool
  uint64_t slot_bytes = 0;  // kOpenStaging: a multiple of 1 MiB
  uint32_t slot_count = 0;  // kOpenStaging
  uint32_t reserved2 = 0;
};

struct BrokerReply {
  static constexpr uint32_t kMagic = 0x50524250;  // "PBRP"
  uint32_t magic = kMagic;
  uint32_t version = kBrokerVersion;
  BrokerCall call = BrokerCall::kHello;  // the call that this reply answers
  uint32_t status = 0;                   // gRPC status code; only OK (0) carries a descriptor
  char message[512] = {};                // reason for the status, without the field
  char session_token[72] = {};     // kHello, kResume: a secret; metadata `pqcached-session` of RPCs
  char boot_id[72] = {};           // kHello, kResume
  char tenant[72] = {};            // kHello, kResume: the tenant that the sidecar assigned
  uint64_t boot_word = 0;          // kHello, kResume: of the worker, see ControlPage
  uint64_t max_message_bytes = 0;  // kHello, kResume
  uint64_t size_bytes = 0;         // size of the memory behind the descriptor
  char field[120] = {};            // with a status: path of the refused field, "" = none
  uint32_t retry_ms = 0;           // with a status: when a repetition may succeed, 0 = never
  uint32_t reserved = 0;
};

static_assert(sizeof(BrokerRequest) == 248 && sizeof(BrokerReply) == 896);
// Every version has the magic and the version in its first bytes, and at least this many of them: a
// client reads these first, and does not wait for more from a sidecar of another version.
inline constexpr size_t kBrokerReplyHeadBytes = 768;
static_assert(std::is_trivially_copyable_v<BrokerRequest> &&
              std::is_trivially_copyable_v<BrokerReply>);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_BROKER_PROTOCOL_H_
