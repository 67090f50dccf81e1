// What the tests of segment images share: a directory for images, and its files as bytes.
#ifndef PQCACHED_TESTS_KVSTORE_IMAGE_IMAGES_FIXTURE_H_
#define PQCACHED_TESTS_KVSTORE_IMAGE_IMAGES_FIXTURE_H_

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/crc32c.h"
#include "kernels/base/exec.h"
#include "kvstore/read/image/folder.h"
#include "kvstore/read/image/format.h"
#include "kvstore/read/image/parse.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore::testing {

// A new directory, removed with the object.
class ImageDirectory {
 public:
  ImageDirectory() {
    std::string path = ::testing::TempDir() + "/images-XXXXXX";
    path_ = mkdtemp(path.data());
  }
  ~ImageDirectory() { std::filesystem::remove_all(path_); }
  ImageDirectory(const ImageDirectory&) = delete;
  ImageDirectory& operator=(const ImageDirectory&) = delete;

  const std::string& path() const { return path_; }
  ImagePlace place(const std::string& name) const { return {.directory = path_, .name = name}; }
  std::string file(const std::string& name, const std::string& file) const {
    return path_ + "/" + name + "/" + file;
  }
  // Names of everything in the directory, hidden ones included.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

 private:
  std::string path_;
};

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline ImageHeader HeaderOf(const std::string& image) {
  ImageHeader header;
  std::memcpy(&header, image.data(), sizeof(header));
  return header;
}

// Writes a header with other fields into an image, with the checksums that then belong to it.
inline void PutHeader(std::string& image, ImageHeader header) {
  const kernels::Exec exec;
  std::memcpy(image.data(), &header, sizeof(header));
  const auto bytes = std::as_bytes(std::span(image));
  if (header.header_bytes > image.size()) return;
  const size_t table_bytes = ImageAligned(uint64_t{header.chunk_count} * sizeof(uint32_t));
  header.header_crc = HeaderCrc(exec, bytes.first(header.header_bytes));
  header.image_crc =
      kernels::Crc32c(exec, bytes.last(std::min(bytes.size(), table_bytes)), header.header_crc);
  std::memcpy(image.data(), &header, sizeof(header));
}

// Writes a manifest with other fields, and its checksum.
inline void PutManifest(std::string& manifest, ManifestHeader header) {
  std::memcpy(manifest.data(), &header, sizeof(header));
  header.crc = ManifestCrc(kernels::Exec(), std::as_bytes(std::span(manifest)));
  std::memcpy(manifest.data(), &header, sizeof(header));
}

// Changes an image of a folder, and lists it so in the manifest: a forged image, not a broken one.
template <class Change>
void Forge(const ImageDirectory& images, const std::string& name, uint32_t number,
           const Change& change) {
  const std::string path = images.file(name, ImageName(number));
  std::string image = ReadFile(path);
  ImageHeader header = HeaderOf(image);
  change(header, image);
  PutHeader(image, header);
  WriteFile(path, image);
  std::string manifest = ReadFile(images.file(name, kManifestName));
  ManifestHeader listed;
  std::memcpy(&listed, manifest.data(), sizeof(listed));
  auto* const entry = manifest.data() + sizeof(listed) + number * sizeof(ManifestImage);
  const uint32_t crc = HeaderOf(image).image_crc;
  std::memcpy(entry + offsetof(ManifestImage, image_crc), &crc, sizeof(crc));
  PutManifest(manifest, listed);
  WriteFile(images.file(name, kManifestName), manifest);
}

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_IMAGE_IMAGES_FIXTURE_H_
