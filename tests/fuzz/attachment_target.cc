// Fuzz target: attachments, as a client decodes them. Nothing that passes the checks may lead outside
// the pool.
#include <memory>

#include "tests/fuzz/images.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {

std::vector<std::string> Seeds() { return ImageSeeds(); }

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pqcached::fuzz;  // NOLINT: a target's one function
  // The pool ends where its memory does: the sanitizer sees what lies beyond.
  static const std::unique_ptr<std::byte[]> pool(new std::byte[kImagePoolBytes]());
  Bytes bytes(data, size);
  const std::vector<std::byte> image = ImageOf(bytes, pool.get());
  pqcached::kvstore::Attachment attachment;
  if (!ParseAttachment(image, kImagePoolBytes, &attachment).empty()) return 0;
  for (uint32_t slot = 0; slot <= pqcached::kvstore::kMaxIndexes; ++slot) {
    pqcached::kvstore::MappedLayer mapped;
    const std::string wrong = pqcached::kvstore::MappedLayer::Make(
        attachment, kImageLayer, ImageShape(), slot, pool.get(), &mapped);
    if (!wrong.empty()) continue;
    for (const uint32_t tokens : {0u, 1u, attachment.header.token_count, ~0u}) {
      ReadAll(mapped, pool.get(), tokens);
    }
  }
  return 0;
}
