#include "client/step/handover.h"

#include <utility>

#include "client/base/pack.h"
#include "client/local/staging.h"

namespace pqcached::client {
namespace {

// Alignment of one layer's keys and of its values, so that both sides copy whole cache lines.
constexpr uint64_t kPartAlignment = 64;
// A reused handover keeps at most this much memory of its own.
constexpr size_t kMaxKeptBytes = size_t{1} << 20;

uint64_t AlignPart(uint64_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

TensorView ViewOf(const std::byte* data, DType dtype, uint64_t tokens, uint32_t heads,
                  uint32_t dim) {
  return {.data = data,
          .dtype = dtype,
          .ndim = 3,
          .shape = {tokens, heads, dim},
          .strides = {static_cast<int64_t>(uint64_t{heads} * dim), dim, 1}};
}

}  // namespace

void Handover::CopyTokens(std::span<const RowBlock> blocks, const CacheState& cache, uint64_t begin,
                          StepSlots& slots) {
  layers.clear();
  row_bytes = 0;
  for (const RowBlock& block : blocks) {
    CopiedRows kept{.layer = block.layer,
                    .shape = cache.stored_layers.at(block.layer),
                    .key_dtype = block.keys.dtype,
                    .value_dtype = block.values.dtype,
                    .keys_begin = row_bytes};
    kept.values_begin = row_bytes + AlignPart(token_count * BytesPerIndex(block.keys));
    row_bytes = kept.values_begin + AlignPart(token_count * BytesPerIndex(block.values));
    layers.push_back(kept);
  }
  staged = slots.Take(row_bytes);
  if (!staged.valid()) own.resize(row_bytes);
  const std::span<std::byte> memory = staged.valid() ? staged.bytes() : std::span(own);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto pack = [&](const TensorView& tensor, uint64_t at) {
      PackStreaming(tensor, begin, begin + token_count,
                    memory.subspan(at, token_count * BytesPerIndex(tensor)));
    };
    pack(blocks[i].keys, layers[i].keys_begin);
    pack(blocks[i].values, layers[i].values_begin);
  }
}

void Handover::Describe(std::span<SentRows> places, std::span<RowBlock> blocks) const {
  const std::byte* memory = staged.valid() ? staged.bytes().data() : own.data();
  for (size_t i = 0; i < layers.size(); ++i) {
    const CopiedRows& kept = layers[i];
    RowBlock& block = blocks[i];
    block = {.layer = kept.layer,
             .keys = ViewOf(memory + kept.keys_begin, kept.key_dtype, token_count,
                            kept.shape.kv_heads, kept.shape.key_dim),
             .values = ViewOf(memory + kept.values_begin, kept.value_dtype, token_count,
                              kept.shape.kv_heads, kept.shape.value_dim)};
    if (places.empty()) continue;
    const auto place = [&](TensorView& tensor, uint64_t at, StagingPlace& to) {
      to = staged.Place(at, token_count * BytesPerIndex(tensor));
      tensor.staging = &to;
    };
    place(block.keys, kept.keys_begin, places[i].keys);
    place(block.values, kept.values_begin, places[i].values);
  }
}

void Handover::Clear() {
  sequence.reset();
  roll_back_to = kNoRollBack;
  first_position = token_count = row_bytes = 0;
  is_prefill = false;
  layers.clear();
  staged = {};
  names.Clear();
  if (own.capacity() > kMaxKeptBytes) own = {};
}

void HandoverQueue::Push(std::shared_ptr<Handover> handover) {
  Handover* const pushed = handover.get();
  (last_ ? last_->next : first_) = std::move(handover);
  last_ = pushed;
}

std::shared_ptr<Handover> HandoverQueue::Pop() {
  std::shared_ptr<Handover> popped = std::move(first_);
  first_ = std::move(popped->next);
  if (!first_) last_ = nullptr;
  return popped;
}

}  // namespace pqcached::client
