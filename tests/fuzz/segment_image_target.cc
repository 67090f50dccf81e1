// Fuzz target: segment images and manifests with any contents (kvstore/read/image): the readers end,
// allocate no more than the file has, and accept nothing whose checksums are wrong.
//
// An input is a file as it is, or a list of edits of a good one, after which the checksums are made
// right again or stay as they are.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/crc32c.h"
#include "kvstore/read/image/parse.h"
#include "kvstore/read/image/reader.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/target.h"

namespace {

// Most bytes of one allocation; 0: any.
thread_local size_t most_allocated_bytes = 0;

}  // namespace

#if defined(__SANITIZE_ADDRESS__)
#define PQC_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PQC_ADDRESS_SANITIZER 1
#endif
#endif

namespace {

void NoteAllocation(size_t size) {
  if (most_allocated_bytes == 0 || size <= most_allocated_bytes) return;
  most_allocated_bytes = 0;
  pqcached::fuzz::Found("an allocation of " + std::to_string(size) + " bytes");
}

}  // namespace

#ifdef PQC_ADDRESS_SANITIZER
// The sanitizer calls it for each allocation.
extern "C" void __sanitizer_malloc_hook(const volatile void*, size_t size) {  // NOLINT: its name
  NoteAllocation(size);
}
#else
void* operator new(size_t size) {
  NoteAllocation(size);
  if (void* const memory = std::malloc(std::max<size_t>(size, 1))) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace pqcached::fuzz {
namespace {

using kvstore::ImageAligned;
using kvstore::ImageHeader;
using kvstore::ImageLayer;
using kvstore::ImageSection;
using kvstore::ImageSectionKind;
using kvstore::ManifestHeader;
using kvstore::ManifestImage;

constexpr size_t kMostFileBytes = size_t{64} << 10;
constexpr uint8_t kManifest = 1, kRepaired = 2, kAsIs = 4;

class Memory final : public kvstore::ImageBytes {
 public:
  explicit Memory(const std::string& bytes) : bytes_(bytes) {}
  uint64_t size_bytes() const override { return bytes_.size(); }
  bool Read(uint64_t offset, std::span<const std::span<std::byte>> pieces) const override {
    for (const std::span<std::byte> piece : pieces) {
      if (piece.empty()) continue;
      if (offset > bytes_.size() || piece.size() > bytes_.size() - offset) return false;
      std::memcpy(piece.data(), bytes_.data() + offset, piece.size());
      offset += piece.size();
    }
    return true;
  }

 private:
  const std::string& bytes_;
};

std::span<const std::byte> BytesOf(const std::string& file) {
  return std::as_bytes(std::span(file));
}

// A CRC32C of its own, bit by bit over a table of one byte.
uint32_t PlainCrc(std::span<const std::byte> bytes, uint32_t seed = 0) {
  static const std::array<uint32_t, 256> kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
      table[byte] = crc;
    }
    return table;
  }();
  uint32_t crc = ~seed;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint32_t>(byte)) & 0xff];
  }
  return ~crc;
}

std::string GoodImage() {
  ImageHeader header;
  header.first_position = 128;
  header.token_end = 132;
  header.slot_count = 4;
  header.slot_capacity = 128;
  header.has_codes = 1;
  header.layer_count = 1;
  header.index_count = 1;
  header.indexes[0] = {.kind = kvstore::IndexKind::kPq, .subspace_count = 2, .bits = 4};
  header.fingerprint_bytes = 1;
  header.fingerprint[0] = 'm';
  const ImageLayer layer{.layer = 3,
                         .dtype = 3,
                         .kind = 1,
                         .key_dim = 32,
                         .value_dim = 32,
                         .kv_heads = 2,
                         .query_heads = 4,
                         .row_bytes = 256,
                         .scale = 1};
  std::vector<ImageSection> sections;
  for (const uint32_t head : {0u, 1u}) {
    sections.push_back({.kind = ImageSectionKind::kRows, .part = head, .size_bytes = 1024});
  }
  sections.push_back({.kind = ImageSectionKind::kCodebook, .size_bytes = 3000});
  sections.push_back({.kind = ImageSectionKind::kIndexData, .size_bytes = 4096});
  header.section_count = static_cast<uint32_t>(sections.size());
  header.header_bytes = kvstore::kImageAlignment;
  for (ImageSection& section : sections) {
    section.offset_bytes = header.header_bytes + header.data_bytes;
    header.data_bytes += ImageAligned(section.size_bytes);
  }
  header.chunk_count = 1;
  header.file_bytes = header.header_bytes + header.data_bytes + kvstore::kImageAlignment;
  std::string file(header.file_bytes, '\0');
  std::memcpy(file.data(), &header, sizeof(header));
  std::memcpy(file.data() + sizeof(header), &layer, sizeof(layer));
  std::memcpy(file.data() + sizeof(header) + sizeof(layer), sections.data(),
              sections.size() * sizeof(ImageSection));
  for (size_t i = 0; i < header.data_bytes; ++i) {
    file[header.header_bytes + i] = static_cast<char>(i * 7);
  }
  return file;
}

