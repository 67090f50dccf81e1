// Calls on page caches: a page that is found has the bytes that belong to its key.
#include <string>

#include "tests/fuzz/handlers/calls.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using absl::StatusCode;

constexpr size_t kKeys = 40;  // of pages that the page cache has no room for together

std::string PageKeyOf(size_t number) {
  return "the page of number " + std::to_string(number) + std::string(number % 40, '.');
}

std::string PageContentOf(size_t number) {
  return std::string(1 + number * 2000, static_cast<char>('a' + number % 26));
}

void PutPages(World& world, Tenant& tenant, uint64_t cache_id, Bytes& bytes) {
  v1::PutPagesRequest request;
  request.set_cache_id(cache_id);
  for (size_t count = 1 + bytes.Below(3); count > 0; --count) {
    const size_t number = bytes.Below(kKeys);
    v1::Page& page = *request.add_pages();
    page.set_key(PageKeyOf(number));
    page.set_content(PageContentOf(number));
  }
  v1::PutPagesResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, StatusCode::kOk)) return;
  if (response.outcomes_size() != request.pages_size()) Found("another number of outcomes");
}

void GetPages(World& world, Tenant& tenant, uint64_t cache_id, Bytes& bytes) {
  v1::GetPagesRequest request;
  request.set_cache_id(cache_id);
  const size_t number = bytes.Below(kKeys);
  request.add_pages()->set_key(PageKeyOf(number));
  const std::string content = PageContentOf(number);
  request.mutable_pages(0)->set_capacity_bytes(content.size());
  v1::GetPagesResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, StatusCode::kOk)) return;
  if (response.pages_size() != 1) Found("another number of pages");
  if (tenant.has_loose_pages || response.pages(0).size_bytes() == 0) return;
  if (response.pages(0).content() != content) Found("a page with other bytes");
}

void FindPages(World& world, Tenant& tenant, uint64_t cache_id, Bytes& bytes) {
  v1::FindPagesRequest request;
  request.set_cache_id(cache_id);
  const size_t number = bytes.Below(kKeys);
  request.add_keys(PageKeyOf(number));
  v1::FindPagesResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, StatusCode::kOk)) return;
  if (response.size_bytes_size() != 1) Found("another number of sizes");
  const uint64_t size_bytes = response.size_bytes(0);
  if (tenant.has_loose_pages || size_bytes == 0) return;
  if (size_bytes != PageContentOf(number).size()) Found("a page of another size");
}

}  // namespace

void Pages(World& world, Tenant& tenant, Bytes& bytes) {
  const uint8_t kind = bytes.Byte();
  v1::OpenPageCacheRequest request;
  request.set_name("pages");
  request.set_capacity_bytes(size_t{1} << 20);
  v1::OpenPageCacheResponse opened;
  // What it may open stays until the sidecar ends.
  static const uint8_t kUnchanged[] = {0};
  Bytes none(kUnchanged, sizeof(kUnchanged));
  const World::Result result = world.Call(tenant, request, &opened, world.is_slow() ? bytes : none);
  if (!world.Expect(tenant, result, request, StatusCode::kOk, /*may_lack=*/true)) return;
  if (kind % 3 == 0) PutPages(world, tenant, opened.cache_id(), bytes);
  if (kind % 3 == 1) GetPages(world, tenant, opened.cache_id(), bytes);
  if (kind % 3 == 2) FindPages(world, tenant, opened.cache_id(), bytes);
}

}  // namespace pqcached::fuzz
