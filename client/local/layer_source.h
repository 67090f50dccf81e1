// Gives the layers of a sequence in mapped memory to readers.
//
// Thread-compatible. A caller must call LocalSequence::Check before it uses what it has read.
#ifndef PQCACHED_CLIENT_LOCAL_LAYER_SOURCE_H_
#define PQCACHED_CLIENT_LOCAL_LAYER_SOURCE_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "client/local/image.h"
#include "client/local/sequence.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/reader.h"

namespace pqcached::client {

// An image of a sequence, held during a read.
struct Pinned {
  LocalSequence* sequence = nullptr;
  std::shared_ptr<Image> image;
  uint64_t lease_epoch = 0;  // of the sequence when the image was pinned
};
pqc_status PinNewest(LocalSequence& sequence, Pinned* pinned);
// Like PinNewest, but without waiting: returns false when there is no image that may be read.
bool TryPinNewest(LocalSequence& sequence, Pinned* pinned);

struct OpenedLayer {
  Image::Loan loan;         // owns the memory that `view` borrows
  kvstore::LayerView view;  // one query token
};

// Opens the visible rows of a layer of this shape and an index over them.
//
// Errors: kInvalidArgument (index), kFailedPrecondition (the sequence lacks it), kInternal
kvstore::Refusal OpenLayer(const Pinned& pinned, const kvstore::LayerShape& shape,
                           const kvstore::LayerRequest& request, OpenedLayer* opened);

// The layers of one shape in a pinned image.
class ImageSource final : public kvstore::LayerSource {
 public:
  ImageSource(const Pinned& pinned, const kvstore::LayerShape& shape)
      : pinned_(pinned), shape_(shape) {}

  kvstore::LayerKind KindOf(uint32_t) const override { return shape_.kind; }
  kvstore::Refusal Open(const kvstore::LayerRequest& request, kvstore::LayerView* view) override;
  std::optional<kvstore::IndexDescriptor> FindIndex(kvstore::IndexKind kind) const override {
    return pinned_.image->FindIndexOf(kind);
  }

 private:
  const Pinned& pinned_;
  const kvstore::LayerShape& shape_;
  OpenedLayer opened_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_LAYER_SOURCE_H_
