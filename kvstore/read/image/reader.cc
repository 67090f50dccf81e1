#include "kvstore/read/image/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"

namespace pqcached::kvstore {
namespace {

Refusal BadImageFile(StatusCode code, std::string_view field, std::string_view text) {
  Refusal refusal;
  refusal.Set(code, field, text);
  return refusal;
}

Refusal UnreadableImage() {
  return BadImageFile(StatusCode::kDataLoss, "file_bytes",
                      "the file cannot be read up to the end that its header states");
}

std::string NameOfSection(const ParsedImage& image, const ImageSection& section) {
  const std::string layer = " of layer " + std::to_string(image.layers[section.layer_slot].layer);
  switch (section.kind) {
    case ImageSectionKind::kRows:
      return "rows" + layer + ", kv head " + std::to_string(section.part);
    case ImageSectionKind::kCodebook:
      return "codebook" + layer + ", index " + std::to_string(section.part);
    default:
      return "index data" + layer + ", index " + std::to_string(section.part);
  }
}

}  // namespace

Refusal ImageFile::Open(int folder, const char* name, std::unique_ptr<ImageBytes>* file) {
  const int descriptor = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) return BadImageFile(StatusCode::kNotFound, name, std::strerror(errno));
  struct stat status {};
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor);
    return BadImageFile(StatusCode::kInvalidArgument, name, "is no regular file");
  }
  file->reset(new ImageFile(descriptor, static_cast<uint64_t>(status.st_size)));
  return {};
}

ImageFile::~ImageFile() { close(descriptor_); }

