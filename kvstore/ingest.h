// Ingest, Append and Truncate: the operations that write rows (KV entries).
#ifndef PQCACHED_KVSTORE_INGEST_H_
#define PQCACHED_KVSTORE_INGEST_H_

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kvstore/writer.h"

namespace pqcached::kvstore {

// The contracts are those of Store (store.h).
absl::StatusOr<std::unique_ptr<IngestTransaction>> BeginIngest(std::shared_ptr<const Cache> cache,
                                                               WriteLease lease);

absl::StatusOr<uint64_t> AppendRows(std::shared_ptr<const Cache> cache, WriteLease lease,
                                    uint64_t first_position, std::span<const LayerRows> layers);

absl::StatusOr<uint64_t> TruncateRows(WriteLease lease, uint64_t token_count,
                                      uint64_t own_lease = 0);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_INGEST_H_
