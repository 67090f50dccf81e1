// Wire converts between the proto and the types of the store, in one place.
//
// Decoding functions check what the conversion would lose (enumerators, missing parts, features
// that this version does not implement) and leave ranges and shapes to the store, which checks them
// once for all callers. `field` is the path of the message in its request ("items[2].query"); every
// error begins with a path.
//
// Pure functions; thread-safe. Views borrow from the message.
#ifndef PQCACHED_SERVICE_WIRE_WIRE_H_
#define PQCACHED_SERVICE_WIRE_WIRE_H_

#include <google/protobuf/repeated_field.h>

#include <optional>
#include <string>
#include <vector>
#include "absl/strings/string_view.h"

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/local_session.h"
#include "kvstore/selected_pages.h"
#include "kvstore/values.h"
#include "pqcached/v1/admin.pb.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "service/base/refusal.h"

namespace pqcached::service {

class StagingClaims;

inline constexpr int kMaxBatchItems = 256;
inline constexpr int kMaxFetchRanges = 1024;

// ---- Requests

// Decode tensors and rows. With `staging`, a tensor may be a reference into the staging ring.
//
// Errors: kInvalidArgument  also: the shape spans more than `max_bytes`, whatever its strides
absl::StatusOr<kvstore::TensorView> TensorOf(const v1::Tensor& tensor, const std::string& field,
                                             uint64_t max_bytes, StagingClaims* staging = nullptr);
absl::StatusOr<kvstore::LayerRows> LayerRowsOf(const v1::LayerRows& rows, const std::string& field,
                                               uint64_t max_bytes,
                                               StagingClaims* staging = nullptr);
absl::StatusOr<kvstore::LayerSamples> LayerSamplesOf(const v1::QuerySamples& samples,
                                                     const std::string& field, uint64_t max_bytes);
kvstore::LeaseState LeaseStateOf(const v1::LeaseState& lease);
absl::StatusOr<kvstore::LiveIndex> LiveIndexOf(const v1::LiveIndex& live, const std::string& field);
absl::StatusOr<kvstore::AdmitSpec> AdmitSpecOf(const v1::AdmitRequest& request);
absl::StatusOr<kvstore::CacheSpec> CacheSpecOf(const v1::OpenCacheRequest& request);
// Returns nothing when the message is absent: the cache's default applies.
absl::StatusOr<std::optional<kvstore::IndexDescriptor>> IndexOf(bool present,
                                                                const v1::IndexSpec& spec,
                                                                const std::string& field);
absl::StatusOr<kvstore::Query> QueryOf(const v1::Query& query, const std::string& field,
                                       uint64_t max_bytes);
// Returns the query of an attention over positions, which may have logits in place of queries.
// `field`: of the item.
absl::StatusOr<kvstore::Query> QueryOverPositions(const v1::AttendItem& item,
                                                  const std::string& field, uint64_t max_bytes);
absl::StatusOr<kvstore::BuildSpec> BuildSpecOf(const v1::BuildIndexRequest& request);
absl::StatusOr<kvstore::TokenRange> TokenRangeOf(bool present, const v1::TokenRange& range,
                                                 const std::string& field);
absl::StatusOr<kvstore::RowPart> RowPartOf(v1::RowPart part, const std::string& field);
absl::StatusOr<std::vector<uint32_t>> PositionsOf(
    uint32_t count, const google::protobuf::RepeatedField<uint32_t>& positions,
    const std::string& field);

// ---- Responses

// Checks the size of a response.
//
// Errors: kResourceExhausted  the response would not fit in a message
absl::Status CheckResponseBytes(uint64_t bytes, uint64_t max_message_bytes);

void ToWire(const kvstore::Selected& selected, v1::Selected* message);
void ToWire(const kvstore::SelectedPages& selected, v1::Selected* message);
void ToWire(const kvstore::Scores& scores, v1::Scores* message);
// `query_shape`: [query_length, query_heads, ...].
void ToWire(const kvstore::Attention& attention, const std::vector<uint64_t>& query_shape,
            bool want_positions, v1::Attention* message);
// Moves the bytes out of `image`.
void ToWire(kvstore::VersionedImage image, v1::Attachment* message);
void ToWire(const kvstore::LeaseInfo& info, uint32_t peer_pid, v1::LeaseDescription* message);
void ToWire(const kvstore::Rows& rows, v1::Tensor* tensor);
// Writes all of a tensor but its data.
void ToWireWithoutData(const kvstore::Rows& rows, v1::Tensor* tensor);
void ToWire(const kvstore::BuildProgress& progress, v1::BuildProgress* message);
void ToWire(const kvstore::CacheInfo& info, v1::CacheDescription* message);
void ToWire(const kvstore::PageCounts& counts, v1::PageStats* message);
void ToWire(const kvstore::Admission& admission, v1::AdmitResponse* message);
// Omits layers and segments when `brief`.
void ToWire(const kvstore::SequenceInfo& info, bool brief, v1::SequenceDescription* message);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_WIRE_WIRE_H_