bool ImageFile::Read(uint64_t offset, std::span<const std::span<std::byte>> pieces) const {
  std::array<iovec, kMaxPieces> parts;
  size_t count = 0;
  for (const std::span<std::byte> piece : pieces) {
    parts[count++] = {.iov_base = piece.data(), .iov_len = piece.size()};
  }
  iovec* next = parts.data();
  while (count > 0) {
    const ssize_t done =
        preadv(descriptor_, next, static_cast<int>(count), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    offset += static_cast<uint64_t>(done);
    auto left = static_cast<size_t>(done);
    while (count > 0 && left >= next->iov_len) {
      left -= next->iov_len;
      ++next;
      --count;
    }
    if (count == 0) break;
    next->iov_base = static_cast<std::byte*>(next->iov_base) + left;
    next->iov_len -= left;
  }
  return true;
}

Refusal SegmentImageReader::Open(const kernels::Exec& exec, std::unique_ptr<ImageBytes> bytes,
                                 SegmentImageReader* reader) {
  const uint64_t file_bytes = bytes->size_bytes();
  const auto read = [&](uint64_t offset, std::span<std::byte> target) {
    return bytes->Read(offset, {&target, 1});
  };
  std::vector<std::byte> header(std::min<uint64_t>(file_bytes, kImageAlignment));
  if (!read(0, header)) return UnreadableImage();
  ImageHeader start;
  RETURN_IF_ERROR(ParseImageStart(header, file_bytes, &start));
  header.resize(start.header_bytes);
  if (!read(0, header)) return UnreadableImage();
  ImageHeader again;  // the file may have changed
  RETURN_IF_ERROR(ParseImageStart(header, file_bytes, &again));
  if (again.header_bytes != start.header_bytes) return UnreadableImage();
  ParsedImage& image = reader->image_;
  RETURN_IF_ERROR(ParseImage(exec, header, &image));
  const size_t table_bytes = ImageAligned(uint64_t{image.header.chunk_count} * sizeof(uint32_t));
  reader->checksums_.resize(table_bytes / sizeof(uint32_t));
  const std::span<std::byte> table = std::as_writable_bytes(std::span(reader->checksums_));
  if (!read(file_bytes - table_bytes, table)) return UnreadableImage();
  if (kernels::Crc32c(exec, table, image.header.header_crc) != image.header.image_crc) {
    return BadImageFile(StatusCode::kDataLoss, "image_crc",
                        "the checksum differs from that of the header and the checksums");
  }
  reader->exec_ = exec;
  reader->bytes_ = std::move(bytes);
  return {};
}

size_t SegmentImageReader::SectionAt(uint64_t offset) const {
  const auto next = std::upper_bound(
      image_.sections.begin(), image_.sections.end(), offset,
      [](uint64_t wanted, const ImageSection& each) { return wanted < each.offset_bytes; });
  return static_cast<size_t>(next - image_.sections.begin()) - 1;
}

Refusal SegmentImageReader::ChunkDiffers(uint32_t chunk, uint64_t offset) const {
  const ImageSection& section = image_.sections[SectionAt(offset)];
  return BadImageFile(StatusCode::kDataLoss, "checksums[" + std::to_string(chunk) + "]",
                      "the checksum differs from that of the bytes; they begin with the " +
                          NameOfSection(image_, section));
}

Refusal SegmentImageReader::ReadChunk(uint32_t chunk, std::span<std::byte* const> targets,
                                      std::span<std::byte> scratch) const {
  const uint64_t begin = image_.header.header_bytes + uint64_t{chunk} * kImageChunkBytes;
  const uint64_t end =
      std::min(begin + kImageChunkBytes, image_.header.header_bytes + image_.header.data_bytes);
  std::array<std::span<std::byte>, ImageBytes::kMaxPieces> pieces;
  size_t count = 0;
  size_t number = SectionAt(begin);
  for (uint64_t offset = begin; offset < end; ++number) {
    const ImageSection& section = image_.sections[number];
    const uint64_t section_end = section.offset_bytes + ImageAligned(section.size_bytes);
    const uint64_t piece_end = std::min(end, section_end);
    std::byte* const target = targets[number];
    pieces[count++] = {target == nullptr ? scratch.data() + (offset - begin)
                                         : target + (offset - section.offset_bytes),
                       piece_end - offset};
    offset = piece_end;
  }
  const auto used = std::span(pieces).first(count);
  if (!bytes_->Read(begin, used)) return UnreadableImage();
  uint32_t crc = 0;
  for (const std::span<std::byte> piece : used) crc = kernels::Crc32c(exec_, piece, crc);
  return crc == checksums_[chunk] ? Refusal() : ChunkDiffers(chunk, begin);
}

Refusal SegmentImageReader::ReadAll(const ParallelFor& parallel,
                                    std::span<std::byte* const> targets,
                                    const std::function<bool()>& keep_going) const {
  const size_t scratch_bytes = std::min<uint64_t>(kImageChunkBytes, image_.header.data_bytes);
  std::vector<std::vector<std::byte>> scratch(parallel.worker_count);
  const bool skips = std::find(targets.begin(), targets.end(), nullptr) != targets.end();
  if (skips) {
    for (std::vector<std::byte>& each : scratch) each.resize(scratch_bytes);
  }
  std::mutex mutex;
  Refusal first;
  std::atomic<bool> failed = false;
  parallel.run(image_.header.chunk_count, [&](uint32_t chunk, uint32_t worker) {
    if (failed) return;
    Refusal refusal = keep_going && !keep_going()
                          ? BadImageFile(StatusCode::kAborted, "", "the call was given up")
                          : ReadChunk(chunk, targets, scratch[worker]);
    if (refusal.ok()) return;
    const std::lock_guard lock(mutex);
    if (!failed.exchange(true)) first = std::move(refusal);
  });
  return first;
}

Refusal SegmentImageReader::ReadPart(const ImageSection& section, uint64_t offset,
                                     std::span<std::byte> bytes) const {
  return bytes_->Read(section.offset_bytes + offset, {&bytes, 1}) ? Refusal() : UnreadableImage();
}

Refusal SegmentImageReader::Verify() const {
  return ReadAll(SerialFor(), std::vector<std::byte*>(image_.sections.size()), {});
}

}  // namespace pqcached::kvstore
