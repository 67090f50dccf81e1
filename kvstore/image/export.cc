#include "kvstore/image/export.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"
#include "kvstore/image/image_files.h"
#include "kvstore/read/image/parse.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

constexpr std::byte kPadding[kImageAlignment] = {};

ImageLayer ImageLayerOf(const StoredLayers::Layer& layer) {
  const LayerShape& shape = layer.shape;
  return {.layer = layer.layer,
          .dtype = static_cast<uint32_t>(shape.dtype),
          .kind = static_cast<uint32_t>(shape.kind),
          .half_rotary_dim = shape.half_rotary_dim,
          .key_dim = shape.key_dim,
          .value_dim = shape.value_dim,
          .kv_heads = shape.kv_heads,
          .query_heads = shape.query_heads,
          .row_bytes = shape.row_bytes,
          .scale = shape.scale,
          .softcap = shape.softcap,
          .reserved = 0};
}

// Indexes of the snapshot that images have.
std::vector<size_t> ExportedIndexes(const SegmentList& list) {
  std::vector<size_t> exported;
  for (size_t i = 0; i < list.indexes.size(); ++i) {
    if (IsBuilt(list.indexes[i]) && !IsPlugin(list.indexes[i])) exported.push_back(i);
  }
  return exported;
}

// One image: its header, and where the bytes of its sections are.
class ImageWriter {
 public:
  ImageWriter(const Cache& cache, const SegmentEntry& entry, std::span<const size_t> indexes)
      : cache_(cache), entry_(entry), indexes_(indexes) {}

  ImageHeader& header() { return header_; }
  // Lists the sections, and computes all of the header but its checksums.
  void Plan(bool is_open);
  // Writes the file. Errors: those of ImageFileError; kCancelled
  absl::Status Write(const FileDescriptor& file, const std::string& name,
                     const std::function<bool()>& keep_going);

 private:
  void Add(ImageSectionKind kind, uint32_t layer_slot, size_t part,
           std::span<const std::byte> bytes);
  uint32_t CrcOf(std::span<const std::byte> bytes, uint32_t seed = 0) const {
    return kernels::Crc32c(cache_.compute.exec, bytes, seed);
  }
  // Sums and writes one MiB of the sections. Returns 0, or an errno.
  int WriteChunk(int file, uint32_t chunk);

  const Cache& cache_;
  const SegmentEntry& entry_;
  const std::span<const size_t> indexes_;
  ImageHeader header_;
  std::vector<ImageLayer> layers_;
  std::vector<ImageSection> sections_;
  std::vector<const std::byte*> memory_;  // of each section
  std::vector<uint32_t> checksums_;       // with padding
};

void ImageWriter::Add(ImageSectionKind kind, uint32_t layer_slot, size_t part,
                      std::span<const std::byte> bytes) {
  sections_.push_back({.kind = kind,
                       .layer_slot = layer_slot,
                       .part = static_cast<uint32_t>(part),
                       .codebook_crc = kind == ImageSectionKind::kCodebook ? CrcOf(bytes) : 0,
                       .offset_bytes = header_.data_bytes,
                       .size_bytes = bytes.size()});
  memory_.push_back(bytes.data());
  header_.data_bytes += ImageAligned(bytes.size());
}

