// Attachment: the location of every byte of one sequence, as sent to a client that attaches.
//
// The encoded attachment (the client's segment map) is the answer of Attach, and of later calls
// when its version is newer:
//   AttachmentHeader, uint32_t layer_tokens[layer_count] (padded to 8 bytes),
//   SegmentDescriptor[segment_count], LayerDescriptor[segment_count][layer_count],
//   ExtentRef[row_extent_count]
// Segments ascend without a gap from position 0; layers ascend and are the same in each segment. A
// layer of the active segment is READY when all its visible rows have codes, and stays READY while
// the segment grows. A lease keeps every extent that an attachment names in place until the client
// acknowledges a newer version or the lease ends.
#ifndef PQCACHED_KVSTORE_READ_ATTACHMENT_H_
#define PQCACHED_KVSTORE_READ_ATTACHMENT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvstore/read/layer_view.h"
#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

struct AttachmentHeader {
  static constexpr uint32_t kMagic = 0x54544150;  // "PATT"
  uint32_t magic = kMagic;
  uint32_t layout_version = kLayoutVersion;
  uint64_t sequence_id = 0;
  uint64_t version = 0;
  uint32_t token_count = 0;  // number of tokens that are complete in all stored layers
  uint32_t layer_count = 0;
  uint32_t segment_count = 0;
  uint32_t row_extent_count = 0;
  uint32_t index_count = 0;
  uint32_t reserved = 0;
  IndexDescriptor indexes[kMaxIndexes];
};
static_assert(sizeof(AttachmentHeader) == 112);

// A decoded and checked attachment. Plain values.
struct Attachment {
  AttachmentHeader header;
  std::vector<uint32_t> layer_tokens;  // [layer_count]
  std::vector<SegmentDescriptor> segments;
  std::vector<LayerDescriptor> layers;  // [segment_count, layer_count]
  std::vector<ExtentRef> row_extents;
};

// Returns the encoded form of an attachment, laid out as described above.
std::vector<std::byte> EncodeAttachment(const Attachment& attachment);

// Checks every size, offset and order against the limits of layout.h and `pool_bytes`, so that
// every extent that the image names lies inside the pool. Returns "" and fills *attachment, or
// returns the name of the invalid field.
std::string ParseAttachment(std::span<const std::byte> image, size_t pool_bytes,
                            Attachment* attachment);

// Views of one layer's segments in mapped memory. Owns the arrays that a LayerView borrows.
//
// Thread-compatible. Built once per attachment, not per step.
class MappedLayer {
 public:
  MappedLayer() = default;
  MappedLayer(MappedLayer&&) = default;
  MappedLayer& operator=(MappedLayer&&) = default;

  // Makes the views of `layer`. `index_slot` is an index into attachment.header.indexes, or
  // kMaxIndexes when only rows are needed. Checks the headers of index data and codebooks in the
  // pool against the descriptors, because views are read without further checks. Returns "" or the
  // reason of the failure.
  //
  // REQUIRES: `pool` is mapped for as long as views are used; attachment came from ParseAttachment.
  static std::string Make(const Attachment& attachment, uint32_t layer, const LayerShape& shape,
                          uint32_t index_slot, const std::byte* pool, MappedLayer* mapped);

  // Returns a view of the first `token_count` tokens (the caller reads this count from LeaseWords),
  // cut at the last slot that the attachment names. Valid until the next call. Segments without the
  // index have only rows.
  LayerView View(uint32_t token_count);
  // Returns true when every segment has this index (always for flat); false for kMaxIndexes.
  bool ready() const { return ready_; }

 private:
  LayerShape shape_;
  bool ready_ = false;
  std::vector<const std::byte*> rows_;  // [segments, kv_heads]
  std::vector<SegmentView> full_;       // segments with all their tokens
  std::vector<SegmentView> shown_;      // segments of the last View
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_ATTACHMENT_H_
