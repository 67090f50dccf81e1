// QueryHandlers answers the rpcs that read: TopK, Score, FetchBlocks, FetchTokens, Attend,
// AttendRange.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_HANDLERS_QUERY_HANDLERS_H_
#define PQCACHED_SERVICE_HANDLERS_QUERY_HANDLERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "service/handlers/cache_specs.h"
#include "service/handlers/caller.h"

namespace pqcached::service {

// The content of a FetchBlocksResponse.
struct FetchedBlocks {
  std::vector<kvstore::Rows> blocks;
  uint64_t rows_epoch = 0;
};

class QueryHandlers {
 public:
  QueryHandlers(kvstore::Store& store, CacheSpecs& specs, uint64_t max_message_bytes)
      : store_(store), specs_(specs), max_message_bytes_(max_message_bytes) {}

  absl::Status TopK(const Caller& caller, const v1::TopKRequest& request,
                    v1::TopKResponse* response);
  absl::Status Score(const Caller& caller, const v1::ScoreRequest& request,
                     v1::ScoreResponse* response);
  absl::Status FetchBlocks(const Caller& caller, const v1::FetchBlocksRequest& request,
                           v1::FetchBlocksResponse* response);
  // FetchBlocks for a caller that writes the message itself.
  absl::Status FetchRows(const Caller& caller, const v1::FetchBlocksRequest& request,
                         FetchedBlocks* fetched);
  absl::Status FetchTokens(const Caller& caller, const v1::FetchTokensRequest& request,
                           v1::FetchTokensResponse* response);
  absl::Status Attend(const Caller& caller, const v1::AttendRequest& request,
                      v1::AttendResponse* response);
  absl::Status AttendRange(const Caller& caller, const v1::AttendRangeRequest& request,
                           v1::AttendRangeResponse* response);

 private:
  // Size of one token of one layer in a response.
  struct TokenShape {
    uint32_t kv_heads = 0;
    uint64_t dim = 0;    // of the part, per kv head
    uint64_t bytes = 0;  // over all kv heads
  };

  absl::StatusOr<kvstore::Selection> ResolveSelection(const Caller& caller, uint64_t sequence_id,
                                                      const v1::Selection& selection,
                                                      const std::string& item);
  absl::Status TopKOne(const Caller& caller, const v1::TopKItem& item, const std::string& field,
                       v1::Selected* message);
  absl::Status AttendOne(const Caller& caller, const v1::AttendItem& item, const std::string& field,
                         v1::Attention* message);
  absl::Status AttendRangeOne(const Caller& caller, const v1::AttendRangeItem& item,
                              const std::string& field, uint64_t* response_bytes,
                              v1::Attention* message);
  // Checks, before anything is selected, that the positions of a selection fit into a response.
  absl::Status CheckPositionBytes(const Caller& caller, uint64_t sequence_id,
                                  const kvstore::Query& query, const kvstore::Selection& selection);
  absl::StatusOr<TokenShape> TokenShapeOf(const Caller& caller, uint64_t sequence_id,
                                          uint32_t layer, kvstore::RowPart part);

  kvstore::Store& store_;
  CacheSpecs& specs_;
  const uint64_t max_message_bytes_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_QUERY_HANDLERS_H_
