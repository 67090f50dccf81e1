// RpcRemote: selects pages.
#include <algorithm>
#include <string>

#include "client/rpc/refusal.h"
#include "client/rpc/rpc_remote.h"
#include "client/rpc/wire.h"
#include "kernels/base/status_macros.h"
#include "proto/codec/selection.h"

namespace pqcached::client {
namespace {

grpc::Status CopyPages(const v1::Selected& selected, const TopPagesItem& item) {
  if (!selected.has_pages()) {
    return Refuse(grpc::StatusCode::UNIMPLEMENTED, "pages", "the sidecar is older than this call");
  }
  const v1::PageLists& lists = selected.pages();
  const uint32_t list_count = kvstore::ListCount(item.terms, item.query.shape.kv_heads);
  if (lists.list_count() != list_count || lists.length() != item.length ||
      static_cast<uint64_t>(lists.pages_size()) != uint64_t{list_count} * item.length) {
    return {grpc::StatusCode::INTERNAL,
            "the sidecar's answer is invalid: pages: " + std::to_string(lists.list_count()) +
                " lists of " + std::to_string(lists.length())};
  }
  for (uint32_t list = 0; list < list_count; ++list) {
    std::copy_n(lists.pages().begin() + static_cast<int>(list * item.length), item.length,
                item.out.lists + size_t{list} * item.out.capacity);
  }
  return grpc::Status::OK;
}

}  // namespace

grpc::Status RpcRemote::TopPagesPart(const TopPagesItem* items, uint32_t item_count,
                                     Deadline deadline) {
  v1::TopKRequest request;
  v1::TopKResponse response;
  for (uint32_t i = 0; i < item_count; ++i) {
    v1::TopKItem* item = request.add_items();
    ToWire(items[i].query, item->mutable_query());
    EncodeSelection(*items[i].selection, item->mutable_selection());
    codec::Encode(items[i].terms, item->mutable_pages());
  }
  RETURN_IF_ERROR(Attempt(Repeat::kHarmless, deadline, [&](const Context& context) {
    return Call(*kv_, &v1::KvCache::Stub::PrepareAsyncTopK, context, request, &response);
  }));
  if (static_cast<uint32_t>(response.items_size()) != item_count) {
    return {grpc::StatusCode::INTERNAL,
            "the sidecar's answer is invalid: items: must be one per item of the request"};
  }
  for (uint32_t i = 0; i < item_count; ++i) {
    RETURN_IF_ERROR(CopyPages(response.items(static_cast<int>(i)), items[i]));
  }
  return grpc::Status::OK;
}

pqc_status RpcRemote::TopPages(const TopPagesItem* items, uint32_t item_count,
                               RefusalBuffer* error) noexcept {
  return Finish("TopK", error, [&]() -> grpc::Status {
    const Deadline deadline = CallDeadline();
    for (uint32_t i = 0; i < item_count; i += kMaxBatchItems) {
      const grpc::Status status =
          TopPagesPart(items + i, std::min(kMaxBatchItems, item_count - i), deadline);
      RETURN_IF_ERROR(RenumberItem(status, [i](uint32_t item) { return i + item; }));
    }
    return grpc::Status::OK;
  });
}

}  // namespace pqcached::client
