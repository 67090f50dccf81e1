// Store's calls on segment images.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kvstore/checksum/verify.h"
#include "kvstore/image/export.h"
#include "kvstore/image/image_files.h"
#include "kvstore/image/import.h"
#include "kvstore/refusal.h"
#include "kvstore/store/store_impl.h"

namespace pqcached::kvstore {
namespace {

struct SharedBegin {
  uint32_t tokens = 0;
  std::shared_ptr<const Snapshot> snapshot = nullptr;
};

bool HasReadyIndexes(const Snapshot& snapshot, std::span<const IndexDescriptor> indexes) {
  return std::all_of(indexes.begin(), indexes.end(), [&](const IndexDescriptor& index) {
    const size_t ordinal = snapshot.list->Find(index);
    return ordinal < snapshot.list->indexes.size() && snapshot.list->index_ready(ordinal);
  });
}

// Finds the longest stored prefix of the folder's tokens that ends with an image and has its
// indexes. `chain`: the root, then the key of each named step.
SharedBegin FindSharedBegin(const Cache& cache, const ParsedManifest& manifest,
                            std::span<const PrefixKey> chain) {
  for (auto image = manifest.images.rbegin(); image != manifest.images.rend(); ++image) {
    const size_t steps = (image->token_end + kPrefixStepTokens - 1) / kPrefixStepTokens;
    if (steps >= chain.size()) continue;
    for (const auto& holder : cache.prefixes->Holders(chain[steps])) {
      auto snapshot = holder->ShareStep(steps - 1, chain[steps]);
      if (snapshot == nullptr || !HasReadyIndexes(*snapshot, manifest.indexes())) continue;
      return {.tokens = image->token_end, .snapshot = std::move(snapshot)};
    }
  }
  return {};
}

}  // namespace

absl::StatusOr<ExportedSequence> StoreImpl::ExportSequence(std::string_view tenant,
                                                           uint64_t sequence_id,
                                                           const ImagePlace& place) {
  RETURN_IF_ERROR(OpenImageDirectory(place).status());
  ASSIGN_OR_RETURN(const auto found, FindForAdmin(tenant, sequence_id));
  ASSIGN_OR_RETURN(const auto newest, found.sequence->Peek());
  ASSIGN_OR_RETURN(auto shared,
                   found.names->Share(newest->token_count(), /*partial_indexes=*/false));
  const SegmentList& list = *shared.snapshot->list;
  RETURN_IF_ERROR(VerifyList(*found.cache, list));
  const SegmentRows* const tail = newest->list->tail();
  const bool has_active =
      tail != nullptr && !list.segments.empty() && list.segments.back().rows.get() == tail;
  return WriteImages({.cache = *found.cache,
                      .snapshot = std::move(shared.snapshot),
                      .names = std::move(shared.names),
                      .root = found.names->root(),
                      .has_active_segment = has_active},
                     place);
}

absl::StatusOr<ImportedSequence> StoreImpl::ImportSequence(std::string_view tenant,
                                                           uint64_t cache_id,
                                                           const ImagePlace& place) {
  ASSIGN_OR_RETURN(const FileDescriptor directory, OpenImageDirectory(place));
  ASSIGN_OR_RETURN(const auto cache, caches_.FindKind(tenant, cache_id, CacheKind::kRows));
  ImageFolder folder;
  RETURN_IF_ERROR(
      ImageStatus(ImageFolder::Open(compute_.exec, directory.get(), place.name.c_str(), &folder)));
  RETURN_IF_ERROR(CheckFolder(*cache, folder));
  const ParsedManifest& manifest = folder.manifest();
  const NameView names(static_cast<NameKind>(manifest.header.name_kind), manifest.names);
  const std::vector<PrefixKey> chain = ChainOf(manifest.header.root, names);
  SharedBegin shared = FindSharedBegin(*cache, manifest, chain);
  ASSIGN_OR_RETURN(ReadImages read, ReadImagesOf(*cache, folder, chain, shared.tokens,
                                                 std::move(shared.snapshot), place.keep_going));
  ASSIGN_OR_RETURN(
      const CreatedSequence created,
      lifecycle_.AddPrefix(cache, std::move(read.snapshot), manifest.header.root, names));
  return ImportedSequence{.sequence_id = created.sequence_id,
                          .token_count = created.token_count,
                          .shared_tokens = shared.tokens,
                          .image_count = read.image_count,
                          .bytes = read.bytes};
}

}  // namespace pqcached::kvstore
