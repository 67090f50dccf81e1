// RowHandlers answers the rpcs that write KV rows: Append, Commit (rows from the staging ring), and
// the messages of an Ingest stream.
//
// Thread-safe; an IngestRows is used by one thread at a time.
#ifndef PQCACHED_SERVICE_HANDLERS_ROW_HANDLERS_H_
#define PQCACHED_SERVICE_HANDLERS_ROW_HANDLERS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "service/handlers/caller.h"
#include "service/handlers/lease_handlers.h"
#include "service/wire/ingest_message.h"
#include "service/wire/token_names.h"

namespace pqcached::service {

// IngestRows is the transaction of one Ingest call: a header, chunks of rows, and the commit. Rows
// that are not committed are dropped with this object.
class IngestRows {
 public:
  IngestRows(kvstore::Store& store, uint64_t max_message_bytes)
      : store_(store), max_message_bytes_(max_message_bytes) {}

  // Handles the next message of the stream.
  absl::Status Take(const Caller& caller, const IngestMessage& message);
  // Publishes the rows and names their tokens, at the end of the stream.
  absl::Status Commit(const Caller& caller, v1::IngestResponse* response);

 private:
  absl::Status TakeHeader(const Caller& caller, const v1::IngestHeader& header);
  absl::Status TakeSamples(const Caller& caller, const v1::IngestChunk& chunk);
  absl::Status TakeChunk(const Caller& caller, const IngestMessage& message);

  kvstore::Store& store_;
  const uint64_t max_message_bytes_;
  std::unique_ptr<kvstore::IngestTransaction> transaction_;
  uint64_t sequence_id_ = 0;
  ReceivedNames names_;  // recorded after the commit of the rows
  std::string names_field_ = "header";
};

class RowHandlers {
 public:
  RowHandlers(kvstore::Store& store, LeaseHandlers& leases, uint64_t max_message_bytes)
      : store_(store), leases_(leases), max_message_bytes_(max_message_bytes) {}

  absl::Status Append(const Caller& caller, const v1::AppendRequest& request,
                      v1::AppendResponse* response);
  absl::Status Commit(const Caller& caller, const v1::CommitRequest& request,
                      v1::CommitResponse* response);
  // Returns the transaction of a new Ingest stream.
  IngestRows BeginIngest() { return IngestRows(store_, max_message_bytes_); }

 private:
  absl::StatusOr<uint64_t> AppendOne(const Caller& caller, const v1::SequenceAppend& item,
                                     const std::string& field,
                                     const std::vector<kvstore::LayerRows>& layers);

  kvstore::Store& store_;
  LeaseHandlers& leases_;
  const uint64_t max_message_bytes_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_ROW_HANDLERS_H_
