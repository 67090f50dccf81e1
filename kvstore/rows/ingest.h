// Ingest, Append and Truncate: the operations that write rows (KV entries).
#ifndef PQCACHED_KVSTORE_ROWS_INGEST_H_
#define PQCACHED_KVSTORE_ROWS_INGEST_H_

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kvstore/rows/writer.h"

namespace pqcached::kvstore {

// The contracts are those of Store (store.h). `has_live_index`: an incremental index of the
// sequence codes its rows later. `announced`: the end of the tokens that have names.
absl::StatusOr<std::unique_ptr<IngestTransaction>> BeginIngest(std::shared_ptr<const Cache> cache,
                                                               WriteLease lease,
                                                               bool has_live_index,
                                                               AnnouncedEnd announced);

absl::StatusOr<uint64_t> AppendRows(std::shared_ptr<const Cache> cache, WriteLease lease,
                                    bool has_live_index, uint64_t first_position,
                                    std::span<const LayerRows> layers);

absl::StatusOr<uint64_t> TruncateRows(WriteLease lease, uint64_t token_count,
                                      uint64_t own_lease = 0);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_ROWS_INGEST_H_
