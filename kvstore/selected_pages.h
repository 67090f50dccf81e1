// SelectedPages is the result of a selection of pages (read/token_pages.h).
#ifndef PQCACHED_KVSTORE_SELECTED_PAGES_H_
#define PQCACHED_KVSTORE_SELECTED_PAGES_H_

#include <cstdint>
#include <vector>

#include "kvstore/read/select/token_pages.h"

namespace pqcached::kvstore {

struct SelectedPages {
  uint32_t kv_heads = 0;
  uint32_t list_count = 0;     // kv_heads, or 1
  uint32_t length = 0;         // pages of each list
  std::vector<int32_t> pages;  // [list_count, length], ascending per list
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SELECTED_PAGES_H_
