// Pages of a page cache that pass through the staging ring instead of gRPC messages.
#ifndef PQCACHED_CLIENT_LOCAL_PAGE_TRANSFER_H_
#define PQCACHED_CLIENT_LOCAL_PAGE_TRANSFER_H_

#include <cstdint>
#include <span>

#include "client/base/remote.h"
#include "client/local/staging.h"
#include "pqcached/client.h"

namespace pqcached::client {

struct PageTransfer {
  Staging& staging;
  Remote& remote;
  uint64_t cache_id = 0;
  uint32_t timeout_ms = 0;  // timeout of the wait for a slot
};

// Store or read the first items, as many as fit into one slot and one call, and set their outputs.
// They return the number of these items; 0 when the first item should be passed in a message: there
// is little to copy, no slot, or the call has failed. Then the items are as before, and a
// repetition without staging succeeds or returns the reason.
uint32_t PutThroughStaging(const PageTransfer& transfer, std::span<PutPageItem> items);
uint32_t GetThroughStaging(const PageTransfer& transfer, std::span<GetPageItem> items);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_PAGE_TRANSFER_H_
