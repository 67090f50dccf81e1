// The broker's protocol: how a client on the same host gets a session and descriptors.
//
// The broker listens on a unix stream socket beside the gRPC one: its path with ".broker" behind it.
// The client sends one request at a time, BrokerRequest, and gets one BrokerReply, whose descriptor,
// where there is one, comes by SCM_RIGHTS with its first byte. The first request must be kHello. The
// connection is the session: its end ends the session, and nothing else of the client's is needed
// for that.
//
// A worker of the sidecar may die; sessions outlive it. The client sees it by ControlPage::boot_word,
// which is no longer the reply's, and by the end of what it can read here. It then opens another
// connection, says kResume instead of kHello, and gets the same session: the same token and tenant,
// new control memory, another boot_id. Leases, staging and what was not answered are gone. It closes
// the old connection when it has unmapped all that came over it: not before, because what it maps is
// not used for anything else until then. A sidecar that does not know kResume answers it with a
// status, and so does one that has no such session any more (NOT_FOUND); hello is still possible then.
//
// Fixed sizes, so that neither side ever reads a length from the other. Texts are zero-terminated;
// reserved bytes are zero.
#ifndef PQCACHED_KVSTORE_READ_BROKER_PROTOCOL_H_
#define PQCACHED_KVSTORE_READ_BROKER_PROTOCOL_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pqcached::kvstore {

inline constexpr char kBrokerSuffix[] = ".broker";
inline constexpr uint32_t kBrokerVersion = 2;  // 1: without BrokerReply::field and retry_ms

enum class BrokerCall : uint32_t {
  kHello = 1,        // opens the session; descriptor: the control memory, read-only
  kOpenPool = 2,     // descriptor: the pool of a cache of the session's tenant, read-only
  kOpenStaging = 3,  // once; descriptor: the staging ring, created and size-sealed by the sidecar
  kResume = 4,       // instead of kHello, answered as it is
};

struct BrokerRequest {
  static constexpr uint32_t kMagic = 0x51524250;  // "PBRQ"
  uint32_t magic = kMagic;
  uint32_t version = kBrokerVersion;
  BrokerCall call = BrokerCall::kHello;
  uint32_t reserved = 0;
  char tenant[72] = {};  // kHello: "" = what the peer's uid says, or "default"
  union {
    char client_name[136] = {};  // kHello: for people
    char resume_token[72];       // kResume: BrokerReply::session_token of the session
  };
  uint64_t cache_id = 0;    // kOpenPool
  uint64_t slot_bytes = 0;  // kOpenStaging: a multiple of 1 MiB
  uint32_t slot_count = 0;  // kOpenStaging
  uint32_t reserved2 = 0;
};

struct BrokerReply {
  static constexpr uint32_t kMagic = 0x50524250;  // "PBRP"
  uint32_t magic = kMagic;
  uint32_t version = kBrokerVersion;
  BrokerCall call = BrokerCall::kHello;  // that it answers
  uint32_t status = 0;                   // gRPC's code; not 0: no descriptor comes
  char message[512] = {};                // with a status: why, without the field
  char session_token[72] = {};     // kHello, kResume: a secret; metadata `pqcached-session` of RPCs
  char boot_id[72] = {};           // likewise
  char tenant[72] = {};            // likewise: that the sidecar gave the session
  uint64_t boot_word = 0;          // likewise: ControlPage::boot_word while this worker lives
  uint64_t max_message_bytes = 0;  // likewise
  uint64_t size_bytes = 0;         // of what the descriptor stands for
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