std::string GoodManifest() {
  constexpr uint32_t kNames[] = {5, 6, 7};
  const ManifestImage images[] = {{.token_end = 128, .file_bytes = 8192},
                                  {.first_position = 128, .token_end = 132, .is_open = 1}};
  ManifestHeader header;
  header.image_count = 2;
  header.name_word_count = std::size(kNames);
  header.token_count = 132;
  header.fingerprint_bytes = 1;
  header.file_bytes = sizeof(header) + sizeof(images) + sizeof(kNames);
  std::string file(reinterpret_cast<const char*>(&header), sizeof(header));
  file.append(reinterpret_cast<const char*>(images), sizeof(images));
  file.append(reinterpret_cast<const char*>(kNames), sizeof(kNames));
  return file;
}

// Makes the checksums right, as far as the header's sizes lie in the file.
void RepairImage(std::string& file) {
  if (file.size() < sizeof(ImageHeader)) return;
  ImageHeader header;
  std::memcpy(&header, file.data(), sizeof(header));
  const uint64_t size = file.size();
  if (header.header_bytes > size || header.header_bytes < sizeof(header) ||
      header.data_bytes > size - header.header_bytes) {
    return;
  }
  const uint64_t table = header.header_bytes + header.data_bytes;
  for (uint64_t begin = 0, at = table; begin < header.data_bytes && at + 4 <= size; at += 4) {
    const uint64_t count = std::min<uint64_t>(kvstore::kImageChunkBytes, header.data_bytes - begin);
    const uint32_t crc =
        kernels::Crc32c({}, BytesOf(file).subspan(header.header_bytes + begin, count));
    std::memcpy(file.data() + at, &crc, sizeof(crc));
    begin += count;
  }
  header.header_crc = kvstore::HeaderCrc({}, BytesOf(file).first(header.header_bytes));
  header.image_crc = kernels::Crc32c({}, BytesOf(file).subspan(table), header.header_crc);
  std::memcpy(file.data(), &header, sizeof(header));
}

void RepairManifest(std::string& file) {
  if (file.size() < sizeof(ManifestHeader)) return;
  const uint32_t crc = kvstore::ManifestCrc({}, BytesOf(file));
  std::memcpy(file.data() + offsetof(ManifestHeader, crc), &crc, sizeof(crc));
}

void Edit(Bytes& bytes, std::string& file) {
  const uint8_t what = bytes.Byte();
  size_t place = bytes.Byte() | size_t{bytes.Byte()} << 8;
  if ((what & 0x80) != 0) place %= 768;  // most of it is the header
  place = file.empty() ? 0 : place % file.size();
  const auto put = [&](auto number) {
    if (file.size() - place >= sizeof(number)) {
      std::memcpy(file.data() + place, &number, sizeof(number));
    }
  };
  switch (what & 7) {
    case 0:
      return put(bytes.Byte());
    case 1:
      return put(static_cast<uint32_t>(bytes.Number()));
    case 2:
      return put(bytes.Number());
    case 3:
      return file.resize(place);
    case 4:
      return file.resize(std::min(kMostFileBytes, file.size() + place));
    default:
      place -= place % 4;
      return put(static_cast<uint32_t>(bytes.Number()));
  }
}

