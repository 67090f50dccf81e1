#include "kvstore/read/image/folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"

namespace pqcached::kvstore {
namespace {

Refusal BehindImage(std::string_view path, Refusal refusal) {
  if (!refusal.ok() && refusal.field != path) refusal.field = JoinFields(path, refusal.field);
  return refusal;
}

// Returns the name of the field in which an image differs from its manifest; empty: it does not.
std::string_view ForeignField(const ParsedManifest& manifest, const ManifestImage& listed,
                              const ParsedImage& image) {
  const ImageHeader& header = image.header;
  if (header.file_bytes != listed.file_bytes) return "file_bytes";
  if (header.image_crc != listed.image_crc) return "image_crc";
  if (header.first_position != listed.first_position) return "first_position";
  if (header.token_end != listed.token_end) return "token_end";
  if (header.is_open != listed.is_open) return "is_open";
  if (header.cache_key != manifest.header.cache_key) return "cache_key";
  if (header.tenant_key != manifest.header.tenant_key) return "tenant_key";
  if (image.fingerprint() != manifest.fingerprint()) return "fingerprint";
  return std::ranges::equal(image.indexes(), manifest.indexes()) ? "" : "indexes";
}

}  // namespace

ImageFolder::ImageFolder(ImageFolder&& other) noexcept
    : exec_(other.exec_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      manifest_(std::move(other.manifest_)) {}

ImageFolder::~ImageFolder() {
  if (descriptor_ >= 0) close(descriptor_);
}

Refusal ImageFolder::Open(const kernels::Exec& exec, int parent, const char* name,
                          ImageFolder* folder) {
  folder->exec_ = exec;
  folder->descriptor_ = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (folder->descriptor_ < 0) {
    Refusal refusal;
    refusal.Set(StatusCode::kNotFound, "name", std::string(name) + ": " + std::strerror(errno));
    return refusal;
  }
  std::unique_ptr<ImageBytes> file;
  RETURN_IF_ERROR(ImageFile::Open(folder->descriptor_, kManifestName, &file));
  if (file->size_bytes() > MaxManifestBytes()) {
    Refusal refusal;
    refusal.Set(StatusCode::kInvalidArgument, "manifest.file_bytes",
                std::to_string(file->size_bytes()) + ", must be at most " +
                    std::to_string(MaxManifestBytes()));
    return refusal;
  }
  std::vector<std::byte> bytes(file->size_bytes());
  const std::span<std::byte> all = bytes;
  if (!all.empty() && !file->Read(0, {&all, 1})) {
    Refusal refusal;
    refusal.Set(StatusCode::kDataLoss, "manifest.file_bytes", "the file cannot be read");
    return refusal;
  }
  return BehindImage(kManifestName, ParseManifest(exec, bytes, &folder->manifest_));
}

Refusal ImageFolder::OpenImage(uint32_t number, SegmentImageReader* reader) const {
  const std::string name = ImageName(number);
  std::unique_ptr<ImageBytes> file;
  RETURN_IF_ERROR(ImageFile::Open(descriptor_, name.c_str(), &file));
  RETURN_IF_ERROR(BehindImage(name, SegmentImageReader::Open(exec_, std::move(file), reader)));
  const std::string_view foreign =
      ForeignField(manifest_, manifest_.images[number], reader->image());
  if (foreign.empty()) return {};
  Refusal refusal;
  refusal.Set(StatusCode::kDataLoss, JoinFields(name, foreign),
              "differs from the manifest: the image belongs to another export");
  return refusal;
}

}  // namespace pqcached::kvstore
