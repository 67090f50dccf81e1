// ReceivedNames are the names of tokens in a request: checked before the rows of the same call are
// stored, and recorded after them, so that a failed call has changed nothing.
//
// Thread-compatible.
#ifndef PQCACHED_SERVICE_WIRE_TOKEN_NAMES_H_
#define PQCACHED_SERVICE_WIRE_TOKEN_NAMES_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "pqcached/v1/kv_cache.pb.h"

namespace pqcached::service {

// Returns the keys in `bytes`, 16 bytes each. Errors: kInvalidArgument naming content_keys.
absl::StatusOr<std::vector<kvstore::ContentKey>> ContentKeysOf(const std::string& bytes);

// Sequence whose tokens are named.
struct NamedSequence {
  kvstore::Store& store;
  const std::string& tenant;
  uint64_t sequence_id = 0;
};

class ReceivedNames {
 public:
  ReceivedNames() = default;  // no names
  // Errors: kInvalidArgument naming content_keys.
  static absl::StatusOr<ReceivedNames> Of(const v1::TokenNames& names);
  // `begin_field`: the path of `begin` in errors.
  ReceivedNames(uint64_t begin, std::string begin_field, std::vector<uint32_t> token_ids)
      : begin_(begin), begin_field_(std::move(begin_field)), token_ids_(std::move(token_ids)) {}

  bool empty() const { return token_ids_.empty() && content_keys_.empty(); }
  // Return the status of Store::CheckNames and NameTokens, with fields relative to the message.
  absl::Status Check(const NamedSequence& sequence) const;
  absl::Status Name(const NamedSequence& sequence) const;

 private:
  kvstore::TokenNames view() const { return {token_ids_, content_keys_}; }

  uint64_t begin_ = 0;
  std::string begin_field_ = "begin";
  std::vector<uint32_t> token_ids_;
  std::vector<kvstore::ContentKey> content_keys_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_WIRE_TOKEN_NAMES_H_