void ImageWriter::Plan(bool is_open) {
  const SegmentRows& rows = *entry_.rows;
  // A segment that was written when it was shared may still get rows and codes of its owner.
  const bool has_codes = entry_.use == nullptr || entry_.use->tail() == nullptr;
  uint32_t slots = entry_.token_end - rows.first_position();
  for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
    layers_.push_back(ImageLayerOf(cache_.layers.layers[slot]));
    if (!has_codes || !cache_.layers.layers[slot].shape.has_index()) continue;
    // Graphs walk over all slots that were counted, of which this sequence may have fewer.
    for (const size_t index : indexes_) {
      slots = std::max(slots, entry_.indexes[index]->header(slot).counted_end.load());
    }
  }
  header_.is_open = is_open && !has_codes;  // with codes: a writer closed it concurrently
  header_.has_codes = has_codes;
  header_.first_position = rows.first_position();
  header_.token_end = entry_.token_end;
  header_.slot_count = slots;
  header_.slot_capacity = rows.slot_capacity();
  for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
    const StoredLayers::Layer& layer = cache_.layers.layers[slot];
    const size_t bytes = size_t{slots} * layer.shape.row_bytes;
    for (uint32_t head = 0; head < layer.shape.kv_heads; ++head) {
      Add(ImageSectionKind::kRows, slot, head, {rows.rows(layer.first_head + head), bytes});
    }
  }
  for (size_t i = 0; i < indexes_.size(); ++i) {
    const SegmentIndex& index = *entry_.indexes[indexes_[i]];
    for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
      const LayerShape& shape = cache_.layers.layers[slot].shape;
      if (!shape.has_index()) continue;
      const auto* const codebook =
          reinterpret_cast<const std::byte*>(&index.codebook(slot)->header());
      Add(ImageSectionKind::kCodebook, slot, i,
          {codebook, Codebook::SizeBytes(index.index(), shape)});
      if (!has_codes) continue;
      Add(ImageSectionKind::kIndexData, slot, i,
          {index.layer(slot).data->data(),
           SegmentIndex::LayerBytes(index.index(), shape, rows.slot_capacity())});
    }
  }
  header_.layer_count = static_cast<uint32_t>(layers_.size());
  header_.section_count = static_cast<uint32_t>(sections_.size());
  header_.header_bytes =
      static_cast<uint32_t>(ImageAligned(sizeof(header_) + layers_.size() * sizeof(ImageLayer) +
                                         sections_.size() * sizeof(ImageSection)));
  for (ImageSection& section : sections_) section.offset_bytes += header_.header_bytes;
  header_.chunk_count =
      static_cast<uint32_t>((header_.data_bytes + kImageChunkBytes - 1) / kImageChunkBytes);
  checksums_.resize(ImageAligned(header_.chunk_count * sizeof(uint32_t)) / sizeof(uint32_t));
  header_.file_bytes =
      header_.header_bytes + header_.data_bytes + checksums_.size() * sizeof(uint32_t);
}

int ImageWriter::WriteChunk(int file, uint32_t chunk) {
  const uint64_t begin = header_.header_bytes + uint64_t{chunk} * kImageChunkBytes;
  const uint64_t end =
      std::min(begin + kImageChunkBytes, header_.header_bytes + header_.data_bytes);
  const auto next = std::upper_bound(
      sections_.begin(), sections_.end(), begin,
      [](uint64_t wanted, const ImageSection& each) { return wanted < each.offset_bytes; });
  std::vector<std::span<const std::byte>> pieces;
  for (size_t i = static_cast<size_t>(next - sections_.begin()) - 1;
       i < sections_.size() && sections_[i].offset_bytes < end; ++i) {
    const ImageSection& section = sections_[i];
    const uint64_t content_end = section.offset_bytes + section.size_bytes;
    const uint64_t from = std::max(begin, section.offset_bytes);
    if (from < content_end) {
      pieces.emplace_back(memory_[i] + (from - section.offset_bytes),
                          std::min(end, content_end) - from);
    }
    const uint64_t padding = ImageAligned(section.size_bytes) - section.size_bytes;
    if (padding > 0 && content_end >= begin && content_end < end) {
      pieces.emplace_back(kPadding, padding);  // a chunk ends between two sections or in content
    }
  }
  uint32_t crc = 0;
  for (const std::span<const std::byte> piece : pieces) crc = CrcOf(piece, crc);
  checksums_[chunk] = crc;
  return WriteAllAt(file, begin, pieces);
}

absl::Status ImageWriter::Write(const FileDescriptor& file, const std::string& name,
                                const std::function<bool()>& keep_going) {
  std::atomic<int> error = 0;
  std::atomic<bool> cancelled = false;
  cache_.compute.building.parallel_for().run(header_.chunk_count, [&](uint32_t chunk, uint32_t) {
    if (error != 0 || cancelled) return;
    if (keep_going && !keep_going()) {
      cancelled = true;
      return;
    }
    if (const int found = WriteChunk(file.get(), chunk); found != 0) error = found;
  });
  if (cancelled) return Cancelled("the export was given up");
  if (error != 0) return ImageFileError(name, error);
  std::vector<std::byte> head(header_.header_bytes);
  std::byte* next = head.data();
  const auto append = [&next](const void* from, size_t bytes) {
    std::memcpy(next, from, bytes);
    next += bytes;
  };
  append(&header_, sizeof(header_));
  append(layers_.data(), layers_.size() * sizeof(ImageLayer));
  append(sections_.data(), sections_.size() * sizeof(ImageSection));
  const std::span<const std::byte> table = std::as_bytes(std::span<const uint32_t>(checksums_));
  header_.header_crc = HeaderCrc(cache_.compute.exec, head);
  header_.image_crc = CrcOf(table, header_.header_crc);
  std::memcpy(head.data(), &header_, sizeof(header_));
  std::span<const std::byte> piece = table;
  int failed = WriteAllAt(file.get(), header_.header_bytes + header_.data_bytes, {&piece, 1});
  piece = head;
  if (failed == 0) failed = WriteAllAt(file.get(), 0, {&piece, 1});
  if (failed == 0 && fsync(file.get()) != 0) failed = errno;
  return failed == 0 ? absl::OkStatus() : ImageFileError(name, failed);
}

