#include "kvstore/read/image/parse.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "kernels/base/crc32c.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kHeaderCrcOffset = offsetof(ImageHeader, header_crc);
constexpr size_t kManifestCrcOffset = offsetof(ManifestHeader, crc);

Refusal BadImage(StatusCode code, std::string_view field, std::string_view text) {
  Refusal refusal;
  refusal.Set(code, field, text);
  return refusal;
}

// Refuses `value` when it is out of [least, most].
Refusal CheckImageNumber(std::string_view field, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return {};
  return BadImage(StatusCode::kInvalidArgument, field,
                  std::to_string(value) + ", must lie in [" + std::to_string(least) + ", " +
                      std::to_string(most) + "]");
}

Refusal CheckImageEqual(std::string_view field, uint64_t value, uint64_t wanted) {
  if (value == wanted) return {};
  return BadImage(StatusCode::kInvalidArgument, field,
                  std::to_string(value) + ", must be " + std::to_string(wanted));
}

Refusal CheckImageVersion(std::string_view field, uint32_t version, uint32_t least, uint32_t most) {
  if (version >= least && version <= most) return {};
  return BadImage(StatusCode::kUnimplemented, field,
                  std::to_string(version) + ", this version reads " + std::to_string(least) +
                      (least == most ? "" : " to " + std::to_string(most)));
}

Refusal CheckImageSize(uint64_t stated, uint64_t actual) {
  if (stated == actual) return {};
  return BadImage(StatusCode::kDataLoss, "file_bytes",
                  std::to_string(actual) + " are there, the header says " + std::to_string(stated));
}

Refusal CheckImageCrc(std::string_view field, uint32_t stated, uint32_t computed) {
  if (stated == computed) return {};
  return BadImage(StatusCode::kDataLoss, field, "the checksum differs from that of the bytes");
}

// Computes the CRC32C with zeros in place of `count` words at `offset`.
uint32_t CrcWithout(const kernels::Exec& exec, std::span<const std::byte> bytes, size_t offset,
                    size_t count) {
  constexpr std::byte kZeros[2 * sizeof(uint32_t)] = {};
  const size_t size = count * sizeof(uint32_t);
  uint32_t crc = kernels::Crc32c(exec, bytes.first(offset));
  crc = kernels::Crc32c(exec, std::span(kZeros).first(size), crc);
  return kernels::Crc32c(exec, bytes.subspan(offset + size), crc);
}

Refusal CheckImageDims(const ImageLayer& layer) {
  const bool has_keys = static_cast<LayerKind>(layer.kind) != LayerKind::kValues;
  if (!has_keys) RETURN_IF_ERROR(CheckImageEqual("key_dim", layer.key_dim, 0));
  if (has_keys) {
    RETURN_IF_ERROR(CheckImageNumber("key_dim", layer.key_dim, kMinHeadDim, kMaxHeadDim));
    RETURN_IF_ERROR(CheckImageEqual("key_dim", layer.key_dim % kHeadDimMultiple, 0));
  }
  RETURN_IF_ERROR(CheckImageNumber("value_dim", layer.value_dim, kMinHeadDim, kMaxHeadDim));
  RETURN_IF_ERROR(CheckImageEqual("value_dim", layer.value_dim % kHeadDimMultiple, 0));
  const auto dtype = static_cast<kernels::DType>(layer.dtype);
  return CheckImageEqual("row_bytes", layer.row_bytes,
                         (layer.key_dim + layer.value_dim) * kernels::DTypeBytes(dtype));
}

Refusal CheckImageLayer(const ImageLayer& layer) {
  RETURN_IF_ERROR(CheckImageNumber("layer", layer.layer, 0, kMaxLayers - 1));
  RETURN_IF_ERROR(CheckImageNumber("dtype", layer.dtype, 1, 3));
  RETURN_IF_ERROR(CheckImageNumber("kind", layer.kind, 1, 5));
  if (static_cast<LayerKind>(layer.kind) == LayerKind::kNone) {
    return BadImage(StatusCode::kInvalidArgument, "kind", "4, a layer that is not stored");
  }
  RETURN_IF_ERROR(CheckImageNumber("half_rotary_dim", layer.half_rotary_dim, 0, kMaxHeadDim));
  RETURN_IF_ERROR(CheckImageNumber("kv_heads", layer.kv_heads, 1, kMaxKvHeads));
  RETURN_IF_ERROR(CheckImageNumber("query_heads", layer.query_heads, layer.kv_heads,
                                   std::min(kMaxQueryHeads, layer.kv_heads * kMaxGroupSize)));
  RETURN_IF_ERROR(CheckImageEqual("query_heads", layer.query_heads % layer.kv_heads, 0));
  return CheckImageDims(layer);
}

