// Converts indexes, and the descriptions of index types, between protobuf messages and values.
//
// Refusals name the field of the message. Pure; thread-safe.
#ifndef PQCACHED_PROTO_CODEC_INDEX_H_
#define PQCACHED_PROTO_CODEC_INDEX_H_

#include <string>

#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/refusal.h"
#include "pqcached/v1/admin.pb.h"
#include "pqcached/v1/types.pb.h"

namespace pqcached::codec {

void Encode(const kvstore::IndexDescriptor& index, v1::IndexSpec* message);
// Decodes an index. Of a typed index, all parameters are checked against their descriptions; of pq
// and flat, CheckIndex does it. `field`: path of the message in the request.
//
// Errors: kInvalidArgument (no such type or parameter; a value and its limit)
kvstore::Refusal Decode(const v1::IndexSpec& message, const std::string& field,
                        kvstore::IndexDescriptor* index);

// Decodes an index of a plug-in, whose description the reader need not have; false for any other.
bool DecodePlugin(const v1::IndexSpec& message, kvstore::IndexDescriptor* index);

void Encode(const kvstore::IndexType& type, v1::IndexTypeDescription* message);

}  // namespace pqcached::codec

#endif  // PQCACHED_PROTO_CODEC_INDEX_H_
