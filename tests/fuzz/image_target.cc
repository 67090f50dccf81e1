// Fuzz target: segment maps as the client keeps them (client/local/image.h): what it reports of them
// agrees, and nothing leads outside the pool.
#include <sys/mman.h>
#include <unistd.h>

#include <memory>

#include "client/local/image.h"
#include "tests/fuzz/images.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using client::Image;

constexpr uint64_t kSequence = 11;

// A pool that the harness writes and the client maps.
struct Pool {
  std::byte* data = nullptr;
  std::shared_ptr<client::Mapping> mapping;

  Pool() {
    const int memory = memfd_create("pool", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, kImagePoolBytes) != 0) Found("no memory");
    data = static_cast<std::byte*>(
        mmap(nullptr, kImagePoolBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0));
    if (client::Mapping::Map(memory, kImagePoolBytes, client::MappingAccess::kRead, "pool",
                             &mapping) != PQC_OK) {
      Found("no mapping");
    }
  }
};

void Read(Image& image, const Pool& pool, uint32_t slot) {
  const uint32_t coded = image.CodedTokens(kImageLayer, slot);
  if (coded > image.capacity_tokens()) Found("more tokens are coded than fit");
  for (int time = 0; time < 2; ++time) {  // the second one takes what the first one gives back
    Image::Loan loan;
    if (image.Borrow(kImageLayer, ImageShape(), slot, &loan) != PQC_OK) return;
    if (loan.layer().ready() && slot < kvstore::kMaxIndexes && coded < image.capacity_tokens()) {
      Found("an index is ready that does not cover its layer");
    }
    for (const uint32_t tokens : {0u, 1u, image.LayerTokens(kImageLayer), ~0u}) {
      ReadAll(loan.layer(), pool.mapping->data(), tokens);
    }
  }
}

}  // namespace

std::vector<std::string> Seeds() { return ImageSeeds(); }

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pqcached::fuzz;  // NOLINT: a target's one function
  static const Pool pool;
  Bytes bytes(data, size);
  const std::vector<std::byte> map = ImageOf(bytes, pool.data);
  std::shared_ptr<Image> image;
  if (Image::Parse(map, kSequence, pool.mapping, &image) != PQC_OK) return 0;
  for (const auto& index :
       {pqcached::kvstore::IndexDescriptor{},
        pqcached::kvstore::IndexDescriptor{
            .kind = pqcached::kvstore::IndexKind::kPq, .subspace_count = 2, .bits = 4}}) {
    uint32_t slot = 0;
    if (image->FindIndex(index, &slot) == PQC_OK) Read(*image, pool, slot);
  }
  for (const uint32_t layer : {0u, kImageLayer, ~0u}) {
    if (image->LayerTokens(layer) > image->capacity_tokens()) Found("more tokens than fit");
  }
  return 0;
}