// Fills in the fields that a manifest and its images share.
template <class Header>
void Identify(const ExportSource& source, std::span<const size_t> indexes, Header& header) {
  const CacheSpec& spec = source.cache.spec;
  header.index_count = static_cast<uint32_t>(indexes.size());
  for (size_t i = 0; i < indexes.size(); ++i) {
    header.indexes[i] = source.snapshot->list->indexes[indexes[i]];
  }
  header.cache_key = PrefixRoot(source.cache.tenant, spec, /*extra_key=*/{});
  header.tenant_key = TenantKey(source.cache.tenant);
  header.fingerprint_bytes = static_cast<uint32_t>(spec.model_fingerprint.size());
  std::memcpy(header.fingerprint, spec.model_fingerprint.data(), spec.model_fingerprint.size());
}

absl::Status WriteManifest(const NewImageFolder& folder, const kernels::Exec& exec,
                           ManifestHeader header, std::span<const ManifestImage> images,
                           std::span<const uint32_t> names) {
  header.image_count = static_cast<uint32_t>(images.size());
  header.name_word_count = names.size();
  header.file_bytes = sizeof(header) + images.size_bytes() + names.size_bytes();
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(reinterpret_cast<const char*>(images.data()), images.size_bytes());
  bytes.append(reinterpret_cast<const char*>(names.data()), names.size_bytes());
  header.crc = ManifestCrc(exec, std::as_bytes(std::span(bytes)));
  std::memcpy(bytes.data(), &header, sizeof(header));
  ASSIGN_OR_RETURN(const FileDescriptor file, folder.CreateFile(kManifestName));
  const std::span<const std::byte> all = std::as_bytes(std::span(bytes));
  int failed = WriteAllAt(file.get(), 0, {&all, 1});
  if (failed == 0 && fsync(file.get()) != 0) failed = errno;
  return failed == 0 ? absl::OkStatus() : ImageFileError(kManifestName, failed);
}

}  // namespace

absl::StatusOr<ExportedSequence> WriteImages(const ExportSource& source, const ImagePlace& place) {
  const SegmentList& list = *source.snapshot->list;
  if (list.segments.empty()) {
    return FailedPrecondition("token_count", "0; the sequence has no tokens");
  }
  ASSIGN_OR_RETURN(NewImageFolder folder, NewImageFolder::Create(place));
  const std::vector<size_t> indexes = ExportedIndexes(list);
  std::vector<uint32_t> names = source.names.words;
  if (names.size() > kMaxImageNameWords) names.resize(kMaxImageNameWords);
  const std::vector<PrefixKey> keys = ChainOf(source.root, {source.names.kind, names});
  ManifestHeader manifest;
  Identify(source, indexes, manifest);
  manifest.name_kind = static_cast<uint32_t>(source.names.kind);
  manifest.token_count = source.snapshot->token_count();
  manifest.prefill_closed = list.prefill_closed ? 1 : 0;
  manifest.root = source.root;
  std::vector<ManifestImage> images;
  ExportedSequence exported{.token_count = manifest.token_count};
  for (const SegmentEntry& entry : list.segments) {
    const std::string name = ImageName(static_cast<uint32_t>(images.size()));
    ImageWriter image(source.cache, entry, indexes);
    ImageHeader& header = image.header();
    Identify(source, indexes, header);
    header.prefix_begin = StepKeyAt(keys, entry.rows->first_position());
    header.prefix_end = StepKeyAt(keys, entry.token_end);
    image.Plan(source.has_active_segment && &entry == &list.segments.back());
    ASSIGN_OR_RETURN(const FileDescriptor file, folder.CreateFile(name.c_str()));
    RETURN_IF_ERROR(image.Write(file, name, place.keep_going));
    images.push_back({.first_position = header.first_position,
                      .token_end = header.token_end,
                      .is_open = header.is_open,
                      .image_crc = header.image_crc,
                      .file_bytes = header.file_bytes});
    exported.bytes += header.file_bytes;
  }
  RETURN_IF_ERROR(WriteManifest(folder, source.cache.compute.exec, manifest, images, names));
  RETURN_IF_ERROR(folder.Publish());
  exported.image_count = static_cast<uint32_t>(images.size());
  exported.bytes += sizeof(ManifestHeader) + images.size() * sizeof(ManifestImage) +
                    names.size() * sizeof(uint32_t);
  return exported;
}

}  // namespace pqcached::kvstore
