// Row tables of decode calls: the rows of a step, and those of earlier steps that are not stored.
#include <algorithm>
#include <cstddef>

#include "client/base/error.h"
#include "client/base/pack.h"
#include "client/step/decode.h"
#include "client/step/sender.h"
#include "kernels/base/check.h"
#include "kernels/base/exec.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/ingest.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

// A step that is reused keeps at most this much memory in each of its large buffers.
constexpr size_t kMaxBufferBytes = size_t{64} << 20;

// A row table, and where in it rows are written.
struct TableTarget {
  std::byte* table = nullptr;
  uint64_t token_count = 0;  // of the table
  uint64_t token = 0;        // the first one that is written
};

kernels::StridedTensor HeadOf(const TensorView& tensor, const std::byte* data) {
  const auto bytes = static_cast<ptrdiff_t>(kernels::DTypeBytes(tensor.dtype));
  return {.data = data,
          .dtype = tensor.dtype,
          .token_stride_bytes = tensor.strides[0] * bytes,
          .element_stride_bytes = tensor.strides[2] * bytes};
}

ptrdiff_t HeadStrideBytes(const TensorView& tensor) {
  return tensor.strides[1] * static_cast<ptrdiff_t>(kernels::DTypeBytes(tensor.dtype));
}

// Writes the rows of tokens [begin, end) to a table. When an element is not finite in the layer's
// dtype, sets *bad_token to its token.
kernels::IngestPart WriteRows(const RowBlock& from, uint64_t begin, uint64_t end,
                              const LayerShape& shape, TableTarget to,
                              std::vector<std::byte*>* heads, uint64_t* bad_token) {
  heads->resize(shape.kv_heads);
  while (begin < end) {
    const PackRun keys = RunAt(from.keys, begin, end);
    const PackRun values = RunAt(from.values, begin, begin + keys.count);
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      (*heads)[head] = to.table + (head * to.token_count + to.token) * shape.row_bytes;
    }
    const kernels::IngestResult written = kernels::IngestHeads(
        kernels::Exec{}, {.token_count = static_cast<uint32_t>(values.count),
                          .key_dim = shape.key_dim,
                          .value_dim = shape.value_dim,
                          .key = HeadOf(from.keys, keys.data),
                          .key_head_stride_bytes = HeadStrideBytes(from.keys),
                          .value = HeadOf(from.values, values.data),
                          .value_head_stride_bytes = HeadStrideBytes(from.values),
                          .row_dtype = shape.dtype,
                          .row_stride_bytes = shape.row_bytes,
                          .rows = *heads});
    if (!written.ok()) {
      *bad_token = begin + written.bad_token;
      return written.bad_part;
    }
    begin += values.count;
    to.token += values.count;
  }
  return kernels::IngestPart::kNone;
}

// The sender's queued handovers of one sequence, held until the destruction.
class HeldQueue {
 public:
  HeldQueue(Sender& sender, std::vector<std::shared_ptr<Handover>>& queued)
      : sender_(sender), queued_(queued) {}
  ~HeldQueue() {
    for (std::shared_ptr<Handover>& handover : queued_) sender_.ReturnHandover(std::move(handover));
    queued_.clear();
  }
  HeldQueue(const HeldQueue&) = delete;
  HeldQueue& operator=(const HeldQueue&) = delete;

 private:
  Sender& sender_;
  std::vector<std::shared_ptr<Handover>>& queued_;
};

// Copies the rows of tokens [begin, end) of a handover to the tables of an item that begin with
// `tokens.begin`.
pqc_status CopyHandover(pqc_step& step, const Handover& handover,
                        const DecodeState::Unstored& tokens, const StepItem& item, uint64_t begin,
                        uint64_t end) {
  DecodeState& state = step.decode;
  state.blocks.resize(handover.layers.size());
  handover.Describe({}, state.blocks);
  const uint64_t token_count = item.query_position - tokens.begin;
  size_t table = tokens.tables_begin;
  for (const auto& [number, shape] : step.cache->stored_layers) {
    const auto block =
        std::find_if(state.blocks.begin(), state.blocks.end(),
                     [number = number](const RowBlock& rows) { return rows.layer == number; });
    PQC_CHECK(block != state.blocks.end());
    uint64_t bad_token = 0;
    const auto bad =
        WriteRows(*block, begin - handover.first_position, end - handover.first_position, shape,
                  {state.unstored_rows.data() + table, token_count, begin - tokens.begin},
                  &state.heads, &bad_token);
    if (bad != kernels::IngestPart::kNone) {
      return Fail(PQC_INVALID_ARGUMENT, "",
                  "rows of an earlier step: NaN or infinity in layer %u at position %llu", number,
                  LongLong{handover.first_position + bad_token});
    }
    table += token_count * shape.kv_heads * shape.row_bytes;
  }
  return PQC_OK;
}

