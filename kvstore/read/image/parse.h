// Parses the headers of segment images and manifests (format.h), which may hold anything.
//
// Sizes are compared with those of the file before they are used, so that nothing is allocated that
// is larger than the file. Errors name the field of the header and its limit:
//
//   kInvalidArgument  magic: the file is no image, or no manifest; a field is out of its limits
//   kUnimplemented    version, layout_version: the file is of another version
//   kDataLoss         file_bytes: the file is cut off; header_crc, crc: a checksum differs
//
// Pure functions; thread-safe.
#ifndef PQCACHED_KVSTORE_READ_IMAGE_PARSE_H_
#define PQCACHED_KVSTORE_READ_IMAGE_PARSE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/exec.h"
#include "kvstore/read/image/format.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/refusal.h"

namespace pqcached::kvstore {

struct ParsedImage {
  ImageHeader header;
  std::vector<ImageLayer> layers;
  std::vector<ImageSection> sections;

  std::string_view fingerprint() const { return {header.fingerprint, header.fingerprint_bytes}; }
  std::span<const IndexDescriptor> indexes() const { return {header.indexes, header.index_count}; }
  uint32_t token_count() const { return header.token_end - header.first_position; }
};

// Checks the first bytes of a file of `file_bytes`, so that the header can be read as a whole.
// REQUIRES: `bytes` has min(file_bytes, kImageAlignment) bytes.
Refusal ParseImageStart(std::span<const std::byte> bytes, uint64_t file_bytes, ImageHeader* header);

// Parses a header. REQUIRES: `bytes` has ImageHeader::header_bytes bytes, of a file whose first
// bytes ParseImageStart has accepted.
Refusal ParseImage(const kernels::Exec& exec, std::span<const std::byte> bytes, ParsedImage* image);

struct ParsedManifest {
  ManifestHeader header;
  std::vector<ManifestImage> images;
  std::vector<uint32_t> names;

  std::string_view fingerprint() const { return {header.fingerprint, header.fingerprint_bytes}; }
  std::span<const IndexDescriptor> indexes() const { return {header.indexes, header.index_count}; }
};

// Returns the most bytes that a manifest may have.
constexpr uint64_t MaxManifestBytes() {
  return sizeof(ManifestHeader) + uint64_t{kMaxImages} * sizeof(ManifestImage) +
         kMaxImageNameWords * sizeof(uint32_t);
}

Refusal ParseManifest(const kernels::Exec& exec, std::span<const std::byte> bytes,
                      ParsedManifest* manifest);

// Computes a header's checksum, of its bytes with zeros in place of both checksums.
uint32_t HeaderCrc(const kernels::Exec& exec, std::span<const std::byte> bytes);
// Computes a manifest's checksum.
uint32_t ManifestCrc(const kernels::Exec& exec, std::span<const std::byte> bytes);

// Returns the shape of a layer's rows.
LayerShape ShapeOf(const ImageLayer& layer);
// Returns the name of an image in its folder, such as "segment-000012".
std::string ImageName(uint32_t number);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_IMAGE_PARSE_H_