void CheckAccepted(const std::string& file, const kvstore::SegmentImageReader& reader) {
  std::string header(file, 0, reader.image().header.header_bytes);
  const ImageHeader stated = reader.image().header;
  std::memset(header.data() + offsetof(ImageHeader, header_crc), 0, 2 * sizeof(uint32_t));
  const uint32_t crc = PlainCrc(BytesOf(header));
  if (crc != stated.header_crc) Found("a header with a wrong checksum was accepted");
  const uint64_t table = stated.header_bytes + stated.data_bytes;
  if (PlainCrc(BytesOf(file).subspan(table), crc) != stated.image_crc) {
    Found("an image with a wrong checksum was accepted");
  }
  for (uint32_t chunk = 0; chunk < stated.chunk_count; ++chunk) {
    uint32_t wanted = 0;
    std::memcpy(&wanted, file.data() + table + chunk * sizeof(wanted), sizeof(wanted));
    const uint64_t begin = uint64_t{chunk} * kvstore::kImageChunkBytes;
    const uint64_t count = std::min<uint64_t>(kvstore::kImageChunkBytes, stated.data_bytes - begin);
    if (PlainCrc(BytesOf(file).subspan(stated.header_bytes + begin, count)) != wanted) {
      Found("sections with a wrong checksum were accepted");
    }
  }
  std::vector<std::byte> bytes;
  for (const ImageSection& section : reader.image().sections) {
    bytes.resize(section.size_bytes);
    if (!reader.ReadPart(section, 0, bytes).ok()) Found("a section cannot be read");
    if (std::memcmp(bytes.data(), file.data() + section.offset_bytes, bytes.size()) != 0) {
      Found("a section has other bytes");
    }
    if (section.layer_slot >= reader.image().layers.size()) Found("a section of no layer");
  }
}

void ReadImage(const std::string& file) {
  kvstore::SegmentImageReader reader;
  most_allocated_bytes = file.size() + 1024;
  bool accepted =
      kvstore::SegmentImageReader::Open({}, std::make_unique<Memory>(file), &reader).ok();
  accepted = accepted && reader.Verify().ok();
  most_allocated_bytes = 0;
  if (accepted) CheckAccepted(file, reader);
}

void ReadManifest(std::string file) {
  kvstore::ParsedManifest manifest;
  most_allocated_bytes = file.size() + 1024;
  const bool accepted = kvstore::ParseManifest({}, BytesOf(file), &manifest).ok();
  most_allocated_bytes = 0;
  if (!accepted) return;
  std::memset(file.data() + offsetof(ManifestHeader, crc), 0, sizeof(uint32_t));
  if (PlainCrc(BytesOf(file)) != manifest.header.crc) {
    Found("a manifest with a wrong checksum was accepted");
  }
  uint32_t position = 0;
  for (const ManifestImage& image : manifest.images) {
    if (image.first_position != position || image.token_end <= position) Found("a gap of images");
    position = image.token_end;
  }
  if (position != manifest.header.token_count) Found("images of other tokens");
  if (manifest.names.size() > position) Found("more names than tokens");
}

}  // namespace

std::vector<std::string> Seeds() {
  const std::string modes[] = {{kRepaired}, {kManifest | kRepaired}, {'\0'}, {kManifest}};
  std::vector<std::string> seeds;
  for (const std::string& mode : modes) {
    seeds.push_back(mode);
    for (const int place : {0, 8, 12, 16, 24, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72}) {
      seeds.push_back(mode + std::string{'\x81', static_cast<char>(place), '\0', '\x03'});
    }
  }
  std::string manifest = GoodManifest();
  RepairManifest(manifest);
  seeds.push_back(std::string{kAsIs | kManifest} + manifest);
  std::string image = GoodImage();
  RepairImage(image);
  seeds.push_back(std::string{kAsIs} + image);
  return seeds;
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pqcached::fuzz;  // NOLINT: a target's one function
  static const std::string good_image = GoodImage(), good_manifest = GoodManifest();
  Bytes bytes(data, size);
  const uint8_t mode = bytes.Byte();
  const bool is_manifest = (mode & kManifest) != 0;
  std::string file;
  if ((mode & kAsIs) != 0) {
    while (!bytes.empty() && file.size() < kMostFileBytes) {
      file += static_cast<char>(bytes.Byte());
    }
  } else {
    file = is_manifest ? good_manifest : good_image;
    is_manifest ? RepairManifest(file) : RepairImage(file);
    for (int edits = 0; edits < 16 && !bytes.empty(); ++edits) Edit(bytes, file);
  }
  if ((mode & kRepaired) != 0) is_manifest ? RepairManifest(file) : RepairImage(file);
  is_manifest ? ReadManifest(file) : ReadImage(file);
  return 0;
}
