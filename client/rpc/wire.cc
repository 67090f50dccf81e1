#include "client/rpc/wire.h"

#include <algorithm>

#include "client/base/descriptor_words.h"
#include "proto/codec/index.h"

namespace pqcached::client {
namespace {

v1::LayerKind ToWire(pqc_layer_kind kind) {
  static_assert(static_cast<int>(v1::LAYER_KIND_SELECTED) == PQC_LAYERS_SELECTED &&
                static_cast<int>(v1::LAYER_KIND_FULL) == PQC_LAYERS_FULL &&
                static_cast<int>(v1::LAYER_KIND_WINDOW) == PQC_LAYERS_WINDOW &&
                static_cast<int>(v1::LAYER_KIND_NONE) == PQC_LAYERS_NONE);
  return static_cast<v1::LayerKind>(kind);
}

v1::RopeDescription::Layout ToWire(pqc_rope_layout layout) {
  switch (layout) {
    case PQC_ROPE_NONE:
      return v1::RopeDescription::LAYOUT_NONE;
    case PQC_ROPE_HALF:
      return v1::RopeDescription::LAYOUT_HALF;
    case PQC_ROPE_INTERLEAVED:
      return v1::RopeDescription::LAYOUT_INTERLEAVED;
    case PQC_ROPE_UNKNOWN:
      break;
  }
  return v1::RopeDescription::LAYOUT_UNSPECIFIED;
}

}  // namespace

v1::DType ToWire(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return v1::DTYPE_FLOAT16;
    case DType::kBf16:
      return v1::DTYPE_BFLOAT16;
    case DType::kF32:
      break;
  }
  return v1::DTYPE_FLOAT32;
}

v1::RowPart ToWire(RowPart part) {
  switch (part) {
    case RowPart::kRow:
      break;
    case RowPart::kKey:
      return v1::ROW_PART_KEY;
    case RowPart::kValue:
      return v1::ROW_PART_VALUE;
  }
  return v1::ROW_PART_ROW;
}

bool ToWire(const pqc_index& index, v1::IndexSpec* spec) {
  if (index.kind == PQC_INDEX_PQ) {
    spec->mutable_pq()->set_subspaces(index.subspaces);
    spec->mutable_pq()->set_bits(index.bits);
    spec->mutable_pq()->set_layout(
        static_cast<v1::PqIndex::Layout>(index.reserved[PQC_INDEX_LAYOUT]));
  } else if (index.kind == PQC_INDEX_FLAT) {
    spec->mutable_flat();
  } else if (HasDescriptorWords(index)) {
    codec::Encode(WordsDescriptorOf(index), spec);
  }
  return index.kind != PQC_INDEX_DEFAULT;
}

void ToWire(const pqc_layer_group& group, v1::LayerGroup* message) {
  message->set_kind(ToWire(group.kind));
  message->mutable_layers()->Add(group.layers, group.layers + group.layer_count);
  if (group.kind == PQC_LAYERS_NONE) return;
  message->set_kv_heads(group.kv_heads);
  message->set_query_heads(group.query_heads);
  message->set_key_dim(group.key_dim);
  message->set_value_dim(group.value_dim);
  message->set_dtype(ToWire(static_cast<DType>(group.dtype)));
  message->set_softmax_scale(group.softmax_scale);
  message->set_softcap(group.softcap);
  message->set_window_tokens(group.window_tokens);
  message->mutable_rope()->set_layout(ToWire(group.rope_layout));
  message->mutable_rope()->set_theta(group.rope_theta);
  message->mutable_rope()->set_rotary_dim(group.rotary_dim);
}

void ToWire(const QueryView& query, v1::Query* message) {
  message->set_sequence_id(query.sequence_id);
  message->set_layer(query.layer);
  message->set_query_position(query.query_position);
  ToWire(query.queries, 0, query.queries.shape[0], message->mutable_queries());
}

void WriteImage(const v1::Attachment& attachment, const ImageSink& sink) {
  if (!sink.write || attachment.image().empty()) return;
  sink.write(sink.context, attachment.version(),
             reinterpret_cast<const std::byte*>(attachment.image().data()),
             attachment.image().size());
}

void ToWire(const TensorView& tensor, uint64_t begin, uint64_t end, v1::Tensor* message) {
  message->set_dtype(ToWire(tensor.dtype));
  message->clear_shape();
  message->add_shape(end - begin);
  for (uint32_t dim = 1; dim < tensor.ndim; ++dim) message->add_shape(tensor.shape[dim]);
  if (tensor.staging) {
    v1::StagingReference* reference = message->mutable_staging();
    reference->set_slot(tensor.staging->slot);
    reference->set_offset_bytes(tensor.staging->offset_bytes);
    reference->set_size_bytes(tensor.staging->size_bytes);
    reference->set_generation(tensor.staging->generation);
    return;
  }
  std::string* bytes = message->mutable_inline_data();
  bytes->resize((end - begin) * BytesPerIndex(tensor));
  Pack(tensor, begin, end, reinterpret_cast<std::byte*>(bytes->data()));
}

void ToWire(const RowBlock& rows, v1::LayerRows* message) {
  message->set_layer(rows.layer);
  ToWire(rows.keys, 0, rows.keys.shape[0], message->mutable_keys());
  ToWire(rows.values, 0, rows.values.shape[0], message->mutable_values());
}

void ToWire(const pqc_row_options& names, v1::TokenNames* message) {
  message->set_begin(names.names_begin);
  message->mutable_token_ids()->Add(names.token_ids, names.token_ids + names.token_id_count);
  if (names.content_key_count == 0) return;
  message->set_content_keys(names.content_keys, names.content_key_count * sizeof(pqc_content_key));
}

bool IsTensorOf(const v1::Tensor& tensor, uint64_t data_bytes, DType dtype,
                std::initializer_list<uint64_t> shape, std::string* reason) {
  uint64_t bytes = kernels::DTypeBytes(dtype);
  for (const uint64_t size : shape) bytes *= size;
  if (tensor.dtype() != ToWire(dtype)) {
    *reason = "dtype " + std::to_string(tensor.dtype());
  } else if (!std::equal(shape.begin(), shape.end(), tensor.shape().begin(),
                         tensor.shape().end())) {
    *reason = "another shape";
  } else if (tensor.strides_size() > 0) {
    *reason = "strides";
  } else if (data_bytes != bytes) {
    *reason = std::to_string(data_bytes) + " bytes";
  } else {
    return true;
  }
  return false;
}

const std::byte* TensorBytes(const v1::Tensor& tensor, DType dtype,
                             std::initializer_list<uint64_t> shape, std::string* reason) {
  if (!IsTensorOf(tensor, tensor.inline_data().size(), dtype, shape, reason)) return nullptr;
  return reinterpret_cast<const std::byte*>(tensor.inline_data().data());
}

}  // namespace pqcached::client
