// The calls of Store that read: each reads one snapshot of a sequence by a Reader, and returns
// values of its own. Store documents their contracts (store.h).
//
// Thread-safe; no call waits for another one.
#ifndef PQCACHED_KVSTORE_ROWS_SNAPSHOT_READS_H_
#define PQCACHED_KVSTORE_ROWS_SNAPSHOT_READS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kvstore/selected_pages.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// A snapshot and its cache, kept alive during one call.
struct Reading {
  std::shared_ptr<const Cache> cache;
  std::shared_ptr<const Snapshot> snapshot;
};

absl::StatusOr<Selected> TopK(const Reading& reading, const Query& query,
                              const Selection& selection);
absl::StatusOr<SelectedPages> TopPages(const Reading& reading, const Query& query,
                                       const Selection& selection, const PageTerms& terms);
absl::StatusOr<Scores> Score(const Reading& reading, const Query& query,
                             const IndexDescriptor& index, TokenRange tokens);
absl::StatusOr<Rows> FetchBlocks(const Reading& reading, uint32_t layer, TokenRange tokens,
                                 RowPart part);
absl::StatusOr<Rows> FetchTokens(const Reading& reading, uint32_t layer,
                                 std::span<const uint32_t> positions, RowPart part);
absl::StatusOr<Attention> Attend(const Reading& reading, const Query& query,
                                 const Selection& selection, bool want_positions);
absl::StatusOr<Attention> AttendPositions(const Reading& reading, const Query& query,
                                          std::span<const uint32_t> positions, uint32_t count);
absl::StatusOr<Attention> AttendRange(const Reading& reading, const Query& query, TokenRange tokens,
                                      const std::function<bool()>& is_cancelled);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_ROWS_SNAPSHOT_READS_H_
