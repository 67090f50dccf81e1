#include "client/local/layer_source.h"

#include "client/base/error.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::client {
namespace {

// Returns the thread's last refusal as a value. `field` is the name of the refused field.
kvstore::Refusal RefusalOf(pqc_status status, const char* field) {
  return {.code = static_cast<kvstore::StatusCode>(status),
          .field = field,
          .text = LastRefusal().text,
          .retry_ms = LastRefusal().retry_ms};
}

}  // namespace

pqc_status PinNewest(LocalSequence& sequence, Pinned* pinned) {
  pinned->sequence = &sequence;
  return sequence.Pin(&pinned->image, &pinned->lease_epoch);
}

bool TryPinNewest(LocalSequence& sequence, Pinned* pinned) {
  pinned->sequence = &sequence;
  return sequence.TryPin(&pinned->image, &pinned->lease_epoch);
}

kvstore::Refusal OpenLayer(const Pinned& pinned, const kvstore::LayerShape& shape,
                           const kvstore::LayerRequest& request, OpenedLayer* opened) {
  RETURN_IF_ERROR(kvstore::CheckIndex(request.index, shape.key_dim, request.index_field));
  RETURN_IF_ERROR(kvstore::CheckKind(shape.kind, request));
  uint32_t index_slot = 0;
  if (const pqc_status status = pinned.image->FindIndex(request.index, &index_slot);
      status != PQC_OK) {
    return RefusalOf(status, request.index_field);
  }
  opened->loan = Image::Loan();
  if (const pqc_status status =
          pinned.image->Borrow(request.layer, shape, index_slot, &opened->loan);
      status != PQC_OK) {
    return RefusalOf(status, "");
  }
  opened->view =
      opened->loan.layer().View(pinned.sequence->VisibleTokens(*pinned.image, request.layer));
  return {};
}

kvstore::Refusal ImageSource::Open(const kvstore::LayerRequest& request, kvstore::LayerView* view) {
  RETURN_IF_ERROR(OpenLayer(pinned_, shape_, request, &opened_));
  *view = opened_.view;
  return {};
}

}  // namespace pqcached::client
