// Names of tokens that callers pass with rows (pqc_row_options).
#ifndef PQCACHED_CLIENT_BASE_TOKEN_NAMES_H_
#define PQCACHED_CLIENT_BASE_TOKEN_NAMES_H_

#include <cstdint>
#include <vector>

#include "pqcached/client.h"

namespace pqcached::client {

inline bool HasNames(const pqc_row_options& names) {
  return names.token_id_count > 0 || names.content_key_count > 0;
}

// Largest numbers of names in one call.
struct NameLimits {
  uint64_t token_ids = uint64_t{1} << 22;
  uint64_t content_keys = uint64_t{1} << 15;
};
inline constexpr NameLimits kStepNames = {.token_ids = uint64_t{1} << 16,
                                          .content_keys = uint64_t{1} << 9};

// Reads and checks options; null gives empty ones. Error texts put `name` before the fields' names.
// The result refers to the caller's memory.
pqc_status ReadRowOptions(const void* from, const char* name, const NameLimits& limits,
                          pqc_row_options* to);

// A copy of names, whose memory is reused.
class OwnedNames {
 public:
  // Copies the names of tokens below `end`.
  void Assign(const pqc_row_options& names, uint64_t end = UINT64_MAX);
  void Clear();

  bool empty() const { return token_ids_.empty() && content_keys_.empty(); }
  uint64_t size_bytes() const {
    return token_ids_.size() * sizeof(uint32_t) + content_keys_.size() * sizeof(pqc_content_key);
  }
  // Returns a view, which is valid until the next change.
  pqc_row_options view() const;

 private:
  uint64_t begin_ = 0;
  std::vector<uint32_t> token_ids_;
  std::vector<pqc_content_key> content_keys_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_TOKEN_NAMES_H_
