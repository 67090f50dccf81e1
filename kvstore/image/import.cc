#include "kvstore/image/import.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"
#include "kvstore/index/layer_build.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

absl::Status OtherLayer(uint32_t slot, absl::string_view name, uint64_t image, uint64_t cache) {
  return FailedPrecondition("layer_groups", absl::StrCat("layers[", slot, "].", name, " is ", image,
                                                         "; the cache has ", cache));
}

// Compares the layers of an image with those of the cache.
absl::Status CheckImageLayers(const Cache& cache, const ParsedImage& image) {
  const std::vector<StoredLayers::Layer>& layers = cache.layers.layers;
  if (image.layers.size() != layers.size()) {
    return FailedPrecondition(
        "layer_groups",
        absl::StrCat(image.layers.size(), " stored layers; the cache has ", layers.size()));
  }
  for (uint32_t slot = 0; slot < layers.size(); ++slot) {
    const LayerShape& shape = layers[slot].shape;
    const ImageLayer& found = image.layers[slot];
    const std::tuple<const char*, uint64_t, uint64_t> numbers[] = {
        {"layer", found.layer, layers[slot].layer},
        {"kind", found.kind, static_cast<uint64_t>(shape.kind)},
        {"dtype", found.dtype, static_cast<uint64_t>(shape.dtype)},
        {"kv_heads", found.kv_heads, shape.kv_heads},
        {"query_heads", found.query_heads, shape.query_heads},
        {"key_dim", found.key_dim, shape.key_dim},
        {"value_dim", found.value_dim, shape.value_dim},
        {"rope", found.half_rotary_dim, shape.half_rotary_dim}};
    for (const auto& [name, theirs, ours] : numbers) {
      if (theirs != ours) return OtherLayer(slot, name, theirs, ours);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckImageIndexes(const Cache& cache, std::span<const IndexDescriptor> indexes) {
  for (size_t i = 0; i < indexes.size(); ++i) {
    const auto begin = indexes.begin();
    if (!IsBuilt(indexes[i]) || IsPlugin(indexes[i]) ||
        std::find(begin, begin + static_cast<ptrdiff_t>(i), indexes[i]) !=
            begin + static_cast<ptrdiff_t>(i)) {
      return FailedPrecondition(absl::StrCat("index[", i, "]"),
                                "is of a kind that this sidecar does not have, or is there twice");
    }
    RETURN_IF_ERROR(CheckIndexOf(cache, indexes[i], absl::StrCat("index[", i, "]")));
  }
  return absl::OkStatus();
}

// Returns whether searches are safe with any content of these index data. Searches compare graphs
// and clusters with their limits, but take the codes of a pq index as numbers of centroids, and its
// counts and lists as they are.
bool MayHoldAnything(const IndexDataHeader& header) {
  if (header.index.kind != IndexKind::kPq) return true;
  const bool any_code_exists =
      header.index.bits == 8 || (header.index.bits == 4 && header.index.subspace_count % 2 == 0);
  return any_code_exists && header.cell_count == 0;
}

// Memory that an image is read into, in the order of its sections.
struct ImageMemory {
  std::vector<Extent> extents;
  std::vector<std::byte*> targets;  // [sections]; null: bytes that are only verified
};

class ImagesReader {
 public:
  ImagesReader(const Cache& cache, const ImageFolder& folder, const std::vector<PrefixKey>& chain,
               const std::function<bool()>& keep_going)
      : cache_(cache), folder_(folder), chain_(chain), keep_going_(keep_going) {}

  // Allocates the memory of all images from number `first` on, and reads them.
  absl::StatusOr<std::vector<SegmentEntry>> Read(uint32_t first);
  uint64_t bytes() const { return bytes_; }

 private:
  // A codebook by its content: index, layer, checksum.
  using CodebookName = std::tuple<uint32_t, uint32_t, uint32_t>;

  absl::Status Open(uint32_t number, SegmentImageReader& reader) const;
  // Checks the sizes of codebooks and index data.
  absl::Status CheckSizes(uint32_t number, const ParsedImage& image) const;
  // Adds the sizes of an image's extents. A codebook that an earlier image has needs none.
  void AddSizes(const ParsedImage& image, std::vector<size_t>& sizes_bytes);
  bool NeedsMemory(const ImageSection& section) const;
  // Returns the bytes of a section's extent.
  size_t ExtentBytes(const ParsedImage& image, const ImageSection& section) const;
  // Takes the extents of an image, of which `next` is the first one. Errors: kDataLoss: they are
  // none of this image, because the file has changed since AddSizes.
  absl::StatusOr<ImageMemory> TakeMemory(uint32_t number, const ParsedImage& image,
                                         std::span<Extent>& next) const;
  absl::StatusOr<SegmentEntry> Assemble(uint32_t number, const ParsedImage& image,
                                        ImageMemory memory);
  absl::StatusOr<SegmentIndex::Layer> MakeLayer(uint32_t number, const ParsedImage& image,
                                                uint32_t layer_slot, const SegmentRows& rows,
                                                std::shared_ptr<const Codebook> codebook,
                                                Extent data) const;

  const Cache& cache_;
  const ImageFolder& folder_;
  const std::vector<PrefixKey>& chain_;
  const std::function<bool()>& keep_going_;
  std::map<CodebookName, bool> planned_;
  std::map<CodebookName, std::shared_ptr<const Codebook>> codebooks_;
  uint64_t bytes_ = 0;
};

absl::Status BadContent(uint32_t number, absl::string_view field, absl::string_view text) {
  return InvalidArgument(absl::StrCat(ImageName(number), ".", field), text);
}

absl::Status ImagesReader::Open(uint32_t number, SegmentImageReader& reader) const {
  RETURN_IF_ERROR(ImageStatus(folder_.OpenImage(number, &reader)));
  const ParsedImage& image = reader.image();
  RETURN_IF_ERROR(CheckImageLayers(cache_, image));
  const ImageHeader& header = image.header;
  if (header.prefix_begin != StepKeyAt(chain_, header.first_position)) {
    return BadContent(number, "prefix_begin", "is not the hash of the tokens before the segment");
  }
  if (header.prefix_end != StepKeyAt(chain_, header.token_end)) {
    return BadContent(number, "prefix_end", "is not the hash of the tokens of the segment");
  }
  return CheckSizes(number, image);
}

absl::Status ImagesReader::CheckSizes(uint32_t number, const ParsedImage& image) const {
  for (size_t i = 0; i < image.sections.size(); ++i) {
    const ImageSection& section = image.sections[i];
    if (section.kind == ImageSectionKind::kRows) continue;
    const LayerShape& shape = cache_.layers.layers[section.layer_slot].shape;
    const IndexDescriptor& index = image.header.indexes[section.part];
    const size_t wanted = section.kind == ImageSectionKind::kCodebook
                              ? Codebook::SizeBytes(index, shape)
                              : SegmentIndex::LayerBytes(index, shape, image.header.slot_capacity);
    if (section.size_bytes != wanted) {
      return BadContent(number, absl::StrCat("sections[", i, "].size_bytes"),
                        absl::StrCat(section.size_bytes, ", must be ", wanted));
    }
  }
  return absl::OkStatus();
}

void ImagesReader::AddSizes(const ParsedImage& image, std::vector<size_t>& sizes_bytes) {
  SegmentRows::AppendSizes(cache_.layers, image.header.slot_capacity, sizes_bytes);
  for (const ImageSection& section : image.sections) {
    if (section.kind == ImageSectionKind::kRows) continue;
    const CodebookName name{section.part, section.layer_slot, section.codebook_crc};
    if (section.kind == ImageSectionKind::kCodebook && !planned_.emplace(name, true).second) {
      continue;
    }
    sizes_bytes.push_back(section.size_bytes);
  }
}

bool ImagesReader::NeedsMemory(const ImageSection& section) const {
  return section.kind != ImageSectionKind::kCodebook ||
         !codebooks_.contains({section.part, section.layer_slot, section.codebook_crc});
}

size_t ImagesReader::ExtentBytes(const ParsedImage& image, const ImageSection& section) const {
  if (section.kind != ImageSectionKind::kRows) return section.size_bytes;
  return size_t{image.header.slot_capacity} *
         cache_.layers.layers[section.layer_slot].shape.row_bytes;
}

absl::StatusOr<ImageMemory> ImagesReader::TakeMemory(uint32_t number, const ParsedImage& image,
                                                     std::span<Extent>& next) const {
  ImageMemory memory;
  for (const ImageSection& section : image.sections) {
    if (!NeedsMemory(section)) {
      memory.extents.emplace_back();
      memory.targets.push_back(nullptr);
      continue;
    }
    if (next.empty() || next.front().size_bytes() < ExtentBytes(image, section)) {
      return ReplaceField(absl::StrCat(ImageName(number), ".file_bytes"),
                          DataLoss("the file has changed while it was read"));
    }
    memory.targets.push_back(next.front().data());
    memory.extents.push_back(std::move(next.front()));
    next = next.subspan(1);
  }
  return memory;
}

absl::StatusOr<SegmentIndex::Layer> ImagesReader::MakeLayer(
    uint32_t number, const ParsedImage& image, uint32_t layer_slot, const SegmentRows& rows,
    std::shared_ptr<const Codebook> codebook, Extent data) const {
  const ImageHeader& header = image.header;
  const LayerShape& shape = cache_.layers.layers[layer_slot].shape;
  if (header.has_codes != 0) {
    const auto& found = *reinterpret_cast<const IndexDataHeader*>(data.data());
    if (found.counted_end.load() > header.slot_count) {
      return BadContent(number, "slot_count", "is below the slots that the index data count");
    }
    const uint32_t slot_end = std::max(image.token_count(), found.counted_end.load());
    SegmentIndex::Layer layer =
        SegmentIndex::RecoverLayer(shape, rows.slot_capacity(), std::move(data), codebook);
    if (layer.data == nullptr) {
      return BadContent(number, absl::StrCat("index_data of layer slot ", layer_slot),
                        "their header does not fit the layer and the codebook");
    }
    if (MayHoldAnything(layer.header())) return layer;
    return CodeLayerAgain(cache_, layer_slot, rows, slot_end, std::move(layer), keep_going_);
  }
  const uint32_t tokens = image.token_count();
  if (header.is_open != 0) return CodeOpenLayer(cache_, layer_slot, rows, tokens, codebook);
  return CodeLayer(cache_, layer_slot, rows, tokens, /*sink_tokens=*/0, codebook, keep_going_);
}

absl::StatusOr<SegmentEntry> ImagesReader::Assemble(uint32_t number, const ParsedImage& image,
                                                    ImageMemory memory) {
  const ImageHeader& header = image.header;
  const auto rows_end = memory.extents.begin() + static_cast<ptrdiff_t>(cache_.layers.head_count);
  std::vector<Extent> row_extents(std::make_move_iterator(memory.extents.begin()),
                                  std::make_move_iterator(rows_end));
  SegmentEntry entry;
  entry.rows =
      std::make_shared<const SegmentRows>(cache_.counters.next_segment_id++, header.first_position,
                                          header.slot_capacity, std::move(row_extents));
  entry.closed = header.is_open == 0;
  entry.token_end = entry.closed ? header.token_end : 0;
  for (const IndexDescriptor& index : image.indexes()) {
    entry.indexes.push_back(std::make_shared<const SegmentIndex>(cache_.layers, index));
  }
  for (size_t i = cache_.layers.head_count; i < image.sections.size(); ++i) {
    const ImageSection& section = image.sections[i];
    const LayerShape& shape = cache_.layers.layers[section.layer_slot].shape;
    std::shared_ptr<const Codebook>& codebook =
        codebooks_[{section.part, section.layer_slot, section.codebook_crc}];
    if (codebook == nullptr) {
      const std::span<const std::byte> bytes(memory.targets[i], section.size_bytes);
      if (kernels::Crc32c(cache_.compute.exec, bytes) != section.codebook_crc) {
        return BadContent(number, absl::StrCat("sections[", i, "].codebook_crc"),
                          "differs from that of the codebook");
      }
      codebook =
          Codebook::Recover(std::move(memory.extents[i]), header.indexes[section.part], shape);
    }
    if (codebook == nullptr) {
      return BadContent(number, absl::StrCat("sections[", i, "]"),
                        "the header of the codebook does not fit the layer");
    }
    Extent data;
    if (header.has_codes != 0) data = std::move(memory.extents[++i]);  // it follows its codebook
    ASSIGN_OR_RETURN(auto layer, MakeLayer(number, image, section.layer_slot, *entry.rows, codebook,
                                           std::move(data)));
    std::shared_ptr<const SegmentIndex>& made = entry.indexes[section.part];
    made = made->With(section.layer_slot, std::move(layer));
  }
  return entry;
}

absl::StatusOr<std::vector<SegmentEntry>> ImagesReader::Read(uint32_t first) {
  std::vector<size_t> sizes_bytes;
  for (uint32_t number = first; number < folder_.image_count(); ++number) {
    SegmentImageReader reader;
    RETURN_IF_ERROR(Open(number, reader));
    AddSizes(reader.image(), sizes_bytes);
  }
  ASSIGN_OR_RETURN(std::vector<Extent> extents, cache_.pool->Allocate(sizes_bytes));
  std::span<Extent> next = extents;
  std::vector<SegmentEntry> entries;
  for (uint32_t number = first; number < folder_.image_count(); ++number) {
    SegmentImageReader reader;
    RETURN_IF_ERROR(Open(number, reader));
    ASSIGN_OR_RETURN(ImageMemory memory, TakeMemory(number, reader.image(), next));
    PQC_CRASH_POINT();
    const Refusal read =
        reader.ReadAll(cache_.compute.building.parallel_for(), memory.targets, keep_going_);
    if (read.code == StatusCode::kAborted) return Cancelled("the import was given up");
    RETURN_IF_ERROR(PrefixField(ImageName(number), ImageStatus(read)));
    ASSIGN_OR_RETURN(SegmentEntry entry, Assemble(number, reader.image(), std::move(memory)));
    entries.push_back(std::move(entry));
    bytes_ += reader.image().header.file_bytes;
  }
  return entries;
}

}  // namespace

absl::Status ImageStatus(const Refusal& refusal) { return ToStatus(refusal); }

absl::Status CheckFolder(const Cache& cache, const ImageFolder& folder) {
  const ParsedManifest& manifest = folder.manifest();
  if (manifest.fingerprint() != cache.spec.model_fingerprint) {
    return FailedPrecondition(
        "model_fingerprint",
        absl::StrCat("\"", std::string(manifest.fingerprint()), "\"; the cache has \"",
                     cache.spec.model_fingerprint, "\""));
  }
  if (manifest.header.tenant_key != TenantKey(cache.tenant)) {
    return FailedPrecondition("tenant", "the images belong to another tenant than the cache");
  }
  RETURN_IF_ERROR(CheckImageIndexes(cache, manifest.indexes()));
  SegmentImageReader first;
  RETURN_IF_ERROR(ImageStatus(folder.OpenImage(0, &first)));
  RETURN_IF_ERROR(CheckImageLayers(cache, first.image()));
  if (manifest.header.cache_key == PrefixRoot(cache.tenant, cache.spec, /*extra_key=*/{})) {
    return absl::OkStatus();
  }
  return FailedPrecondition("layer_groups",
                            "the cache has other groups, another RoPE or another rank");
}

absl::StatusOr<ReadImages> ReadImagesOf(const Cache& cache, const ImageFolder& folder,
                                        const std::vector<PrefixKey>& chain, uint32_t shared_tokens,
                                        std::shared_ptr<const Snapshot> shared,
                                        const std::function<bool()>& keep_going) {
  const ParsedManifest& manifest = folder.manifest();
  SegmentList list;
  list.indexes.assign(manifest.indexes().begin(), manifest.indexes().end());
  list.prefill_closed = manifest.header.prefill_closed != 0;
  if (shared != nullptr) {
    for (const SegmentEntry& entry : shared->list->segments) {
      if (entry.rows->first_position() >= shared_tokens) break;
      SegmentEntry cut = entry;
      cut.token_end = std::min(cut.token_end, shared_tokens);
      list.segments.push_back(std::move(cut));
    }
  }
  const auto first =
      static_cast<uint32_t>(std::find_if(manifest.images.begin(), manifest.images.end(),
                                         [&](const ManifestImage& each) {
                                           return each.first_position >= shared_tokens;
                                         }) -
                            manifest.images.begin());
  ImagesReader reader(cache, folder, chain, keep_going);
  ASSIGN_OR_RETURN(auto entries, reader.Read(first));
  std::move(entries.begin(), entries.end(), std::back_inserter(list.segments));
  return ReadImages{
      .snapshot = CompleteSnapshot(
          std::move(list), std::vector<uint32_t>(cache.layers.size(), manifest.header.token_count)),
      .image_count = folder.image_count() - first,
      .bytes = reader.bytes()};
}

}  // namespace pqcached::kvstore
