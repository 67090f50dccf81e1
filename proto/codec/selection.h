// Converts selections between their protobuf messages and the values that client and sidecar
// share. Both directions of a field stand in one file.
//
// Refusals name the field of the message. Pure; thread-safe.
#ifndef PQCACHED_PROTO_CODEC_SELECTION_H_
#define PQCACHED_PROTO_CODEC_SELECTION_H_

#include <cstdint>
#include <string>

#include "kvstore/read/refusal.h"
#include "kvstore/read/select/token_pages.h"
#include "kvstore/read/selection.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "pqcached/v1/types.pb.h"

namespace pqcached::codec {

void Encode(const kvstore::Selection& selection, v1::Selection* message);

// Decodes a selection, except for its index, which the caller may replace by a default. `field`:
// path of the message in the request.
//
// Errors: kInvalidArgument (a field and its limit), kUnimplemented (a field of later versions)
kvstore::Refusal Decode(const v1::Selection& message, const std::string& field,
                        kvstore::Selection* selection);

void Encode(const kvstore::PageTerms& terms, v1::PageTerms* message);
// Decodes the terms of a selection of pages.
//
// Errors: kInvalidArgument (a field and its limit)
kvstore::Refusal Decode(const v1::PageTerms& message, const std::string& field,
                        kvstore::PageTerms* terms);

// Decodes a number of tokens or a position.
//
// Errors: kInvalidArgument  it is larger than the largest position
kvstore::Refusal DecodeTokens(uint64_t tokens, const std::string& field, uint32_t* decoded);

}  // namespace pqcached::codec

#endif  // PQCACHED_PROTO_CODEC_SELECTION_H_