Refusal InImagePart(std::string_view part, uint32_t number, Refusal refusal) {
  if (refusal.ok()) return refusal;
  refusal.field = JoinFields(std::string(part) + "[" + std::to_string(number) + "]", refusal.field);
  return refusal;
}

// Follows the sections in their one order: the rows of each layer, then the parts of each index.
class SectionOrder {
 public:
  explicit SectionOrder(const ParsedImage& image) : image_(image) { Settle(); }

  bool done() const { return index_ == image_.header.index_count; }
  // Checks the next section, except for its place.
  Refusal Check(const ImageSection& section) const;
  void Advance();

 private:
  bool in_rows() const { return index_ < 0; }
  const ImageLayer& layer() const { return image_.layers[slot_]; }
  uint32_t parts() const {
    if (in_rows()) return layer().kv_heads;
    if (static_cast<LayerKind>(layer().kind) != LayerKind::kSelected) return 0;
    return image_.header.has_codes != 0 ? 2 : 1;
  }
  // Moves on to the next layer or index while the present one has no further part.
  void Settle();

  const ParsedImage& image_;
  int64_t index_ = -1;  // -1: the rows
  uint32_t slot_ = 0;
  uint32_t part_ = 0;
};

void SectionOrder::Settle() {
  while (!done() && part_ >= parts()) {
    part_ = 0;
    if (++slot_ < image_.layers.size()) continue;
    slot_ = 0;
    ++index_;
  }
}

void SectionOrder::Advance() {
  ++part_;
  Settle();
}

Refusal SectionOrder::Check(const ImageSection& section) const {
  const ImageSectionKind kind = in_rows()    ? ImageSectionKind::kRows
                                : part_ == 0 ? ImageSectionKind::kCodebook
                                             : ImageSectionKind::kIndexData;
  RETURN_IF_ERROR(
      CheckImageEqual("kind", static_cast<uint32_t>(section.kind), static_cast<uint32_t>(kind)));
  RETURN_IF_ERROR(CheckImageEqual("layer_slot", section.layer_slot, slot_));
  const uint64_t part = in_rows() ? part_ : static_cast<uint64_t>(index_);
  RETURN_IF_ERROR(CheckImageEqual("part", section.part, part));
  if (in_rows()) {
    return CheckImageEqual("size_bytes", section.size_bytes,
                           uint64_t{image_.header.slot_count} * layer().row_bytes);
  }
  const uint64_t least =
      kind == ImageSectionKind::kCodebook ? sizeof(CodebookHeader) : sizeof(IndexDataHeader);
  return CheckImageNumber("size_bytes", section.size_bytes, least, image_.header.data_bytes);
}

Refusal CheckImageSections(const ParsedImage& image) {
  const ImageHeader& header = image.header;
  SectionOrder order(image);
  uint64_t offset = header.header_bytes;
  const uint64_t end = header.header_bytes + header.data_bytes;
  for (uint32_t i = 0; i < image.sections.size(); ++i) {
    const ImageSection& section = image.sections[i];
    if (order.done()) return CheckImageEqual("section_count", header.section_count, i);
    RETURN_IF_ERROR(InImagePart("sections", i, order.Check(section)));
    RETURN_IF_ERROR(
        InImagePart("sections", i, CheckImageEqual("offset_bytes", section.offset_bytes, offset)));
    RETURN_IF_ERROR(InImagePart(
        "sections", i, CheckImageNumber("size_bytes", section.size_bytes, 1, end - offset)));
    offset += ImageAligned(section.size_bytes);
    if (offset > end) return InImagePart("sections", i, CheckImageEqual("size_bytes", offset, end));
    order.Advance();
  }
  if (!order.done()) {
    return BadImage(StatusCode::kInvalidArgument, "section_count",
                    std::to_string(header.section_count) + ", parts are missing");
  }
  return CheckImageEqual("data_bytes", header.data_bytes, offset - header.header_bytes);
}

