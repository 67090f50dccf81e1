// An engine that replaces operator new, as programs with an allocator of their own do: here one
// that puts a mark before each block and aborts when it is handed a block without. Memory of one
// allocator must never reach the other.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/process.h"
#include "tests/sanitizers.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {

constexpr size_t kMarkBytes = 16;
constexpr uint64_t kMark = 0x7065717561646572;

void* Allocate(size_t size) {
  void* block = std::malloc(size + kMarkBytes);
  if (!block) throw std::bad_alloc();
  std::memcpy(block, &kMark, sizeof(kMark));
  return static_cast<std::byte*>(block) + kMarkBytes;
}

void Free(void* memory) {
  if (!memory) return;
  void* block = static_cast<std::byte*>(memory) - kMarkBytes;
  uint64_t mark;
  std::memcpy(&mark, block, sizeof(mark));
  if (mark != kMark) std::abort();
  std::memset(block, 0, sizeof(mark));
  std::free(block);
}

}  // namespace

__attribute__((visibility("default"))) void* operator new(size_t size) { return Allocate(size); }
__attribute__((visibility("default"))) void* operator new[](size_t size) { return Allocate(size); }
__attribute__((visibility("default"))) void operator delete(void* memory) noexcept { Free(memory); }
__attribute__((visibility("default"))) void operator delete[](void* memory) noexcept {
  Free(memory);
}
__attribute__((visibility("default"))) void operator delete(void* memory, size_t) noexcept {
  Free(memory);
}
__attribute__((visibility("default"))) void operator delete[](void* memory, size_t) noexcept {
  Free(memory);
}
#endif

namespace pqcached {
namespace {

TEST(ReplacedAllocatorTest, TheClientWorksWithTheEnginesAllocator) {
  const testing::TempFolder folder;
  testing::Process sidecar({PQCACHED_FAKE_SIDECAR, folder.File("s"), "good"});
  ASSERT_TRUE(sidecar.WaitForLine("ready"));
  for (int repeat = 0; repeat < 2; ++repeat) {
    Result<Client> client = Client::Open({.endpoint = "unix:" + folder.File("s")});
    ASSERT_TRUE(client.ok()) << client.status().ToString();
    Result<Cache> cache = client->OpenCache({.name = "cache",
                                             .model_fingerprint = "model",
                                             .groups = {{.layers = {0},
                                                         .kv_heads = 2,
                                                         .query_heads = 4,
                                                         .key_dim = 32,
                                                         .value_dim = 32,
                                                         .dtype = PQC_F32}},
                                             .capacity_bytes = 1 << 20});
    ASSERT_TRUE(cache.ok()) << cache.status().ToString();
    Result<Sequence> sequence = cache->CreateSequence();
    ASSERT_TRUE(sequence.ok()) << sequence.status().ToString();
    const std::vector<float> rows(5000 * 2 * 32), queries(4 * 32);
    const Status ingested = sequence->Ingest(0, 0, {rows, {5000, 2, 32}}, {rows, {5000, 2, 32}});
    EXPECT_TRUE(ingested.ok()) << ingested.ToString();
    const Query query{.layer = 0, .query_position = 99, .queries = {queries, {4, 32}}};
    const Result<Attention> attention = sequence->Attend(query, {.ratio = 0.5});
    EXPECT_TRUE(attention.ok()) << attention.status().ToString();
    EXPECT_EQ(client->AdminJson("Nonsense").status().code(), PQC_INVALID_ARGUMENT);
    const Result<std::string> info = client->AdminJson("GetServerInfo");
    EXPECT_TRUE(info.ok()) << info.status().ToString();
  }
}

}  // namespace
}  // namespace pqcached