// Copies the queued rows of one item, of positions from `floor` on. The rows of a step replace the
// tokens of earlier handovers from its first position on; those of a prefill may repeat rows of
// earlier ones.
pqc_status CopyItem(pqc_step& step, const StepItem& item, uint64_t floor,
                    DecodeState::Unstored* tokens) {
  DecodeState& state = step.decode;
  Sender& sender = *step.client->sender;
  const HeldQueue held(sender, state.queued);
  RETURN_IF_ERROR(sender.Hold(*item.sequence, &state.queued));
  tokens->begin = item.query_position;
  for (const auto& handover : state.queued) {
    tokens->begin = std::min(tokens->begin, handover->first_position);
  }
  tokens->begin = std::max(tokens->begin, std::min(floor, item.query_position));
  tokens->tables_begin = state.unstored_rows.size();
  uint64_t bytes = 0;
  for (const auto& [number, shape] : step.cache->stored_layers) {
    bytes += (item.query_position - tokens->begin) * shape.kv_heads * shape.row_bytes;
  }
  state.unstored_rows.resize(tokens->tables_begin + bytes);
  uint64_t known = state.queued.empty() ? tokens->begin : state.queued.front()->first_position;
  for (const auto& handover : state.queued) {
    const uint64_t begin = handover->first_position;
    const uint64_t end = begin + handover->token_count;
    if (begin > known) break;
    known = handover->is_prefill ? std::max(known, end) : end;
    const uint64_t needed_begin = std::max(begin, tokens->begin);
    const uint64_t needed_end = std::min(end, item.query_position);
    if (needed_begin < needed_end) {
      RETURN_IF_ERROR(CopyHandover(step, *handover, *tokens, item, needed_begin, needed_end));
    }
  }
  if (known >= item.query_position) return PQC_OK;
  return Fail(PQC_INTERNAL, "", "the queue lacks the rows of position %llu", LongLong{known});
}

template <class Element>
void TrimAndClear(std::vector<Element>* buffer) {
  buffer->clear();
  if (buffer->capacity() * sizeof(Element) > kMaxBufferBytes) *buffer = {};
}

}  // namespace

void DecodeState::Clear() {
  layers.clear();
  has_unstored = false;
  TrimAndClear(&rows);
  TrimAndClear(&unstored_rows);
  TrimAndClear(&output);
}

const DecodeState::Layer* DecodeState::Find(uint32_t layer) const {
  const auto found = std::find_if(layers.begin(), layers.end(),
                                  [layer](const Layer& known) { return known.number == layer; });
  return found == layers.end() ? nullptr : &*found;
}

pqc_status CopyUnstored(pqc_step* step) {
  DecodeState& state = step->decode;
  if (state.has_unstored) return PQC_OK;
  state.unstored.assign(step->items.size(), {});
  state.unstored_rows.clear();
  for (size_t i = 0; i < step->items.size(); ++i) {
    const pqc_status status = CopyUnstoredOf(*step, i, 0);
    if (status != PQC_OK) return PrefixItem(i, status);
  }
  state.has_unstored = true;
  return PQC_OK;
}

pqc_status CopyUnstoredOf(pqc_step& step, size_t number, uint64_t floor) {
  return CopyItem(step, step.items[number], floor, &step.decode.unstored[number]);
}

pqc_status KeepRows(pqc_step* step, const RowBlock& rows, const LayerShape& shape) {
  DecodeState& state = step->decode;
  const size_t begin = state.rows.size();
  state.rows.resize(begin + step->query_tokens * shape.kv_heads * shape.row_bytes);
  uint64_t bad_token = 0;
  const kernels::IngestPart bad =
      WriteRows(rows, 0, step->query_tokens, shape,
                {state.rows.data() + begin, step->query_tokens, 0}, &state.heads, &bad_token);
  if (bad == kernels::IngestPart::kNone) {
    state.layers.push_back({rows.layer, begin});
    return PQC_OK;
  }
  state.rows.resize(begin);
  return Fail(PQC_INVALID_ARGUMENT, bad == kernels::IngestPart::kKey ? "keys" : "values",
              "NaN or infinity in query token %llu, in the dtype of the cache",
              LongLong{bad_token});
}

}  // namespace pqcached::client
