// Selects, scores, fetches and attends over an image: does for the local path, with the same
// checks, the work that the sidecar does for the remote path.
//
// Thread-safe as long as scratch and outputs are not shared. Failures are the thread's last error.
// A caller must call LocalSequence::Check before it uses a result.
#ifndef PQCACHED_CLIENT_LOCAL_READ_H_
#define PQCACHED_CLIENT_LOCAL_READ_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/base/remote.h"
#include "client/local/image.h"
#include "client/local/sequence.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/resolve.h"
#include "kvstore/read/selection.h"
#include "pqcached/client.h"

namespace pqcached::client {

// An image of a sequence, held during a read.
struct Pinned {
  LocalSequence* sequence = nullptr;
  std::shared_ptr<Image> image;
  uint64_t lease_epoch = 0;  // of the sequence before the image was pinned
};
pqc_status PinNewest(LocalSequence& sequence, Pinned* pinned);

// Reusable memory of readers: after it has grown to the needed size, no call allocates.
class Scratch {
 public:
  // Returns at least `bytes`, 64-byte aligned; earlier contents are lost.
  std::span<std::byte> Bytes(size_t bytes);

  std::vector<float> queries;       // [kv_heads, query_length, group_size, key_dim]
  std::vector<float> output;        // [kv_heads, query_length, group_size, value_dim]
  std::vector<float> lse;           // [kv_heads, query_length, group_size]
  std::vector<uint32_t> positions;  // [kv_heads, count]
  kvstore::ResolvedSelection resolved;

 private:
  struct Free {
    void operator()(std::byte* bytes) const;
  };
  std::unique_ptr<std::byte, Free> bytes_;
  size_t byte_count_ = 0;
};

// Converts a selection to the kernels' terms. REQUIRES: ReadSelection has checked it.
pqc_status ToTerms(const pqc_selection& selection, const kvstore::IndexDescriptor& default_index,
                   kvstore::Selection* terms);
pqc_status ToIndex(const pqc_index& index, const kvstore::IndexDescriptor& default_index,
                   kvstore::IndexDescriptor* descriptor);

struct LocalSelected {
  uint32_t count = 0;  // per kv head
  uint32_t sink_tokens = 0;
  uint32_t window_tokens = 0;
};

// Selects tokens into scratch.positions.
pqc_status SelectLocally(const Pinned& pinned, const QueryView& query,
                         const kvstore::Selection& terms, const kvstore::ParallelFor& parallel,
                         Scratch& scratch, LocalSelected* selected);

// Attends over scratch.positions, `count` per kv head, as SelectLocally left them for the same
// query.
pqc_status AttendLocally(const Pinned& pinned, const QueryView& query, uint32_t count,
                         const kvstore::ParallelFor& parallel, Scratch& scratch, float* output,
                         float* lse);

// Attends over positions that the caller gives.
pqc_status AttendPositionsLocally(const Pinned& pinned, const QueryView& query,
                                  const PositionsView& positions,
                                  const kvstore::ParallelFor& parallel, Scratch& scratch,
                                  float* output, float* lse);

pqc_status ScoreLocally(const Pinned& pinned, const QueryView& query,
                        const kvstore::IndexDescriptor& index, pqc_token_range tokens,
                        const kvstore::ParallelFor& parallel, Scratch& scratch,
                        const ScoresOut& out);

pqc_status FetchBlocksLocally(const Pinned& pinned, const FetchView& fetch, pqc_token_range tokens,
                              std::byte* out);
pqc_status FetchTokensLocally(const Pinned& pinned, const FetchView& fetch,
                              const PositionsView& positions, std::byte* out);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_READ_H_
