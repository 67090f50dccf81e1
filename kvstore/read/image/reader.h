// SegmentImageReader reads and verifies one segment image (format.h), from a file or from memory.
//
// Opening parses and checks the header, and reads the checksums; nothing that is allocated is
// larger than the file. Bytes of the sections are compared with their checksums before a call that
// reads them returns.
//
// Errors, in addition to those of parse.h: kDataLoss  checksums[N] (the Nth MiB of the sections
// differs; the text names a part in it), image_crc, file_bytes (the file cannot be read to its end)
//
// Thread-compatible.
#ifndef PQCACHED_KVSTORE_READ_IMAGE_READER_H_
#define PQCACHED_KVSTORE_READ_IMAGE_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/base/exec.h"
#include "kvstore/read/image/parse.h"
#include "kvstore/read/layer_view.h"

namespace pqcached::kvstore {

// The bytes of a file, which may change while they are read. Thread-safe.
class ImageBytes {
 public:
  virtual ~ImageBytes() = default;
  virtual uint64_t size_bytes() const = 0;
  // Reads consecutive bytes from `offset` on into the pieces, at most kMaxPieces of them. Returns
  // false when they cannot be read.
  static constexpr size_t kMaxPieces = 512;
  virtual bool Read(uint64_t offset, std::span<const std::span<std::byte>> pieces) const = 0;
};

// A regular file of a folder.
class ImageFile final : public ImageBytes {
 public:
  // Errors: kNotFound         `name`: it does not exist, or cannot be opened
  //         kInvalidArgument  `name` is no regular file
  static Refusal Open(int folder, const char* name, std::unique_ptr<ImageBytes>* file);
  ~ImageFile() override;
  ImageFile(const ImageFile&) = delete;
  ImageFile& operator=(const ImageFile&) = delete;

  uint64_t size_bytes() const override { return size_bytes_; }
  bool Read(uint64_t offset, std::span<const std::span<std::byte>> pieces) const override;

 private:
  ImageFile(int descriptor, uint64_t size_bytes)
      : descriptor_(descriptor), size_bytes_(size_bytes) {}

  const int descriptor_;
  const uint64_t size_bytes_;
};

class SegmentImageReader {
 public:
  static Refusal Open(const kernels::Exec& exec, std::unique_ptr<ImageBytes> bytes,
                      SegmentImageReader* reader);

  const ParsedImage& image() const { return image_; }

  // Reads and verifies all sections: each into the memory of `targets`, [section_count] of its
  // padded size, or none where that is null. `keep_going` is called between the parts of the work,
  // by several threads; false ends it with kAborted.
  Refusal ReadAll(const ParallelFor& parallel, std::span<std::byte* const> targets,
                  const std::function<bool()>& keep_going) const;
  // Verifies all sections.
  Refusal Verify() const;
  // Reads bytes of a section from `offset` in it on, without their checksum: after Verify.
  // REQUIRES: they lie in the section. Errors: kDataLoss (file_bytes)
  Refusal ReadPart(const ImageSection& section, uint64_t offset, std::span<std::byte> bytes) const;

 private:
  Refusal ReadChunk(uint32_t chunk, std::span<std::byte* const> targets,
                    std::span<std::byte> scratch) const;
  // Returns the ordinal of the section that holds a byte of the file.
  size_t SectionAt(uint64_t offset) const;
  Refusal ChunkDiffers(uint32_t chunk, uint64_t offset) const;

  kernels::Exec exec_;
  std::unique_ptr<ImageBytes> bytes_;
  ParsedImage image_;
  std::vector<uint32_t> checksums_;  // [chunk_count]
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_IMAGE_READER_H_