Refusal CheckImageTokens(const ImageHeader& header) {
  RETURN_IF_ERROR(
      CheckImageNumber("first_position", header.first_position, 0, kMaxSequenceTokens - 1));
  RETURN_IF_ERROR(CheckImageNumber("token_end", header.token_end, header.first_position + 1,
                                   kMaxSequenceTokens));
  RETURN_IF_ERROR(CheckImageNumber("slot_capacity", header.slot_capacity, 1, kMaxSequenceTokens));
  RETURN_IF_ERROR(CheckImageEqual("slot_capacity", header.slot_capacity % kBlockTokens, 0));
  RETURN_IF_ERROR(CheckImageNumber("slot_count", header.slot_count,
                                   header.token_end - header.first_position, header.slot_capacity));
  RETURN_IF_ERROR(CheckImageNumber("has_codes", header.has_codes, 0, 1));
  return CheckImageNumber("is_open", header.is_open, 0, header.has_codes != 0 ? 0 : 1);
}

Refusal CheckImageCounts(const ImageHeader& header) {
  RETURN_IF_ERROR(CheckImageNumber("layer_count", header.layer_count, 1, kMaxLayers));
  RETURN_IF_ERROR(CheckImageNumber("index_count", header.index_count, 0, kMaxIndexes));
  RETURN_IF_ERROR(CheckImageNumber("section_count", header.section_count, 1,
                                   kMaxImageHeaderBytes / sizeof(ImageSection)));
  RETURN_IF_ERROR(CheckImageNumber("fingerprint_bytes", header.fingerprint_bytes, 1,
                                   kMaxImageFingerprintBytes));
  const uint64_t used = sizeof(ImageHeader) + header.layer_count * sizeof(ImageLayer) +
                        header.section_count * sizeof(ImageSection);
  return CheckImageEqual("header_bytes", header.header_bytes, ImageAligned(used));
}

}  // namespace

uint32_t HeaderCrc(const kernels::Exec& exec, std::span<const std::byte> bytes) {
  return CrcWithout(exec, bytes, kHeaderCrcOffset, /*count=*/2);
}

uint32_t ManifestCrc(const kernels::Exec& exec, std::span<const std::byte> bytes) {
  return CrcWithout(exec, bytes, kManifestCrcOffset, /*count=*/1);
}

Refusal ParseImageStart(std::span<const std::byte> bytes, uint64_t file_bytes,
                        ImageHeader* header) {
  if (bytes.size() < sizeof(ImageHeader)) {
    return CheckImageNumber("file_bytes", file_bytes, sizeof(ImageHeader), ~uint64_t{0});
  }
  std::memcpy(header, bytes.data(), sizeof(*header));
  if (header->magic != ImageHeader::kMagic) {
    return BadImage(StatusCode::kInvalidArgument, "magic", "the file is no segment image");
  }
  RETURN_IF_ERROR(CheckImageVersion("version", header->version, kImageVersion, kImageVersion));
  RETURN_IF_ERROR(CheckImageSize(header->file_bytes, file_bytes));
  RETURN_IF_ERROR(CheckImageNumber("header_bytes", header->header_bytes, kImageAlignment,
                                   std::min<uint64_t>(kMaxImageHeaderBytes, file_bytes)));
  RETURN_IF_ERROR(CheckImageNumber("data_bytes", header->data_bytes, kImageAlignment,
                                   file_bytes - header->header_bytes));
  RETURN_IF_ERROR(CheckImageEqual("chunk_bytes", header->chunk_bytes, kImageChunkBytes));
  RETURN_IF_ERROR(CheckImageEqual(
      "chunk_count", header->chunk_count,
      header->data_bytes / kImageChunkBytes + (header->data_bytes % kImageChunkBytes != 0)));
  RETURN_IF_ERROR(
      CheckImageEqual("file_bytes", file_bytes,
                      header->header_bytes + header->data_bytes +
                          ImageAligned(uint64_t{header->chunk_count} * sizeof(uint32_t))));
  return CheckImageCounts(*header);
}

