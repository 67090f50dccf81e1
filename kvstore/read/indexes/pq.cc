#include "kvstore/read/indexes/pq.h"

#include <iterator>

#include "kernels/base/check.h"

namespace pqcached::kvstore {
namespace {

enum Parameter : size_t { kSubspaces, kBits, kLayout };

constexpr std::string_view kLayouts[] = {"pairs", "contiguous", "weighted"};

constexpr IndexParameter kParameters[] = {
    {.name = "subspaces",
     .text =
         "m, the number of sub-spaces that a key is cut into; divides the key dimension, and is at "
         "most half of it. 1, 2, 4, 8 and 16 are fast",
     .least = 1,
     .most = kMaxHeadDim / 2,
     .default_value = 4},
    {.name = "bits",
     .text = "b, the bits of a code: 2^b centroids per sub-space. 4 to 8 are fast",
     .least = 1,
     .most = 8,
     .default_value = 8},
    {.name = "layout",
     .text = "the cut of sub-spaces: pairs keeps the pairs of a rotary embedding together, "
             "contiguous takes consecutive dims, weighted takes those of keys that are rotated so "
             "that scores have small errors, which needs query samples",
     .least = 0,
     .most = 2,
     .default_value = 0,
     .names = kLayouts},
};

}  // namespace

const IndexTypeInfo& PqIndex::info() const {
  static constexpr IndexTypeInfo kInfo = {
      .kind = IndexKind::kPq,
      .name = "pq",
      .text = "Product quantization of keys (PQCache).",
      .parameters = kParameters,
  };
  return kInfo;
}

uint32_t PqIndex::ValueOf(const IndexDescriptor& index, size_t parameter) const {
  switch (parameter) {
    case kSubspaces:
      return index.subspace_count;
    case kBits:
      return index.bits;
    default:
      return static_cast<uint32_t>(index.layout);
  }
}

void PqIndex::SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const {
  switch (parameter) {
    case kSubspaces:
      index->subspace_count = value;
      break;
    case kBits:
      index->bits = value;
      break;
    default:
      index->layout = static_cast<SubspaceLayout>(value);
  }
}

Refusal PqIndex::CheckFit(const IndexDescriptor& index, uint32_t key_dim, const char* field) const {
  const uint32_t subspaces = index.subspace_count;
  const auto refuse = [&](const std::string& must) -> Refusal {
    return {StatusCode::kInvalidArgument, JoinFields(field, "pq.subspaces"),
            std::to_string(subspaces) + ", must " + must + " key_dim, " + std::to_string(key_dim)};
  };
  if (key_dim % subspaces != 0) return refuse("divide");
  return subspaces == 1 || subspaces <= key_dim / 2 ? Refusal{} : refuse("be at most half of");
}

std::string PqIndex::NameOf(const IndexDescriptor& index) const {
  std::string name = std::string("pq m=") + std::to_string(index.subspace_count) +
                     " b=" + std::to_string(index.bits);
  if (index.layout != SubspaceLayout::kPairs) {
    name.append(" ").append(kLayouts[static_cast<size_t>(index.layout)]);
  }
  return name;
}

}  // namespace pqcached::kvstore
