// World: a sidecar with two tenants, called without sockets, and the model that it must agree with.
//
// An input is a sequence of calls of both tenants, by requests that fit what is stored. Some of
// them are then changed, cancelled, late, or without a session. A call must end as the model says;
// one that fails must have changed nothing. Afterwards every row of every sequence is compared, all
// is ended, and nothing may be left: no byte of the pools in use, no lease.
//
// A changed request that succeeds makes what it names *loose*: the model does not know it any
// more. All else must still agree.
#ifndef PQCACHED_TESTS_FUZZ_HANDLERS_WORLD_H_
#define PQCACHED_TESTS_FUZZ_HANDLERS_WORLD_H_

#include <google/protobuf/message.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "tests/fuzz/bytes.h"
#include "tests/fuzz/handlers/model.h"
#include "tests/fuzz/handlers/rewriter.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::fuzz {

// Contents of the tokens in staging memory that changes all the time: one of two each.
const Content& RacedContent(size_t which);
uint64_t RacedOffset(bool writes_nan);

class World {
 public:
  static constexpr uint64_t kSlotBytes = uint64_t{1} << 20;
  static constexpr size_t kMaxSequences = 5;  // of a tenant
  static constexpr size_t kMaxTokens = 520;   // of a sequence

  struct Options {
    // What is slow happens, too: restarts (the state outlives the sidecar in a keeper), new sessions
    // and caches, and incremental indexes.
    bool is_slow = false;
  };

  static constexpr size_t kMaxCalls = 8;  // of an input; later ones are left out

  explicit World(const Options& options);
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  void Run(Bytes bytes);
  // Returns whether the next input needs a new world.
  bool worn() const { return is_worn_ || inputs_ >= kInputs; }

  // ---- For the calls of an input (calls.h).

  struct Result {
    absl::Status status;
    bool is_changed = false;   // the request was changed
    bool is_hindered = false;  // the call was cancelled, or late
    bool has_session = true;
  };

  // Calls an rpc, after the input has changed the request or the client.
  Result Call(Tenant& tenant, google::protobuf::Message& request,
              google::protobuf::Message* response, Bytes& bytes);
  Result Ingest(Tenant& tenant, const std::vector<v1::IngestRequest*>& requests,
                v1::IngestResponse* response, Bytes& bytes);
  // Returns true when the call was to succeed and did. Otherwise it must have failed as expected,
  // or because the input hindered it, or for want of memory if it `may_lack` some.
  bool Expect(Tenant& tenant, const Result& result, const google::protobuf::Message& request,
              absl::StatusCode expected, bool may_lack = false);

  // The spec of the cache that both tenants have.
  static v1::OpenCacheRequest CacheOf();
  service::DirectSidecar& sidecar() { return *sidecar_; }
  // Has another thread write what RacedContent(0) and (1) are into the tenant's staging memory, at
  // RacedOffset(writes_nan), for a while.
  void WriteStaging(const Tenant& tenant, bool writes_nan);
  bool is_slow() const { return options_.is_slow; }
  Tenant& Other(const Tenant& tenant) {
    return &tenant == &tenants_[0] ? tenants_[1] : tenants_[0];
  }
  bool IsKnown(uint64_t sequence_id) {
    return tenants_[0].Find(sequence_id) != nullptr || tenants_[1].Find(sequence_id) != nullptr;
  }
  // Ends the tenant's session, and opens another one.
  void ReplaceSession(Tenant& tenant);
  // Ends the sidecar; another one continues.
  void Restart();
  // Compares all rows of a sequence.
  void Compare(const Tenant& tenant, const Sequence& sequence);
  // Compares the memory that a lease keeps in place.
  void CompareLease(const Tenant& tenant, const Lease& lease);
  v1::LeaseState LeaseStateOf(const Tenant& tenant, uint64_t sequence_id) const;

 private:
  static constexpr int kInputs = 20'000;

  void MakeSidecar();
  void OpenTenant(Tenant& tenant);
  void OpenMemory(Tenant& tenant);
  void ShareStaging();
  Result Outcome(const google::protobuf::Message& request, absl::Status status, Result result);
  void Loosen(Tenant& tenant, const google::protobuf::Message& request, bool succeeded);
  void LoosenIds(Tenant& tenant, const google::protobuf::Message& message, bool succeeded);
  void CompareAll();
  void End(Tenant& tenant);
  void EndPrefixes(Tenant& tenant);
  void ExpectNothingIsLeft();

  const Options options_;
  std::unique_ptr<kvstore::testing::MemoryKeeper> keeper_;
  std::unique_ptr<service::DirectSidecar> sidecar_;
  std::array<Tenant, 2> tenants_;
  Rewriter rewriter_;
  int inputs_ = 0;
  bool is_worn_ = false;
};

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_HANDLERS_WORLD_H_
