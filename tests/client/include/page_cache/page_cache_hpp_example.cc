// The example of page_cache.hpp, compiled. It is not run, because it needs a sidecar.
#include "pqcached/page_cache.hpp"

#include <span>
#include <string_view>

void UsePage(std::span<const std::byte> page);
pqcached::Status PageCacheHppExample(pqcached::Client& client, std::string_view key,
                                     std::span<const std::byte> content,
                                     std::span<std::byte> buffer);

// clang-format off
pqcached::Status PageCacheHppExample(pqcached::Client& client, std::string_view key,
                                     std::span<const std::byte> content,
                                     std::span<std::byte> buffer) {
  // [example]
  auto cache = pqcached::PageCache::Open(client, {.name = "pages", .capacity_bytes = 1 << 30});
  if (!cache.ok()) return cache.status();
  pqcached::PageSource source{.key = key, .data = content};
  if (auto status = cache->Put({&source, 1}); !status.ok()) return status;
  pqcached::PageTarget target{.key = key, .data = buffer};
  if (auto status = cache->Get({&target, 1}); !status.ok()) return status;
  if (target.outcome == PQC_PAGE_FOUND) UsePage(buffer.first(target.size_bytes));
  // [/example]
  return {};
}
// clang-format on
