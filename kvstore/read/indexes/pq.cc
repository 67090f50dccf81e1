#include "kvstore/read/indexes/pq.h"

#include <iterator>

#include "kernels/base/check.h"

namespace pqcached::kvstore {
namespace {

enum Parameter : size_t { kSubspaces, kBits, kLayout };

constexpr std::string_view kLayouts[] = {"pairs", "contiguous"};

constexpr IndexParameter kParameters[] = {
    {.name = "subspaces",
     .text = "m, the number of sub-spaces that a key is cut into; divides the key dimension",
     .least = 1,
     .most = 16,
     .default_value = 4,
     .power_of_two = true},
    {.name = "bits",
     .text = "b, the bits of a code: 2^b centroids per sub-space",
     .least = 4,
     .most = 8,
     .default_value = 8},
    {.name = "layout",
     .text = "the cut of sub-spaces: pairs keeps the pairs of a rotary embedding together, "
             "contiguous takes consecutive dims",
     .least = 0,
     .most = 1,
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
  if (key_dim % index.subspace_count == 0) return {};
  return {
      StatusCode::kInvalidArgument, std::string(field) + ".pq.subspaces",
      std::to_string(index.subspace_count) + ", must divide key_dim, " + std::to_string(key_dim)};
}

std::string PqIndex::NameOf(const IndexDescriptor& index) const {
  return std::string("pq m=") + std::to_string(index.subspace_count) +
         " b=" + std::to_string(index.bits) +
         (index.layout == SubspaceLayout::kContiguous ? " contiguous" : "");
}

}  // namespace pqcached::kvstore
