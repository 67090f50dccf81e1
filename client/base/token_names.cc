#include "client/base/token_names.h"

#include <algorithm>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/layout.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

// A copy of names keeps at most this much memory for reuse.
constexpr size_t kMaxKeptNames = 4096;

pqc_status CheckCount(const char* name, const char* field, uint64_t count, uint64_t limit) {
  if (count <= limit) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.%s", name, field),
              "%llu, must be at most %llu", LongLong{count}, LongLong{limit});
}

}  // namespace

pqc_status ReadRowOptions(const void* from, const char* name, const NameLimits& limits,
                          pqc_row_options* to) {
  *to = PQC_INIT(pqc_row_options);
  if (!from) return PQC_OK;
  RETURN_IF_ERROR(ReadStruct(static_cast<const pqc_row_options*>(from), name, to));
  RETURN_IF_ERROR(CheckCount(name, "token_id_count", to->token_id_count, limits.token_ids));
  RETURN_IF_ERROR(
      CheckCount(name, "content_key_count", to->content_key_count, limits.content_keys));
  if (to->token_id_count && !to->token_ids) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.token_ids", name), "must not be NULL");
  }
  if (to->content_key_count && !to->content_keys) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.content_keys", name), "must not be NULL");
  }
  if (to->token_id_count && to->content_key_count) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.content_keys", name),
                "token_ids are given, too; all names are of one kind");
  }
  const uint64_t tokens = to->token_id_count + to->content_key_count * kvstore::kBlockTokens;
  if (tokens && to->names_begin > kvstore::kMaxSequenceTokens - tokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.names_begin", name),
                "%llu and %llu tokens, but a sequence has at most 2^30", LongLong{to->names_begin},
                LongLong{tokens});
  }
  if (to->content_key_count && to->names_begin % kvstore::kBlockTokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.names_begin", name),
                "%llu, must be a multiple of %u for content_keys", LongLong{to->names_begin},
                kvstore::kBlockTokens);
  }
  return PQC_OK;
}

void OwnedNames::Assign(const pqc_row_options& names, uint64_t end) {
  Clear();
  begin_ = names.names_begin;
  const uint64_t tokens = end > begin_ ? end - begin_ : 0;
  const uint64_t ids = std::min(names.token_id_count, tokens);
  const uint64_t keys = std::min(names.content_key_count, tokens / kvstore::kBlockTokens);
  if (ids) token_ids_.assign(names.token_ids, names.token_ids + ids);
  if (keys) content_keys_.assign(names.content_keys, names.content_keys + keys);
}

void OwnedNames::Clear() {
  begin_ = 0;
  token_ids_.clear();
  content_keys_.clear();
  if (token_ids_.capacity() > kMaxKeptNames) token_ids_ = {};
  if (content_keys_.capacity() > kMaxKeptNames) content_keys_ = {};
}

pqc_row_options OwnedNames::view() const {
  pqc_row_options names = PQC_INIT(pqc_row_options);
  names.names_begin = begin_;
  names.token_ids = token_ids_.data();
  names.token_id_count = token_ids_.size();
  names.content_keys = content_keys_.data();
  names.content_key_count = content_keys_.size();
  return names;
}

}  // namespace pqcached::client