Refusal ParseImage(const kernels::Exec& exec, std::span<const std::byte> bytes,
                   ParsedImage* image) {
  ImageHeader& header = image->header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  RETURN_IF_ERROR(CheckImageCrc("header_crc", header.header_crc, HeaderCrc(exec, bytes)));
  RETURN_IF_ERROR(CheckImageVersion("layout_version", header.layout_version, kOldestExtentVersion,
                                    kLayoutVersion));
  RETURN_IF_ERROR(CheckImageTokens(header));
  image->layers.resize(header.layer_count);
  image->sections.resize(header.section_count);
  const std::byte* next = bytes.data() + sizeof(header);
  std::memcpy(image->layers.data(), next, image->layers.size() * sizeof(ImageLayer));
  next += image->layers.size() * sizeof(ImageLayer);
  std::memcpy(image->sections.data(), next, image->sections.size() * sizeof(ImageSection));
  for (uint32_t slot = 0; slot < image->layers.size(); ++slot) {
    const ImageLayer& layer = image->layers[slot];
    RETURN_IF_ERROR(InImagePart("layers", slot, CheckImageLayer(layer)));
    if (slot == 0) continue;
    RETURN_IF_ERROR(InImagePart(
        "layers", slot,
        CheckImageNumber("layer", layer.layer, image->layers[slot - 1].layer + 1, kMaxLayers)));
  }
  return CheckImageSections(*image);
}

Refusal ParseManifest(const kernels::Exec& exec, std::span<const std::byte> bytes,
                      ParsedManifest* manifest) {
  ManifestHeader& header = manifest->header;
  if (bytes.size() < sizeof(header)) {
    return CheckImageNumber("file_bytes", bytes.size(), sizeof(header), MaxManifestBytes());
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != ManifestHeader::kMagic) {
    return BadImage(StatusCode::kInvalidArgument, "magic", "the file is no manifest");
  }
  RETURN_IF_ERROR(CheckImageVersion("version", header.version, kImageVersion, kImageVersion));
  RETURN_IF_ERROR(CheckImageSize(header.file_bytes, bytes.size()));
  RETURN_IF_ERROR(CheckImageNumber("image_count", header.image_count, 1, kMaxImages));
  RETURN_IF_ERROR(CheckImageNumber("name_word_count", header.name_word_count, 0,
                                   std::min<uint64_t>(kMaxImageNameWords, header.token_count)));
  const uint64_t images_bytes = uint64_t{header.image_count} * sizeof(ManifestImage);
  RETURN_IF_ERROR(
      CheckImageEqual("file_bytes", bytes.size(),
                      sizeof(header) + images_bytes + header.name_word_count * sizeof(uint32_t)));
  RETURN_IF_ERROR(CheckImageCrc("crc", header.crc, ManifestCrc(exec, bytes)));
  RETURN_IF_ERROR(CheckImageNumber("name_kind", header.name_kind, 0, 1));
  RETURN_IF_ERROR(CheckImageNumber("index_count", header.index_count, 0, kMaxIndexes));
  RETURN_IF_ERROR(CheckImageNumber("fingerprint_bytes", header.fingerprint_bytes, 1,
                                   kMaxImageFingerprintBytes));
  manifest->images.resize(header.image_count);
  std::memcpy(manifest->images.data(), bytes.data() + sizeof(header), images_bytes);
  manifest->names.resize(header.name_word_count);
  const std::span<const std::byte> names = bytes.subspan(sizeof(header) + images_bytes);
  std::copy_n(names.data(), names.size(), reinterpret_cast<std::byte*>(manifest->names.data()));
  uint32_t position = 0;
  for (uint32_t i = 0; i < manifest->images.size(); ++i) {
    const ManifestImage& each = manifest->images[i];
    RETURN_IF_ERROR(
        InImagePart("images", i, CheckImageEqual("first_position", each.first_position, position)));
    RETURN_IF_ERROR(InImagePart(
        "images", i,
        CheckImageNumber("token_end", each.token_end, uint64_t{position} + 1, header.token_count)));
    RETURN_IF_ERROR(InImagePart(
        "images", i, CheckImageNumber("is_open", each.is_open, 0, i + 1 == header.image_count)));
    position = each.token_end;
  }
  return CheckImageEqual("token_count", header.token_count, position);
}

LayerShape ShapeOf(const ImageLayer& layer) {
  return {.dtype = static_cast<kernels::DType>(layer.dtype),
          .kind = static_cast<LayerKind>(layer.kind),
          .half_rotary_dim = static_cast<uint16_t>(layer.half_rotary_dim),
          .key_dim = layer.key_dim,
          .value_dim = layer.value_dim,
          .kv_heads = layer.kv_heads,
          .query_heads = layer.query_heads,
          .row_bytes = layer.row_bytes,
          .scale = layer.scale,
          .softcap = layer.softcap};
}

std::string ImageName(uint32_t number) {
  char name[32];
  std::snprintf(name, sizeof(name), "segment-%06u", static_cast<unsigned>(number));
  return name;
}

}  // namespace pqcached::kvstore
