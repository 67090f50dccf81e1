// How long a store takes to recover 1 GiB of rows after a kill.
//
// PROGRAM --json FILE: writes the row recovery_ms_per_gib of area `recovery`.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "tests/fault/crash/kept_memory.h"
#include "tests/kvstore/content.h"

namespace pqcached::kvstore::testing {
namespace {

constexpr uint32_t kSequences = 16;
constexpr uint32_t kTokens = 65'536;
constexpr uint32_t kChunkTokens = 4096;

CacheSpec Spec() {
  CacheSpec spec = SmallSpec("large");
  spec.capacity_bytes = size_t{1280} << 20;
  spec.groups[0] = {.kind = LayerKind::kSelected,
                    .layers = {0, 1},
                    .kv_heads = 1,
                    .query_heads = 1,
                    .key_dim = 128,
                    .value_dim = 128,
                    .dtype = kernels::DType::kF16};
  return spec;
}

absl::StatusOr<std::unique_ptr<Store>> OpenStore(DescriptorKeeper& keeper) {
  StoreOptions options;
  options.keeper = &keeper;
  return Store::Create(options);
}

absl::Status Fill(DescriptorKeeper& keeper) {
  const auto store = OpenStore(keeper);
  if (!store.ok()) return store.status();
  const auto cache = (*store)->OpenCache(kTenant, Spec());
  if (!cache.ok()) return cache.status();
  const Content content(kChunkTokens, 7);
  for (uint32_t i = 0; i < kSequences; ++i) {
    const auto made = (*store)->CreateSequence(kTenant, cache->cache_id, {.session = "session"});
    if (!made.ok()) return made.status();
    for (uint32_t begin = 0; begin < kTokens; begin += kChunkTokens) {
      const auto count =
          IngestContent(**store, made->sequence_id, Spec().groups[0], begin, content, kChunkTokens);
      if (!count.ok()) return count.status();
    }
  }
  kill(getpid(), SIGKILL);
  return absl::OkStatus();
}

// Returns ms per GiB in use; negative when something is lost.
double Recover(DescriptorKeeper& keeper) {
  const auto store = OpenStore(keeper);
  if (!store.ok()) return -1;
  uint64_t tokens = 0;
  for (const CacheInfo& cache : (*store)->ListCaches(kTenant)) {
    const auto sequences = (*store)->ListSequences(kTenant, cache.cache_id);
    if (!sequences.ok()) return -1;
    for (const SequenceInfo& info : *sequences) tokens += info.token_count;
  }
  if (tokens != uint64_t{kSequences} * kTokens) return -1;
  const RecoveryReport report = (*store)->Recovery();
  return 1e3 * report.seconds / (static_cast<double>(report.bytes) / (1u << 30));
}

}  // namespace
}  // namespace pqcached::kvstore::testing

int main(int argc, char** argv) {
  using namespace pqcached::kvstore::testing;
  if (argc != 3 || std::strcmp(argv[1], "--json") != 0) return 2;
  SharedKeeper keeper;
  const pid_t child = fork();
  if (child == 0) {
    keeper.Begin();
    std::fprintf(stderr, "%s\n", Fill(keeper).ToString().c_str());
    _exit(1);  // it was not killed
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFSIGNALED(status)) return 1;
  keeper.Begin();
  const double ms = Recover(keeper);
  std::printf("%.2f ms per GiB\n", ms);
  std::ofstream(argv[2])
      << "[{\"area\": \"recovery\", \"name\": \"recovery_ms_per_gib\", \"value\": "
      << (ms < 0 ? "null" : std::to_string(ms)) << "}]\n";
  return ms < 0 ? 1 : 0;
}
