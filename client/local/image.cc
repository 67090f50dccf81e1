#include "client/local/image.h"

#include <algorithm>
#include <string>

#include "client/base/error.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/reader.h"

namespace pqcached::client {

Image::Image(kvstore::Attachment attachment, std::shared_ptr<Mapping> pool)
    : attachment_(std::move(attachment)),
      pool_(std::move(pool)),
      known_tokens_(attachment_.header.token_count) {
  if (attachment_.segments.empty()) return;
  const kvstore::SegmentDescriptor& last = attachment_.segments.back();
  capacity_tokens_ =
      last.token_end != 0 ? last.token_end : last.first_position + last.slot_capacity;
}

pqc_status Image::Parse(std::span<const std::byte> bytes, uint64_t sequence_id,
                        std::shared_ptr<Mapping> pool, std::shared_ptr<Image>* image) {
  kvstore::Attachment attachment;
  const std::string wrong = kvstore::ParseAttachment(bytes, pool->size_bytes(), &attachment);
  if (!wrong.empty()) return Fail(PQC_INTERNAL, "", "attachment: %s", wrong.c_str());
  if (attachment.header.sequence_id != sequence_id) {
    return Fail(PQC_INTERNAL, "", "attachment: it is for sequence %llu, not %llu",
                static_cast<unsigned long long>(attachment.header.sequence_id),
                static_cast<unsigned long long>(sequence_id));
  }
  image->reset(new Image(std::move(attachment), std::move(pool)));
  return PQC_OK;
}

uint32_t Image::LayerTokens(uint32_t layer) const {
  // Every segment names the same layers in the same order.
  for (size_t i = 0; i < attachment_.layer_tokens.size() && i < attachment_.layers.size(); ++i) {
    if (attachment_.layers[i].layer == layer) return attachment_.layer_tokens[i];
  }
  return 0;
}

pqc_status Image::FindIndex(const kvstore::IndexDescriptor& index, uint32_t* index_slot) const {
  *index_slot = kvstore::kMaxIndexes;
  if (!kvstore::IsBuilt(index)) return PQC_OK;  // that of a plug-in needs no codes here either
  for (uint32_t slot = 0; slot < attachment_.header.index_count; ++slot) {
    if (attachment_.header.indexes[slot] == index) {
      *index_slot = slot;
      return PQC_OK;
    }
  }
  return Fail(PQC_FAILED_PRECONDITION, "", "the sequence has no index %s: build it",
              kvstore::NameOf(index).c_str());
}

std::optional<kvstore::IndexDescriptor> Image::FindIndexOf(kvstore::IndexKind kind) const {
  const kvstore::AttachmentHeader& header = attachment_.header;
  for (uint32_t slot = 0; slot < header.index_count; ++slot) {
    if (header.indexes[slot].kind == kind) return header.indexes[slot];
  }
  return std::nullopt;
}

uint32_t Image::CodedTokens(uint32_t layer, uint32_t index_slot) const {
  if (index_slot >= kvstore::kMaxIndexes) return capacity_tokens_;
  const size_t layer_count = attachment_.layer_tokens.size();
  size_t ordinal = 0;
  while (ordinal < layer_count && ordinal < attachment_.layers.size() &&
         attachment_.layers[ordinal].layer != layer) {
    ++ordinal;
  }
  for (size_t i = 0; i < attachment_.segments.size() && ordinal < layer_count; ++i) {
    const kvstore::LayerDescriptor& descriptor = attachment_.layers[i * layer_count + ordinal];
    if (descriptor.state[index_slot] != kvstore::LayerState::kReady) {
      return attachment_.segments[i].first_position;
    }
  }
  return capacity_tokens_;
}

pqc_status Image::Borrow(uint32_t layer, const kvstore::LayerShape& shape, uint32_t index_slot,
                         Loan* loan) {
  Loan borrowed;
  borrowed.key_ = uint64_t{layer} * (kvstore::kMaxIndexes + 1) + index_slot;
  {
    const base::MutexLock lock(&mutex_);
    auto& idle = idle_[borrowed.key_];
    if (!idle.empty()) {
      borrowed.layer_ = std::move(idle.back());
      idle.pop_back();
    }
  }
  if (!borrowed.layer_) {
    borrowed.layer_ = std::make_unique<kvstore::MappedLayer>();
    const std::string wrong = kvstore::MappedLayer::Make(attachment_, layer, shape, index_slot,
                                                         pool_->data(), borrowed.layer_.get());
    if (!wrong.empty()) {
      return Fail(PQC_INTERNAL, "", "attachment: layer %u: %s", layer, wrong.c_str());
    }
  }
  borrowed.image_ = this;
  *loan = std::move(borrowed);
  return PQC_OK;
}

Image::Loan& Image::Loan::operator=(Loan&& other) noexcept {
  std::swap(image_, other.image_);
  std::swap(key_, other.key_);
  std::swap(layer_, other.layer_);
  return *this;
}

Image::Loan::~Loan() {
  if (!image_ || !layer_) return;
  const base::MutexLock lock(&image_->mutex_);
  image_->idle_[key_].push_back(std::move(layer_));
}

}  // namespace pqcached::client
