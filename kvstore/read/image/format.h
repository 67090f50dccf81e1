// Format of segment images: one segment of a sequence as a file, or as bytes on a wire.
//
// A sequence that was exported is a folder with one image per segment ("segment-000000", ...) and a
// *manifest* ("manifest"), which names the tokens and lists the images with their checksums. Parts
// of an image begin at multiples of kImageAlignment, so that direct I/O and RDMA can move them from
// and to the extents of a pool:
//
//   part          content
//   header        ImageHeader, ImageLayer[layer_count], ImageSection[section_count]
//   sections      rows of each layer and kv head; then, for each index and each layer that has it,
//                 the codebook and the index data, as they are in extents (layout.h)
//   checksums     uint32_t[chunk_count], the CRC32C of each kImageChunkBytes of the sections
//
// Each part is padded with zeros. A checksum covers every byte of the file: ImageHeader::header_crc
// the header, the checksums the sections, and ImageHeader::image_crc the header and the checksums.
//
// All integers are little-endian. All structs are packed by construction (static_asserts below). A
// change of any of them raises kImageVersion. This header needs only the standard library.
#ifndef PQCACHED_KVSTORE_READ_IMAGE_FORMAT_H_
#define PQCACHED_KVSTORE_READ_IMAGE_FORMAT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

inline constexpr uint32_t kImageVersion = 1;
inline constexpr size_t kImageAlignment = 4096;
inline constexpr size_t kImageChunkBytes = size_t{1} << 20;
inline constexpr size_t kMaxImageHeaderBytes = size_t{16} << 20;
inline constexpr size_t kMaxImageFingerprintBytes = 256;
inline constexpr uint32_t kMaxImages = uint32_t{1} << 20;  // of a sequence
// Most words that name the tokens of a sequence; later tokens then have no names.
inline constexpr uint64_t kMaxImageNameWords = uint64_t{1} << 24;
inline constexpr char kManifestName[] = "manifest";

// SHA-256 of an identity.
using ImageKey = std::array<uint8_t, 32>;

// Rows and shape of one stored layer, as LayerShape.
struct ImageLayer {
  uint32_t layer = 0;
  uint32_t dtype = 0;
  uint32_t kind = 0;
  uint32_t half_rotary_dim = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  uint32_t kv_heads = 0;
  uint32_t query_heads = 0;
  uint32_t row_bytes = 0;
  float scale = 0;
  float softcap = 0;
  uint32_t reserved = 0;
};

enum class ImageSectionKind : uint32_t { kRows = 1, kCodebook = 2, kIndexData = 3 };

// Place of the content of one extent.
struct ImageSection {
  ImageSectionKind kind = ImageSectionKind::kRows;
  uint32_t layer_slot = 0;    // ordinal of the layer in the image
  uint32_t part = 0;          // rows: the kv head; other kinds: the ordinal of the index
  uint32_t codebook_crc = 0;  // CRC32C of a codebook: equal ones are stored once; else 0
  uint64_t offset_bytes = 0;  // from the start of the file
  uint64_t size_bytes = 0;    // without the padding
};

struct ImageHeader {
  static constexpr uint64_t kMagic = 0x314547414d494350;  // "PCIMAGE1"
  uint64_t magic = kMagic;
  uint32_t version = kImageVersion;
  uint32_t header_bytes = 0;  // with layers, sections and padding
  uint64_t file_bytes = 0;
  uint64_t data_bytes = 0;  // of all sections, with their padding
  uint32_t chunk_bytes = kImageChunkBytes;
  uint32_t chunk_count = 0;
  uint32_t layout_version = kLayoutVersion;  // of the codebooks and index data
  uint16_t is_open = 0;                      // 1: the active segment
  uint16_t has_codes = 0;  // 0: no index data: they are made again of rows and codebooks
  uint32_t first_position = 0;
  uint32_t token_end = 0;      // position after the last token of the sequence in the segment
  uint32_t slot_count = 0;     // rows of each kv head: at least the tokens
  uint32_t slot_capacity = 0;  // a multiple of kBlockTokens
  uint32_t layer_count = 0;
  uint32_t index_count = 0;
  uint32_t section_count = 0;
  uint32_t fingerprint_bytes = 0;
  IndexDescriptor indexes[kMaxIndexes] = {};
  ImageKey cache_key = {};     // of fingerprint, tenant, layers, RoPE and rank (sequence/prefix.h)
  ImageKey tenant_key = {};    // of the tenant's name
  ImageKey prefix_begin = {};  // key of the last named step before first_position, or the root
  ImageKey prefix_end = {};    // key of the last named step before token_end, or the root
  char fingerprint[kMaxImageFingerprintBytes] = {};  // of the model
  uint32_t header_crc = 0;  // of the header with zeros in place of both checksums
  uint32_t image_crc = 0;   // of the same bytes and of the checksums with their padding
};

// One image as its manifest lists it.
struct ManifestImage {
  uint32_t first_position = 0;
  uint32_t token_end = 0;
  uint32_t is_open = 0;
  uint32_t image_crc = 0;
  uint64_t file_bytes = 0;
};

// The manifest's header. ManifestImage[image_count] and uint32_t[name_word_count] follow it.
struct ManifestHeader {
  static constexpr uint64_t kMagic = 0x3146494e414d4350;  // "PCMANIF1"
  uint64_t magic = kMagic;
  uint32_t version = kImageVersion;
  uint32_t image_count = 0;
  uint64_t file_bytes = 0;
  uint64_t name_word_count = 0;
  uint32_t name_kind = 0;  // as NameKind: token ids, or content keys
  uint32_t token_count = 0;
  uint32_t index_count = 0;
  uint32_t prefill_closed = 0;
  uint32_t fingerprint_bytes = 0;
  uint32_t crc = 0;  // of the file with zeros in its place
  IndexDescriptor indexes[kMaxIndexes] = {};
  ImageKey cache_key = {};  // as those of ImageHeader
  ImageKey tenant_key = {};
  ImageKey root = {};  // begin of the chain of the tokens' names
  char fingerprint[kMaxImageFingerprintBytes] = {};
};

constexpr uint64_t ImageAligned(uint64_t bytes) {
  return (bytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
}

static_assert(sizeof(ImageLayer) == 48 && sizeof(ImageSection) == 32);
static_assert(sizeof(ImageHeader) == 536 && sizeof(ManifestImage) == 24);
static_assert(sizeof(ManifestHeader) == 472);
static_assert(std::is_trivially_copyable_v<ImageHeader> &&
              std::is_trivially_copyable_v<ManifestHeader>);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_IMAGE_FORMAT_H_
