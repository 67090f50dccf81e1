// A client of the C ABI whose sidecar is memory of this process: a pool, a control page and a staging ring that the client maps
// as on a host, and calls in place of RPCs. No store, daemon or gRPC: kernels, the read view and the client alone, so that
// machines with CMake, a C++ compiler and nvcc drive the client's steps.
//
// As simple as it can be: layers of one shape, a sequence is one segment of fixed room, its codebooks are keys of its own; nothing
// is checked, freed, forked or recovered. tests/client/local/store_client.h is a whole sidecar.
#ifndef PQCACHED_TESTS_GPU_POOL_CLIENT_H_
#define PQCACHED_TESTS_GPU_POOL_CLIENT_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "client/base/remote.h"
#include "client/local/host.h"
#include "client/local/mapping.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/layout.h"
#include "pqcached/client.h"

namespace pqcached::testing {

// Memory that can be mapped once more. Thread-compatible.
class SharedBytes {
 public:
  explicit SharedBytes(size_t size_bytes);
  ~SharedBytes();
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;

  std::byte* data() const { return data_; }
  pqc_status Map(client::MappingAccess access, std::shared_ptr<client::Mapping>* mapping) const;

 private:
  int descriptor_ = -1;
  size_t size_bytes_;
  std::byte* data_ = nullptr;
};

// Thread-safe.
class PoolSidecar {
 public:
  static constexpr kvstore::IndexDescriptor kIndex = {kvstore::IndexKind::kPq, 2, 6};
  static constexpr uint32_t kSequenceTokens = 1024;
  static constexpr uint64_t kBootWord = 1;

  PoolSidecar();

  struct ClientOptions {
    uint64_t slot_bytes = 1 << 20;  // of staging
    uint32_t slot_count = 3;
    uint32_t timeout_ms = 10000;
  };
  // A client over the local path. The sidecar outlives it.
  pqc_client* OpenClient(const ClientOptions& options);
  // A client over the remote path.
  pqc_client* OpenRemoteClient();

  // Commits wait while it is closed, and fetches that have no pass.
  void CloseGate();
  void OpenGate();
  // So many fetches pass the closed gate.
  void LetFetchesPass(uint32_t count);
  // The next so many Commits are refused.
  void RefuseCommits(uint32_t count);
  uint64_t commit_count() const;
  // Refuses to keep the pages of the pool in place, with this status; PQC_OK: keeps them.
  void RefuseHolds(pqc_status status) { hold_status_ = status; }
  uint32_t hold_count() const { return hold_count_; }

  // What the client's host and remote ask for.
  const SharedBytes& pool() const { return pool_; }
  const SharedBytes& control() const { return control_; }
  pqc_status HoldPool();
  pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                         std::shared_ptr<client::Mapping>* ring);
  void SetLayers(const pqc_layer_group& group);
  uint64_t CreateSequence();
  pqc_status Commit(uint64_t sequence_id, uint64_t first_position, const client::RowBlock* rows,
                    uint32_t count, client::RefusalBuffer* error);
  uint64_t Append(client::AppendItem& item);
  pqc_status Fetch(const client::FetchView& fetch, kvstore::TokenRange tokens, std::byte* rows,
                   client::RefusalBuffer* error);
  void Truncate(uint64_t sequence_id, uint64_t token_count);
  void BuildIndex(uint64_t sequence_id);
  void Attach(uint64_t sequence_id, client::AttachAnswer* answer);
  uint64_t token_count(uint64_t sequence_id);

  // Query samples of one layer, in the order of their positions.
  struct Samples {
    std::vector<uint64_t> positions;
    std::vector<float> queries;
  };
  void AddSamples(const client::SampleBlock& samples);
  Samples samples(uint32_t layer);

 private:
  struct StoredLayer {
    std::vector<kvstore::ExtentRef> rows;  // [kv_heads]
    kvstore::ExtentRef planes;
    kvstore::ExtentRef codebook;
    uint32_t token_count = 0;
  };
  struct StoredSequence {
    std::vector<StoredLayer> layers;
    bool has_index = false;
    uint64_t version = 1;
  };

  kvstore::ExtentRef TakeExtent(size_t size_bytes);
  kvstore::LeaseWords& words(uint64_t sequence_id) const;
  const std::byte* Elements(const client::TensorView& tensor, std::vector<std::byte>& packed) const;
  void Write(StoredSequence& sequence, uint64_t first_position, const client::RowBlock& rows);
  void TrainAndEncode(StoredLayer& layer);
  void Encode(const StoredLayer& layer, uint32_t begin, uint32_t end);
  void Publish(uint64_t sequence_id);

  SharedBytes pool_;
  SharedBytes control_;
  mutable std::mutex mutex_;
  std::condition_variable opened_;
  bool is_closed_ = false;
  uint32_t fetch_passes_ = 0;
  uint32_t refused_commits_ = 0;
  uint64_t commit_count_ = 0;
  std::atomic<pqc_status> hold_status_ = PQC_OK;
  std::atomic<uint32_t> hold_count_ = 0;
  std::unique_ptr<SharedBytes> ring_;
  uint64_t slot_bytes_ = 0;
  std::vector<uint32_t> layers_;
  kvstore::LayerShape shape_;
  uint32_t next_unit_ = 0;
  std::map<uint64_t, StoredSequence> sequences_;
  std::map<uint32_t, Samples> samples_;  // by layer
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_GPU_POOL_CLIENT_H_
